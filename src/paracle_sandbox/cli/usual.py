"""The usual command, ``paracle sandbox execute FILE``, read without what reads all others.

It knows the flags of a program in one file. Those of workspaces, packages, commands and terminals
are left to the other parser.

Importing that takes longer than to make a sandbox. Whatever is not plainly right here is left to
it, with everything that it has to say about it.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Flags of the command in ``sandbox.py``, by what they set; a test compares them.
LIMITS: dict[str, tuple[str, Callable[[str], object]]] = {
    "--cpu": ("cpu_cores", float),
    "--memory": ("memory_mb", int),
    "--disk": ("disk_mb", int),
    "--timeout": ("timeout_seconds", int),
}
NETWORKS = ("none", "bridge", "host")
TEXTS = {
    "--inputs": "inputs", "--output": "output", "--template": "template", "--backend": "backend",
}  # fmt: skip
SWITCHES = {
    "--monitor": ("monitor", True), "--no-monitor": ("monitor", False), "--raw": ("raw", True),
    "--verbose": ("verbose", True), "-v": ("verbose", True), "--json": ("as_json", True),
    "--quiet": ("quiet", True), "-q": ("quiet", True),
}  # fmt: skip


class _Unusual(Exception):
    """Not for us to read."""


def read(words: list[str]) -> dict[str, Any] | None:
    """The fields of an Order; None for any other command."""
    if words[:2] != ["sandbox", "execute"]:
        return None
    limits: dict[str, object] = {}
    env: list[str] = []
    order: dict[str, Any] = {"limits": limits, "env": env}
    positional: list[str] = []
    rest = iter(words[2:])
    try:
        for word in rest:
            if word == "--":
                if not positional:
                    return None  # a command follows, and no file
                positional += rest
            elif word in SWITCHES:
                name, value = SWITCHES[word]
                order[name] = value
            elif word[:1] != "-" or word == "-":
                positional.append(word)
            else:
                _read_flag(*_with_value(word, rest), order)
    except (_Unusual, ValueError):
        return None
    if not positional:
        return None
    return {**order, "file": positional[0], "args": positional[1:]}


def _with_value(word: str, rest: Any) -> tuple[str, str]:
    flag, given, value = word.partition("=")
    if not given:
        value = next(rest, "-")
        if value[:1] == "-":
            raise _Unusual(word)
    return flag, value


def _read_flag(flag: str, value: str, order: dict[str, Any]) -> None:
    if flag in LIMITS:
        name, kind = LIMITS[flag]
        order["limits"][name] = kind(value)
    elif flag in TEXTS:
        order[TEXTS[flag]] = value
    elif flag == "--env":
        order["env"].append(value)
    elif flag == "--network" and value in NETWORKS:
        order["limits"]["network_mode"] = value
    else:
        raise _Unusual(flag)


def run(order: dict[str, Any]) -> int:
    """What the command does with it."""
    from .exit_codes import code_of
    from .output import never_fail_on_a_letter

    never_fail_on_a_letter()

    def execute() -> int:
        from .execute import Order, execute

        return execute(Order(**order))

    return code_of(execute)
