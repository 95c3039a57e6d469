"""K. Tests of terminals, IPC, signals and core dumps."""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
from hostile_fixtures import Make, Weak
from probes import report
from syscall_probe import BAD_POINTER, PRELUDE, program, refused

from paracle_sandbox.backends.machine import process_isolation
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxError, SandboxExecutionError
from paracle_sandbox.sandbox.sandbox import Sandbox

TERMINAL_IOCTLS = (
    PRELUDE
    + """
answers = {}
targets = {"0": 0, "1": 1, "2": 2}
try:
    targets["tty"] = os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    answers["open tty"] = errno.errorcode[error.errno]
letter = ctypes.create_string_buffer(b"X")
number = ctypes.create_string_buffer(b"\\x05\\0\\0\\0")
for name, fd in targets.items():
    for request, argument in ((0x5412, letter), (0x541C, letter), (0x5423, number), (0x541D, letter)):
        for high in (0, 1 << 32, 1 << 40):
            answers["%s %#x %#x" % (name, request, high)] = call(16, fd, request | high, ctypes.addressof(argument))
print(json.dumps(answers))
"""
)


@pytest.mark.case("K01")
@pytest.mark.parametrize("pty", [False, True])
async def test_nothing_is_typed_into_a_terminal(pty: bool, sandbox: Sandbox) -> None:
    answers = await report(sandbox, TERMINAL_IOCTLS, pty=pty)
    opened = answers.pop("open tty", None)
    assert opened == (None if pty else "ENXIO")
    assert set(answers.values()) <= {"EPERM", "ENOTTY"}, answers


@pytest.mark.case("K01")
def test_the_terminal_probe_can_fail() -> None:
    """On a terminal of the host, without the filter, the letter arrives.

    The kernel's own setting may refuse it with EIO, which is not our doing.
    """
    import pty

    master, slave = pty.openpty()
    code = TERMINAL_IOCTLS.replace(
        "((0x5412, letter), (0x541C, letter), (0x5423, number), (0x541D, letter))",
        "((0x5412, letter),)",
    )
    with open(os.devnull) as null:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=slave, stdout=subprocess.PIPE, stderr=null,
            start_new_session=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    os.close(slave)
    os.close(master)
    assert '"0 0x5412 0x0": "OK"' in done.stdout or '"0 0x5412 0x0": "EIO"' in done.stdout


