"""Copies the user's files into a sandbox, and the changes back.

The agent works on copies and never touches the user's files. Changes are shown first and written
only on request. They are never written outside of the folder, through a link, or into files that
tools run or trust by themselves (.git, hidden files, repositories): from there, code that a model
wrote would run on the host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import SandboxError
from ..sandbox.host_copy import in_thread
from ..sandbox.sandbox import Sandbox
from .diffs import make_diff

# These are neither copied in nor written back.
LEFT_OUT = frozenset([
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".idea", ".vscode", ".direnv", ".envrc",
])  # fmt: skip
# Hidden files that no tool runs or obeys. All others may be: .claude, .cargo, .husky,
# .devcontainer, .github/workflows, .mcp.json, .exrc, .npmrc and those of future tools.
_HARMLESS = frozenset([
    ".gitignore", ".gitkeep", ".keep", ".dockerignore", ".npmignore", ".eslintignore",
    ".prettierignore", ".editorconfig", ".nojekyll",
])  # fmt: skip
# Files that are not hidden, and that interpreters and editors run or obey when a folder is merely
# opened: they collect tests and look for environments.
_AUTORUN_NAMES = frozenset(["conftest.py", "pyvenv.cfg", "sitecustomize.py", "usercustomize.py"])
_AUTORUN_ENDINGS = (".pth", ".code-workspace")
# Files that make a folder a repository to git, which runs commands that its configuration names.
# The file "commondir" names the folder of the configuration. Names are compared in lower case,
# for disks that ignore case.
_REPOSITORIES = ({"head", "objects", "refs"}, {"head", "commondir"})
MAX_FILES = 20_000
MAX_BYTES = 512 << 20


@dataclass(frozen=True)
class Change:
    """One file that has changed. ``problem`` says why it will not be written back."""

    path: str
    kind: Literal["added", "changed", "removed"]
    before: bytes | None
    after: bytes | None
    executable: bool = False
    problem: str = ""
    mode_changed: bool = False

    @property
    def shown(self) -> str:
        """The path as printable text in one line, whatever a program has put into it."""
        return self.path if self.path.isprintable() else ascii(self.path)

    def diff(self) -> str:
        """Return a diff that ``patch`` and ``git apply`` take, or the sizes if the file is binary
        or takes too long to compare. Call it from a thread: it may take a second."""
        title = f"{self.kind} {self.shown}" + (f" ({self.problem})" if self.problem else "")
        old, new = self.before or b"", self.after or b""
        text = make_diff(
            old,
            new,
            "/dev/null" if self.before is None else f"a/{self.shown}",
            "/dev/null" if self.after is None else f"b/{self.shown}",
        )
        if text is None:
            return f"{title}: {len(old)} -> {len(new)} bytes\n"
        if self.mode_changed:
            text = f"{self.shown}: {'now' if self.executable else 'no longer'} executable\n{text}"
        return text if not self.problem else f"# {title}\n{text}"


class WorkspaceSync:
    """The files that the user gave. ``sources`` maps paths inside to paths on the host.

    They are copied once, when a sandbox first needs them. Changes are found by comparison with that
    copy and not with the user's files, which may change meanwhile. close() removes the copy."""

    def __init__(self, folder: Path | None, sources: dict[str, Path]) -> None:
        self.folder = folder
        self.sources = sources
        self._copy: Path | None = None

    @classmethod
    def gather(cls, folder: Path | None, files: Sequence[Path] = ()) -> WorkspaceSync:
        """Collect the files. Raises SandboxError when one is missing or there are too many."""
        sources: dict[str, Path] = {}
        if folder is not None:
            if not folder.is_dir():
                raise SandboxError(f"There is no folder {folder}")
            # Stop at one file too many: a folder may be a whole disk.
            sources.update(islice(_list_files(folder.resolve()), MAX_FILES + 1))
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
            found = f"more than {MAX_FILES} files" if len(sources) > MAX_FILES else "files"
            raise SandboxError(
                f"{found} with {size >> 20} MB are too many to copy into a sandbox; "
                f"give a smaller folder (at most {MAX_FILES} files, {MAX_BYTES >> 20} MB)"
            )
        return cls(None if folder is None else folder.resolve(), sources)

    async def copy_in(self, sandbox: Sandbox) -> None:
        """Copy every file into a sandbox, as it was at the first call. Raises SandboxError."""
        if self._copy is None:
            self._copy = await in_thread(self._copy_sources)
        await sandbox.copy_to(self._copy, sandbox.config.working_dir)

    def _copy_sources(self) -> Path:
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
        """Remove the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            shutil.rmtree(copy, ignore_errors=True)

    async def changes(self, sandbox: Sandbox) -> list[Change]:
        """Return the changes, sorted by path. There are none if no sandbox got the files."""
        if self._copy is None:
            return []
        directory = tempfile.mkdtemp(prefix="paracle-")
        try:
            after = Path(directory) / "after"
            await sandbox.copy_from(sandbox.config.working_dir, after)
            return await in_thread(self._compare, after)
        finally:
            await in_thread(shutil.rmtree, directory, True)

    def _compare(self, after: Path) -> list[Change]:
        # Links are not copied out, so that no path here leads elsewhere.
        found = dict(_list_files(after))
        repositories = _find_repositories(after)
        return [
            change
            for inside in sorted({*self.sources, *found})
            if (change := self._compare_file(inside, found.get(inside), repositories)) is not None
        ]

    def _compare_file(
        self, inside: str, after: Path | None, repositories: Sequence[str] = ()
    ) -> Change | None:
        assert self._copy is not None
        old = (self._copy / inside).read_bytes() if inside in self.sources else None
        new = None if after is None else after.read_bytes()
        executable = after is not None and bool(after.stat().st_mode & 0o100)
        mode_changed = False
        if old is not None and new is not None:
            mode_changed = executable != bool((self._copy / inside).stat().st_mode & 0o100)
        if old == new and not mode_changed:
            return None
        kind: Literal["added", "changed", "removed"] = (
            "added" if old is None else "removed" if new is None else "changed"
        )
        problem = self._find_problem(inside)
        if not problem and any(
            folder == "." or inside.startswith(f"{folder}/") for folder in repositories
        ):
            problem = "git would take its folder for a repository: not written back"
        return Change(inside, kind, old, new, executable, problem, mode_changed)

    def find_target(self, inside: str) -> Path | None:
        """Return the path of a file on the host, or None for a new file if no folder was given."""
        if inside in self.sources:
            return self.sources[inside]
        return None if self.folder is None else self.folder / inside

    def _find_problem(self, inside: str) -> str:
        target = self.find_target(inside)
        if target is None:
            return "new, and no folder was given: not written back"
        if self.folder is None or not target.is_relative_to(self.folder):
            return ""  # the user gave this very file
        if not inside.isprintable():
            return "its name holds control characters: not written back"
        if hidden := _find_autorun_part(inside):
            return (
                f"tools may run what is in {hidden} by themselves: not written back. If you want "
                "it, take it from the diff"
            )
        parent = self.folder
        for part in PurePosixPath(inside).parts:
            parent /= part
            if parent.is_symlink():
                return f"{parent} is a link: not written back"
        if inside not in self.sources and target.exists():
            return f"{target} is there already: not written back"
        return ""

    async def apply(self, changes: Sequence[Change]) -> list[str]:
        """Write the changes to the user's files, and return what was not written and why. A file
        that the user has changed meanwhile is left alone. If one cannot be written, none is."""
        return await in_thread(self._apply, changes)

    def _apply(self, changes: Sequence[Change]) -> list[str]:
        problems, wanted = [], []
        for change in changes:
            problem = change.problem or self._find_problem(change.path)
            target = self.find_target(change.path)
            if not problem and target is not None:
                problem = _find_conflict(target, change)
            if problem:
                problems.append(f"{change.shown}: {problem}")
            elif target is not None:
                wanted.append((target, change))
        try:
            _write_all(wanted)
        except OSError as error:
            reason = f"{error.strerror or error}: nothing was written back"
            problems += [f"{change.shown}: {reason}" for _, change in wanted]
        return problems


def _find_autorun_part(inside: str) -> str:
    """Return the part of a path for which a tool may run or obey it by itself: a hidden part, or a
    name that tools look for. It is empty if there is none."""
    parts = PurePosixPath(inside).parts
    name = parts[-1].lower()  # for disks that ignore case
    if name in _AUTORUN_NAMES or name.endswith(_AUTORUN_ENDINGS):
        return parts[-1]
    hidden = [part for part in parts if part.startswith(".")]
    if not hidden or (len(hidden) == 1 and parts[-1] in _HARMLESS):
        return ""
    return hidden[0]


def _find_repositories(folder: Path) -> list[str]:
    found = []
    for directory, names, files in os.walk(folder):
        there = {name.lower() for name in (*names, *files)}
        if any(there >= wanted for wanted in _REPOSITORIES):
            found.append(Path(directory).relative_to(folder).as_posix())
    return found


def _find_conflict(target: Path, change: Change) -> str:
    if target.is_symlink():
        return "it is a link now: not written back"
    try:
        now = target.read_bytes() if target.is_file() else None
    except OSError as error:
        return f"{error.strerror}: not written back"
    return "" if now == change.before else "it was changed meanwhile: not written back"


def _write_all(wanted: Sequence[tuple[Path, Change]]) -> None:
    """Write all changes or none. First every content is written to a draft beside its target, which
    is where a full disk or a read-only folder shows. Then the drafts are renamed."""
    drafts: list[Path | None] = []
    made: list[Path] = []
    done: list[tuple[Path, Change, int]] = []
    try:
        for target, change in wanted:
            drafts.append(None if change.after is None else _write_draft(target, change, made))
        for (target, change), draft in zip(wanted, drafts, strict=True):
            mode = target.stat().st_mode & 0o777 if change.before is not None else 0
            if draft is None:
                target.unlink()
            else:
                draft.replace(target)
            done.append((target, change, mode))
    except OSError:
        _undo(done)
        for draft in drafts:
            if draft is not None:
                draft.unlink(missing_ok=True)
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()
        raise


def _write_draft(target: Path, change: Change, made: list[Path]) -> Path:
    _make_parents(target.parent, made)
    mode = 0o644 if change.before is None else target.stat().st_mode & 0o777
    if change.before is None or change.mode_changed:
        mode = mode | 0o111 if change.executable else mode & ~0o111
    return _write_beside(target, change.after or b"", mode)


def _write_beside(target: Path, content: bytes, mode: int) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=".paracle-", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _make_parents(folder: Path, made: list[Path]) -> None:
    if not folder.exists():
        _make_parents(folder.parent, made)
        folder.mkdir()
        made.append(folder)


def _undo(done: Sequence[tuple[Path, Change, int]]) -> None:
    """Restore what was replaced or removed, as far as that is still possible."""
    for target, change, mode in reversed(done):
        with suppress(OSError):
            if change.before is None:
                target.unlink()
            else:
                _write_beside(target, change.before, mode).replace(target)


def _list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the plain files below a folder, except LEFT_OUT. Links are not followed: they may lead
    to files that the user did not give."""
    for directory, names, files in os.walk(folder):
        names[:] = [n for n in names if n not in LEFT_OUT]
        for name in files:
            path = Path(directory) / name
            if name not in LEFT_OUT and path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix(), path
