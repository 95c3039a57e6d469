"""Hostile code against Incus containers: the rows of ``tests/hostile`` that block a release, each
in an instance of its own. test_hostile_shared_incus.py has others."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("scenes", "no_native")

MODULES = (
    "control_channel", "disk", "filesystem", "information", "kernel", "memory", "network_none",
    "output", "privileges", "processes", "terminal_ipc", "time",
)  # fmt: skip
# Rows of the catalogue that block a release, of those that are about a backend.
P0 = frozenset(
    "A01 A02 A06 A07 B01 B02 C01 C02 D01 D02 E01 E02 F01 F02 F05 F06 F07 F11 G01 G02 G05 H01 H02"
    " I01 I02 I03 I04 I05 J01 J02 J03 J04 J05 K03 L01 L02 L03 L04 L06 M01 M03 M04 M05 M06".split()
)
# Tests that say what only native does, and why it is otherwise here.
DIFFERENT = {
    "test_flags_of_every_mount": "devices are mounts here, since a container makes no nodes",
}
# Second forms of what another form of the same test shows: instances take their time.
NOT_ON_INCUS = frozenset(
    {
        "test_a_fork_bomb_stays_below_its_limit_and_leaves_no_survivor[A03]",
        "test_one_large_file_ends_at_the_limit[/tmp/fill]",
        "test_a_flood_ends_at_the_limit_and_costs_the_host_little[E03-one-line]",
        "test_a_slow_reader_stalls_the_writer_and_the_deadline_still_holds[0.2]",
    }
)


def rows_of(test: Any) -> set[str]:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "case"]
    return {row for mark in marks for row in mark.args}


def blocks_a_release(test: Any) -> bool:
    return bool(rows_of(test) & P0)


def _hostile_tests() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MODULES:
        for attribute, value in vars(importlib.import_module(f"test_{name}")).items():
            is_fixture = type(value).__name__ == "FixtureFunctionDefinition"
            if is_fixture or (attribute.startswith("test_") and blocks_a_release(value)):
                assert attribute not in found, f"two tests are called {attribute}"
                found[attribute] = value
    unknown = {*DIFFERENT, *(name.partition("[")[0] for name in NOT_ON_INCUS)} - set(found)
    assert not unknown, f"no such tests: {sorted(unknown)}"
    kept = {name: value for name, value in found.items() if name not in DIFFERENT}
    bare = P0.difference(*map(rows_of, kept.values()))
    assert not bare, f"rows without a test: {sorted(bare)}"
    return kept


globals().update(_hostile_tests())
