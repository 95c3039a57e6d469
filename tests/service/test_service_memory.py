"""What requests leave behind in the service: nothing that grows with their number."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any

from service_place import Place

ROUNDS = 8
# The service's own objects, and what the event loop holds for it.
OURS = ("paracle_sandbox.", "_asyncio.", "asyncio.")


async def ask_everything(place: Place, rounds: int) -> None:
    client, headers = place.client, {"X-Sandbox-User": "ann"}
    shell: dict[str, Any] = {"command": "echo out > file; echo out"}
    for number in range(rounds):
        key = {"Idempotency-Key": f"{id(place)}-{number}"}
        await client.post("/sandbox/ann/shell", json=shell, headers=key)
        await client.post("/sandbox/ann/execute", json={"code": "print(1)"})
        await client.post("/sandbox/ann/execute", json={"code": "raise SystemExit(3)"})
        await client.post("/sandbox/ann/file", json={"path": f"f{number}", "content": "x"})
        await client.get("/sandbox/ann/file", params={"path": "../../etc/passwd"})
        await client.get("/sandbox/ann/files/raw", params={"path": "file"})
        await client.get("/sandbox/ann/files")
        await client.post("/sandbox/ann/stream", json=shell)
        await client.post("/sandbox/ann/commands", json=shell)
        lease = {"sandbox_id": f"m{number}", "config": {}, "labels": {}}
        await client.post("/v1/sandboxes", json=lease, headers={**headers, **key})
        await client.delete(f"/v1/sandboxes/m{number}", headers=headers)
        await client.get("/nowhere", headers=key)
        await client.get("/info", headers={"X-API-Key": f"wrong-{number}"})
        await client.delete("/sandbox/ann")


async def live_objects() -> Counter[str]:
    """By type, once what is under way has come to rest."""
    # The event loop keeps cancelled timers, and what they know, until they are half of its timers.
    for _ in range(1000):
        asyncio.get_running_loop().call_later(1000, gc.collect).cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return Counter(name for name in names if name.startswith(OURS))


async def test_requests_leave_no_objects_behind(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.service.start()
    try:
        await ask_everything(place, ROUNDS)  # what is made once is made by now
        before = await live_objects()
        await ask_everything(place, ROUNDS)
        await ask_everything(place, ROUNDS)
        after = await live_objects()
    finally:
        await place.close()
    # One object that each round left would be 2 * ROUNDS of its kind.
    grown = {
        name: (before[name], count)
        for name, count in after.items()
        if count - before[name] >= ROUNDS
    }
    assert not grown
