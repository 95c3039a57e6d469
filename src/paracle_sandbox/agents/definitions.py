"""Reads the definitions of agents from files: the built-in ones and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from ..errors import SandboxError
from .front_matter import Value, read_markdown, read_yaml

N = TypeVar("N", int, float)
SUFFIXES = (".md", ".yaml", ".yml")
# The names of tools in agent files, and the names that models see.
TOOL_NAMES = {
    "python": "python_execute",
    "shell": "sandbox_shell",
    "files": "sandbox_files",
    "packages": "install_packages",
    "vision": "sandbox_vision",
    "browser": "sandbox_browser",
}
# Few sandboxes have a browser: an agent has that tool only if its file says so.
TOOLS = tuple(name for name in TOOL_NAMES if name != "browser")


@dataclass(frozen=True)
class AgentDefinition:
    """The definition of an agent. A field that is None is left to flags and defaults."""

    name: str
    description: str
    instructions: str
    source: str
    provider: str | None = None
    model: str | None = None
    tools: tuple[str, ...] = TOOLS
    max_steps: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    price: tuple[float, float] | None = None


def known_agents(folder: Path | None = None) -> dict[str, AgentDefinition]:
    """Return all agents by name. The user's own replace built-in ones of the same name. Agents
    whose file cannot be read are left out; find_broken_agents() returns them."""
    own, broken = _read_own_agents(folder)
    found = {agent.name: agent for agent in _read_built_in_agents() if agent.name not in broken}
    return {**found, **own}


def find_broken_agents(folder: Path | None = None) -> dict[str, SandboxError]:
    """Return what is wrong with each of the user's files that cannot be read, by its stem."""
    return _read_own_agents(folder)[1]


def find_agent(name: str, folder: Path | None = None) -> AgentDefinition:
    """Return an agent by name, or by the path of its file. Raises SandboxError that names the
    known agents, or says what is wrong with this agent's file."""
    path = Path(name)
    if path.suffix in SUFFIXES and path.is_file():
        return read_agent(path)
    agents, broken = known_agents(folder), find_broken_agents(folder)
    if name in agents:
        return agents[name]
    if name in broken:
        raise broken[name]
    unread = f" Cannot be read: {'; '.join(map(str, broken.values()))}." if broken else ""
    raise SandboxError(
        f"There is no agent {name!r}; known are {', '.join(agents)}. Your own are files in "
        f"{folder}, or name a file.{unread}"
    )


def _read_own_agents(
    folder: Path | None,
) -> tuple[dict[str, AgentDefinition], dict[str, SandboxError]]:
    """Return the user's agents, and what is wrong with the files that cannot be read."""
    found: dict[str, AgentDefinition] = {}
    broken: dict[str, SandboxError] = {}
    if folder is None or not folder.is_dir():
        return found, broken
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            try:
                agent = read_agent(path)
            except SandboxError as error:
                broken[path.stem] = error
            else:
                found[agent.name] = agent
    return found, broken


def read_agent(path: Path) -> AgentDefinition:
    """Read the file of one agent. Raises SandboxError that names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SandboxError(f"{path} cannot be read: {error}") from error
    return parse_agent(text, path.stem, str(path), markdown=path.suffix == ".md")


def parse_agent(text: str, name: str, source: str, *, markdown: bool) -> AgentDefinition:
    """Parse a definition. Raises SandboxError that names the file and what is wrong with it."""
    keys: dict[str, Value]
    if markdown:
        keys, body = read_markdown(text, source)
    else:
        keys = read_yaml(text, source)
        body = _check_text(keys.pop("instructions", keys.pop("prompt", "")), "instructions", source)
    if not body.strip():
        raise SandboxError(f"{source}: an agent needs instructions")
    unknown = set(keys) - {*_NUMBERS, "name", "description", "provider", "model", "tools", "price"}
    if unknown:
        raise SandboxError(f"{source}: an agent has no key {sorted(unknown)[0]!r}")
    texts = {
        key: _check_text(keys[key], key, source)
        for key in ("name", "description", "provider", "model")
        if key in keys
    }
    return AgentDefinition(
        name=texts.get("name", name),
        description=texts.get("description", ""),
        instructions=body.strip(),
        source=source,
        provider=texts.get("provider"),
        model=texts.get("model"),
        tools=_check_tools(keys.get("tools"), source),
        price=parse_price(_check_text(keys["price"], "price", source)) if "price" in keys else None,
        max_steps=_parse_number(keys, "max_steps", source, int),
        max_tokens=_parse_number(keys, "max_tokens", source, int),
        temperature=_parse_number(keys, "temperature", source, float),
    )


_NUMBERS = ("max_steps", "max_tokens", "temperature")


def parse_price(text: str) -> tuple[float, float]:
    """Parse a price such as ``3/15``: dollars per million tokens in, and out."""
    inward, _, outward = text.partition("/")
    try:
        price = float(inward), float(outward)
    except ValueError:
        price = -1.0, -1.0
    if min(price) < 0:
        raise SandboxError(
            f"A price is dollars per million tokens in and out, such as 3/15, not {text!r}"
        )
    return price


def _check_text(value: Value, key: str, source: str) -> str:
    if not isinstance(value, str):
        raise SandboxError(f"{source}: {key} must be a text")
    return value


def _check_tools(value: Value | None, source: str) -> tuple[str, ...]:
    if value is None:
        return TOOLS
    names = [value] if isinstance(value, str) else value
    unknown = [name for name in names if name not in TOOL_NAMES]
    if unknown:
        raise SandboxError(
            f"{source}: there is no tool {unknown[0]!r}; known are {', '.join(TOOL_NAMES)}"
        )
    return tuple(names)


def _parse_number(
    keys: dict[str, Value], key: str, source: str, kind: Callable[[str], N]
) -> N | None:
    if key not in keys:
        return None
    try:
        return kind(_check_text(keys[key], key, source))
    except ValueError:
        raise SandboxError(f"{source}: {key} must be a number, not {keys[key]!r}") from None


def _read_built_in_agents() -> Iterator[AgentDefinition]:
    folder = files(__package__).joinpath("builtin")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".md"):
            text = entry.read_text(encoding="utf-8")
            yield parse_agent(text, entry.name.removesuffix(".md"), "built-in", markdown=True)
