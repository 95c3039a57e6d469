"""The older keys of the ``[sandbox]`` section, those of SandboxSettings, and what they become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import SandboxError
from .setting_rows import parse_flag, parse_memory_mb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SHARED_KEYS = frozenset(
    ["use_sandbox", "image", "work_dir", "memory_limit", "cpu_limit", "timeout", "network_enabled"]
)
# Those of them that say what a sandbox is like: the field of its configuration, the newer row that
# comes before, and how its text is read: a "false" in quotes is no yes, and half a second no zero.
_OLDER: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "image": ("base_image", "", str),
    "work_dir": ("working_dir", "", str),
    "memory_limit": ("memory_mb", "default_memory_mb", parse_memory_mb),
    "cpu_limit": ("cpu_cores", "default_cpu_cores", float),
    "timeout": ("timeout_seconds", "default_timeout_seconds", int),
    "network_enabled": (
        "network_mode", "network_mode", lambda text: "bridge" if parse_flag(text) else "none",
    ),
}  # fmt: skip


def older_fields(
    section: Mapping[str, Any], given: frozenset[str], file: str = "config.toml"
) -> Iterator[tuple[str, Any]]:
    """What the keys of the section say, where the newer ones say nothing. Raises SandboxError."""
    for key, (name, newer, parse) in _OLDER.items():
        if key in section and newer not in given:
            try:
                yield name, parse(str(section[key]))
            except (ValueError, OverflowError) as error:
                raise SandboxError(
                    f"{file}: {key} = {section[key]!r} is not allowed: {error}"
                ) from error
