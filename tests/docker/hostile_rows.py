"""The tests of ``tests/hostile``, to be run on another backend: the same attacks and oracles."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

MODULES = (
    "control_channel", "disk", "filesystem", "information", "kernel", "memory", "network_none",
    "output", "privileges", "processes", "terminal_ipc", "time",
)  # fmt: skip


def hostile_tests(different: Mapping[str, str], modules: Sequence[str] = MODULES) -> dict[str, Any]:
    """By name, without those that are ``different`` there, each for the reason given."""
    found: dict[str, Any] = {}
    for name in modules:
        for attribute, value in vars(importlib.import_module(f"test_{name}")).items():
            is_fixture = type(value).__name__ == "FixtureFunctionDefinition"
            if attribute.startswith("test_") or is_fixture:
                assert attribute not in found, f"two tests are called {attribute}"
                found[attribute] = value
    unknown = set(different) - set(found)
    assert not unknown, f"no such tests: {sorted(unknown)}"
    return {name: value for name, value in found.items() if name not in different}
