"""Rows whose proof has to be seen from the host, on the native backend.

They are the posture of every kind of process, terminals, packets and core files of the host, and
descriptors at scale.
"""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
from hostile_fixtures import Make
from probes import report
from test_control_channel import _ancestors
from test_network_none import CONNECT
from test_terminal_ipc import CRASH, TERMINAL_IOCTLS

from paracle_sandbox.backends.machine import process_isolation
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.sandbox.terminal import Terminal
from paracle_sandbox.sessions.session import PythonSession

# These are the kinds of processes that a sandbox can have, each with a way to get one.
READY = "print('ready', flush=True)\nimport time\ntime.sleep(100)\n"
EXECUTED = f"import os\nos.execvp('python3', ['python3', '-c', {READY!r}])"
THREADS = "import threading, time\nfor _ in range(50):\n    threading.Thread(target=time.sleep, args=(100,)).start()\n"
SPAWNED = f"""
import multiprocessing, time
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        multiprocessing.get_context(method).Process(target=time.sleep, args=(100,)).start()
    {READY.replace(chr(10), chr(10) + "    ")}
"""
SHELL = "(setsid sleep 100 &); sleep 100 & echo ready; sleep 100; true"
STDIO = {0, 1, 2}


@contextlib.asynccontextmanager
async def _running(sandbox: Sandbox, how: str, what: str, **options: Any) -> AsyncIterator[None]:
    said = asyncio.Event()
    command = await getattr(sandbox, how)(
        what, on_stdout=lambda text: said.set(), timeout=100, **options
    )
    async with asyncio.timeout(30):
        await said.wait()
    yield
    await command.kill()


class Expected:
    """The confinement that every thread of a sandbox must have, the same as its first process."""

    def __init__(self, native: NativeBackend, init: int, groups: dict[str, str]) -> None:
        self.init = init
        uid = process_isolation.read_posture(init).uids[0]
        base = native.settings.uid_base
        assert base <= uid < base + 8192 * 1024
        self.posture = process_isolation.Posture(
            (uid,) * 4, (uid,) * 4, (), (0,) * 5, 1, 2, frozenset(process_isolation.NAMESPACES)
        )
        self.namespaces = oracles.namespaces_of(init)
        self.groups = groups
        self.terminals = os.stat(f"/proc/{init}/root/dev/pts").st_dev

    def check(self) -> int:
        """Return how many threads there were. Threads other than the first may end meanwhile."""
        count = 0
        for pid in process_isolation.processes(self.init):
            try:
                assert oracles.wait_until(lambda pid=pid: not self._strange_files(pid)), (
                    self._strange_files(pid)
                )
                count += self._check(pid)
            except (FileNotFoundError, ProcessLookupError):
                assert pid != self.init
        return count

    def _check(self, pid: int) -> int:
        threads = process_isolation.threads(pid)
        for thread in threads:
            assert process_isolation.read_posture(pid, thread) == self.posture, (pid, thread)
            # They have our filter and no other: programs here install none.
            assert "\nSeccomp_filters:\t1\n" in _text(f"/proc/{pid}/task/{thread}/status")
        assert oracles.namespaces_of(pid) == self.namespaces
        limits = {
            line[:26].strip(): line[26:].split()
            for line in _text(f"/proc/{pid}/limits").splitlines()
        }
        assert limits["Max core file size"][:2] == ["1", "1"]
        assert limits["Max locked memory"][:2] == ["65536", "65536"]
        assert int(limits["Max open files"][1]) <= 4096
        assert _same_file(f"/proc/{pid}/root/", f"/proc/{self.init}/root/")
        for group in self.groups.values():
            assert str(pid) in Path(group, "cgroup.procs").read_text().split(), group
        device = int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[4])
        assert device == 0 or os.major(device) == 136  # a pseudo-terminal; _strange checks which
        return len(threads)

    def _strange_files(self, pid: int) -> list[str]:
        found = []
        for fd, what in oracles.descriptors(pid).items():
            if (
                what.startswith(("pipe:", "socket:", "anon_inode:[eventpoll]"))
                or what == "/dev/null"
            ):
                continue
            if pid == self.init and what == "/proc/1/oom_score_adj":
                continue
            with contextlib.suppress(FileNotFoundError):
                # It is a terminal of theirs if it is on their file system: the host's have the same
                # names.
                if os.stat(f"/proc/{pid}/fd/{fd}").st_dev == self.terminals:
                    continue
                found.append(f"{pid} {fd} {what}")
        return found


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace")


