"""The sandboxes of the users: one for each, made when it is needed, removed when it idles.

Each user has a lock for making and removing, so that a storm of first requests makes one
sandbox; nothing else waits on it. A sandbox that died is noticed by the next request, which
gets a new one with the kept files; the first answer about it tells (``losses``). All sandboxes of
the service, these and the ones that remote clients hold, share one number of slots.

A removal ends, whatever runs inside: its programs are killed first, then the files are saved, and
both together have ``SANDBOX_SAVE_TIMEOUT`` seconds. After that the sandbox is destroyed all the
same, and what could not be kept is a loss that the next answer tells. Each removal is a task of
its own, which goes on when whoever asked for it goes away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...backends.base import Backend
from ...config import SandboxConfig
from ...errors import (
    BackendUnavailableError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxLimitError,
)
from ...ids import new_sandbox_id
from ...sandbox.sandbox import Sandbox
from ...settings import Settings
from ...slots import Slots
from ..errors import RETRY_SECONDS, NotKept, Unavailable, classify, is_refused
from ..journal import Journal
from ..metrics import Metrics
from ..middleware.request_context import report_loss
from .kept_files import Listed, Workspace, Workspaces, save_quietly
from .lost_sandboxes import Loss, Losses
from .names import Names
from .quotas import check_room

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 5.0
# Of a save that no removal waits for. Its program is over, and whoever asked waits for it.
_SAVE_SECONDS = 300.0
LABEL = "paracle.service"
CREATE_ATTEMPTS = 3
_RETRY_PAUSE_SECONDS = 0.1


@dataclass
class _Turns:
    """One user's lock, and how many hold it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0


@dataclass
class Home:
    """One user's sandbox, and what the service knows of it."""

    user_id: str
    sandbox: Sandbox
    workspace: Workspace
    loss: Loss | None = None
    created_at: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.time)
    last_used_mark: float = field(default_factory=time.monotonic)
    execution_count: int = 0
    users_now: int = 0
    visits: int = 0
    # Set while it is removed: whether its files could be kept.
    leaving: asyncio.Future[bool] | None = None
    look: asyncio.Task[None] | None = None

    def touch(self) -> None:
        self.last_used = time.time()
        self.last_used_mark = time.monotonic()

    @property
    def recreated(self) -> bool:
        """The one before it was lost, and no answer has told its user yet."""
        return self.loss is not None and not self.loss.told

    @property
    def alone_at(self) -> int | None:
        """The number of the visit, if there is no other now."""
        return self.visits if self.users_now == 1 else None

    @property
    def is_busy(self) -> bool:
        return bool(self.users_now or self.sandbox.in_use)

    @property
    def is_usable(self) -> bool:
        """It runs, and nobody removes it."""
        return self.leaving is None and self.sandbox.is_running

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - max(self.last_used_mark, self.sandbox.last_used)


