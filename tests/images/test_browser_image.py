"""The image with a browser, as it is shipped: the browser tool works in it, on each engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_docker import docker, inspect, paracle, run_in

import engines
from paracle_sandbox import LocalSandboxClient, SandboxBrowserTool, SandboxConfig, SandboxManager
from paracle_sandbox.images.recipe import RECIPES
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.timeout(600)

IMAGE = RECIPES["browser"].image


@pytest.fixture(scope="module")
def built() -> str:
    """It is large: built anew only if it is outdated."""
    done = paracle("image", "build", "browser", "--if-missing", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["current"] is True
    return IMAGE


def test_it_has_what_the_other_images_have(built: str) -> None:
    assert inspect(built)["Config"]["User"] == "paracle"
    find = ["find", "/", "-xdev", "-type", "f", "-perm", "/6000"]
    assert run_in(built, *find, options=["--user", "root"]) == ""
    listed = json.loads(run_in(built, "cat", "/usr/share/paracle/packages.json"))
    assert "chromium-headless-shell" in {package["name"] for package in listed["packages"]}
    assert "index-url" not in docker("history", "--no-trunc", built)


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_the_browser_tool_works_in_it(built: str, tmp_path: Path, engine: str) -> None:
    engines.require(engine)
    settings = Settings(
        mode=engine, docker_host=engines.DOCKER_HOST, state_dir=f"{tmp_path}/state",
        data_dir=f"{tmp_path}/data",
    )  # fmt: skip
    config = SandboxConfig(base_image=built, memory_mb=1024)
    manager = SandboxManager(settings=settings)
    async with manager, LocalSandboxClient(manager, config) as client:
        await client.write_file("page.html", "<title>Start</title><h1>Hello</h1><a href=x>on</a>")
        tool = SandboxBrowserTool(client)
        try:
            seen = await tool.call({"action": "navigate_to", "url": "/workspace/page.html"})
            assert not seen.is_error, seen.text
            assert seen.text.splitlines() == ["Start - file:///workspace/page.html", "[0] a: on"]
            assert seen.images
        finally:
            await tool.close()


def test_it_is_not_built_on_incus() -> None:
    done = paracle("image", "build", "browser", "--incus")
    assert done.returncode == 2 and "chromium-headless-shell" in done.stderr
