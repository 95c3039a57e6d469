"""The fake backend keeps the contract except for isolation and limits.

A check that passes here and fails on a real backend shows a fault of that backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.testing.conformance import Case, Check, all_checks, check, run_check, run_quick
from paracle_sandbox.testing.fake import FakeBackend

NO_FEATURES: frozenset[str] = frozenset()


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeBackend]:
    backend = FakeBackend()
    yield backend
    await backend.close()


@pytest.mark.parametrize("check", [c for c in all_checks() if not c.needs], ids=lambda c: c.name)
async def test_contract(fake: FakeBackend, check: Check) -> None:
    await run_check(check, fake, NO_FEATURES)


def test_checks_are_many_described_and_named_once() -> None:
    checks = all_checks()
    names = [check.name for check in checks]
    assert len(names) >= 60
    assert len(set(names)) == len(names)
    assert all(check.body.__doc__ and "\n" not in check.description for check in checks)


async def test_a_check_whose_features_are_missing_does_not_run(fake: FakeBackend) -> None:
    needy = next(c for c in all_checks() if c.needs)
    with pytest.raises(ValueError, match=needy.name):
        await run_check(needy, fake, NO_FEATURES)
    assert fake.created == []


async def test_what_a_check_made_is_removed_though_it_fails(fake: FakeBackend) -> None:
    @check()
    async def fails(case: Case) -> None:
        """Create sandboxes and a file, then fail."""
        await case.sandbox()
        await case.manager().create()
        (case.directory / "file").write_text("x")
        raise LookupError(str(case.directory))

    with pytest.raises(LookupError) as caught:
        await run_check(fails, fake, NO_FEATURES)
    assert await fake.list_sandboxes() == []
    assert not Path(str(caught.value)).exists()


async def test_run_quick_tells_what_fails() -> None:
    told: list[tuple[str, bool, str]] = []
    fake = FakeBackend(SandboxCreationError("out of order"))
    assert not await run_quick(fake, lambda *line: told.append(line))
    assert ("health", True) == told[0][:2]
    failed = [line for line in told if not line[1]]
    assert failed and all("out of order" in detail for _, _, detail in failed)
    left_out = [detail for _, ok, detail in told if ok and "left out" in detail]
    assert left_out


async def test_run_quick_passes_the_configuration_on(fake: FakeBackend) -> None:
    configs: list[SandboxConfig] = []
    create = fake.create

    async def watched(sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]) -> None:
        configs.append(config)
        await create(sandbox_id, config, labels)

    fake.create = watched  # type: ignore[method-assign]
    assert await run_quick(fake, lambda *_: None, SandboxConfig(memory_mb=300))
    assert configs and all(config.memory_mb == 300 for config in configs)
