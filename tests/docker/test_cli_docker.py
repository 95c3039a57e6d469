"""The command line over sandboxes of another process, which containers can be entered from."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import engines
import loop_watch
from paracle_sandbox import Sandbox, SandboxConfig
from paracle_sandbox.backends.base import Backend
from paracle_sandbox.backends.registry import get_backend
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import load_settings


class Commands:
    """Runs ``paracle sandbox`` in a process of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **loop_watch.watched_environment(), "DOCKER_HOST": engines.DOCKER_HOST,
            "HOME": str(home),
            "PARACLE_STATE_DIR": f"{home}/state", "PARACLE_DATA_DIR": f"{home}/data",
            "INCUS_SOCKET": f"{home}/none.sock",
        }  # fmt: skip

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "paracle_sandbox", "sandbox", *words]

    def __call__(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words), env=self.env, cwd=self.home, capture_output=True, text=True,
            input=stdin, timeout=120,
        )  # fmt: skip


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture(params=["docker", "gvisor"])
async def sandbox(request: pytest.FixtureRequest, commands: Commands) -> AsyncIterator[Sandbox]:
    engines.require(request.param)
    backend: Backend = get_backend(request.param, load_settings(commands.env))
    config = SandboxConfig(base_image="paracle/sandbox:latest")
    try:
        async with Sandbox(backend, new_sandbox_id(), config) as sandbox:
            yield sandbox
    finally:
        await backend.close()


async def test_a_command_in_it(sandbox: Sandbox, commands: Commands) -> None:
    """By the beginning of its id; what its owner does in it goes on."""
    await sandbox.write_file("data.txt", "data")
    running = await sandbox.start_command("sleep 300")
    short = sandbox.sandbox_id[:20]
    done = commands(
        "exec",
        short,
        "--env",
        "WORD=x",
        "--",
        "cat data.txt; echo $WORD; id -u; cat; exit 7",
        stdin="in",
    )
    assert (done.returncode, done.stdout) == (7, "datax\n1000\nin"), done
    done = commands("exec", short, "--", "kill", "-0", "1")
    assert running.poll() is None, "a command of ours that ends ends no other"
    assert (await sandbox.execute("echo alive"))["stdout"] == "alive\n"
    await running.kill()


async def test_it_is_not_freer_than_its_owner(sandbox: Sandbox, commands: Commands) -> None:
    """The limits of the container hold for it, and so do its filters."""
    code = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; touch /x"
    inside = (await sandbox.execute(code))["stdout"]
    done = commands("exec", sandbox.sandbox_id, "--", code)
    assert (done.returncode, done.stdout) == (1, inside), done


async def test_files_go_in_and_out(sandbox: Sandbox, commands: Commands) -> None:
    (commands.home / "folder").mkdir()
    (commands.home / "folder" / "a.txt").write_text("a")
    name = sandbox.sandbox_id
    for words in (["cp", "folder", f"{name}:copy"], ["cp", "folder/a.txt", f"{name}:"]):
        done = commands(*words)
        assert done.returncode == 0, done
    assert await sandbox.read_file("copy/a.txt") == "a"
    await sandbox.write_file("a.txt", "changed")
    for words in (["cp", f"{name}:copy", "back"], ["cp", f"{name}:a.txt", "."]):
        done = commands(*words)
        assert done.returncode == 0, done
    assert (commands.home / "back" / "a.txt").read_text() == "a"
    assert (commands.home / "a.txt").read_text() == "changed"
    assert commands("cp", "a.txt", "b.txt").returncode == 2
    assert commands("cp", f"{name}:/etc/passwd", "x").returncode == 3


@pytest.fixture
def screen() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


async def test_a_shell(sandbox: Sandbox, commands: Commands, screen: tuple[int, int]) -> None:
    ours, theirs = screen
    process = subprocess.Popen(
        commands.argv("shell", sandbox.sandbox_id), env=commands.env, cwd=commands.home,
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    try:
        os.write(ours, b"echo $((6 * 7)) in $PWD; exit 3\r")
        shown = b""
        while b"42 in /workspace" not in shown:
            shown += os.read(ours, 65536)
        assert process.wait(60) == 3
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def test_its_id_is_known_to_list(sandbox: Sandbox, commands: Commands) -> None:
    listed = json.loads(commands("list", "--json").stdout)
    assert sandbox.sandbox_id in {one["sandbox_id"] for one in listed}
    done = commands("rm", sandbox.sandbox_id)
    assert (done.returncode, f"process {os.getpid()}" in done.stderr) == (2, True), done
    assert sandbox.is_running
