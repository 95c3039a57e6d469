"""What hostile code under gVisor does to the host: rows of the catalogue, asked of the host alone.

Inside is a kernel of gVisor's own, which may well allow what the host's would refuse: a namespace,
a socket, a node. It is one process of the host, with helpers, and these are looked at here.
"""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import oracles
import pytest
from container_fixtures import Make
from pressure import SLACK_SECONDS
from probes import report
from sentry import Sentry
from syscall_probe import BAD_POINTER, PRELUDE, program, refused
from test_information import DEVICES, _memory_has
from test_kernel import FAMILIES, LARGE_INTERFACES, MACHINE, SOCKETS
from test_privileges import SETNS, THREADS
from test_processes import DEAF_FORK_BOMB, FORK_BOMB

from paracle_sandbox.backends.docker.gvisor import GvisorBackend
from paracle_sandbox.backends.machine import process_isolation
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxError, SandboxTimeoutError
from paracle_sandbox.sandbox.sandbox import Sandbox

LIMIT = 48
REMOVAL_SECONDS = 5
# Opening files for others, tracing processes of its own, and leaving its root: no administration.
CAPABILITIES = 0xC001F
OWN_NAMESPACES = {"mnt", "net", "ipc", "uts"}


@pytest.fixture
def engine() -> str:
    return "gvisor"


@contextlib.asynccontextmanager
async def held(sandbox: Sandbox, code: str) -> AsyncIterator[Any]:
    """What a program reports, while it goes on and keeps all that it has opened."""
    said: list[str] = []
    line = asyncio.Event()

    def on_stdout(text: str) -> None:
        said.append(text)
        if "\n" in text:
            line.set()

    waits = "\nimport sys, time\nsys.stdout.flush()\ntime.sleep(100)\n"
    command = await sandbox.start_code(code + waits, on_stdout=on_stdout, timeout=110)
    await asyncio.wait_for(line.wait(), 60)
    yield json.loads("".join(said).splitlines()[0])
    await command.kill()


def group(backend: GvisorBackend, sandbox: Sandbox) -> Path:
    """The cgroup in which its processes are counted."""
    groups = backend._owned[sandbox.sandbox_id].cgroups
    return Path(groups.get("pids") or groups["unified"])


def processes(backend: GvisorBackend, sandbox: Sandbox) -> list[int]:
    return [int(word) for word in (group(backend, sandbox) / "cgroup.procs").read_text().split()]


