"""The writable places of containers, each below a disk limit of its own.

On an engine of this machine, as root: subvolumes of a btrfs volume, which a small privileged
process (``jail/limits/store.py``) keeps mounted as long as we live. Elsewhere the engine is asked
for tmpfs mounts of the right size, which count as memory.

A volume that the kernel gave up, because the disk below it was full, takes no more sandboxes: the
next ones are on another, and it goes with the last that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import (
    BackendUnavailableError,
    SandboxCleanupError,
    SandboxCreationError,
    SandboxError,
)
from ...host.platforms import user_id
from ...settings import Settings

logger = logging.getLogger(__name__)

UID = 1000
_CREDENTIALS = struct.Struct("3i")
_MAX_MESSAGE = 1 << 16
_START_SECONDS = 30.0
_END_SECONDS = 10.0
_ROOM_SECONDS = 60.0
_MB = 1 << 20
# Almost at the limit is at the limit: what no longer fits may be a whole extent with its metadata.
_SLACK = 256 << 10
_SLACK_SHARE = 256
_PACKAGE_PATH = str(Path(__file__).resolve().parents[3])
_PROGRAM = (
    "import json, socket, sys; control = socket.socket(fileno={fd}); "
    "options = json.loads(control.recv(65536)); sys.path.insert(0, options['package_path']); "
    "from paracle_sandbox.jail.limits.store import main; main(control, options)"
)


class _NoRoom(BackendUnavailableError):
    """The disk is full now; there may be a volume later."""


class Workspaces:
    """A handle on the store process. Requests are few and short, and take their turns."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._is_lost = False
        self.path = ""

    @classmethod
    async def open(cls, settings: Settings) -> Workspaces:
        """Raises BackendUnavailableError when this machine cannot have a volume."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                [_python(), "-I", "-S", "-E", "-c", _PROGRAM.format(fd=theirs.fileno())],
                env={"LANG": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        workspaces = cls(process, ours)
        options = {
            "state_dir": settings.state_dir,
            "data_dir": settings.data_dir,
            "owner_pid": os.getpid(),
            "package_path": _PACKAGE_PATH,
        }
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.get_running_loop().sock_sendall(ours, json.dumps(options).encode())
                ready = await workspaces._receive()
        except BaseException:
            await workspaces.close()
            raise
        if ready.get("event") != "ready":
            await workspaces.close()
            kind = _NoRoom if ready.get("lacks_room") else BackendUnavailableError
            raise kind(str(ready.get("message") or "the store did not start"))
        workspaces.path = str(ready["path"])
        return workspaces

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be made here any more: its volume is broken, or it has ended."""
        return self._is_lost or self.ended

    async def create(self, name: str, disk_mb: int, more: Sequence[str] = ()) -> str:
        """The directory that holds ``workspace`` and ``tmp`` of a sandbox, and ``more``."""
        options = {"uid": UID, "disk_bytes": disk_mb * _MB, "more": list(more)}
        answer = await self._ask("create", name, **options)
        if "error" in answer:
            raise SandboxCreationError(
                f"The workspace could not be made: {answer['error']}", step="workspace"
            )
        return str(answer["path"])

    async def usage(self, name: str) -> tuple[int, bool]:
        """Bytes used, and whether that is all there may be."""
        answer = await self._ask("usage", name)
        used, limit = int(answer.get("used", 0)), int(answer.get("limit", 0))
        return used, is_nearly_full(used, limit)

    async def remove(self, name: str) -> str:
        """Idempotent. What is left, if anything."""
        return str((await self._ask("remove", name)).get("error", ""))

    async def close(self) -> None:
        """Hang up; the store unmounts and ends. Waits until it has."""
        self._control.close()
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _ask(self, op: str, name: str, **arguments: Any) -> dict[str, Any]:
        """The answer; an ``error`` in it when the store is gone, and all workspaces with it."""
        number = next(self._numbers)
        packet = json.dumps({"op": op, "request": number, "name": name, **arguments}).encode()
        async with self._turn:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self._control, packet)
                # The answer to a request whose caller was cancelled may still be under way.
                while (answer := await self._receive()) and answer["request"] != number:
                    pass
                if answer:
                    self._is_lost |= bool(answer.get("retire"))
                    return answer
        self._is_lost = True
        return {"error": "the store of workspaces has ended"}

    async def _receive(self) -> dict[str, Any]:
        packet = await asyncio.get_running_loop().sock_recv(self._control, _MAX_MESSAGE)
        return dict(json.loads(packet)) if packet else {}


