"""A spawner's process that is started before it is known what for."""

from __future__ import annotations

import pytest

from paracle_sandbox.backends import ahead
from paracle_sandbox.backends.native import launcher
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.sandbox import Sandbox


@pytest.fixture(autouse=True)
def nothing_ahead():
    assert not launcher._ahead
    yield
    for launched in launcher._ahead.values():
        launched.process.kill()
        launched.process.wait()
    launcher._ahead.clear()


def end(launched: launcher.Launched) -> int:
    """Hang up without a word; its exit status."""
    launched.control.close()
    assert launched.process.stderr is not None
    assert launched.process.stderr.read() == b""
    launched.process.stderr.close()
    return launched.process.wait(timeout=30)


def test_one_that_is_not_used_ends_by_itself():
    launcher.launch_ahead()
    assert end(launcher.launch(launcher.default_python())) == 0


def test_the_next_launch_takes_it_and_the_one_after_does_not():
    launcher.launch_ahead()
    launcher.launch_ahead()
    (waiting,) = launcher._ahead.values()
    first = launcher.launch(launcher.default_python())
    second = launcher.launch(launcher.default_python())
    assert first is waiting and second is not waiting
    assert [end(first), end(second)] == [0, 0]


async def test_a_sandbox_runs_on_it():
    launcher.launch_ahead()
    (waiting,) = launcher._ahead.values()
    backend = NativeBackend()
    try:
        async with Sandbox(backend, "ahead") as sandbox:
            assert (await sandbox.run_code("print(6 * 7)"))["stdout"] == "42\n"
            assert not launcher._ahead and waiting.process.poll() is None
    finally:
        await backend.close()
    assert waiting.process.poll() == 0


@pytest.mark.parametrize("name", ["SANDBOX_MODE", "SANDBOX_API_URL", "PARACLE_PYTHON"])
def test_whoever_may_want_another_backend_gets_none_ahead(name, monkeypatch):
    monkeypatch.setenv(name, "other")
    ahead.start_ahead()
    assert not launcher._ahead
    monkeypatch.delenv(name)
    ahead.start_ahead()
    assert end(launcher._ahead.popitem()[1]) == 0
