"""The process that builds one template, and ends.

    owner ── builder ── pip

A build is a process of its own for three reasons. It takes long, and must not stop an event loop,
of whatever kind that is. Nobody should have to wait for it who does not need the packages: a short
command starts it and ends before it. And it is whole or nothing: pip is killed with the builder,
also if that is killed with SIGKILL, and the next builder removes what was left.

The owner takes the lock of the template and hands it over, so that there is no moment in which a
template is being built and its lock is free. The builder writes what it does to the lock's
file, and why it failed to the file of failures; it has no other output. With a lifeline, which
is a pipe that its owner holds the other end of, it gives up when its owner does.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import SandboxError
from .template_files import Failure, TemplateFiles
from .template_pip import Limits, Stopped, install

# Far more than a slow line needs: whoever hangs for longer will not come back.
BUILD_SECONDS = 1800.0
_NICENESS = 5


@dataclass(frozen=True)
class Build:
    """An order to build, which the owner sends as JSON. ``path`` is where it goes; ``lock`` and
    ``lifeline`` are descriptors."""

    name: str
    packages: list[str]
    path: str
    python: str
    starter: str
    lock: int
    lifeline: int | None = None


def main(text: str) -> None:
    """The builder. Ends with 0 when the template is there."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _stop)
    build = Build(**json.loads(text))
    os.umask(0o022)  # other users read the files: those of sandboxes
    for fd in (build.lock, build.lifeline):
        if fd is not None:
            os.set_inheritable(fd, False)
    if build.lifeline is None:
        os.nice(_NICENESS)  # whatever its owner runs meanwhile goes first
    raise SystemExit(0 if _run(build) else 1)


def _stop(_number: int, _frame: object) -> None:
    raise Stopped


def _run(build: Build) -> bool:
    path = Path(build.path)
    files = TemplateFiles(path.parent)
    try:
        # Not by its name: the owner has looked whose file it is.
        with open(build.lock, "a", buffering=1, closefd=False) as steps:
            _build(build, path, files, steps)
    except Stopped:
        return False
    except SandboxError as error:
        said = "\n".join(getattr(error, "__notes__", ()))
        files.note_failure(build.name, Failure(str(error), said, time.time()))
        return False
    except OSError as error:
        reason = (
            f"The {build.name} template cannot be built in {path.parent}: {error}. "
            "PARACLE_DATA_DIR can name another directory."
        )
        files.note_failure(build.name, Failure(reason, at=time.time()))
        return False
    except Exception as error:  # noqa: BLE001  nobody sees a traceback: the process has no output
        reason = f"The {build.name} template cannot be built: {error!r}."
        files.note_failure(build.name, Failure(reason, at=time.time()))
        return False
    files.forget_failure(build.name)
    return True


def _build(build: Build, path: Path, files: TemplateFiles, steps: IO[str]) -> None:
    limits = Limits(time.monotonic() + BUILD_SECONDS, build.lifeline)

    def progress(step: str) -> None:
        steps.write(f"{step}\n")

    with files.fresh(build.name) as place:
        site = place / "site"
        site.mkdir()
        pythons = (build.python, build.starter)
        install(build.name, pythons, site, build.packages, progress, limits)
        manifest = {"name": build.name, "packages": build.packages, "built_at": time.time()}
        files.publish(site, path, manifest)
