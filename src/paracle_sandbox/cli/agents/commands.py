"""``paracle agents``: the flags of each command. What they do is in the modules they import."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ..exit_codes import ends_with_a_code
from ..sandbox import Backend, Json, Network

app = typer.Typer(
    help="Let agents work on tasks, in sandboxes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Mode(StrEnum):
    safe = "safe"
    sandbox = "sandbox"
    review = "review"
    yolo = "yolo"


class ProviderName(StrEnum):
    openai = "openai"
    anthropic = "anthropic"
    google = "google"
    mistral = "mistral"
    groq = "groq"
    ollama = "ollama"


@app.command()
@ends_with_a_code
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An agent, or its file.")],
    task: Annotated[str, typer.Option("--task", "-t", help="What to do.")],
    mode: Annotated[
        Mode | None, typer.Option(help="What it may do; see below. safe if left out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask.")] = None,
    provider: Annotated[ProviderName | None, typer.Option(help="Whose model it is.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Address of a compatible endpoint.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is steady, 1 is lively.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one answer.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="KEY=VALUE", help="Repeatable.")
    ] = None,
    files: Annotated[
        list[str] | None, typer.Option("--file", metavar="PATH", help="File or folder; repeatable.")
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Project folder to work on a copy of.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the changes back without asking.")
    ] = False,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for the whole task.")] = 300,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Most turns of the model.")] = None,
    cost_limit: Annotated[
        float | None, typer.Option(min=0, help="Most dollars; needs a price.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="IN/OUT", help="Dollars per million tokens, as 3/15.")
    ] = None,
    mcp: Annotated[
        str | None, typer.Option("--mcp", metavar="FILE", help="mcp.json with further tools.")
    ] = None,
    memory: Annotated[int | None, typer.Option(help="Memory of the sandbox in MB.")] = None,
    cpu: Annotated[float | None, typer.Option(help="CPU cores of the sandbox.")] = None,
    network: Annotated[Network | None, typer.Option(help="Network of the sandbox.")] = None,
    require_sandbox: Annotated[
        bool, typer.Option("--require-sandbox", help="Refuse to fall back to safe mode.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="With yolo: run on this machine, NOT isolated.")
    ] = False,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save the result as JSON.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the answer as it comes.")
    ] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the answers of tools.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, do nothing.")] = False,
    as_json: Json = False,
    backend: Backend = None,
) -> int:
    """Let an agent work on a task.

    \b
    Modes:
      safe     reads the files you give; nothing is run
      sandbox  every tool runs in a sandbox; falls back to safe when there is none
      review   as sandbox, and asks before every tool call
      yolo     as sandbox, and never asks; on this machine only with --host

    A folder is copied in. What the agent changed is shown, and written back with --apply, or
    when you agree.

    \b
    Examples:
      paracle agents run coder --task "Fix bug" --mode sandbox
      paracle agents run coder --task "Fix the tests" --mode sandbox --workspace . --apply
      paracle agents run analyst --task "Which month sold best?" --mode sandbox --file sales.csv
    """
    from . import run as runs

    return runs.run_agent(
        runs.Order(
            name=name, task=task, mode=runs.chosen_mode(mode and mode.value), model=model,
            provider=provider.value if provider else None, base_url=base_url,
            temperature=temperature, max_tokens=max_tokens, inputs=inputs or (),
            files=files or (), workspace=workspace, apply=apply, timeout=timeout,
            max_steps=max_steps, cost_limit=cost_limit, price=price, mcp=mcp,
            limits={"memory_mb": memory, "cpu_cores": cpu,
                    "network_mode": network.value if network else None},
            require_sandbox=require_sandbox, on_host=host, output=output, stream=stream,
            verbose=verbose, dry_run=dry_run, as_json=as_json, backend=backend,
        )
    )  # fmt: skip


@app.command("list")
@ends_with_a_code
def list_agents(as_json: Json = False) -> int:
    """Show the agents there are, built in and your own."""
    from .show import list_agents

    return list_agents(as_json)


@app.command()
@ends_with_a_code
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An agent, or its file.")],
    as_json: Json = False,
) -> int:
    """Show one agent: its tools, its limits, its instructions."""
    from .show import show_agent

    return show_agent(name, as_json)


@app.command()
@ends_with_a_code
def audit(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this agent.")] = None,
    event: Annotated[str | None, typer.Option(help="Only events of this kind.")] = None,
    last: Annotated[int, typer.Option(help="So many lines at most.")] = 100,
    summary: Annotated[bool, typer.Option("--summary", help="One line for each agent.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check that it is unbroken.")] = False,
    prune: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Remove what is older.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what agents did: tasks, tool calls and their outcome, what was blocked."""
    from . import audit

    if prune is not None:
        return audit.prune(prune, as_json)
    if verify:
        return audit.verify(as_json)
    if summary:
        return audit.summary(name, as_json)
    return audit.show(name, event, last, as_json)


@app.command()
@ends_with_a_code
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The agent to stop.")],
    as_json: Json = False,
) -> int:
    """Stop every run of an agent, and remove all its sandboxes."""
    from .audit import stop

    return stop(name, as_json)
