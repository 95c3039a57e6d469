"""The parts of a service, assembled in one place, and their beginning and end."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from ..audit.log import AuditLog
from ..backends.base import Backend, Health
from ..errors import SandboxError
from ..host.own_directory import make_trusted_directory
from ..sandbox.outcome import MIB
from ..settings import Settings
from .errors import PathHider
from .journal import Journal
from .keys import Caller, Doorman, KeyStore
from .metrics import Metrics
from .middleware.idempotency_store import Answers
from .readiness import Readiness
from .remote.leases import Leases
from .routes.strict_json import JsonParser
from .users.background import BackgroundCommands
from .users.executions import Runner
from .users.kept_files import Workspaces
from .users.lost_sandboxes import Losses
from .users.names import Names
from .users.quotas import Executions
from .users.user_sandboxes import UserSandboxes

AUDIT_FILE = "audit.jsonl"


def _claim(directory: Path) -> IO[bytes]:
    """Lock the directory for this process until the returned file is closed, at its end."""
    make_trusted_directory(str(directory), "SANDBOX_DATA_DIR")
    lock = (directory / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SandboxError(
            f"Another service uses {directory}. Stop it, or set SANDBOX_DATA_DIR to another."
        ) from None
    return lock


@contextmanager
def _explaining_errors(directory: Path) -> Iterator[None]:
    """Turn errors of the service's files into a SandboxError that says what to do."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        damaged = not isinstance(error, sqlite3.OperationalError)
        remedy = "Restore keys.db or answers.db from a copy, or move the damaged one away."
        raise SandboxError(
            f"The service cannot use its files in {directory}: {error}. "
            f"{remedy if damaged else 'Is there room on the disk, and may we write there?'}"
        ) from error
    except (OSError, ValueError) as error:
        raise SandboxError(
            f"The service cannot use its files in {directory}: {error}. Is there room on the disk, "
            "and may we write there? A damaged file can be moved away."
        ) from error


class Service:
    """All parts of a service. The backend stays the caller's."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        settings = settings.for_service(backend.name)
        directory = Path(settings.service_dir)
        with _explaining_errors(directory), ExitStack() as undo:
            self._lock = undo.enter_context(_claim(directory))
            self.keys = KeyStore(directory)
            undo.callback(self.keys.close)
            self.answers = Answers(directory)
            undo.callback(self.answers.close)
            self.doorman = Doorman(self.keys, settings.api_key)
            log = AuditLog(directory / AUDIT_FILE, settings.audit_file_mb * MIB)
            undo.callback(log.close)
            self.names = Names(directory)
            self.losses = Losses(directory / "live")
            undo.pop_all()
        self.settings = settings
        self.backend = backend
        self.metrics = Metrics()
        self.parser = JsonParser()
        self.hide = PathHider(settings)
        self.journal = Journal(log, with_content=settings.audit_content)
        self.executions = Executions(settings)
        self.workspaces = Workspaces(directory / "users")
        self.sandboxes = UserSandboxes(
            backend, settings, self.names, self.workspaces, self.losses, self.journal, self.metrics
        )
        self.runner = Runner(
            self.sandboxes,
            self.executions,
            self.journal,
            self.metrics,
            spools=directory,
            hide=self.hide,
        )
        self.background = BackgroundCommands(self.runner, self.sandboxes)
        self.leases = Leases(
            self.sandboxes, self.executions, self.names, self.journal, self.metrics
        )
        self.journal.know_users(self._user_of)
        self.readiness = Readiness(backend, self.sandboxes.take_over, prove=self.sandboxes.make_one)

    async def start(self) -> None:
        """Take over from a predecessor. The service is ready once a sandbox can be made."""
        self.journal.record("service_start", backend=self.backend.name)
        self.backend.begin_preparing(self.settings.service_image)
        self.sandboxes.start(self.readiness.doubt)
        await self.readiness.start()
        self.leases.start()

    async def wind_down(self) -> None:
        """Save every user's files and remove every sandbox; programs end with an error. Nothing is
        made from now on. May be called again."""
        await self.readiness.close()
        await self.leases.close()
        await self.sandboxes.close()
        await self.background.close()
        await self.runner.close()

    async def close(self) -> None:
        await self.wind_down()
        self.journal.record("service_stop")
        self.parser.close()
        await asyncio.to_thread(self.journal.close)
        self._lock.close()
        await asyncio.to_thread(self.keys.close)
        await asyncio.to_thread(self.answers.close)

    @property
    def ready(self) -> bool:
        return self.readiness.is_ready

    @property
    def health(self) -> Health | None:
        return self.readiness.health

    @property
    def live(self) -> int:
        return self.sandboxes.slots_taken

    def live_of(self, caller: Caller) -> int:
        """Return how many sandboxes the users have that a key acts for."""
        if caller.admin:
            return self.live
        owned = sum(self.sandboxes.has(user) for user in caller.users)
        return owned + sum(self.leases.count(user) for user in caller.users)

    def _user_of(self, sandbox_id: str) -> str | None:
        return self.sandboxes.user_of(sandbox_id) or self.leases.user_of(sandbox_id)
