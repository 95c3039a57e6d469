"""The gVisor backend keeps the contract, on a real engine with runsc."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from checks import parameters

from containers import Containers, engine_settings, opened
from paracle_sandbox.backends.docker.gvisor import GvisorBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.testing.conformance import Check, run_check, run_quick

# The checks that fail here, each with the reason.
KNOWN_FAILURES: dict[str, str] = {
    "limits.too_many_processes": "gVisor refuses a process too many, but counts no refusals",
    "streams.a_pty_is_a_terminal": "gVisor does not open /dev/tty, though the terminal controls",
    "isolation.the_first_process_cannot_be_harmed": "gVisor lets a program kill its first process;"
    " the sandbox ends then, and says so",
    "managers.a_monitor_sees_the_load": "gVisor's own memory, about 30 MB, counts as the sandbox's",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gvisor() -> AsyncIterator[Containers]:
    async for containers in opened(GvisorBackend(engine_settings("gvisor")), frozenset()):
        yield containers


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(gvisor: Containers, check: Check) -> None:
    if missing := check.missing(gvisor.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; run as root, with btrfs")
    await run_check(check, gvisor.backend, gvisor.features)
    await gvisor.leftovers.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_quick_checks_report(gvisor: Containers) -> None:
    told: dict[str, bool] = {}

    def report(name: str, ok: bool, detail: str) -> None:
        assert detail
        told[name] = ok

    assert await run_quick(gvisor.backend, report, SandboxConfig(cpu_cores=0.5, memory_mb=256))
    assert all(told.values())
    assert {"health", "python_programs.hello", "isolation.there_is_no_network"} <= set(told)
