"""``paracle agents run``: check the order, choose the place, let it work, show what it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SandboxError
from ...settings import Settings
from .. import exit_codes, output
from ..execute import Order as ExecuteOrder
from ..execute import make_config
from ..exit_codes import UsageFault
from ..options import check_backend, settings_or_fault
from ..result_file import check_output, save_document
from .audit import opened_log, process_label
from .screen import Screen, ask

if TYPE_CHECKING:
    from ...agents.agent import SandboxAgent
    from ...agents.definitions import AgentDefinition
    from ...agents.events import AgentResult
    from ...agents.loop import Limits
    from ...agents.modes import RunConfig
    from ...agents.workspace_sync import Change, WorkspaceSync
    from ...audit.log import AuditLog
    from ...config import SandboxConfig

NO_PRICE = "--cost-limit: needs the model's price; add --price IN/OUT, as 3/15"


@dataclass(frozen=True)
class Order:
    """The request of the user, flag by flag."""

    name: str
    task: str
    mode: str = "safe"
    model: str | None = None
    provider: str | None = None
    base_url: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    inputs: Sequence[str] = ()
    files: Sequence[str] = ()
    workspace: str | None = None
    apply: bool = False
    timeout: int = 300
    max_steps: int | None = None
    cost_limit: float | None = None
    price: str | None = None
    mcp: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    require_sandbox: bool = False
    on_host: bool = False
    output: str | None = None
    stream: bool = True
    verbose: bool = False
    dry_run: bool = False
    as_json: bool = False
    backend: str | None = None


@dataclass(frozen=True)
class Plan:
    """An order that was checked."""

    order: Order
    agent: AgentDefinition
    project: WorkspaceSync
    inputs: dict[str, str]
    sandbox: SandboxConfig
    limits: Limits
    settings: Settings


def chosen_mode(given: str | None) -> str:
    """``use_sandbox`` of config.toml stands for --mode sandbox, where no mode is given."""
    from ...compat.sandbox_settings import SandboxSettings

    return given or ("sandbox" if SandboxSettings.load().use_sandbox else "safe")


def run_agent(order: Order) -> int:
    plan = make_plan(order)
    if order.dry_run:
        _show_plan(plan)
        return exit_codes.SUCCESS
    try:
        return exit_codes.run(_run(plan))
    finally:
        plan.project.close()


def make_plan(order: Order) -> Plan:
    """Everything that can be wrong with the order is found here, before anything is made."""
    from ...agents.agent import AGENT_ENV
    from ...agents.definitions import find_agent, parse_price
    from ...agents.loop import Limits
    from ...agents.mcp_tools import read_servers
    from ...agents.workspace_sync import WorkspaceSync

    settings = settings_or_fault()
    check_backend(order.backend)
    if order.on_host and order.mode != "yolo":
        raise UsageFault("--host: only with --mode yolo, because nothing is isolated then")
    folders = [*filter(None, [order.workspace]), *(f for f in order.files if Path(f).is_dir())]
    if len(folders) > 1:
        raise UsageFault("--workspace: one folder is enough; put the rest below it")
    files = [Path(f) for f in order.files if f not in folders]
    try:
        agent = find_agent(order.name, Path(settings.agents_dir))
        project = WorkspaceSync.gather(Path(folders[0]) if folders else None, files)
        price = parse_price(order.price) if order.price else agent.price
        read_servers(order.mcp)
    except SandboxError as error:
        raise UsageFault(str(error)) from None
    if order.cost_limit is not None and price is None and not order.dry_run:
        raise UsageFault(NO_PRICE)
    most = None if price is None else order.cost_limit
    limits = Limits(order.max_steps or agent.max_steps or 20, most, price)
    env = [f"{name}={value}" for name, value in AGENT_ENV.items()]
    wanted = ExecuteOrder(file="-", limits=order.limits, env=env, backend=order.backend)
    sandbox = make_config(wanted, settings)
    inputs = dict(map(_assignment, order.inputs))
    check_output(order.output)
    return Plan(order, agent, project, inputs, sandbox, limits, settings)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageFault(f"--input: write KEY=VALUE, not {text!r}")
    return name, value


def _show_plan(plan: Plan) -> None:
    from ...agents.modes import make_run_config
    from ...agents.providers import PROVIDERS, choose_provider

    order = plan.order
    provider = choose_provider(
        order.model or plan.agent.model, order.provider or plan.agent.provider
    )
    config = make_run_config(order.mode, on_host=order.on_host)
    model = order.model or plan.agent.model or PROVIDERS[provider].default_model
    rows = [
        ["Agent", plan.agent.name], ["Task", order.task], ["Mode", order.mode],
        ["Provider", provider],
        ["Model", model or "none yet"],
        ["Tools", ", ".join(plan.agent.tools) if order.mode != "safe" else "read_files"],
        ["Sandbox", str(config["sandbox"])], ["Asks", str(config["requires_approval"])],
        ["Files", str(len(plan.project.sources))], ["Writes back", str(order.apply)],
        ["Steps", str(plan.limits.max_steps)], ["Timeout", f"{order.timeout} s"],
        ["Cost limit", "none" if order.cost_limit is None else f"${order.cost_limit:g}"],
    ]  # fmt: skip
    if order.as_json:
        output.say_json({"plan": dict(rows), "config": config})
    else:
        output.table("Execution Plan", ["", ""], rows)
    # A plan is for finding out what is missing; a run would be refused.
    if model is None:
        output.note(f"{provider} has no model of its own choice: name one with --model.")
    if order.cost_limit is not None and plan.limits.price is None:
        output.note(NO_PRICE)


async def _check_sandbox_available(
    backend: str | None = None, settings: Settings | None = None
) -> bool:
    """Prove by use that there is a sandbox; what is missing is told on stderr."""
    from ...agents.modes import find_sandbox_problem

    problem = await find_sandbox_problem(backend, settings or settings_or_fault())
    if problem is not None:
        output.note(f"No sandbox: {problem}")
    return problem is None


async def _choose(plan: Plan) -> RunConfig:
    """Choose the configuration: the one that was asked for, or safe when it cannot be had."""
    from ...agents.modes import FALLBACK, make_run_config

    config = make_run_config(plan.order.mode, on_host=plan.order.on_host)
    if not config["sandbox"] or await _check_sandbox_available(plan.order.backend, plan.settings):
        return config
    if plan.order.require_sandbox:
        raise SandboxError("There is no sandbox, and --require-sandbox was given: nothing was run.")
    output.note(FALLBACK)
    return make_run_config("safe")


async def _run(plan: Plan) -> int:
    from ...sandbox.host_copy import in_thread

    order = plan.order
    config = await _choose(plan)
    screen = Screen(stream=order.stream and not order.as_json, verbose=order.verbose)
    changes: list[Change] = []
    with opened_log(plan.settings) as log:
        async with _make_agent(plan, config, screen, log) as agent:
            prompt = _prompt(plan, config)
            result = await agent.run(prompt, timeout=order.timeout, on_event=screen.show)
            if config["sandbox"] or config["on_host"]:
                changes = await _changes(agent, plan)
    screen.end(result, answer_shown=order.stream)
    diffs = [await in_thread(change.diff) for change in changes]
    applied = await _offer(plan, changes, diffs, screen)
    document = {
        **result.as_dict(), "agent": plan.agent.name, "config": dict(config),
        "changes": [
            {"path": change.path, "kind": change.kind, "diff": diff}
            for change, diff in zip(changes, diffs, strict=True)
        ],
        "applied": applied,
    }  # fmt: skip
    if order.output:
        save_document(order.output, document)
    if order.as_json:
        output.say_json(document)
    return _code(result)


def _make_agent(
    plan: Plan, config: RunConfig, screen: Screen, log: AuditLog | None
) -> SandboxAgent:
    from ...agents.agent import SandboxAgent
    from ...agents.host_files import HostFilesTool, describe_safe_mode
    from ...agents.providers import Options

    order, agent = plan.order, plan.agent
    options = Options(
        temperature=agent.temperature if order.temperature is None else order.temperature,
        max_tokens=order.max_tokens or agent.max_tokens, base_url=order.base_url,
        stream=order.stream,
    )  # fmt: skip
    runs = config["sandbox"] or config["on_host"]
    if config["on_host"]:
        output.note("⚠️  --host: what the model writes runs on this machine, not isolated.")
    made = SandboxAgent(
        order.model or agent.model,
        provider=order.provider or agent.provider,
        options=options,
        instructions=agent.instructions
        if runs
        else agent.instructions + describe_safe_mode(agent.tools),
        tools=None if runs else [HostFilesTool(plan.project)],
        config=plan.sandbox,
        backend="fake" if config["on_host"] else order.backend,
        limits=plan.limits,
        mcp_servers=order.mcp if runs else None,
        approve=screen.approve if config["requires_approval"] else None,
        furnish=_furnisher(plan) if runs else None,
        name=agent.name,
        audit=log,
        labels=process_label(),
    )
    if runs:
        _keep_tools(made, agent.tools)
    return made


def _keep_tools(agent: SandboxAgent, wanted: Sequence[str]) -> None:
    """Remove the tools that the agent's file does not name."""
    from ...agents.definitions import TOOL_NAMES
    from ...tools import SandboxBrowserTool

    agent.tools.add(SandboxBrowserTool(agent.client))
    for short, name in TOOL_NAMES.items():
        if short not in wanted:
            agent.tools.remove(name)


