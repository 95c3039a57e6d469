"""FakeBackend runs the real guest without isolation, for tests of the layers above a backend.

Each sandbox is a temporary directory and a plain process on this machine. It confines nothing:
run only your own code in it. It can be set to fail where a real backend might.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends.base import Backend, Channel, Health, SandboxInfo, Usage
from ..backends.machine.volumes import refuse_volumes
from ..channel.bootstrap import BOOTSTRAP, boot_message
from ..channel.frames import OPEN, TO_GUEST, FrameReader, decode_json, encode, encode_request
from ..channel.socket import SocketChannel
from ..config import SandboxConfig
from ..errors import SandboxConflictError, SandboxError, SandboxNotFoundError

_EXIT_SECONDS = 5.0
_PATHS = ("path", "source", "target", "cwd", "path0")


@dataclass
class _FakeSandbox:
    config: SandboxConfig
    labels: Mapping[str, str]
    directory: str
    process: subprocess.Popen[bytes]
    host_end: socket.socket
    created_at: float = field(default_factory=time.time)


class FakeBackend(Backend):
    """A backend for tests. create() raises ``create_error`` if it is set, and usage() returns
    ``usage_of[id]``. ``created`` and ``destroyed`` list ids in order; ``peak`` is the largest
    number of sandboxes alive at once."""

    name = "fake"

    def __init__(self, create_error: SandboxError | None = None) -> None:
        self.create_error = create_error
        self.destroy_error: SandboxError | None = None
        self.usage_of: dict[str, Usage] = {}
        self.created: list[str] = []
        self.destroyed: list[str] = []
        self.peak = 0
        self._sandboxes: dict[str, _FakeSandbox] = {}

    async def health(self) -> Health:
        return Health(self.name, available=True, detail="no isolation: for tests only")

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        if self.create_error is not None:
            raise self.create_error
        refuse_volumes(config.volumes, self.name)
        if sandbox_id in self._sandboxes:
            raise SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)
        self._sandboxes[sandbox_id] = _make_sandbox(config, labels)
        self.created.append(sandbox_id)
        self.peak = max(self.peak, len(self._sandboxes))

    async def connect(self, sandbox_id: str) -> Channel:
        sandbox = self._get_sandbox(sandbox_id)
        channel = _MappedChannel(sandbox.host_end, sandbox.config.working_dir, sandbox.directory)
        setup = {
            "working_dir": sandbox.directory,
            "env": {**_make_env(sandbox.directory), **sandbox.config.env_vars},
            "python": sys.executable,
        }
        await SocketChannel.send(channel, boot_message(setup))
        return channel

    async def usage(self, sandbox_id: str) -> Usage:
        if sandbox_id in self.usage_of:
            return self.usage_of[sandbox_id]
        self._get_sandbox(sandbox_id)
        return Usage(memory_bytes=16 << 20, memory_peak_bytes=16 << 20, processes=1)

    async def destroy(self, sandbox_id: str) -> None:
        if self.destroy_error is not None:
            raise self.destroy_error
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is not None:
            self.destroyed.append(sandbox_id)
            # Begun, it is done: a caller that is cancelled leaves no guest behind.
            await asyncio.shield(asyncio.to_thread(_remove_sandbox, sandbox))

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return [
            SandboxInfo(
                sandbox_id=sandbox_id,
                backend=self.name,
                state="running" if sandbox.process.poll() is None else "dead",
                owner_pid=os.getpid(),
                owner_alive=True,
                created_at=sandbox.created_at,
                config=sandbox.config.model_dump(),
                labels=sandbox.labels,
            )
            for sandbox_id, sandbox in self._sandboxes.items()
        ]

    async def close(self) -> None:
        for sandbox_id in list(self._sandboxes):
            await self.destroy(sandbox_id)

    # Methods for tests

    def kill_guest(self, sandbox_id: str) -> None:
        """Kill the first process of a sandbox and everything it has started. In a real sandbox
        the kernel ends the rest."""
        process = self._get_sandbox(sandbox_id).process
        started = _find_descendants(process.pid)
        process.kill()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze_guest(self, sandbox_id: str) -> None:
        """Stop the guest, so that it neither reads nor answers."""
        self._get_sandbox(sandbox_id).process.send_signal(signal.SIGSTOP)

    def directory_of(self, sandbox_id: str) -> str:
        """Return the path of a sandbox's working directory on this machine."""
        return self._get_sandbox(sandbox_id).directory

    def _get_sandbox(self, sandbox_id: str) -> _FakeSandbox:
        try:
            return self._sandboxes[sandbox_id]
        except KeyError:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id) from None


class _MappedChannel(SocketChannel):
    """Replaces the configured working directory by the temporary one in requests. Real isolation
    does that with a mount."""

    def __init__(self, sock: socket.socket, outside: str, inside: str) -> None:
        super().__init__(sock)
        self._frames = FrameReader(TO_GUEST)
        self._outside = outside
        self._inside = inside

    async def send(self, data: bytes) -> None:
        mapped = bytearray()
        for kind, stream, payload in self._frames.feed(data):
            if kind == OPEN:
                mapped += b"".join(encode_request(stream, self._map_paths(decode_json(payload))))
            else:
                mapped += encode(kind, stream, payload)
        await super().send(bytes(mapped))

    def send_now(self, data: bytes) -> int:
        return 0  # send() has to rewrite the data

    def _map_paths(self, request: dict[str, Any]) -> dict[str, Any]:
        names = _PATHS if request.get("op") != "python" else ("path", "cwd", "path0")
        for name in names:
            path = request.get(name)
            if isinstance(path, str) and f"{path}/".startswith(f"{self._outside}/"):
                request[name] = self._inside + path[len(self._outside) :]
        return request


def _make_sandbox(config: SandboxConfig, labels: Mapping[str, str]) -> _FakeSandbox:
    host_end, guest_end = socket.socketpair()
    with guest_end:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOOTSTRAP, str(guest_end.fileno())],
            pass_fds=(guest_end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath},
        )
    directory = os.path.realpath(tempfile.mkdtemp(prefix="paracle-fake-"))
    return _FakeSandbox(config, dict(labels), directory, process, host_end)


def _find_descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *_find_descendants(child))]


def _make_env(directory: str) -> dict[str, str]:
    path = f"{os.environ.get('PATH', os.defpath)}:{directory}/.local/bin"
    return {"PATH": path, "HOME": directory, "LANG": "C.UTF-8"}


def _remove_sandbox(sandbox: _FakeSandbox) -> None:
    """Close the channel, at which the guest ends itself and everything it has started."""
    sandbox.host_end.close()
    try:
        sandbox.process.send_signal(signal.SIGCONT)
        sandbox.process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(sandbox.process.pid, signal.SIGKILL)
        sandbox.process.wait()
    shutil.rmtree(sandbox.directory, ignore_errors=True)
