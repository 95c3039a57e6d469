"""The operator's defaults hold in every way in, wherever they are set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paracle_sandbox import (
    LocalSandboxClient,
    ResourceLimitError,
    Sandbox,
    SandboxConfig,
    SandboxExecutor,
    SandboxManager,
    Settings,
    load_settings,
)
from paracle_sandbox.agents import SandboxAgent
from paracle_sandbox.agents.agent import AGENT_ENV
from paracle_sandbox.agents.modes import execute_for, make_run_config
from paracle_sandbox.backends import registry
from paracle_sandbox.cli.agents.run import Order as AgentOrder
from paracle_sandbox.cli.agents.run import make_plan
from paracle_sandbox.cli.execute import Order, make_config
from paracle_sandbox.cli.mcp import mcp
from paracle_sandbox.mcp import transports
from paracle_sandbox.service.users.user_sandboxes import UserSandboxes
from paracle_sandbox.testing.fake import FakeBackend
from paracle_sandbox.tools import PythonExecute

Made = list[SandboxConfig]


async def by_the_manager() -> None:
    async with SandboxManager() as manager:
        await manager.create()


async def by_the_manager_with_a_terminal() -> None:
    async with SandboxManager() as manager:
        await manager.create_sandbox()


async def by_an_executor() -> None:
    async with SandboxExecutor() as executor:
        await executor.execute_agent("print(1)")


async def by_itself() -> None:
    async with Sandbox(FakeBackend(), "by-itself"):
        pass


async def by_a_batch() -> None:
    async with SandboxExecutor() as executor:
        await executor.execute_batch([{"agent_code": "print(1)"}])


async def by_a_client() -> None:
    async with LocalSandboxClient() as client:
        await client.run_command("true")


async def by_a_client_with_a_volume() -> None:
    async with LocalSandboxClient() as client:
        await client.create(volume_bindings={})


async def by_a_tool() -> None:
    tool = PythonExecute()
    await tool.execute(code="print(1)")
    await tool.cleanup()


async def by_an_agent() -> None:
    async with SandboxAgent("gpt-5", provider="openai") as agent:
        await agent.execute_code("print(1)")


async def by_code_of_an_agent() -> None:
    await execute_for(make_run_config("sandbox"), "print(1)")


async def by_the_command_line() -> None:
    async with SandboxManager() as manager:
        await manager.create(make_config(Order(file="-"), load_settings()))


WAYS = [
    by_the_manager, by_the_manager_with_a_terminal, by_itself, by_an_executor, by_a_batch,
    by_a_client, by_a_client_with_a_volume, by_a_tool, by_an_agent, by_code_of_an_agent,
    by_the_command_line,
]  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Return the configurations of the sandboxes that the fake backend has created."""
    configs: Made = []
    create = FakeBackend.create

    async def recording(self: FakeBackend, sandbox_id: str, config: Any, labels: Any) -> None:
        configs.append(config)
        await create(self, sandbox_id, config, labels)

    monkeypatch.setattr(FakeBackend, "create", recording)
    monkeypatch.setenv("SANDBOX_MODE", "fake")
    return configs


