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
from ..workspaces import shares_our_files

_SOCKETS = ("/var/lib/incus/unix.socket", "/run/incus/unix.socket")


@dataclass(frozen=True)
class Remote:
    """A server of images or instances. ``socket_path`` is set for one of this machine."""

    name: str
    address: str
    protocol: str = "incus"
    socket_path: str | None = None
    directory: str = ""

    @property
    def shares_our_files(self) -> bool:
        """Whether a path means the same there as here, and may be mounted."""
        return self.socket_path is not None and shares_our_files(self.socket_path)

    def certificates(self) -> ssl.SSLContext:
        """The client's own, and the one certificate that this server must show.

        Raises BackendUnavailableError when they are not there."""
        folder = Path(self.directory)
        try:
            context = ssl.create_default_context(cafile=folder / f"servercerts/{self.name}.crt")
            context.check_hostname = False  # it is pinned, and may have any name
            context.load_cert_chain(folder / "client.crt", folder / "client.key")
        except OSError as error:
            raise BackendUnavailableError(
                f"The Incus server {self.name} has no certificates here: {error}. "
                f"Add it with: incus remote add {self.name} ADDRESS"
            ) from error
        return context


class Remotes:
    """The servers that this user knows."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = settings.incus_conf or str(Path.home() / ".config/incus")

    def get(self, name: str) -> Remote:
        """Raises BackendUnavailableError for a name that is not in the list."""
        if name == "local":
            return Remote(name, "http://incus", socket_path=self._local_socket())
        entry = self._listed().get(name)
        if entry is None or not entry.get("addr"):
            raise BackendUnavailableError(
                f"There is no Incus remote {name!r} in {self._directory}/config.yml. "
                f"See `incus remote list`, and add it with: incus remote add {name} ADDRESS",
                step="remote",
            )
        address, protocol = entry["addr"], entry.get("protocol", "incus")
        if address.startswith("unix:"):
            path = address.removeprefix("unix:").removeprefix("//")
            return Remote(name, "http://incus", socket_path=path or self._local_socket())
        return Remote(name, address.rstrip("/"), protocol, directory=self._directory)

    def _local_socket(self) -> str:
        if self._settings.incus_socket:
            return self._settings.incus_socket
        if self._settings.incus_dir:
            return f"{self._settings.incus_dir}/unix.socket"
        return next((path for path in _SOCKETS if os.path.exists(path)), _SOCKETS[0])

    def _listed(self) -> dict[str, dict[str, str]]:
        for path in (f"{self._directory}/config.yml", "/etc/incus/config.yml"):
            try:
                return read_remotes(Path(path).read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
        return {}


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
