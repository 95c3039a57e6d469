"""How large a volume may be, so that all volumes of this machine together fit on its disk.

A volume is a sparse file that grows as it is used. If the disk below it fills up, the kernel gives
the volume up for good (`volume.Volume.broken`). So each volume is entered in a register, with a
file of its own that is locked as long as its spawner lives, and a new one gets a part of what is
free and was not promised to others. What they have used already is not free any more, so only the
rest of their promise counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from ...host.own_directory import open_own_directory
from ..numbers import claim_number, release_number

_REGISTER = "/run/paracle-sandbox-volumes"
_MOST_BYTES = 1 << 40
# Of what is free: others need room too, and a volume that cannot grow breaks for all its sandboxes.
_SHARE = 0.85
# Of what was not promised yet: the next one is to have something as well.
_PART = 2 / 3
# The least, where there is so much: ten short commands at a time are not to end up in memory.
_LEAST_BYTES = 8 << 30


class Space:
    """The part of the disk that one volume may fill."""

    def __init__(self, directory: str, register: str = _REGISTER) -> None:
        """``directory``: where the image will be. Raises OSError."""
        self._register = open_own_directory(register, make=True)
        try:
            # One at a time: who looks at the promises of others makes one itself.
            fcntl.flock(self._register, fcntl.LOCK_EX)
            self._device = os.stat(directory).st_dev
            self._number, self._lock = claim_number(self._register)
            try:
                self.size_bytes = self._share(directory)
                self.enter("")
            except BaseException:
                release_number(self._register, self._number, self._lock)
                raise
            finally:
                fcntl.flock(self._register, fcntl.LOCK_UN)
        except BaseException:
            os.close(self._register)
            raise

    def enter(self, identity: str) -> None:
        """Say which file system it is, once there is one: what that has used can be looked up."""
        line = f"{self._device} {self.size_bytes} {identity}".encode()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, line, 0)

    def close(self) -> None:
        release_number(self._register, self._number, self._lock)
        os.close(self._register)

    def _share(self, directory: str) -> int:
        figures = os.statvfs(directory)
        usable = int(figures.f_bavail * figures.f_frsize * _SHARE)
        part = int((usable - self._promised()) * _PART)
        return min(_MOST_BYTES, max(part, min(usable, _LEAST_BYTES)))

    def _promised(self) -> int:
        """Add up what the volumes of living spawners on the same disk may still take."""
        total = 0
        for name in os.listdir(self._register):
            if name.isdecimal() and int(name) != self._number:
                with contextlib.suppress(OSError, ValueError):
                    total += self._promised_to(name)
        return total

    def _promised_to(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(name, flags, dir_fd=self._register)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return 0  # it is not locked: its spawner has ended
        except BlockingIOError:
            device, size, *identity = os.pread(lock, 256, 0).decode("ascii", "replace").split()
            if int(device) != self._device:
                return 0
            return max(0, int(size) - (_used(identity[0]) if identity else 0))
        finally:
            os.close(lock)


def _used(identity: str) -> int:
    """The bytes that a file system holds, as the kernel shows them to everybody."""
    total = 0
    for kind in ("data", "metadata", "system"):
        path = f"/sys/fs/btrfs/{identity}/allocation/{kind}/bytes_used"
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            total += int(file.read())
    return total