def _same_file(one: str, other: str) -> bool:
    first, second = os.stat(one), os.stat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


@pytest.mark.case("I01")
async def test_posture_of_every_kind_of_process(make: Make, native: NativeBackend) -> None:
    sandbox = await make(SandboxConfig(timeout_seconds=120))
    init = native.init_pid(sandbox.sandbox_id)
    expected = Expected(native, init, native.cgroups(sandbox.sandbox_id))
    for _ in range(6):  # programs in a series: preforked ones, and the fork server
        await sandbox.run_code("print(1)")
        expected.check()
    async with _running(sandbox, "start_code", THREADS + READY):
        assert expected.check() >= 52
        async with _running(sandbox, "start_command", SHELL, stdin=True):
            # These are the shell, three that sleep, and a keeper.
            assert expected.check() >= 52 + 5
    for how, what, options in (
        ("start_command", SHELL, {"pty": True}),
        ("start_code", READY, {"pty": True, "stdin": True}),
        ("start_code", EXECUTED, {}),
        ("start_code", SPAWNED, {}),
        ("start_code", READY, {"env": {"PYTHONHASHSEED": "1"}}),  # it starts a Python interpreter
    ):
        async with _running(sandbox, how, what, **options):
            assert expected.check() >= 2
    async with PythonSession(sandbox) as session:
        await session.run("import threading; x = 1")
        assert expected.check() >= 2
    assert expected.check() >= 1


@pytest.mark.case("I01")
async def test_posture_of_those_that_wait_in_stock(native: NativeBackend, make: Make) -> None:
    """A parked child has run nothing yet and must be confined all the same."""
    sandbox = await make()
    zygote = _parent(native.init_pid(sandbox.sandbox_id))
    used = {native.init_pid(one) for one in native._owned}
    parked: list[int] = []

    def are_there() -> bool:
        parked[:] = [pid for pid in _children(zygote) if pid not in used and _is_confined(pid)]
        return bool(parked)

    assert oracles.wait_until(are_there, 20)
    for pid in parked:
        assert Expected(native, pid, {}).check() >= 1  # it was forked ahead


@pytest.mark.case("I01")
def test_the_reader_of_postures_can_fail(native: NativeBackend) -> None:
    with pytest.raises(AssertionError):
        Expected(native, os.getpid(), {})


def _is_confined(pid: int) -> bool:
    """A child on its way is not confined before the last step, the filter."""
    with contextlib.suppress(OSError):
        return process_isolation.read_posture(pid).seccomp == 2
    return False


def _parent(pid: int) -> int:
    return int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])


def _children(parent: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if _parent(int(name)) == parent:
                found.append(int(name))
    return found


# Setuid programs


@pytest.mark.case("I05")
@pytest.mark.parametrize("planted", [False, True])
async def test_setuid_programs_are_nobody_else_on_the_host(
    planted: bool, make: Make, native: NativeBackend
) -> None:
    """The host's kernel is asked while the program runs, because numbers inside are mapped."""
    sandbox = await make()
    init = native.init_pid(sandbox.sandbox_id)
    if planted:
        await sandbox.execute("cp /bin/sleep /tmp/su && chmod 6755 /tmp/su")
        # An image could bring such a file: it belongs to the host's root and is in their reach.
        os.chown(f"/proc/{init}/root/tmp/su", 0, 0)
        os.chmod(f"/proc/{init}/root/tmp/su", 0o6755)
        command = await sandbox.start_command(["/tmp/su", "100"])
    else:
        if not os.stat("/usr/bin/su").st_mode & 0o4000:
            pytest.skip("su is not setuid here")
        command = await sandbox.start_command(["su"], pty=True, stdin=True)  # asks for a password
    async with asyncio.timeout(20):
        while not (found := _postures_of("su", init)):
            await asyncio.sleep(0.01)
    assert set(found) == {process_isolation.read_posture(init)}
    await command.kill()


def _postures_of(name: str, init: int) -> list[process_isolation.Posture]:
    found = []
    for pid in process_isolation.processes(init):
        with contextlib.suppress(OSError):
            if _text(f"/proc/{pid}/comm") == f"{name}\n":
                found.append(process_isolation.read_posture(pid))
    return found


# Terminals of the host


OWNER = """
import json, sys
import paracle_sandbox
result = paracle_sandbox.run(sys.argv[1])
print(json.dumps(result["result"]["stdout"]))
"""


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[int, int]]:
    """Open a pseudo-terminal of the host.

    What is typed into it can be read at once, without an echo.
    """
    master, slave = os.openpty()
    tty.setraw(slave)
    os.set_blocking(slave, False)
    try:
        yield master, slave
    finally:
        os.close(slave)
        os.close(master)


