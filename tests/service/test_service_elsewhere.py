"""The library where there is no Linux: it is imported whole, and a remote service does the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from service_process import ServiceProcess

TESTS = Path(__file__).resolve().parents[1]
SYSTEMS = ("macos", "windows")

IMPORTS = """
import paracle_sandbox
for name in paracle_sandbox.__all__:
    getattr(paracle_sandbox, name)
from paracle_sandbox.cli import app
from paracle_sandbox.cli.commands import *
try:
    paracle_sandbox.no_such_name
except AttributeError as error:
    assert "no attribute 'no_such_name'" in str(error)
print("whole")
"""
WORKS = """
import asyncio, os, pathlib, sys
from paracle_sandbox import SandboxManager

async def main(folder):
    async with SandboxManager() as manager:
        sandbox = await manager.create()
        print((await sandbox.run_code("print(6 * 7)"))["stdout"], end="")
        await sandbox.write_file("a.txt", "kept")
        print(await sandbox.read_file("a.txt"))
        try:
            await sandbox.copy_from("a.txt", folder / "a.txt")
            print((folder / "a.txt").read_text())
        except paracle_sandbox.SandboxFileError as error:
            print("read_bytes()" in str(error) and "kept")

import paracle_sandbox
asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


COMMANDS = """
import sys
sys.argv = ["paracle", *sys.argv[1:]]
from paracle_sandbox.cli.app import main
main()
"""
# Mistakes, and remedies that are for others or for Linux.
_NOT_SAID = (
    "Unexpected", "Traceback", "mistake in paracle", "pip install", "apt install", "systemctl",
    "SANDBOX_MODE=native", "darwin", "win32",
)  # fmt: skip
# What each ends with, where neither an engine nor a service is, on macOS and on Windows.
ENDS = {
    "sandbox health": (1, 1),
    "sandbox list": (0, 0),
    "sandbox list --backend native": (3, 3),
    "sandbox cleanup": (0, 0),
    "sandbox rm x": (2, 2),
    "sandbox exec x ls": (2, 2),
    "sandbox logs x": (2, 2),
    "image list": (3, 3),
    "sandbox execute -c 1": (3, 3),
    "sandbox execute -c 1 --backend native": (3, 3),
    "template list": (3, 3),
    "template build default": (3, 3),
    "keys list": (0, 2),
    "keys make alice": (0, 2),
    "audit verify": (2, 2),
    "mcp": (0, 0),
}


