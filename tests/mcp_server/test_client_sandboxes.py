"""Sandboxes by name: what create_sandbox answers, and when it may not say that it made one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from paracle_sandbox import SandboxConfig, SandboxManager, Settings
from paracle_sandbox.mcp.client_sandboxes import MAX_PER_CLIENT, Client, ClientSandboxes
from paracle_sandbox.mcp.tools import call
from paracle_sandbox.testing.fake import FakeBackend
from paracle_sandbox.tools import ToolResult

ONE = Client(session="one")
NOBODY = Client()


@pytest.fixture
async def places() -> AsyncIterator[ClientSandboxes]:
    places = ClientSandboxes(SandboxManager(2, backend=FakeBackend()), SandboxConfig())
    yield places
    await places.close()


async def asked(
    places: ClientSandboxes, tool: str, /, *, client: Client = ONE, **arguments: Any
) -> ToolResult:
    async def progress(amount: float, message: str) -> None:
        pass

    return await call(places, client, tool, arguments, progress)


async def test_a_name_that_was_given_up_is_given_again(places: ClientSandboxes) -> None:
    for _ in range(2):
        assert not (await asked(places, "create_sandbox")).is_error
    await asked(places, "destroy_sandbox", sandbox="sandbox-1")
    again = await asked(places, "create_sandbox")
    assert again.data == {"sandbox": "sandbox-1"}, again.text


async def test_what_was_made_is_there(places: ClientSandboxes) -> None:
    await asked(places, "create_sandbox", name="mine")
    listed = await asked(places, "list_sandboxes")
    assert listed.data["sandboxes"]["mine"] is not None, listed.text


@pytest.mark.parametrize("client", [ONE, NOBODY])
async def test_a_sandbox_too_many_is_not_made(places: ClientSandboxes, client: Client) -> None:
    names = [(await asked(places, "create_sandbox", client=client)).data for _ in range(2)]
    refused = await asked(places, "create_sandbox", client=client)
    assert refused.is_error and refused.data["kind"] == "unavailable", refused.text
    await asked(places, "destroy_sandbox", client=client, **names[0])
    assert not (await asked(places, "create_sandbox", client=client)).is_error


async def test_without_isolation_none_is_made() -> None:
    nowhere = SandboxManager(1, backend="daytona", settings=Settings(daytona_key=None))
    places = ClientSandboxes(nowhere, SandboxConfig())
    try:
        answer = await asked(places, "create_sandbox", name="mine")
        assert answer.is_error and answer.data["kind"] == "unavailable", answer.text
        assert not places.names(ONE)
    finally:
        await places.close()


@pytest.mark.parametrize("name", ["list_sandboxes", "create_sandbox", "destroy_sandbox"])
async def test_unknown_arguments_are_refused(places: ClientSandboxes, name: str) -> None:
    answer = await asked(places, name, colour="red")
    assert answer.is_error and "no argument 'colour'" in answer.text
    assert not places.names(ONE)


async def test_a_name_opens_nothing_without_the_key_it_was_made_with() -> None:
    places = ClientSandboxes(SandboxManager(2, backend=FakeBackend()), SandboxConfig())
    try:
        mine, other = Client(key="a"), Client(key="b")
        made = (await asked(places, "create_sandbox", client=mine)).data
        for tool in ("sandbox_shell", "destroy_sandbox"):
            arguments = {"command": "true"} if tool == "sandbox_shell" else {}
            refused = await asked(places, tool, client=other, **arguments, **made)
            assert refused.is_error, tool
        assert not (
            await asked(places, "sandbox_shell", client=mine, command="true", **made)
        ).is_error
        assert not (await asked(places, "destroy_sandbox", client=mine, **made)).is_error
    finally:
        await places.close()


async def test_a_client_without_a_session_fills_its_own_limit_only() -> None:
    places = ClientSandboxes(SandboxManager(20, backend=FakeBackend()), SandboxConfig())
    try:
        greedy = Client(key="a", address="192.0.2.1")
        for _ in range(MAX_PER_CLIENT):
            assert not (await asked(places, "create_sandbox", client=greedy)).is_error
        refused = await asked(places, "create_sandbox", client=greedy)
        assert refused.is_error and "destroy one first" in refused.text
        for modest in (Client(key="b", address="192.0.2.1"), Client(key="a", address="192.0.2.2")):
            assert not (await asked(places, "create_sandbox", client=modest)).is_error
    finally:
        await places.close()
