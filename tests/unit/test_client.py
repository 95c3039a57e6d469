"""Tests of clients: one sandbox behind a few methods, which is replaced and removed without a
leak."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paracle_sandbox import (
    BaseSandboxClient,
    LocalSandboxClient,
    SandboxConfig,
    SandboxFileOperations,
    SandboxManager,
    SandboxSettings,
    SandboxTimeoutError,
    Settings,
    create_sandbox_client,
)
from paracle_sandbox.testing.fake import FakeBackend


@pytest.fixture
async def manager() -> AsyncIterator[SandboxManager]:
    backend = FakeBackend()
    async with SandboxManager(2, backend=backend, settings=Settings()) as manager:
        yield manager
    await backend.close()


@pytest.fixture
async def client(manager: SandboxManager) -> AsyncIterator[LocalSandboxClient]:
    async with LocalSandboxClient(manager) as client:
        yield client


async def test_a_command_makes_the_sandbox_it_needs(
    client: LocalSandboxClient, manager: SandboxManager
) -> None:
    assert not manager.active_sandboxes
    assert await client.run_command("echo 42") == "42\n"
    assert set(manager.active_sandboxes) == {client.sandbox_id}
    await client.write_file("kept.txt", "same sandbox")
    assert await client.run_command("cat kept.txt") == "same sandbox"
    assert len(manager.active_sandboxes) == 1


async def test_first_uses_at_once_share_one_sandbox(
    client: LocalSandboxClient, manager: SandboxManager
) -> None:
    uses = [asyncio.create_task(client.run_command(f"echo {i}")) for i in range(4)]
    await asyncio.sleep(0)
    uses[0].cancel()
    answers = await asyncio.gather(*uses, return_exceptions=True)
    assert answers[1:] == ["1\n", "2\n", "3\n"]
    assert len(manager.active_sandboxes) == 1


async def test_create_again_replaces(client: LocalSandboxClient, manager: SandboxManager) -> None:
    await client.create(SandboxConfig(memory_mb=256))
    first = client.sandbox_id
    await client.create(SandboxSettings(memory_limit="1g"))
    assert client.sandbox_id != first
    assert set(manager.active_sandboxes) == {client.sandbox_id}
    assert manager.active_sandboxes[str(client.sandbox_id)].config.memory_mb == 1024


async def test_creations_at_once_leave_one_sandbox(
    client: LocalSandboxClient, manager: SandboxManager
) -> None:
    await asyncio.gather(*(client.create() for _ in range(3)))
    assert set(manager.active_sandboxes) == {client.sandbox_id}
    await asyncio.gather(client.create(), client.cleanup(), client.create())
    assert set(manager.active_sandboxes) == {client.sandbox_id}
    assert await client.run_command("echo hi") == "hi\n"


async def test_files(client: LocalSandboxClient, tmp_path: Path) -> None:
    await client.write_file("deep/er/file.txt", "text é")
    assert await client.read_file("deep/er/file.txt") == "text é"
    with pytest.raises(FileNotFoundError, match="not found"):
        await client.read_file("nothing.txt")
    source, target = tmp_path / "in.bin", tmp_path / "out.bin"
    source.write_bytes(b"\x00\xff")
    await client.copy_to(source, "copied.bin")
    await client.copy_from("copied.bin", target)
    assert target.read_bytes() == b"\x00\xff"


async def test_a_deadline_leaves_the_sandbox_usable(client: LocalSandboxClient) -> None:
    with pytest.raises(SandboxTimeoutError):
        await client.run_command("sleep 5", timeout=0.3)
    assert await client.run_command("echo still here") == "still here\n"


async def test_cleanup_is_idempotent_and_not_the_end(
    client: LocalSandboxClient, manager: SandboxManager
) -> None:
    await client.cleanup()
    await client.run_command("true")
    await client.cleanup()
    await client.cleanup()
    assert not manager.active_sandboxes
    assert await client.run_command("echo again") == "again\n"


async def test_cleanup_waits_for_a_sandbox_being_made(
    client: LocalSandboxClient, manager: SandboxManager
) -> None:
    use = asyncio.create_task(client.run_command("true"))
    await asyncio.sleep(0)
    use.cancel()
    await asyncio.gather(use, return_exceptions=True)
    await client.cleanup()
    assert not manager.active_sandboxes


async def test_a_sandbox_that_was_taken_away_is_replaced(
    client: LocalSandboxClient, manager: SandboxManager
) -> None:
    await client.run_command("true")
    gone = str(client.sandbox_id)
    await manager.destroy(gone)
    assert await client.run_command("echo new") == "new\n"
    assert client.sandbox_id != gone
    await manager.active_sandboxes[str(client.sandbox_id)].stop()
    assert await client.run_command("echo newer") == "newer\n"
    assert len(manager.active_sandboxes) == 1


async def test_a_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_MODE", "fake")
    client = create_sandbox_client()
    assert isinstance(client, BaseSandboxClient)
    assert isinstance(client, SandboxFileOperations)
    async with client:
        assert await client.run_command("echo hi") == "hi\n"
    async with client:
        assert await client.run_command("echo hi") == "hi\n"
