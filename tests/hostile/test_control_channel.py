"""M. Inherited descriptors, the launcher, and the channel: everything inside may lie."""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import ast
import asyncio
import json
import os
import secrets
import struct
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
from hostile_fixtures import Make
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from liars import HELLO, LyingBackend, LyingChannel, Script
from probes import report

import paracle_sandbox
from paracle_sandbox.backends.machine import process_isolation
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.channel import frames
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxError, SandboxTimeoutError, StoppedError
from paracle_sandbox.sandbox.sandbox import Sandbox

Lying = Callable[..., Awaitable[Sandbox]]

DESCRIPTORS = """
import json, os
found = {}
for name in os.listdir("/proc/self/fd"):
    try:
        found[name] = os.readlink("/proc/self/fd/" + name)
    except OSError:
        pass  # the one that listed them
print(json.dumps(found))
"""
SHELL_DESCRIPTORS = "ls /proc/$$/fd; true"


@pytest.mark.case("M01", "E07")
async def test_programs_start_with_three_descriptors(sandbox: Sandbox) -> None:
    await sandbox.write_file("probe.py", DESCRIPTORS)
    three = {"0", "1", "2"}
    for _ in range(3):  # the third time a spare keeper is used
        assert set(await report(sandbox, DESCRIPTORS)) == three
        assert set(await report(sandbox, DESCRIPTORS, pty=True)) == three
        assert set(await report(sandbox, DESCRIPTORS, stdin=b"x")) == three
        assert set(await report(sandbox, DESCRIPTORS, env={"PYTHONHASHSEED": "1"})) == three
        result = await sandbox.run_file("probe.py")
        assert set(json.loads(result["stdout"])) == three
        for options in ({}, {"pty": True}, {"stdin": True}):
            shell = await sandbox.start_command(["sh", "-c", SHELL_DESCRIPTORS], **options)
            seen = set((await shell.wait())["stdout"].split())
            assert three <= seen <= three | {"10", "255"}  # the shell has a copy
        chunks = [data async for _, data in sandbox.stream(["python3", "probe.py"])]
        assert set(json.loads(b"".join(chunks))) == three


@pytest.mark.case("M01", "E07")
async def test_writing_to_other_descriptors_reaches_nobody(sandbox: Sandbox) -> None:
    code = f"""
import json, os
frame = {frames.encode_json(frames.RESULT, 1, {"exit_code": 0})!r}
wrote = []
for fd in range(3, 1024):
    try:
        os.write(fd, frame)
        wrote.append(fd)
    except OSError:
        pass
print(json.dumps(wrote), flush=True)
os._exit(9)
"""
    result = await sandbox.run_code(code)
    assert result["stdout"] == "[]\n" and result["exit_code"] == 9


