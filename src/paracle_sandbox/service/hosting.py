"""The sandboxes of the users: one for each, made when it is needed, removed when it idles.

Each user has a lock for making and removing, so that a storm of first requests makes one
sandbox; nothing else waits on it. A sandbox that died is noticed by the next request, which
gets a new one with the kept files; the first answer about it tells (``losses``). All sandboxes of
the service, these and the ones that remote clients hold, share one number of slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ..backends.base import Backend
from ..config import SandboxConfig
from ..errors import (
    BackendUnavailableError,
    SandboxError,
    SandboxExecutionError,
    SandboxLimitError,
)
from ..sandbox import Sandbox
from ..settings import Settings
from ..slots import Slots
from .askers import notice
from .faults import RETRY_SECONDS, NotKept, Unavailable
from .journal import Journal
from .losses import Loss, Losses
from .metrics import Metrics
from .quotas import check_room
from .recovery import classify, made
from .tenants import Names
from .workspaces import Listed, Workspace, Workspaces, save_quietly

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 5.0
LABEL = "paracle.service"


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
        self._idle: asyncio.Task[None] | None = None
        self._closed = False
        self._taken_over = False
        self._in_the_way = ""
        self._doubt: Callable[[], None] = lambda: None

    @property
    def is_closed(self) -> bool:
        return self._closed

    # Finding

    def find(self, user_id: str) -> Home | None:
        home = self._homes.get(user_id)
        if home is not None:
            notice(home.loss)
        return home

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
        notice(home.loss)
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
        home = self._homes.get(user_id)
        if home is not None and home.sandbox.is_running:
            return home
        async with self._alone(user_id):
            home = self._homes.get(user_id)
            if home is not None and home.sandbox.is_running:
                return home
            if home is not None:
                self._journal.record("sandbox_lost", user=user_id, sandbox_id=home.sandbox.id)
                await self._remove(home)
            return await self._make(user_id, config)

    def default_config(self) -> SandboxConfig:
        settings = self.settings
        return SandboxConfig(
            base_image=settings.service_image,
            cpu_cores=settings.service_cpu_cores,
            memory_mb=settings.service_memory_mb,
            disk_mb=settings.service_disk_mb,
            timeout_seconds=3600,
            network_mode=settings.network_mode,
        )

    # Making

    async def _make(self, user_id: str, config: SandboxConfig | None) -> Home:
        wanted = config or self.default_config()
        self.take_room(user_id, wanted)
        try:
            sandbox = await made(lambda: self._started(user_id, wanted))
            workspace = self._workspaces.get(self._names.workspace(user_id))
            try:
                await workspace.restore(sandbox)
                self.refuse_when_closed()
            except OSError as error:
                await sandbox.stop()
                raise NotKept(f"The kept files cannot be read: {error}") from error
            except BaseException:
                await sandbox.stop()
                raise
        except BaseException as error:
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

    async def _started(self, user_id: str, config: SandboxConfig) -> Sandbox:
        name = self._names.user_sandbox(user_id)
        sandbox = Sandbox(self.backend, name, config, {LABEL: self._names.installation})
        await sandbox.start()
        return sandbox

    def failed(self, user_id: str, error: BaseException) -> None:
        """A sandbox of this user could not be made."""
        if not isinstance(error, SandboxError):
            return
        self._journal.record("create", user=user_id, outcome="failed", error=str(error))
        self._metrics.creations.labels("failed").inc()
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
        return await save_quietly(home.workspace, home.sandbox, after)

    async def keep(self, home: Home) -> None:
        """Like save(), for what a user was promised. Raises NotKept."""
        if not await self.save(home):
            raise NotKept("It is in the sandbox, but could not be kept for the next one")

    async def remove(self, user_id: str, reason: str) -> bool:
        """Save the files and remove the sandbox; whether there was one."""
        async with self._alone(user_id):
            home = self._homes.get(user_id)
            notice(self.losses.untold(self.sandbox_id(user_id)))
            if home is None:
                return False
            await self._remove(home, reason)
            return True

    async def _remove(self, home: Home, reason: str = "lost") -> None:
        # Not what its user wished, nor what idle ones have to expect.
        is_loss = reason in ("lost", "shutdown") or (
            reason == "idle" and not home.sandbox.is_running
        )
        kept = await save_quietly(home.workspace, home.sandbox)
        del self._homes[home.user_id]
        self.losses.removed(home.sandbox.id, is_loss=is_loss)
        try:
            await home.sandbox.stop()
        except SandboxError as error:
            # The next sweep removes the rest; the user's slot is not to blame.
            logger.error("Sandbox %s was not removed: %s", home.sandbox.id, error)
        self.leave_room(home.user_id, home.sandbox.config)
        self._workspaces.release(self._names.workspace(home.user_id))
        self._metrics.removals.labels(reason).inc()
        self._journal.record(
            "destroy", user=home.user_id, sandbox_id=home.sandbox.id, reason=reason, files_kept=kept
        )

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
                try:
                    await self._look_after(home)
                except Exception:  # one user's trouble must not end the watch over the others
                    logger.exception("Looking after sandbox %s failed", home.sandbox.id)

    async def _look_after(self, home: Home) -> None:
        idle = time.monotonic() - max(home.last_used_mark, home.sandbox.last_used)
        if home.is_busy:
            await self.save(home)  # what runs for hours is kept all along
        elif idle > self.settings.service_idle_timeout:
            async with self._alone(home.user_id):
                if self._homes.get(home.user_id) is home and not home.is_busy:
                    await self._remove(home, "idle")

    async def close(self) -> None:
        """Save and remove everything, also what is being made."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
            with suppress(asyncio.CancelledError):
                await self._idle
        # Who is making one holds the lock, and then finds that it is too late.
        users = {*self._homes, *self._locks}
        await asyncio.gather(*(self.remove(user_id, "shutdown") for user_id in users))
