"""A service in this process, over sandboxes that can be killed and disks that can be broken."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx2

from paracle_sandbox.audit.log import read
from paracle_sandbox.service.app import make_app
from paracle_sandbox.service.service import Service
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend

HEADER = "x-sandbox-recreated"
KEY = "a key for this test alone"
NO_INDEX = "http://127.0.0.1:9/simple"


class Place:
    """Started by whoever made it; the user is ann."""

    def __init__(self, directory: Path, **fields: Any) -> None:
        self.backend = FakeBackend()
        given = {"service_dir": str(directory), "api_key": KEY, "package_index": NO_INDEX}
        settings = Settings(**{**given, **fields})
        self.service = Service(settings, self.backend)
        self.client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=make_app(self.service)),
            base_url="http://service", headers={"X-API-Key": KEY},
        )  # fmt: skip

    async def shell(self, command: str, **fields: Any) -> dict[str, Any]:
        answer = await self.client.post("/sandbox/ann/shell", json={"command": command, **fields})
        assert (HEADER in answer.headers) == answer.json()["recreated"]
        return dict(answer.json())

    def break_disk(self) -> None:
        """Nothing that changes can be kept from now on."""
        home = self.service.sandboxes.find("ann")
        assert home is not None
        shutil.rmtree(home.workspace.directory)
        home.workspace.directory.touch()

    def freeze(self, user: str) -> None:
        """Its guest answers nothing any more."""
        self.backend.freeze_guest(self.service.sandboxes.sandbox_id(user))

    async def audit_lines(self) -> list[dict[str, Any]]:
        """All that was written down; a thread of the service may not be through with it yet."""
        await self.service.journal.written()
        return list(read(Path(self.service.settings.service_dir) / "audit.jsonl"))

    async def lose(self) -> None:
        home = self.service.sandboxes.find("ann")
        assert home is not None
        self.backend.kill_guest(home.sandbox.id)
        while home.sandbox.is_running:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.client.aclose()
        await self.service.close()
        await self.backend.close()
