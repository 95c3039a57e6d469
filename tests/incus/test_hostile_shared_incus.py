"""More hostile code against Incus containers: probes that change nothing, in one instance for all,
and a few that need their own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from incus_fixtures import of_image
from test_hostile_incus import MODULES, blocks_a_release

from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("scenes", "no_native"),
]

# Tests with instances of their own, about limits and places that the server gives.
OWN = {
    "test_shared_memory_is_bounded_and_charged_to_the_sandbox",
    "test_swap_adds_nothing",
    "test_an_exec_bomb_gets_its_share_of_a_processor_and_ends_in_time",
    "test_priority_cannot_be_raised_and_buys_no_processor_time",
    "test_zombies_count_and_go_with_their_parent",
    "test_peers_do_not_see_each_other",
}
# Tests that say what only native does, and why it is otherwise here.
DIFFERENT = {
    "test_names_of_the_machine_are_made_up": "the files of /etc are the image's",
    "test_no_credentials_or_sockets_to_be_found": "an image has /etc/shadow, which nobody can read",
    "test_nobody_inside_sees_who_opens_a_shared_file": "no file is shared: each has its own copy",
    "test_nobody_changes_who_they_are": "the server's user namespace allows setgroups to its root",
    "test_cgroups_are_out_of_reach": "the processes of the instance beside the guest are in it too",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native(settings: Settings) -> AsyncIterator[IncusBackend]:
    backend = IncusBackend(settings)
    yield backend
    await backend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(native: IncusBackend) -> AsyncIterator[Sandbox]:
    config = of_image(SandboxConfig(timeout_seconds=120))
    async with Sandbox(native, new_sandbox_id(), config) as sandbox:
        await native.usage(sandbox.sandbox_id)  # it learns the cgroup, which tests ask for
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def make(native: IncusBackend) -> AsyncIterator[Any]:
    started: list[Sandbox] = []

    async def start(config: SandboxConfig | None = None, **options: Any) -> Sandbox:
        started.append(Sandbox(native, new_sandbox_id(), of_image(config), **options))
        await started[-1].start()
        await native.usage(started[-1].sandbox_id)
        return started[-1]

    yield start
    for one in started:
        await one.stop()


def _is_wanted(name: str, test: Any) -> bool:
    if not name.startswith("test_") or blocks_a_release(test):
        return False
    asked = set(inspect.signature(test).parameters)
    return name in OWN or ("sandbox" in asked and not asked & {"make", "lying"})


def _hostile_tests() -> dict[str, Any]:
    modules = [importlib.import_module(f"test_{name}") for name in MODULES]
    found = {name: value for module in modules for name, value in vars(module).items()
             if callable(value) and _is_wanted(name, value)}  # fmt: skip
    assert set(found) >= set(DIFFERENT) | OWN, sorted((set(DIFFERENT) | OWN) - set(found))
    return {name: value for name, value in found.items() if name not in DIFFERENT}


globals().update(_hostile_tests())
