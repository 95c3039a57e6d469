"""Where a server is: the local one by its socket, another by its name in the client's own list.

``INCUS_REMOTE`` and the ``images:`` before an image are names that ``incus remote list`` shows. Its
list is a YAML file of which two levels matter here; nothing in it is run or trusted further.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from ...errors import BackendUnavailableError
from ...settings import Settings
from ..machine.engine_socket import missing_package, socket_problem
from ..machine.workspaces import shares_our_files

_SOCKETS = ("/var/lib/incus/unix.socket", "/run/incus/unix.socket")
# What the client knows before anybody has added anything.
_ALWAYS = {"images": {"addr": "https://images.linuxcontainers.org", "protocol": "simplestreams"}}


@dataclass(frozen=True)
class Remote:
    """A server of images or instances. ``socket_path`` is set for one of this machine."""

    name: str
    address: str
    protocol: str = "incus"
    socket_path: str | None = None
    directory: str = ""
    project: str = ""

    @property
    def shares_our_files(self) -> bool:
        """Whether a path means the same there as here, and may be mounted."""
        return self.socket_path is not None and shares_our_files(self.socket_path)

    @property
    def pinned_certificate(self) -> Path | None:
        """That of a server which vouches for itself; None when an authority does."""
        path = Path(self.directory) / f"servercerts/{self.name}.crt"
        return path if self.directory and path.exists() else None

    def certificates(self) -> ssl.SSLContext:
        """The client's own, and what the server's must agree with.

        Raises BackendUnavailableError when the client has none."""
        folder = Path(self.directory)
        pinned = self.pinned_certificate
        try:
            context = ssl.create_default_context(cafile=pinned)
            if pinned is not None:
                context.check_hostname = False  # it is the one, and may have any name
                context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            context.load_cert_chain(folder / "client.crt", folder / "client.key")
        except OSError as error:
            raise BackendUnavailableError(
                f"There is no certificate for the Incus server {self.name} in {folder}: {error}. "
                f"Add the server with: incus remote add {self.name} {self.address}",
                step="certificate",
            ) from error
        return context


class Remotes:
    """The servers that this user knows."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = settings.incus_conf or str(Path.home() / ".config/incus")

    def get(self, name: str) -> Remote:
        """Raises BackendUnavailableError for a name that is not in the list."""
        entry = self._listed().get(name)
        if name == "local":
            project = (entry or {}).get("project", "")
            return Remote(name, "http://incus", "incus", self._local_socket(), project=project)
        if entry is None or not entry.get("addr"):
            raise BackendUnavailableError(
                f"There is no Incus remote {name!r} in {self._directory}/config.yml. "
                f"See `incus remote list`, and add it with: incus remote add {name} ADDRESS",
                step="remote",
            )
        address, protocol = entry["addr"], entry.get("protocol", "incus")
        project = entry.get("project", "")
        if address.startswith("unix:"):
            path = address.removeprefix("unix:").removeprefix("//") or self._local_socket()
            return Remote(name, "http://incus", "incus", path, project=project)
        return Remote(name, address.rstrip("/"), protocol, None, self._directory, project)

    def _local_socket(self) -> str:
        if self._settings.incus_socket:
            return self._settings.incus_socket
        if self._settings.incus_dir:
            return f"{self._settings.incus_dir}/unix.socket"
        return next((path for path in _SOCKETS if os.path.exists(path)), _SOCKETS[0])

    def _listed(self) -> dict[str, dict[str, str]]:
        for path in (f"{self._directory}/config.yml", "/etc/incus/config.yml"):
            try:
                text = Path(path).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            return {**_ALWAYS, **read_remotes(text)}
        return dict(_ALWAYS)


def problem(settings: Settings) -> str | None:
    """Why the server cannot be used, as far as a look tells; None when nothing speaks against it.
    A server elsewhere is believed: somebody chose it."""
    if missing := missing_package("aiohttp"):
        return missing
    try:
        path = Remotes(settings).get(settings.incus_remote).socket_path
    except BackendUnavailableError as error:
        return error.message
    return None if path is None else socket_problem(path)


def read_remotes(text: str) -> dict[str, dict[str, str]]:
    """The two levels below ``remotes:``, as the client writes them."""
    found: dict[str, dict[str, str]] = {}
    inside, name = False, ""
    for line in text.splitlines():
        key, colon, value = line.strip().partition(":")
        depth = len(line) - len(line.lstrip())
        if not colon or key.startswith("#"):
            continue
        if depth == 0:
            inside = key == "remotes"
        elif inside and depth == 2:
            name = key.strip("\"'")
            found[name] = {}
        elif inside and depth > 2 and name:
            found[name].setdefault(key, value.strip().strip("\"'"))
    return found
