"""What breaks under a sandbox is told as such, soon, and harms no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import oracles
import pytest
from container_fixtures import BACKENDS, Make, changed

import engines
import immutable
from event_loops import use_in_several
from paracle_sandbox.backends.docker.backend import DockerBackend, Owned
from paracle_sandbox.backends.docker.engine import EngineRefused
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    DockerConnectionError,
    ResourceLimitError,
    SandboxCleanupError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
)
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.command import Command
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

LOOP = "print('begun', flush=True)\nwhile True: pass"


async def begun(sandbox: Sandbox) -> Command:
    command = await sandbox.start_code(LOOP)
    said = b""
    async for _, piece in command.output():
        said += piece
        if said.endswith(b"\n"):
            break
    return command


async def dies_with(sandbox: Sandbox, deed: Callable[[], Awaitable[None]]) -> SandboxError:
    """The error of a program under which something is killed, which comes within 5 seconds."""
    command = await begun(sandbox)
    began = time.monotonic()
    await deed()
    with pytest.raises(SandboxError) as caught:
        await command.wait(timeout=20)
    assert time.monotonic() - began < 5
    assert not sandbox.is_running
    return caught.value


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_the_first_process_is_killed(make: Make, backend: DockerBackend) -> None:
    """R07."""
    sandbox, other = await make(), await make()
    owned = backend._owned[sandbox.sandbox_id]

    async def kill() -> None:
        os.kill(backend.init_pid(sandbox.sandbox_id), signal.SIGKILL)

    error = await dies_with(sandbox, kill)
    assert isinstance(error, SandboxExecutionError)
    assert "The sandbox died while the program ran" in str(error) and error.stdout == "begun\n"
    assert await other.run_command("echo alive") == "alive\n"
    await sandbox.stop()
    await nothing_is_left(backend, sandbox, owned)


async def nothing_is_left(backend: DockerBackend, sandbox: Sandbox, owned: Owned) -> None:
    """The Clean of the catalogue, for what an engine makes of one sandbox."""
    assert sandbox.sandbox_id not in {info.sandbox_id for info in await backend.list_sandboxes()}
    with pytest.raises(EngineRefused):
        await backend.engine.inspect(owned.container)
    assert owned.cgroups, "it was not asked where its processes are counted"

    def left() -> list[str]:
        groups = [path for path in owned.cgroups.values() if Path(path).exists()]
        return groups + [f"process {pid}" for pid in _processes("", owned.container)]

    assert oracles.wait_until(lambda: not left()), left()


async def test_it_is_removed_under_us(make: Make, backend: DockerBackend) -> None:
    sandbox = await make()

    async def remove() -> None:
        await backend.engine.remove(f"paracle-sandbox-{sandbox.sandbox_id}")

    error = await dies_with(sandbox, remove)
    assert isinstance(error, SandboxExecutionError)
    await sandbox.stop()
    async with Sandbox(backend, sandbox.sandbox_id) as again:
        assert await again.run_command("echo again") == "again\n"


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_death_for_want_of_memory_is_told_apart(make: Make) -> None:
    sandbox = await make(SandboxConfig(memory_mb=128))
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.run_code("x = bytearray(b'1') * (1 << 30)")
    assert caught.value.resource_type == "memory"


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_its_shim_is_killed(make: Make, backend: DockerBackend) -> None:
    """R10: the engine's keeper of the container is gone; it is reported dead, and goes."""
    sandbox = await make()
    owned = backend._owned[sandbox.sandbox_id]
    shim = _parent(backend.init_pid(sandbox.sandbox_id))
    assert "shim" in Path(f"/proc/{shim}/comm").read_text()

    async def kill() -> None:
        os.kill(shim, signal.SIGKILL)

    await dies_with(sandbox, kill)
    await sandbox.stop()
    await nothing_is_left(backend, sandbox, owned)


@pytest.mark.parametrize("engine", ["gvisor"])
@pytest.mark.parametrize("part", ["runsc-gofer", "runsc-sandbox"])
@pytest.mark.clock
async def test_a_part_of_gvisor_is_killed(make: Make, backend: DockerBackend, part: str) -> None:
    """R10: the sentry, which is the kernel inside, or the gofer, which opens files for it."""
    sandbox, other = await make(), await make()
    owned = backend._owned[sandbox.sandbox_id]
    pids = _processes(part, owned.container)
    assert len(pids) == 1, pids

    async def kill() -> None:
        os.kill(pids[0], signal.SIGKILL)

    error = await dies_with(sandbox, kill)
    assert isinstance(error, SandboxExecutionError) and error.stdout == "begun\n"
    began = time.monotonic()
    await sandbox.stop()
    assert time.monotonic() - began < 10
    await nothing_is_left(backend, sandbox, owned)
    assert await other.run_command("echo alive") == "alive\n"


