"""Values laid out as text: what IPython makes of them, for many."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import random
import re
import types
from importlib.resources import files
from typing import Any

import pytest

pretty = pytest.importorskip("IPython.lib.pretty", reason="compares with it: pip install ipython")


def lay_out(value: Any, limit: int = 10**9) -> str:
    """Run the texts as the program of a session does, because they cannot be imported."""
    parts = (files("paracle_sandbox.sessions").joinpath(p) for p in ("layout.py", "printers.py"))
    scope: dict[str, Any] = {}
    exec("\n".join(part.read_text() for part in parts), scope)
    return str(scope["lay_out"](value, limit))


class Plain: ...


class OwnList(list): ...  # type: ignore[type-arg]


class Breaks:
    def _repr_pretty_(self, p: Any, cycle: bool) -> None:
        with p.group(4, "R<<<", ">>>"):
            for number in range(30):
                p.text(f"item {number},")
                p.breakable()


@dataclasses.dataclass
class Point:
    x: int
    y: str


def function(a: int, *, b: int = 1) -> None: ...


CYCLE: list[Any] = [1]
CYCLE.append(CYCLE)
VALUES: list[Any] = [
    1.5, "a\nb", b"x" * 100, list(range(100)), list(range(2000)), (1,), (), {}, set(), {3, 1, 2},
    {1, "a"}, frozenset({2, 1}), Plain, Plain(), OwnList(range(60)), Breaks(), [Breaks()],
    [Point(1, "y" * 60)] * 3, function, len, [].append, ValueError("a" * 100, 2), KeyError("k"),
    collections.OrderedDict(a=1), collections.defaultdict(list, {1: [2]}),
    collections.Counter("abba"),
    collections.deque(range(60), maxlen=99), types.SimpleNamespace(a=1, b=list(range(40))),
    re.compile(r"a\d", re.IGNORECASE), CYCLE, range(5), [datetime.timedelta(1)] * 20, None, ...,
    types.MappingProxyType({1: 2}), collections.ChainMap({1: 2}), ["multi\nline"] * 3,
    {(1, 2): [3] * 40}, collections.UserList([1]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_as_ipython(value: Any) -> None:
    assert lay_out(value) == pretty.pretty(value)


def made_up(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(7 if depth else 3)
    count = chance.randrange(8)
    if kind == 0:
        return chance.randrange(10 ** chance.randrange(1, 12))
    if kind == 1:
        return "s" * chance.randrange(40)
    if kind == 2:
        return chance.choice([None, 1.5, b"x", int, "a\nb"])
    inner = [made_up(chance, depth - 1) for _ in range(count)]
    if kind == 3:
        return {chance.choice(["k", 7, "long key"]) * number: v for number, v in enumerate(inner)}
    return chance.choice([list, tuple, collections.deque])(inner)


@pytest.mark.parametrize("seed", range(150))
def test_anything_as_ipython(seed: int) -> None:
    value = made_up(random.Random(seed), 5)
    assert lay_out(value) == pretty.pretty(value)


def test_bounded() -> None:
    assert len(lay_out([["x" * 900] * 900] * 900, 1000)) < 1100
    assert len(lay_out([[[0] * 900] * 900] * 900)) < 200_000
