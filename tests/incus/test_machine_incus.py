"""Servers that cannot be had here: one with virtual machines (what is asked for is what the server
documents, its agent is waited for, and what cannot be started leaves nothing), or with few ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from incus_fixtures import CONFIG

from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import instance_name
from paracle_sandbox.backends.incus.spec import CONTAINER, MACHINE, Place, instance_body
from paracle_sandbox.backends.incus.vm import IncusMachineBackend
from paracle_sandbox.errors import BackendUnavailableError, SandboxCreationError
from paracle_sandbox.settings import Settings

NO_AGENT = "VM agent isn't currently running"
STREAMS = {
    "type": "async",
    "operation": "/1.0/operations/late",
    "metadata": {"metadata": {"fds": dict.fromkeys(("0", "1", "2", "control"), "secret")}},
}
OF_KIND = {MACHINE: "virtual machine", CONTAINER: "container"}


@pytest.mark.parametrize("kind", [MACHINE, CONTAINER])
async def test_every_key_is_documented_for_its_kind(backend: IncusBackend, kind: str) -> None:
    """The server carries the documentation of its own keys, with the kind that each is for."""
    documented = (await backend.server.get("/1.0/metadata/configuration"))["configs"]
    keys = _keys(documented["instance"])
    home = {"source": "/somewhere"}
    body = instance_body("paracle-x", {}, Place(kind, "default", home), CONFIG)
    assert {"limits.memory", "limits.cpu"} <= set(keys), "the documentation was not understood"
    for name in body["config"]:
        assert name in keys, f"{name} is not documented"
        condition = str(keys[name].get("condition") or OF_KIND[kind])
        assert OF_KIND[kind] in condition, f"{name} is for {condition}"
    disks = _keys({"disk": documented["devices"]["disk"]})
    for device in body["devices"].values():
        assert device["type"] == "disk" and set(device) - {"type"} <= set(disks)


def _keys(groups: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: about for group in groups.values() for key in group["keys"]
            for name, about in key.items()}  # fmt: skip


@dataclass
class Machines:
    """A server that can have machines. Their agent answers to no exec, or with another error, or
    the server has waited for the streams in vain."""

    socket: str
    silent: int = 0
    late: int = 0
    has_ids: bool = True
    has_project: bool = True
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body))
        parts = request.path.removeprefix("/1.0").strip("/").split("/")
        if not self.has_project:
            return _no("Project not found", 404)
        if request.path.endswith("/websocket"):
            stream = web.WebSocketResponse()
            await stream.prepare(request)
            await stream.close()
            return stream
        if request.path.endswith("/exec"):
            silent, self.silent = self.silent > 0, self.silent - 1
            if not silent and self.late:
                self.late -= 1
                return web.json_response(STREAMS)
            return _no(NO_AGENT if silent else "Failed to run the command")
        if parts[0] == "instances":
            return self.change(request.method, parts[1:], body or {})
        return web.json_response({"type": "sync", "status_code": 200, "metadata": _found(parts)})

    def change(self, method: str, parts: list[str], body: dict[str, Any]) -> web.Response:
        name = parts[0] if parts else ""
        if name and name not in self.instances:
            return _no("Instance not found", 404)
        if method == "GET":
            found: Any = self.instances[name] if name else list(self.instances.values())
            return web.json_response({"type": "sync", "status_code": 200, "metadata": found})
        if method == "DELETE":
            del self.instances[name]
        elif parts[1:] == ["state"]:
            status = {"start": "Running", "stop": "Stopped"}[body["action"]]
            self.instances[name]["status"] = status
        elif parts:
            instance = self.instances.pop(name)
            self.instances[body["name"]] = {**instance, "name": body["name"]}
        elif not self.has_ids and "security.idmap.isolated" in body["config"]:
            return _no("Failed to get ID map: Not enough uid/gid available for the container")
        else:
            self.instances[body["name"]] = {**body, "status": "Stopped"}
        return web.json_response({"type": "async", "operation": "/1.0/operations/one"})


def _found(parts: list[str]) -> Any:
    known: dict[str, Any] = {
        "": {"environment": {"driver": "lxc | qemu"}},
        "storage-pools": [{"name": "default", "driver": "dir"}],
        "profiles": {"devices": {}},
        "images": {"target": "0" * 64},
        "operations": {"status_code": 200},
    }
    if parts[:2] == ["operations", "late"]:
        return {"status_code": 400, "err": "Timed out waiting for websockets to connect"}
    return known[parts[0]]


def _no(text: str, status: int = 400) -> web.Response:
    answer = {"type": "error", "error": text, "error_code": status}
    return web.Response(status=status, text=json.dumps(answer))


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    server = Machines(str(tmp_path / "sock"))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, server.socket).start()
    yield server
    await runner.cleanup()


def _settings(server: Machines) -> Settings:
    state = f"{server.socket}-state"
    return Settings(incus_socket=server.socket, incus_warm=0, state_dir=state, data_dir=state)


async def _refusal(server: Machines, boot_seconds: float) -> SandboxCreationError:
    backend = IncusMachineBackend(_settings(server))
    backend.boot_seconds = boot_seconds
    with pytest.raises(SandboxCreationError) as caught:
        await backend.create("a-machine", CONFIG, {})
    await backend.close()
    assert server.instances == {}, "the machine is left"
    return caught.value


async def test_the_agent_is_waited_for(machines: Machines) -> None:
    """It is asked again until it answers; here with an error of the command."""
    machines.silent = 2
    error = await _refusal(machines, boot_seconds=60)
    assert "Failed to run the command" in str(error)
    asked = [body for method, path, body in machines.requests if path.endswith("/exec")]
    assert len(asked) == 3 and asked[0] == asked[2]
    [made] = [body for method, path, body in machines.requests
              if (method, path) == ("POST", "/1.0/instances")]  # fmt: skip
    assert made["type"] == "virtual-machine" and "raw.lxc" not in made["config"]
    started = [path for method, path, body in machines.requests
               if method == "PUT" and body["action"] == "start"]  # fmt: skip
    assert started == [f"/1.0/instances/{instance_name('a-machine')}/state"]


async def test_a_server_that_did_not_wait_for_our_streams_is_asked_again(
    machines: Machines,
) -> None:
    """It gives up after five seconds, which a busy machine may take, and has run nothing."""
    machines.late = 2
    assert "Failed to run the command" in str(await _refusal(machines, boot_seconds=60))
    machines.late = 100
    assert "waiting for websockets" in str(await _refusal(machines, boot_seconds=60))
    assert machines.late == 97


async def test_a_machine_without_an_agent(machines: Machines) -> None:
    """Told apart from a machine that cannot be started at all, after a time of its own."""
    machines.silent = 1000
    error = await _refusal(machines, boot_seconds=0.2)
    assert error.step == "agent" and NO_AGENT in str(error) and "incus-agent" in str(error)


async def test_a_project_that_is_gone_is_told(machines: Machines) -> None:
    """Whoever looks at all backends of a machine goes on with the others."""
    machines.has_project = False
    backend = IncusBackend(_settings(machines))
    for look in (backend.list_sandboxes, backend.sweep):
        with pytest.raises(BackendUnavailableError, match="Project not found.*incus project"):
            await look()
    await backend.close()


async def test_a_server_with_too_few_ids(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    """Its containers share theirs, and somebody is told."""
    machines.has_ids = False
    backend = IncusBackend(_settings(machines))
    with pytest.raises(SandboxCreationError, match="Failed to run the command"):
        await backend.create("shares-its-ids", CONFIG, {})
    await backend.close()
    made = [body["config"] for method, path, body in machines.requests
            if (method, path) == ("POST", "/1.0/instances")]  # fmt: skip
    assert ["security.idmap.isolated" in config for config in made] == [True, False]
    assert {**made[1], "security.idmap.isolated": "true"} == made[0]
    assert "share their ids" in caplog.text and machines.instances == {}


def test_a_machine_has_longer() -> None:
    assert IncusMachineBackend(Settings(incus_socket="/nowhere")).boot_seconds >= 120
