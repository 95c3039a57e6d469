"""``paracle mcp``: serve the tools of sandboxes over the Model Context Protocol."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .exit_codes import ends_with_a_code
from .sandbox import AllowDegraded, Backend, Network

_FOR_A_PERSON = """\
This is an MCP server: an assistant starts it and speaks to it over stdin and stdout.
Name it in the assistant's configuration:

  {"mcpServers": {"sandbox": {"command": "paracle", "args": ["mcp"]}}}

To serve clients over HTTP: paracle mcp --http
It waits for a client now. Ctrl-C ends it."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
@ends_with_a_code
def mcp(
    http: Annotated[bool, typer.Option("--http", help="Serve many clients over HTTP.")] = False,
    host: Annotated[str, typer.Option(help="With --http: the address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --http: the port; 0 takes a free one.")] = 8765,
    memory: Annotated[int | None, typer.Option(help="Memory of a sandbox in MB.")] = None,
    cpu: Annotated[float | None, typer.Option(help="CPU cores of a sandbox.")] = None,
    network: Annotated[Network | None, typer.Option(help="Network of a sandbox.")] = None,
    max_sandboxes: Annotated[int, typer.Option(help="Sandboxes of all clients together.")] = 20,
    allow_degraded: AllowDegraded = None,
    backend: Backend = None,
) -> int:
    """Serve sandboxes to an MCP client, over stdin and stdout or over HTTP.

    Every client has its own sandboxes, and they end with it.

    \b
    Examples:
      paracle mcp
      paracle mcp --http --port 8765
      paracle mcp --network bridge --memory 1024
    """
    from ..mcp import transports
    from . import exit_codes, output
    from .execute import Order, make_config
    from .options import check_backend, settings_or_fault

    settings = settings_or_fault()
    check_backend(backend)
    limits = {"memory_mb": memory, "cpu_cores": cpu, "network_mode": network and network.value}
    order = Order(file="-", limits=limits, backend=backend, allow_degraded=allow_degraded or ())
    config = make_config(order, settings)
    if http:
        exit_codes.run(
            transports.serve_http(
                backend, config, max_sandboxes, host=host, port=port, key=settings.mcp_key,
                trusted_proxies=settings.trusted_proxies,
                on_start=lambda url: output.note(f"Serving MCP on {url}"),
            )
        )  # fmt: skip
    else:

        async def serve() -> None:
            if sys.stdin is not None and sys.stdin.isatty():
                output.note(_FOR_A_PERSON)
            await transports.serve_stdio(
                backend, config, max_sandboxes, exit_codes.leave_for_signal
            )

        exit_codes.run(serve())
    return exit_codes.SUCCESS