class Hosting:
    """Makes, finds and removes the users' sandboxes."""

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        names: Names,
        workspaces: Workspaces,
        losses: Losses,
        journal: Journal,
        metrics: Metrics,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.slots = Slots(settings.max_containers)
        self.losses = losses
        self._names = names
        self._workspaces = workspaces
        self._journal = journal
        self._metrics = metrics
        self._homes: dict[str, Home] = {}
        self._locks: dict[str, _Turns] = {}
        self._held: dict[str, list[SandboxConfig]] = {}
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: asyncio.Task[None] | None = None
        self._closed = False
        self._taken_over = False
        self._in_the_way = ""
        self._doubt: Callable[[], None] = lambda: None
        self._forget: Callable[[str], None] = lambda user_id: None

    def when_removed(self, forget: Callable[[str], None]) -> None:
        """``forget`` is called with the user whose sandbox was removed, unless it was lost: what
        was known of its programs goes with it."""
        self._forget = forget

    @property
    def is_closed(self) -> bool:
        return self._closed

    # Finding

    def find(self, user_id: str) -> Home | None:
        home = self._homes.get(user_id)
        if home is not None:
            report_loss(home.loss)
        return home

    def has(self, user_id: str) -> bool:
        return user_id in self._homes

    def all(self) -> list[Home]:
        return [self._homes[user_id] for user_id in sorted(self._homes)]

    def sandbox_id(self, user_id: str) -> str:
        """What the user's sandbox is called, whether there is one or not."""
        return self._names.user_sandbox(user_id)

    def user_of(self, sandbox_id: str) -> str | None:
        homes = self._homes.values()
        return next((h.user_id for h in homes if h.sandbox.sandbox_id == sandbox_id), None)

    @asynccontextmanager
    async def using(self, user_id: str, config: SandboxConfig | None = None) -> AsyncIterator[Home]:
        """The user's sandbox, made if need be; it does not count as idle inside the block."""
        home = await self.open(user_id, config)
        report_loss(home.loss)
        home.users_now += 1
        home.visits += 1
        home.touch()
        try:
            yield home
        finally:
            home.users_now -= 1
            home.touch()

    async def read(self, user_id: str, work: Callable[[Home], Awaitable[T]]) -> T:
        """Do what only looks; once more when the sandbox was lost under it, which is safe."""
        try:
            async with self.using(user_id) as home:
                return await work(home)
        except SandboxExecutionError as error:
            logger.warning("Looking again, in a new sandbox: %s", error)
            async with self.using(user_id) as home:
                return await work(home)

    async def open(self, user_id: str, config: SandboxConfig | None = None) -> Home:
        while True:
            home = self._homes.get(user_id)
            if home is not None and home.is_usable:
                return home
            if home is not None:
                await asyncio.shield(self._begin(self._remove_lost(home)))
                continue
            async with self._alone(user_id):
                if user_id not in self._homes:
                    return await self._make(user_id, config)

    async def _remove_lost(self, home: Home) -> None:
        """Unless somebody removes it already, for whom this waits."""
        async with self._alone(home.user_id):
            if self._homes.get(home.user_id) is home:
                self._journal.record("sandbox_lost", user=home.user_id, sandbox_id=home.sandbox.id)
                await self._remove(home)

    def default_config(self) -> SandboxConfig:
        settings = self.settings
        return SandboxConfig(
            base_image=settings.service_image,
            cpu_cores=settings.service_cpu_cores,
            memory_mb=settings.service_memory_mb,
            disk_mb=settings.service_disk_mb,
            timeout_seconds=3600,
            network_mode=settings.network_mode,
            read_only_filesystem=settings.read_only_filesystem,
            drop_capabilities=settings.drop_capabilities,
        )

    # Making

    async def _make(self, user_id: str, config: SandboxConfig | None) -> Home:
        wanted = config or self.default_config()
        self.take_room(user_id, wanted)
        try:
            sandbox = await create_with_retry(lambda: self._started(user_id, wanted))
            workspace = self._workspaces.get(self._names.workspace(user_id))
            try:
                self.refuse_when_closed()
                await self._restore(user_id, workspace, sandbox)
                self.refuse_when_closed()
            except OSError as error:
                await sandbox.stop()
                raise NotKept(f"The kept files cannot be read: {error}") from error
            except BaseException:
                await sandbox.stop()
                raise
        except BaseException as error:
            self._workspaces.release(self._names.workspace(user_id))
            self.leave_room(user_id, wanted)
            self.failed(user_id, error)
            raise
        self.losses.made(sandbox.sandbox_id)
        home = Home(user_id, sandbox, workspace, self.losses.untold(sandbox.sandbox_id))
        self._homes[user_id] = home
        self._metrics.creations.labels("ok").inc()
        limits = wanted.model_dump(include={"cpu_cores", "memory_mb", "disk_mb", "base_image"})
        self._journal.record(
            "create", user=user_id, sandbox_id=sandbox.sandbox_id, outcome="ok", resources=limits
        )
        return home

    async def _restore(self, user_id: str, workspace: Workspace, sandbox: Sandbox) -> None:
        """Put the kept files into it, unless somebody removes it meanwhile."""
        restoring = self._restoring[user_id] = asyncio.create_task(workspace.restore(sandbox))
        try:
            await restoring
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("The sandbox was removed while it was made", RETRY_SECONDS) from None
        finally:
            del self._restoring[user_id]

    async def _started(self, user_id: str, config: SandboxConfig) -> Sandbox:
        name = self._names.user_sandbox(user_id)
        sandbox = Sandbox(self.backend, name, config, {LABEL: self._names.installation})
        try:
            await sandbox.start()
        except SandboxConflictError:
            # The name is this user's alone: one that could not be removed has it.
            await self.backend.destroy(name)
            await sandbox.start()
        return sandbox

    def failed(self, user_id: str, error: BaseException) -> None:
        """A sandbox of this user could not be made."""
        if not isinstance(error, SandboxError | OSError):
            return
        self._journal.record("create", user=user_id, outcome="failed", error=str(error))
        self._metrics.creations.labels("failed").inc()
        if not isinstance(error, SandboxError):
            return
        failure = classify(error)
        if failure.retryable and failure.kind in ("creation", "engine_down"):
            self._doubt()

    def take_room(self, user_id: str, config: SandboxConfig) -> None:
        """A slot for one more sandbox of this user. Raises TooMany, Unavailable or
        BackendUnavailableError."""
        self.refuse_when_closed()
        if self._in_the_way:
            raise BackendUnavailableError(self._in_the_way)
        check_room(self.settings, self._held.get(user_id, []), config)
        try:
            self.slots.take()
        except SandboxLimitError:
            limit = self.slots.limit
            raise Unavailable(f"Maximum containers ({limit}) reached", RETRY_SECONDS) from None
        self._held.setdefault(user_id, []).append(config)

    def refuse_when_closed(self) -> None:
        """Also after a sandbox was made: the service may have begun to end meanwhile."""
        if self._closed:
            raise Unavailable("The service is shutting down", RETRY_SECONDS)

    def leave_room(self, user_id: str, config: SandboxConfig) -> None:
        self.slots.free()
        held = self._held[user_id]
        held.remove(config)
        if not held:
            del self._held[user_id]

    # Removing

    async def save(self, home: Home, after: Listed | None = None) -> bool:
        """Keep what changed in the working directory; whether all of it is kept."""
        if home.leaving is not None:
            return await asyncio.shield(home.leaving)
        return await save_quietly(home.workspace, home.sandbox, _SAVE_SECONDS, after)

    async def keep(self, home: Home) -> None:
        """Like save(), for what a user was promised. Raises NotKept."""
        if not await self.save(home):
            why = home.workspace.trouble
            told = "It is in the sandbox, but could not be kept for the next one"
            raise NotKept(f"{told}: {why}" if why else told)

    async def remove(self, user_id: str, reason: str, *, keep_files: bool = True) -> bool | None:
        """Save the files and remove the sandbox. Whether all files are kept; None if there was no
        sandbox. It goes on when the caller is cancelled."""
        return await asyncio.shield(self._begin(self._remove_of(user_id, reason, keep_files)))

    async def _remove_of(self, user_id: str, reason: str, keep_files: bool) -> bool | None:
        impatient = self._begin(self._end_restoring(user_id))
        try:
            async with self._alone(user_id):
                impatient.cancel()
                home = self._homes.get(user_id)
                report_loss(self.losses.untold(self.sandbox_id(user_id)))
                return None if home is None else await self._remove(home, reason, keep_files)
        finally:
            impatient.cancel()

    async def _end_restoring(self, user_id: str) -> None:
        """Whoever removes a sandbox that is being made waits for its files, but not for ever."""
        while True:
            await asyncio.sleep(self.settings.save_timeout)
            if user_id in self._restoring:
                self._restoring[user_id].cancel()

    async def _remove(self, home: Home, reason: str = "lost", keep_files: bool = True) -> bool:
        """Whether all files are kept. To be called with the user's lock, and not cancelled."""
        was_running = home.sandbox.is_running
        home.leaving = asyncio.get_running_loop().create_future()
        kept = False
        try:
            if keep_files:
                kept = await self._save_last(home)
        finally:
            home.leaving.set_result(kept)
            await self._end(home, reason)
        # Not what its user wished, nor what idle ones have to expect.
        is_loss = (
            reason in ("lost", "shutdown")
            or (reason == "idle" and not was_running)
            or (was_running and keep_files and not kept)
        )
        self.losses.removed(home.sandbox.id, is_loss=is_loss)
        self._metrics.removals.labels(reason).inc()
        self._journal.record(
            "destroy", user=home.user_id, sandbox_id=home.sandbox.id, reason=reason, files_kept=kept
        )
        if reason != "lost":
            self._forget(home.user_id)
        return kept

    async def _save_last(self, home: Home) -> bool:
        """Programs could starve the guest of processor time, and go on to change files: they are
        killed first."""
        seconds = self.settings.save_timeout
        begun = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await home.sandbox.kill_programs()
        except (TimeoutError, SandboxError) as error:
            if home.sandbox.is_running:
                why = str(error) or f"not done within {seconds:g} seconds"
                logger.error("Programs in sandbox %s were not killed: %s", home.sandbox.id, why)
        left = seconds - (time.monotonic() - begun)
        return left > 0 and await save_quietly(home.workspace, home.sandbox, left)

    async def _end(self, home: Home, reason: str) -> None:
        """Destroy it, and let go of everything that was its."""
        del self._homes[home.user_id]
        try:
            await home.sandbox.stop()
        except (SandboxError, OSError) as error:
            # The next sweep removes the rest; the user's slot is not to blame.
            logger.error("Sandbox %s was not removed: %s", home.sandbox.id, error)
        finally:
            self.leave_room(home.user_id, home.sandbox.config)
        async with home.workspace.turn:  # a save that was cut off still leaves the disk alone
            self._workspaces.release(self._names.workspace(home.user_id))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @asynccontextmanager
    async def _alone(self, user_id: str) -> AsyncIterator[None]:
        """Nobody else makes or removes this user's sandbox inside the block."""
        turns = self._locks.setdefault(user_id, _Turns())
        turns.wanted += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.wanted -= 1
            if not turns.wanted:
                del self._locks[user_id]

    # Life of the service

    def start(self, doubt: Callable[[], None] = lambda: None) -> None:
        """``doubt`` is called when a sandbox could not be made."""
        self._doubt = doubt
        self.losses.start()
        self._idle = asyncio.create_task(self._watch_idle())

    async def take_over(self) -> None:
        """Once, when the engine is there; until then nothing is made, which could bear the name of
        something that a predecessor left. Raises SandboxError."""
        if self._taken_over:
            return
        try:
            await self._clean_up_predecessor()
        except SandboxError as error:
            self._in_the_way = error.message
            raise
        self._in_the_way, self._taken_over = "", True

    async def make_one(self) -> None:
        """A sandbox as users get them, which is removed at once: proof that they can be made.
        Raises SandboxError."""
        labels = {LABEL: self._names.installation}
        async with Sandbox(self.backend, new_sandbox_id(), self.default_config(), labels):
            pass

    async def _clean_up_predecessor(self) -> None:
        """Remove what a service that was killed left; its users' files are in the workspaces.
        Whatever bears our name is a predecessor's, since the directory's lock is ours: no need to
        judge by process numbers, which mean nothing when that was another container."""
        left = [
            info
            for info in await self.backend.list_sandboxes()
            if info.labels.get(LABEL) == self._names.installation
        ]
        for info in left:
            logger.warning("Removing sandbox %s, left by a service that died", info.sandbox_id)
            self.losses.note(info.sandbox_id)
            with suppress(SandboxError):
                await self.backend.destroy(info.sandbox_id)
        if left:
            self._journal.record("cleanup", removed=len(left))

    async def _watch_idle(self) -> None:
        pause = min(_LOOK_SECONDS, self.settings.service_idle_timeout / 2)
        while True:
            await asyncio.sleep(pause)
            for home in self.all():
                if home.leaving is None and (home.look is None or home.look.done()):
                    home.look = self._begin(self._look_after(home))

    async def _look_after(self, home: Home) -> None:
        """A task for each: none waits for another's guest."""
        try:
            if home.is_busy:
                await self.save(home)  # what runs for hours is kept all along
            elif home.idle_seconds > self.settings.service_idle_timeout:
                async with self._alone(home.user_id):
                    if self._homes.get(home.user_id) is home and not home.is_busy:
                        await self._remove(home, "idle")
        except Exception:
            logger.exception("Looking after sandbox %s failed", home.sandbox.id)

    async def close(self) -> None:
        """Save and remove everything, also what is being made."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
            with suppress(asyncio.CancelledError):
                await self._idle
        for restoring in self._restoring.values():
            restoring.cancel()
        # Who is making one holds the lock, and then finds that it is too late.
        users = {*self._homes, *self._locks}
        removals = (self.remove(user_id, "shutdown") for user_id in users)
        for ended in await asyncio.gather(*removals, return_exceptions=True):
            if isinstance(ended, BaseException):  # one user's is no reason to leave the others'
                logger.error("A sandbox was not removed as it should be: %r", ended)
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def create_with_retry(create: Callable[[], Awaitable[T]]) -> T:
    """Make a sandbox, and try again when it failed for a reason that may pass."""
    for attempt in range(1, CREATE_ATTEMPTS):
        try:
            return await create()
        except SandboxCreationError as error:
            if not _may_pass(error):
                raise
            logger.warning("Attempt %d to make a sandbox failed, trying again: %s", attempt, error)
            await asyncio.sleep(_RETRY_PAUSE_SECONDS * attempt)
    return await create()


def _may_pass(error: SandboxCreationError) -> bool:
    """Whether another attempt may succeed: not without the image, but after a guest that died."""
    permanent = isinstance(error, BackendUnavailableError | SandboxConflictError)
    return not permanent and not is_refused(error)
