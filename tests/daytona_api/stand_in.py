"""A stand-in for Daytona's HTTP API, written from the published models of its SDK.

It is not Daytona: it knows the requests that we make, keeps what it was asked, and makes each
sandbox as a native one of ours, so that what runs in it is confined here too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

from paracle_sandbox import Sandbox, SandboxConfig, SandboxManager

KEY = "test-key"


class StandIn:
    def __init__(self, manager: SandboxManager) -> None:
        self.manager = manager
        self.url = ""
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.places: dict[str, Sandbox] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.fail_create = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._record], client_max_size=1 << 26)
        tool = "/toolbox/{id}/process"
        app.add_routes([
            web.post("/sandbox", self.create), web.get("/sandbox", self.list),
            web.get("/sandbox/{id}", self.get), web.delete("/sandbox/{id}", self.delete),
            web.post("/sandbox/{id}/start", self.start),
            web.get("/sandbox/{id}/toolbox-proxy-url", self.proxy),
            web.get("/sandbox/{id}/ports/{port}/signed-preview-url", self.preview),
            web.post(f"{tool}/execute", self.execute), web.post(f"{tool}/session", self.session),
            web.post(tool + "/session/{session}/exec", self.session_exec),
            web.get(f"{tool}/pty/create-connect", self.pty),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/socket.io") or request.path == "/config":
            raise web.HTTPNotFound  # events: the SDK asks again and again instead
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"message": "Invalid credentials"}, status=401)
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, body))
        answer: web.StreamResponse = await handler(request)
        return answer

    def found(self, request: web.Request) -> dict[str, Any]:
        wanted = request.match_info["id"]
        for sandbox in self.sandboxes.values():
            if wanted in (sandbox["id"], sandbox["name"]):
                return sandbox
        raise web.HTTPNotFound(text='{"message": "not found"}', content_type="application/json")

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.fail_create:
            return web.json_response({"message": "no capacity"}, status=503)
        number = f"00000000-0000-0000-0000-{len(self.asked):012d}"
        name = body.get("name") or number
        if any(s["name"] == name for s in self.sandboxes.values()):
            return web.json_response({"message": "exists"}, status=409)
        sandbox = {
            "id": number, "organizationId": "o", "name": name, "user": "daytona",
            "env": body.get("env", {}), "labels": body.get("labels", {}),
            "public": body.get("public", False), "kvm": False, "target": "us",
            "networkBlockAll": body.get("networkBlockAll", False), "gpu": 0,
            "cpu": body.get("cpu", 1), "memory": body.get("memory", 1),
            "disk": body.get("disk", 1), "state": "started", "sandboxClass": "container",
            "createdAt": "2026-01-01T00:00:00Z", "updatedAt": "2026-01-01T00:00:00Z",
            "lastActivityAt": "2026-01-01T00:00:00Z",
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip
        self.sandboxes[number] = sandbox
        self.places[number] = await self.manager.create(SandboxConfig())
        return web.json_response(sandbox)

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self.found(request))

    async def list(self, request: web.Request) -> web.Response:
        items = list(self.sandboxes.values())
        return web.json_response({"items": items, "nextCursor": None})

    async def delete(self, request: web.Request) -> web.Response:
        sandbox = self.found(request)
        del self.sandboxes[sandbox["id"]]
        await self.manager.destroy(self.places.pop(sandbox["id"]).sandbox_id)
        return web.json_response({**sandbox, "state": "destroyed"})

    async def start(self, request: web.Request) -> web.Response:
        sandbox = self.found(request)
        sandbox["state"] = "started"
        return web.json_response(sandbox)

    async def proxy(self, request: web.Request) -> web.Response:
        return web.json_response({"url": f"{self.url}/toolbox"})

    async def preview(self, request: web.Request) -> web.Response:
        port = int(request.match_info["port"])
        url = f"https://{port}-signed.example"
        return web.json_response(
            {"sandboxId": self.found(request)["id"], "port": port, "token": "t", "url": url}
        )

    def place(self, request: web.Request) -> Sandbox:
        return self.places[self.found(request)["id"]]

    async def execute(self, request: web.Request) -> web.Response:
        body = await request.json()
        done = await self.place(request).execute(body["command"])
        return web.json_response({"exitCode": done["exit_code"], "result": done["stdout"]})

    async def session(self, request: web.Request) -> web.Response:
        return web.Response(status=201)

    async def session_exec(self, request: web.Request) -> web.Response:
        return web.json_response({"cmdId": "c1"}, status=202)

    async def pty(self, request: web.Request) -> web.WebSocketResponse:
        place = self.place(request)
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        await socket.send_str(json.dumps({"type": "control", "status": "connected"}))
        async with await place.start_command(["sh"], pty=True, stdin=True, timeout=3600) as shell:

            async def out() -> None:
                async for _, data in shell.output():
                    await socket.send_bytes(data)
                await socket.close(message=b'{"exitCode": 0}')

            sending = asyncio.create_task(out())
            async for message in socket:
                if message.type == WSMsgType.BINARY:
                    try:
                        await shell.write_stdin(message.data)
                    except BrokenPipeError:
                        break
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return socket


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandIn]:
    async with SandboxManager() as manager:
        server = StandIn(manager)
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server.url = f"http://127.0.0.1:{port}"
        try:
            yield server
        finally:
            await runner.cleanup()
