"""``paracle agents list`` and ``show``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ...errors import SandboxError
from .. import exit_codes, output
from ..exit_codes import UsageFault
from ..options import settings_or_fault


def list_agents(as_json: bool) -> int:
    from ...agents.definitions import find_broken_agents, known_agents

    folder = Path(settings_or_fault().agents_dir)
    agents, broken = known_agents(folder).values(), find_broken_agents(folder).items()
    if as_json:
        wrong = [{"name": name, "error": str(error)} for name, error in broken]
        output.say_json([*map(asdict, agents), *wrong])
    else:
        rows = [[a.name, a.description, a.source] for a in agents]
        rows += [[name, f"cannot be used: {error}", str(folder)] for name, error in broken]
        output.table("", ["Agent", "Description", "From"], rows)
    return exit_codes.SUCCESS


def show_agent(name: str, as_json: bool) -> int:
    from ...agents.definitions import find_agent

    try:
        agent = find_agent(name, Path(settings_or_fault().agents_dir))
    except SandboxError as error:
        raise UsageFault(str(error)) from None
    if as_json:
        output.say_json(asdict(agent))
        return exit_codes.SUCCESS
    fields = {key: value for key, value in asdict(agent).items() if key != "instructions"}
    fields["tools"] = ", ".join(agent.tools)
    rows = [[key, str(value)] for key, value in fields.items() if value not in (None, "")]
    output.table("", ["", ""], rows)
    output.say()
    output.say(agent.instructions)
    return exit_codes.SUCCESS