def _furnisher(plan: Plan) -> Any:
    async def furnish(sandbox: Any) -> None:
        await plan.project.copy_in(sandbox)
        if plan.inputs:
            await sandbox.write_file("/tmp/inputs.json", json.dumps(plan.inputs))

    return furnish


def _prompt(plan: Plan, config: RunConfig) -> str:
    parts = [plan.order.task]
    if plan.inputs:
        where = " (also in /tmp/inputs.json)" if config["sandbox"] else ""
        parts.append(f"Inputs{where}:\n{json.dumps(plan.inputs, indent=2)}")
    names = sorted(plan.project.sources)
    if names:
        listed = "\n".join(names[:200]) + (f"\n... {len(names)} in all" if len(names) > 200 else "")
        parts.append(f"The user's files:\n{listed}")
    return "\n\n".join(parts)


async def _changes(agent: SandboxAgent, plan: Plan) -> list[Change]:
    # An empty folder has no files to compare, but a place for what the agent makes.
    given = plan.project.folder is not None or plan.project.sources
    if agent.client.sandbox_id is None or not given:
        return []
    try:
        return await plan.project.changes(await agent.client.sandbox())
    except SandboxError as error:
        output.note(f"What the agent changed cannot be had: {error}")
        return []


async def _offer(plan: Plan, changes: list[Change], diffs: Sequence[str], screen: Screen) -> bool:
    """Show what changed, and write it back if the user wants that."""
    if not changes:
        return False
    if not plan.order.as_json:
        screen.show_changes(diffs)
    wanted = plan.order.apply
    if not wanted and plan.order.mode != "yolo" and not plan.order.as_json:
        wanted = await ask("Write these changes to your files? [y/N] ") in ("y", "yes")
    if not wanted:
        output.note("Nothing was written to your files; --apply does that.")
        return False
    problems = await plan.project.apply(changes)
    for problem in problems:
        output.note(problem)
    output.note(f"Wrote {len(changes) - len(problems)} of {len(changes)} changes.")
    return not problems


def _code(result: AgentResult) -> int:
    codes = {"done": exit_codes.SUCCESS, "timeout": exit_codes.TIMEOUT, "error": exit_codes.SANDBOX}
    return codes.get(result.status, exit_codes.FAILURE)
