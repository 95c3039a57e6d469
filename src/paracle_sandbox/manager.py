"""SandboxManager decides how many sandboxes there may be, and for how long.

Every sandbox is in exactly one of three places: being started (``_starting``), alive
(``_sandboxes``) or being removed (``_removing``); each holds one slot until it is really gone.
Moves between them happen between two awaits, and all I/O happens outside of them. A removal is a
task of its own: a caller that is cancelled waits for it, and nothing stays half removed.

Taking a slot is synchronous, so no lock is ever held across I/O: a caller that gets a slot owns it
before the next await. Freeing a slot hands it to the longest waiter, so that no later caller slips
in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypedDict

from .backends.base import Backend
from .backends.registry import get_backend
from .compat.sandbox_settings import ConfigLike, SandboxSettings, full_config, with_volumes
from .config import SandboxConfig
from .errors import (
    SandboxConflictError,
    SandboxError,
    SandboxLimitError,
    SandboxNotFoundError,
)
from .ids import check_sandbox_id, new_sandbox_id
from .results import Stats
from .sandbox.command_options import checked_seconds
from .sandbox.sandbox import Sandbox
from .settings import Settings, load_settings

logger = logging.getLogger(__name__)

AnyConfig = SandboxConfig | SandboxSettings
DEFAULT_LIMIT = 10
IDLE_SECONDS: float = 3600
_SHORTEST_LOOK = 0.01


class Failure(TypedDict):
    """Stands in place of the stats of a sandbox that could not be asked."""

    error: str


class ManagerStats(TypedDict):
    """Says what a manager holds; ``max_concurrent`` and ``max_sandboxes`` are one limit."""

    total_sandboxes: int
    max_concurrent: int
    max_sandboxes: int
    utilization: float
    active_operations: int
    idle_timeout: float | None
    cleanup_interval: float
    is_shutting_down: bool
    sandboxes: dict[str, Stats | Failure]


class SandboxManager:
    """Creates, finds and removes sandboxes, at most ``max_concurrent`` at a time.

    A backend given as an object stays the caller's; one given by name is closed with the manager.
    ``idle_timeout`` is in seconds; None keeps unused sandboxes for ever, 0 removes them at the
    next look, which is every ``cleanup_interval`` seconds, and more often where the timeout is
    short. Without one, containers and instances have that of their settings (900). ``labels`` go
    to each sandbox, and are shown when sandboxes are listed.
    """

    def __init__(
        self,
        max_concurrent: int | None = None,
        *,
        max_sandboxes: int | None = None,
        idle_timeout: float | None = IDLE_SECONDS,
        cleanup_interval: float = 300,
        backend: Backend | str | None = None,
        settings: Settings | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._slots = Slots(one_limit(max_concurrent, max_sandboxes))
        if not checked_seconds("cleanup_interval", cleanup_interval):
            raise ValueError("cleanup_interval must be more than 0 seconds")
        if idle_timeout is not None:
            checked_seconds("idle_timeout", idle_timeout)
        self.cleanup_interval = cleanup_interval
        self.settings = settings or load_settings()
        self.labels = dict(labels or {})
        self.idle_timeout = idle_timeout
        self._is_default_idle_timeout = idle_timeout is IDLE_SECONDS
        self._backend = backend
        self._owns_backend = not isinstance(backend, Backend)
        named = backend.name if isinstance(backend, Backend) else backend or self.settings.mode
        self._take_idle_timeout_of(named)
        self._sandboxes: dict[str, Sandbox] = {}
        self._starting: dict[str, asyncio.Future[None]] = {}
        self._removing: dict[str, asyncio.Task[None]] = {}
        self._last_used: dict[str, float] = {}
        self._operations: Counter[str] = Counter()
        self._kept: set[str] = set()
        self._idle_timer = IdleTimer(self._idle_interval, self._remove_idle)
        self._closed = False

    @property
    def max_concurrent(self) -> int:
        return self._slots.limit

    @property
    def max_sandboxes(self) -> int:
        return self._slots.limit

    @property
    def active_sandboxes(self) -> dict[str, Sandbox]:
        return self._sandboxes

    @property
    def backend(self) -> Backend:
        """The backend, made when it is first needed. Raises BackendUnavailableError."""
        if not isinstance(self._backend, Backend):
            self._backend = get_backend(self._backend, self.settings)
            self._take_idle_timeout_of(self._backend.name)  # "auto" is known by name only now
        return self._backend

    def _take_idle_timeout_of(self, kind: str) -> None:
        """Take the idle timeout of the settings for this kind of backend, unless the caller gave
        one."""
        seconds = self.settings.idle_timeout(kind)
        if self._is_default_idle_timeout and seconds is not None:
            self.idle_timeout = seconds

    # Making

    async def create(
        self, config: ConfigLike | None = None, sandbox_id: str | None = None
    ) -> Sandbox:
        """Make and start a sandbox. Raises SandboxLimitError at once when there is no room,
        SandboxConflictError when the id is taken, SandboxCreationError when it cannot be made."""
        self._slots.take()
        return await self._create(config, sandbox_id)

    async def create_when_free(self, config: ConfigLike | None = None) -> Sandbox:
        """Like create(), but wait for room instead of raising. Batches use it."""
        await self._slots.wait()
        return await self._create(config, None)

    async def create_sandbox(
        self,
        config: ConfigLike | None = None,
        volume_bindings: Mapping[str, str] | None = None,
    ) -> str:
        """Like create(), but returns the id, and makes a DockerSandbox with a terminal, on whatever
        backend: commands of its run_command() follow one another. ``volume_bindings`` adds to the
        configuration's ``volumes``: paths of the host, and where each appears inside, read-only."""
        full = with_volumes(self.resolve_config(config), volume_bindings)
        self._slots.take()
        return (await self._create(full, None, terminal=True)).sandbox_id

    @asynccontextmanager
    async def managed_sandbox(self, config: ConfigLike | None = None) -> AsyncIterator[Sandbox]:
        """Make a sandbox that is gone when the block ends, however it ends."""
        sandbox = await self.create(config)
        try:
            yield sandbox
        finally:
            await self.destroy(sandbox.sandbox_id)

    async def _create(
        self, config: ConfigLike | None, sandbox_id: str | None, *, terminal: bool = False
    ) -> Sandbox:
        """Make a sandbox for which the caller has taken a slot; a failure gives the slot back."""
        try:
            wanted, full = self._free_id(sandbox_id), self.resolve_config(config)
            if terminal:
                from .compat.docker_sandbox import DockerSandbox

                docker = DockerSandbox(wanted, full, backend=self.backend, labels=self.labels)
                sandbox: Sandbox = docker
                await self._start(docker, docker.create)
            else:
                sandbox = Sandbox(self.backend, wanted, full, self.labels)
                await self._start(sandbox, sandbox.start)
        except BaseException:
            self._slots.free()
            raise
        self.start_cleanup_task()
        return sandbox

    async def _start(self, sandbox: Sandbox, start: Callable[[], Awaitable[object]]) -> None:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starting[sandbox.sandbox_id] = settled
        try:
            await start()
            if self._closed:
                await sandbox.stop()
                raise SandboxError("The manager was closed meanwhile", sandbox.sandbox_id)
            self._sandboxes[sandbox.sandbox_id] = sandbox
            self._last_used[sandbox.sandbox_id] = time.monotonic()
        finally:
            del self._starting[sandbox.sandbox_id]
            settled.set_result(None)

    def _free_id(self, wanted: str | None) -> str:
        if self._closed:
            raise SandboxError("The manager is closed")
        sandbox_id = new_sandbox_id() if wanted is None else wanted
        check_sandbox_id(sandbox_id)
        if any(sandbox_id in s for s in (self._sandboxes, self._starting, self._removing)):
            raise SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)
        return sandbox_id

    def resolve_config(self, config: ConfigLike | None = None) -> SandboxConfig:
        """Return the whole configuration that create() uses: without one, the defaults of the
        settings (environment and config.toml) for this backend."""
        if config is None:
            return self.settings.default_config(self.backend.name)
        return full_config(config)

    # Finding

    async def get(self, sandbox_id: str) -> Sandbox | None:
        """Return the sandbox, or None. Counts as a use of it."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            self._last_used[sandbox_id] = time.monotonic()
        return sandbox

    async def get_sandbox(self, sandbox_id: str) -> Sandbox:
        """Like get(), but raises SandboxNotFoundError (a KeyError)."""
        sandbox = await self.get(sandbox_id)
        if sandbox is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        return sandbox

    @asynccontextmanager
    async def sandbox_operation(self, sandbox_id: str) -> AsyncIterator[Sandbox]:
        """Return the sandbox, which does not count as idle inside the block."""
        sandbox = await self.get_sandbox(sandbox_id)
        self._operations[sandbox_id] += 1
        try:
            yield sandbox
        finally:
            self._operations[sandbox_id] -= 1
            if not self._operations[sandbox_id]:
                del self._operations[sandbox_id]
            if sandbox_id in self._sandboxes:
                self._last_used[sandbox_id] = time.monotonic()

    async def get_stats(self) -> ManagerStats:
        """Say how full the manager is, and what each sandbox uses."""
        alive = dict(self._sandboxes)
        stats = await asyncio.gather(*map(_stats_of, alive.values()))
        return {
            "total_sandboxes": len(alive),
            "max_concurrent": self.max_concurrent,
            "max_sandboxes": self.max_sandboxes,
            "utilization": len(alive) / self.max_concurrent,
            "active_operations": self._operations.total(),
            "idle_timeout": self.idle_timeout,
            "cleanup_interval": self.cleanup_interval,
            "is_shutting_down": self._closed,
            "sandboxes": dict(zip(alive, stats, strict=True)),
        }

    # Removing

    def keep(self, sandbox_id: str) -> None:
        """Let a sandbox stay for inspection until it is destroyed by name, idles out, or
        close()."""
        if sandbox_id in self._sandboxes and sandbox_id not in self._kept:
            self._kept.add(sandbox_id)
            self._slots.keep()

    async def destroy(self, sandbox_id: str) -> None:
        """Remove it; an unknown id is no error. Raises SandboxCleanupError when something stays;
        the manager then still lists it, so that it can be tried again."""
        removal = self._begin_removal(sandbox_id)
        if removal is not None:
            await _finish(removal)

    async def delete_sandbox(self, sandbox_id: str) -> None:
        await self.destroy(sandbox_id)

    async def destroy_all(self) -> None:
        """Remove every sandbox, side by side. Raises the first failure after trying all."""
        reason = "shutdown" if self._closed else "request"
        for sandbox_id in list(self._sandboxes):
            self._begin_removal(sandbox_id, reason)
        removals = list(self._removing.values())
        if removals:
            await _finish(asyncio.gather(*removals, return_exceptions=True))
        for removal in removals:
            removal.result()

    async def cleanup(self) -> None:
        """Remove every sandbox; the manager stays usable."""
        await self.destroy_all()

    async def close(self) -> None:
        """Remove every sandbox, also those being made, and let the backend go. Idempotent."""
        self._closed = True
        try:
            while self._starting:
                await asyncio.wait(list(self._starting.values()))
            await self.destroy_all()
        finally:
            if self._owns_backend and isinstance(self._backend, Backend):
                await self._backend.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _begin_removal(self, sandbox_id: str, reason: str = "request") -> asyncio.Task[None] | None:
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is None:
            return self._removing.get(sandbox_id)
        removal = asyncio.get_running_loop().create_task(self._stop(sandbox, reason))
        self._removing[sandbox_id] = removal
        removal.add_done_callback(partial(self._end_removal, sandbox))
        return removal

    async def _stop(self, sandbox: Sandbox, reason: str) -> None:
        """Remove one sandbox. ``reason`` is "request", "idle", "lost" or "shutdown"."""
        await sandbox.stop()

    def _end_removal(self, sandbox: Sandbox, removal: asyncio.Task[None]) -> None:
        sandbox_id = sandbox.sandbox_id
        del self._removing[sandbox_id]
        failure = None if removal.cancelled() else removal.exception()
        if failure is not None:
            logger.error("Sandbox %s was not removed: %s", sandbox_id, failure)
        if failure is not None or removal.cancelled():
            self._sandboxes[sandbox_id] = sandbox
            return
        self._slots.free(kept=sandbox_id in self._kept)
        self._kept.discard(sandbox_id)
        self._last_used.pop(sandbox_id, None)
        if not self._sandboxes:
            self._idle_timer.stop()

    # Idle sandboxes

    def start_cleanup_task(self) -> None:
        """Look for idle sandboxes from now on. Happens by itself with the first sandbox."""
        if self.idle_timeout is not None:
            self._idle_timer.start()

    def _idle_interval(self) -> float:
        """``cleanup_interval``, or less for an idle timeout that is shorter than it: a sandbox is
        gone a fifth of its timeout late, at most."""
        if not self.idle_timeout:
            return self.cleanup_interval
        return min(self.cleanup_interval, max(self.idle_timeout / 5, _SHORTEST_LOOK))

    def _remove_idle(self) -> bool:
        """Remove the idle sandboxes; return whether to look again."""
        for sandbox_id, sandbox in list(self._sandboxes.items()):
            if self._is_idle(sandbox):
                logger.info("Removing sandbox %s, which nobody used for long", sandbox_id)
                self._begin_removal(sandbox_id, "idle")
        return bool(self._sandboxes or self._removing)

    async def _cleanup_idle_sandboxes(self) -> None:
        """Remove now what is idle, without waiting for the next look."""
        self._remove_idle()
        if self._removing:
            await asyncio.wait(list(self._removing.values()))

    def _is_idle(self, sandbox: Sandbox) -> bool:
        if self.idle_timeout is None or sandbox.in_use or self._operations[sandbox.sandbox_id]:
            return False
        noted = self._last_used[sandbox.sandbox_id]
        # A program may set the time that is noted; 0 says that it needs the sandbox no more.
        last_used = max(sandbox.last_used, noted) if noted else -math.inf
        return time.monotonic() - last_used > self.idle_timeout


class OwnerSandboxes(SandboxManager):
    """A manager that makes one sandbox for each owner, under an id that belongs to the owner.

    ``stop`` is called in the task of each removal and has to remove the sandbox; what it does
    before, such as saving files, delays the owner's next sandbox and nothing else. An owner that
    asks while the sandbox is made or removed waits.
    """

    def __init__(
        self,
        max_concurrent: int,
        *,
        stop: Callable[[Sandbox, str], Awaitable[None]],
        **options: Any,
    ) -> None:
        super().__init__(max_concurrent, **options)
        self._stop_by_policy = stop

    @property
    def slots_taken(self) -> int:
        return self._slots.taken

    def take_slot(self) -> None:
        """Take the room of one sandbox. Raises SandboxLimitError."""
        self._slots.take()

    def free_slot(self) -> None:
        """Give back the room of a sandbox that this manager does not have."""
        self._slots.free()

    async def open(self, sandbox_id: str, make: Callable[[], Awaitable[Sandbox]]) -> Sandbox:
        """Return the owner's sandbox. If there is none, ``make`` is called, once however many
        callers there are; it has to call add(). A sandbox that died is removed first."""
        while True:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is not None and sandbox.is_running:
                self._last_used[sandbox_id] = time.monotonic()
                return sandbox
            if sandbox is not None and (removal := self._begin_removal(sandbox_id, "lost")):
                await asyncio.shield(removal)
            elif not await self.wait_for_change(sandbox_id):
                return await make()

    async def wait_for_change(self, sandbox_id: str) -> bool:
        """Wait while the sandbox is made or removed. Returns False at once if it is neither."""
        change = self._starting.get(sandbox_id) or self._removing.get(sandbox_id)
        if change is not None:
            await asyncio.wait([change])
        return change is not None

    async def add(self, sandbox_id: str, make: Callable[[], Awaitable[Sandbox]]) -> Sandbox:
        """Make a sandbox in a slot that the caller took; a failure gives the slot back."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starting[sandbox_id] = settled
        try:
            sandbox = self._sandboxes[sandbox_id] = await make()
            self._last_used[sandbox_id] = time.monotonic()
        except BaseException:
            self._slots.free()
            raise
        finally:
            del self._starting[sandbox_id]
            settled.set_result(None)
        self.start_cleanup_task()
        return sandbox

    async def remove(self, sandbox_id: str, reason: str) -> None:
        """Like destroy(), for a reason that ``stop`` is told."""
        removal = self._begin_removal(sandbox_id, reason)
        if removal is not None:
            await _finish(removal)

    async def _stop(self, sandbox: Sandbox, reason: str) -> None:
        await self._stop_by_policy(sandbox, reason)


