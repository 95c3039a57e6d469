"""Everything a service consists of, assembled in one place."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from ..audit_log import AuditLog
from ..backends.base import Backend, Health
from ..errors import SandboxError
from ..limits import MIB
from ..settings import Settings
from .answers import Answers
from .hosting import Hosting
from .journal import Journal
from .keys import Doorman, KeyStore
from .leases import Leases
from .losses import Losses
from .metrics import Metrics
from .quotas import Executions
from .readiness import Readiness
from .running import Runner
from .tenants import Names
from .workspaces import Workspaces

AUDIT_FILE = "audit.jsonl"


def _claimed(directory: Path) -> IO[bytes]:
    """The directory is this process's until the file is closed, however that happens."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (directory / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SandboxError(
            f"Another service uses {directory}. Stop it, or set SANDBOX_DATA_DIR to another."
        ) from None
    return lock


class Service:
    """The parts, and their beginning and end. The backend stays the caller's."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        directory = Path(settings.service_dir)
        self._lock = _claimed(directory)
        self.settings = settings
        self.backend = backend
        self.keys = KeyStore(directory)
        self.answers = Answers(directory)
        self.doorman = Doorman(self.keys, settings.api_key)
        self.metrics = Metrics()
        log = AuditLog(directory / AUDIT_FILE, settings.audit_file_mb * MIB)
        self.journal = Journal(log, with_content=settings.audit_content)
        self.executions = Executions(settings)
        self.workspaces = Workspaces(directory / "users")
        self.names = Names(directory)
        self.losses = Losses(directory / "live")
        self.hosting = Hosting(
            backend, settings, self.names, self.workspaces, self.losses, self.journal, self.metrics
        )
        self.runner = Runner(
            self.hosting, self.executions, self.journal, self.metrics, spools=directory
        )
        self.leases = Leases(self.hosting, self.executions, self.names, self.journal, self.metrics)
        self.journal.know_users(self._user_of)
        self.readiness = Readiness(backend, self.hosting.take_over)

    async def start(self) -> None:
        """Take over from a predecessor, and be ready when a sandbox can be made: now or later."""
        self.journal.record("service_start", backend=self.backend.name)
        self.hosting.start(self.readiness.doubt)
        await self.readiness.start()
        self.leases.start()

    async def wind_down(self) -> None:
        """Keep every user's files, remove every sandbox; what runs ends with an error. From now
        on nothing new is made. May be called again."""
        await self.readiness.close()
        await self.leases.close()
        await self.hosting.close()
        await self.runner.close()

    async def close(self) -> None:
        await self.wind_down()
        self.journal.record("service_stop")
        self._lock.close()
        self.journal.close()
        self.keys.close()
        self.answers.close()

    @property
    def ready(self) -> bool:
        return self.readiness.is_ready

    @property
    def health(self) -> Health | None:
        return self.readiness.health

    @property
    def live(self) -> int:
        return self.hosting.slots.taken

    def _user_of(self, sandbox_id: str) -> str | None:
        return self.hosting.user_of(sandbox_id) or self.leases.user_of(sandbox_id)
