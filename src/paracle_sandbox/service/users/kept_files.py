"""Users' files, kept outside of their sandboxes.

A sandbox is removed when it idles, when its user says so, and when the service dies; the files
of its working directory stay. They are copied out whenever something in it has run or was
written, file by file and only what changed, each whole or not at all; and copied into the next
sandbox before anybody uses it. What comes out is hostile: it goes through the library's own
extractor. Links and special files are not kept, nor is /tmp.
"""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ...backends.machine.drafts import DRAFT_NAME, DRAFT_STEP
from ...errors import SandboxError, SandboxFileError
from ...results import FileInfo
from ...sandbox.command import Command
from ...sandbox.files import Changes
from ...sandbox.host_copy import in_thread
from ...sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

# With more changed files than this, one stream of everything is faster than one for each.
_MANY = 100
# Or with more than this part of all that there are.
_SHARE = 10
# So much of a listing is gone through in a moment: characters of paths, and as many for each.
_AT_ONCE = 128 << 10
_EACH = 64

Mark = tuple[str, int, int, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Listed:
    """A command with a listing for its end, and how many saves there were when it began."""

    command: Command
    saves: int


@dataclass
class Workspace:
    """The kept files of one user, and what of the sandbox is known to be in them."""

    directory: Path
    known: dict[str, Mark] = field(default_factory=dict)
    # Of the listing that ``known`` is; empty while some of it is not kept.
    token: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    saves: int = 0
    # Why the last save kept nothing, in words for the user; empty if it kept all.
    trouble: str = ""

    async def restore(self, sandbox: Sandbox) -> None:
        """Put the kept files into a new, empty sandbox."""
        async with self.turn:
            if await asyncio.to_thread(_prepare, self.directory):
                await sandbox.copy_to(self.directory, sandbox.config.working_dir)
            found = await sandbox.list_changes()
            self.known, self.token = await _marks(found.entries), found.token

    async def save(self, sandbox: Sandbox, after: Listed | None = None) -> None:
        """Copy out what has changed. Raises SandboxError when that cannot be done; what was
        kept before stays."""
        async with self.turn:
            # What somebody saved meanwhile may be newer than what that command left.
            is_newest = after is not None and after.saves == self.saves
            self.saves += 1
            command = after.command if after is not None and is_newest else None
            since, self.token = self.token, ""
            found = await sandbox.list_changes(since, command)
            changed, gone = await self._compared(found)
            if changed or gone:
                await self._keep(sandbox, changed, gone)
            self.token = found.token

    async def _compared(self, found: Changes) -> tuple[dict[str, Mark], list[str]]:
        """What is to be kept of a listing, and the kept paths that are not there any more."""
        marks = await _marks(found.entries)
        gone: dict[str, None] = {}  # each once, however often it is told
        if not found.is_all:
            async for part in _in_parts(found.gone, len):
                gone |= {path: None for path in part if path in self.known}
            return marks, list(gone)
        changed: dict[str, Mark] = {}
        async for part in _in_parts(marks, len):
            changed |= {path: marks[path] for path in part if self.known.get(path) != marks[path]}
        async for part in _in_parts(self.known, len):
            gone |= {path: None for path in part if path not in marks}
        return changed, list(gone)

    async def _keep(self, sandbox: Sandbox, changed: dict[str, Mark], gone: list[str]) -> None:
        await in_thread(self._make_way, gone, changed)
        for path in gone:
            del self.known[path]
        if len(changed) > max(_MANY, len(self.known) // _SHARE):
            await sandbox.copy_from(sandbox.config.working_dir, self.directory)
            self.known |= changed
            return
        for path in sorted(changed):
            if await self._fetch(sandbox, path, changed[path]):
                self.known[path] = changed[path]
            else:
                self.known.pop(path, None)

    async def _fetch(self, sandbox: Sandbox, path: str, mark: Mark) -> bool:
        """Whether it was there to be fetched."""
        target = self.directory / path
        if mark[0] == "directory":
            await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
            return True
        try:
            await sandbox.copy_from(posixpath.join(sandbox.config.working_dir, path), target)
        except SandboxFileError as error:
            if isinstance(error.__cause__, OSError):
                raise  # our own disk, not a file that changed
            # It was removed, or became something else, since it was listed: next time.
            logger.info("Not kept: %s: %s", path, error)
            return False
        return True

    def _make_way(self, gone: list[str], changed: dict[str, Mark]) -> None:
        for path in gone:
            target = self.directory / path
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            else:
                target.unlink(missing_ok=True)
        for path, mark in changed.items():  # a directory where a file was, or the reverse
            target = self.directory / path
            if target.is_dir() and mark[0] == "file":
                shutil.rmtree(target, ignore_errors=True)
            elif mark[0] == "directory" and target.exists() and not target.is_dir():
                target.unlink()


class Workspaces:
    """All of them, below ``users`` of the data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Workspace] = {}

    def get(self, name: str) -> Workspace:
        """``name`` is one of Names.workspace: never text of a user."""
        if name not in self._open:
            self._open[name] = Workspace(self._directory / name)
        return self._open[name]

    def release(self, name: str) -> None:
        """Forget what the last sandbox held; the files stay."""
        self._open.pop(name, None)

    async def usage_bytes(self, name: str) -> int:
        return await asyncio.to_thread(_size, self._directory / name)

    async def erase(self, name: str) -> None:
        """Remove a user's files for good."""
        self.release(name)
        await asyncio.to_thread(shutil.rmtree, self._directory / name, ignore_errors=True)


async def save_quietly(
    workspace: Workspace, sandbox: Sandbox, seconds: float, after: Listed | None = None
) -> bool:
    """Save, within so many seconds. Whether all of it is kept."""
    if not sandbox.is_running:
        workspace.trouble = "the sandbox has ended"
        return False
    try:
        async with asyncio.timeout(seconds):
            await workspace.save(sandbox, after)
    except TimeoutError:
        workspace.trouble = f"it took longer than {seconds:.0f} seconds"
        logger.error(
            "Files of sandbox %s were not kept: it took longer than %.1f seconds",
            sandbox.sandbox_id, seconds,
        )  # fmt: skip
        return False
    except (SandboxError, OSError) as error:
        # One that ends meanwhile was saved by whoever ended it, or is lost and told so.
        told = isinstance(error, SandboxError)
        workspace.trouble = str(error) if told else "the disk of the service failed"
        level = logging.ERROR if sandbox.is_running else logging.INFO
        logger.log(level, "Files of sandbox %s were not kept: %s", sandbox.sandbox_id, error)
        return False
    workspace.trouble = ""
    return True


async def _marks(listing: list[FileInfo]) -> dict[str, Mark]:
    """What can be kept of a listing. The guest wrote it: every path is looked at."""
    marks: dict[str, Mark] = {}
    async for part in _in_parts(listing, lambda entry: len(entry["path"])):
        marks |= {
            entry["path"]: (
                entry["kind"],
                entry["size"] if entry["kind"] == "file" else 0,
                entry["mode"],
                entry["modified"] if entry["kind"] == "file" else 0.0,
            )
            for entry in part
            if entry["kind"] in ("file", "directory") and _is_below(entry["path"])
        }
    return marks


async def _in_parts(things: Iterable[T], length: Callable[[T], int]) -> AsyncIterator[list[T]]:
    """All of them; others have their turn after each part. ``length`` is that of a thing's path."""
    part: list[T] = []
    room = _AT_ONCE
    for thing in things:
        part.append(thing)
        room -= length(thing) + _EACH
        if room <= 0:
            yield part
            await asyncio.sleep(0)
            part, room = [], _AT_ONCE
    yield part


def _is_below(path: str) -> bool:
    """The guest names these paths, and the guest may lie."""
    steps = f"/{path}/"
    if "//" in steps or "/./" in steps or "/../" in steps or "\0" in path:
        return False
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half a letter, which is no name on any disk
        return False
    return not DRAFT_STEP.search(steps)


def _prepare(directory: Path) -> bool:
    """Make it, remove what a killed service left half written; whether anything is kept."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for base, folders, names in os.walk(directory):
        for name in filter(DRAFT_NAME.match, [*folders, *names]):
            shutil.rmtree(os.path.join(base, name), ignore_errors=True)
            Path(base, name).unlink(missing_ok=True)
        folders[:] = [name for name in folders if not DRAFT_NAME.match(name)]
    return any(directory.iterdir())


def _size(directory: Path) -> int:
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total
