"""The command line as a user starts it: a process with its own state and data directories."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_watch

# What the fake backend says each time it is used.
_FAKE = "The fake backend isolates nothing: programs run as plain processes.\n"
SOURCE = Path(__file__).resolve().parents[2] / "src"


class Cli:
    """Runs ``paracle`` with everything it keeps below one directory."""

    def __init__(self, home: Path, **variables: str) -> None:
        self.home = home
        self.state = home / "state"
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LANG": "C.UTF-8",
            **loop_watch.environment(SOURCE),
            "PARACLE_STATE_DIR": str(self.state),
            "PARACLE_DATA_DIR": str(home / "data"),
            "PARACLE_TEMPLATE_BUILD": "0",
            # `cleanup --all` ends what is in use, and engines may be others' too.
            "DOCKER_HOST": f"unix://{home}/no-docker.sock",
            "INCUS_SOCKET": str(home / "no-incus.sock"),
            **variables,
        }

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "paracle_sandbox", *words]

    def run(self, *words: str, stdin: bytes | None = None, **options: Any) -> Done:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run(
            self.argv(*words), env=self.env, cwd=self.home, capture_output=True, timeout=120,
            **given, **options,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
        }  # fmt: skip
        return subprocess.Popen(
            self.argv(*words), env=self.env, cwd=self.home, **{**streams, **options}
        )

    def program(self, source: str, name: str = "program.py") -> str:
        path = self.home / name
        path.write_text(source)
        return str(path)

    def records(self) -> list[Path]:
        return sorted(p for p in self.state.glob("*.json"))

    def remains(self) -> list[str]:
        """What a sandbox of this state directory has left: records, processes, directories."""
        return [*self.live_remains(), *(str(path) for path in self.state.glob("root-*"))]

    def live_remains(self) -> list[str]:
        return [*(str(path) for path in self.records()), *_processes_naming(str(self.state))]


def on_a_terminal(cli: Cli, *words: str, **options: Any) -> bytes:
    """What a command shows there, until it ends."""
    ours, theirs = pty.openpty()
    process = cli.start(*words, stdout=theirs, stderr=theirs, **options)
    os.close(theirs)
    shown = b""
    try:
        while chunk := _read(ours):
            shown += chunk
        process.wait(60)
    finally:
        os.close(ours)
        end(process)
    return shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


class Done:
    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.stdout_bytes = stdout
        self.stdout = stdout.decode(errors="replace")
        self.stderr = stderr.decode(errors="replace").replace(_FAKE, "")

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def _processes_naming(state: str) -> list[str]:
    """Processes that hold a file below the state directory open: a spawner and its children."""
    found = []
    for directory in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = [os.readlink(link) for link in directory.iterdir()]
        except OSError:
            continue
        if any(link.startswith(state + "/") for link in links):
            found.append(f"process {directory.parent.name}")
    return found


def cgroups_of(record: Path) -> list[Path]:
    content = json.loads(record.read_text().splitlines()[-1])
    return [Path(path) for path in content.get("cgroups", {}).values()]


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return answer


def end(process: subprocess.Popen[bytes]) -> None:
    """For tests that failed half-way."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.communicate()


def make_wheel(folder: Path, name: str, version: str = "1.0") -> None:
    """The smallest thing that pip installs: a module that knows its version."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
