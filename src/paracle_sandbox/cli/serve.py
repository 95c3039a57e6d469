"""``paracle serve``: the sandbox service on this machine."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from . import endings, output
from .endings import UsageFault, ends_with_a_code
from .options import check_backend, settings_or_fault

if TYPE_CHECKING:
    import socket

    from ..service.service import Service
    from ..settings import Settings

app = typer.Typer(
    help="Serve sandboxes over HTTP.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

INSTALL = "pip install 'paracle-sandbox[service]'"


@app.command()
@ends_with_a_code
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 takes any [default: 8080]"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="NAME", help="auto, native, docker, ...")
    ] = None,
) -> int:
    """Serve sandboxes over HTTP until Ctrl-C. The first start makes a key and shows it once.

    \b
    Examples:
      paracle serve
      paracle serve --host 0.0.0.0 --port 8080
    """
    settings = settings_or_fault()
    check_backend(backend)
    chosen = {"api_host": host, "api_port": port}
    settings = replace(settings, **{k: v for k, v in chosen.items() if v is not None})  # type: ignore[arg-type]
    if backend == "remote" or (backend is None and settings.mode == "remote"):
        raise UsageFault("A service needs sandboxes of its own machine: --backend native")
    return _serve(settings, backend)


def _serve(settings: Settings, backend: str | None) -> int:
    import asyncio
    import gc
    import logging

    try:
        from ..service.server import bound_socket, loop_factory, make_server
        from ..service.service import Service
    except ModuleNotFoundError as error:
        raise UsageFault(f"The service needs {error.name}. Install it with: {INSTALL}") from None
    from ..backends.registry import get_backend

    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(message)s")
    # Never itself over a service: that would be a circle.
    made = get_backend(backend, replace(settings, api_url=None))
    listening = bound_socket(settings.api_host, settings.api_port)
    service = Service(settings, made)
    server = make_server(service)
    _announce(service, listening)

    async def run() -> None:
        try:
            await server.serve(sockets=[listening])
        finally:
            await made.close()

    # main() switched it off for the imports; those are never looked through again.
    gc.freeze()
    gc.enable()
    # uvicorn ends on SIGINT and SIGTERM by itself, and passes the signal on afterwards.
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
    return endings.SUCCESS


def _announce(service: Service, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  compared, not bound
    address = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    output.say(f"Paracle sandbox service on {address} ({service.backend.name} backend)")
    key = _first_key(service)
    if key is not None:
        output.say(f"API key (shown this once): {key}")
    elif service.settings.api_key:
        output.say("API key: that of SANDBOX_API_KEY")
    else:
        output.say("API keys exist; make another with: paracle keys make --admin")
    # With a key of its own the line works as it is; without, once the variable is set.
    header = f"'X-API-Key: {key}'" if key else '"X-API-Key: $SANDBOX_API_KEY"'
    output.say("Try:")
    output.say(
        f"  curl -s -X POST {address}/sandbox/me/execute -H {header} "
        "-H 'Content-Type: application/json' -d '{\"code\": \"print(6 * 7)\"}'"
    )
    sys.stdout.flush()


def _first_key(service: Service) -> str | None:
    """A key for whoever starts the service for the first time, and has none yet."""
    if service.settings.api_key or any(key.is_good(time.time()) for key in service.keys.all()):
        return None
    key = service.keys.make(admin=True, note="made at the first start")
    service.journal.record("key_made", by="paracle serve", key=key.split("_")[1], admin=True)
    return key
