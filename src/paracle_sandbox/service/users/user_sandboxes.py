"""The users' sandboxes: a policy over SandboxManager, which makes one for each user and removes it.

The manager knows how many sandboxes there are, which of them idle, and that the first of many
requests makes a user's sandbox while the others wait. This module adds what a service promises:
quotas of users, kept files, and losses that an answer reports. A sandbox that died is noticed by
the next request, which gets a new one with the kept files. Leases of remote clients share the
manager's slots.

Each removal is a task of its own, which goes on when its caller goes away. It kills the programs,
saves the files (both within ``SANDBOX_SAVE_TIMEOUT`` seconds), and then destroys the sandbox in
any case. If files could not be saved, that is a loss, which the next answer reports.
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
from ...manager import OwnerSandboxes
from ...sandbox.sandbox import Sandbox
from ...settings import Settings
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
# For a save that no removal waits for: its program is over, and its request waits for it.
_SAVE_SECONDS = 300.0
LABEL = "paracle.service"
CREATE_ATTEMPTS = 3
_RETRY_PAUSE_SECONDS = 0.1


@dataclass
class UserSandbox:
    """One user's sandbox, and what the service knows of it."""

    user_id: str
    sandbox: Sandbox
    workspace: Workspace
    loss: Loss | None = None
    created_at: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.time)
    execution_count: int = 0
    users_now: int = 0
    visits: int = 0
    keep_files: bool = True
    # Set when its removal begins: whether its files could be kept.
    leaving: asyncio.Future[bool] | None = None
    saving: asyncio.Task[bool] | None = None

    @property
    def recreated(self) -> bool:
        """Whether the one before it was lost and no answer has reported that yet."""
        return self.loss is not None and not self.loss.told

    @property
    def alone_at(self) -> int | None:
        """The number of the current visit, if there is only one now."""
        return self.visits if self.users_now == 1 else None

    @property
    def is_busy(self) -> bool:
        return bool(self.users_now or self.sandbox.in_use)


