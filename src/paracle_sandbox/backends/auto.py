"""Which backend ``auto`` takes: the first of its order that can be had.

Looking must cost nothing where native can be had, which is nearly everywhere: it reads a few small
files and starts nothing. Only in a process that a seccomp filter or a profile of AppArmor confines
it also makes some system calls, to see which of them are refused, and has the steps of a start
tried. It is no proof; ``paracle sandbox health`` is.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from ..errors import BackendUnavailableError
from ..host.platforms import user_id
from ..settings import Settings

logger = logging.getLogger(__name__)

AUTO_ORDER = ("remote", "native", "docker", "incus")
_PROBE_SECONDS = 3.0
_ANSWER_SECONDS = 5.0  # for all of what a service says
_MAX_INFO = 64 << 10

Problem = Callable[[Settings], str | None]


def choose(
    settings: Settings,
    problems: Mapping[str, Problem] | None = None,
    platform: str = sys.platform,
    *,
    quiet: bool = False,
) -> str:
    """The first that has no problem. When all have one, the first of this machine: its error then
    names cause and remedy. Unless ``quiet``, logs a warning with what was not taken, and why."""
    problems = problems or PROBLEMS
    candidates = [
        name
        for name in AUTO_ORDER
        # Native needs Linux; an engine may well run in a virtual machine.
        if (name != "remote" or settings.api_url) and (name != "native" or platform == "linux")
    ]
    passed_over: dict[str, str] = {}
    for name in candidates:
        problem = problems[name](settings)
        if problem is None:
            chosen = name
            break
        passed_over[name] = f"not {name}: {problem.rstrip('.')}"
    else:
        chosen = next(name for name in candidates if name != "remote")
        del passed_over[chosen]
    if passed_over and not quiet:
        reasons = "; ".join(passed_over.values())
        logger.warning("SANDBOX_MODE=auto is using %s; %s", chosen, reasons)
    return chosen


def native_problem(
    euid: int,
    read: Callable[[str], str],
    tried: Callable[[], Iterable[str]] = tuple,
) -> str | None:
    """Why no sandbox could be started, all causes together; None when nothing speaks against it.

    ``read`` gives the text of a file, and an empty one for a file that is not there. ``tried`` says
    what a trial finds; it is called only where nothing else does and the process is confined."""
    from .native.obstacles import find, is_confined

    causes = [cause for _, cause in find(euid, read)]
    if not causes and is_confined(read):
        causes += tried()
    return "; ".join(dict.fromkeys(causes)) or None


def native_is_taken(settings: Settings) -> bool:
    """Whether ``choose`` would take native, with nothing to say about it."""
    return not settings.api_url and _native(settings) is None


def service_problem(settings: Settings, seconds: float = _ANSWER_SECONDS) -> str | None:
    """Why the configured service cannot be used; None when it can. Takes so many seconds at most,
    and needs nothing installed: the remote backend is imported only when it is taken."""
    import threading

    address = f"{(settings.api_url or '').rstrip('/')}/info"
    if not address.startswith(("http://", "https://")):
        return "its address is not http or https"
    deadline = time.monotonic() + seconds
    found: list[str | None] = []
    # In a thread, which is left behind if need be: neither looking up a name nor the head of an
    # answer, which may come byte by byte, can be given a time in which to end.
    asking = threading.Thread(
        target=lambda: found.append(_asked(address, settings.api_key or "", deadline)), daemon=True
    )
    asking.start()
    asking.join(seconds)
    return found[0] if found else f"it did not answer within {seconds:g} seconds"


def _asked(address: str, key: str, deadline: float) -> str | None:
    import http.client
    import urllib.error
    import urllib.request

    from .remote.answers import from_json
    from .remote.info import info_problem

    class Straight(urllib.request.HTTPRedirectHandler):
        """The key is for this address, and the remote backend follows nobody either."""

        def redirect_request(self, *_: object) -> None:
            return None

    body = b""
    try:
        request = urllib.request.Request(address, headers={"X-API-Key": key})  # noqa: S310  checked
        opener = urllib.request.build_opener(Straight)
        with opener.open(request, timeout=_PROBE_SECONDS) as answer:
            while len(body) <= _MAX_INFO and (piece := answer.read1(_MAX_INFO)):
                body += piece
                if time.monotonic() > deadline:
                    return "its answer did not end in time"
    except urllib.error.HTTPError as error:
        with error:
            return "it refuses the key" if error.code == 401 else f"it answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"it cannot be reached: {error}"
    try:
        return info_problem(from_json(body) if len(body) <= _MAX_INFO else None)
    except ValueError:
        return info_problem(None)


def socket_problem(path: str) -> str | None:
    """Why nobody can be spoken to on a socket of this machine."""
    import socket

    if not hasattr(socket, "AF_UNIX"):
        return f"{path}: this system has no sockets that are files"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(path)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def _native(settings: Settings) -> str | None:
    from .native.obstacles import tried
    from .native.spawner_process import default_python

    euid = user_id()
    return native_problem(euid, _read, lambda: tried(settings.python or default_python(), euid))


def _docker(settings: Settings) -> str | None:
    from .docker.endpoint import find_endpoint

    if missing := _missing("aiodocker"):
        return missing
    try:
        path = find_endpoint(settings).socket_path
    except BackendUnavailableError as error:
        return error.message
    # An address or a context elsewhere was set by somebody who knows.
    return None if path is None else socket_problem(path)


def _incus(settings: Settings) -> str | None:
    from .incus.remotes import Remotes

    if missing := _missing("aiohttp"):
        return missing
    try:
        path = Remotes(settings).get(settings.incus_remote).socket_path
    except BackendUnavailableError as error:
        return error.message
    return None if path is None else socket_problem(path)


def _missing(package: str) -> str | None:
    from importlib.util import find_spec

    return None if find_spec(package) else f"the {package} package is missing"


def _read(path: str) -> str:
    from .native.obstacles import read_file

    return read_file(path)


PROBLEMS: Mapping[str, Problem] = {
    "remote": service_problem,
    "native": _native,
    "docker": _docker,
    "incus": _incus,
}
