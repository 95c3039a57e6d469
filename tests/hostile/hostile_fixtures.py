"""Fixtures of the hostile tests.

sandbox   a started sandbox of the native backend; what it leaves behind is an error
weak      the same programs without confinement, in namespaces that are thrown away: every
          probe has to report a breach there, or it proves nothing
fake      a sandbox of the FakeBackend, which isolates nothing
lying     sandboxes whose guest is a script of the test
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracles
import pytest
from liars import HELLO, LyingBackend, Script

from paracle_sandbox.backends.machine.process_isolation import read_posture
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend

Make = Callable[..., Awaitable[Sandbox]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here) and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="the hostile tests need root: run as root"))


# The native backend


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    base = tmp_path_factory.mktemp("native")
    with _own_instance(base / "state"):
        yield Settings(
            state_dir=str(base / "state"), data_dir=str(base / "data"), template_build=False
        )


@contextlib.contextmanager
def _own_instance(state: Path) -> Iterator[None]:
    """Take an instance number that tests beside this one do not have.

    Uids and cgroups follow from it, and each state directory counts it anew.
    """
    (state / "instances").mkdir(parents=True)
    taken = []
    for number in range(1 + os.getpid() % 100):
        taken.append(os.open(state / "instances" / str(number), os.O_RDWR | os.O_CREAT))
        fcntl.flock(taken[-1], fcntl.LOCK_EX)
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


@pytest.fixture(scope="session")
def native(settings: Settings) -> Iterator[NativeBackend]:
    backend = NativeBackend(settings)
    yield backend
    asyncio.run(backend.close())


@pytest.fixture
async def make(native: NativeBackend) -> AsyncIterator[Make]:
    """Return a function that starts further sandboxes: ``await make(config, labels=...)``."""
    started: list[Sandbox] = []

    async def start(config: SandboxConfig | None = None, **options: Any) -> Sandbox:
        sandbox = Sandbox(native, f"hostile-{secrets.token_hex(6)}", config, **options)
        started.append(sandbox)
        await sandbox.start()
        return sandbox

    yield start
    for sandbox in started:
        await _end(native, sandbox)


@pytest.fixture
async def sandbox(make: Make) -> Sandbox:
    return await make(SandboxConfig(timeout_seconds=120))


async def _end(native: NativeBackend, sandbox: Sandbox) -> None:
    """Stop the sandbox, and look for what it left behind (rule 4 of the catalogue)."""
    if sandbox.sandbox_id not in native._owned:
        await sandbox.stop()
        return
    record = native._owned[sandbox.sandbox_id].record
    uid = _uid_of(native, sandbox)
    await sandbox.stop()
    if uid is not None:
        assert oracles.wait_until(lambda: not oracles.processes_of_uid(uid)), "processes are left"
    left = [path for path in record["cgroups"].values() if Path(path).exists()]
    assert not left, f"cgroups are left: {left}"
    state = Path(native.settings.state_dir)
    assert not (state / f"{sandbox.sandbox_id}.json").exists(), "its record is left"


def _uid_of(native: NativeBackend, sandbox: Sandbox) -> int | None:
    try:
        return read_posture(native.init_pid(sandbox.sandbox_id)).uids[0]
    except OSError:
        return None


@pytest.fixture
def host_uid(native: NativeBackend) -> Callable[[Sandbox], int]:
    def uid(sandbox: Sandbox) -> int:
        return read_posture(native.init_pid(sandbox.sandbox_id)).uids[0]

    return uid


# Running probes without confinement


@dataclass
class Weak:
    """Run a probe as root of the host, but in namespaces of its own, where it may do harm."""

    directory: Path

    def report(self, code: str, *arguments: str, namespaces: bool = True) -> Any:
        wrap = ["unshare", "-mpinuf", "--mount-proc", "--kill-child"] if namespaces else []
        done = subprocess.run(
            [*wrap, sys.executable, "-I", "-c", code, *arguments],
            cwd=self.directory, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def weak(tmp_path: Path) -> Weak:
    (tmp_path / "weak").mkdir()
    return Weak(tmp_path / "weak")


@pytest.fixture
async def fake() -> AsyncIterator[Sandbox]:
    backend = FakeBackend()
    async with Sandbox(backend, f"fake-{secrets.token_hex(4)}") as sandbox:
        yield sandbox
    await backend.close()


# Guests that lie


@pytest.fixture
async def lying() -> AsyncIterator[Callable[..., Awaitable[Sandbox]]]:
    started: list[Sandbox] = []

    async def start(script: Script, hello: bytes = HELLO) -> Sandbox:
        config = SandboxConfig(timeout_seconds=10)
        sandbox = Sandbox(LyingBackend(script, hello), "liar", config)
        started.append(sandbox)
        await sandbox.start()
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop()
