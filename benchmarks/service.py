"""What the service costs: a process of its own on the loopback, beside the library."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from . import ours
from .measure import Times

_ROOMY = {
    "SANDBOX_API_PORT": "0", "SANDBOX_MODE": "native", "SANDBOX_MAX_CONTAINERS": "1000",
    "SANDBOX_USER_RATE": "10000000",
}  # fmt: skip
_READY_SECONDS = 60.0
# A guest gets its next Python ready after each program: what one leaves behind is not the other's.
_APART_SECONDS = 0.02
_HELLO = "print('hello')"


@dataclass(frozen=True)
class Crowd:
    """Users who come all at once: each makes a sandbox, runs, reads a file and leaves."""

    users: int
    seconds: float
    failures: int
    left: int


@asynccontextmanager
async def running() -> AsyncIterator[httpx2.AsyncClient]:
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="paracle-bench-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", "paracle_sandbox", "serve"],
            env={**os.environ, **_ROOMY, "SANDBOX_DATA_DIR": directory, "SANDBOX_API_KEY": key},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"http://\S+", line)
            if url is None:
                raise RuntimeError(f"the service did not start: {line}")
            limits = httpx2.Limits(max_connections=400)
            async with httpx2.AsyncClient(
                base_url=url[0], headers={"X-API-Key": key}, timeout=120, limits=limits
            ) as client:
                await _ready(client)
                yield client
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


async def _ready(client: httpx2.AsyncClient) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while (await client.get("/ready")).status_code != 200:
        if time.monotonic() > deadline:
            raise RuntimeError("the service is not ready")
        await asyncio.sleep(0.05)


@dataclass
class Line:
    """One kept connection, and as little of a client as HTTP allows: what is measured is the
    service, and a client library takes as long again."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: str

    async def post(self, path: str, content: dict[str, str]) -> dict[str, Any]:
        body = json.dumps(content).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
        if length is None:
            raise RuntimeError(answer.decode(errors="replace"))
        found: dict[str, Any] = json.loads(await self.reader.readexactly(int(length[1])))
        return found


@asynccontextmanager
async def connected(client: httpx2.AsyncClient) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        yield Line(reader, writer, client.headers["x-api-key"])
    finally:
        writer.close()
        await writer.wait_closed()


async def rest_beside_library(count: int) -> tuple[Times, Times]:
    """Python hello in a sandbox that is there: by the library and by request, in turns, so that
    whatever else the machine does meets both alike."""
    async with (
        ours.backend() as native, ours.sandbox(native) as place, running() as client,
        connected(client) as line,
    ):  # fmt: skip

        async def by_library() -> None:
            if (await place.run_code(_HELLO))["stdout"] != "hello\n":
                raise RuntimeError("the library's hello failed")

        async def by_request() -> None:
            answer = await line.post("/sandbox/bench/execute", {"code": _HELLO})
            if answer["output"] != "hello\n":
                raise RuntimeError(str(answer))

        values: tuple[list[float], list[float]] = ([], [])
        for _ in range(count + 1):
            for action, found in zip((by_library, by_request), values, strict=True):
                await asyncio.sleep(_APART_SECONDS)
                start = time.perf_counter()
                await action()
                found.append((time.perf_counter() - start) * 1e3)
    # The first of each is thrown away: it makes the sandbox.
    return (
        Times("hello by the library, live, in turns", tuple(values[0][1:])),
        Times("hello by request, live, in turns", tuple(values[1][1:])),
    )


async def crowd(users: int) -> Crowd:
    async with running() as client:
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(_visit(client, f"u{n}") for n in range(users)))
        seconds = time.perf_counter() - start
        left = (await client.get("/sandboxes")).json()["total"]
        return Crowd(users, seconds, outcomes.count(False), left)


async def _visit(client: httpx2.AsyncClient, user: str) -> bool:
    where = f"/sandbox/{user}"
    code = f"open('f', 'w').write({user!r}); print({user!r})"
    made = await client.post(f"{where}/create")
    ran = await client.post(f"{where}/execute", json={"code": code})
    read = await client.get(f"{where}/file", params={"path": "f"})
    gone = await client.delete(f"{where}/destroy")
    return (
        made.status_code == gone.status_code == 200
        and ran.json().get("output") == f"{user}\n"
        and read.json().get("content") == user
    )
