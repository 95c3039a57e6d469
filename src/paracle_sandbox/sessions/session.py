"""PythonSession keeps variables, imports and functions from one cell of code to the next.

One interpreter runs in the sandbox as a background command (see driver.py). A cell that takes too
long or prints too much is interrupted first, and then the variables are still there. If it goes on,
it is killed with its interpreter, and the next cell starts a new one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from types import TracebackType
from typing import Self

from ..errors import (
    ResourceLimitError,
    SandboxError,
    SandboxExecutionError,
    SandboxTimeoutError,
    StoppedError,
)
from ..sandbox.command import Command
from ..sandbox.output import Consumers, TextCallback
from ..sandbox.sandbox import Sandbox
from .cells import Cell, CellResult
from .frames import FrameReader, compute_frame_limit

MAX_OUTPUT = 4 << 20
# The time that an interrupted cell has to end by itself.
GRACE_SECONDS = 3.0
_START_SECONDS = 60.0
_TEN_YEARS = 10 * 365 * 86_400.0
LOST = "Its variables are lost; the next call starts a new interpreter."
KEPT = "Its variables are still there."


@cache
def _read_driver() -> str:
    """Join the files of the program into one. Line numbers of its tracebacks fit no file."""
    layout = _read_text("layout.py") + "\n" + _read_text("printers.py")
    parts = map(_read_text, ("notebook.py", "values.py", "driver.py"))
    return "\n".join([f"LAYOUT = {layout!r}", *parts])


def _read_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


class PythonSession:
    """One interpreter in ``sandbox``, which the first cell starts. Cells run one at a time.

    ``timeout`` is the default limit of a cell in seconds, and ``max_output`` the number of bytes
    that a cell may print and show.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        timeout: float = 300.0,
        max_output: int = MAX_OUTPUT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.sandbox = sandbox
        self._timeout = timeout
        self._max_output = max_output
        self._env = {"MPLBACKEND": "agg", **(env or {})}
        self._command: Command | None = None
        self._readers: dict[str, FrameReader] = {}
        self._cell: Cell | None = None
        self._consumers = Consumers()
        self._changed = asyncio.Event()
        self._cell_lock = asyncio.Lock()

    @property
    def is_running(self) -> bool:
        """Whether there is an interpreter, and so variables."""
        return self._command is not None and self._command.poll() is None

    async def run(
        self,
        code: str,
        timeout: float | None = None,
        *,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> CellResult:
        """Run one cell. An exception in it is part of the result.

        Raises SandboxTimeoutError or ResourceLimitError when the cell was stopped, and
        SandboxExecutionError when the interpreter ended. The message says whether the variables
        are still there.
        """
        seconds = self._timeout if timeout is None else timeout
        async with self._cell_lock:
            await self.sandbox.wait_for_packages(code)
            if not self.is_running:
                await self._start()
            assert self._command is not None
            self._cell = cell = Cell(self._max_output)
            self._consumers = Consumers(on_stdout, on_stderr)
            request = json.dumps({"code": code}).encode()
            try:
                with suppress(BrokenPipeError):  # the exit of the interpreter explains more
                    await self._command.write_stdin(b"%d\n" % len(request) + request)
                await self._wait_for_end(cell, seconds)
                await self._consumers.finish()
            except asyncio.CancelledError:
                await asyncio.shield(self._end_early(cell))
                raise
            finally:
                self._cell = None
            return cell.to_result()

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell that runs now, if any."""
        if self._cell is not None and self._command is not None:
            await self._command.send_signal(signal.SIGINT)

    async def reset(self) -> None:
        """Forget all variables, and end a running cell. The next cell gets a new interpreter."""
        command, self._command = self._command, None
        if command is not None:
            await command.kill()

    async def close(self) -> None:
        """End the interpreter. The next cell starts a new one, as after reset()."""
        await self.reset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # The interpreter

    async def _start(self) -> None:
        mark = secrets.token_hex(16)
        limit = compute_frame_limit(self._max_output)
        self._readers = {name: FrameReader(mark, limit) for name in ("stdout", "stderr")}
        self._cell = cell = Cell(self._max_output)
        self._command = await self.sandbox.start_without_packages(
            _read_driver(), [mark], timeout=_TEN_YEARS, stdin=True, env=self._env, max_output=0,
            on_output_bytes=self._receive,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_START_SECONDS):
                while self._command.poll() is None and cell.ended is None:
                    await self._wait_for_change()
        except TimeoutError:
            await self.reset()
            raise SandboxExecutionError(
                f"The interpreter did not start within {_START_SECONDS:g} seconds. Try again, or "
                "give the sandbox more CPU.",
                self.sandbox.sandbox_id,
            ) from None
        if cell.ended is None:
            await self._command.wait()
            raise SandboxExecutionError(
                f"The interpreter did not start: {cell.to_result()['stderr'][-1000:]}",
                self.sandbox.sandbox_id,
            )

    async def _receive(self, name: str, data: bytes) -> None:
        cell = self._cell
        reader = self._readers[name]
        if reader.completes_large(len(data)):
            pieces = await asyncio.to_thread(lambda: list(reader.feed(data)))
        else:
            pieces = list(reader.feed(data))
        for piece in pieces:
            if cell is None:
                continue  # a thread printed it between two cells
            if isinstance(piece, dict):
                ready = piece.get("type") == "ready"
                cell.handle_answer(name, {"type": "end"} if ready else piece)
            else:
                cell.add_output(name, piece)
                if not cell.is_full:
                    await self._consumers.deliver(name, piece)
        self._changed.set()

    async def _wait_for_change(self) -> None:
        """Wait for output or an answer of the cell, or for the end of the interpreter."""
        self._changed.clear()
        assert self._command is not None
        ended = asyncio.ensure_future(_wait_quietly(self._command))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((ended, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            changed.cancel()

    # The end of a cell

    async def _wait_for_end(self, cell: Cell, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wait_until_over(cell)
        except TimeoutError:
            kept = await self._end_early(cell)
            raise SandboxTimeoutError(
                f"The cell timed out after {seconds:g} seconds. {KEPT if kept else LOST}",
                self.sandbox.sandbox_id, seconds, **_get_output(cell),
            ) from None  # fmt: skip
        if cell.is_full:
            kept = await self._end_early(cell)
            raise ResourceLimitError(
                f"The cell printed or showed more than {cell.max_output} bytes. "
                + (KEPT if kept else LOST),
                self.sandbox.sandbox_id, "output", cell.max_output, cell.size, **_get_output(cell),
            )  # fmt: skip
        if not cell.is_over:
            await self._raise_interpreter_ended(cell)

    async def _wait_until_over(self, cell: Cell) -> None:
        while not (cell.is_over or cell.is_full or not self.is_running):
            await self._wait_for_change()

    async def _end_early(self, cell: Cell) -> bool:
        """Interrupt the cell, and kill its interpreter if it goes on. Returns whether the
        interpreter still runs."""
        assert self._command is not None
        await self._command.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                while self.is_running and not cell.is_over:
                    await self._wait_for_change()
        if not cell.is_over:
            await self.reset()
        return cell.is_over and self.is_running

    async def _raise_interpreter_ended(self, cell: Cell) -> None:
        command, self._command = self._command, None
        code: int | str = "unknown"
        if command is not None:
            try:
                code = (await command.wait())["exit_code"]
            except StoppedError as error:
                error.stdout, error.stderr = _get_output(cell).values()
                error.message += f" {LOST}"
                raise
        raise SandboxExecutionError(
            f"The interpreter ended in the middle of the cell, with exit code {code}. {LOST}",
            self.sandbox.sandbox_id, code if isinstance(code, int) else None, **_get_output(cell),
        )  # fmt: skip


async def _wait_quietly(command: Command) -> None:
    with suppress(SandboxError):
        await command.wait()


def _get_output(cell: Cell) -> dict[str, str]:
    result = cell.to_result()
    return {"stdout": result["stdout"], "stderr": result["stderr"]}