@pytest.mark.case("M02")
async def test_descriptors_of_the_manager_do_not_leak(
    native: NativeBackend, tmp_path: Path
) -> None:
    """Inheritable descriptors are opened while threads start programs and sandboxes are created."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    stop = threading.Event()
    leaked: list[str] = []

    def churn() -> None:
        while not stop.is_set():
            fd = os.open(secret, os.O_RDONLY)
            os.set_inheritable(fd, True)
            subprocess.run(["true"], close_fds=False, check=True)
            os.close(fd)

    kept = os.open(secret, os.O_RDONLY)
    os.set_inheritable(kept, True)
    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for round_ in range(8):
            # This is a backend of its own: descriptors could leak at the start of its spawner.
            backend = NativeBackend(native.settings)
            try:
                for number in range(4):
                    box = Sandbox(backend, f"leak-{round_}-{number}-{secrets.token_hex(4)}")
                    async with box:
                        await box.execute("true")
                        init = backend.init_pid(box.sandbox_id)
                        for pid in (*process_isolation.processes(init), *_ancestors(init)):
                            leaked += [
                                f"{pid}: {what}"
                                for what in oracles.descriptors(pid).values()
                                if str(tmp_path) in what
                            ]
            finally:
                await backend.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        os.close(kept)
    assert leaked == []


@pytest.mark.case("M02")
def test_the_leak_oracle_can_fail(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
        try:
            assert oracles.wait_until(
                lambda: str(secret) in oracles.descriptors(child.pid).values()
            )
        finally:
            child.kill()
            child.wait()


def _ancestors(pid: int) -> list[int]:
    found = []
    while True:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid in (os.getpid(), 0, 1):
            return found
        found.append(pid)


FRAMES = b"".join(
    [
        *(frames.encode_json(frames.RESULT, n, {"exit_code": 0}) for n in range(8)),
        *(
            frames.encode_json(frames.ERROR, n, {"code": "internal", "message": "x"})
            for n in range(4)
        ),
        *(frames.encode_json(frames.EVENT, n, {"pid": 1}) for n in range(4)),
        frames.encode(frames.DATA, 1, b"forged"),
        frames.encode_credit(1, 1 << 31),
        HELLO,
        struct.pack("<ci", b"s", 0) * 8,
        b'{"exit_code": 0, "success": true}\n__EXIT__0\n',
    ]
)


@pytest.mark.case("M03")
@pytest.mark.parametrize("way", ["stdout", "stderr", "pty", "shell"])
async def test_forged_frames_are_only_output(way: str, sandbox: Sandbox) -> None:
    fd = 2 if way == "stderr" else 1
    code = f"import os\nos.write({fd}, {FRAMES!r})\nos._exit(7)"
    seen = bytearray()

    def keep(stream: str, data: bytes) -> None:
        seen.extend(data)

    for _ in range(3):
        seen.clear()
        if way == "shell":
            await sandbox.write_file("frames", FRAMES)
            running = await sandbox.start_command("cat frames; exit 7", on_output_bytes=keep)
        else:
            running = await sandbox.start_code(code, pty=way == "pty", on_output_bytes=keep)
        result = await running.wait()
        assert result["exit_code"] == 7
        assert bytes(seen).replace(b"\r\n", b"\n") == FRAMES
    assert (await sandbox.execute("exit 3"))["exit_code"] == 3


FIND_CHANNEL = """
import json, os, socket, stat
opened, connected = [], []
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    for fd in range(64):
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY):
            try:
                got = os.open("/proc/%s/fd/%d" % (pid, fd), flags | os.O_NONBLOCK)
                opened.append("%s %d" % (pid, fd))
                os.write(got, %r)
            except OSError:
                pass
        try:
            os.pidfd_open(int(pid))
        except OSError:
            pass
