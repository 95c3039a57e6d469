"""What a request is told that the service waits for no longer."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import MagicMock

import pytest

from paracle_sandbox.service.middleware.auth import Gate

SCOPE = {"type": "http", "method": "GET", "path": "/health", "headers": []}


@pytest.mark.parametrize("begun", [False, True])
async def test_who_is_cut_off_is_answered_once(begun: bool) -> None:
    told: list[dict[str, Any]] = []
    under_way = asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        under_way.set()
        await asyncio.Event().wait()

    async def tell(message: Any) -> None:
        told.append(dict(message))

    others = {name: MagicMock() for name in ("doorman", "journal", "metrics")}
    gate = Gate(app, **others, max_open=1, max_upload=1)
    task = asyncio.create_task(gate(dict(SCOPE), MagicMock(), tell))
    await under_way.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if begun:
        assert [message["status"] for message in told] == [200]
        return
    start, body = told
    assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
    assert json.loads(body["body"])["error"] == "The service is shutting down"
