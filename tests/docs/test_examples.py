"""What the documentation shows, works: every example, every Python block, every command."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pages import REPOSITORY, Block, blocks

import engines
from paracle_sandbox import SandboxConfig, SandboxExecutor, SandboxManager
from paracle_sandbox.agents import Reply, ToolCall

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
PAGES = ["README.md", "docs/guide.md", "docs/agents.md", "docs/reference/api.md"]

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

# They download packages, or start from an image that only a server on the Internet has, and have
# tests of their own. The last one does not end by itself: examples/service.py starts and ends it.
UNSAFE = ("paracle template build", "paracle sandbox execute --template",
          "paracle image build --incus", "paracle serve")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", "sandbox", "health", "--backend", "native"],
        capture_output=True, text=True, timeout=120,
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


# Commands


def command_blocks() -> list[Block]:
    pages = ["README.md", "docs/guide.md", "docs/reference/cli.md"]
    return [b for page in pages for b in blocks(page, "bash") if "paracle " in b.text]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The files that the pages name."""
    (tmp_path / "agent.py").write_text("import sys\nprint('agent', *sys.argv[1:])\n")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for name in ("inputs.json", "data.json"):
        (tmp_path / name).write_text('{"name": "Paracle"}')
    return tmp_path


@pytest.mark.parametrize("block", command_blocks(), ids=str)
def test_commands(block: Block, directory: Path) -> None:
    for line in block.text.splitlines():
        if "paracle " not in line or line.startswith(UNSAFE):
            continue
        if line.startswith("paracle image"):
            engines.require("docker")
        script = f"set -e\n{exports(block)}\n{line}\n"
        # That ends what is in use, of other tests too if it could see them.
        engine = f"unix://{directory}/none.sock" if "cleanup" in line else engines.DOCKER_HOST
        done = subprocess.run(
            ["sh", "-c", script], cwd=directory, capture_output=True, text=True, timeout=240,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ, "HOME": str(directory), "DOCKER_HOST": engine,
                "INCUS_SOCKET": f"{directory}/none.sock", "PARACLE_STATE_DIR": f"{directory}/state",
            },
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
