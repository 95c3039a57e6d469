"""pip, as templates need it: how it is called, and what of its words is worth telling.

It runs on behalf of the interpreter inside sandboxes, which may have no pip of its own. Nothing of
the working directory is imported, because that may be a project that nobody has read. It has a
session of its own: Ctrl-C is for us, and we end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from ...errors import SandboxError

Progress = Callable[[str], None]

# Said at a failure: the end of it is where the cause is.
_LOG_LINES = 60
_FLAGS = (
    "--no-warn-script-location", "--disable-pip-version-check", "--no-input", "--no-user",
    "--progress-bar", "off", "--root-user-action", "ignore", "--retries", "2",
    # It would compare with the packages of the interpreter, which no sandbox sees.
    "--no-warn-conflicts",
)  # fmt: skip
# Whoever has pip refuse to install outside of virtual environments does not mean this.
_ENVIRONMENT = ("env", "PIP_REQUIRE_VIRTUALENV=0")
# From an index, or as a file of this machine.
_COLLECTING = re.compile(r"Collecting ([A-Za-z0-9._-]+)|Processing (?:\S*/)?([A-Za-z0-9._]+)-\d")
_DOWNLOADING = re.compile(r"\s+Downloading (?:\S*/)?(\S+?)-(\d\S*?)-\S+ \(([\d.]+ [MG]B)\)")
_UNREACHED = re.compile(
    r"WARNING: Retrying .* after connection broken by '(?:.*(\[Errno -?\d+\] [^'\"]+)|(\w+))"
)
_INSTALLING = re.compile(r"Installing collected packages: (.+)")


async def install(
    name: str, python: str, target: Path, packages: Sequence[str], progress: Progress
) -> None:
    """Put the packages of a template into a directory. Raises SandboxError with the cause; what pip
    said is a note of it."""
    said: list[str] = []
    pip = await _pip(python)
    if pip is None:
        raise _not_installed(name, f"there is no pip for {python}: install python3-pip")
    command = [*_ENVIRONMENT, *pip, "install", "--target", str(target), *_FLAGS]
    async with _started([*command, *packages]) as process:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            said.append(line)
            if step := step_of(line, packages):
                progress(step)
        if _succeeded(await process.wait(), said):
            return
    error = _not_installed(name, _cause(said))
    error.add_note("\n".join(said[-_LOG_LINES:]))
    raise error


def _succeeded(code: int, said: Sequence[str]) -> bool:
    """Where the end of children is ignored nobody learns their codes, and its words have to do."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        return any(line.startswith("Successfully installed") for line in said)
    return code == 0


def _not_installed(name: str, cause: str) -> SandboxError:
    return SandboxError(
        f"The packages of the {name} template could not be installed ({cause}). "
        f"Try again with: paracle template build {name}"
    )


def step_of(line: str, packages: Sequence[str]) -> str:
    """What a line of pip's says in short; nothing for most of them."""
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


async def _pip(python: str) -> list[str] | None:
    """A pip that installs for the given interpreter: its own, or ours on its behalf."""
    if await _answers([python, "-I", "-m", "pip", "--version"]):
        return [python, "-I", "-m", "pip"]
    ours = [sys.executable, "-P", "-m", "pip"]
    if await _answers([*ours, "--version"]):
        return [*ours, "--python", python]
    return None


async def _answers(command: Sequence[str]) -> bool:
    async with _started(command) as process:
        said, _ = await process.communicate()
        return said.startswith(b"pip ")


@contextlib.asynccontextmanager
async def _started(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """It, and what it has started, ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        # Other users read the files: those of sandboxes.
        umask=0o022,
        limit=1 << 20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
