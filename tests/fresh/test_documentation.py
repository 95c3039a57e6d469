"""Every example, every Python block and every command of the pages, as a newcomer tries them.

Each on a machine of its own on which nothing was ever run, by each kind of newcomer: root, an
ordinary user, one whose programs choose uvloop, and one who cannot reach a package index.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import engines
from docs.pages import REPOSITORY, Block, blocks
from fresh.conftest import NO_INDEX, Index, Machine, new_machines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
PAGES = ["README.md", "docs/guide.md", "docs/agents.md", "docs/mcp.md", "docs/reference/api.md"]
COMMAND_PAGES = ["README.md", "docs/guide.md", "docs/reference/cli.md"]

# What an example must have said; each ends with exit code 0 as well.
SAYS = {
    "25_sandbox_basics.py": ["Hello from sandbox!", "Hello Paracle!", "Peak memory:", "Job 5: ✓",
                             "from a file of the sandbox", "Sandboxes left: 0"],
    "agent_loop.py": ["it asks for python_execute", "The answer is 233168", "status: done"],
    "agent_tools.py": ["42", "x is 21", "timed out", "not valid JSON"],
    "batch.py": ["job 2: 1229 primes", "job 3: failed: ValueError", "job 4: SandboxTimeoutError",
                 "job 5: ResourceLimitError"],
    "data_files.py": ["refused:", '{"Oslo": 8, "Bern": 4}'],
    "error_handling.py": ["a bug: failed with exit code 1", "too slow: timed out after 5 s",
                          "limit reached: memory", "limit reached: disk",
                          "limit reached: output", "limit reached: pids"],
    "hello.py": ["I am paracle (uid 1000)", "working in /workspace"],
    "monitoring.py": ["high usage:", "peak memory: 1"],
    "service.py": ["42", "files stay: hello", "refused: 401", "remote: hello from afar"],
    "streaming.py": ["step 2", "4 doubled is 8", "21 doubled is 42"],
    "terminal_session.py": ["hello, world", "stopped after 1 s", "exit code 3"],
}  # fmt: skip
# Where an ordinary user's limits hold for each process, by the kernel's own refusal (SECURITY.md).
OF_A_USER = {
    "batch.py": [*SAYS["batch.py"][:3], "job 5: failed: MemoryError"],
    "error_handling.py": ["a bug: failed with exit code 1", "too slow: timed out after 5 s",
                          "too much memory: failed with exit code 1: MemoryError",
                          "limit reached: output", "too many processes: failed with exit code 1: "],
}  # fmt: skip

# They start from an image that only a server on the Internet has, or do not end by themselves:
# examples/service.py and test_first_use start and end the service.
ELSEWHERE = ("paracle image build --incus", "paracle serve")
# Where this machine has its packages from.
PIP = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


@pytest.fixture(params=["root", "user", "uvloop", "no index"])
def newcomer(
    request: pytest.FixtureRequest, place: Path, index: Index, user_path: str
) -> Iterator[Machine]:
    """The machine of one, with ``paracle`` on its PATH."""
    who = "user" if request.param == "user" else "root"
    with new_machines(who, place, index, user_path) as make:
        machine = make()
        index.is_open.set()
        if request.param == "uvloop":
            machine.use("uvloop")
        if request.param == "no index":
            machine.env["PIP_INDEX_URL"] = NO_INDEX
        install_command(machine)
        yield machine


def install_command(machine: Machine) -> None:
    """With its settings: a client that starts it need not pass on what it has itself."""
    folder = machine.home / "bin"
    folder.mkdir()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in machine.env.items()]
    words = shlex.join(machine.interpreter("-m", "paracle_sandbox"))
    script = folder / "paracle"
    script.write_text("\n".join(["#!/bin/sh", *lines, f'exec {words} "$@"\n']))
    script.chmod(0o755)
    machine.env["PATH"] = os.pathsep.join([str(folder), machine.env["PATH"]])
    machine.owns(folder)


def as_newcomer(
    machine: Machine, words: list[str], folder: Path, **options: object
) -> subprocess.CompletedProcess[str]:
    given = {} if "input" in options else {"stdin": subprocess.DEVNULL}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        words, cwd=folder, env=machine.env, capture_output=True, text=True, timeout=240,
        **given, **options,
    )  # fmt: skip


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(newcomer: Machine, path: Path) -> None:
    folder = newcomer.home / "empty"
    folder.mkdir()
    example = shutil.copy(path, newcomer.home)
    newcomer.owns(folder)
    # The first one is a program for the inside.
    inside = ["-m", "paracle_sandbox", "sandbox", "execute"] if path.name == "hello.py" else []
    done = as_newcomer(newcomer, newcomer.python(*inside, str(example)), folder)
    assert done.returncode == 0, done.stderr
    says = SAYS if newcomer.user is None else {**SAYS, **OF_A_USER}
    for text in says[path.name]:
        assert text in done.stdout, done.stdout + done.stderr
    assert not list(folder.iterdir()), "it left something where it was started"


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page(newcomer: Machine, page: str) -> None:
    given = json.dumps([dataclasses.asdict(block) for block in blocks(page, "python")])
    follow = shutil.copy(REPOSITORY / "tests/docs/follow.py", newcomer.home)
    done = as_newcomer(newcomer, newcomer.python(follow), newcomer.home, input=given)
    assert done.returncode == 0, done.stderr


# Commands


def command_blocks() -> list[Block]:
    return [b for page in COMMAND_PAGES for b in blocks(page, "bash") if "paracle " in b.text]


def files_of_the_pages(folder: Path) -> Path:
    """The files that the pages name, in a folder of their own: a page copies it into a sandbox."""
    folder.mkdir()
    (folder / "agent.py").write_text("import sys\nprint('agent', *sys.argv[1:])\n")
    (folder / "my_project").mkdir()
    (folder / "my_project" / "main.py").write_text("print('main')\n")
    (folder / "report.py").write_text("print(open('data.csv').read())\n")
    (folder / "data.csv").write_text("a,b\n")
    (folder / "test_project.py").write_text(
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n"
    )
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    for name in ("inputs.json", "data.json"):
        (folder / name).write_text('{"name": "Paracle"}')
    return folder


def commands_of(block: Block, wanted: Callable[[str], bool]) -> list[str]:
    """Its lines with our command, each after what the block exports before."""
    lines = block.text.splitlines()
    exports = "\n".join(line for line in lines if line.startswith("export "))
    commands = [line for line in lines if "paracle " in line and not line.startswith(ELSEWHERE)]
    return [f"set -e\n{exports}\n{line}\n" for line in commands if wanted(line)]


def is_of_images(line: str) -> bool:
    return line.startswith("paracle image")


def has_to_be_refused(line: str, machine: Machine) -> bool:
    """What needs a package that this machine cannot get."""
    return machine.env["PIP_INDEX_URL"] == NO_INDEX and "paracle template build" in line


@pytest.mark.parametrize("block", command_blocks(), ids=str)
def test_commands_of_a_page(newcomer: Machine, block: Block) -> None:
    folder = files_of_the_pages(newcomer.home / "files")
    newcomer.owns(folder)
    for script in commands_of(block, lambda line: not is_of_images(line)):
        done = as_newcomer(newcomer, newcomer.become("sh", "-c", script), folder)
        said = f"{block}: {script}\n{done.stdout}{done.stderr}"
        if has_to_be_refused(script, newcomer):
            assert done.returncode != 0 and "index cannot be reached" in done.stderr, said
        else:
            assert done.returncode == 0, said


def test_commands_that_build_images(
    place: Path, index: Index, user_path: str, tmp_path: Path
) -> None:
    """With real packages, from where this machine has them."""
    engines.require("docker")
    with new_machines("root", place, index, user_path) as make:
        machine = make()
        env = {name: value for name, value in machine.env.items() if not name.startswith("PIP_")}
        machine.env = {**env, **PIP, "DOCKER_HOST": engines.DOCKER_HOST}
        install_command(machine)
        scripts = [one for block in command_blocks() for one in commands_of(block, is_of_images)]
        assert scripts
        for script in scripts:
            done = as_newcomer(machine, ["sh", "-c", script], tmp_path)
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
