"""Tests of memory (catalogue section B)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest
from pressure import MIB, Scene, needs_root, resident_bytes, until

from paracle_sandbox.errors import ResourceLimitError, SandboxError
from paracle_sandbox.sandbox.sandbox import Sandbox

pytestmark = needs_root

LIMIT_MB = 128
SLACK = 4 * MIB

HOG = """
import sys, time
hoard = []
for _ in range(int(sys.argv[1])):
    hoard.append(b"x" * (1 << 20))
print("held", flush=True)
"""
FAMILY = """
import os, sys, time
children = []
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        held = b"x" * (24 << 20)
        time.sleep(2)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


def assert_memory_error(error: ResourceLimitError) -> None:
    assert error.resource_type == "memory"
    assert error.limit == LIMIT_MB * MIB
    assert error.usage is not None and 0.9 * error.limit < error.usage <= error.limit + SLACK


def assert_held(peaks: list[int]) -> None:
    assert 0 < max(peaks) <= LIMIT_MB * MIB + SLACK


async def works_or_is_gone(scene: Scene, sandbox: Sandbox) -> None:
    """Check that the sandbox works.

    Only one with a kernel of its own may have ended, and then it must say so.
    """
    try:
        said = (await sandbox.execute("echo well"))["stdout"]
    except SandboxError:
        assert scene.witness.own_kernel
    else:
        assert said == "well\n"


@pytest.mark.case("B01")
@pytest.mark.clock
async def test_growth_beyond_the_limit_ends_the_program_and_nothing_else():
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        mine = resident_bytes()
        async with scene.neighbour(), scene.watching_memory(sandbox) as peaks:
            with pytest.raises(ResourceLimitError) as caught:
                await sandbox.run_code(HOG, ["1000"], timeout=60)
        assert_memory_error(caught.value)
        assert caught.value.stdout == ""
        assert_held(peaks)
        assert resident_bytes() - mine < 32 * MIB
        await works_or_is_gone(scene, sandbox)


@pytest.mark.case("B01")
async def test_the_same_program_within_its_limit_succeeds():
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=512)
        result = await sandbox.run_code(HOG, ["250"], timeout=60)
        assert result["stdout"] == "held\n"
        assert scene.memory_peak(sandbox) > LIMIT_MB * MIB, "it would have met the smaller limit"


@pytest.mark.case("B02")
async def test_children_are_counted_together():
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        async with scene.watching_memory(sandbox) as peaks:
            with pytest.raises(ResourceLimitError) as caught:
                await sandbox.run_code(FAMILY, ["12"], timeout=60)
        assert_memory_error(caught.value)
        assert_held(peaks)
        roomy = await scene.sandbox(memory_mb=512)
        result = await roomy.run_code(FAMILY, ["12"], timeout=60)
        assert result["stdout"] == f"{[0] * 12}\n"


@pytest.mark.case("B03")
async def test_shared_memory_is_bounded_and_charged_to_the_sandbox():
    program = """
import errno
written = 0
try:
    with open("/dev/shm/fill", "wb", buffering=0) as file:
        while True:
            written += file.write(b"x" * (1 << 20))
except OSError as error:
    print(written >> 20, errno.errorcode[error.errno])
"""
    async with Scene() as scene:
        roomy = await scene.sandbox(memory_mb=512)
        result = await roomy.run_code(program, timeout=60)
        assert result["stdout"] == "256 ENOSPC\n"
        stats = await roomy.get_stats()
        assert stats["memory_mb"] > 256
        tight = await scene.sandbox(memory_mb=LIMIT_MB)
        async with scene.watching_memory(tight) as peaks:
            with pytest.raises(ResourceLimitError) as caught:
                await tight.run_code(program, timeout=60)
        assert_memory_error(caught.value)
        assert_held(peaks)