def _processes(program: str, word: str) -> list[int]:
    """Those whose command line begins with ``program`` and has ``word`` in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if line.startswith(program.encode()) and word.encode() in line:
                found.append(int(path.parent.name))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Engines that do not answer as they should


@dataclass
class FalseEngine:
    """Listens where an engine would, and answers each connection with ``answer``."""

    answer: bytes | None
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                if self.answer is not None:
                    writer.write(self.answer)
                    await writer.drain()
                    break
        writer.close()


def _http(status: str, body: bytes, length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


ANSWERS = {
    "hangs": None,
    "500": _http("500 Internal Server Error", b'{"message": "broken"}'),
    "truncated": _http("200 OK", b'{"ApiVersion": "1.4', 400),
    "no JSON": _http("200 OK", b"<html>"),
    "no message": _http("503 Service Unavailable", b"{}"),
    "hangs up": b"",
    "no HTTP": b"\x00\x01\x02\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.clock
async def test_an_engine_that_answers_nonsense(
    answer: bytes | None, settings: Settings, tmp_path: Path
) -> None:
    """R09: each call ends by its own deadline, with an error of ours, and the next is quick."""
    false = FalseEngine(answer)
    server = await asyncio.start_unix_server(false.serve, tmp_path / "sock")
    backend = BACKENDS["docker"](changed(settings, docker_host=f"unix://{tmp_path}/sock"))
    backend.engine.question_seconds = 2.0
    for limit in (8.0, 4.0):
        began = time.monotonic()
        async with asyncio.timeout(30):
            with pytest.raises(SandboxCreationError) as caught:
                await backend.create("x", SandboxConfig(), {})
        assert time.monotonic() - began < limit
        assert str(caught.value)
    if answer is None:
        assert isinstance(caught.value, DockerConnectionError)
        assert "does not answer" in str(caught.value)
    assert not (await backend.health()).available
    await backend.close()
    server.close()
    for writer in false.writers:
        writer.transport.abort()
    await server.wait_closed()
    await asyncio.sleep(0.01)  # the loop lets go of what was aborted


async def test_other_backends_work_while_an_engine_hangs(
    settings: Settings, tmp_path: Path, backend: DockerBackend
) -> None:
    """R09: who waits for the one that does not answer stands in nobody's way."""
    false = FalseEngine(None)
    server = await asyncio.start_unix_server(false.serve, tmp_path / "sock")
    hung = BACKENDS["docker"](changed(settings, docker_host=f"unix://{tmp_path}/sock"))
    hung.engine.question_seconds = 200.0
    waiting = asyncio.ensure_future(hung.create("x", SandboxConfig(), {}))
    async with asyncio.timeout(30):
        while not false.writers:
            await asyncio.sleep(0.01)
    async with Sandbox(backend, new_sandbox_id()) as sandbox:
        assert await sandbox.run_command("echo works") == "works\n"
    assert not waiting.done(), "it did not hang: this test shows nothing"
    server.close()
    for writer in false.writers:
        writer.transport.abort()
    with pytest.raises(SandboxCreationError):
        await waiting
    await hung.close()
    await server.wait_closed()


