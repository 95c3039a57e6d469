"""Where the engine is, and in plain words why it cannot be spoken to.

As Docker's own client looks: DOCKER_HOST, then DOCKER_CONTEXT, then the context chosen in its
configuration, then the sockets where Docker and Podman listen. Nothing is imported and nobody is
called here, so that "there is no engine" is a quick answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import DockerConnectionError
from ...host.platforms import user_id, without_engine
from ...settings import Settings
from ..machine.engine_socket import missing_package, socket_problem
from ..machine.workspaces import listener, shares_our_files

INSTALL = "pip install '.[docker]', in a checkout of Paracle Sandbox"
if sys.platform == "linux":
    LOOK = "Look at the engine (systemctl status docker)"
    _START = "Start it (systemctl start docker)"
    _START_ANY = "Start it (systemctl start docker, or systemctl --user start podman.socket)"
    _JOIN = "Join the group that owns it (usermod -aG docker $USER, then log in again)"
else:
    LOOK = "Look at the engine"
    _START = _START_ANY = "Start Docker Desktop, or what else you have as an engine"
    _JOIN = "Start an engine as this user"


@dataclass(frozen=True)
class Endpoint:
    """An address, or the name of a context that holds one."""

    url: str | None = None
    context: str | None = None

    def __str__(self) -> str:
        return self.url or f"the context {self.context}"

    @property
    def socket_path(self) -> str | None:
        url = self.url or ""
        return url.removeprefix("unix://") if url.startswith("unix://") else None

    @property
    def shares_our_files(self) -> bool:
        """Whether the engine sees the same files under the same paths: what listens on its
        socket is in our mount namespace. Only root may look, and only root has use for it."""
        return self.socket_path is not None and shares_our_files(self.socket_path)

    @property
    def process_limit(self) -> int | None:
        """The hard limit on processes of what listens here; None when there is none, or it is not
        ours to look at."""
        try:
            pid = listener(self.socket_path or "")
            limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
        except OSError:
            return None
        found = re.search(r"^Max processes +\S+ +(\d+)", limits, re.MULTILINE)
        return int(found[1]) if found else None


def find_endpoint(settings: Settings) -> Endpoint:
    """Raises DockerConnectionError when there is none."""
    if settings.docker_host:
        return _usable(Endpoint(settings.docker_host))
    folder = Path(settings.docker_config or Path.home() / ".docker")
    context = settings.docker_context or _chosen_context(folder)
    if context and context != "default":
        return _of_context(folder, context)
    found = next((path for path in _sockets(Path.home()) if path.is_socket()), None)
    if found is not None:
        return Endpoint(f"unix://{found}")
    raise no_engine(shutil.which)


def problem(settings: Settings) -> str | None:
    """Why the engine cannot be used, as far as a look tells; None when nothing speaks against it.
    An address or a context elsewhere is believed: somebody chose it."""
    if missing := missing_package("aiodocker"):
        return missing
    try:
        path = find_endpoint(settings).socket_path
    except DockerConnectionError as error:
        return error.message
    return None if path is None else socket_problem(path)


def _of_context(folder: Path, name: str) -> Endpoint:
    """A socket is one of this machine, whoever names it. What else a context has, a host with keys
    or behind ssh, is the library's to read."""
    place = folder / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    try:
        host = json.loads(place.read_bytes())["Endpoints"]["docker"]["Host"]
    except (OSError, ValueError, KeyError, TypeError):
        host = None
    is_socket = isinstance(host, str) and host.startswith("unix://")
    return _usable(Endpoint(host)) if is_socket else Endpoint(context=name)


def _usable(endpoint: Endpoint) -> Endpoint:
    if endpoint.socket_path is not None and not hasattr(socket, "AF_UNIX"):
        raise unavailable(
            f"{endpoint} is a socket, which this system cannot open",
            "Set DOCKER_HOST to npipe:////./pipe/docker_engine or to tcp://HOST:PORT",
        )
    return endpoint


def _chosen_context(folder: Path) -> str | None:
    try:
        chosen = json.loads((folder / "config.json").read_bytes()).get("currentContext")
    except (OSError, ValueError, AttributeError):
        return None
    return chosen if isinstance(chosen, str) else None


def _sockets(home: Path) -> list[Path]:
    own = Path(f"/run/user/{user_id()}")
    return [
        Path("/run/docker.sock"),
        Path("/var/run/docker.sock"),
        own / "docker.sock",
        home / ".docker/run/docker.sock",
        Path("/run/podman/podman.sock"),
        own / "podman/podman.sock",
    ]


def no_engine(which: Callable[[str], str | None]) -> DockerConnectionError:
    """Neither an address nor a socket: tell an engine that is not there from one that sleeps."""
    if which("dockerd") or which("docker") or which("podman"):
        return unavailable(
            "the Docker daemon is not running",
            f"{_START_ANY}, or set DOCKER_HOST to where it listens",
        )
    return unavailable("it is not installed", "Install Docker or Podman")


def explain(error: BaseException, endpoint: Endpoint) -> DockerConnectionError:
    """Why a connection failed, told apart by what the kernel said on the socket."""
    path = endpoint.socket_path
    if path is not None:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2.0)
                probe.connect(path)
        except PermissionError:
            return unavailable(
                f"no permission to use {path}",
                f"{_JOIN}, or use rootless Docker or Podman",
            )
        except FileNotFoundError:
            return unavailable(
                f"the Docker daemon is not running: there is no {path}",
                f"{_START}, or correct DOCKER_HOST",
            )
        except ConnectionRefusedError:
            return unavailable(
                f"the Docker daemon is not running: nobody listens on {path}",
                _START,
            )
        except OSError:
            pass  # the first error says more
    return unavailable(f"{endpoint} cannot be spoken to ({error})", "Look whether the engine runs")


def unavailable(reason: str, remedy: str) -> DockerConnectionError:
    return DockerConnectionError(
        f"Docker not available: {reason}. {remedy}, or {without_engine()}."
    )
