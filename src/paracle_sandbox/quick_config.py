"""A sandbox's configuration without pydantic, whose import takes longer than a short command.

It has the same fields, and only values that are right beyond doubt: with any other the real one is
made, which says what is wrong. Whoever wants more than a field of it gets the real one's.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from .config import SandboxConfig

# What SandboxConfig says too; a test compares them.
DEFAULTS: dict[str, Any] = {
    "base_image": "paracle/sandbox:latest",
    "cpu_cores": 1.0,
    "memory_mb": 512,
    "disk_mb": 1024,
    "timeout_seconds": 300,
    "network_mode": "none",
    "read_only_filesystem": True,
    "drop_capabilities": True,
    "working_dir": "/workspace",
    "env_vars": {},
    "volumes": {},
    "cleanup_timeout": 30,
    "max_processes": 256,
    "max_output_mb": 16,
    "fresh_interpreter": False,
    "allow_degraded": frozenset(),
}
RANGES = {
    "cpu_cores": (0.1, 16.0),
    "memory_mb": (128, 16384),
    "disk_mb": (256, 10240),
    "timeout_seconds": (10, 3600),
    "cleanup_timeout": (5, 300),
    "max_processes": (8, 4096),
    "max_output_mb": (1, 1024),
}
CHOICES = {
    "base_image": ("paracle/sandbox:latest", "paracle/sandbox:ml", "paracle/sandbox:dev",
                   "paracle/sandbox:api"),
    "network_mode": ("none", "bridge", "host"),
    "read_only_filesystem": (True, False),
    "drop_capabilities": (True, False),
}  # fmt: skip


class QuickConfig:
    """Stands in for a SandboxConfig."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        from .config import SandboxConfig

        return getattr(SandboxConfig(**vars(self)), name)


def quick_config(**values: Any) -> SandboxConfig:
    """``SandboxConfig(**values)``, or what stands in for it. Raises pydantic's ValidationError,
    which is a ValueError."""
    if all(_is_right(name, value) for name, value in values.items()):
        return QuickConfig({**DEFAULTS, **values})  # type: ignore[return-value]
    from .config import SandboxConfig

    return SandboxConfig(**values)


def _is_right(name: str, value: Any) -> bool:
    usual = DEFAULTS.get(name)
    if type(value) is not type(usual):
        return False
    if name == "env_vars":
        assert isinstance(value, dict)
        return all(map(_is_passable, value.items()))
    if name in RANGES:
        low, high = RANGES[name]
        return isinstance(value, int | float) and low <= value <= high
    return value == usual or value in CHOICES.get(name, ())


def _is_passable(variable: tuple[str, str]) -> bool:
    name, text = variable
    return name.isascii() and name.isidentifier() and "\0" not in text
