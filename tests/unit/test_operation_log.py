"""Every operation on a sandbox leaves a structured record, and no record holds what programs
print."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paracle_sandbox import (
    SandboxCleanupError,
    SandboxConfig,
    SandboxCreationError,
    SandboxError,
    SandboxManager,
    SandboxTimeoutError,
    Settings,
)
from paracle_sandbox.errors import ResourceLimitError
from paracle_sandbox.testing.fake import FakeBackend

SECRET = "what-nobody-else-is-to-read"


@pytest.fixture
async def manager(caplog: pytest.LogCaptureFixture) -> AsyncIterator[SandboxManager]:
    caplog.set_level(logging.INFO, "paracle_sandbox.operations")
    backend = FakeBackend()
    async with SandboxManager(2, backend=backend, settings=Settings()) as manager:
        yield manager
    await backend.close()


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, dict[str, Any]]]:
    found = [r for r in caplog.records if r.name == "paracle_sandbox.operations"]
    assert SECRET not in caplog.text
    return [(r.levelname, vars(r)["event"], vars(r)["details"]) for r in found]


async def test_from_creation_to_removal(
    manager: SandboxManager, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await manager.create(SandboxConfig(memory_mb=256))
    await sandbox.run_code(f"print({SECRET!r}); raise SystemExit(3)")
    with pytest.raises(SandboxError):
        await sandbox.read_file("missing.txt")
    await manager.destroy(sandbox.sandbox_id)
    created, executed, failed, removed = records(caplog)
    assert created[:2] == ("INFO", "created")
    assert (created[2]["backend"], created[2]["memory_mb"]) == ("fake", 256)
    assert executed[:2] == ("INFO", "executed")
    assert executed[2]["exit_code"] == 3 and executed[2]["seconds"] > 0
    assert failed[:2] == ("INFO", "operation_failed") and failed[2]["error_type"]
    assert removed[:2] == ("INFO", "removed") and removed[2]["lived_seconds"] > 0
    assert {vars(r)["sandbox_id"] for r in caplog.records if "event" in vars(r)} == {
        sandbox.sandbox_id
    }


async def test_what_is_stopped_is_a_warning(
    manager: SandboxManager, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await manager.create(SandboxConfig(max_output_mb=1))
    with pytest.raises(SandboxTimeoutError):
        await sandbox.run_code("import time; time.sleep(600)", timeout=0.2)
    with pytest.raises(ResourceLimitError):
        await sandbox.run_code("while True: print('x' * 65536)")
    (late, late_details), (limit, limit_details) = [
        (event, details) for level, event, details in records(caplog) if level == "WARNING"
    ]
    assert late == "timeout" and late_details["error_type"] == "SandboxTimeoutError"
    assert limit == "limit" and limit_details["resource"] == "output"


async def test_what_cannot_be_made_or_removed_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FakeBackend(SandboxCreationError("no room\nforged: line", step="room"))
    async with SandboxManager(backend=backend, settings=Settings()) as manager:
        with pytest.raises(SandboxCreationError):
            await manager.create()
        backend.create_error = None
        sandbox = await manager.create()
        backend.destroy_error = SandboxCleanupError("it stays")
        with pytest.raises(SandboxCleanupError):
            await manager.destroy(sandbox.sandbox_id)
        backend.destroy_error = None
    found = records(caplog)
    assert [(level, event) for level, event, _ in found] == [
        ("WARNING", "not_created"), ("WARNING", "not_removed"),
    ]  # fmt: skip
    assert "\nforged" not in caplog.text and "no room\\nforged" in caplog.text
    await backend.close()


def test_the_command_line_shows_it_when_it_is_asked_to(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "paracle_sandbox",
        "sandbox",
        "execute",
        "-q",
        "-c",
        "print(1)",
    ]

    def said(level: str) -> str:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SANDBOX_MODE": "fake",
               "PARACLE_SANDBOX_LOG_LEVEL": level}  # fmt: skip
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr

    shown = said("info")
    for event in ("INFO created: sandbox", "INFO executed: sandbox", "INFO removed: sandbox"):
        assert event in shown
    assert "sandbox_" not in said("warning")