def namespaces(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= set(oracles.namespaces_of(pid).values())
    return found


@contextlib.contextmanager
def bystander() -> Any:
    """A process of the host, which has to be there afterwards, and untraced."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"]) as process:
        try:
            yield process.pid
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert "TracerPid:\t0\n" in status and process.poll() is None
        finally:
            process.kill()


# Processes

A_FAMILY = """
import os, threading, time
for _ in range(3):
    if os.fork() == 0:
        time.sleep(100)
for _ in range(2):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("[]")
"""


async def test_the_sentry_sees_what_there_is_to_see(
    sandbox: Sandbox, backend: GvisorBackend
) -> None:
    """The witness of the rows that count programs, in front of some, and of a preforked one alone."""
    sentry = Sentry(backend)
    async with held(sandbox, A_FAMILY):
        assert len(sentry.programs(sandbox)) == 4
        assert len(sentry.processes(sandbox)) >= 1 + 4
        assert sentry.tasks(sandbox) >= 1 + 4 + 2
    assert sentry.programs(sandbox) == []
    for _ in range(2):  # the guest has one ready for the next one
        await sandbox.run_code("print(1)")
    assert sentry.programs(sandbox) == []


@pytest.mark.case("A01", "A03")
@pytest.mark.parametrize("bomb", [FORK_BOMB, DEAF_FORK_BOMB], ids=["A01", "A03"])
@pytest.mark.clock
async def test_a_fork_bomb_is_bounded_on_the_host(
    bomb: str, make: Make, backend: GvisorBackend
) -> None:
    sandbox, other = await make(SandboxConfig(max_processes=LIMIT)), await make()
    counted = group(backend, sandbox)
    limit = int((counted / "pids.max").read_text())
    assert limit == 3 * LIMIT + 256
    before = len(processes(backend, sandbox))
    started = time.monotonic()
    command = await sandbox.start_code(bomb, timeout=10)
    seen = [0]
    waiting = asyncio.ensure_future(command.wait())
    while not waiting.done():
        with contextlib.suppress(OSError):  # the sandbox has ended with its bomb
            seen.append(int((counted / "pids.current").read_text()))
        if len(seen) == 20:
            assert await other.run_command("echo alive") == "alive\n"
            subprocess.run(["true"], check=True, timeout=10)  # the host can still fork
        await asyncio.sleep(0.05)
    with pytest.raises(SandboxTimeoutError):
        await waiting
    # A guest that is not heard of is given up after three seconds, and its container removed.
    assert time.monotonic() - started < 10 + 3 + REMOVAL_SECONDS + SLACK_SECONDS
    assert max(seen) <= limit
    assert max(seen) > before + LIMIT // 2, "the bomb did not go off: this test shows nothing"
    if sandbox.is_running:
        assert Sentry(backend).programs(sandbox) == []
    with contextlib.suppress(SandboxError):  # it may have ended, which is a definite answer
        assert (await sandbox.execute("echo well", timeout=30))["stdout"] == "well\n"
    await sandbox.stop()
    assert oracles.wait_until(lambda: not counted.exists()), "its processes are left"
    assert await other.run_command("echo alive") == "alive\n"


@pytest.mark.case("M05", "K07", "A06")
@pytest.mark.parametrize("number", [9, 19])
async def test_whoever_harms_the_guest_harms_no_other(number: int, make: Make) -> None:
    """The guest is a process like theirs: killed or stopped, it is their own loss, and told."""
    sandbox, other = await make(SandboxConfig(timeout_seconds=10)), await make()
    with bystander():
        code = f"import os\nos.kill(1, {number})\nos.kill(-1, {number})\nprint('unharmed')"
        with pytest.raises(SandboxError):
            async with asyncio.timeout(60):
                await sandbox.run_code(code, timeout=5)
                await sandbox.run_code("print('goes on')", timeout=5)
        assert await other.run_command("echo alive") == "alive\n"
    await sandbox.stop()


WRITE_TO_THE_GUEST = """
import os
for number in range(64):
    try:
        fd = os.open("/proc/1/fd/%d" % number, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"\\xff" * 64 + b'{"exit_code": 0}')
    except OSError:
        pass
raise SystemExit(7)
"""


@pytest.mark.case("M04", "M05")
async def test_what_is_written_to_the_guests_channel_is_no_success(make: Make) -> None:
    sandbox, other = await make(SandboxConfig(timeout_seconds=10)), await make()
    for _ in range(2):
        with contextlib.suppress(SandboxError):  # a definite class
            async with asyncio.timeout(60):
                assert (await sandbox.run_code(WRITE_TO_THE_GUEST, timeout=5))["exit_code"] != 0
    assert await other.run_command("echo alive") == "alive\n"
    await sandbox.stop()


# What there is to learn


@pytest.mark.case("H02")
async def test_no_secret_of_the_manager_in_any_of_its_processes(
    make: Make, backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"APIKEY{secrets.token_hex(12)}"
    monkeypatch.setenv("SANDBOX_API_KEY", secret)
    sandbox = await make()
    await sandbox.run_code("print(1)")
    pids = processes(backend, sandbox)
    assert pids and not [pid for pid in pids if _memory_has(pid, secret.encode())]
    assert _memory_has(os.getpid(), secret.encode())


@pytest.mark.case("G05")
async def test_devices_lead_nowhere(sandbox: Sandbox, backend: GvisorBackend) -> None:
    """There is a /dev/fuse, which is gVisor's own: of the host's devices none is opened for it."""
    opens = """
found = []
for folder in ("/tmp", "/workspace", "/dev/shm", "/dev"):
    for name in ("blk", "mem", "loop", "whiteout"):
        try:
            os.open("%s/%s-node" % (folder, name), os.O_RDONLY | os.O_NONBLOCK)
            found.append(folder + name)
        except OSError:
            pass
print(json.dumps([found, opened, sorted(os.listdir("/dev"))]))
"""
    handful = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
    makes = DEVICES.rpartition("print(")[0]
    async with held(sandbox, makes + opens) as (nodes, opened, names):
        assert nodes == [] and set(opened) <= {"fuse"}
        for pid in processes(backend, sandbox):
            devices = {d for d in oracles.descriptors(pid).values() if d.startswith("/dev/")}
            assert devices <= handful, pid
    assert set(names) <= {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm",
                          "fd", "stdin", "stdout", "stderr", "mqueue", "fuse"}  # fmt: skip


# Privileges


@pytest.mark.case("I01")
async def test_posture_of_all_that_runs_on_the_host(
    sandbox: Sandbox, backend: GvisorBackend
) -> None:
    """Its processes are root's, without what root may do: filtered, and in places of their own."""
    host = os.stat("/")
    async with held(sandbox, THREADS.replace('"ready"', '"[]"')):
        pids = processes(backend, sandbox)
        count = 0
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                root = os.stat(f"/proc/{pid}/root/")
                assert (root.st_dev, root.st_ino) != (host.st_dev, host.st_ino)
                for thread in process_isolation.threads(pid):
                    found = process_isolation.read_posture(pid, thread)
                    assert found.no_new_privs == 1 and found.seccomp == 2, (pid, thread)
                    assert found.own_namespaces >= OWN_NAMESPACES, (pid, thread)
                    assert not [c for c in found.capabilities if c & ~CAPABILITIES], (pid, thread)
                    count += 1
    assert count >= len(pids) > 2
    inside = (await sandbox.execute("grep -E 'Cap|NoNew|Uid' /proc/self/status"))["stdout"]
    values = {line.split()[0]: line.split()[1:] for line in inside.splitlines()}
    assert set(values["Uid:"]) == {"1000"}
    assert {int(values[f"Cap{kind}:"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd")} == {0}


NEW_NAMESPACES = f"""{PRELUDE}
answers = []
for flag in (0x10000000, 0x10020000, 0x30000000, 0x50000000, 0x18000000, 0x14000000, 0x12000000):
    read, write = os.pipe()
    if not os.fork():
        # unshare; the same once more by clone; and both are kept.
        os.write(write, call(272, flag).encode())
        os.close(write)
        call(56, flag | 17, 0, 0, 0, 0)
        import time
        time.sleep(100)
    os.close(write)
    answers.append(os.read(read, 100).decode())
print(json.dumps(answers))
"""


@pytest.mark.case("I02")
async def test_new_namespaces_are_none_of_the_hosts(
    sandbox: Sandbox, backend: GvisorBackend
) -> None:
    before = namespaces(processes(backend, sandbox))
    async with held(sandbox, NEW_NAMESPACES) as answers:
        assert len(answers) == 7
        assert namespaces(processes(backend, sandbox)) == before


@pytest.mark.case("I03")
async def test_no_namespace_of_the_host_can_be_entered(
    sandbox: Sandbox, backend: GvisorBackend
) -> None:
    before = namespaces(processes(backend, sandbox))
    assert not before & set(oracles.namespaces_of(os.getpid()).values()) - _shared()
    async with held(sandbox, SETNS) as (answers, kept):
        assert "OK" not in answers.values()
        assert not [name for name in kept if ":[" in name and not name.startswith("pipe")]
        assert namespaces(processes(backend, sandbox)) == before


def _shared() -> set[str]:
    """Those that runsc leaves as they are: it does without, since nothing inside is in them."""
    own = oracles.namespaces_of(os.getpid())
    return {own[name] for name in own if name not in OWN_NAMESPACES}


# The kernel


@pytest.mark.case("J01")
async def test_no_process_of_the_host_is_traced_or_read(sandbox: Sandbox) -> None:
    with bystander() as pid:
        calls = {
            "ptrace attach": (16, pid),
            "ptrace seize": (0x4206, pid),
            "process_vm_readv": (pid, BAD_POINTER, 1, BAD_POINTER, 1),
            "process_vm_writev": (pid, BAD_POINTER, 1, BAD_POINTER, 1),
            "kcmp": (pid, pid, 0),
            "pidfd_open": (pid, 0),
            "process_madvise": (-1, 0, 0, 20, 0),
        }
        answers = await report(sandbox, program(calls))
        assert "OK" not in answers.values(), answers


@pytest.mark.case("J02")
async def test_large_interfaces_do_not_exist(sandbox: Sandbox) -> None:
    calls = {name: LARGE_INTERFACES[name] for name in LARGE_INTERFACES if name != "io_setup"}
    assert not refused(await report(sandbox, program(calls)))


@pytest.mark.case("J03")
async def test_no_key_reaches_the_host_or_another(make: Make) -> None:
    token = f"hostile{secrets.token_hex(6)}"
    store = f"""{PRELUDE}
print(json.dumps([call(248, "user", "{token}", "{token}", 4, ring) for ring in (-1, -2, -3, -4, -5)]))
"""
    look = f"""{PRELUDE}
shown = open("/proc/keys").read() if os.path.exists("/proc/keys") else ""
print(json.dumps([call(249, "user", "{token}", 0, 0), "{token}" in shown]))
"""
    first, second = await make(), await make()
    async with held(first, store):
        answer, shown = await report(second, look)
        assert answer != "OK" and not shown
        assert not oracles.keys_named(token)


@pytest.mark.case("J04")
async def test_the_machine_stays_as_it_is(sandbox: Sandbox) -> None:
    """Its log is one that gVisor makes up, which anybody may read."""
    before, uptime = oracles.host_state(), float(Path("/proc/uptime").read_text().split()[0])
    answers = await report(sandbox, program(MACHINE))
    own = {"syslog", "name_to_handle_at", "open_by_handle_at"}
    assert not refused({name: answers[name] for name in answers if name not in own})
    assert oracles.host_state() == before
    assert float(Path("/proc/uptime").read_text().split()[0]) >= uptime


@pytest.mark.case("J05")
async def test_no_socket_of_the_host_but_ordinary_ones(
    sandbox: Sandbox, backend: GvisorBackend
) -> None:
    def others() -> list[str]:
        kinds = ("packet", "raw", "raw6", "netlink", "vsock")
        files = [f"/proc/{backend.init_pid(sandbox.sandbox_id)}/net/{kind}" for kind in kinds]
        return [line for file in files for line in oracles._lines(file)]

    before = others()
    async with held(sandbox, PRELUDE + FAMILIES % SOCKETS) as (answers, good):
        # Netlink is answered by gVisor itself, of its own network.
        assert not refused({n: a for n, a in answers.items() if not n.startswith("NETLINK")})
        assert len(good) == 6
        assert others() == before
