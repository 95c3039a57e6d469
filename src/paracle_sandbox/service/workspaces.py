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
from dataclasses import dataclass, field
from pathlib import Path

from ..channel.drafts import DRAFT_NAME
from ..command import Command
from ..errors import SandboxError, SandboxFileError
from ..results import FileInfo
from ..sandbox import Sandbox

logger = logging.getLogger(__name__)

# With more changed files than this, one stream of everything is faster than one for each.
_MANY = 100

Mark = tuple[str, int, int, float]


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
    top: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    saves: int = 0

    async def restore(self, sandbox: Sandbox) -> None:
        """Put the kept files into a new, empty sandbox."""
        async with self.turn:
            self.top = ""
            if await asyncio.to_thread(_prepare, self.directory):
                await sandbox.copy_to(self.directory, sandbox.config.working_dir)
            self.known = _marks(await self._listing(sandbox))

    async def save(self, sandbox: Sandbox, after: Listed | None = None) -> None:
        """Copy out what has changed. Raises SandboxError when that cannot be done; what was
        kept before stays."""
        async with self.turn:
            # What somebody saved meanwhile may be newer than what that command left.
            is_newest = after is not None and after.saves == self.saves
            self.saves += 1
            command = after.command if after is not None and is_newest else None
            found = _marks(await self._listing(sandbox, command))
            if found == self.known:
                return
            changed = [path for path, mark in found.items() if self.known.get(path) != mark]
            gone = [path for path in self.known if path not in found]
            await asyncio.to_thread(self._make_way, gone, {path: found[path] for path in changed})
            if len(changed) > _MANY:
                await sandbox.copy_from(sandbox.config.working_dir, self.directory)
            else:
                await self._fetch(sandbox, sorted(changed), found)
            self.known = found

    async def _fetch(self, sandbox: Sandbox, changed: list[str], found: dict[str, Mark]) -> None:
        for path in changed:
            target = self.directory / path
            if found[path][0] == "directory":
                await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
                continue
            inside = posixpath.join(sandbox.config.working_dir, path)
            try:
                await sandbox.copy_from(inside, target)
            except SandboxFileError as error:
                if isinstance(error.__cause__, OSError):
                    raise  # our own disk, not a file that changed
                # It was removed, or became something else, since it was listed: next time.
                logger.info("Not kept: %s: %s", path, error)
                found.pop(path, None)

    async def _listing(
        self, sandbox: Sandbox, after: Command | None = None
    ) -> list[tuple[str, FileInfo]]:
        if not self.top:
            # By the guest's own name for it, which entries begin with.
            self.top = (await sandbox.stat("."))["path"].rstrip("/") + "/"
        if after is not None:
            entries = await sandbox.listed_after(after)
        else:
            entries = await sandbox.list_files(".", recursive=True)
        named = ((entry["path"].removeprefix(self.top), entry) for entry in entries)
        return [(path, entry) for path, entry in named if _is_below(path)]

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


async def save_quietly(workspace: Workspace, sandbox: Sandbox, after: Listed | None = None) -> bool:
    """Save before a sandbox goes. Whether all of it is kept."""
    if not sandbox.is_running:
        return False
    try:
        await workspace.save(sandbox, after)
    except (SandboxError, OSError) as error:
        # One that ends meanwhile was saved by whoever ended it, or is lost and told so.
        level = logging.ERROR if sandbox.is_running else logging.INFO
        logger.log(level, "Files of sandbox %s were not kept: %s", sandbox.sandbox_id, error)
        return False
    return True


def _marks(listing: list[tuple[str, FileInfo]]) -> dict[str, Mark]:
    return {
        path: (
            entry["kind"],
            entry["size"] if entry["kind"] == "file" else 0,
            entry["mode"],
            entry["modified"] if entry["kind"] == "file" else 0.0,
        )
        for path, entry in listing
        if entry["kind"] in ("file", "directory")
    }


def _is_below(path: str) -> bool:
    """The guest names these paths, and the guest may lie."""
    parts = path.split("/")
    if path == "." or path.startswith("/") or ".." in parts or "\0" in path:
        return False
    return not any(DRAFT_NAME.match(part) for part in parts)


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
