"""pip, as templates need it: how it is called, and what of its words is worth telling.

It runs on behalf of the interpreter inside sandboxes, which may have no pip of its own. Nothing of
the working directory is imported, because that may be a project that nobody has read. It runs in
the builder (`template_builder`), which has no event loop and one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...errors import SandboxError

Progress = Callable[[str], None]

# Said at a failure: the end of it is where the cause is.
_LOG_LINES = 60
_PR_SET_PDEATHSIG = 1
_FLAGS = (
    "--no-warn-script-location", "--disable-pip-version-check", "--no-input", "--no-user",
    "--progress-bar", "off", "--root-user-action", "ignore", "--retries", "2",
    # It would compare with the packages of the interpreter, which no sandbox sees.
    "--no-warn-conflicts",
)  # fmt: skip
_FIND = "import os, pip; print('pip', os.path.dirname(pip.__file__))"
# From an index, or as a file of this machine.
_COLLECTING = re.compile(r"Collecting ([A-Za-z0-9._-]+)|Processing (?:\S*/)?([A-Za-z0-9._]+)-\d")
_DOWNLOADING = re.compile(r"\s+Downloading (?:\S*/)?(\S+?)-(\d\S*?)-\S+ \(([\d.]+ [MG]B)\)")
_UNREACHED = re.compile(
    r"WARNING: Retrying .* after connection broken by '(?:.*(\[Errno -?\d+\] [^'\"]+)|(\w+))"
)
_INSTALLING = re.compile(r"Installing collected packages: (.+)")


class Stopped(Exception):
    """The build is not wanted any more."""


class Limits:
    """How long a build may take: until a moment, or until ``lifeline`` has no writer any more."""

    def __init__(self, deadline: float, lifeline: int | None) -> None:
        self.deadline = deadline
        self.lifeline = lifeline

    def wait_for(self, readable: int) -> None:
        """Returns when there is something to read. Raises Stopped, or TimeoutError."""
        poll = select.poll()
        poll.register(readable, select.POLLIN)
        if self.lifeline is not None:
            poll.register(self.lifeline, select.POLLIN)
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = dict(poll.poll(min(left, 60.0) * 1000))
            if self.lifeline in ready:
                raise Stopped
            if readable in ready:
                return


def install(
    name: str,
    pythons: tuple[str, str],
    target: Path,
    packages: Sequence[str],
    progress: Progress,
    limits: Limits,
) -> None:
    """Put the packages of a template into a directory. ``pythons``: the interpreter inside
    sandboxes, and the one that this program was started with. Raises SandboxError with the cause;
    what pip said is a note of it."""
    said: list[str] = []
    scratch = target.with_name("tmp")
    scratch.mkdir()
    # What pip unpacks goes with the build. Whoever has pip refuse to install outside of virtual
    # environments does not mean this.
    environment = ["env", f"TMPDIR={scratch}", "PIP_REQUIRE_VIRTUALENV=0"]
    pip = _pip(*pythons, limits)
    if pip is None:
        raise _not_installed(name, f"there is no pip for {pythons[0]}: install python3-pip")
    command = [*environment, *pip, "install", "--target", str(target), *_FLAGS, *packages]
    code = None
    try:
        with _started(command) as process:
            for line in _lines(process, limits):
                said.append(line)
                if step := step_of(line, packages):
                    progress(step)
            code = process.wait()
    except TimeoutError:
        said.append("ERROR: it took too long")
    if code == 0:
        return
    error = _not_installed(name, _cause(said))
    error.add_note("\n".join(said[-_LOG_LINES:]))
    raise error


def _not_installed(name: str, cause: str) -> SandboxError:
    return SandboxError(
        f"The packages of the {name} template could not be installed ({cause}). "
        f"Try again with: paracle template build {name}"
    )


def step_of(line: str, packages: Sequence[str]) -> str:
    """Shorten a line of pip's; most of them become nothing."""
    if match := _COLLECTING.match(line):
        name = (match[1] or match[2]).replace("_", "-")
        return f"collecting {name}" if name.lower() in packages else ""
    if match := _DOWNLOADING.match(line):
        return f"downloading {match[1]} {match[2]} ({match[3]})"
    if match := _INSTALLING.match(line):
        return f"installing {match[1].count(',') + 1} packages"
    return ""


def _cause(said: Sequence[str]) -> str:
    """pip ends with what it did not find; that it could not look is in its warnings."""
    for line in reversed(said):
        if match := _UNREACHED.match(line):
            return f"the package index cannot be reached: {match[1] or match[2]}"
    errors = [line for line in said if line.startswith("ERROR:")]
    lines = errors or [line for line in said if line.strip()] or ["pip said nothing"]
    return lines[-1].removeprefix("ERROR:").strip()[:200]


def _pip(python: str, ours: str, limits: Limits) -> list[str] | None:
    """A pip that installs for the given interpreter: its own, or ours on its behalf."""
    if _where_pip_is([python, "-I"], limits):
        return [python, "-I", "-m", "pip"]
    if found := _where_pip_is([ours, "-P"], limits):
        # As `pip --python` would, but without one more process in between, which would not end
        # when the builder is killed.
        runner = os.path.join(found, "__pip-runner__.py")
        if os.path.exists(runner):
            return ["_PIP_RUNNING_IN_SUBPROCESS=1", python, "-I", runner]
        return [ours, "-P", "-m", "pip", "--python", python]
    return None


def _where_pip_is(python: Sequence[str], limits: Limits) -> str:
    """The directory of its pip; empty if it has none."""
    try:
        with _started([*python, "-c", _FIND]) as process:
            lines = list(_lines(process, limits))
    except (OSError, TimeoutError):
        return ""
    return lines[0].removeprefix("pip ") if lines and lines[0].startswith("pip ") else ""


def _lines(process: subprocess.Popen[bytes], limits: Limits) -> Iterator[str]:
    assert process.stdout is not None
    rest = b""
    while True:
        limits.wait_for(process.stdout.fileno())
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip()
    if rest:
        yield rest.decode(errors="replace").rstrip()


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """It, and what it has started, ends with the block, and with this process."""
    builder = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def end_with_builder() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != builder:
            os._exit(1)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_builder,
    )
    with process:  # which waits for it in the end
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
