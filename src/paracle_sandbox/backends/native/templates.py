"""Templates: what an image is to Docker, a template is to native sandboxes.

A name, a set of packages in a read-only directory, and the modules that a spawner imports once
so that no sandbox pays for them. Built with pip, into a fresh directory that is renamed into
place when it is whole; one builder at a time. Whoever uses a directory holds a lock on it: one
that was replaced or removed stays, out of sight, until nobody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ...errors import SandboxError
from ...settings import Settings
from .launcher import default_python
from .template_kinds import PACKAGES as PACKAGES
from .template_kinds import Template as Template
from .template_kinds import template_at, template_path, templates_dir
from .template_kinds import template_name as template_name

log = logging.getLogger("paracle_sandbox.templates")

_TRY_AGAIN_SECONDS = 3600.0
_LOOK_AGAIN_SECONDS = 0.1

Progress = Callable[[str], None]


def _tell_nobody(line: str) -> None:
    pass


class Templates:
    """Those of this user, in the data directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dir = templates_dir(settings)
        self._notes: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._held: dict[tuple[int, int], int] = {}

    async def for_image(self, image: str) -> Template:
        """The template behind an image name, built first if need be and if it can be."""
        name = template_name(image)
        template = self.get(name)
        if template.path is None and name not in self._notes and self._settings.template_build:
            await self._build_on_first_use(name)
            template = self.get(name)
        note = self._notes.get(name)
        return replace(template, note=note) if note else template

    async def _build_on_first_use(self, name: str) -> None:
        """Once, also when it fails: whoever is offline need not wait for that in every program."""
        try:
            async with self._one_builder(name):
                # Somebody else may have been first, in this process or another.
                if self.get(name).path is None and not self._failed_before(name):
                    # A warning is what reaches people who set up no logging: this takes a while.
                    log.warning("Building the %s template, once: installing its packages.", name)
                    await self._build(name, _tell_nobody)
        except SandboxError as error:
            self._go_without(name, str(error))

    def _failed_before(self, name: str) -> bool:
        """Lately. Whoever asks goes without."""
        try:
            if time.time() - self._failed(name).stat().st_mtime > _TRY_AGAIN_SECONDS:
                return False
            self._go_without(name, self._failed(name).read_text(errors="replace"))
        except OSError:
            return False
        return True

    def _failed(self, name: str) -> Path:
        return self._dir / f".{name}.failed"

    def _go_without(self, name: str, reason: str) -> None:
        if name not in self._notes:
            log.warning("Sandboxes run with the standard library alone: %s", reason)
        self._notes[name] = reason

    def get(self, name: str) -> Template:
        return template_at(self._path(name), name)

    def names(self) -> list[str]:
        return list(PACKAGES)

    def _path(self, name: str) -> Path:
        # Looked for with every sandbox that is made, and always in the same place.
        if name not in self._paths:
            self._paths[name] = template_path(name, self._settings)
        return self._paths[name]

    async def build(
        self, name: str, progress: Progress = _tell_nobody, *, if_missing: bool = False
    ) -> bool:
        """Install the packages; whether that was done. Raises SandboxError when the package index
        cannot be reached or the directory cannot be written; a note of it is what pip said."""
        async with self._one_builder(name):
            if if_missing and self.get(name).path is not None:
                return False
            await self._build(name, progress)
            return True

    async def _build(self, name: str, progress: Progress) -> None:
        import shutil
        import tempfile

        self._discard_leftovers(name)
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self._dir))
        try:
            with _opened(fresh) as directory:
                fcntl.flock(directory, fcntl.LOCK_SH)
                fresh.chmod(0o755)
                await self._install(name, fresh, progress)
                self.remove(name)
                fresh.rename(self._path(name))
            self._failed(name).unlink(missing_ok=True)
        except SandboxError as error:
            self._failed(name).write_text(str(error))
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # by now it has another name, if it is whole

    async def _install(self, name: str, target: Path, progress: Progress) -> None:
        from .installer import install

        python = self._settings.python or default_python()
        await install(name, python, target, PACKAGES[name], progress)
        manifest = {"name": name, "packages": PACKAGES[name], "built_at": time.time()}
        (target / "paracle-template.json").write_text(json.dumps(manifest))

    @contextlib.asynccontextmanager
    async def _one_builder(self, name: str) -> AsyncIterator[None]:
        try:
            self._dir.mkdir(parents=True, exist_ok=True, mode=0o755)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            lock = os.open(self._dir / f".{name}.lock", flags, 0o600)
            try:
                # Whoever has it may be another process: nothing here would hear of its end.
                while not _is_free(lock):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise SandboxError(
                f"The {name} template cannot be built in {self._dir}: {error}. "
                "PARACLE_DATA_DIR can name another directory."
            ) from error

    def remove(self, name: str) -> bool:
        path = self._path(name)
        there = path.is_dir()
        if there:
            # Out of sight first, so that nobody starts on half a template.
            path.rename(path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}"))
        self._discard_leftovers(name)
        return there

    def hold(self, template: Template) -> None:
        """Until ``release``, its files stay: there may be sandboxes with it."""
        if template.path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            directory = _open(template.path)
            fcntl.flock(directory, fcntl.LOCK_SH)
            found = os.fstat(directory)
            known = self._held.setdefault((found.st_dev, found.st_ino), directory)
            if known != directory:
                os.close(directory)

    def release(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    def _discard_leftovers(self, name: str) -> None:
        """Of templates that nobody uses any more, and of builders that were killed."""
        import shutil

        for path in self._dir.glob(f".{name}-*"):
            with contextlib.suppress(OSError), _opened(path) as directory:
                if _is_free(directory):
                    shutil.rmtree(path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    directory = _open(path)
    try:
        yield directory
    finally:
        os.close(directory)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_free(lock: int) -> bool:
    """And ours from now on, if it is."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
