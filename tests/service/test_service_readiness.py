"""Readiness follows the engine: down at the start, gone meanwhile, back again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from service_process import ServiceProcess

from paracle_sandbox.backends.base import Health, SandboxInfo, Usage
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError
from paracle_sandbox.service.app import make_app
from paracle_sandbox.service.readiness import Readiness
from paracle_sandbox.service.service import Service
from paracle_sandbox.service.users.user_sandboxes import LABEL
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend

KEY = "a key for this test alone"


class Engine(FakeBackend):
    """One that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.examined = 0

    def switch(self, *, on: bool) -> None:
        self.is_down = not on
        self.create_error = None if on else BackendUnavailableError("The engine is off")

    async def health(self) -> Health:
        self.examined += 1
        return Health(self.name, available=not self.is_down, detail="proved")

    async def usage(self, sandbox_id: str) -> Usage:
        self._answer()
        return await super().usage(sandbox_id)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        self._answer()
        return await super().list_sandboxes()

    def _answer(self) -> None:
        if self.is_down:
            raise BackendUnavailableError("The engine is off")


@asynccontextmanager
async def serving(
    directory: Path, engine: Engine, look_seconds: float
) -> AsyncIterator[tuple[Service, httpx2.AsyncClient]]:
    service = Service(Settings(service_dir=str(directory), api_key=KEY), engine)
    service.readiness = Readiness(engine, service.sandboxes.take_over, 0.02, look_seconds)
    transport = httpx2.ASGITransport(app=make_app(service))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://service", headers={"X-API-Key": KEY}
    ) as client:
        yield service, client
    await service.close()
    await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_engine_that_comes_later_is_taken_over_then(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path, engine, 0.02) as (service, client):
        left = service.sandboxes.sandbox_id("ann")
        await engine.create(left, SandboxConfig(), {LABEL: service.names.installation})
        engine.switch(on=False)
        await service.start()
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).json()["status"] == "unhealthy"
        engine.create_error = None  # it may be back before anybody has looked
        body = {"command": "echo in"}
        refused = await client.post("/sandbox/ann/shell", json=body)
        assert (refused.status_code, refused.json()["kind"]) == (503, "engine_down")
        assert "retry-after" in refused.headers
        engine.switch(on=True)
        await until(lambda: service.ready)
        assert engine.destroyed == [left]
        answer = (await client.post("/sandbox/ann/shell", json=body)).json()
        assert (answer["output"], answer["recreated"]) == ("in\n", True)
        assert (await client.get("/health")).json()["status"] == "healthy"
        # Nobody takes over from himself.
        engine.switch(on=False)
        await until(lambda: not service.ready)
        engine.switch(on=True)
        await until(lambda: service.ready)
        answer = (await client.post("/sandbox/ann/shell", json=body)).json()
        assert (answer["output"], answer["recreated"]) == ("in\n", False)


async def test_a_sandbox_that_could_not_be_made_raises_a_doubt(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(tmp_path, engine, 1000) as (service, client):
        await service.start()
        assert (await client.get("/ready")).status_code == 200
        engine.switch(on=False)
        assert (await client.post("/sandbox/ann/create")).status_code == 503
        await until(lambda: not service.ready)
        engine.switch(on=True)
        await until(lambda: service.ready)
        before = engine.examined
        missing = {"image": "no-such-image"}
        await client.post("/sandbox/ann/create", json=missing)
        await asyncio.sleep(0.1)
        assert engine.examined == before, "who is well is left alone"


def test_a_service_without_its_engine_starts_and_says_so(tmp_path: Path) -> None:
    service = ServiceProcess(
        tmp_path / "s", SANDBOX_MODE="docker", DOCKER_HOST=f"unix://{tmp_path}/none.sock"
    )
    with service.errors.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "paracle_sandbox", "serve"],
            env=service.env, cwd=service.home, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split()[4]
        with httpx2.Client(transport=httpx2.HTTPTransport(retries=50), base_url=url) as client:
            assert client.get("/ready").status_code == 503
            assert client.get("/health").json()["status"] == "unhealthy"
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    assert "Traceback" not in service.errors.read_text()


class Faulty(FakeBackend):
    """One with a mistake of ours in it."""

    is_faulty = True

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        if self.is_faulty:
            raise ValueError("unexpected kwargs: umask")
        await super().create(sandbox_id, config, labels)


async def test_a_fault_of_ours_is_no_mistake_of_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a 500 that is in the log, on every way in, and the service is not ready with it."""
    engine = Faulty()
    service = Service(Settings(service_dir=str(tmp_path), api_key=KEY), engine)
    service.readiness._pause_seconds = 0.02
    transport = httpx2.ASGITransport(app=make_app(service), raise_app_exceptions=False)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://service", headers={"X-API-Key": KEY}
    ) as client:
        await service.start()
        await until(lambda: "unexpected kwargs" in caplog.text)
        assert (await client.get("/ready")).status_code == 503
        for way, body in (("execute", {"code": "1"}), ("create", {}), ("shell", {"command": "ls"})):
            caplog.clear()
            answer = await client.post(f"/sandbox/ann/{way}", json=body)
            assert (answer.status_code, answer.json()["kind"]) == (500, "internal"), way
            assert "umask" not in answer.text and "umask" in caplog.text
        engine.is_faulty = False
        await until(lambda: service.ready)
        refused = await client.post("/sandbox/ann/execute", json={"code": "1", "timeout": 0.0})
        assert refused.status_code in (400, 422), "what a check refused is still the client's"
    await service.close()
    await engine.close()
