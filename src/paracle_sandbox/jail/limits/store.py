"""Workspaces with a disk limit for engines of this machine, which mount them into containers.

The same volume as that of native sandboxes (``volume.py``), but mounted where everybody can see
it: an engine takes a path, and a path into somebody's private mounts is no source for a mount. So
what the kernel would take apart by itself has to be unmounted here:

    owner ── control socket ── store: state_dir/store-N, mounted as long as the owner lives

It ends with its owner. Killed itself, it leaves a mount whose number is not held, and the next
store that starts removes that. Containers that still live keep the file system until they end.

If the disk below the volume was full, the kernel has given it up (``Volume.broken``), and every
answer says so: the owner then starts another store, and hangs up when the last sandbox that has
its place here is gone.

Messages are JSON, one a packet; a request carries a number that its answer repeats.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ...host.own_directory import open_own_directory
from .. import kernel
from ..numbers import claim_number, release_number
from ..shape import Identity, Shape, prepare_workspace
from .shared_space import Space
from .volume import MINIMUM_BYTES, Volume, VolumeUnavailable

_MAX_MESSAGE = 1 << 16


class Store:
    """A mounted volume under a number of its own."""

    def __init__(self, state_dir: str, data_dir: str) -> None:
        # No other user may be able to replace what is mounted below it.
        state = open_own_directory(state_dir, make=True)
        try:
            self._numbers = open_own_directory("stores", make=True, parent=state)
        finally:
            os.close(state)
        self._number, self._lock = claim_number(self._numbers)
        self.path = _place(state_dir, self._number)
        self._space: Space | None = None
        # Numbers are given lowest first: what is mounted here belonged to one that was killed.
        sweep(state_dir, self._numbers, self._number)
        os.makedirs(self.path, 0o700, exist_ok=True)
        try:
            self._volume = self._mount(data_dir)
        except BaseException:
            self.close()
            raise

    def _mount(self, data_dir: str) -> Volume:
        os.makedirs(data_dir, 0o711, exist_ok=True)
        self._space = Space(data_dir)
        if self._space.size_bytes < MINIMUM_BYTES:
            raise OSError(errno.ENOSPC, f"the disk of {data_dir} is full")
        volume = Volume.create(data_dir, self._space.size_bytes, self.path)
        self._space.enter(volume.identity)
        kernel.set_attributes(self.path, kernel.ATTR_NOSUID | kernel.ATTR_NODEV, recursive=False)
        return volume

    def create(self, name: str, uid: int, disk_bytes: int, more: Sequence[str]) -> str:
        """The directory that holds the writable places of one sandbox, and ``more`` of them."""
        self._volume.create_subvolume(name)
        path = self._volume.path(name)
        try:
            prepare_workspace(path, Shape(read_only=False), Identity(uid, uid, rootless=False))
            for place in more:
                os.mkdir(f"{path}/{place}", 0o755)
                os.chown(f"{path}/{place}", uid, uid)
            self._volume.limit(name, disk_bytes)
        except OSError:
            self._volume.delete_subvolume(name)
            raise
        return path

    def usage(self, name: str) -> tuple[int, int]:
        return self._volume.usage(name)

    @property
    def broken(self) -> bool:
        """Whether no workspace can be made here any more."""
        return self._volume.broken

    def remove(self, name: str) -> None:
        """Raises OSError. What is on a broken volume goes with the volume."""
        if self._volume.broken:
            return
        with contextlib.suppress(FileNotFoundError):
            self._volume.delete_subvolume(name)

    def close(self) -> None:
        _unmount(self.path)
        if self._space is not None:
            self._space.close()
        release_number(self._numbers, self._number, self._lock)


def sweep(state_dir: str, numbers: int, own: int) -> None:
    """Unmount what no live process holds any more."""
    for name in os.listdir(state_dir):
        number = name[len("store-") :]
        if not name.startswith("store-") or not number.isdecimal():
            continue
        if int(number) == own:
            _unmount(_place(state_dir, own))
            continue
        with _held(numbers, number) as free:
            if free:
                _unmount(_place(state_dir, int(number)))


@contextlib.contextmanager
def _held(numbers: int, number: str) -> Iterator[bool]:
    """True, with the number held so that no other process can take it meanwhile, if it was free."""
    lock = os.open(number, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=numbers)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        yield False
        return
    try:
        yield os.fstat(lock).st_nlink > 0
    finally:
        release_number(numbers, int(number), lock)


def _place(state_dir: str, number: int) -> str:
    return os.path.join(state_dir, f"store-{number}")


def _unmount(path: str) -> None:
    with contextlib.suppress(OSError):
        while os.path.ismount(path):
            kernel.umount(path)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def main(control: socket.socket, options: dict[str, Any]) -> None:
    """Serve until the owner is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        owner = kernel.pidfd_open(options["owner_pid"])
        store = Store(options["state_dir"], options["data_dir"])
    except (OSError, ValueError, VolumeUnavailable) as error:
        lacks_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO)
        _send(control, {"event": "failed", "message": str(error), "lacks_room": lacks_room})
        sys.exit(1)
    try:
        _send(control, {"event": "ready", "path": store.path})
        while owner not in select.select([control.fileno(), owner], [], [])[0]:
            packet = control.recv(_MAX_MESSAGE)
            if not packet:
                break
            request = json.loads(packet)
            answer = _answer(store, request)
            _send(control, {"request": request["request"], "retire": store.broken, **answer})
    finally:
        store.close()


def _answer(store: Store, request: dict[str, Any]) -> dict[str, Any]:
    name = request["name"]
    try:
        if request["op"] == "create":
            path = store.create(name, request["uid"], request["disk_bytes"], request["more"])
            return {"path": path}
        if request["op"] == "usage":
            used, limit = store.usage(name)
            return {"used": used, "limit": limit}
        store.remove(name)
    except OSError as error:
        return {"error": str(error)}
    return {}


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    # An owner that is gone is noticed by the loop.
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode())
