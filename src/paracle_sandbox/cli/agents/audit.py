"""``paracle agents audit`` and ``stop``: what agents did, and an end to one of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...backends.machine.owner import Owner
from .. import exit_codes, output
from ..options import settings_or_fault

if TYPE_CHECKING:
    from ...audit.log import AuditLog
    from ...backends.base import SandboxInfo
    from ...settings import Settings

# On sandboxes of a process that does nothing but run this agent: which one that is.
PROCESS_LABEL = "agent-process"
_SHOWN_APART = ("n", "time", "event", "agent", "previous", "hash")
_DAY = 86_400


@contextmanager
def opened_log(settings: Settings) -> Iterator[AuditLog | None]:
    """The log of agents; None, said aloud, where it cannot be written."""
    from ...agents.journal import open_agents_log
    from ...errors import SandboxError

    try:
        log = open_agents_log(settings)
    except (OSError, SandboxError) as error:
        output.note(f"⚠️  What the agent does is not written down: {error}")
        yield None
        return
    try:
        yield log
    finally:
        log.close()


# audit


def show(agent: str | None, event: str | None, last: int, as_json: bool) -> int:
    found = (
        line
        for line in _lines(settings_or_fault())
        if agent in (None, line.get("agent")) and event in (None, line.get("event"))
    )
    for line in deque(found, maxlen=max(1, last)):
        if as_json:
            print(json.dumps(line))
            continue
        rest = " ".join(f"{k}={v!r}" for k, v in line.items() if k not in _SHOWN_APART)
        # A line that another program has put there may have none of them.
        moment, event, agent = (str(line.get(key, "-")) for key in ("time", "event", "agent"))
        output.say(f"{moment} {event:<10} {agent} {rest}")
    return exit_codes.SUCCESS


def summary(agent: str | None, as_json: bool) -> int:
    from ...agents.journal import summarise

    found = summarise(_lines(settings_or_fault()))
    wanted = {name: s for name, s in found.items() if agent in (None, name)}
    if as_json:
        output.say_json({name: asdict(one) for name, one in wanted.items()})
        return exit_codes.SUCCESS
    columns = ["Agent", "Tasks", "Calls", "Failed", "Blocked", "Security", "Cost", "Ends", "Last"]
    rows = [
        [name, str(s.tasks), str(s.tool_calls), str(s.failed), str(s.blocked),
         str(s.security_events), f"${s.cost:.4f}",
         ", ".join(f"{n} {end}" for end, n in s.ends.items()), s.last]
        for name, s in wanted.items()
    ]  # fmt: skip
    output.table("", columns, rows)
    return exit_codes.SUCCESS


def prune(days: float, as_json: bool) -> int:
    with opened_log(settings_or_fault()) as log:
        removed = log.prune(time.time() - days * _DAY) if log else 0
    if as_json:
        output.say_json({"removed": removed})
    else:
        output.say(f"Removed {removed} line(s) that were older than {days:g} days.")
    return exit_codes.SUCCESS


def verify(as_json: bool) -> int:
    from ...agents.journal import get_log_path
    from ...audit.log import Verdict, verify

    path = get_log_path(settings_or_fault())
    verdict = verify(path) if path.exists() else Verdict(0, "")
    whole = verdict.broken_at is None
    if as_json:
        output.say_json({"whole": whole, **asdict(verdict)})
    else:
        broken = f"❌ Broken at line {verdict.broken_at}: {verdict.reason}"
        output.say(f"✅ {verdict.lines} lines, unbroken." if whole else broken)
    return exit_codes.SUCCESS if whole else exit_codes.FAILURE


def _lines(settings: Settings) -> Iterator[dict[str, Any]]:
    from ...agents.journal import get_log_path
    from ...audit.log import read

    path = get_log_path(settings)
    return read(path) if path.exists() else iter(())


# stop


def process_label() -> dict[str, str]:
    """Says that this process may be interrupted to stop the agent."""
    return {PROCESS_LABEL: str(Owner.of(os.getpid()))}


def stop(name: str, as_json: bool) -> int:
    """Interrupt the runs of an agent, and remove all its sandboxes, whoever made them."""
    from ...agents.agent import AGENT_LABEL
    from ..list_cleanup import destroy_those

    interrupted: set[int] = set()

    def is_its(info: SandboxInfo) -> bool:
        if info.labels.get(AGENT_LABEL) != name:
            return False
        if (pid := _own_process(info)) and pid not in interrupted:
            interrupted.add(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGINT)
        return True

    removed, failures = exit_codes.run(destroy_those(settings_or_fault(), is_its))
    if as_json:
        failed = [str(failure) for failure in failures]
        output.say_json({"removed": removed, "interrupted": sorted(interrupted), "failed": failed})
    else:
        output.say(f"Stopped {len(interrupted)} run(s) of {name}, removed {removed} sandbox(es).")
    for failure in failures:
        output.complain(str(failure))
    return exit_codes.SANDBOX if failures else exit_codes.SUCCESS


def _own_process(info: SandboxInfo) -> int | None:
    """The process that runs the agent, if it is one of this machine and still the same."""
    owner = Owner.parse(info.labels.get(PROCESS_LABEL, ""))
    return owner.pid if owner is not None and owner == Owner.of(owner.pid) else None
