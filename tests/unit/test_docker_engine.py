"""What becomes of answers that a real engine gives only now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web

from paracle_sandbox.backends.docker.engine import Engine, EngineRefused
from paracle_sandbox.settings import Settings

IMPROPER = {"message": "cannot remove it: sending SIGKILL: container state improper: stopped"}


@pytest.mark.parametrize(
    ("refusal", "times", "tries", "removed"),
    [
        ((500, IMPROPER), 1, 2, True),
        ((500, IMPROPER), 99, 5, False),
        ((500, {"message": "the disk is broken"}), 1, 1, False),
        ((404, {"message": "no such container"}), 1, 1, True),
    ],
)
async def test_a_removal_that_is_refused(
    tmp_path: Path, refusal: tuple[int, dict[str, str]], times: int, tries: int, removed: bool
) -> None:
    asked = 0

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41"})

    async def delete(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        status, answer = refusal
        if asked > times:
            return web.Response(status=204)
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", version)
    app.router.add_delete("/{path:.*}", delete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine")).start()
    engine = Engine(Settings(docker_host=f"unix://{tmp_path}/engine"))
    try:
        if removed:
            await engine.remove("some")
        else:
            with pytest.raises(EngineRefused, match=refusal[1]["message"]):
                await engine.remove("some")
        assert asked == tries
    finally:
        await engine.close()
        await runner.cleanup()
