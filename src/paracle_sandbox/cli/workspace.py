"""What ``execute`` takes into the sandbox beside the program, and what it brings back.

A folder of the user goes in as a copy. Coming back, what changed is listed, and written only with
``--apply``: whole, never through a link, never over what the user changed meanwhile, and not where
tools of this machine would run it by themselves (see ``agents.workspace_sync``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..agents.workspace_sync import Change, WorkspaceSync
from ..errors import SandboxError, SandboxExecutionError
from ..sandbox.host_copy import in_thread
from . import output
from .exit_codes import UsageFault

if TYPE_CHECKING:
    from ..sandbox.sandbox import Sandbox
    from .program import Outcome

_SIGNS = {"added": "A", "changed": "M", "removed": "D"}
_TOLD_OF_PIP = 2000
_READ_MODULES = 200


@dataclass(frozen=True)
class Wanted:
    """The flags, as the user gave them; ``ours`` are files that we put beside the workspace's."""

    folder: str | None = None
    files: Sequence[str] = ()
    install: Sequence[str] = ()
    save: str | None = None
    apply: bool = False
    diff: bool = False
    quiet: bool = False
    ours: frozenset[str] = frozenset()

    @property
    def anything(self) -> bool:
        return bool(self.folder or self.files or self.install or self.save)


@dataclass
class Workspace:
    """Checked before a sandbox is made. ``problems`` is what could not be brought back."""

    wanted: Wanted
    project: WorkspaceSync | None
    files: list[tuple[Path, str]]
    working_dir: str
    problems: list[str] = field(default_factory=list)

    @classmethod
    def checked(cls, wanted: Wanted, working_dir: str) -> Workspace:
        """Raises UsageFault that names the flag."""
        if (wanted.apply or wanted.diff) and wanted.folder is None:
            flag = "--apply" if wanted.apply else "--diff"
            raise UsageFault(f"{flag} needs --workspace DIR: the folder that the changes belong to")
        if wanted.save is not None and os.path.lexists(wanted.save):
            raise UsageFault(f"--save: {wanted.save} is there already; name a new directory")
        _check_requirements(wanted.install)
        files = [_copy_of(text, working_dir) for text in wanted.files]
        return cls(wanted, _project(wanted.folder), files, working_dir)

    def find(self, file: str) -> str | None:
        """The path below the workspace of a file that the user names from here, or from there;
        None when it is not one of the workspace's."""
        if self.project is None or self.project.folder is None:
            return None
        for place in (Path(file), self.project.folder / file):
            try:
                inside = place.resolve(strict=True).relative_to(self.project.folder).as_posix()
            except (OSError, ValueError):
                continue
            if inside in self.project.sources:
                return inside
        return None

    async def bring_in(self, sandbox: Sandbox) -> None:
        if self.project is not None:
            await self.project.copy_in(sandbox)
            await sandbox.wait_for_packages(await in_thread(_python_of, self.project))
        for local, inside in self.files:
            await sandbox.copy_to(local, inside)
        if self.wanted.install:
            await self._install(sandbox)

    async def _install(self, sandbox: Sandbox) -> None:
        wanted = self.wanted.install
        if not self.wanted.quiet:
            output.note(f"Installing {', '.join(wanted)}")
        done = await sandbox.install(*wanted)
        if done["exit_code"]:
            said = (done["stderr"] or done["stdout"]).strip()[-_TOLD_OF_PIP:]
            raise SandboxExecutionError(
                f"--install: {', '.join(wanted)} could not be installed: {said}",
                sandbox.sandbox_id, done["exit_code"], said,
            )  # fmt: skip

    async def bring_out(self, sandbox: Sandbox, outcome: Outcome) -> None:
        """Also of a program that failed; of one that we stopped only what ``--save`` names."""
        try:
            if self.wanted.save is not None:
                await sandbox.copy_from(sandbox.config.working_dir, self.wanted.save)
                self._note(f"Saved the working directory as {self.wanted.save}")
            if self.project is None or not (self.wanted.apply or self.wanted.diff):
                return
            if outcome.error is not None:
                self.problems.append("the program was stopped: no change is written back")
                return
            changes = self._those_of_the_user(await self.project.changes(sandbox))
            await self._take_back(changes)
        except SandboxError as error:
            self.problems.append(str(error))

    def _those_of_the_user(self, changes: Sequence[Change]) -> list[Change]:
        ours = {*self.wanted.ours}
        for _, inside in self.files:
            ours.add(os.path.relpath(inside, self.working_dir))
        assert self.project is not None
        known = self.project.sources
        return [
            change
            for change in changes
            if change.path in known or not any(_is_below(change.path, one) for one in ours)
        ]

    async def _take_back(self, changes: Sequence[Change]) -> None:
        assert self.project is not None
        for change in changes:
            if self.wanted.diff:
                output.note((await in_thread(change.diff)).rstrip("\n"))
            else:
                self._note(f"{_SIGNS[change.kind]} {change.shown}")
        if not self.wanted.apply:
            return
        problems = await self.project.apply(changes)
        self.problems += problems
        written = len(changes) - len(problems)
        self._note(f"Wrote {written} of {len(changes)} changes to {self.project.folder}")

    def _note(self, text: str) -> None:
        if not self.wanted.quiet:
            output.note(text)

    def close(self) -> None:
        if self.project is not None:
            self.project.close()


def _python_of(project: WorkspaceSync) -> bytes:
    """What its modules say, for whoever wants to know what they import."""
    modules = [path for inside, path in project.sources.items() if inside.endswith(".py")]
    return b"\n".join(path.read_bytes() for path in modules[:_READ_MODULES])


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(place + "/")


def _project(folder: str | None) -> WorkspaceSync | None:
    if folder is None:
        return None
    try:
        return WorkspaceSync.gather(Path(folder))
    except SandboxError as error:
        raise UsageFault(f"--workspace: {error.message}") from None
    except OSError as error:
        raise UsageFault(f"--workspace: {error.filename}: {error.strerror}") from None


def _copy_of(text: str, working_dir: str) -> tuple[Path, str]:
    """PATH[:DEST]: a file of this machine, and where it goes. A name may hold a colon itself."""
    path, colon, place = text, "", ""
    if not os.path.lexists(text):
        path, colon, place = text.rpartition(":")
        if not colon:
            path, place = text, ""
    local = Path(path)
    if not local.exists():
        raise UsageFault(f"--file: there is no {path or text}")
    if colon and not place:
        raise UsageFault(f"--file: write PATH:DEST, not {text!r}")
    name = local.resolve().name
    if not place:
        place = name
    elif place.endswith("/"):
        place += name
    inside = os.path.normpath(os.path.join(working_dir, place))
    if not any(inside.startswith(root + "/") for root in (working_dir, "/tmp")):
        raise UsageFault(f"--file: DEST must be below {working_dir} or /tmp, not {place!r}")
    return local, inside


def _check_requirements(install: Sequence[str]) -> None:
    if not install:
        return
    from ..sandbox.packages import checked_requirement

    for one in install:
        try:
            checked_requirement(one)
        except ValueError as error:
            raise UsageFault(f"--install: {error}") from None