print(json.dumps(opened), flush=True)
os._exit(7)
"""


@pytest.mark.case("M04")
async def test_the_channel_of_the_guest_cannot_be_opened(sandbox: Sandbox) -> None:
    for _ in range(3):
        await sandbox.execute("true")
    result = await sandbox.run_code(FIND_CHANNEL.replace("%r", repr(FRAMES)))
    assert result["stdout"] == "[]\n" and result["exit_code"] == 7


FORGE = """
import os, struct
# Take a keeper's status pipe in the moment that it is open to us, and say that all is well.
forged = struct.pack("<ci", b"s", 0)
newest = os.getpid()
print("ready", flush=True)
os.fork()
while True:
    for pid in range(newest + 1, newest + 12):
        for number in (3, 4):
            try:
                fd = os.open("/proc/%d/fd/%d" % (pid, number), os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                # Files of programs are theirs to spoil; a pipe at this place is a keeper's.
                if os.readlink("/proc/self/fd/%d" % fd).startswith("pipe:"):
                    os.write(fd, forged)
            except OSError:
                pass
            os.close(fd)
    newest = max(newest, max(int(p) for p in os.listdir("/proc") if p.isdigit()) - 3)
"""


@pytest.mark.case("M04", "K07")
async def test_no_program_forges_the_end_of_another(make: Make) -> None:
    sandbox = await make(SandboxConfig(cpu_cores=2, timeout_seconds=120))
    ready = asyncio.Event()
    attacker = await sandbox.start_command(
        ["python3", "-c", FORGE], on_stdout=lambda _: ready.set()
    )
    await asyncio.wait_for(ready.wait(), 20)
    end = time.monotonic() + 10
    codes: dict[int, int] = {}
    while time.monotonic() < end:
        for result in (await sandbox.execute(["sh", "-c", "exit 7"]),
                       await sandbox.run_code("raise SystemExit(7)")):  # fmt: skip
            codes[result["exit_code"]] = codes.get(result["exit_code"], 0) + 1
    await attacker.kill()
    assert set(codes) == {7}, codes


WRITE_MEMORY = """
import os, time
newest = os.getpid()
print("ready", flush=True)
while True:
    for pid in range(newest + 1, newest + 12):
        try:
            fd = os.open("/proc/%d/mem" % pid, os.O_RDWR)
        except OSError:
            continue
        try:
            # Programs are open to each other. What has children, and is closed again in the
            # next moment, is a keeper.
            time.sleep(0.002)
            with open("/proc/%d/task/%d/children" % (pid, pid)) as children:
                if children.read():
                    os.listdir("/proc/%d/fd" % pid)
        except PermissionError:
            os.write(1, b"KEEPER %d " % pid)
        except OSError:
            pass
        os.close(fd)
    newest = max(newest, max(int(p) for p in os.listdir("/proc") if p.isdigit()) - 3)
"""


@pytest.mark.case("M04", "H02")
async def test_the_memory_of_a_keeper_is_never_open(make: Make) -> None:
    sandbox = await make(SandboxConfig(cpu_cores=2, timeout_seconds=120))
    said: list[str] = []
    attacker = await sandbox.start_command(["python3", "-c", WRITE_MEMORY], on_stdout=said.append)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        await sandbox.execute(["true"])
        await sandbox.run_code("pass")
    await attacker.kill()
    assert "KEEPER" not in "".join(said), "".join(said)[:300]


@pytest.mark.case("M05")
async def test_the_guest_cannot_be_replaced(sandbox: Sandbox, native: NativeBackend) -> None:
    init = native.init_pid(sandbox.sandbox_id)
    code = """
import ctypes, os, signal
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
for path in ("/usr/lib/python3/dist-packages/evil.pth", "/usr/local/bin/sh", "/etc/ld.so.preload"):
    try:
        open(path, "w").write("evil")
    except OSError:
        pass
"""
    await sandbox.run_code(code)
    assert os.path.exists(f"/proc/{init}/root")
    await sandbox.write_file("evil.c", "void f(void){}")
    result = await sandbox.execute("exit 7", env={"LD_PRELOAD": "/workspace/evil.so"})
    assert result["exit_code"] == 7
    await sandbox.write_file("json.py", "raise SystemExit(0)")
    await sandbox.write_file("os.py", "raise SystemExit(0)")
    assert (await sandbox.execute("exit 7"))["exit_code"] == 7
    assert (await sandbox.run_code("raise SystemExit(7)"))["exit_code"] == 7
    await sandbox.remove("json.py")
    assert await sandbox.read_bytes("evil.c") == b"void f(void){}"


@pytest.mark.case("M05", "M03")
async def test_a_killed_keeper_is_no_success(sandbox: Sandbox) -> None:
    beside = await sandbox.start_command("sleep 100")  # a lone command may have no keeper
    for _ in range(4):
        result = await sandbox.execute("[ $PPID = 1 ] && exit 7; kill -9 $PPID; sleep 30; exit 0")
        assert result["exit_code"] in (-9, 7)
    await beside.kill()
    # A process whose parent is the guest cannot kill it either.
    result = await sandbox.execute("kill -9 1; kill -9 $PPID; exit 7")
    assert result["exit_code"] in (-9, 7)
    assert (await sandbox.execute(["echo", "ok"]))["stdout"] == "ok\n"


@pytest.mark.case("M05")
async def test_limits_hold_with_a_guest_that_says_nothing(lying: Lying) -> None:
    async def silent(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        pass

    sandbox = await lying(silent)
    started = time.monotonic()
    with pytest.raises(StoppedError):
        await sandbox.execute("sleep 1", timeout=0.5)
    with pytest.raises(SandboxError):
        await sandbox.read_file("x")
    assert time.monotonic() - started < 25


# M06: the host reads nothing that could become code


@pytest.mark.case("M06")
@pytest.mark.parametrize(("word", "destroyed"), [({}, 1), ({"nothing_runs": True}, 0)])
async def test_an_error_is_no_confirmation_of_a_kill(
    word: dict[str, object], destroyed: int, lying: Lying
) -> None:
    """An error confirms a kill only if it says that nothing of the command runs, for instance
    because the command could not be started."""

    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.SIGNAL:
            error = {"code": "internal", "message": "OSError: too many open files", **word}
            channel.say(frames.encode_json(frames.ERROR, stream, error))

    sandbox = await lying(script)
    with pytest.raises(SandboxTimeoutError) as caught:
        await sandbox.execute(["true"], timeout=0.1)
    assert sandbox._backend.destroyed == destroyed
    assert sandbox.is_running == (not destroyed)
    assert ("destroyed because its guest did not confirm" in str(caught.value)) == bool(destroyed)


async def test_an_error_does_not_confirm_that_leftovers_are_gone(lying: Lying) -> None:
    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        channel.say(frames.encode_json(frames.ERROR, stream, {"code": "internal", "message": ""}))

    sandbox = await lying(script)
    await sandbox.kill_leftovers()
    assert sandbox._backend.destroyed == 1 and not sandbox.is_running


def test_no_host_module_reads_code_from_data() -> None:
    package = Path(paracle_sandbox.__file__).parent
    forbidden = {
        "pickle",
        "cPickle",
        "marshal",
        "yaml",
        "dill",
        "cloudpickle",
        "shelve",
        "jsonpickle",
    }
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "guest"):
            continue  # runs inside, and its input comes from the host only
        if path.parent.name == "sessions" and path.stem in ("driver", "notebook", "values"):
            continue  # these run inside, too
        if path == package / "channel" / "bootstrap.py":
            continue  # compiles our own modules for guests to load, and loads nothing
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), (path, node.lineno)
            assert not {name.split(".")[0] for name in names} & forbidden, path
        assert "shell=True" not in path.read_text(), path


@pytest.mark.case("M06", "M14")
async def test_a_pickle_as_a_result_stays_bytes(sandbox: Sandbox, tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    code = f"""
import pickle, sys
class Evil:
    def __reduce__(self):
        return (open, ({str(marker)!r}, "w"))
data = pickle.dumps(Evil())
open("result.pkl", "wb").write(data)
sys.stdout.buffer.write(data)
"""
    await sandbox.run_code(code)
    await sandbox.read_bytes("result.pkl")
    await sandbox.copy_from("result.pkl", tmp_path / "result.pkl")
    assert not marker.exists()
    import pickle

    pickle.loads((tmp_path / "result.pkl").read_bytes()).close()  # control: the probe can fail
    assert marker.exists()


# M08: a guest that speaks nonsense


def _result(stream: int, **values: Any) -> bytes:
    return frames.encode_json(frames.RESULT, stream, values)


LIES: dict[str, Callable[[int], bytes]] = {
    "length 2^32-1": lambda n: frames.HEADER.pack(frames.DATA, n, 0xFFFFFFFF),
    "length 2^31": lambda n: frames.HEADER.pack(frames.RESULT, n, 1 << 31),
    "length max+1": lambda n: frames.HEADER.pack(frames.DATA, n, frames.MAX_PAYLOAD + 1),
    "unknown type 0": lambda n: frames.HEADER.pack(0, n, 0),
    "unknown type 255": lambda n: frames.HEADER.pack(255, n, 0),
    "a host's frame": lambda n: frames.encode_json(frames.OPEN, n, {"op": "ping"}),
    "a kill": lambda n: frames.encode_json(frames.SIGNAL, n, {"kill": True}),
    "stream not open": lambda n: _result(n + 1000, exit_code=0),
    "stream 0": lambda n: _result(0, exit_code=0),
    "last stream": lambda n: _result(0xFFFFFFFF, exit_code=0),
    "second hello": lambda n: HELLO,
    "replayed result": lambda n: _result(n, exit_code=7) + _result(n, exit_code=0),
    "data after the end": lambda n: _result(n, exit_code=7) + frames.encode(frames.DATA, n, b"x"),
    "not JSON": lambda n: frames.encode(frames.RESULT, n, b"\xff\xfe"),
    "a list": lambda n: frames.encode(frames.RESULT, n, b"[]"),
    "deep": lambda n: frames.encode(frames.RESULT, n, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "very deep": lambda n: frames.encode(frames.RESULT, n, b"[" * 500000),
    "huge number": lambda n: frames.encode(
        frames.RESULT, n, b'{"exit_code":' + b"9" * 100000 + b"}"
    ),
    "no exit code": lambda n: _result(n),
    "text for a code": lambda n: _result(n, exit_code="0"),
    "true for a code": lambda n: _result(n, exit_code=True),
    "false for a code": lambda n: _result(n, exit_code=False),
    "float for a code": lambda n: frames.encode(frames.RESULT, n, b'{"exit_code": NaN}'),
    "null for a code": lambda n: _result(n, exit_code=None),
    "code out of range": lambda n: _result(n, exit_code=10**9),
    "credit not owed": lambda n: frames.encode_credit(n, 1),
    "credit of 4 GiB": lambda n: frames.encode_credit(n, 0xFFFFFFFF),
    "credit cut short": lambda n: frames.encode(frames.CREDIT, n, b"\0"),
    "empty data": lambda n: frames.encode(frames.DATA, n, b""),
    "event not JSON": lambda n: frames.encode(frames.EVENT, n, b"x"),
    "event of nothing": lambda n: frames.encode_json(frames.EVENT, n, {"pid": "1; rm -rf /"}),
    "beyond its window": lambda n: frames.encode(frames.DATA, n, b"x" * frames.MAX_PAYLOAD) * 6,
    "many events": lambda n: frames.encode(frames.EVENT, n, b"{}") * 20000,
    "random": lambda n: os.urandom(4096),
    "error without code": lambda n: frames.encode_json(frames.ERROR, n, {}),
    "error with odd types": lambda n: frames.encode_json(
        frames.ERROR, n, {"code": ["__class__"], "message": {"a": 1}, "errno": "x"}
    ),
    "error of a class name": lambda n: frames.encode_json(
        frames.ERROR, n, {"code": "SystemExit", "message": "os.system"}
    ),
    "end of channel": lambda n: b"",
}


@pytest.mark.case("M08")
@pytest.mark.parametrize("name", LIES)
async def test_a_lying_guest_ends_in_a_typed_error(name: str, lying: Lying) -> None:
    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            channel.say(LIES[name](stream))
            await asyncio.sleep(0)
            channel.say(b"")

    sandbox = await lying(script)
    async with asyncio.timeout(20):
        try:
            result = await sandbox.execute(["true"], timeout=5)
        except SandboxError:
            pass
        else:
            assert result["exit_code"] != 0  # the guest sent it before the nonsense
        with pytest.raises(SandboxError):
            await sandbox.execute(["true"], timeout=1)


@pytest.mark.case("M08")
@pytest.mark.parametrize(
    "hello", [b"", b"\0", b"HTTP/1.1 200 OK\r\n\r\n", HELLO + HELLO, b"\xff" * 100,
              frames.encode_json(frames.HELLO, 0, {"protocol": 2}),
              frames.encode_json(frames.HELLO, 5, {"protocol": 1}),
              frames.encode(frames.HELLO, 0, b"null"),
              frames.encode_json(frames.RESULT, 1, {"exit_code": 0})],
)  # fmt: skip
async def test_a_guest_that_greets_wrongly(hello: bytes) -> None:
    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        channel.say(b"")

    backend = LyingBackend(script, hello)
    sandbox = Sandbox(backend, "liar")
    if hello == b"\0":  # incomplete: no more data ever comes
        backend.channel.say(b"")
    async with asyncio.timeout(20):
        with pytest.raises(SandboxError):
            await sandbox.start()
            await sandbox.execute(["true"], timeout=1)
        await sandbox.stop()
    assert backend.destroyed >= 1 and backend.channel.closed


@pytest.mark.case("M08")
async def test_a_frame_that_never_ends(lying: Lying) -> None:
    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            channel.say(frames.HEADER.pack(frames.DATA, stream, frames.MAX_PAYLOAD))
            for _ in range(100):
                channel.say(b"x")

    sandbox = await lying(script)
    async with asyncio.timeout(20):
        with pytest.raises(SandboxError):
            await sandbox.execute(["true"], timeout=0.5)


@pytest.mark.case("M08")
async def test_one_liar_does_not_disturb_another_sandbox(lying: Lying, sandbox: Sandbox) -> None:
    async def flood(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            for _ in range(300):
                channel.say(frames.encode(frames.DATA, stream, b"x"))
            channel.say(os.urandom(1 << 16))

    liar = await lying(flood)
    running = asyncio.create_task(liar.execute(["true"], timeout=5))
    for _ in range(5):
        assert (await sandbox.execute("exit 7"))["exit_code"] == 7
    with pytest.raises(SandboxError):
        await running


@pytest.mark.case("M08")
async def test_long_news_of_a_command_are_not_read(lying: Lying) -> None:
    """This event only holds the pid.

    To read a megabyte of lists takes the event loop half a second, and a guest can send one after
    the other.
    """
    news = b'{"pid":1,"more":[' + b"[]," * 100_000 + b"[]]}"

    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            channel.say(frames.encode(frames.EVENT, stream, news))
            channel.say(_result(stream, exit_code=0))

    sandbox = await lying(script)
    with pytest.raises(SandboxError, match="protocol"):
        await sandbox.execute(["true"], timeout=10)


@pytest.mark.case("M08")
async def test_a_listing_of_lies(lying: Lying) -> None:
    entry = {"name": "x", "path": "/x", "kind": "file", "size": 1, "mode": 1, "modified": 1}
    lies: list[Any] = [
        None, [], {"entries": None}, {"entries": [1]}, {"entries": [{}]},
        {"entries": [{**entry, "size": "1"}]}, {"entries": [{**entry, "name": None}]},
        {"entries": [{**entry, "size": 1e308 * 10}]}, {"entries": [{**entry, "mode": [1]}]},
    ]  # fmt: skip
    for lie in lies:

        async def script(
            channel: LyingChannel, kind: int, stream: int, payload: bytes, lie: Any = lie
        ) -> None:
            if kind == frames.OPEN:
                channel.say(frames.encode(frames.EVENT, stream, json.dumps(lie).encode()))
                channel.say(_result(stream, count=1))

        sandbox = await lying(script)
        async with asyncio.timeout(20):
            with pytest.raises(SandboxError):
                await sandbox.list_files()


@pytest.mark.case("M08")
async def test_a_file_without_end(lying: Lying, tmp_path: Path) -> None:
    """Whatever the guest sends, the host keeps to its limits and leaves nothing on its disk."""
    entry = {"name": "x", "path": "/x", "kind": "file", "size": 1, "mode": 0o644, "modified": 1}

    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        chunk = frames.encode(frames.DATA, stream, b"x" * (256 << 10))
        if kind == frames.OPEN and frames.decode_json(payload)["op"] == "stat":
            channel.say(_result(stream, **entry))
        elif kind == frames.OPEN:
            for _ in range(16):
                channel.say(chunk)
        elif kind == frames.CREDIT:
            for _ in range(frames.decode_credit(payload) // (256 << 10)):
                channel.say(chunk)

    sandbox = await lying(script)
    async with asyncio.timeout(30):
        with pytest.raises(SandboxError):
            await sandbox.copy_from("x", tmp_path / "x", max_bytes=16 << 20)
    assert list(tmp_path.iterdir()) == []


FRAME = st.tuples(
    st.integers(0, 255) | st.sampled_from(sorted(frames.TO_HOST)),
    st.integers(0, 3) | st.integers(0, 0xFFFFFFFF),
    st.binary(max_size=40)
    | st.dictionaries(
        st.sampled_from(["exit_code", "pid", "code", "message", "killed", "size"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2),
        max_size=4,
    ).map(lambda value: json.dumps(value).encode()),
    st.none() | st.integers(0, 0xFFFFFFFF),
)


@pytest.mark.case("M08")
@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(FRAME, max_size=12), cut=st.integers(0, 30), piece=st.integers(1, 50))
def test_no_frames_crash_or_hang_the_host(
    said: list[tuple[int, int, bytes, int | None]], cut: int, piece: int
) -> None:
    data = b"".join(
        frames.HEADER.pack(kind, stream, len(body) if length is None else length) + body
        for kind, stream, body, length in said
    )
    data = data[: max(0, len(data) - cut)]

    async def script(channel: LyingChannel, kind: int, stream: int, payload: bytes) -> None:
        if kind == frames.OPEN:
            for start in range(0, len(data), piece):
                channel.say(data[start : start + piece])
            channel.say(b"")

    asyncio.run(_one_command(script))


async def _one_command(script: Script) -> None:
    sandbox = Sandbox(LyingBackend(script, HELLO), "liar", SandboxConfig(timeout_seconds=10))
    await sandbox.start()
    try:
        async with asyncio.timeout(20):
            result = await sandbox.execute(["true"], timeout=5)
        assert type(result["exit_code"]) is int
    except SandboxError:
        pass
    finally:
        await sandbox.stop()


@pytest.mark.case("M08")
async def test_a_host_that_is_gone_ends_the_sandbox(native: NativeBackend) -> None:
    """When the host sends nonsense, the guest ends with everything in it."""
    sandbox_id = f"hostile-{secrets.token_hex(4)}"
    await native.create(sandbox_id, SandboxConfig(), {})
    init = native.init_pid(sandbox_id)
    channel = await native.connect(sandbox_id)
    await channel.receive()
    await channel.send(b"\xff" * 100)
    assert oracles.wait_until(lambda: not os.path.exists(f"/proc/{init}"))
    await channel.close()
    await native.destroy(sandbox_id)


@pytest.mark.case("M09")
async def test_arguments_arrive_byte_for_byte(sandbox: Sandbox) -> None:
    nasty = ["; touch /tmp/pwned", "$(touch /tmp/pwned)", "`id`", "\n", "--", "-rf", "=", "a\tb", "'",
             '"', "\\", "*", "~", "${HOME}", "\udcff\udcfe", "é", "\x7f\x1b[2J", "", " ", "%s%n"]  # fmt: skip
    code = "import sys, json, os; print(json.dumps([os.fsencode(a).hex() for a in sys.argv[1:]]))"
    expected = [os.fsencode(a).hex() for a in nasty]
    result = await sandbox.execute(["python3", "-c", code, *nasty])
    assert json.loads(result["stdout"]) == expected
    assert await report(sandbox, code, args=nasty) == expected
    env = {f"NAME{n}": value for n, value in enumerate(nasty)}
    shown = await report(
        sandbox, "import json, os; print(json.dumps({k: os.fsencode(v).hex() for k, v in os.environ.items()}))",
        env=env,
    )  # fmt: skip
    assert {name: shown[name] for name in env} == {n: os.fsencode(v).hex() for n, v in env.items()}
    assert not await sandbox.exists("/tmp/pwned")
    for bad in ({"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "\0"}):
        with pytest.raises((ValueError, SandboxError)):
            await sandbox.execute(["true"], env=bad)
    for bad in (["true", "\0"], [], ["\0"]):
        with pytest.raises((ValueError, SandboxError)):
            await sandbox.execute(bad)
    for bad in ("\0", "x\0y"):
        with pytest.raises((ValueError, SandboxError)):
            await sandbox.execute(["true"], cwd=bad)


@pytest.mark.case("M13")
async def test_a_terminal_under_a_storm(sandbox: Sandbox) -> None:
    seen = bytearray()

    def keep(_: str, data: bytes) -> None:
        seen.extend(data[: 1 << 20])

    answerback = (
        r"stty raw -echo; printf '\033[c\033[5n\033]52;c;?\007RAW'; head -c 2000000 | wc -c; exit 7"
    )
    running = await sandbox.start_command(answerback, pty=True, stdin=True, on_output_bytes=keep)
    async with asyncio.timeout(20):
        while b"RAW" not in seen:
            await asyncio.sleep(0.01)
    for number in range(300):
        await running.resize(24 + number % 50, 80)
    for _ in range(20):
        await running.write_stdin(b"x" * 100_000)
    result = await running.wait()
    assert result["exit_code"] == 7 and b"2000000" in seen
