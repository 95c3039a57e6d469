"""The contract of a backend, as far as it can be had without Daytona: against the stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("daytona", reason="uses its SDK: pip install '.[daytona]'")
from stand_in import KEY, StandIn, stand_in  # noqa: E402

from paracle_sandbox import Settings  # noqa: E402
from paracle_sandbox.backends.daytona.backend import DaytonaBackend  # noqa: E402
from paracle_sandbox.testing.conformance import Check, all_checks, run_check  # noqa: E402

NO_FEATURES: frozenset[str] = frozenset()
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[StandIn]:
    async with stand_in() as server:
        yield server


@pytest.mark.parametrize("check", [c for c in all_checks() if not c.needs], ids=lambda c: c.name)
async def test_contract(api: StandIn, check: Check) -> None:
    backend = DaytonaBackend(Settings(daytona_key=KEY, daytona_url=api.url))
    try:
        await run_check(check, backend, NO_FEATURES)
    finally:
        await backend.close()
    assert not api.sandboxes, "it left something behind"
