"""Tests of a spawner's process that is started before its task is known."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paracle_sandbox import SandboxConfig, load_settings
from paracle_sandbox.backends.native import prestart, spawner_process
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import BackendUnavailableError
from paracle_sandbox.jail import kernel, launch
from paracle_sandbox.sandbox.sandbox import Sandbox


@pytest.fixture(autouse=True)
def nothing_ahead():
    assert not spawner_process._ahead
    yield
    for launched in spawner_process._ahead.values():
        launched.process.kill()
        launched.process.wait()
    spawner_process._ahead.clear()


def end(launched: spawner_process.Launched) -> int:
    """Hang up without a word. Returns its exit status."""
    launched.control.close()
    assert launched.process.stderr is not None
    assert launched.process.stderr.read() == b""
    launched.process.stderr.close()
    return launched.process.wait(timeout=30)


def test_one_that_is_not_used_ends_by_itself():
    spawner_process.launch_ahead()
    assert end(spawner_process.launch(spawner_process.default_python())) == 0


def test_the_next_launch_takes_it_and_the_one_after_does_not():
    spawner_process.launch_ahead()
    spawner_process.launch_ahead()
    (waiting,) = spawner_process._ahead.values()
    first = spawner_process.launch(spawner_process.default_python())
    second = spawner_process.launch(spawner_process.default_python())
    assert first is waiting and second is not waiting
    assert [end(first), end(second)] == [0, 0]


async def test_a_sandbox_runs_on_it():
    spawner_process.launch_ahead()
    (waiting,) = spawner_process._ahead.values()
    backend = NativeBackend()
    try:
        async with Sandbox(backend, "ahead") as sandbox:
            assert (await sandbox.run_code("print(6 * 7)"))["stdout"] == "42\n"
            assert not spawner_process._ahead and waiting.process.poll() is None
    finally:
        await backend.close()
    assert waiting.process.poll() == 0


@pytest.fixture
def settings(tmp_path):
    return replace(load_settings(), state_dir=str(tmp_path / "state"), stock=0)


async def test_one_that_was_told_makes_the_sandbox_ahead_of_the_backend(settings, monkeypatch):
    monkeypatch.delenv("SANDBOX_MODE", raising=False)
    prestart.start_early()
    (waiting,) = spawner_process._ahead.values()
    assert prestart.prepare_early(settings, SandboxConfig())
    while not list(Path(settings.state_dir).glob("slot-*.json")):
        assert waiting.process.poll() is None
        await asyncio.sleep(0.01)
    backend = NativeBackend(settings)
    try:
        async with Sandbox(backend, "ahead") as sandbox:
            assert (await sandbox.run_code("print(6 * 7)"))["stdout"] == "42\n"
            assert not spawner_process._ahead and waiting.process.poll() is None
            records = sorted(path.name for path in Path(settings.state_dir).glob("*.json"))
            assert len(records) == 2, "its own and that of the child made ahead, and no other"
    finally:
        await backend.close()
    assert waiting.process.poll() == 0


async def test_limits_and_shape_that_were_not_foreseen_hold(settings):
    spawner_process.launch_ahead()
    prestart.prepare_early(settings, SandboxConfig())
    wanted = SandboxConfig(memory_mb=256, working_dir="/data", max_processes=32)
    backend = NativeBackend(settings)
    try:
        async with Sandbox(backend, "other", wanted) as sandbox:
            assert (await sandbox.run_code("import os; print(os.getcwd())"))["stdout"] == "/data\n"
            assert (await sandbox.get_stats())["memory_limit_mb"] == 256
    finally:
        await backend.close()


async def test_one_that_was_told_something_else_ends_before_another_starts(settings):
    spawner_process.launch_ahead()
    (waiting,) = spawner_process._ahead.values()
    prestart.prepare_early(replace(settings, stock=1), SandboxConfig())
    backend = NativeBackend(settings)
    try:
        async with Sandbox(backend, "anew") as sandbox:
            assert (await sandbox.run_code("print(1)"))["stdout"] == "1\n"
            assert waiting.process.poll() == 0
    finally:
        await backend.close()


def test_one_that_was_told_and_is_not_used_leaves_nothing(settings):
    spawner_process.launch_ahead()
    (waiting,) = spawner_process._ahead.values()
    prestart.prepare_early(settings, SandboxConfig())
    prestart.end_early()
    assert not spawner_process._ahead and waiting.process.poll() == 0
    assert [path.name for path in Path(settings.state_dir).rglob("*")] == ["instances"]


def test_nothing_is_made_in_a_directory_of_others(settings, tmp_path):
    (tmp_path / "state").mkdir(mode=0o777)
    (tmp_path / "state").chmod(0o777)
    spawner_process.launch_ahead()
    assert not prestart.prepare_early(settings, SandboxConfig())
    prestart.end_early()
    assert not list((tmp_path / "state").iterdir())


def test_no_descriptor_of_the_callers_is_passed_on():
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    launched = spawner_process.launch(spawner_process.default_python())
    os.close(theirs)
    try:
        ready, _, _ = select.select([ours], [], [], 30)
        assert ready and os.read(ours, 1) == b""
    finally:
        os.close(ours)
        assert end(launched) == 0


@pytest.mark.parametrize("name", ["SANDBOX_MODE", "SANDBOX_API_URL", "PARACLE_PYTHON"])
def test_whoever_may_want_another_backend_gets_none_ahead(name, monkeypatch):
    monkeypatch.setenv(name, "other")
    prestart.start_early()
    assert not spawner_process._ahead
    monkeypatch.delenv(name)
    prestart.start_early()
    assert end(spawner_process._ahead.popitem()[1]) == 0


def test_why_it_cannot_come_up_is_told_whenever_the_owner_speaks(monkeypatch):
    """This includes an owner that has sent its request before: unread data would discard the
    response."""

    def refuse(_flags: int) -> None:
        raise PermissionError(1, "refused")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(b"{}")
        pid = os.fork()
        if pid == 0:
            monkeypatch.setattr(kernel, "unshare", refuse)
            launch.main(theirs, "")
        theirs.close()
        os.waitpid(pid, 0)
        until_all_have_hung_up = select.poll()
        until_all_have_hung_up.register(ours, select.POLLHUP)
        assert until_all_have_hung_up.poll(30_000)
        told = json.loads(ours.recv(1 << 16))
    assert (told["event"], told["message"]) == ("failed", "[Errno 1] refused")
    assert told["step"] in ("pid namespace", "user namespace")


@pytest.mark.parametrize("python", ["/nonexistent/python3", "/etc/passwd"])
async def test_an_interpreter_that_cannot_be_started_is_named(python: str, tmp_path: Path) -> None:
    places = {"state_dir": str(tmp_path / "state"), "data_dir": str(tmp_path / "data")}
    backend = NativeBackend(replace(load_settings(), python=python, template_build=False, **places))
    with pytest.raises(BackendUnavailableError, match="PARACLE_PYTHON") as caught:
        await backend.create("some-sandbox", SandboxConfig(), {})
    assert python in str(caught.value)
    await backend.close()


async def test_an_interpreter_that_takes_long_keeps_no_event_loop(tmp_path: Path) -> None:
    """The interpreter is run to learn its version, and here it waits for this very loop."""
    gate, python = tmp_path / "gate", tmp_path / "python"
    os.mkfifo(gate)
    python.write_text(f"#!/bin/sh\nread line < {gate}\necho $line >&2\nexit 1\n")
    python.chmod(0o755)
    places = {"state_dir": str(tmp_path / "state"), "data_dir": str(tmp_path / "data")}
    wanted = replace(load_settings(), python=str(python), template_build=False, **places)
    backend = NativeBackend(wanted)
    creating = asyncio.create_task(backend.create("some-sandbox", SandboxConfig(), {}))
    await asyncio.sleep(0)
    with os.fdopen(os.open(gate, os.O_RDWR), "w") as file:
        file.write("opened\n")
        file.flush()
        with pytest.raises(BackendUnavailableError, match="does not run.*opened"):
            await creating
    await backend.close()