def child(
    system: str, program: str, *words: str, packages: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    text = f"import elsewhere; elsewhere.become{(system, *packages)!r}\n{program}"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": "/nonexistent", **variables}
    return subprocess.run(
        [sys.executable, "-c", text, *words],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def python(system: str, program: str, *words: str, **variables: str) -> str:
    done = child(system, program, *words, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def paracle(
    system: str, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command whose user has nothing yet, and no engine."""
    packages = ("mcp.server.stdio", "uvicorn") if words[0] == "mcp" else ("aiodocker.stream",)
    places = {
        "HOME": folder,
        "PARACLE_STATE_DIR": folder / "state",
        "PARACLE_DATA_DIR": folder / "data",
        "SANDBOX_DATA_DIR": folder / "service",
        "DOCKER_HOST": "tcp://127.0.0.1:1",
        "INCUS_SOCKET": folder / "incus",
    }
    variables = {**{name: str(place) for name, place in places.items()}, **variables}
    return child(system, COMMANDS, *words, packages=packages, **variables)


def assert_said_plainly(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout + done.stderr
    for bad in _NOT_SAID:
        assert bad not in said, said


@pytest.mark.parametrize("system", SYSTEMS)
def test_everything_is_imported(system: str) -> None:
    assert python(system, IMPORTS) == "whole\n"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_remote_service_does_the_work(system: str, fake: ServiceProcess, tmp_path: Path) -> None:
    variables = {"SANDBOX_MODE": "remote", "SANDBOX_API_URL": fake.url, "SANDBOX_API_KEY": fake.key}
    assert python(system, WORKS, str(tmp_path), **variables) == "42\nkept\nkept\n"


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_command_line_starts(system: str, fake: ServiceProcess) -> None:
    program = (
        "import sys\nsys.argv = ['paracle', 'sandbox', 'execute', '-c', 'print(6 * 7)']\n"
        "from paracle_sandbox.cli.app import main\nmain()"
    )
    variables = {"SANDBOX_MODE": "remote", "SANDBOX_API_URL": fake.url, "SANDBOX_API_KEY": fake.key}
    assert python(system, program, **variables) == "42\n"


def test_an_error_while_a_name_is_looked_up_is_told_as_it_is() -> None:
    program = (
        "import sys\nsys.modules['paracle_sandbox.manager'] = None\n"
        "try:\n    from paracle_sandbox import SandboxManager\n"
        "except ModuleNotFoundError as error:\n    print('manager' in str(error))"
    )
    assert python("macos", program) == "True\n"


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("command", ENDS)
def test_a_command_works_or_says_what_is_missing(command: str, system: str, tmp_path: Path) -> None:
    done = paracle(system, tmp_path, *command.split())
    assert_said_plainly(done)
    assert done.returncode == ENDS[command][SYSTEMS.index(system)], done.stderr
    if "native" in command or "template" in command:
        name = {"macos": "macOS", "windows": "Windows"}[system]
        assert f"need Linux, and this is {name}. Use Docker" in done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_sandboxes_of_this_machine_are_none_beside_a_service(
    system: str, fake: ServiceProcess, tmp_path: Path
) -> None:
    there = {"SANDBOX_MODE": "remote", "SANDBOX_API_URL": fake.url, "SANDBOX_API_KEY": fake.key}
    done = paracle(system, tmp_path, "sandbox", "list", **there)
    assert_said_plainly(done)
    assert (done.returncode, done.stdout) == (0, "No active sandboxes\n"), done.stderr


def test_windows_serves_no_sandboxes(tmp_path: Path) -> None:
    done = paracle("windows", tmp_path, "serve")
    assert_said_plainly(done)
    assert done.returncode == 2 and "The service and its keys need Linux" in done.stderr
    done = paracle("windows", tmp_path, "mcp", "--http", "--port", "0")
    assert_said_plainly(done)
    assert done.returncode == 3 and "over stdin and stdout" in done.stderr


def test_what_comes_with_python_is_not_to_be_installed(tmp_path: Path) -> None:
    """A part of Python that is missing has another reason than an extra that is not installed."""
    done = child("macos", "import sys; sys.modules['sqlite3'] = None\n" + COMMANDS, "serve",
                 HOME=str(tmp_path), PARACLE_STATE_DIR=str(tmp_path))  # fmt: skip
    assert done.returncode == 3 and "sqlite3" in done.stderr
    assert "pip install" not in done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_nobody_is_known_to_be_dead(system: str) -> None:
    """The engine may be shared with another Mac, whose processes have numbers of their own."""
    program = (
        "from paracle_sandbox.backends.machine.owner import Owner\n"
        "owner = Owner.of(999999999)\n"
        "print(owner.is_alive, Owner.parse(str(owner)).is_alive)"
    )
    assert python(system, program) == "True True\n"


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_engine_that_is_not_there_is_told_with_what_can_be_done_here(system: str) -> None:
    program = (
        "from paracle_sandbox.backends.docker.endpoint import Endpoint, explain, no_engine\n"
        "print(no_engine(lambda name: name))\n"
        "print(no_engine(lambda name: None))\n"
        "print(explain(OSError('no route'), Endpoint('tcp://elsewhere:2375')))\n"
    )
    if system == "macos":
        program += "print(explain(OSError('none'), Endpoint('unix:///nonexistent/sock')))\n"
    done = child(system, program)
    assert_said_plainly(done)
    lines = done.stdout.splitlines()
    assert len(lines) >= 3, done.stderr
    assert all("or use a service on Linux: SANDBOX_MODE=remote" in line for line in lines)


def test_a_mac_serves_no_native_sandboxes(tmp_path: Path) -> None:
    done = paracle("macos", tmp_path, "serve", "--backend", "native", "--port", "0")
    assert_said_plainly(done)
    assert done.returncode == 3 and "need Linux, and this is macOS. Use Docker" in done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_agents_do_is_written_down(system: str, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from paracle_sandbox.agents.journal import open_agents_log, get_log_path\n"
        "from paracle_sandbox.audit.log import read\n"
        "from paracle_sandbox.settings import Settings\n"
        "settings = Settings(data_dir=sys.argv[1])\n"
        "log = open_agents_log(settings)\n"
        "log.record('task', text='one')\n"
        "log.close()\n"
        "print([line['event'] for line in read(get_log_path(settings))])"
    )
    assert python(system, program, str(tmp_path)) == "['task']\n"


@pytest.mark.parametrize("words", ["execute -t -- sh", "exec -t x -- sh"])
def test_windows_lends_no_terminal(words: str, tmp_path: Path) -> None:
    done = paracle("windows", tmp_path, "sandbox", *words.split())
    assert_said_plainly(done)
    assert done.returncode == 2 and "use WSL 2" in done.stderr
