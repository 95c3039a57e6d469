"""Templates: what an image is to Docker, a template is to native sandboxes.

A name, a set of packages in a read-only directory, and the modules that a spawner imports once
so that no sandbox pays for them. `template_files` says how they lie on disk, `template_builder` how
they are built: by a process of its own, and only by one at a time.

The default template is built beside the first program: its sandbox starts at once, with the
standard library, and gains the packages when they are there. A program that imports one of them
meanwhile waits for it. Any other template was asked for by name, and is built first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import BackendUnavailableError, SandboxError
from ...settings import Settings
from .spawner_process import PACKAGE_PATH, default_python
from .template_files import Failure, TemplateFiles, follow
from .template_kinds import (
    MODULES_OF,
    refuse_other_python,
    template_at,
    template_path,
    templates_dir,
)
from .template_kinds import PACKAGES as PACKAGES
from .template_kinds import Template as Template
from .template_kinds import template_name as template_name

if TYPE_CHECKING:
    import subprocess

log = logging.getLogger("paracle_sandbox.templates")

_LOOK_AGAIN_SECONDS = 0.1
_STOP_SECONDS = 20.0
_DEFAULT = "default"
# The path of the package comes last: nothing that lies beside it replaces the standard library.
_PROGRAM = """
import sys; sys.path.append(sys.argv[1])
from paracle_sandbox.backends.native.template_builder import main; main(sys.argv[2])
"""

Progress = Callable[[str], None]


def _tell_nobody(line: str) -> None:
    pass


class Templates:
    """The templates of this user, in the data directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._files = TemplateFiles(templates_dir(settings))
        self._notes: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._told: set[str] = set()
        self._held: list[int] = []

    # Looking

    def get(self, name: str) -> Template:
        """As far as it is there. Raises BackendUnavailableError where others can write to it."""
        self._files.check()
        return template_at(self._path(name), name)

    def names(self) -> list[str]:
        return list(PACKAGES)

    def _path(self, name: str) -> Path:
        # Looked for with every sandbox that is made, and always in the same place.
        if name not in self._paths:
            self._paths[name] = template_path(name, self._settings)
        return self._paths[name]

    # For sandboxes

    async def for_image(self, image: str, progress: Progress | None = None) -> Template:
        """The template behind an image name, as far as it is there; see the module for what is
        waited for."""
        name = template_name(image)
        self._check_python(image)
        template = self.get(name)
        if not template.is_built and self._settings.template_build:
            if name == _DEFAULT:
                self.begin(name)
            else:
                await self._build_for_sandbox(name, progress)
            template = template_at(self._path(name), name, make=True)
        note = self._notes.get(name)
        return replace(template, note=note) if note else template

    def _check_python(self, image: str) -> None:
        note = refuse_other_python(image, self._settings)
        if note and image not in self._told:
            self._told.add(image)
            # The default of a setting was nobody's wish.
            usual = image == self._settings.service_image
            log.log(logging.INFO if usual else logging.WARNING, "%s", note)

    def begin(self, name: str) -> None:
        """Start to build a template beside us, if it is missing and nobody does so already. It
        goes on when this process has ended."""
        if self.get(name).is_built or not self._settings.template_build or self._gave_up(name):
            return
        try:
            lock = self._lock(name)
            if lock is None:
                return
            try:
                # Somebody else may have been first, in this process or another.
                if self.get(name).is_built or self._gave_up(name):
                    return
                self._start_builder(name, lock)
            finally:
                os.close(lock)
        except BackendUnavailableError:  # it is another's: nothing here goes without saying so
            raise
        except SandboxError as error:
            self._go_without(name, str(error))
            return
        # A warning is what reaches people who set up no logging.
        log.warning(
            "Building the %s template, once. Until that is done there is the standard library; "
            "a program that imports %s waits for it.",
            name, ", ".join(PACKAGES[name][:-1]) + f" or {PACKAGES[name][-1]}",
        )  # fmt: skip

    async def wait_for(
        self, name: str, source: str | bytes, progress: Progress | None = None
    ) -> None:
        """Before a program runs: wait for the template that is being built, if the program imports
        a package of it."""
        if self.get(name).is_built or not self._settings.template_build:
            return
        imported = packages_in(source, name)
        if not imported:
            return
        failure = self._files.failure(name)
        if failure is None or not failure.is_recent:
            log.warning("This program may import %s: waiting for the %s template.", imported, name)
            with contextlib.suppress(SandboxError):
                await self._build_for_waiting(name, progress)
            failure = self._files.failure(name)
        if self.get(name).is_built or failure is None:
            return
        missed = f"{imported} is not there: {failure.reason}"
        if missed not in self._told:  # a service need not say it for each program
            self._told.add(missed)
            log.warning("%s", missed)

    async def _build_for_sandbox(self, name: str, progress: Progress | None) -> None:
        """Once, also when it fails: whoever is offline need not wait for that in every program."""
        if self._gave_up(name):
            return
        # A warning is what reaches people who set up no logging: this takes a while.
        log.warning("Building the %s template, once: installing its packages.", name)
        try:
            await self._build_for_waiting(name, progress)
        except BackendUnavailableError:
            raise
        except SandboxError as error:
            self._go_without(name, str(error))

    async def _build_for_waiting(self, name: str, progress: Progress | None) -> None:
        """Build it, or wait for whoever does, and tell when that is over."""
        progress = progress or _tell_nobody
        try:
            await self._build_once(name, progress, only_if_wanted=True)
        finally:
            progress("")

    def _gave_up(self, name: str) -> bool:
        """The last build failed a short time ago. Whoever asks goes without."""
        failure = self._files.failure(name)
        if failure is None:
            return name in self._notes  # where it failed nothing can be written, either
        if not failure.is_recent:
            self._notes.pop(name, None)
            return False
        self._notes[name] = failure.reason
        if not failure.is_told:
            log.warning("Sandboxes run with the standard library alone: %s", failure.reason)
            self._files.note_failure(name, replace(failure, is_told=True))
        return True

    def _go_without(self, name: str, reason: str) -> None:
        log.warning("Sandboxes run with the standard library alone: %s", reason)
        self._notes[name] = reason
        failure = self._files.failure(name) or Failure(reason, at=time.time())
        self._files.note_failure(name, replace(failure, is_told=True))

    # Building

    async def build(
        self, name: str, progress: Progress = _tell_nobody, *, if_missing: bool = False
    ) -> bool:
        """Install the packages; whether that was done. Raises SandboxError when the package index
        cannot be reached or the directory cannot be written; a note of it is what pip said."""
        self._path(name)
        return await self._build_once(name, progress, if_missing=if_missing)

    async def _build_once(
        self,
        name: str,
        progress: Progress,
        *,
        if_missing: bool = True,
        only_if_wanted: bool = False,
    ) -> bool:
        """Build it, or wait for whoever does. ``only_if_wanted``: not again where that failed."""
        steps = follow(self._files.steps_path(name))
        began = time.time()
        waited = False
        while True:
            lock = self._lock(name)
            if lock is None:
                waited = True
                for step in steps():
                    progress(step)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                continue
            try:
                if (if_missing or (waited and only_if_wanted)) and self.get(name).is_built:
                    return False
                failure = self._files.failure(name)
                if only_if_wanted and failure is not None and failure.at >= began:
                    raise _error_of(failure)
                await self._build_here(name, lock, progress)
                return True
            finally:
                os.close(lock)

    async def _build_here(self, name: str, lock: int, progress: Progress) -> None:
        """With a builder that gives up when we do."""
        lifeline, ours = os.pipe()
        try:
            process = self._start_builder(name, lock, lifeline)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(lifeline)
        steps = follow(self._files.steps_path(name))
        try:
            # asyncio's own subprocesses depend on the kind of event loop, and so does what they
            # take: nothing here does.
            while process.poll() is None:
                for step in steps():
                    progress(step)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        except BaseException:
            os.close(ours)
            await asyncio.to_thread(_wait, process)
            raise
        os.close(ours)
        for step in steps():
            progress(step)
        if not self.get(name).is_built or self._has_failed(process):
            failure = self._files.failure(name) or Failure(
                f"The build of the {name} template was ended from outside. "
                f"Try again with: paracle template build {name}"
            )
            raise _error_of(failure)
        self._notes.pop(name, None)

    def _has_failed(self, process: subprocess.Popen[bytes]) -> bool:
        """Where the end of children is ignored nobody learns their codes; then what it noted."""
        import signal

        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            return False
        return process.returncode != 0

    def _lock(self, name: str) -> int | None:
        try:
            return self._files.lock_builder(name)
        except OSError as error:
            raise SandboxError(
                f"The {name} template cannot be built in {self._files.directory}: {error}. "
                "PARACLE_DATA_DIR can name another directory."
            ) from error

    def _start_builder(
        self, name: str, lock: int, lifeline: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Without a lifeline it goes on when we have ended. Raises SandboxError."""
        import subprocess
        import threading

        from .template_builder import Build

        build = Build(
            name=name,
            packages=list(PACKAGES[name]),
            path=str(self._path(name)),
            python=self._settings.python or default_python(),
            starter=sys.executable or default_python(),
            lock=lock,
            lifeline=lifeline,
        )
        command = [default_python(), "-I", "-S", "-c", _PROGRAM, PACKAGE_PATH]
        try:
            os.ftruncate(lock, 0)  # what an earlier build has done is not what this one does
            process = subprocess.Popen(
                [*command, json.dumps(asdict(build))],
                # Whoever reads what this process prints does not wait for the builder's end.
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[fd for fd in (lock, lifeline) if fd is not None],
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(
                f"The {name} template cannot be built: the builder could not be started: {error}."
            ) from error
        if lifeline is None:
            threading.Thread(target=process.wait, name="paracle-template", daemon=True).start()
        return process

    # Use and removal

    def remove(self, name: str) -> bool:
        """Sandboxes that use it keep it. Whether it was there."""
        was_built = self.get(name).is_built
        self._files.hide(self._path(name))
        self._files.remove_unused(name)
        return was_built

    def hold(self, template: Template) -> None:
        """Until ``release``, its files stay: there may be sandboxes with it."""
        if template.path is None:
            return
        lock = self._files.hold(template.path)
        if lock is not None:
            self._held.append(lock)

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop())


def packages_in(source: str | bytes, name: str) -> str:
    """The packages of a template that a program seems to import, as text. Text is what is looked
    at, because the program may be a shell command or have errors: that it names one is enough."""
    text = source.encode(errors="replace") if isinstance(source, str) else source
    modules = {
        module: package
        for package in PACKAGES[name]
        for module in MODULES_OF.get(package, (package,))
    }
    names = re.compile(rb"\b(" + "|".join(modules).encode() + rb")\b")
    found = {
        modules[match[1].decode()]: None
        for line in text.splitlines()
        if b"import" in line or b"-m" in line or b"pip" in line
        for match in names.finditer(line)
    }
    return ", ".join(found)


def _error_of(failure: Failure) -> SandboxError:
    error = SandboxError(failure.reason)
    if failure.said:
        error.add_note(failure.said)
    return error


def _wait(process: subprocess.Popen[bytes]) -> None:
    """It was told to stop; in the end by force."""
    import subprocess

    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
