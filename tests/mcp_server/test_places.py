"""Sandboxes by name: what create_sandbox answers, and when it may not say that it made one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from paracle_sandbox import SandboxConfig, SandboxManager, Settings
from paracle_sandbox.mcp.calls import call
from paracle_sandbox.mcp.places import Places
from paracle_sandbox.testing.fake import FakeBackend
from paracle_sandbox.tools import ToolResult


@pytest.fixture
async def places() -> AsyncIterator[Places]:
    places = Places(SandboxManager(2, backend=FakeBackend()), SandboxConfig())
    yield places
    await places.close()


async def asked(
    places: Places, tool: str, /, *, client: str | None = "one", **arguments: Any
) -> ToolResult:
    async def progress(amount: float, message: str) -> None:
        pass

    return await call(places, client, tool, arguments, progress)


async def test_a_name_that_was_given_up_is_given_again(places: Places) -> None:
    for _ in range(2):
        assert not (await asked(places, "create_sandbox")).is_error
    await asked(places, "destroy_sandbox", sandbox="sandbox-1")
    again = await asked(places, "create_sandbox")
    assert again.data == {"sandbox": "sandbox-1"}, again.text


async def test_what_was_made_is_there(places: Places) -> None:
    await asked(places, "create_sandbox", name="mine")
    listed = await asked(places, "list_sandboxes")
    assert listed.data["sandboxes"]["mine"] is not None, listed.text


@pytest.mark.parametrize("client", ["one", None])
async def test_a_sandbox_too_many_is_not_made(places: Places, client: str | None) -> None:
    names = [(await asked(places, "create_sandbox", client=client)).data for _ in range(2)]
    refused = await asked(places, "create_sandbox", client=client)
    assert refused.is_error and refused.data["kind"] == "unavailable", refused.text
    await asked(places, "destroy_sandbox", client=client, **names[0])
    assert not (await asked(places, "create_sandbox", client=client)).is_error


async def test_without_isolation_none_is_made() -> None:
    nowhere = SandboxManager(1, backend="daytona", settings=Settings(daytona_key=None))
    places = Places(nowhere, SandboxConfig())
    try:
        answer = await asked(places, "create_sandbox", name="mine")
        assert answer.is_error and answer.data["kind"] == "unavailable", answer.text
        assert not places.names("one")
    finally:
        await places.close()


@pytest.mark.parametrize("name", ["list_sandboxes", "create_sandbox", "destroy_sandbox"])
async def test_unknown_arguments_are_refused(places: Places, name: str) -> None:
    answer = await asked(places, name, colour="red")
    assert answer.is_error and "no argument 'colour'" in answer.text
    assert not places.names("one")