@pytest.mark.case("B05")
async def test_terabytes_of_promises_and_locked_memory_reach_nobody():
    program = """
import ctypes, errno, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
maps = [libc.mmap(None, 1 << 40, 3, 0x4022, -1, 0) for _ in range(8)]
print(libc.mlockall(3), errno.errorcode[ctypes.get_errno()])
held = mmap.mmap(-1, 1 << 20)
held.write(b"x" * (1 << 20))
address = ctypes.addressof(ctypes.c_char.from_buffer(held))
libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
print(libc.mlock(address, 1 << 20), errno.errorcode[ctypes.get_errno()])
import os
os._exit(0)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        result = await sandbox.run_code(program, timeout=30)
        for line in result["stdout"].splitlines():
            assert line.split()[0] == "-1" and line.split()[1] in ("EPERM", "ENOMEM"), result
        assert len(result["stdout"].splitlines()) == 2, result
        assert scene.memory_peak(sandbox) < LIMIT_MB * MIB


KERNEL_HOGS = {
    "pipes": "import os, resource\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
    "while True: os.pipe()",
    "sockets": "import socket\nhoard = []\n"
    "while True:\n"
    "    pair = socket.socketpair()\n"
    "    hoard.append(pair)\n"
    "    pair[0].setblocking(False)\n"
    "    try:\n"
    "        while True: pair[0].send(b'x' * 65536)\n"
    "    except BlockingIOError: pass",
    "epolls": "import select\nhoard = []\nwhile True: hoard.append(select.epoll())",
    "inotify": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "while True:\n"
    "    if libc.inotify_init1(0) < 0:\n"
    "        raise OSError(ctypes.get_errno(), 'inotify')",
    "timers": "import ctypes\nlibc = ctypes.CDLL('librt.so.1', use_errno=True)\n"
    "for _ in range(200000):\n"
    "    timer = ctypes.c_void_p()\n"
    "    if libc.timer_create(1, None, ctypes.byref(timer)):\n"
    "        raise OSError(ctypes.get_errno(), 'timer')",
    "directories": "import os\nfor _ in range(4000):\n    os.mkdir('d')\n    os.chdir('d')",
}


def slab_bytes() -> int:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["SUnreclaim"].split()[0]) << 10


@pytest.mark.parametrize("kind", KERNEL_HOGS)
@pytest.mark.case("B06")
async def test_kernel_objects_are_bounded_or_charged(kind):
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        before = slab_bytes()
        try:
            result = await sandbox.run_code(KERNEL_HOGS[kind], timeout=60)
            words = result["stderr"].splitlines()[-1:] or [""]
            assert result["exit_code"] in (0, 1), result
            assert result["exit_code"] == 0 or "Error" in words[0]
        except ResourceLimitError as error:
            assert error.resource_type == "memory"
        assert scene.memory_peak(sandbox) <= LIMIT_MB * MIB + SLACK
        await scene.manager.destroy(sandbox.sandbox_id)
        # The kernel frees its groups in the background. A neighbour on the machine may add some.
        await until(lambda: slab_bytes() - before < 64 * MIB, 15, "kernel memory comes back")


SOCKET_HOGS = {
    "TCP": """
import socket, sys
listening, hoard = socket.create_server(("127.0.0.1", 0)), []
for _ in range(40):
    sender = socket.create_connection(listening.getsockname())
    hoard.append((sender, listening.accept()))
    sender.setblocking(False)
    try:
        while True:
            sender.send(bytes(1 << 20))
    except BlockingIOError:
        pass
""",
    "UDP": """
