"""A sandbox, as a user holds it: programs, Python, files and figures of one isolated place."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from .backends.base import Backend, Usage
from .channel.connection import Connection
from .command import Command, Terms
from .config import SandboxConfig
from .errors import SandboxCleanupError, SandboxCreationError, SandboxError, SandboxExecutionError
from .launch import (
    MAX_ARGUMENT,
    MAX_SOURCE,
    CommandOptions,
    Request,
    check_options,
    checked_timeout,
    consumers_of,
    exec_request,
    python_request,
    stdin_of,
)
from .limits import MIB, Counts, disk_breach, memory_alarm
from .results import CommandResult, Stats
from .sandbox_files import SandboxFiles


class Sandbox(SandboxFiles):
    """One isolated place. ``async with`` makes it and removes it, whatever happens inside.

    Everything may be used concurrently. A program that fails is a result; one that we stopped
    is an exception: SandboxTimeoutError, ResourceLimitError, or SandboxExecutionError when the
    sandbox itself broke, each with what had been printed.
    """

    def __init__(
        self,
        backend: Backend,
        sandbox_id: str,
        config: SandboxConfig | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._sandbox_id = sandbox_id
        self._config = config if config is not None else SandboxConfig()
        self._labels = dict(labels or {})
        self._connection: Connection | None = None
        self._made = False
        self._in_use = 0
        self._last_used = time.monotonic()
        self._seen = Counts()
        self._cpu_mark = (0.0, 0.0)
        self._started_at = 0.0

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def id(self) -> str:
        return self._sandbox_id

    @property
    def config(self) -> SandboxConfig:
        return self._config

    @property
    def is_running(self) -> bool:
        """Started, not stopped, and its guest still answers."""
        return self._connection is not None and self._connection.is_open

    @property
    def last_used(self) -> float:
        """time.monotonic() of the last beginning or end of an operation."""
        return self._last_used

    @property
    def in_use(self) -> int:
        """How many operations run now, background commands included."""
        return self._in_use

    # Life

    async def start(self) -> None:
        """Make it. On failure nothing is left behind. A second start is a no-op."""
        if self._made:
            return
        await self._backend.create(self._sandbox_id, self._config, self._labels)
        self._made = True
        try:
            channel = await self._backend.connect(self._sandbox_id)
            self._connection = Connection(channel, self._sandbox_id)
            await self._connection.start()
        except BaseException as error:
            await asyncio.shield(self._undo_start())
            if isinstance(error, OSError):
                raise SandboxCreationError(
                    f"Cannot connect to the guest: {error}", self._sandbox_id, step="connect"
                ) from error
            raise
        self._seen = Counts()
        self._started_at = time.monotonic()
        self._cpu_mark = (self._started_at, 0.0)
        self._touch()

    async def _undo_start(self) -> None:
        try:
            await self.stop()
        except SandboxError:
            pass  # why it did not start matters more; the next sweep removes the rest

    async def stop(self) -> None:
        """Remove it with everything in it. Idempotent. Raises SandboxCleanupError when
        something stays; another stop tries again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        if not self._made:
            return
        seconds = self._config.cleanup_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._backend.destroy(self._sandbox_id)
        except TimeoutError as error:
            raise SandboxCleanupError(
                f"The sandbox was not removed within {seconds} seconds", self._sandbox_id
            ) from error
        self._made = False

    async def cleanup(self) -> None:
        """stop(), by another name."""
        await self.stop()

    async def close(self) -> None:
        """stop(), by another name."""
        await self.stop()

    def context(self) -> Self:
        """``async with sandbox.context()`` is ``async with sandbox``."""
        return self

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    # Programs

    async def start_command(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start a program in the background: a str through ``sh -c``, a list as its argv."""
        check_options(options)
        script = None
        if not isinstance(command, str):
            argv = list(command)
        elif len(command) <= MAX_ARGUMENT // 4:
            argv = ["sh", "-c", command]
        else:
            script = self._script_path("script.sh")
            argv = ["sh", script]
            await self._write(script, command.encode())
        return self._launch(exec_request(argv, options), timeout, options, script)

    async def start_code(
        self,
        code: str,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start Python code in the background; it imports from the working directory."""
        check_options(options)
        path = self._script_path("code.py")
        request = python_request(path, args, options)
        request["path0"] = self._config.working_dir
        if len(code) <= MAX_SOURCE // 4:
            request["source"] = code
        else:
            await self._write(path, code.encode())
        return self._launch(request, timeout, options, path)

    async def start_file(
        self,
        path: str,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start a Python file of the sandbox in the background."""
        check_options(options)
        request = python_request(self._checked(path), args, options)
        return self._launch(request, timeout, options)

    async def execute(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run a program to its end; cancelled, it takes everything it started with it."""
        return await _outcome(await self.start_command(command, timeout=timeout, **options))

    async def run_code(
        self,
        code: str,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run Python code to its end."""
        return await _outcome(await self.start_code(code, args, timeout=timeout, **options))

    async def run_file(
        self,
        path: str,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run a Python file of the sandbox to its end."""
        return await _outcome(await self.start_file(path, args, timeout=timeout, **options))

    async def run_command(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> str:
        """Run a program; what it printed, and its stderr as well when it failed."""
        return text_of(await self.execute(command, timeout, **options))

    async def stream(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) of a program as it prints; raises at the end when it
        was stopped. Leaving the loop early kills it."""
        async with await self.start_command(command, timeout=timeout, **options) as running:
            async for chunk in running.output():
                yield chunk
            await running.wait()
