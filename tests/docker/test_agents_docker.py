"""An agent at work in a container: the task of tests/agents, with the engine as the witness."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import engines
from cli.paracle_cli import Cli, wait_for

pytest.importorskip("openai", reason="asks models: pip install '.[agents]'")
pytest.importorskip("anthropic", reason="asks models: pip install '.[agents]'")

from agents.broken_project import broken_project, check_mended, fixing, words  # noqa: E402
from agents.model_server import Script, Turn, model_server  # noqa: E402
from paracle_sandbox import SandboxAgent  # noqa: E402
from paracle_sandbox.agents import Event, Options  # noqa: E402
from paracle_sandbox.backends.docker.backend import DockerBackend  # noqa: E402

DIALECTS = ["openai", "anthropic"]


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    engines.require("docker")
    cli = Cli(
        tmp_path, DOCKER_HOST=engines.DOCKER_HOST, OPENAI_API_KEY="test", ANTHROPIC_API_KEY="test"
    )
    before = containers()
    yield cli
    wait_for(lambda: not containers() - before)


def containers() -> set[str]:
    """The sandboxes that the engine has now, whoever made them."""
    done = subprocess.run(
        ["docker", "--host", engines.DOCKER_HOST, "ps", "--all", "--no-trunc", "--quiet",
         "--filter", "label=paracle.managed=true"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fixes_a_failing_test_in_a_container(cli: Cli, dialect: str) -> None:
    project = broken_project(cli.home / "project")
    before = containers()
    seen: list[set[str]] = []

    def watched(request: dict[str, Any]) -> Turn:
        seen.append(containers() - before)
        return fixing(request)

    with model_server(watched) as chat:
        done = cli.run(*words(chat, dialect), "--backend", "docker", "--workspace", str(project),
                       "--apply", "--output", "result.json")  # fmt: skip
    check_mended(cli.home, project, done)
    assert all(seen[1:]), "the engine had no container while the agent worked"


@asynccontextmanager
async def agent_over(
    script: Script, dialect: str, backend: DockerBackend
) -> AsyncIterator[tuple[SandboxAgent, Any]]:
    with model_server(script) as chat:
        url = chat.url + ("/v1" if dialect == "openai" else "")
        options = Options(base_url=url, api_key="test", max_retries=0)
        async with SandboxAgent("m", provider=dialect, options=options, backend=backend) as agent:
            yield agent, chat


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_streams_and_remembers_in_a_container(backend: DockerBackend, dialect: str) -> None:
    script = [
        Turn("Let me see.", [("python_execute", {"code": "x = 20\nprint('out', flush=True)"})]),
        Turn("", [("python_execute", {"code": "x + 1"})]),
        Turn("It is 21."),
    ]
    async with agent_over(script, dialect, backend) as (agent, chat):
        events = [event async for event in agent.stream("go")]
        assert chat.tool_texts() == ["out\n", "21"]
    kinds = [event.kind for event in events]
    assert "".join(e.text for e in events if e.kind == "text") == "Let me see.It is 21."
    assert kinds.count("text") > 2, "it comes in pieces"
    assert "".join(e.text for e in events if e.kind == "tool_output") == "out\n"
    assert events[-1].data["status"] == "done"


async def test_cancelled_in_the_middle_of_a_step(backend: DockerBackend) -> None:
    script = [Turn("", [("sandbox_shell", {"command": "echo on; sleep 1234"})])]
    started = asyncio.Event()

    def on_event(event: Event) -> None:
        if event.kind == "tool_output":
            started.set()

    async with agent_over(script, "openai", backend) as (agent, _):
        work = asyncio.create_task(agent.run("go", on_event=on_event))
        await asyncio.wait_for(started.wait(), 60)
        sandbox = await agent.client.sandbox()
        agent.cancel()
        assert (await work).status == "cancelled"
        running = (await sandbox.execute("cat /proc/[0-9]*/comm"))["stdout"].split()
        assert "sleep" not in running, "the tree is gone"
    assert not sandbox.is_running