@pytest.mark.case("K01", "K02")
async def test_a_terminal_of_the_host_is_never_theirs(make: Make, native: NativeBackend) -> None:
    """A manager that was started from a terminal hands none of it on."""
    sandbox = await make()
    await sandbox.execute("true")
    for pid in process_isolation.processes(native.init_pid(sandbox.sandbox_id)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        assert int(fields[4]) == 0, "it has a controlling terminal"
        assert not [d for d in oracles.descriptors(pid).values() if "tty" in d or "pts" in d]


@pytest.mark.case("K02")
async def test_there_is_no_controlling_terminal(sandbox: Sandbox) -> None:
    code = f"""{PRELUDE}
import stat, termios, fcntl
def attempt(action):
    try:
        return str(action())
    except OSError as error:
        return errno.errorcode[error.errno]
print(json.dumps({{
    "open": attempt(lambda: os.open("/dev/tty", os.O_RDWR)),
    "console": attempt(lambda: os.open("/dev/console", os.O_RDWR)),
    "tcgetpgrp": attempt(lambda: os.tcgetpgrp(0)),
    "tcsetpgrp": attempt(lambda: os.tcsetpgrp(1, 1)),
    "sctty": attempt(lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 1)),
    "leader": str(os.getsid(0) == os.getpid()),
    "kinds": [stat.S_IFMT(os.fstat(n).st_mode) for n in range(3)],
    "pts": os.listdir("/dev/pts"),
}}))
"""
    found = await report(sandbox, code)
    assert found["open"] == "ENXIO" and found["console"] in ("ENOENT", "EACCES")
    assert found["tcgetpgrp"] == found["tcsetpgrp"] == found["sctty"] == "ENOTTY"
    assert found["leader"] == "True" and found["pts"] == ["ptmx"]
    assert found["kinds"][1:] == [0o010000, 0o010000]  # pipes


@pytest.mark.case("K02", "M13")
async def test_terminals_are_private_to_a_sandbox(make: Make) -> None:
    first, second = await make(), await make()
    host = set(os.listdir("/dev/pts"))
    shown = asyncio.Event()
    running = await first.start_command(
        "tty; sleep 60", pty=True, on_stdout=lambda text: shown.set()
    )
    await asyncio.wait_for(shown.wait(), 20)
    assert (await second.execute("ls /dev/pts"))["stdout"].split() == ["ptmx"]
    assert set(os.listdir("/dev/pts")) == host
    await running.kill()


@pytest.mark.case("K03")
async def test_abstract_sockets_of_the_host(sandbox: Sandbox, weak: Weak) -> None:
    name = f"canary-{secrets.token_hex(6)}"
    code = """
import json, socket, sys
name = %r
answers = []
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
    with socket.socket(socket.AF_UNIX, kind) as s:
        try:
            s.connect("\\0" + name)
            answers.append("OK")
        except OSError as error:
            answers.append(error.errno)
shown = open("/proc/net/unix").read()
print(json.dumps([answers, [line.split()[-1] for line in shown.splitlines() if "@" in line]]))
"""
    with oracles.listening((socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}")) as (listener,):
        answers, shown = await report(sandbox, code % name)
        assert "OK" not in answers and shown == []
        assert not oracles.wait_until(lambda: listener.hits, 0.3)
        subprocess.run([sys.executable, "-c", code % name], check=True, capture_output=True)
        assert oracles.wait_until(lambda: listener.hits)


@pytest.mark.case("K04")
async def test_descriptors_cannot_be_passed_out_or_in(sandbox: Sandbox, tmp_path: Path) -> None:
    """Programs must not reach a socket file on the host, nor the spawner's own sockets."""
    path = tmp_path / "docker.sock"
    with oracles.listening((socket.AF_UNIX, socket.SOCK_STREAM, str(path))) as (listener,):
        path.chmod(0o777)
        code = f"""
import json, socket
answers = []
for path in ({str(path)!r}, "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket"):
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
            answers.append("OK")
        except OSError as error:
            answers.append(error.errno)
print(json.dumps(answers))
"""
        assert "OK" not in await report(sandbox, code)
        assert listener.hits == 0
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        assert oracles.wait_until(lambda: listener.hits)


SYSV = {
    "shmget": (0x1234, 4096, 0o1666), "semget": (0x1234, 1, 0o1666), "msgget": (0x1234, 0o1666),
    "shmat": (0, 0, 0), "shmctl": (0, 2, BAD_POINTER), "mq_open": ("/hostile", 0o102, 0o600, 0),
    "mq_unlink": ("/hostile",),
}  # fmt: skip


@pytest.mark.case("K05")
async def test_ipc_is_not_shared(make: Make) -> None:
    name = f"hostile-{secrets.token_hex(6)}"
    before = [Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("msg", "sem", "shm")]
    first, second = await make(), await make()
    assert not refused(await report(first, program(SYSV)))
    write = f"open('/dev/shm/{name}', 'w').write('x'); print('null')"
    await report(first, write)
    look = "import json, os; print(json.dumps(os.listdir('/dev/shm')))"
    assert name in await report(first, look)
    assert name not in await report(second, look)
    assert name not in os.listdir("/dev/shm")
    after = [Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("msg", "sem", "shm")]
    assert "4660" not in "".join(after).replace("".join(before), "")


CRASH = """
import ctypes, json, os, resource, signal
def as_started():
    pass
def limit_lowered():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def limit_raised():
    for wanted in (1 << 20, resource.RLIM_INFINITY):
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (wanted, wanted))
        except (ValueError, OSError):
            continue
        os._exit(99)
pid = os.fork()
if not pid:
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    try:
        %s()
    except OSError:
        pass
    ctypes.string_at(0)
_, status = os.waitpid(pid, 0)
outcome = os.WTERMSIG(status) if os.WIFSIGNALED(status) else "exit %%d" %% os.WEXITSTATUS(status)
cores = [os.path.join(d, n) for top in ("/workspace", "/tmp", "/dev/shm") for d, _, ns in os.walk(top)
         for n in ns if n.startswith("core")]
print(json.dumps([outcome, cores]))
"""
WAYS_TO_CRASH = ("as_started", "limit_lowered", "limit_raised")


@pytest.mark.case("K06")
@pytest.mark.parametrize("way", WAYS_TO_CRASH)
async def test_a_crash_leaves_no_core_file(way: str, sandbox: Sandbox, tmp_path: Path) -> None:
    assert await report(sandbox, CRASH % way) == [11, []]
    # Control: unconfined, and allowed to, the same crash leaves one if this machine writes them.
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" not in pattern and not pattern.startswith("|"):
        raise_limit = "import os, resource as r; h = r.getrlimit(4)[1]; r.setrlimit(4, (h, h))"
        subprocess.run(
            [sys.executable, "-c", f"{raise_limit}; os.abort()"],
            capture_output=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert list(tmp_path.glob("core*"))


@pytest.mark.case("K06")
async def test_a_crash_does_not_start_the_hosts_core_handler(
    sandbox: Sandbox, native: NativeBackend
) -> None:
    """With a limit of 0 the kernel would still pipe the dump into a program of the host, as
    systemd-coredump and apport set it up: hostile bytes, read by root. A limit of 1 prevents it.
    """
    ready = asyncio.Event()
    command = await sandbox.start_command(
        "sleep 60 & echo ready; sleep 60", on_stdout=lambda text: ready.set()
    )
    try:
        await asyncio.wait_for(ready.wait(), 20)
        pids = process_isolation.processes(native.init_pid(sandbox.sandbox_id))
        limits = [Path(f"/proc/{pid}/limits").read_text() for pid in pids]
    finally:
        await command.kill()
    cores = [line.split()[4:6] for text in limits for line in text.splitlines() if "core" in line]
    assert len(cores) >= 2 and all(core == ["1", "1"] for core in cores)


SIGNALS = """
import os, signal, sys, json
pids = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
for number in range(1, 65):
    if number in %r:
        continue
    for pid in pids:
        for _ in range(20):
            try:
                os.kill(pid, number)
            except OSError:
                pass
print(json.dumps(len(pids)))
"""


@pytest.mark.case("K07", "A06")
async def test_storms_of_signals_at_guest_and_keepers(sandbox: Sandbox) -> None:
    for _ in range(3):
        await sandbox.execute("true")
    # All signals have no effect, except KILL, STOP, and two that the C library never blocks.
    assert await report(sandbox, SIGNALS % [9, 19, 32, 33]) >= 1
    assert (await sandbox.execute("exit 7"))["exit_code"] == 7
    # With KILL keepers die, perhaps ours. Only a program that really came to its end succeeds.
    beside = await sandbox.start_command("sleep 60")
    result = await sandbox.run_code(SIGNALS % [19])
    assert result["exit_code"] == -9 or (result["exit_code"] == 0 and result["stdout"])
    assert (await beside.wait())["exit_code"] < 0
    # The kill of a tree that lost its keeper may kill the next command, too, which is reported.
    assert (await sandbox.execute("exit 7"))["exit_code"] in (-9, 7)
    # KILL to all spares the caller and the guest: the result is true, and the sandbox goes on.
    result = await sandbox.execute("kill -9 -1; exit 7")
    assert result["exit_code"] in (-9, 7)
    assert (await sandbox.execute(["echo", "ok"]))["stdout"] == "ok\n"


@pytest.mark.case("K07", "A09")
async def test_stopped_keepers_end_in_a_timeout(make: Make) -> None:
    sandbox = await make(SandboxConfig(timeout_seconds=10))
    for _ in range(3):
        await sandbox.execute("true")
    await sandbox.start_command("sleep 60")  # so that there are keepers
    stop = """
import os
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid not in (1, os.getpid()):
        os.kill(pid, 19)
os.kill(1, 19)
"""
    for _ in range(2):
        try:
            await sandbox.run_code(stop, timeout=2)
        except SandboxError as error:
            assert "time" in str(error).lower() or "sandbox" in str(error).lower()
    try:
        assert (await sandbox.execute("exit 7", timeout=5))["exit_code"] == 7
    except SandboxError:
        pass  # a definite class


HOARD_TERMINALS = """
import os, resource, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
hoard = []
try:
    while True:
        hoard.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    print(len(hoard), flush=True)
sys.stdin.read()
"""


@pytest.mark.case("K02", "M13")
async def test_one_sandbox_does_not_use_up_the_terminals_of_all(make: Make) -> None:
    """The kernel has a fixed number of terminals for all containers of the machine."""
    sandbox, neighbour = await make(), await make()
    before = _terminals()
    told: asyncio.Queue[str] = asyncio.Queue()
    hoarder = await sandbox.start_code(HOARD_TERMINALS, stdin=True, on_stdout=told.put_nowait)
    held = int(await asyncio.wait_for(told.get(), 30))
    assert 0 < held <= 64
    assert _terminals() - before >= held, "the host does not see them: nothing is shown here"
    assert (await neighbour.execute("tty", pty=True))["exit_code"] == 0
    # It is reported as what it is, and not as a full disk.
    with pytest.raises(SandboxExecutionError, match="no terminal is left"):
        await sandbox.execute("tty", pty=True)
    await hoarder.kill()
    assert (await sandbox.execute("tty", pty=True))["exit_code"] == 0


def _terminals() -> int:
    return int(Path("/proc/sys/kernel/pty/nr").read_text())


LIMITS = """
import json, resource
answers = []
for kind in (%s):
    try:
        resource.prlimit(1, kind, (%s, %s))
        answers.append("OK")
    except (OSError, ValueError, PermissionError) as error:
        answers.append(repr(error))
print(json.dumps(answers))
"""


@pytest.mark.case("K07", "M05")
@pytest.mark.parametrize(
    "kind", ["NOFILE", "NPROC", "FSIZE", "AS", "DATA", "CPU", "STACK", "SIGPENDING"]
)
async def test_limits_put_on_the_guest_never_look_like_success(kind: str, make: Make) -> None:
    """prlimit only asks for the same user, so programs may starve the guest.

    The loss is their own, but the host gets a typed error or the truth, and in time.
    """
    sandbox, neighbour = await make(SandboxConfig(timeout_seconds=10)), await make()
    try:
        await sandbox.run_code(LIMITS % (f"resource.RLIMIT_{kind},", 0, 0), timeout=5)
    except SandboxError:
        pass
    for _ in range(3):
        try:
            async with asyncio.timeout(20):
                assert (await sandbox.execute("exit 7", timeout=5))["exit_code"] != 0
        except SandboxError:
            pass
        try:
            async with asyncio.timeout(20):
                await sandbox.write_file("x", b"content")
                assert await sandbox.read_bytes("x") == b"content"
        except SandboxError:
            pass
    assert (await neighbour.execute("exit 7"))["exit_code"] == 7
