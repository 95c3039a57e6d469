"""The core of the contract with each interpreter inside: Python 3.8 to 3.14.

The guest alone speaks to a test over its socket; then native sandboxes run it, confined.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from pythons import require_interpreter

from paracle_sandbox import Sandbox
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.sessions import PythonSession
from paracle_sandbox.settings import load_settings
from paracle_sandbox.testing.conformance import Check, all_checks, run_check

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "guest"))

from wireclient import GuestClient  # noqa: E402

VERSIONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
CORE = frozenset({
    "commands.exit_codes", "commands.stdin_is_fed",
    "python_programs.hello", "python_programs.an_exception_is_a_traceback",
    "python_programs.it_is_the_main_program", "python_programs.processes_and_threads",
    "python_programs.it_runs_in_the_working_directory",
    "python_programs.runs_share_nothing_but_files", "python_programs.exit_handlers_run",
    "files.write_then_read", "files.listing_and_stat", "files.paths_that_leave_are_refused",
    "transfers.a_tree_there_and_back",
    "streams.callbacks_see_output_as_it_comes", "terminals.state_is_kept",
    "stopping.a_timeout_is_typed", "stopping.a_timeout_kills_the_whole_tree",
    "limits.too_much_memory",
})  # fmt: skip
CHECKS = [check for check in all_checks() if check.name in CORE]

# As in the modules of the contract for each backend: what is known to fail, and why.
KNOWN_FAILURES = {
    ("3.14", "python_programs.it_runs_in_the_working_directory"):
        "the guest starts programs of 3.14 as `python3 FILE`: the folder of FILE comes first",
}  # fmt: skip

HELLO = "import sys; print('hello from %d.%d' % sys.version_info[:2])"


def test_the_core_is_part_of_the_contract() -> None:
    assert {check.name for check in CHECKS} == CORE


# The guest alone


@pytest.mark.parametrize("version", VERSIONS)
def test_the_guest(version: str, tmp_path: Path) -> None:
    python = require_interpreter(version)
    with GuestClient(tmp_path, python=python) as guest:
        ran = guest.run(python, "-c", HELLO)
        assert ran.result == {"exit_code": 0} and ran.stdout.decode().split()[-1] == version
        failed = guest.run("sh", "-c", "echo no >&2; exit 3")
        assert failed.result == {"exit_code": 3} and failed.stderr == b"no\n"

        program = guest.open(
            "python", path="main.py", source=f"{HELLO}\nprint(input())", argv=[], stdin=True
        )
        guest.data(program, b"and input\n")
        guest.end(program)
        answer = guest.wait(program)
        assert answer.result == {"exit_code": 0}, answer.error or bytes(answer.stderr)
        assert answer.stdout.decode() == f"hello from {version}\nand input\n"

        written = guest.open("write", path="folder/file.txt", parents=True)
        guest.data(written, b"text")
        guest.end(written)
        assert guest.wait(written).error is None
        assert (tmp_path / "folder" / "file.txt").read_bytes() == b"text"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_guest_kills_a_whole_tree(version: str, tmp_path: Path) -> None:
    python = require_interpreter(version)
    with GuestClient(tmp_path, python=python) as guest:
        stream = guest.exec("sh", "-c", "sleep 1000 & sleep 1000 & echo ready; wait")
        guest.wait_until(lambda: b"ready" in guest.answer(stream).stdout)
        guest.signal(stream, kill=True)
        answer = guest.wait(stream)
        assert answer.ended
        left = [path for path in Path("/proc").glob("[0-9]*") if is_of(path, guest.process.pid)]
        assert not left


def is_of(path: Path, guest: int) -> bool:
    """Whether a process is a child of the guest, and is one that sleeps."""
    try:
        parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        return parent == guest and b"sleep\x001000" in (path / "cmdline").read_bytes()
    except OSError:
        return False


# In a native sandbox


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=VERSIONS,
)
async def native(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, NativeBackend]]:
    """The backend with another interpreter inside."""
    python = require_interpreter(request.param)
    own = NativeBackend()
    try:
        health = await own.health()
    finally:
        await own.close()
    if not health.available:
        pytest.skip(f"native sandboxes are not available: {health.detail} {health.remedy}")
    backend = NativeBackend(replace(load_settings(), python=python))
    try:
        async with Sandbox(backend, new_sandbox_id()):
            pass
        yield request.param, backend
    finally:
        await backend.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_native_sandbox_has_this_interpreter(native: tuple[str, NativeBackend]) -> None:
    version, backend = native
    async with Sandbox(backend, new_sandbox_id()) as sandbox:
        ran = await sandbox.run_code(HELLO)
        assert ran["stdout"] == f"hello from {version}\n"
        anew = await sandbox.execute(["python3", "-c", HELLO])
        assert anew["stdout"] == f"hello from {version}\n"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_the_core_of_the_contract(
    request: pytest.FixtureRequest, native: tuple[str, NativeBackend], check: Check
) -> None:
    version, backend = native
    if reason := KNOWN_FAILURES.get((version, check.name)):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    spawner = await backend.spawner(backend.templates.get("default"))
    kept = {"root", "identity", "processes", "network", "usage", "pids", "disk"}
    if spawner.posture["cgroup_version"]:
        kept |= {"memory"}
    if missing := check.missing(frozenset(kept)):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}")
    await run_check(check, backend, frozenset(kept))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_remembers(native: tuple[str, NativeBackend]) -> None:
    version, backend = native
    async with Sandbox(backend, new_sandbox_id()) as sandbox, PythonSession(sandbox) as session:
        await session.run("import json, sys\nx = [1, 2]")
        shown = await session.run("json.dumps([*x, '%d.%d' % sys.version_info[:2]])")
        assert shown["error"] is None
        assert json.loads(shown["text"].strip("'")) == [1, 2, version]
        failed = await session.run("1 / 0")
        assert failed["error"] is not None and failed["error"]["name"] == "ZeroDivisionError"
        assert (await session.run("len(x)"))["text"] == "2"