import socket, sys
sender, hoard = socket.socket(type=socket.SOCK_DGRAM), []
for _ in range(40):
    hoard.append(socket.socket(type=socket.SOCK_DGRAM))
    hoard[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    hoard[-1].bind(("127.0.0.1", 0))
    for _ in range(200):
        sender.sendto(bytes(60000), hoard[-1].getsockname())
""",
}
HOLD = """
print("full", flush=True)
sys.stdin.read()
"""


def held_by_sockets(kind: str) -> int:
    """Return how much memory sockets hold on the whole machine.

    The kernel's only other count is that of a group.
    """
    with open("/proc/net/sockstat") as file:
        line = next(line for line in file if line.startswith(kind + ":"))
    return int(line.split("mem ")[1]) * os.sysconf("SC_PAGE_SIZE")


async def hold_in_sockets(sandbox: Sandbox, kind: str) -> int:
    """Return how much more the machine holds for sockets while a program hoards as much as it can
    get."""
    before, full = held_by_sockets(kind), asyncio.Event()
    program = SOCKET_HOGS[kind] + HOLD
    command = await sandbox.start_code(
        program, stdin=True, on_stdout=lambda _: full.set(), timeout=60
    )
    await asyncio.wait_for(full.wait(), 60)
    more = held_by_sockets(kind) - before
    await command.kill()
    return more


@pytest.mark.parametrize("kind", SOCKET_HOGS)
@pytest.mark.case("B06")
async def test_what_sockets_hold_is_bounded(kind):
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        if "unified" not in scene.groups(sandbox):
            assert await hold_in_sockets(sandbox, kind) <= 64 * MIB + SLACK
        else:  # counted as memory, which may end the program
            with contextlib.suppress(ResourceLimitError, TimeoutError):
                assert await hold_in_sockets(sandbox, kind) <= LIMIT_MB * MIB + SLACK
        # Control: the probe does find the data in a sandbox that has room for it.
        roomy = await scene.sandbox(memory_mb=4096)
        assert await hold_in_sockets(roomy, kind) > 64 * MIB + SLACK


@pytest.mark.case("B07")
async def test_large_pipes_meet_a_limit():
    program = """
import fcntl, os
large = 0
try:
    while True:
        read, write = os.pipe()
        fcntl.fcntl(write, 1031, 1 << 20)
        os.set_blocking(write, False)
        os.write(write, b"x" * (1 << 20))
        large += 1
except OSError as error:
    print(large, error.errno)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        try:
            result = await sandbox.run_code(program, timeout=60)
            assert int(result["stdout"].split()[0]) <= LIMIT_MB, result
        except ResourceLimitError as error:
            assert error.resource_type == "memory"
        assert scene.memory_peak(sandbox) <= LIMIT_MB * MIB + SLACK


@pytest.mark.case("B08")
async def test_swap_adds_nothing():
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=LIMIT_MB)
        groups = scene.groups(sandbox)
        if "unified" in groups:
            assert scene.figure(sandbox, "memory", "memory.swap.max").strip() == "0"
        elif os.path.exists(groups["memory"] + "/memory.memsw.limit_in_bytes"):
            both = int(scene.figure(sandbox, "memory", "memory.memsw.limit_in_bytes"))
            assert both == LIMIT_MB * MIB
        else:  # no accounting of swap: then there may be none
            with open("/proc/swaps") as file:
                assert len(file.readlines()) == 1


@pytest.mark.case("B10")
async def test_a_stack_overflow_is_a_signal_and_leaves_no_core():
    program = """
import ctypes
callback = ctypes.CFUNCTYPE(ctypes.c_int)
import sys
sys.setrecursionlimit(10 ** 9)
def down():
    return callback(down)()
down()
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=512)
        started = time.time()
        result = await sandbox.run_code(program, timeout=60)
        assert result["exit_code"] == -11, result["stderr"][-300:]
        names = [entry["name"] for entry in await sandbox.list_files(".", recursive=True)]
        assert not [name for name in names if "core" in name]
        with open("/proc/sys/kernel/core_pattern") as file:
            pattern = file.read().strip()
        directory = os.path.dirname(pattern) if pattern.startswith("/") else "/"
        fresh = [
            name
            for name in os.listdir(directory)
            if name.startswith("core") and os.stat(f"{directory}/{name}").st_mtime > started
        ]
        assert fresh == []
