"""What the documentation shows, works: every example, every Python block, every command."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from benchmarks.__main__ import SUMMARY, write_page
from pages import REPOSITORY, Block, blocks

import engines
import paracle_sandbox
from paracle_sandbox import SandboxConfig, SandboxExecutor, SandboxManager
from paracle_sandbox.agents import Reply, ToolCall

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
PAGES = ["README.md", "docs/guide.md", "docs/agents.md", "docs/mcp.md", "docs/reference/api.md"]
DATA_PAGES = [*PAGES, "docs/service.md", "docs/reference/settings.md"]

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

# These show limits, which an ordinary user's sandboxes keep only with a delegated cgroup.
SHOW_LIMITS = {"batch.py", "error_handling.py", "monitoring.py"}

# They start from an image that only a server on the Internet has, or do not end by themselves:
# examples/service.py and tests/fresh start and end the service.
ELSEWHERE = ("paracle image build --incus", "paracle serve")
# Where this machine has its packages from.
PIP = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
UNSAFE = ("paracle template build", "paracle sandbox execute --template",
          "paracle image build --incus", "paracle serve")  # fmt: skip


pytestmark = pytest.mark.usefixtures("empty_machine")


@pytest.fixture(scope="module", autouse=True)
def native(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("health")
    done = subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", "sandbox", "health", "--backend", "native"],
        capture_output=True, text=True, timeout=120,
        env={
            **os.environ, "PARACLE_STATE_DIR": f"{base}/state", "PARACLE_DATA_DIR": f"{base}/data",
            "PARACLE_TEMPLATE_BUILD": "0",
        },
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"native sandboxes do not work here: {done.stdout[-1000:]}")


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path, tmp_path: Path) -> None:
    if path.name in SHOW_LIMITS and os.geteuid() != 0:
        pytest.skip("shows limits that only root's sandboxes keep for sure: run as root")
    # The first one is a program for the inside.
    inside = ["-m", "paracle_sandbox", "sandbox", "execute"] if path.name == "hello.py" else []
    done = subprocess.run(
        [sys.executable, *inside, str(path)], cwd=tmp_path, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in SAYS[path.name]:
        assert text in done.stdout, done.stdout
    assert not list(tmp_path.iterdir()), "it left something where it was started"


# Python blocks


class Calculator:
    """A model for the pages: it asks for one calculation, and repeats what came out."""

    name = "calculator"

    async def reply(self, system: str, messages: Any, tools: Any, on_text: Any) -> Reply:
        if messages[-1].role == "tool":
            on_text(messages[-1].text)
            return Reply(messages[-1].text)
        return Reply(calls=(ToolCall("1", "python_execute", '{"code": "6 * 7"}'),))

    async def close(self) -> None:
        pass


@pytest.fixture
async def names() -> AsyncIterator[dict[str, Any]]:
    """What the pages say is there."""
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(SandboxManager())
        config = SandboxConfig()
        yield {
            "__name__": "__page__",
            "config": config,
            "executor": await stack.enter_async_context(SandboxExecutor()),
            "manager": manager,
            "model": Calculator(),
            "sandbox": await stack.enter_async_context(manager.managed_sandbox(config)),
        }


@pytest.mark.parametrize("page", PAGES)
async def test_python_blocks(page: str, names: dict[str, Any]) -> None:
    """In order, with the names of the earlier ones. A block is a part of an async function."""
    given = dict(names)
    for block in blocks(page, "python"):
        if "asyncio.run(" in block.text:
            await asyncio.to_thread(run_program, block)
            continue
        await run_block(block, names)
        # A block may have closed what it made under these names: the next one has ours.
        names.update({name: given[name] for name in ("executor", "manager", "sandbox")})


async def run_block(block: Block, names: dict[str, Any]) -> None:
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.iscoroutine(done):
        await done


def run_program(block: Block) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.mark.parametrize("page", DATA_PAGES)
def test_what_pages_show_as_data_can_be_read(page: str) -> None:
    for block in blocks(page, "json"):
        json.loads(block.text)
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)


def test_the_first_line_of_python_is_right_for_a_type_checker() -> None:
    """run() promises what the line takes from its answer: not a key that may be missing."""
    assert 'run("print(6 * 7)")["result"]["stdout"]' in blocks("README.md", "python")[0].text
    kinds = get_type_hints(paracle_sandbox.ExecutionResult, include_extras=True)
    assert kinds["result"] is paracle_sandbox.CommandResult


# Figures


def test_the_benchmarks_write_between_the_marks_of_the_pages(tmp_path: Path) -> None:
    for name in ("README.md", "docs/performance.md"):
        page = tmp_path / Path(name).name
        page.write_text((REPOSITORY / name).read_text())
        before, after = re.split(
            r"<!-- bench:begin -->.*<!-- bench:end -->", page.read_text(), flags=re.DOTALL
        )
        write_page(page, "new figures")
        assert page.read_text() == (
            f"{before}<!-- bench:begin -->\nnew figures\n<!-- bench:end -->{after}"
        )
    with pytest.raises(ValueError, match="bench:begin"):
        write_page(REPOSITORY / "LICENSE", "new figures")


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    readme, page = (REPOSITORY / n for n in ("README.md", "docs/performance.md"))
    for what, name in SUMMARY.items():
        (measured,) = re.findall(
            rf"^\| {re.escape(what)} \| (.*?) \|", page.read_text(), re.MULTILINE
        )
        assert f"\n| {name} | {measured} |" in readme.read_text()
    run = re.compile(r"^One run of `.*$", re.MULTILINE)
    assert run.findall(readme.read_text()) == run.findall(page.read_text())


# Commands


def command_blocks() -> list[Block]:
    pages = ["README.md", "docs/guide.md", "docs/reference/cli.md"]
    return [b for page in pages for b in blocks(page, "bash") if "paracle " in b.text]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The files that the pages name, in a folder of their own: a page copies it into a sandbox."""
    tmp_path = tmp_path / "files"
    tmp_path.mkdir()
    (tmp_path / "agent.py").write_text("import sys\nprint('agent', *sys.argv[1:])\n")
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "main.py").write_text("print('main')\n")
    (tmp_path / "report.py").write_text("print(open('data.csv').read())\n")
    (tmp_path / "data.csv").write_text("a,b\n")
    (tmp_path / "test_project.py").write_text(
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n"
    )
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for name in ("inputs.json", "data.json"):
        (tmp_path / name).write_text('{"name": "Paracle"}')
    return tmp_path


