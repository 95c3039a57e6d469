"""Every program of `programs` ends the same way under `python3 file.py` and under the guest."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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

    def start(self, spec: dict[str, Any], cwd: Path, descriptors: list[int]) -> None:
        spec = {"python": self.python, "sys_path": self.sys_path, **spec}
        message = json.dumps({"spec": spec, "cwd": str(cwd)}).encode()
        socket.send_fds(self._socket, [message], descriptors)

    def wait(self) -> int:
        status = int(self._socket.recv(64))
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def run(self, spec: dict[str, Any], cwd: Path, stdin: bytes) -> Outcome:
        pipes = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = pipes
        self.start(spec, cwd, [in_read, out_write, err_write])
        for fd in (in_read, out_write, err_write):
            os.close(fd)
        output: dict[int, bytes] = {}
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


def environment(extra: dict[str, str], home: Path) -> dict[str, str]:
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


def spec_of(program: Program, folder: Path) -> dict[str, Any]:
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
        pytest.skip(f"needs Python {program.needs}")
    # The same folder name twice, so that paths have the same length wherever text is wrapped.
    plain, ours = tmp_path / "a", tmp_path / "b"
    lay_out(program, plain)
    lay_out(program, ours)
    expected = masked(run_plain(launcher.python, program, plain), plain)
    actual = masked(launcher.run(spec_of(program, ours), ours, program.stdin), ours)
    assert actual.code == expected.code, actual.stderr.decode(errors="replace")
    assert actual.stdout == expected.stdout
    assert actual.stderr == expected.stderr


def plain_and_ours(launcher: Launcher, folder: Path, path: str, *argv: str) -> list[Outcome]:
    done = subprocess.run(
        [launcher.python, path, *argv], capture_output=True, cwd=folder, env=environment({}, folder)
    )
    spec = {"path": path, "argv": list(argv), "env": environment({}, folder)}
    ours = launcher.run(spec, folder, b"")
    return [Outcome(done.returncode, done.stdout, done.stderr), ours]


@pytest.mark.parametrize("path", ["missing.py", "/nowhere/missing.py", "folder", "empty_folder"])
def test_what_is_not_a_file(path: str, launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("import sys; print(sys.argv, __name__)")
    plain, ours = plain_and_ours(launcher, tmp_path, path, "x")
    assert ours == plain


@pytest.mark.parametrize("path", ["program.py", "./program.py", "sub/../program.py", "link.py"])
def test_relative_paths(path: str, launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "real.py").write_text("import sys; print(sys.path[0], sys.argv[0])\n1/0")
    (tmp_path / "program.py").write_text("import sys; print(sys.path[0], sys.argv, __file__)\n1/0")
    (tmp_path / "link.py").symlink_to("sub/real.py")
    plain, ours = plain_and_ours(launcher, tmp_path, path)
    assert ours == plain


def test_path0_replaces_the_directory_of_the_file(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.path[0])")
    path = str(tmp_path / "program.py")
    spec = {"path": path, "argv": [], "env": environment({}, tmp_path), "path0": "/some/where"}
    assert launcher.run(spec, tmp_path, b"").stdout == b"/some/where\n"


def test_terminal(launcher: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "for s in (sys.stdin, sys.stdout, sys.stderr): print(s.isatty(), s.line_buffering)\n"
        "print('kept')\nprint('lost', end='')\nos._exit(0)\n"
    )
    spec = {"path": str(program), "argv": [], "env": environment({}, tmp_path)}
    ours, theirs = pty.openpty()
    launcher.start(spec, tmp_path, [theirs] * 3)
    assert launcher.wait() == 0
    plain_ours, plain_theirs = pty.openpty()
    subprocess.run(
        [launcher.python, str(program)],
        stdin=plain_theirs, stdout=plain_theirs, stderr=plain_theirs, env=spec["env"],
    )  # fmt: skip
    assert os.read(ours, 1000) == os.read(plain_ours, 1000)
    for fd in (ours, theirs, plain_ours, plain_theirs):
        os.close(fd)


@pytest.mark.parametrize("end", ["1/0", "raise SystemExit(3)"])
def test_who_takes_the_hook_we_need_turns_no_failure_into_success(
    end: str, launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "taker.py").write_text("import sys; sys.unraisablehook = lambda args: None")
    (tmp_path / "program.py").write_text(f"import taker\nprint('begun')\n{end}\n")
    plain, ours = plain_and_ours(launcher, tmp_path, "program.py")
    assert plain.code != 0 and ours.code != 0
    assert ours.stdout == plain.stdout


def test_a_module_in_a_large_folder_is_found_first(launcher: Launcher, tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"a_file_with_a_long_name_{number:08}").touch()
    assert tmp_path.stat().st_size > 16 << 10, "it would have been listed"
    (tmp_path / "json.py").write_text("'''mine'''")
    (tmp_path / "program.py").write_text("import json; print(json.__doc__)")
    plain, ours = plain_and_ours(launcher, tmp_path, "program.py")
    assert ours == plain
    assert ours.stdout == b"mine\n"


def test_forks_do_not_share_secrets(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import multiprocessing as m, random, tempfile, uuid\n"
        "print(random.random(), m.current_process().authkey.hex(), tempfile.mktemp(), uuid.uuid1())"
    )
    spec = {"path": "program.py", "argv": [], "env": environment({}, tmp_path)}
    first, second = (launcher.run(spec, tmp_path, b"").stdout.split() for _ in range(2))
    assert len(first) == 4
    assert not set(first) & set(second)
