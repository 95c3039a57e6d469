"""Every program of `programs` ends the same way under `python3 file.py` and under the guest."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple

import pytest

import paracle_sandbox

from .programs import FILE, PROGRAMS, Program

HERE = Path(__file__).parent
SOURCE = str(Path(paracle_sandbox.__file__).parents[1])
# Others can be named, separated by colons: the guest runs on whatever an image has.
PYTHONS = os.environ.get("FAITHFUL_PYTHONS", sys.executable).split(":")
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")


class Outcome(NamedTuple):
    code: int
    stdout: bytes
    stderr: bytes


class Launcher:
    """The warm process, and how to have it run one program."""

    def __init__(self, python: str) -> None:
        self.python = python
        query = "import json, sys; print(json.dumps([sys.path[1:], sys.version_info[:2]]))"
        answer = subprocess.check_output([python, "-c", query], env=environment({}, Path("/")))
        self.sys_path, version = json.loads(answer)
        self.version = tuple(version)
        self._socket, theirs = socket.socketpair()
        command = [python, "-I", "-S", "-E", str(HERE / "launcher.py"), SOURCE]
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], env={"LANG": "C.UTF-8"}
        )
        theirs.close()

    def start(self, spec: Dict[str, Any], cwd: Path, descriptors: List[int]) -> None:
        spec = {"python": self.python, "sys_path": self.sys_path, **spec}
        message = json.dumps({"spec": spec, "cwd": str(cwd)}).encode()
        socket.send_fds(self._socket, [message], descriptors)

    def wait(self) -> int:
        status = int(self._socket.recv(64))
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def run(self, spec: Dict[str, Any], cwd: Path, stdin: bytes) -> Outcome:
        pipes = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = pipes
        self.start(spec, cwd, [in_read, out_write, err_write])
        for fd in (in_read, out_write, err_write):
            os.close(fd)
        output: Dict[int, bytes] = {}
        readers = [
            threading.Thread(target=lambda fd: output.update({fd: read_all(fd)}), args=(fd,))
            for fd in (out_read, err_read)
        ]
        for reader in readers:
            reader.start()
        with open(in_write, "wb") as file:
            file.write(stdin)
        for reader in readers:
            reader.join()
        return Outcome(self.wait(), output[out_read], output[err_read])

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def environment(extra: Dict[str, str], home: Path) -> Dict[str, str]:
    base = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
    return {**base, **extra}


@pytest.fixture(scope="module", params=PYTHONS)
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    launcher = Launcher(request.param)
    yield launcher
    launcher.close()


def lay_out(program: Program, folder: Path) -> None:
    folder.mkdir()
    (folder / FILE).write_bytes(program.source)
    for name, content in program.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def run_plain(python: str, program: Program, folder: Path) -> Outcome:
    command = [python, str(folder / FILE), *program.argv]
    done = subprocess.run(
        command,
        input=program.stdin,
        capture_output=True,
        cwd=folder,
        env=environment(program.env, folder.parent),
        timeout=120,
        start_new_session=True,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def spec_of(program: Program, folder: Path) -> Dict[str, Any]:
    env = environment(program.env, folder.parent)
    return {"path": str(folder / FILE), "argv": list(program.argv), "env": env}


def masked(outcome: Outcome, folder: Path) -> Outcome:
    def mask(text: bytes) -> bytes:
        return ADDRESS.sub(b"0x", text.replace(os.fsencode(folder), b"FOLDER"))

    return outcome._replace(stdout=mask(outcome.stdout), stderr=mask(outcome.stderr))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_same_outcome(program: Program, launcher: Launcher, tmp_path: Path) -> None:
    if launcher.version < program.needs:
        pytest.skip("needs Python %d.%d" % program.needs)
    # The same folder name twice, so that paths have the same length wherever text is wrapped.
    plain, ours = tmp_path / "a", tmp_path / "b"
    lay_out(program, plain)
    lay_out(program, ours)
    expected = masked(run_plain(launcher.python, program, plain), plain)
    actual = masked(launcher.run(spec_of(program, ours), ours, program.stdin), ours)
    assert actual.code == expected.code, actual.stderr.decode(errors="replace")
    assert actual.stdout == expected.stdout
    assert actual.stderr == expected.stderr
