"""``paracle agents list`` and ``show``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from . import endings, output
from .options import settings_or_fault


def list_agents(as_json: bool) -> int:
    from ..agents.definitions import known_agents

    agents = known_agents(Path(settings_or_fault().agents_dir)).values()
    if as_json:
        output.say_json([asdict(agent) for agent in agents])
    else:
        rows = [[a.name, a.description, a.source] for a in agents]
        output.table("", ["Agent", "Description", "From"], rows)
    return endings.SUCCESS


def show_agent(name: str, as_json: bool) -> int:
    from ..agents.definitions import find_agent

    agent = find_agent(name, Path(settings_or_fault().agents_dir))
    if as_json:
        output.say_json(asdict(agent))
        return endings.SUCCESS
    fields = {key: value for key, value in asdict(agent).items() if key != "instructions"}
    fields["tools"] = ", ".join(agent.tools)
    rows = [[key, str(value)] for key, value in fields.items() if value not in (None, "")]
    output.table("", ["", ""], rows)
    output.say()
    output.say(agent.instructions)
    return endings.SUCCESS
