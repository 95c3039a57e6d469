"""The spawner's side of the records: one small file per child, written before it is made.

    <state>/instances/<k>    locked by the spawner that holds number k, as long as it lives; its
                             content is a token that no other spawner ever had
    <state>/slot-<k>-*.json  one per child: where its cgroups are (written here); the token is part
                             of the name, which is never used twice
    <state>/<id>.json        one per sandbox: a second name for the record of its child, to which
                             the owner has added what the sandbox is called, and whose it is

A record whose instance is not locked, or has another token, belongs to a dead spawner, and
anyone may sweep it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection

from ..host.own_directory import open_own_directory
from .numbers import claim_number, release_number

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Records:
    """Works on descriptors, so that it needs no path after the change of root."""

    def __init__(self, state_dir: str) -> None:
        self._dir = open_own_directory(state_dir, make=True)
        # Two state directories count their instances apart; what both name must not clash.
        found = os.fstat(self._dir)
        self.place = f"{found.st_dev:x}-{found.st_ino:x}"
        self.token = os.urandom(8).hex()
        self._instances = open_own_directory("instances", make=True, parent=self._dir)
        self.instance, self._lock = claim_number(self._instances)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, self.token.encode(), 0)

    def slot(self, number: int) -> str:
        return f"slot-{self.instance}-{self.token}-{number}"

    def write(self, slot: str, cgroups: dict[str, str]) -> None:
        record = {
            "slot": slot,
            "instance": self.instance,
            "token": self.token,
            "cgroups": cgroups,
            "created_at": time.time(),
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(f"{slot}.json", flags, 0o600, dir_fd=self._dir)
        try:
            os.write(fd, json.dumps(record).encode() + b"\n")
        finally:
            os.close(fd)

    def remove(self, slot: str) -> None:
        """Its sandbox is gone. A record that stays, on a disk that fails, is for the next sweep."""
        with contextlib.suppress(OSError):
            os.unlink(f"{slot}.json", dir_fd=self._dir)

    def close(self, keep: Collection[str] = ()) -> None:
        """Remove all records of ours but those of the children in ``keep``."""
        self._remove_all(keep)
        release_number(self._instances, self.instance, self._lock)
        os.close(self._instances)
        os.close(self._dir)

    def _remove_all(self, keep: Collection[str]) -> None:
        """Remove those that have the owner's names, too: the owner may have been killed."""
        for name in os.listdir(self._dir):
            if name.endswith(".json") and self._is_ours(name, keep):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._dir)

    def _is_ours(self, name: str, keep: Collection[str]) -> bool:
        try:
            fd = os.open(name, _READ, dir_fd=self._dir)
            with open(fd, "rb") as file:
                # What is added later does not change whose it is.
                record = json.loads(file.readline())
                return record.get("token") == self.token and record.get("slot") not in keep
        except (OSError, ValueError, AttributeError):
            return False
