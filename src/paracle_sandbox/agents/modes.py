"""The modes of agents, and the configuration that each stands for."""

from __future__ import annotations

import asyncio
from typing import TypedDict, cast

from ..backends.registry import examine, resolve_name
from ..config import SandboxConfig
from ..executor import Inputs, SandboxExecutor
from ..results import JobResult
from ..settings import Settings

MODES = ("safe", "sandbox", "review", "yolo")
FALLBACK = "⚠️  Sandbox mode not available, falling back to safe mode"


class RunConfig(TypedDict):
    """The permissions of a run. ``sandbox`` lets tools run in a sandbox; ``on_host`` says that the
    user chose the host instead."""

    mode: str
    sandbox: bool
    auto_approve: bool
    requires_approval: bool
    on_host: bool


def make_run_config(mode: str, *, on_host: bool = False) -> RunConfig:
    """Return the configuration that a mode stands for."""
    return {
        "mode": mode,
        "sandbox": mode != "safe" and not on_host,
        "auto_approve": mode == "yolo",
        "requires_approval": mode == "review",
        "on_host": on_host,
    }


async def find_sandbox_problem(backend: str | None, settings: Settings) -> str | None:
    """Return why the backend of this run cannot make a sandbox, or None if it can. Only that
    backend is examined: no other is used if it fails."""
    [report] = await examine(resolve_name(backend, settings, quiet=True), settings)
    if report.available:
        return None
    return f"{report.backend}: {report.detail or 'not available'}"


async def execute_for(
    config: RunConfig,
    agent_code: str,
    inputs: Inputs | None = None,
    sandbox_config: SandboxConfig | None = None,
    backend: str | None = None,
) -> JobResult:
    """Run code of an agent in a sandbox of its own. If the configuration allows no sandbox, the
    code is not run: it never runs on the host. Without ``sandbox_config`` the settings apply."""
    if not config.get("sandbox"):
        await asyncio.sleep(0)
        return {
            "success": False,
            "sandbox_id": None,
            "error": f"Code is not run in {config['mode']} mode; use --mode sandbox",
            "error_type": "NotSandboxed",
        }
    async with SandboxExecutor(backend=backend) as executor:
        result = await executor.execute_agent(agent_code, sandbox_config, inputs)
    return cast("JobResult", result)