def is_nearly_full(used: int, limit: int) -> bool:
    return bool(limit) and used + max(_SLACK, limit // _SLACK_SHARE) >= limit


def shares_our_files(socket_path: str) -> bool:
    """Whether what listens there is in our mount namespace, so that paths mean the same to it.
    Only root may look, and only root has use for it."""
    if user_id() != 0:
        return False
    try:
        pid = listener(socket_path)
        # 0: a process of another pid namespace, as when we are in a container.
        return pid > 0 and _mounts(str(pid)) == _mounts("self")
    except OSError:
        return False


def listener(socket_path: str) -> int:
    """The process that listens there, 0 when it is of another pid namespace. Raises OSError."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(errno.ENOTSUP, "this system does not tell who listens")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        probe.connect(socket_path)
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[0])


def _mounts(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/mnt")


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


class WorkspaceStore:
    """The workspaces of a backend: a slot for each sandbox, on the volume that is there when it is
    made. One is opened when it is first needed, and another when that is lost."""

    def __init__(
        self,
        shares_our_files: Callable[[], bool],
        settings: Settings,
        room_seconds: float = _ROOM_SECONDS,
    ) -> None:
        """``room_seconds``: after so long it is looked again whether a full disk has room."""
        self._shares_our_files = shares_our_files
        self._settings = settings
        self._room_seconds = room_seconds
        self._look_again_at = math.inf
        self._opening: asyncio.Task[Workspaces | None] | None = None
        self._slots: dict[str, Workspaces] = {}
        self._lost: list[Workspaces] = []
        self.why_in_memory = ""

    async def create(self, slot: str, disk_mb: int, more: Sequence[str] = ()) -> str | None:
        """The directory of a new slot; None where there can be none. Raises SandboxCreationError;
        whatever it raises, the slot has to be removed."""
        workspaces = await self._claim(slot)
        if workspaces is None:
            return None
        try:
            return await workspaces.create(slot, disk_mb, more)
        except SandboxCreationError:
            if not workspaces.is_lost:
                raise
        workspaces = await self._claim(slot)
        return await workspaces.create(slot, disk_mb, more) if workspaces else None

    async def _claim(self, slot: str) -> Workspaces | None:
        """What the slot will be on, and keeps open."""
        await self._forget(slot)
        workspaces = await self.get()
        if workspaces is not None:
            self._slots[slot] = workspaces
        return workspaces

    async def usage(self, slot: str) -> tuple[int, bool] | None:
        """Bytes used, and whether that is all there may be; None when it is in memory."""
        workspaces = self._slots.get(slot)
        return await workspaces.usage(slot) if workspaces else None

    async def remove(self, slot: str) -> str:
        """Idempotent. What is left, if anything."""
        workspaces = self._slots.get(slot)
        if workspaces is None:
            return ""
        left = await workspaces.remove(slot)
        if workspaces.ended:
            await self.get()  # which takes away what it has left mounted
        elif left:
            return left
        await self._forget(slot)
        return ""

    async def _forget(self, slot: str) -> None:
        self._slots.pop(slot, None)
        await self._close_unused()

    async def get(self) -> Workspaces | None:
        """What the next sandbox is made on. None where there can be none, and why_in_memory says
        so."""
        if self._opening is None or self._is_over(self._opening):
            before, self._opening = self._opening, asyncio.ensure_future(self._open())
            await self._retire(before)
        return await asyncio.shield(self._opening)

    def _is_over(self, opening: asyncio.Task[Workspaces | None]) -> bool:
        if not opening.done():
            return False
        if opening.cancelled() or opening.exception():
            return True
        workspaces = opening.result()
        if workspaces is None:
            return time.monotonic() >= self._look_again_at
        return workspaces.is_lost

    async def _retire(self, opening: asyncio.Task[Workspaces | None] | None) -> None:
        if opening is None or opening.cancelled() or opening.exception():
            return
        if workspaces := opening.result():
            logger.warning("The volume of workspaces is lost: the next sandboxes are on another.")
            self._lost.append(workspaces)
            await self._close_unused()

    async def _close_unused(self) -> None:
        for workspaces in list(self._lost):
            if workspaces not in self._slots.values() and workspaces in self._lost:
                self._lost.remove(workspaces)
                await workspaces.close()

    async def _open(self) -> Workspaces | None:
        self._look_again_at = math.inf
        if not await asyncio.to_thread(self._shares_our_files):
            self.why_in_memory = "the engine is not of this machine, or we are not root"
            return None
        try:
            workspaces = await Workspaces.open(self._settings)
        except BackendUnavailableError as error:
            if isinstance(error, _NoRoom):
                self._look_again_at = time.monotonic() + self._room_seconds
            self.why_in_memory = str(error)
            return None
        self.why_in_memory = ""
        return workspaces

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        self._slots.clear()
        if opening is not None:
            with contextlib.suppress(SandboxError, asyncio.CancelledError):
                workspaces = await opening
                if workspaces is not None:
                    self._lost.append(workspaces)
        await self._close_unused()


class Remains:
    """The workspaces that could not be removed with their sandboxes: remembered, and tried again.

    A slot is the name of a workspace. ``remove`` is idempotent, and answers with what is left."""

    def __init__(self, remove: Callable[[str], Awaitable[str]]) -> None:
        self._remove = remove
        self._slots: dict[str, set[str]] = {}

    def add(self, sandbox_id: str, slot: str) -> None:
        """Remember an unused slot. Several sandboxes may have had the same name."""
        self._slots.setdefault(sandbox_id, set()).add(slot)

    async def remove(self, sandbox_id: str) -> None:
        """Remove all slots of this name. Raises SandboxCleanupError; it can be called again."""
        for slot in list(self._slots.get(sandbox_id, ())):
            if left := await self._remove(slot):
                raise SandboxCleanupError(f"Sandbox {sandbox_id} left files: {left}", sandbox_id)
            self._forget(sandbox_id, slot)

    def _forget(self, sandbox_id: str, slot: str) -> None:
        slots = self._slots.get(sandbox_id, set())
        slots.discard(slot)
        if not slots:
            self._slots.pop(sandbox_id, None)

    async def try_to_remove(self, *sandbox_ids: str) -> None:
        """Remove the slots of these names, or all. What is still left is tried again next time."""
        for sandbox_id in sandbox_ids or list(self._slots):
            try:
                await self.remove(sandbox_id)
            except SandboxCleanupError as error:
                logger.warning("%s", error)
