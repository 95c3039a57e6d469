"""Users' files, kept outside of their sandboxes.

A sandbox is removed when it idles, when its user removes it, and when the service dies; the files
of its working directory stay. They are copied out after each program and each write, file by file
and only what changed, each whole or not at all. They are copied into the next sandbox before it is
used. Copies from a sandbox are hostile and go through the library's own extractor. Links, special
files and /tmp are not kept.
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
# The same with more than one in _SHARE of all files.
_SHARE = 10
# How much of a listing is handled at once: characters of its paths, and so many for each entry.
_AT_ONCE = 128 << 10
_EACH = 64

Mark = tuple[str, int, int, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Listed:
    """A command whose end has a listing, and the number of saves when it began."""

    command: Command
    saves: int


@dataclass
class Workspace:
    """The kept files of one user, and which files of the sandbox are known to be among them."""

    directory: Path
    known: dict[str, Mark] = field(default_factory=dict)
    # The token of the listing in ``known``; empty while some of it is not kept.
    token: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    saves: int = 0
    # Why the last save failed, as a text for the user; empty if it kept all.
    trouble: str = ""

    async def restore(self, sandbox: Sandbox) -> None:
        """Copy the kept files into a new, empty sandbox."""
        async with self.turn:
            if await asyncio.to_thread(_prepare, self.directory):
                await sandbox.copy_to(self.directory, sandbox.config.working_dir)
            found = await sandbox.list_changes()
            self.known, self.token = await _marks(found.entries), found.token

    async def save(self, sandbox: Sandbox, after: Listed | None = None) -> None:
        """Copy out what has changed. Raises SandboxError when it cannot; earlier copies stay."""
        async with self.turn:
            # A save in between may have copied newer files than that command left.
            is_newest = after is not None and after.saves == self.saves
            self.saves += 1
            command = after.command if after is not None and is_newest else None
            since, self.token = self.token, ""
            found = await sandbox.list_changes(since, command)
            changed, gone = await self._compare(found)
            if changed or gone:
                await self._keep(sandbox, changed, gone)
            self.token = found.token

    async def _compare(self, found: Changes) -> tuple[dict[str, Mark], list[str]]:
        """Return the entries of a listing to copy, and the kept paths that are gone."""
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
        """Copy one file. Returns False if it is not there any more."""
        target = self.directory / path
        if mark[0] == "directory":
            await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
            return True
        try:
            await sandbox.copy_from(posixpath.join(sandbox.config.working_dir, path), target)
        except SandboxFileError as error:
            if isinstance(error.__cause__, OSError):
                raise  # our own disk, not a file that changed
            # It was removed or changed since it was listed; the next save sees that.
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
    """The kept files of all users, below ``users`` of the data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Workspace] = {}

    def get(self, name: str) -> Workspace:
        """Return the workspace with a name of Names.workspace, which is never text of a user."""
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
    """Save within so many seconds. Returns whether all files are kept, and raises nothing."""
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
        # A sandbox that ended meanwhile was saved by its removal, or is a loss and reported.
        told = isinstance(error, SandboxError)
        workspace.trouble = str(error) if told else "the disk of the service failed"
        level = logging.ERROR if sandbox.is_running else logging.INFO
        logger.log(level, "Files of sandbox %s were not kept: %s", sandbox.sandbox_id, error)
        return False
    workspace.trouble = ""
    return True


async def _marks(listing: list[FileInfo]) -> dict[str, Mark]:
    """Return the entries of a listing that can be kept. The guest wrote it: check each path."""
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
    """Yield all things in parts, and let other tasks run after each. ``length`` measures a path."""
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
    """Whether the path is below the working directory. The guest wrote it, and may lie."""
    steps = f"/{path}/"
    if "//" in steps or "/./" in steps or "/../" in steps or "\0" in path:
        return False
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half a letter, which is no name on any disk
        return False
    return not DRAFT_STEP.search(steps)


def _prepare(directory: Path) -> bool:
    """Make the directory and remove what a killed service left half written. Returns whether there
    are files."""
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
