"""``paracle mcp``: serve the tools of sandboxes over the Model Context Protocol."""

from __future__ import annotations

import sys
from argparse import Namespace

from .options import (
    ANY_COUNT,
    add_allow_degraded,
    add_backend,
    add_config_options,
    check_backend,
    given_limits,
    settings_or_fault,
)
from .parser import Command

_FOR_A_PERSON = """\
This is an MCP server: an assistant starts it and speaks to it over stdin and stdout.
Name it in the assistant's configuration:

  {"mcpServers": {"sandbox": {"command": "paracle", "args": ["mcp"]}}}

To serve clients over HTTP: paracle mcp --http
It waits for a client now. Ctrl-C ends it."""


def declare_mcp(command: Command) -> None:
    command.text = """\
        Serve sandboxes to an MCP client, over stdin and stdout or over HTTP.

        Every client has its own sandboxes, and they end with it.

        Examples:
          paracle mcp
          paracle mcp --http --port 8765
          paracle mcp --network bridge --memory 1024
        """
    command.switch("--http", help="Serve many clients over HTTP.")
    command.option(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="With --http: the address."
    )
    command.option(
        "--port", metavar="PORT", check=ANY_COUNT, default=8765,
        help="With --http: the port; 0 takes a free one.",
    )  # fmt: skip
    add_config_options(command, "--memory", "--cpu", "--network")
    command.option(
        "--max-sandboxes", metavar="NUMBER", check=ANY_COUNT, default=20,
        help="Sandboxes of all clients together.",
    )  # fmt: skip
    add_allow_degraded(command)
    add_backend(command)
    command.action = mcp


def mcp(given: Namespace) -> int:
    from ..mcp import transports
    from . import exit_codes, output
    from .execute import Order, make_config

    settings = settings_or_fault()
    check_backend(given.backend)
    order = Order(
        file="-", limits=given_limits(given), backend=given.backend,
        allow_degraded=given.allow_degraded or (),
    )  # fmt: skip
    config = make_config(order, settings)
    backend, most = given.backend, given.max_sandboxes
    if given.http:
        exit_codes.run(
            transports.serve_http(
                backend, config, most, host=given.host, port=given.port, key=settings.mcp_key,
                trusted_proxies=settings.trusted_proxies,
                on_start=lambda url: output.note(f"Serving MCP on {url}"),
            )
        )  # fmt: skip
    else:

        async def serve() -> None:
            if sys.stdin is not None and sys.stdin.isatty():
                output.note(_FOR_A_PERSON)
            await transports.serve_stdio(backend, config, most, exit_codes.leave_for_signal)

        exit_codes.run(serve())
    return exit_codes.SUCCESS
