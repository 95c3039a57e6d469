"""Which backend ``auto`` takes: the first of its order that can be had.

Looking must cost nothing where native can be had, which is nearly everywhere: it reads a small file
or three, and starts and imports nothing. It is no proof; ``paracle sandbox health`` is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping

from ..errors import BackendUnavailableError
from ..settings import Settings

logger = logging.getLogger(__name__)

AUTO_ORDER = ("remote", "native", "docker", "incus")
_PROBE_SECONDS = 3.0
_MAX_INFO = 1 << 20
_SYS_ADMIN = 1 << 21
# Those that a kernel may have, and the value that forbids user namespaces to who is not root.
_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
_SWITCHES = {
    "user.max_user_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    _APPARMOR: "1",
}

Problem = Callable[[Settings], str | None]


def choose(
    settings: Settings,
    problems: Mapping[str, Problem] | None = None,
    platform: str = sys.platform,
) -> str:
    """The first that has no problem. When all have one, the first of this machine: its error then
    names cause and remedy. Says at WARNING what was not taken, and why."""
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
        passed_over[name] = f"not {name}: {problem}"
    else:
        chosen = next(name for name in candidates if name != "remote")
        del passed_over[chosen]
    if passed_over:
        reasons = "; ".join(passed_over.values())
        logger.warning("SANDBOX_MODE=auto is using %s; %s", chosen, reasons)
    return chosen


def native_problem(euid: int, read: Callable[[str], str]) -> tuple[str, str] | None:
    """The step of a start that would fail, and its cause; None when nothing speaks against it.

    ``read`` gives the text of a file, and an empty one for a file that is not there."""
    if euid == 0:
        held = read("/proc/self/status").partition("CapEff:")[2].split()
        if not held or int(held[0], 16) & _SYS_ADMIN:
            return None
        return "pid namespace", "root has no CAP_SYS_ADMIN here"
    for switch, forbids in _SWITCHES.items():
        if read(f"/proc/sys/{switch.replace('.', '/')}").strip() != forbids:
            continue
        # That one is for programs without a profile; a profile says for itself.
        if switch != _APPARMOR or read("/proc/self/attr/current").strip("\0\n ") == "unconfined":
            return "user namespace", f"{switch} is {forbids}"
    return None


def native_is_taken(settings: Settings) -> bool:
    """Whether ``choose`` would take native, with nothing to say about it."""
    return not settings.api_url and native_problem(os.geteuid(), _read) is None


def service_problem(settings: Settings) -> str | None:
    """Why the configured service cannot be used; None when it can. Takes a few seconds at most,
    and needs nothing installed: the remote backend is imported only when it is taken."""
    import http.client
    import json
    import urllib.error
    import urllib.request

    from .remote.info import info_problem

    class Straight(urllib.request.HTTPRedirectHandler):
        """The key is for this address, and the remote backend follows nobody either."""

        def redirect_request(self, *_: object) -> None:
            return None

    address = f"{(settings.api_url or '').rstrip('/')}/info"
    headers = {"X-API-Key": settings.api_key or ""}
    if not address.startswith(("http://", "https://")):
        return "its address is not http or https"
    try:
        request = urllib.request.Request(address, headers=headers)  # noqa: S310  checked above
        opener = urllib.request.build_opener(Straight)
        with opener.open(request, timeout=_PROBE_SECONDS) as answer:
            body = answer.read(_MAX_INFO)
    except urllib.error.HTTPError as error:
        with error:
            return "it refuses the key" if error.code == 401 else f"it answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"it cannot be reached: {error}"
    try:
        return info_problem(json.loads(body))
    except ValueError:
        return info_problem(None)


def socket_problem(path: str) -> str | None:
    """Why nobody can be spoken to on a socket of this machine."""
    import socket

    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(path)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def _native(_: Settings) -> str | None:
    found = native_problem(os.geteuid(), _read)
    if found is None:
        return None
    from .native.spawner import explain_failure

    step, message = found
    return explain_failure({"step": step, "message": message}).message


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
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


PROBLEMS: Mapping[str, Problem] = {
    "remote": service_problem,
    "native": _native,
    "docker": _docker,
    "incus": _incus,
}
