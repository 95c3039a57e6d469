"""Templates: what an image is to Docker, a template is to native sandboxes.

A name, a set of packages in a read-only directory, and the modules that a spawner imports once
so that no sandbox pays for them. Built with pip, into a fresh directory that is renamed into
place when it is whole; one builder at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
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

Progress = Callable[[str], None]


class Templates:
    """Those of this user, in the data directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dir = templates_dir(settings)
        self._notes: dict[str, str] = {}
        self._paths: dict[str, Path] = {}

    async def for_image(self, image: str) -> Template:
        """The template behind an image name, built first if need be and if it can be."""
        name = template_name(image)
        template = self.get(name)
        if template.path is None and name not in self._notes and self._settings.template_build:
            await asyncio.to_thread(self._build_on_first_use, name)
            template = self.get(name)
        note = self._notes.get(name)
        return replace(template, note=note) if note else template

    def _build_on_first_use(self, name: str) -> None:
        """Once, also when it fails: whoever is offline need not wait for that in every program."""
        failed = self._dir / f".{name}.failed"
        try:
            if time.time() - failed.stat().st_mtime < _TRY_AGAIN_SECONDS:
                self._go_without(name, failed.read_text(errors="replace"))
                return
        except OSError:
            pass  # it has not failed before
        # A warning is what reaches people who set up no logging: this takes a while.
        log.warning("Building the %s template, once: installing its packages.", name)
        try:
            self.build(name)
        except SandboxError as error:
            self._go_without(name, str(error))
            with contextlib.suppress(OSError):
                failed.write_text(str(error))

    def _go_without(self, name: str, reason: str) -> None:
        self._notes[name] = reason
        log.warning("%s Sandboxes run with the standard library alone.", reason)

    def get(self, name: str) -> Template:
        return template_at(self._path(name), name)

    def names(self) -> list[str]:
        return list(PACKAGES)

    def _path(self, name: str) -> Path:
        # Looked for with every sandbox that is made, and always in the same place.
        if name not in self._paths:
            self._paths[name] = template_path(name, self._settings)
        return self._paths[name]

    def build(self, name: str, progress: Progress = lambda line: None) -> Path:
        """Install the packages. Raises SandboxError when the package index cannot be reached."""
        import shutil
        import tempfile

        path = self._path(name)
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o755)
        with self._one_builder(name):
            fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self._dir))
            try:
                fresh.chmod(0o755)
                self._install(name, fresh, progress)
                self.remove(name)
                fresh.rename(path)
                (self._dir / f".{name}.failed").unlink(missing_ok=True)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
        return path

    def _install(self, name: str, target: Path, progress: Progress) -> None:
        import subprocess

        python = self._settings.python or default_python()
        command = [
            *_pip(python), "install", "--target", str(target), "--no-warn-script-location",
            "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
            "--root-user-action", "ignore", "--retries", "2", *PACKAGES[name],
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        last = ""
        with process.stdout as lines:
            for line in lines:
                last = line.strip() or last
                progress(line.rstrip())
        if process.wait() != 0:
            raise SandboxError(
                f"The packages of the {name} template could not be installed ({last[:200]}). "
                f"Try again with: paracle template build {name}"
            )
        manifest = {"name": name, "packages": PACKAGES[name], "built_at": time.time()}
        (target / "paracle-template.json").write_text(json.dumps(manifest))

    @contextlib.contextmanager
    def _one_builder(self, name: str) -> Iterator[None]:
        lock = os.open(self._dir / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def remove(self, name: str) -> bool:
        path = self._path(name)
        if not path.is_dir():
            return False
        import shutil

        # Out of sight first, so that nobody starts on half a template.
        doomed = path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}")
        path.rename(doomed)
        shutil.rmtree(doomed)
        return True


def _pip(python: str) -> list[str]:
    """A pip that installs for the given interpreter: its own, or ours on its behalf."""
    import subprocess
    import sys

    probe = [python, "-I", "-m", "pip", "--version"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return [python, "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", python]
