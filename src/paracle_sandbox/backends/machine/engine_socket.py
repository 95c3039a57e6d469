"""Whether an engine of this machine could be spoken to, without a client library for it."""

from __future__ import annotations

import socket
from importlib.util import find_spec

_PROBE_SECONDS = 3.0


def socket_problem(path: str) -> str | None:
    """Why nothing can be asked on a socket of this machine; None when something listens there."""
    if not hasattr(socket, "AF_UNIX"):
        return f"{path}: this system has no sockets that are files"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(path)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return None


def missing_package(name: str) -> str | None:
    """Say what to do about a package that is needed and not installed, or return None."""
    return None if find_spec(name) else f"the {name} package is missing"