@pytest.mark.clock
async def test_an_address_that_swallows_connections(settings: Settings) -> None:
    """R09: a machine that is there and says nothing, not even to the first packet."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):  # the queue of those who wait to be accepted is full
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        host = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        backend = BACKENDS["docker"](changed(settings, docker_host=host))
        began = time.monotonic()
        with pytest.raises(DockerConnectionError, match="Docker not available"):
            await backend.create("x", SandboxConfig(), {})
        assert time.monotonic() - began < 15
        await backend.close()


# An engine of our own, to be killed


@pytest.fixture
async def mortal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mortal]:
    engines.require("docker")
    with tempfile_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


class Mortal:
    """A private dockerd with one image."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.host = f"unix://{base}/d.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            "dockerd", "--data-root", f"{self.base}/data", "--exec-root", f"{self.base}/exec",
            "--pidfile", f"{self.base}/pid", "-H", self.host, "--bridge=none", "--iptables=false",
        ]  # fmt: skip
        # Killed, it may stay a zombie whom nobody reaps, and dockerd would take it for alive.
        (self.base / "exec/containerd/containerd.pid").unlink(missing_ok=True)
        log = (self.base / "log").open("ab")
        with log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        up = oracles.wait_until(lambda: self.docker("version").returncode == 0, 60)
        assert up, (self.base / "log").read_text()[-3000:]

    def docker(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, "DOCKER_HOST": self.host}
        return subprocess.run(["docker", *arguments], capture_output=True, env=env, check=False)

    def kill_all(self) -> None:
        """The engine, its containerd and every shim, at one stroke."""
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def _family(self) -> list[int]:
        mark = str(self.base).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)


@contextlib.contextmanager
def tempfile_engine(base: Path) -> Iterator[Mortal]:
    mortal = Mortal(base)
    mortal.start()
    try:
        source = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
        with subprocess.Popen(["docker", "save", "paracle/sandbox:latest"], env=source,
                              stdout=subprocess.PIPE) as save:  # fmt: skip
            load = {**os.environ, "DOCKER_HOST": mortal.host}
            subprocess.run(["docker", "load"], stdin=save.stdout, env=load, check=True,
                           capture_output=True)  # fmt: skip
        yield mortal
    finally:
        if mortal.process is not None and mortal.process.poll() is None:
            mortal.stop()
        mortal.kill_all()
        _unmount_below(base)
        shutil.rmtree(base, ignore_errors=True)


def _unmount_below(base: Path) -> None:
    """What an engine that was killed cannot put away."""
    places = [line.split()[4] for line in oracles.mountinfo()]
    for place in reversed([place for place in places if place.startswith(f"{base}/")]):
        subprocess.run(["umount", "-l", place], check=False)


@pytest.mark.timeout(240)
async def test_the_engine_goes_and_comes_back(mortal: Mortal, settings: Settings) -> None:
    """R08: stopped, then killed with all its helpers, each time under a running program."""
    backend = BACKENDS["docker"](changed(settings, docker_host=mortal.host))
    for end in (mortal.stop, mortal.kill_all):
        sandbox = Sandbox(backend, "lost")
        await sandbox.start()
        command = await begun(sandbox)
        began = time.monotonic()
        await asyncio.to_thread(end)
        with pytest.raises(SandboxExecutionError, match="The sandbox died"):
            await command.wait(timeout=30)
        assert time.monotonic() - began < 15
        with pytest.raises(DockerConnectionError, match="not running"):
            await sandbox.stop()
        with pytest.raises(DockerConnectionError, match="not running"):
            await backend.create("refused", SandboxConfig(), {})
        await asyncio.to_thread(mortal.start)
        await sandbox.stop()
        async with Sandbox(backend, "lost") as again:
            assert await again.run_command("echo back") == "back\n"
        assert not await backend.list_sandboxes()
    await backend.close()


@pytest.mark.parametrize("stock", [0, 1])
def test_one_manager_serves_one_event_loop_after_the_other(settings: Settings, stock: int) -> None:
    """J6: connections belong to the loop that they were made in."""
    backend = BACKENDS["docker"](replace(settings, stock=stock))
    use_in_several(SandboxManager(backend=backend))


@pytest.mark.parametrize("how", ["destroy", "sweep", "close"])
async def test_files_that_could_not_be_removed_are_tried_again(
    backend: DockerBackend, make: Make, how: str
) -> None:
    sandbox = await make()
    workspaces = await backend.store.get()
    assert workspaces is not None
    folder = f"{workspaces.path}/{backend._owned[sandbox.sandbox_id].workspace}"
    immutable.mark(folder, immutable=True)
    try:
        for _ in range(2):
            with pytest.raises(SandboxCleanupError, match="left files"):
                await backend.destroy(sandbox.sandbox_id)
        await backend.sweep()
        assert Path(folder).exists()
    finally:
        immutable.mark(folder, immutable=False)
    if how == "destroy":
        await backend.destroy(sandbox.sandbox_id)
    elif how == "sweep":
        await backend.sweep()
    else:
        await backend.close()
    assert not Path(folder).exists()
