"""``paracle agents``: the options of each command. What they do is in the modules they import."""

from __future__ import annotations

import math
from argparse import Namespace

from ...config import InRange, OneOf
from ..options import (
    ANY_COUNT,
    add_backend,
    add_config_options,
    add_json,
    add_verbose,
    given_limits,
)
from ..parser import Command

_MODES = ("safe", "sandbox", "review", "yolo")
_PROVIDERS = ("openai", "anthropic", "google", "mistral", "groq", "ollama")
_POSITIVE = InRange(int, 1, math.inf)


def declare_run(command: Command) -> None:
    command.text = """\
        Let an agent work on a task.

        Modes:
          safe     reads the files you give; nothing is run
          sandbox  every tool runs in a sandbox; falls back to safe when there is none
          review   as sandbox, and asks before every tool call
          yolo     as sandbox, and never asks; on this machine only with --host

        A folder is copied in. What the agent changed is shown, and written back with --apply, or
        when you agree.

        Examples:
          paracle agents run coder --task "Fix bug" --mode sandbox
          paracle agents run coder --task "Fix the tests" --mode sandbox \\
              --workspace . --apply
          paracle agents run analyst --task "Which month sold best?" --mode sandbox \\
              --file sales.csv
        """
    command.argument("name", "NAME", "An agent, or its file.")
    command.start_section("The task")
    command.option("--task", "-t", metavar="TEXT", help="What to do.", is_required=True)
    command.option(
        "--mode", metavar="|".join(_MODES), choices=_MODES, check=OneOf(*_MODES),
        help="What it may do; see above. safe if left out.",
    )  # fmt: skip
    command.option("--input", dest="inputs", metavar="KEY=VALUE", is_list=True, help="Repeatable.")
    command.option(
        "--file", dest="files", metavar="PATH", is_list=True, help="File or folder; repeatable."
    )
    command.option("--workspace", metavar="FOLDER", help="Project folder to work on a copy of.")
    command.switch("--apply", help="Write the changes back without asking.")
    command.start_section("The model")
    command.option("--model", metavar="NAME", help="Model to ask.")
    command.option(
        "--provider", metavar="NAME", choices=_PROVIDERS, check=OneOf(*_PROVIDERS),
        help=f"Whose model it is: {', '.join(_PROVIDERS)}.",
    )  # fmt: skip
    command.option("--base-url", metavar="URL", help="Address of a compatible endpoint.")
    command.option(
        "--temperature", metavar="NUMBER", check=InRange(float, -math.inf, math.inf),
        help="0 is steady, 1 is lively.",
    )  # fmt: skip
    command.option(
        "--max-tokens", metavar="NUMBER", check=_POSITIVE, help="Most tokens of one answer."
    )
    command.option("--mcp", metavar="FILE", help="mcp.json with further tools.")
    command.start_section("Limits")
    command.option(
        "--timeout", metavar="NUMBER", check=_POSITIVE, default=300,
        help="Seconds for the whole task.",
    )  # fmt: skip
    command.option(
        "--max-steps", metavar="NUMBER", check=_POSITIVE, help="Most turns of the model."
    )
    command.option(
        "--cost-limit", metavar="NUMBER", check=InRange(float, 0.0, math.inf),
        help="Most dollars; needs a price.",
    )  # fmt: skip
    command.option("--price", metavar="IN/OUT", help="Dollars per million tokens, as 3/15.")
    command.start_section("The sandbox")
    add_config_options(command, "--memory", "--cpu", "--network")
    command.switch("--require-sandbox", help="Refuse to fall back to safe mode.")
    command.switch("--host", help="With yolo: run on this machine, NOT isolated.")
    add_backend(command)
    command.start_section("What is shown")
    command.option("--output", metavar="FILE", help="Save the result as JSON.")
    command.on_off("--stream", help="Show the answer as it comes.", default=True)
    add_verbose(command, "Show the answers of tools.")
    command.switch("--dry-run", help="Show the plan, do nothing.")
    add_json(command)
    command.action = _run


def _run(given: Namespace) -> int:
    from . import run as runs

    return runs.run_agent(
        runs.Order(
            name=given.name, task=given.task, mode=runs.chosen_mode(given.mode),
            model=given.model, provider=given.provider, base_url=given.base_url,
            temperature=given.temperature, max_tokens=given.max_tokens,
            inputs=given.inputs or (), files=given.files or (), workspace=given.workspace,
            apply=given.apply, timeout=given.timeout, max_steps=given.max_steps,
            cost_limit=given.cost_limit, price=given.price, mcp=given.mcp,
            limits=given_limits(given), require_sandbox=given.require_sandbox,
            on_host=given.host, output=given.output, stream=given.stream, verbose=given.verbose,
            dry_run=given.dry_run, as_json=given.as_json, backend=given.backend,
        )
    )  # fmt: skip


def declare_list(command: Command) -> None:
    command.text = "Show the agents there are, built in and your own."
    add_json(command)
    command.action = _list


def _list(given: Namespace) -> int:
    from .show import list_agents

    return list_agents(given.as_json)


def declare_show(command: Command) -> None:
    command.text = "Show one agent: its tools, its limits, its instructions."
    command.argument("name", "NAME", "An agent, or its file.")
    add_json(command)
    command.action = _show


def _show(given: Namespace) -> int:
    from .show import show_agent

    return show_agent(given.name, given.as_json)


def declare_audit(command: Command) -> None:
    command.text = "Show what agents did: tasks, tool calls and their outcome, what was blocked."
    command.argument("name", "NAME", "Only this agent.", "?")
    command.option("--event", metavar="KIND", help="Only events of this kind.")
    command.option(
        "--last", metavar="NUMBER", check=ANY_COUNT, default=100, help="So many lines at most."
    )
    command.switch("--summary", help="One line for each agent.")
    command.switch("--verify", help="Check that it is unbroken.")
    command.option(
        "--prune", metavar="DAYS", check=InRange(float, 0.0, math.inf),
        help="Remove what is older.",
    )  # fmt: skip
    add_json(command)
    command.action = _audit


def _audit(given: Namespace) -> int:
    from . import audit

    if given.prune is not None:
        return audit.prune(given.prune, given.as_json)
    if given.verify:
        return audit.verify(given.as_json)
    if given.summary:
        return audit.summary(given.name, given.as_json)
    return audit.show(given.name, given.event, given.last, given.as_json)


def declare_stop(command: Command) -> None:
    command.text = "Stop every run of an agent, and remove all its sandboxes."
    command.argument("name", "NAME", "The agent to stop.")
    add_json(command)
    command.action = _stop


def _stop(given: Namespace) -> int:
    from .audit import stop

    return stop(given.name, given.as_json)