def _on_terminal(slave: int, *arguments: str, **options: Any) -> str:
    """Run Python with the terminal as its controlling terminal."""
    done = subprocess.run(
        ["setsid", "--ctty", sys.executable, "-c", *arguments],
        stdin=slave, stderr=slave, stdout=subprocess.PIPE, text=True, timeout=100, check=True,
        **options,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


def _typed(slave: int) -> bytes:
    try:
        return os.read(slave, 1000)
    except BlockingIOError:
        return b""


@pytest.mark.case("K01", "K02")
def test_nothing_is_typed_into_the_terminal_of_the_manager(native: NativeBackend) -> None:
    settings = native.settings
    environment = {
        **os.environ,
        "PARACLE_STATE_DIR": str(settings.state_dir),
        "PARACLE_DATA_DIR": str(settings.data_dir),
        "PARACLE_TEMPLATE_BUILD": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with _terminal() as (_, slave):
        size = termios.tcgetattr(slave)
        answers = json.loads(
            json.loads(_on_terminal(slave, OWNER, TERMINAL_IOCTLS, env=environment))
        )
        assert answers.pop("open tty") == "ENXIO"
        assert set(answers.values()) <= {"EPERM", "ENOTTY"}
        assert _typed(slave) == b""
        assert termios.tcgetattr(slave) == size
        # Without a sandbox the letter arrives, unless this kernel is set to refuse it to all users.
        unconfined = json.loads(
            _on_terminal(slave, TERMINAL_IOCTLS.replace("(0x5423, number), ", ""))
        )
        assert "open tty" not in unconfined
        legacy = Path("/proc/sys/dev/tty/legacy_tiocsti")
        if not legacy.exists() or legacy.read_text().strip() == "1":
            assert b"X" in _typed(slave)
        else:
            assert unconfined["tty 0x5412 0x0"] == "EIO"


@pytest.mark.case("K02")
async def test_background_programs_are_not_stopped_by_a_terminal(sandbox: Sandbox) -> None:
    """SIGTTOU and SIGTTIN can only come from a terminal that the programs have opened
    themselves."""
    code = """
import json, os, signal, time
seen = []
for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP, signal.SIGHUP):
    signal.signal(number, lambda number, frame: seen.append(number))
if not os.fork():
    os.setpgid(0, 0)  # in the background, if there were a foreground
    for attempt in (lambda: os.tcsetpgrp(0, os.getpgrp()), lambda: os.tcsetpgrp(2, os.getpgrp()),
                    lambda: os.write(1, b""), lambda: os.open("/dev/tty", os.O_RDWR)):
        try:
            attempt()
        except OSError:
            pass
    os._exit(len(seen))
_, status = os.wait()
print(json.dumps([os.WEXITSTATUS(status), os.WIFEXITED(status), seen]))
"""
    assert await report(sandbox, code) == [0, True, []]


# Packets


class Capture:
    """Count the packets on any interface of this machine that contain a word."""

    def __init__(self, word: bytes) -> None:
        self._word = word
        self.seen = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.settimeout(0.05)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def _count(self) -> None:
        while True:
            try:
                self.seen += self._word in self._socket.recv(65536)
            except TimeoutError:
                if self._ends.is_set():
                    return

    def close(self) -> None:
        """End the capture and count the packets that have come."""
        self._ends.set()
        self._thread.join()
        self._socket.close()


@pytest.mark.case("L01", "L03", "L04")
async def test_no_packet_is_seen_on_the_host(sandbox: Sandbox) -> None:
    word = f"packet-{secrets.token_hex(8)}"
    targets = [(host, port) for port in (53, 80, 5353) for host in (
        "127.0.0.1", "1.1.1.1", "192.0.2.1", "169.254.169.254", "100.100.100.200", "fd00:ec2::254", "::1",
        "fe80::1", "ff02::fb", "224.0.0.251", "255.255.255.255", *oracles.host_addresses())]  # fmt: skip
    code = CONNECT.replace('b"hello"', repr(word.encode()))
    code = code.replace('b"\\\\x08', f'{word.encode()!r} + b"\\\\x08')
    inside, outside = Capture(word.encode()), Capture(word.encode())
    try:
        await report(sandbox, code % targets, timeout=100)
        inside.close()
        # Control: the same program, unconfined and on the loopback only, sends datagrams that are
        # seen.
        here = [("127.0.0.1", port) for _, port in targets]
        control = code[: code.index("for family, protocol")] % here
        subprocess.run([sys.executable, "-c", control], check=True, timeout=60)
    finally:
        outside.close()
    assert inside.seen == 0
    assert outside.seen > 0


# Core files


@pytest.mark.case("K06")
async def test_no_core_file_is_anywhere_on_the_host(make: Make, native: NativeBackend) -> None:
    """A pattern without a path means the crashed process's own directory.

    One with a path starts at its own root.
    """
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    sandbox = await make()
    init = native.init_pid(sandbox.sandbox_id)
    root = Path(f"/proc/{init}/root")
    places = [root / "workspace", root / "tmp", root / "dev/shm", Path.cwd(), Path("/")]
    before = {name for place in places for name in _cores(place)}
    for way in ("as_started", "limit_lowered", "limit_raised"):
        outcome, _ = await report(sandbox, CRASH % way)
        assert outcome == 11
    assert {name for place in places for name in _cores(place)} == before
    if "/" not in pattern and not pattern.startswith("|"):
        await sandbox.execute(["touch", f"/workspace/{pattern.split('%')[0]}"])
        assert {name for place in places for name in _cores(place)} != before  # control: it is seen


def _cores(place: Path) -> set[str]:
    return {f"{place}/{name}" for name in os.listdir(place) if name.startswith("core")}


# Descriptors


@pytest.mark.case("M01")
async def test_sessions_and_terminals_hold_nothing_else(
    sandbox: Sandbox, native: NativeBackend
) -> None:
    init = native.init_pid(sandbox.sandbox_id)
    async with PythonSession(sandbox) as session:
        pid = int((await session.run("import os; print(os.getpid())"))["stdout"])
        # Beside the three standard streams there are the pipes for its cells and their output.
        held = oracles.descriptors(_host_pid(init, pid))
        assert held.keys() >= STDIO and len(held) <= 6
        assert {what.partition(":")[0] for what in held.values()} <= {"pipe", "/dev/null"}
    async with Terminal(sandbox) as terminal:
        for _ in range(2):
            shown = (await terminal.run("ls /proc/self/fd"))["stdout"].split()
            assert shown == ["0", "1", "2", "3"]  # the last one belongs to ls itself


def _host_pid(init: int, inside: int) -> int:
    for pid in process_isolation.processes(init):
        if _text(f"/proc/{pid}/status").split("NSpid:")[1].splitlines()[0].split()[-1] == str(
            inside
        ):
            return pid
    raise AssertionError(f"no process is {inside} in there")


LAUNCHES = int(os.environ.get("PARACLE_CHURN", "400"))
OPENERS = 1000


@pytest.mark.case("M02")
@pytest.mark.timeout(120 + LAUNCHES * 0.1)
async def test_no_descriptor_of_the_manager_in_many_launches(
    make: Make, native: NativeBackend, tmp_path: Path
) -> None:
    """PARACLE_CHURN is the number of launches; the specification says 10000."""
    word = secrets.token_hex(8)
    secret = tmp_path / word
    secret.write_text("secret")
    kept = os.open(secret, os.O_RDONLY)
    os.set_inheritable(kept, True)
    stop = threading.Event()
    turn = threading.Lock()  # all of them wait to start a program, and one at a time does

    def race() -> None:
        while not stop.is_set():
            with turn:
                if stop.is_set():
                    return
                fd = os.open(secret, os.O_RDONLY)
                os.set_inheritable(fd, True)
                subprocess.run(["true"], close_fds=False, check=True)
                os.close(fd)
            stop.wait(1.0)

    threads = [threading.Thread(target=race) for _ in range(OPENERS)]
    for thread in threads:
        thread.start()
    leaked: list[str] = []

    async def launch() -> None:
        """Start a sandbox and nine programs in it."""
        async with Sandbox(native, f"leak-{secrets.token_hex(6)}") as sandbox:
            init = native.init_pid(sandbox.sandbox_id)
            for _ in range(9):
                result = await sandbox.execute(["ls", "-l", "/proc/self/fd"])
                leaked.extend(line for line in result["stdout"].splitlines() if word in line)
            leaked.extend(
                f"{pid}: {what}"
                for pid in (init, *_children(init), *_ancestors(init))
                for what in oracles.descriptors(pid).values()
                if word in what
            )

    try:
        for _ in range(LAUNCHES // 40):
            await asyncio.gather(*(launch() for _ in range(4)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        os.close(kept)
    assert leaked == []