class UserSandboxes:
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
        self.losses = losses
        self._labels = {LABEL: names.installation}
        self._manager = OwnerSandboxes(
            settings.max_containers,
            stop=self._stop,
            idle_timeout=settings.service_idle_timeout,
            cleanup_interval=_LOOK_SECONDS,
            backend=backend,
            settings=settings,
        )
        self._names = names
        self._workspaces = workspaces
        self._journal = journal
        self._metrics = metrics
        self._owned: dict[str, UserSandbox] = {}
        self._held: dict[str, list[SandboxConfig]] = {}
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        self._taken_over = False
        self._in_the_way = ""
        self._doubt: Callable[[], None] = lambda: None
        self._forget: Callable[[str], None] = lambda user_id: None

    def when_removed(self, forget: Callable[[str], None]) -> None:
        """Have ``forget`` called with the user of each sandbox that is removed without being lost:
        what is known of its programs goes with it."""
        self._forget = forget

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def slots_taken(self) -> int:
        """How many sandboxes there are, those of leases included."""
        return self._manager.slots_taken

    # Finding

    def find(self, user_id: str) -> UserSandbox | None:
        owned = self._owned.get(user_id)
        if owned is not None:
            report_loss(owned.loss)
        return owned

    def has(self, user_id: str) -> bool:
        return user_id in self._owned

    def all(self) -> list[UserSandbox]:
        return [self._owned[user_id] for user_id in sorted(self._owned)]

    def sandbox_id(self, user_id: str) -> str:
        """Return the id of the user's sandbox, whether there is one or not."""
        return self._names.user_sandbox(user_id)

    def user_of(self, sandbox_id: str) -> str | None:
        owned = self._owned.values()
        return next((o.user_id for o in owned if o.sandbox.sandbox_id == sandbox_id), None)

    @asynccontextmanager
    async def using(
        self, user_id: str, config: SandboxConfig | None = None
    ) -> AsyncIterator[UserSandbox]:
        """The user's sandbox, made if need be; it does not count as idle inside the block."""
        owned = await self._open(user_id, config)
        async with self._manager.sandbox_operation(owned.sandbox.sandbox_id):
            report_loss(owned.loss)
            owned.users_now += 1
            owned.visits += 1
            owned.last_used = time.time()
            try:
                yield owned
            finally:
                owned.users_now -= 1
                owned.last_used = time.time()

    async def read(self, user_id: str, work: Callable[[UserSandbox], Awaitable[T]]) -> T:
        """Do work that only reads. It is repeated once if the sandbox was lost meanwhile."""
        try:
            async with self.using(user_id) as owned:
                return await work(owned)
        except SandboxExecutionError as error:
            logger.warning("Reading again, in a new sandbox: %s", error)
            async with self.using(user_id) as owned:
                return await work(owned)

    async def _open(self, user_id: str, config: SandboxConfig | None) -> UserSandbox:
        name = self.sandbox_id(user_id)
        await self._manager.open(name, lambda: self._make(user_id, name, config))
        return self._owned[user_id]

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

    async def _make(self, user_id: str, name: str, config: SandboxConfig | None) -> Sandbox:
        wanted = config or self.default_config()
        self.take_room(user_id, wanted)
        workspace = self._workspaces.get(self._names.workspace(user_id))
        try:
            sandbox = await self._manager.add(
                name, lambda: self._start_with_files(user_id, name, wanted, workspace)
            )
        except BaseException as error:
            self._workspaces.release(self._names.workspace(user_id))
            self._release_quotas(user_id, wanted)
            self.report_failure(user_id, error)
            raise
        self.losses.note_made(name)
        self._owned[user_id] = UserSandbox(user_id, sandbox, workspace, self.losses.untold(name))
        self._metrics.creations.labels("ok").inc()
        limits = wanted.model_dump(include={"cpu_cores", "memory_mb", "disk_mb", "base_image"})
        self._journal.record(
            "create", user=user_id, sandbox_id=name, outcome="ok", resources=limits
        )
        return sandbox

    async def _start_with_files(
        self, user_id: str, name: str, config: SandboxConfig, workspace: Workspace
    ) -> Sandbox:
        sandbox = await create_with_retry(lambda: self._start(name, config))
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
        return sandbox

    async def _start(self, name: str, config: SandboxConfig) -> Sandbox:
        sandbox = Sandbox(self.backend, name, config, self._labels)
        try:
            await sandbox.start()
        except SandboxConflictError:
            # The name is this user's alone: an earlier sandbox that could not be removed has it.
            await self.backend.destroy(name)
            await sandbox.start()
        return sandbox

    async def _restore(self, user_id: str, workspace: Workspace, sandbox: Sandbox) -> None:
        """Copy the kept files into the sandbox, unless it is removed meanwhile."""
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

    def report_failure(self, user_id: str, error: BaseException) -> None:
        """Log and count that a sandbox of this user could not be made."""
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
        """Take room for a sandbox of this user: of the user's quotas, and one of the service's
        slots. Raises TooMany, Unavailable or BackendUnavailableError."""
        self.refuse_when_closed()
        if self._in_the_way:
            raise BackendUnavailableError(self._in_the_way)
        check_room(self.settings, self._held.get(user_id, []), config)
        try:
            self._manager.take_slot()
        except SandboxLimitError:
            limit = self._manager.max_concurrent
            raise Unavailable(f"Maximum containers ({limit}) reached", RETRY_SECONDS) from None
        self._held.setdefault(user_id, []).append(config)

    def leave_room(self, user_id: str, config: SandboxConfig) -> None:
        """Give back the room of a lease, which the manager does not have."""
        self._manager.free_slot()
        self._release_quotas(user_id, config)

    def _release_quotas(self, user_id: str, config: SandboxConfig) -> None:
        held = self._held[user_id]
        held.remove(config)
        if not held:
            del self._held[user_id]

    def refuse_when_closed(self) -> None:
        """Raise Unavailable once the service has begun to end, also after a sandbox was made."""
        if self._closed:
            raise Unavailable("The service is shutting down", RETRY_SECONDS)

    # Removing

    async def save(self, owned: UserSandbox, after: Listed | None = None) -> bool:
        """Save what changed in the working directory. Returns whether all of it is kept."""
        if owned.leaving is not None:
            return await asyncio.shield(owned.leaving)
        return await save_quietly(owned.workspace, owned.sandbox, _SAVE_SECONDS, after)

    async def keep(self, owned: UserSandbox) -> None:
        """Save what a user was promised. Raises NotKept."""
        if not await self.save(owned):
            why = owned.workspace.trouble
            text = "It is in the sandbox, but could not be kept for the next one"
            raise NotKept(f"{text}: {why}" if why else text)

    async def remove(self, user_id: str, reason: str, *, keep_files: bool = True) -> bool | None:
        """Save the files and remove the sandbox. Returns whether all files are kept, or None if
        there was no sandbox. It goes on when the caller is cancelled."""
        return await asyncio.shield(self._begin(self._remove(user_id, reason, keep_files)))

    async def _remove(self, user_id: str, reason: str, keep_files: bool) -> bool | None:
        name = self.sandbox_id(user_id)
        impatient = self._begin(self._end_restoring(user_id))
        try:
            while await self._manager.wait_for_change(name):
                pass
        finally:
            impatient.cancel()
        report_loss(self.losses.untold(name))
        owned = self._owned.get(user_id)
        if owned is None:
            return None
        owned.keep_files = keep_files
        await self._manager.remove(name, reason)
        return owned.leaving is not None and owned.leaving.result()

    async def _end_restoring(self, user_id: str) -> None:
        """Cut off the copying of files into a sandbox that is to be removed, and takes too long."""
        while True:
            await asyncio.sleep(self.settings.save_timeout)
            if user_id in self._restoring:
                self._restoring[user_id].cancel()

    async def _stop(self, sandbox: Sandbox, reason: str) -> None:
        """Remove a sandbox for the manager: save its files, destroy it, and forget it."""
        (owned,) = (one for one in self._owned.values() if one.sandbox is sandbox)
        if reason == "lost":
            self._journal.record("sandbox_lost", user=owned.user_id, sandbox_id=sandbox.id)
        was_running = sandbox.is_running
        owned.leaving = asyncio.get_running_loop().create_future()
        kept = False
        try:
            if owned.keep_files:
                kept = await self._save_last(owned)
        finally:
            owned.leaving.set_result(kept)
            await self._destroy(owned)
        # A user who asked for the removal, or was idle, expects it; anything else is a loss.
        is_loss = (
            reason in ("lost", "shutdown")
            or (reason == "idle" and not was_running)
            or (was_running and owned.keep_files and not kept)
        )
        self.losses.note_removed(sandbox.id, is_loss=is_loss)
        self._metrics.removals.labels(reason).inc()
        self._journal.record(
            "destroy", user=owned.user_id, sandbox_id=sandbox.id, reason=reason, files_kept=kept
        )
        if reason != "lost":
            self._forget(owned.user_id)

    async def _save_last(self, owned: UserSandbox) -> bool:
        """Kill the programs, which could starve the guest of processor time or change files, and
        save. Returns whether all files are kept."""
        seconds = self.settings.save_timeout
        begun = time.monotonic()
        sandbox = owned.sandbox
        try:
            async with asyncio.timeout(seconds):
                await sandbox.kill_programs()
        except (TimeoutError, SandboxError) as error:
            if sandbox.is_running:
                why = str(error) or f"not done within {seconds:g} seconds"
                logger.error("Programs in sandbox %s were not killed: %s", sandbox.id, why)
        left = seconds - (time.monotonic() - begun)
        return left > 0 and await save_quietly(owned.workspace, sandbox, left)

    async def _destroy(self, owned: UserSandbox) -> None:
        """Destroy the sandbox, and release what the user held for it."""
        del self._owned[owned.user_id]
        try:
            await owned.sandbox.stop()
        except (SandboxError, OSError) as error:
            # The next sweep removes the rest; the user gets a new sandbox meanwhile.
            logger.error("Sandbox %s was not removed: %s", owned.sandbox.id, error)
        finally:
            self._release_quotas(owned.user_id, owned.sandbox.config)
        async with owned.workspace.turn:  # wait for a save that was cut off to leave the disk alone
            self._workspaces.release(self._names.workspace(owned.user_id))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Life of the service

    def start(self, doubt: Callable[[], None] = lambda: None) -> None:
        """Begin to watch the sandboxes. ``doubt`` is called when one could not be made."""
        self._doubt = doubt
        self.losses.start()
        self._watcher = asyncio.create_task(self._save_busy())

    async def take_over(self) -> None:
        """Remove what a predecessor left, once, when the engine is there. Until then no sandbox is
        made, because its name could be taken. Raises SandboxError."""
        if self._taken_over:
            return
        try:
            await self._clean_up_predecessor()
        except SandboxError as error:
            self._in_the_way = error.message
            raise
        self._in_the_way, self._taken_over = "", True

    async def make_one(self) -> None:
        """Make a sandbox as users get them and remove it at once, as proof that it can be made.
        Raises SandboxError."""
        async with Sandbox(self.backend, new_sandbox_id(), self.default_config(), self._labels):
            pass

    async def _clean_up_predecessor(self) -> None:
        """Remove what a service that was killed left; its users' files are in the workspaces.
        Every sandbox with our label is a predecessor's, because we hold the directory's lock. The
        process numbers in it mean nothing if the predecessor ran in another container."""
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

    async def _save_busy(self) -> None:
        """Save the files of busy sandboxes all along, each in a task of its own, so that a program
        that runs for hours loses little."""
        pause = min(_LOOK_SECONDS, self.settings.service_idle_timeout / 2)
        while True:
            await asyncio.sleep(pause)
            for owned in self.all():
                is_saved = owned.saving is None or owned.saving.done()
                if owned.is_busy and owned.leaving is None and is_saved:
                    owned.saving = self._begin(self.save(owned))

    async def close(self) -> None:
        """Save and remove every sandbox, also those being made."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        for restoring in self._restoring.values():
            restoring.cancel()
        try:
            await self._manager.close()
        except Exception:  # whatever it is, the rest of the service has to end, too
            logger.exception("A sandbox was not removed as it should be")
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