ENVIRONMENT = {
    "PARACLE_SANDBOX_DEFAULT_MEMORY_MB": "128",
    "PARACLE_SANDBOX_DEFAULT_CPU_CORES": "0.5",
    "PARACLE_SANDBOX_DEFAULT_TIMEOUT": "77",
}
FILES = {
    "newer keys": "default_memory_mb = 128\ndefault_cpu_cores = 0.5\ndefault_timeout_seconds = 77",
    "older keys": 'memory_limit = "128m"\ncpu_limit = 0.5\ntimeout = 77',
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["environment", *FILES])
async def test_defaults_of_the_operator_hold(
    way: Callable[[], Awaitable[None]],
    where: str,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if where == "environment":
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
    else:
        (tmp_path / "set.toml").write_text(f"[sandbox]\n{FILES[where]}\n")
        monkeypatch.setenv("PARACLE_CONFIG", str(tmp_path / "set.toml"))
    await way()
    assert made
    for config in made:
        assert (config.memory_mb, config.cpu_cores, config.timeout_seconds) == (128, 0.5, 77)
        assert config.base_image == SandboxConfig().base_image, "nobody asked for another"


async def test_an_agent_adds_its_variables_to_defaults_alone(made: Made) -> None:
    await by_an_agent()
    async with SandboxAgent("gpt-5", provider="openai", config=SandboxConfig()) as agent:
        await agent.execute_code("print(1)")
    assert [dict(config.env_vars) for config in made] == [AGENT_ENV, {}]


async def test_a_call_without_a_limit_has_the_shorter_of_two(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARACLE_SANDBOX_DEFAULT_TIMEOUT", "77")
    tool = PythonExecute()
    sandbox = await tool.sandbox()
    assert tool.seconds_for(sandbox, None) == 77, "the tool's own is 300"
    assert tool.seconds_for(sandbox, 200) == 200
    await tool.cleanup()


def test_the_service_keeps_to_what_holds_for_every_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARACLE_SANDBOX_READ_ONLY_FS", "false")
    monkeypatch.setenv("PARACLE_SANDBOX_DROP_CAPABILITIES", "false")
    sandboxes = UserSandboxes.__new__(UserSandboxes)
    sandboxes.settings = load_settings()
    config = sandboxes.default_config()
    assert not config.read_only_filesystem and not config.drop_capabilities


async def test_native_keeps_an_agent_to_the_default_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARACLE_SANDBOX_DEFAULT_MEMORY_MB", "128")
    hungry = "data = bytearray(400 << 20)\nprint('had it all')"
    async with SandboxAgent("gpt-5", provider="openai", backend="native") as agent:
        sandbox = await agent.client.sandbox()
        assert sandbox.config.memory_mb == 128
        with pytest.raises(ResourceLimitError, match="128 MB"):
            await sandbox.run_code(hungry)


@pytest.mark.parametrize("named", [None, "docker", "local", "auto"])
def test_rows_of_a_kind_hold_however_the_backend_is_chosen(
    named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag, an older name, or ``auto`` that takes docker because nothing before it can be had."""
    monkeypatch.setattr(registry, "PROBLEMS", {**registry.PROBLEMS, "native": _no, "docker": _yes})
    monkeypatch.setenv("DOCKER_SANDBOX_MEMORY", "333m")
    monkeypatch.setenv("DOCKER_SANDBOX_IMAGE", "registry.example/mine:1")
    config = make_config(Order(file="-", backend=named), load_settings())
    assert (config.memory_mb, config.base_image) == (333, "registry.example/mine:1")
    native = make_config(Order(file="-", backend="native"), load_settings())
    assert native.memory_mb == 512, "what is set for containers holds for no other"


@pytest.mark.parametrize("named", [None, "incus", "incus-vm"])
def test_a_virtual_machine_is_made_of_an_image_for_one(
    named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_MODE", "incus")
    monkeypatch.setenv("INCUS_SANDBOX_TYPE", "vm")
    config = make_config(Order(file="-", backend=named), load_settings())
    assert config.base_image == "images:debian/12/cloud"


def test_nothing_is_looked_for_where_it_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "PROBLEMS", {})  # choose() would raise KeyError
    make_config(Order(file="-"), Settings())


def test_every_command_says_for_which_backend_its_limits_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``agents run``, ``mcp`` and ``sandbox test`` take --backend as ``execute`` does."""
    monkeypatch.setenv("DOCKER_SANDBOX_MEMORY", "333m")
    plan = make_plan(AgentOrder("coder", "task", mode="sandbox", backend="docker"))
    assert plan.sandbox.memory_mb == 333
    plan.project.close()
    seen = []

    async def served(
        backend: str | None, config: SandboxConfig, most: int, leave: Callable[[], None]
    ) -> None:
        seen.append((backend, config.memory_mb))

    monkeypatch.setattr(transports, "serve_stdio", served)
    with pytest.raises(SystemExit, match="0"):
        mcp(backend="docker")
    assert seen == [("docker", 333)]


def _no(_: Settings) -> str | None:
    return "not here"


def _yes(_: Settings) -> str | None:
    return None
