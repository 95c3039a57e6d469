"""The kinds of rows that the table of settings has: each with its parser and what it allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, cast

from .platforms import user_id

Environment = Mapping[str, str]

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
# What can be waived by name: limits by control groups for root, rules between containers.
LAYERS = ("cgroup", "firewall")
# What the native backend has for speed alone: all works without.
SPEED = ("warm-pool", "preforked", "fork-server", "keep-alive")
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Setting:
    """One row of the table: what may be set, where, to what, and what it does."""

    variable: str
    meaning: str
    parse: Callable[[str], object]
    allowed: str
    env_only: bool = False
    derive: Callable[[Environment], object] | None = None

    def is_written(self, value: object) -> bool:
        """Whether a file may write it so: the text of a number or of a list is not a text."""
        return isinstance(value, str if self.parse is str else str | int | float)


def home(env: Environment) -> Path:
    """That of a user whom no file knows, as in many containers, does not exist."""
    return Path(env.get("HOME") or os.path.expanduser("~").replace("~", "/nonexistent"))


def own_runtime_dir(env: Environment) -> str | None:
    """Whoever became another user by ``su`` still has the variable, which names another's."""
    runtime = env.get("XDG_RUNTIME_DIR") or ""
    try:
        return runtime if os.stat(runtime).st_uid == user_id() else None
    except OSError:
        return None


def parse_memory_mb(text: str) -> int:
    """Megabytes in ``512m``, ``1g``, ``512MiB`` or a plain number of bytes, rounded up.

    Units are powers of 1024 throughout, as Docker reads them."""
    lowered = text.strip().lower()
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = lowered[len(number) :].strip()
    size = _UNITS.get(unit if len(unit) < 2 else unit.removesuffix("b").removesuffix("i"))
    if size is None or not number.replace(".", "", 1).isdecimal():
        raise ValueError(f"not an amount of memory: {text!r}; write it as 512m, 1g or 512MiB")
    return -(-int(float(number) * size) // (1 << 20))


def parse_flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return lowered in _TRUE


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def layers(text: str) -> tuple[str, ...]:
    """Names of layers that can be waived. Raises ValueError for any other."""
    found = names(text)
    if unknown := [name for name in found if name not in LAYERS]:
        raise ValueError(f"there is no layer {unknown[0]!r} to do without")
    return found


def speed(text: str) -> tuple[str, ...]:
    """Names of what is to be off; "off" is all of them. Raises ValueError for any other."""
    found = names(text)
    if unknown := [name for name in found if name not in (*SPEED, "off")]:
        raise ValueError(f"there is no {unknown[0]!r} to switch off")
    return SPEED if "off" in found else found


def row(setting: Setting, default: object = MISSING) -> Any:
    if setting.derive is not None:
        derive = setting.derive
        return field(default_factory=lambda: derive(os.environ), metadata={"setting": setting})
    # A secret must not show in a log line that prints the settings; an index may have a login.
    shown = not setting.variable.endswith(("_KEY", "_INDEX"))
    return field(default=cast(Any, default), repr=shown, metadata={"setting": setting})


def text(variable: str, default: str | None, meaning: str, *, env_only: bool = False) -> Any:
    return row(Setting(variable, meaning, str, "any text", env_only), default)


def choice(variable: str, default: str, allowed: tuple[str, ...], meaning: str) -> Any:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(text)
        return "docker" if value == "local" else value

    return row(Setting(variable, meaning, parse, "one of " + ", ".join(allowed)), default)


def number(
    variable: str, default: float, meaning: str, low: float, high: float, *, mb: bool = False
) -> Any:
    kind: Callable[[str], float] = parse_memory_mb if mb else type(default)

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    what = "an amount of memory such as 512m," if mb else f"{type(default).__name__},"
    return row(Setting(variable, meaning, parse, f"{what} from {low:,} to {high:,}"), default)


def flag(variable: str, default: bool, meaning: str) -> Any:
    return row(Setting(variable, meaning, parse_flag, "true or false"), default)


def directory(variable: str, derive: Callable[[Environment], str], meaning: str) -> Any:
    def parse(text: str) -> str:
        if not text.startswith("/"):
            raise ValueError(text)
        return text

    return row(Setting(variable, meaning, parse, "an absolute path", True, derive))
