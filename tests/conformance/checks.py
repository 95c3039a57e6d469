"""The checks of the contract as parameters of a test, with the marks that each of them needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paracle_sandbox.testing.conformance import all_checks

# A busy machine does not have the processors that these checks need.
READ_CLOCKS = frozenset({"limits.cpu_is_limited"})


def parameters(known_failures: dict[str, str]) -> list[object]:
    """Return every check. A check that is known to fail and passes by accident fails the run."""
    return [
        pytest.param(check, id=check.name, marks=list(_marks(check.name, known_failures)))
        for check in all_checks()
    ]


def _marks(name: str, known_failures: dict[str, str]) -> Iterator[pytest.MarkDecorator]:
    if name in known_failures:
        yield pytest.mark.xfail(reason=known_failures[name], strict=True)
    if name in READ_CLOCKS:
        yield pytest.mark.clock
