"""``paracle sandbox list`` and ``cleanup``: the sandboxes of every process on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SandboxCleanupError, SandboxError, SandboxNotFoundError
from . import exit_codes, output
from .options import check_backend, settings_or_fault

if TYPE_CHECKING:
    from ..backends.base import Backend, SandboxInfo, Usage
    from ..settings import Settings

# CPU is a rate: two looks, this far apart.
_SAMPLE_SECONDS = 0.2
_SHORTEST_ID = 8
_MIB = 1 << 20
_COLUMNS = ("Sandbox ID", "Backend", "State", "Owner", "Age", "CPU %", "Memory MB", "Memory %")


@dataclass(frozen=True)
class Entry:
    """One sandbox and what it uses; the figures are None when nobody can say."""

    info: SandboxInfo
    cpu_percent: float | None = None
    memory_mb: float | None = None
    processes: int | None = None

    @property
    def memory_percent(self) -> float | None:
        limit = self.info.config.get("memory_mb")
        if self.memory_mb is None or not isinstance(limit, int | float) or not limit:
            return None
        return 100.0 * self.memory_mb / limit

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.info.created_at)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.info),
            "age_seconds": self.age_seconds,
            "cpu_percent": self.cpu_percent,
            "memory_mb": self.memory_mb,
            "memory_percent": self.memory_percent,
            "processes": self.processes,
        }


# list


def list_sandboxes(backend: str | None, as_json: bool) -> int:
    check_backend(backend)
    entries = exit_codes.run(_entries(settings_or_fault(), backend))
    if as_json:
        output.say_json([entry.as_dict() for entry in entries])
    elif not entries:
        output.say("No active sandboxes")
    else:
        _show(entries)
    return exit_codes.SUCCESS


async def _entries(settings: Settings, only: str | None) -> list[Entry]:
    from ..backends.registry import find_sandboxes

    async with AsyncExitStack() as stack:
        found = await find_sandboxes(settings, stack, only)
        before = [await _usage(backend, info) for backend, info in found]
        if found:
            await asyncio.sleep(_SAMPLE_SECONDS)
        return [
            _entry(info, earlier, await _usage(backend, info))
            for (backend, info), earlier in zip(found, before, strict=True)
        ]


Look = tuple[float, "Usage"]


async def _usage(backend: Backend, info: SandboxInfo) -> Look | None:
    try:
        return time.monotonic(), await backend.usage(info.sandbox_id)
    except (SandboxNotFoundError, OSError):
        return None


def _entry(info: SandboxInfo, earlier: Look | None, later: Look | None) -> Entry:
    if earlier is None or later is None:
        return Entry(info)
    seconds = later[0] - earlier[0]
    used = later[1].cpu_seconds - earlier[1].cpu_seconds
    percent = max(0.0, 100.0 * used / seconds)
    return Entry(info, percent, later[1].memory_bytes / _MIB, later[1].processes)


def _show(entries: Sequence[Entry]) -> None:
    width = id_width([entry.info.sandbox_id for entry in entries])
    output.table("", _COLUMNS, [_row(entry, width) for entry in entries])
    memory = sum(entry.memory_mb or 0.0 for entry in entries)
    cpu = sum(entry.cpu_percent or 0.0 for entry in entries)
    output.say(f"{len(entries)} sandbox(es), {cpu:.1f} % CPU, {memory:.1f} MB memory")


def _row(entry: Entry, width: int) -> tuple[str, ...]:
    info = entry.info
    figures = (entry.cpu_percent, entry.memory_mb, entry.memory_percent)
    return (
        info.sandbox_id[:width],
        info.backend,
        info.state,
        f"{info.owner_pid}" if info.owner_alive else f"{info.owner_pid} (dead)",
        _age(entry.age_seconds),
        *("-" if figure is None else f"{figure:.1f}" for figure in figures),
    )


def id_width(ids: Sequence[str]) -> int:
    """How many characters tell them apart. (Ids made within a second begin alike.)"""
    longest = max(map(len, ids), default=_SHORTEST_ID)
    for width in range(_SHORTEST_ID, longest):
        if len({name[:width] for name in ids}) == len(set(ids)):
            return width
    return longest


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# cleanup


def cleanup(backend: str | None, everything: bool, force: bool, as_json: bool) -> int:
    check_backend(backend)
    settings = settings_or_fault()
    if everything:
        return _cleanup_all(settings, backend, force, as_json)
    from ..backends.registry import sweep

    swept = exit_codes.run(sweep(settings, backend))
    alive = len(exit_codes.run(_infos(settings, backend)))
    if as_json:
        output.say_json({"removed": swept, "remaining": alive, "failed": []})
        return exit_codes.SUCCESS
    if swept:
        output.say(f"✅ Cleaned up {swept} sandbox(es) of processes that are gone")
    else:
        output.say("Nothing to clean up: no process that is gone has left a sandbox.")
    if alive:
        output.say(
            f"{alive} sandbox(es) in use stay. To remove them: paracle sandbox cleanup --all"
        )
    return exit_codes.SUCCESS


async def _infos(settings: Settings, only: str | None) -> list[SandboxInfo]:
    from ..backends.registry import find_sandboxes

    async with AsyncExitStack() as stack:
        return [info for _, info in await find_sandboxes(settings, stack, only)]


def _cleanup_all(settings: Settings, only: str | None, force: bool, as_json: bool) -> int:
    there = exit_codes.run(_infos(settings, only))
    if there and not force and not _confirmed(len(there)):
        output.note("Nothing was removed.")
        if as_json:
            output.say_json({"removed": 0, "remaining": len(there), "failed": []})
        return exit_codes.SUCCESS
    removed, failures = exit_codes.run(_destroy_all(settings, only))
    if as_json:
        failed = [str(failure) for failure in failures]
        output.say_json({"removed": removed, "remaining": len(failed), "failed": failed})
    elif not there:
        output.say("No active sandboxes")
    else:
        output.say(f"✅ Cleaned up {removed} sandbox(es)")
    for failure in failures:
        output.complain(str(failure))
    return exit_codes.SANDBOX if failures else exit_codes.SUCCESS


def _confirmed(count: int) -> bool:
    """The question goes to stderr: the answer on stdout may be for a program."""
    import sys

    print(f"Destroy {count} sandbox(es)? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


async def _destroy_all(settings: Settings, only: str | None) -> tuple[int, list[SandboxError]]:
    from ..backends.registry import sweep

    swept = await sweep(settings, only)
    removed, failures = await destroy_those(settings, lambda info: True, only)
    return swept + removed, failures


async def destroy_those(
    settings: Settings, wanted: Callable[[SandboxInfo], bool], only: str | None = None
) -> tuple[int, list[SandboxError]]:
    """Remove the sandboxes of any process that are wanted gone; how many, and what went wrong."""
    from ..backends.registry import find_sandboxes

    removed, failures = 0, []
    async with AsyncExitStack() as stack:
        for backend, info in await find_sandboxes(settings, stack, only):
            if not wanted(info):
                continue
            try:
                await backend.destroy(info.sandbox_id)
                removed += 1
            except SandboxCleanupError as error:
                failures.append(error)
    return removed, list(failures)
