"""Writes what an agent did to the audit log: its tasks, every tool call with its outcome, and the
security events of its sandbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..audit import security_events as audit
from ..audit.log import AuditLog, AuditQueue
from ..host.own_directory import make_trusted_directory
from ..settings import Settings
from .events import Event

_MAX_ARGUMENTS = 1000


def get_log_path(settings: Settings) -> Path:
    """Return the path of the log of ``paracle agents run``."""
    return Path(settings.data_dir) / "agents" / "audit.jsonl"


def open_agents_log(settings: Settings) -> AuditLog:
    """Open that log to write to it. Raises SandboxError if others can write to its directory."""
    path = get_log_path(settings)
    make_trusted_directory(str(path.parent), "PARACLE_DATA_DIR")
    return AuditLog(path)


class AgentJournal:
    """Records the events of one agent. ``sandbox_id`` returns the id of its current sandbox."""

    def __init__(self, log: AuditLog, agent: str, sandbox_id: Callable[[], str | None]) -> None:
        self._log = log
        self._queue: AuditQueue | None = None
        self._agent = agent
        self._sandbox_id = sandbox_id
        self._arguments: dict[str, str] = {}

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write from a thread, so that the event loop never waits for a disk. All lines are written
        when the block ends."""
        self._queue = queue = AuditQueue(self._log)
        try:
            yield
        finally:
            self._queue = None
            await asyncio.shield(asyncio.to_thread(queue.end))

    @contextmanager
    def task(self, text: str) -> Iterator[None]:
        """Record a task, and the security events of its sandbox while it runs."""
        self._record("task", text=text)
        handler = _Handler(self._record_security_event)
        audit.LOGGER.addHandler(handler)
        try:
            yield
        except BaseException as error:
            # There will be no event for this end.
            cancelled = isinstance(error, asyncio.CancelledError)
            self._record("end", status="cancelled" if cancelled else "error", error=repr(error))
            raise
        finally:
            audit.LOGGER.removeHandler(handler)

    def record_event(self, event: Event) -> None:
        """Record one event of the agent, if it belongs in the log."""
        if event.kind == "tool_call":
            self._arguments[event.data["id"]] = event.data["arguments"][:_MAX_ARGUMENTS]
        elif event.kind == "tool_result":
            failure = event.data["failure"] or "failed"
            self._record(
                "tool_call", tool=event.data["name"],
                arguments=self._arguments.pop(event.data["id"], None),
                outcome=failure if event.data["is_error"] else "ok",
            )  # fmt: skip
        elif event.kind == "notice":
            self._record("notice", text=event.text)
        elif event.kind == "end":
            fields = ("status", "steps", "input_tokens", "output_tokens", "cost", "error")
            self._record("end", **{key: event.data[key] for key in fields})

    def _record(self, event: str, **fields: object) -> None:
        write = (self._queue or self._log).record
        write(event, agent=self._agent, sandbox_id=self._sandbox_id(), **fields)

    def _record_security_event(self, record: logging.LogRecord) -> None:
        found = vars(record)
        if found.get("sandbox_id") == self._sandbox_id():
            self._record("security", kind=found.get("event"), details=found.get("details"))


class _Handler(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


@dataclass
class Summary:
    """One agent in figures. ``blocked`` counts calls that older versions refused to run."""

    tasks: int = 0
    tool_calls: int = 0
    failed: int = 0
    blocked: int = 0
    security_events: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0
    last: str = ""

    def add(self, line: dict[str, Any]) -> None:
        event, outcome = line.get("event"), line.get("outcome")
        self.tasks += event == "task"
        self.tool_calls += event == "tool_call"
        self.failed += event == "tool_call" and outcome not in ("ok", "blocked")
        self.blocked += outcome == "blocked"
        self.security_events += event == "security"
        if event == "end":
            status = str(line.get("status"))
            self.ends[status] = self.ends.get(status, 0) + 1
            cost = line.get("cost")
            self.cost += cost if isinstance(cost, int | float) else 0.0
        self.last = max(self.last, str(line.get("time", "")))


def summarise(lines: Iterable[dict[str, Any]]) -> dict[str, Summary]:
    """Return a summary for each agent in the lines of a log."""
    found: dict[str, Summary] = {}
    for line in lines:
        if "agent" in line:
            found.setdefault(str(line["agent"]), Summary()).add(line)
    return found
