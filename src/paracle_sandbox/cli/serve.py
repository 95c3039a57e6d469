"""``paracle serve``: the sandbox service on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..host.platforms import is_part_of_python
from . import exit_codes, output
from .exit_codes import UsageFault, ends_with_a_code
from .keys import database_errors_explained, refuse_windows
from .log_lines import log_to_stderr
from .options import check_backend, settings_or_fault, waived_layers
from .sandbox import AllowDegraded

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

INSTALL = "pip install '.[service]', in a checkout of Paracle Sandbox"


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
    allow_degraded: AllowDegraded = None,
) -> int:
    """Serve sandboxes over HTTP until Ctrl-C. The first start makes a key: it is shown once on a
    terminal, and written to the file first-key in SANDBOX_DATA_DIR elsewhere.

    \b
    Examples:
      paracle serve
      paracle serve --host 0.0.0.0 --port 8080
    """
    settings = settings_or_fault()
    check_backend(backend)
    waived = (*waived_layers(allow_degraded),) if allow_degraded else None
    chosen = {"api_host": host, "api_port": port, "allow_degraded": waived}
    settings = replace(settings, **{k: v for k, v in chosen.items() if v is not None})  # type: ignore[arg-type]
    if backend == "remote" or (backend is None and settings.mode == "remote"):
        raise UsageFault("A service needs sandboxes of its own machine: --backend native")
    return _serve(settings, backend)


def _serve(settings: Settings, backend: str | None) -> int:
    import asyncio
    import gc

    refuse_windows()
    try:
        from ..service.server import bound_socket, loop_factory, make_server
        from ..service.service import Service
    except ModuleNotFoundError as error:
        if is_part_of_python(error.name):
            raise
        raise UsageFault(f"The service needs {error.name}. Install it with: {INSTALL}") from None
    from ..backends.registry import get_backend

    log_to_stderr(settings.log_level, with_level=True)
    # Never itself over a service: that would be a circle.
    made = get_backend(backend, replace(settings, api_url=None))
    listening = bound_socket(settings.api_host, settings.api_port)
    try:
        service = Service(settings, made)
    except BaseException:
        listening.close()
        raise
    server = make_server(service)
    with database_errors_explained(settings.service_dir):
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
    return exit_codes.SUCCESS


def _announce(service: Service, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  compared, not bound
    address = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    output.say(f"Paracle sandbox service on {address} ({service.backend.name} backend)")
    key = _first_key(service)
    if key is not None:
        file = _for_the_owner(service, key)
        if file is None:
            output.say(f"API key (shown this once): {key}")
        else:
            output.say(f"API key (in this file, for its owner alone; remove it then): {file}")
            key = f"$(cat {shlex.quote(str(file))})"
    elif service.settings.api_key:
        output.say("API key: that of SANDBOX_API_KEY")
    else:
        output.say("API keys exist; make another with: paracle keys make --admin")
    # With a key of its own the line works as it is; without, once the variable is set.
    header = f'"X-API-Key: {key or "$SANDBOX_API_KEY"}"'
    output.say("Try:")
    output.say(
        f"  curl -s -X POST {address}/sandbox/me/execute -H {header} "
        "-H 'Content-Type: application/json' -d '{\"code\": \"print(6 * 7)\"}'"
    )
    sys.stdout.flush()


def _for_the_owner(service: Service, key: str) -> Path | None:
    """Where the key was written to; None on a terminal. What is printed elsewhere ends in a log,
    which others read, and is kept for years."""
    if sys.stdout.isatty():
        return None
    path = Path(service.settings.service_dir) / "first-key"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return path


def _first_key(service: Service) -> str | None:
    """A key for whoever starts the service for the first time, and has none yet."""
    if service.settings.api_key or any(key.is_good(time.time()) for key in service.keys.all()):
        return None
    key = service.keys.make(admin=True, note="made at the first start")
    service.journal.record("key_made", by="paracle serve", key=key.split("_")[1], admin=True)
    return key