async def _finish(removal: asyncio.Future[Any]) -> None:
    """Wait for a removal to its end; a cancellation is passed on only then."""
    cancelled: asyncio.CancelledError | None = None
    while not removal.done():
        try:
            await asyncio.wait([removal])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    removal.result()


class Slots:
    """Lends at most ``limit`` slots at a time, at once or in turn."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._kept = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def take(self) -> None:
        """Take a slot now. Raises SandboxLimitError when none is free."""
        if self.taken >= self.limit:
            raise self.full()
        self.taken += 1

    async def wait(self) -> None:
        """Take a slot as soon as one is free. Raises SandboxLimitError when none will be, because
        every one is held by a sandbox that was kept on purpose."""
        if self.taken < self.limit:
            self.taken += 1
            return
        if self._kept >= self.limit:
            raise self.full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The slot may have been handed over in the same moment: pass it on.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.free()
            raise
        finally:
            if turn in self._waiters:
                self._waiters.remove(turn)

    def free(self, *, kept: bool = False) -> None:
        """Give a slot back, to the longest waiter if there is one."""
        self._kept -= kept
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def keep(self) -> None:
        """Note that one slot stays taken until its sandbox is removed by name. Waiting for that
        could take for ever, so where all slots are kept, waiters get SandboxLimitError."""
        self._kept += 1
        if self._kept < self.limit:
            return
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_exception(self.full())

    def full(self) -> SandboxLimitError:
        return SandboxLimitError(f"Maximum number of sandboxes ({self.limit}) reached")


def one_limit(max_concurrent: int | None, max_sandboxes: int | None) -> int:
    """Resolve the limit that has two names."""
    given = {limit for limit in (max_concurrent, max_sandboxes) if limit is not None}
    if len(given) > 1:
        raise ValueError("max_concurrent and max_sandboxes are one limit; give one of them")
    name = "max_sandboxes" if max_concurrent is None else "max_concurrent"
    return at_least_one(name, given.pop() if given else DEFAULT_LIMIT)


def at_least_one(name: str, value: int) -> int:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least one, not {value}")
    return int(value)


class IdleTimer:
    """Calls ``look`` every ``interval()`` seconds while it answers True.

    A timer and not a task: it needs no care when its event loop ends, and the next loop
    simply starts a new one.
    """

    def __init__(self, interval: Callable[[], float], look: Callable[[], bool]) -> None:
        self._interval = interval
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the timer in the running loop; no-op while it runs there already."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(self._interval(), self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._look():
            self.start()


async def _stats_of(sandbox: Sandbox) -> Stats | Failure:
    try:
        return await sandbox.get_stats()
    except SandboxError as error:
        return {"error": error.message}