@pytest.mark.parametrize("block", command_blocks(), ids=str)
def test_commands(block: Block, directory: Path) -> None:
    for line in block.text.splitlines():
        if "paracle " not in line or line.startswith(ELSEWHERE):
            continue
        if line.startswith("paracle image"):
            engines.require("docker")
        script = f"set -e\n{exports(block)}\n{line}\n"
        # That ends what is in use, of other tests too if it could see them.
        engine = f"unix://{directory}/none.sock" if "cleanup" in line else engines.DOCKER_HOST
        env = {**os.environ, "DOCKER_HOST": engine, "INCUS_SOCKET": f"{directory}/none.sock"}
        if line.startswith("paracle image"):  # with real packages, from where this machine has them
            env = {name: value for name, value in env.items() if not name.startswith("PIP_")}
            env |= PIP
        done = subprocess.run(
            ["sh", "-c", script], cwd=directory, capture_output=True, text=True, timeout=240,
            stdin=subprocess.DEVNULL, env=env,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}: {line}\n{done.stdout}{done.stderr}"


def exports(block: Block) -> str:
    return "\n".join(line for line in block.text.splitlines() if line.startswith("export "))


def test_the_first_command_of_the_readme_is_a_target() -> None:
    first = blocks("README.md", "bash")[0].text.split()
    assert first[:2] == ["make", "run"]
    targets = (REPOSITORY / "Makefile").read_text()
    for line in blocks("README.md", "bash")[0].text.splitlines():
        words = shlex.split(line, comments=True)
        assert f"\n{words[1]}:" in targets
