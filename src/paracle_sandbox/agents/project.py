"""The user's files on their way into a sandbox and back.

Going in they are copied: the user's own are never touched by the agent. Coming back, what changed
is shown first and written only when asked for, and then never outside of the folder, through a
link, or into what tools trust blindly (.git and the like): code that a model wrote would run on
the host from there.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import SandboxError
from ..sandbox import Sandbox

# Neither copied in nor ever written back.
LEFT_OUT = frozenset([
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".idea", ".vscode", ".direnv", ".envrc",
])  # fmt: skip
MAX_FILES = 20_000
MAX_BYTES = 512 << 20
_MAX_DIFF = 1 << 20


@dataclass(frozen=True)
class Change:
    """One file that is not as it was. ``problem`` says why it will not be written back."""

    path: str
    kind: Literal["added", "changed", "removed"]
    before: bytes | None
    after: bytes | None
    executable: bool = False
    problem: str = ""
    mode_changed: bool = False

    def diff(self) -> str:
        """As ``patch`` and ``git apply`` take it, where it is text."""
        title = f"{self.kind} {self.path}" + (f" ({self.problem})" if self.problem else "")
        old, new = self.before or b"", self.after or b""
        if b"\0" in old + new or len(old) + len(new) > _MAX_DIFF:
            return f"{title}: {len(old)} -> {len(new)} bytes\n"
        lines = difflib.unified_diff(
            _lines(old),
            _lines(new),
            "/dev/null" if self.before is None else f"a/{self.path}",
            "/dev/null" if self.after is None else f"b/{self.path}",
        )
        shown = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )
        if self.mode_changed:
            shown = f"{self.path}: {'now' if self.executable else 'no longer'} executable\n{shown}"
        return shown if not self.problem else f"# {title}\n{shown}"


def _lines(content: bytes) -> list[str]:
    """Cut at line feeds only, as programs that read diffs do."""
    *whole, rest = content.decode("utf-8", "replace").split("\n")
    return [f"{line}\n" for line in whole] + ([rest] if rest else [])


class Project:
    """The files that were given: ``sources`` are their paths on the host, by path inside.

    They are copied aside once, when a sandbox first needs them: what changed is told by that, not
    by what the user's files have become meanwhile. close() removes the copy."""

    def __init__(self, folder: Path | None, sources: dict[str, Path]) -> None:
        self.folder = folder
        self.sources = sources
        self._aside: Path | None = None

    @classmethod
    def gather(cls, folder: Path | None, files: Sequence[Path] = ()) -> Project:
        """Raises SandboxError when something is missing or far too much."""
        sources: dict[str, Path] = {}
        if folder is not None:
            if not folder.is_dir():
                raise SandboxError(f"There is no folder {folder}")
            sources.update(_files_below(folder.resolve()))
        for file in files:
            if not file.is_file():
                raise SandboxError(f"There is no file {file}")
            if sources.get(file.name, file.resolve()) != file.resolve():
                raise SandboxError(
                    f"{file} and {sources[file.name]} have the same name; give their folder"
                )
            sources[file.name] = file.resolve()
        size = sum(path.stat().st_size for path in sources.values())
        if len(sources) > MAX_FILES or size > MAX_BYTES:
            raise SandboxError(
                f"{len(sources)} files with {size >> 20} MB are too many to copy into a sandbox; "
                f"give a smaller folder (at most {MAX_FILES} files, {MAX_BYTES >> 20} MB)"
            )
        return cls(None if folder is None else folder.resolve(), sources)

    async def copy_in(self, sandbox: Sandbox) -> None:
        """Every file, as it was at the first time. Raises SandboxError."""
        if self._aside is None:
            self._aside = await asyncio.to_thread(self._copy_aside)
        await sandbox.copy_to(self._aside, sandbox.config.working_dir)

    def _copy_aside(self) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="paracle-"))
        try:
            for inside, source in self.sources.items():
                target = directory / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                shutil.copymode(source, target)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise SandboxError(f"The files cannot be copied: {error}") from error
        return directory

    def close(self) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)

    async def changes(self, sandbox: Sandbox) -> list[Change]:
        """What is not as it was given, by path; nothing if it never went in."""
        if self._aside is None:
            return []
        with tempfile.TemporaryDirectory(prefix="paracle-") as directory:
            after = Path(directory) / "after"
            await sandbox.copy_from(sandbox.config.working_dir, after)
            # Links do not come out, so nothing here leads elsewhere.
            found = dict(_files_below(after))
            return [
                change
                for inside in sorted({*self.sources, *found})
                if (change := self._change(inside, found.get(inside))) is not None
            ]

    def _change(self, inside: str, after: Path | None) -> Change | None:
        assert self._aside is not None
        old = (self._aside / inside).read_bytes() if inside in self.sources else None
        new = None if after is None else after.read_bytes()
        executable = after is not None and bool(after.stat().st_mode & 0o100)
        mode_changed = False
        if old is not None and new is not None:
            mode_changed = executable != bool((self._aside / inside).stat().st_mode & 0o100)
        if old == new and not mode_changed:
            return None
        kind: Literal["added", "changed", "removed"] = (
            "added" if old is None else "removed" if new is None else "changed"
        )
        problem = self._problem(inside)
        return Change(inside, kind, old, new, executable, problem, mode_changed)

    def target(self, inside: str) -> Path | None:
        """Where a file goes on the host; None for a new one without a folder."""
        if inside in self.sources:
            return self.sources[inside]
        return None if self.folder is None else self.folder / inside

    def _problem(self, inside: str) -> str:
        target = self.target(inside)
        if target is None:
            return "new, and no folder was given: not written back"
        if inside in self.sources:
            return ""
        assert self.folder is not None
        place = self.folder
        for part in PurePosixPath(inside).parts:
            place /= part
            if place.is_symlink():
                return f"{place} is a link: not written back"
        return f"{target} is there already: not written back" if target.exists() else ""

    def apply(self, changes: Sequence[Change]) -> list[str]:
        """Write the changes to the user's files; what was not written, and why. A file that the
        user changed meanwhile is left alone."""
        problems = []
        for change in changes:
            problem = change.problem or self._problem(change.path)
            target = self.target(change.path)
            if not problem and target is not None:
                problem = _write(target, change)
            if problem:
                problems.append(f"{change.path}: {problem}")
        return problems


def _write(target: Path, change: Change) -> str:
    """Why it was not written; nothing when it was."""
    if target.is_symlink():
        return "it is a link now: not written back"
    now = target.read_bytes() if target.is_file() else None
    if now != change.before:
        return "it was changed meanwhile: not written back"
    try:
        if change.after is None:
            target.unlink()
            return ""
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.paracle-{os.getpid()}")
        mode = target.stat().st_mode & 0o777 if now is not None else 0o644
        if now is None or change.mode_changed:
            mode = mode | 0o111 if change.executable else mode & ~0o111
        beside.write_bytes(change.after)
        beside.chmod(mode)
        beside.replace(target)
    except OSError as error:
        return f"{error.strerror}: not written back"
    return ""


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Plain files by their path below the folder, without what is left out. Links are not
    followed: they may lead to what the user did not give."""
    for directory, names, files in os.walk(folder):
        names[:] = [n for n in names if n not in LEFT_OUT]
        for name in files:
            path = Path(directory) / name
            if name not in LEFT_OUT and path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix(), path
