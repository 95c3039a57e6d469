"""The spawner's side of the records: one small file per child, written before it is made.

    <state>/instances/<k>    locked by the spawner that holds number k, as long as it lives; its
                             content is a token that no other spawner ever had
    <state>/slot-<k>-*.json  one per child: where its cgroups are (written here); the token is part
                             of the name, which nobody has twice
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

from .numbers import claim_number, release_number


class Records:
    """Works on descriptors, so that it needs no path after the change of root."""

    def __init__(self, state_dir: str) -> None:
        os.makedirs(os.path.join(state_dir, "instances"), 0o700, exist_ok=True)
        self._dir = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Two state directories count their instances apart; what both name must not clash.
        found = os.fstat(self._dir)
        self.place = f"{found.st_dev:x}-{found.st_ino:x}"
        self.token = os.urandom(8).hex()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._instances = os.open("instances", flags, dir_fd=self._dir)
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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{slot}.json", dir_fd=self._dir)

    def close(self) -> None:
        self._remove_all()
        release_number(self._instances, self.instance, self._lock)
        os.close(self._instances)
        os.close(self._dir)

    def _remove_all(self) -> None:
        """By the owner's names, too: it may have been killed, and then nobody else will."""
        for name in os.listdir(self._dir):
            if name.endswith(".json") and self._is_ours(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._dir)

    def _is_ours(self, name: str) -> bool:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir)
            with open(fd, "rb") as file:
                # What is added later does not change whose it is.
                return bool(json.loads(file.readline()).get("token") == self.token)
        except (OSError, ValueError, AttributeError):
            return False
