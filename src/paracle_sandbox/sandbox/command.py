"""A command that runs in a sandbox: the handle to wait for it, feed it, watch it, stop it.

One task per command reads its stream until the guest's RESULT; timers of the event loop watch
the deadline and the limits. What wants the command stopped (the deadline, a limit, a
callback that failed, the user) names a reason and has the guest kill the tree; the end is
always the stream's end, and there the reason decides which error the command deserves. A guest
that does not confirm the kill in time, or answers it with an error, loses its sandbox.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..audit.operations import log_end
from ..backends.base import Usage
from ..channel.frames import DATA, STDERR
from ..channel.stream import Stream
from ..errors import (
    InvalidValueError,
    ResourceLimitError,
    SandboxError,
    SandboxExecutionError,
    StoppedError,
)
from ..host.platforms import SIGKILL
from ..results import CommandResult
from .command_options import checked_size
from .outcome import Counts, Ending, Stop, complains_of_disk, memory_breach, output_breach
from .output import Consumers, Output

if TYPE_CHECKING:
    from ..config import SandboxConfig

CONFIRM_SECONDS = 3.0
_CALLBACK_SECONDS = 1.0
_WATCH_SECONDS = 0.5
# A run this short is only checked for limits when it failed: usage costs more than it tells. With
# little memory it is shorter: at some 10 GB a second that may have been used up.
_SHORT_SECONDS = 0.05
_FASTEST_MB = 10_000
_KILLED = -SIGKILL
_UNCONFIRMED = "its guest did not confirm that the program was killed"
_LOOP_ENDED = "The event loop that the command was started in has ended"


class CommandSandbox(Protocol):
    """Lists what a command needs of its sandbox."""

    @property
    def sandbox_id(self) -> str: ...
    @property
    def config(self) -> SandboxConfig: ...
    async def look(self, *, exact: bool = False) -> Usage | None:
        """Return what the sandbox uses now, at some cost ``exact``; None when that cannot be
        read."""

    def overlook(self) -> None:
        """Note that a command has ended without a look at what it used."""

    async def kill_leftovers(self) -> None:
        """End what commands that have ended left running."""

    async def condemn(self, reason: str) -> None:
        """Destroy the sandbox: it does not do what it is told. Never raises SandboxError."""


@dataclass(frozen=True)
class Terms:
    """Says how a command is run, apart from what it is."""

    timeout_seconds: float
    max_output: int
    before: Counts
    takes_input: bool = False
    consumers: Consumers = field(default_factory=Consumers)
    on_end: Callable[[], None] = lambda: None


class Command:
    """Started already. ``async with`` kills it on the way out, if it still runs."""

    def __init__(self, place: CommandSandbox, stream: Stream, terms: Terms) -> None:
        self.pid: int | None = None
        self.listing: Stream | None = None
        self._sandbox = place
        self._stream = stream
        self._terms = terms
        self._output = Output(terms.max_output)
        self._stop_reason: Stop | None = None
        self._condemnation: asyncio.Task[None] | None = None
        self._destroyed_because = ""
        self._exit_code: int | None = None
        self._killed = False
        self._takes_input = terms.takes_input
        self._error: BaseException | None = None
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        self._timers = [loop.call_later(_WATCH_SECONDS, self._begin_watch)]
        if terms.timeout_seconds < math.inf:
            late = Stop(timed_out=True)
            self._timers.append(loop.call_later(terms.timeout_seconds, self._stop, late))
        self._helpers: list[asyncio.Task[None]] = []
        self._task = asyncio.create_task(self._run())

    # The handle.

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """The result, once it has ended.

        Raises SandboxTimeoutError, ResourceLimitError or SandboxExecutionError when it was
        stopped; a plain TimeoutError when it still runs after ``timeout``: it goes on then.
        """
        await self._ended(timeout)
        if not self._task.done():
            raise TimeoutError(f"The command still runs after {timeout:g} seconds")
        if isinstance(self._error, StoppedError):
            raise self._error.again()
        if self._error is not None:
            raise self._error
        return self._result()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._exit_code if self._task.done() else None

    async def kill(self) -> None:
        """End it and everything it has started. Returns when they are gone."""
        self._stop(Stop())
        await self._ended()

    async def send_signal(self, number: int) -> None:
        """Send a signal to its process group. Raises ValueError for what is none."""
        if not 0 < number < signal.NSIG:
            raise InvalidValueError(f"not the number of a signal: {number}")
        self._stream.signal({"signal": int(number)})

    async def write_stdin(self, data: bytes | str) -> None:
        """Write to its stdin, as fast as it reads. Raises BrokenPipeError when it has ended, or
        reads nothing."""
        raw = data.encode() if isinstance(data, str) else data
        if not self._takes_input and not self._stream.ended:
            raise BrokenPipeError("its input is closed: start it with stdin=True, close it last")
        if not await self._stream.write(raw):
            raise BrokenPipeError("the command has ended")

    async def close_stdin(self) -> None:
        self._takes_input = False
        self._stream.end()

    async def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal the new size."""
        self._stream.signal({"resize": [*checked_size(rows, columns)]})

    @property
    def stdout_bytes(self) -> bytes:
        """The exact bytes so far, up to the output limit."""
        return self._output.printed("stdout").raw()

    @property
    def stderr_bytes(self) -> bytes:
        return self._output.printed("stderr").raw()

    def only_text(self) -> None:
        """Keep no bytes beside their text: only the text will be asked for."""
        self._output.only_text()

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as they come. A slow reader stalls the command; one
        that is followed this way is never stopped for the amount of its output."""
        return self._output.follow()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()
        self._forget_listing()

    # Its life.

    async def _ended(self, timeout: float | None = None) -> None:
        if not self._task.done():  # else it may belong to an event loop that has ended
            await asyncio.wait((self._task,), timeout=timeout)

    def _forget_listing(self) -> None:
        """Give up a listing that is not wanted: the guest must not wait for a reader."""
        if self.listing is not None:
            self.listing.abandon()
            self.listing = None

    def feed(self, data: bytes) -> None:
        """Write ``data`` to its stdin, then close it, while it runs."""
        self._help(self._feed(data))

    async def _feed(self, data: bytes) -> None:
        if await self._stream.write(data):
            self._stream.end()

    async def _run(self) -> None:
        try:
            lost = await self._come_to_end()
            self._rest()
            self._error = (await self._ending(lost)).error()
            if isinstance(self._error, ResourceLimitError) and not self._killed:
                # It ended by itself, at a limit that what it left running would stay at.
                await self._sandbox.kill_leftovers()
        except asyncio.CancelledError:
            self._error = SandboxExecutionError(_LOOP_ENDED, self._sandbox.sandbox_id)
            raise
        finally:
            self._rest()
            if self._error is not None:
                self._forget_listing()
            if self._exit_code is None:
                self._exit_code = _KILLED
            self._output.close()
            seconds = asyncio.get_running_loop().time() - self._started
            log_end(self._sandbox.sandbox_id, self._exit_code, seconds, self._error)
            self._terms.on_end()

    async def _come_to_end(self) -> SandboxError | None:
        """Returns why its end is not known."""
        try:
            self._exit_code = self._checked_exit(await self._read())
        except SandboxError as error:
            if self._stop_reason is not None and self._may_still_run():
                self._condemn(_UNCONFIRMED)
            return error
        return None

    def _may_still_run(self) -> bool:
        """The guest answered the kill with an error, and did not say that all is over. A guest
        that is gone is the first process of its sandbox: everything else went with it."""
        failure = self._stream.failure
        return failure is not None and failure.get("nothing_runs") is not True

    def _rest(self) -> None:
        """Nothing more is to be watched or fed."""
        for timer in self._timers:
            timer.cancel()
        for helper in self._helpers:
            helper.cancel()

    async def _read(self) -> dict[str, Any]:
        names = {DATA: "stdout", STDERR: "stderr"}
        async for kind, payload in self._stream:
            name = names.get(kind)
            if name is None:
                pid = self._stream.short_event(payload).get("pid")
                self.pid = pid if type(pid) is int else None
                continue
            self._output.add(name, payload)
            await self._deliver(name, payload)
            if self._output.followed:
                await self._output.followers_ready()
        await self._deliver("", b"")
        return self._stream.result

    async def _deliver(self, name: str, payload: bytes) -> None:
        consumers = self._terms.consumers
        if not consumers:
            if self._output.truncated and not self._output.followed:
                breach = output_breach(self._output.size, self._output.limit)
                self._stop(Stop(breach=breach))
            return
        try:
            await (consumers.deliver(name, payload) if name else consumers.finish())
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            self._stop(Stop(error=error))  # the function's own
        except Exception as error:  # noqa: BLE001  a caller's own function may raise anything
            self._stop(Stop(error=error))

    # Stopping it.

    def _stop(self, reason: Stop) -> None:
        """Have the guest kill the tree; only the first reason counts."""
        if self._stop_reason is not None or self._task.done():
            return
        if reason.timed_out and self._stream.ended:
            return  # it ended in time; only its readers are late
        self._stop_reason = reason
        self._output.release()
        self._stream.release()
        self._stream.signal({"kill": True})
        loop = asyncio.get_running_loop()
        self._timers += [
            loop.call_later(_CALLBACK_SECONDS, self._terms.consumers.give_up),
            loop.call_later(CONFIRM_SECONDS, self._unconfirmed),
        ]

    def _unconfirmed(self) -> None:
        if not self._stream.ended:
            self._condemn(_UNCONFIRMED)

    def _condemn(self, reason: str) -> None:
        self._destroyed_because = reason
        message = f"The sandbox was destroyed because {reason}"
        self._condemnation = asyncio.create_task(self._sandbox.condemn(message))

    def _begin_watch(self) -> None:
        self._help(self._watch())

    async def _watch(self) -> None:
        """Stop it when the kernel kills for memory: what is left of it may hang for ever."""
        while self._stop_reason is None:
            usage = await self._sandbox.look()
            breach = usage and memory_breach(usage, self._terms.before, self._sandbox.config)
            if breach:
                self._stop(Stop(breach=breach))
            await asyncio.sleep(_WATCH_SECONDS)

    def _help(self, work: Coroutine[Any, Any, None]) -> None:
        self._helpers.append(asyncio.create_task(work))

    # The end.

    def _checked_exit(self, result: dict[str, Any]) -> int:
        code = result.get("exit_code")
        # Not a bool either, which is an int to Python and none to JSON.
        if type(code) is not int or not -128 <= code <= 255:
            raise self._stream.refuse("an exit code that is none")
        if result.get("survivors"):
            self._condemn("something in it could not be killed")
        self._killed = bool(result.get("killed"))
        return code

    async def _ending(self, lost: SandboxError | None) -> Ending:
        if self._condemnation is not None:
            await self._condemnation
        seconds = asyncio.get_running_loop().time() - self._started
        short = min(_SHORT_SECONDS, self._sandbox.config.memory_mb / _FASTEST_MB)
        suspicious = lost is not None or self._exit_code != 0 or seconds > short
        if not suspicious:
            self._sandbox.overlook()
        return Ending(
            sandbox_id=self._sandbox.sandbox_id,
            config=self._sandbox.config,
            timeout_seconds=self._terms.timeout_seconds,
            exit_code=self._exit_code,
            killed=self._killed,
            stop=self._stop_reason,
            lost=lost,
            usage=await self._look() if suspicious else None,
            before=self._terms.before,
            destroyed_because=self._destroyed_because,
            output=self._output,
        )

    async def _look(self) -> Usage | None:
        usage = await self._sandbox.look()
        if usage is None or not usage.disk_full or self._terms.before.disk_full:
            return usage
        if not self._exit_code or complains_of_disk(self._output):
            return usage
        # It may have filled the disk without a word, or have removed what did.
        return await self._sandbox.look(exact=True)

    def _result(self) -> CommandResult:
        assert self._exit_code is not None
        return {
            "exit_code": self._exit_code,
            "stdout": self._output.printed("stdout").text(),
            "stderr": self._output.printed("stderr").text(),
            "timed_out": False,
            "truncated": self._output.truncated,
        }


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
