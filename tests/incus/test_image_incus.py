"""`paracle image build --incus` on a real server, with this machine's own pip."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import owner_of
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.timeout(300)
SIX = ("requests", "pydantic", "click", "rich", "jinja2", "yaml")


def paracle(settings: Settings, *words: str) -> dict[str, object]:
    environment = {
        **os.environ,
        "INCUS_SOCKET": settings.incus_socket or "",
        "INCUS_SANDBOX_IMAGE": settings.incus_image,
    }
    done = subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", *words, "--json"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


async def test_an_image_is_built_used_and_not_built_again(
    settings: Settings, backend: IncusBackend
) -> None:
    built = paracle(settings, "image", "build", "--incus")
    assert (built["alias"], built["current"], built["built_now"]) == ("paracle/sandbox", True, True)
    again = paracle(settings, "image", "build", "--incus", "--if-missing")
    assert (again["fingerprint"], again["built_now"]) == (built["fingerprint"], False)
    async with Sandbox(backend, f"of-our-image-{os.getpid()}", SandboxConfig()) as sandbox:
        result = await sandbox.run_code(f"import {', '.join(SIX)}; print('all')")
        assert result["stdout"] == "all\n", result
        # Nothing of the build stays, least of all how this machine reaches its packages.
        listed = await sandbox.run_command("ls -A /workspace /root 2>/dev/null; id -un")
        assert "paracle-build" not in listed and listed.endswith("paracle\n")
        shown = await sandbox.execute("cat /etc/pip.conf /usr/share/paracle/packages.json")
        assert "index-url" not in shown["stdout"] and "requests" in shown["stdout"]
        setuid = await sandbox.run_command("find / -xdev -perm /6000 -type f 2>/dev/null; true")
        assert setuid == ""
    # Others who use this server have theirs, and clear up after those that they killed.
    async with asyncio.timeout(30):
        while any(
            owner is not None and not owner.is_alive
            for owner in (owner_of(one, backend.name) for one in await backend.instances.all())
        ):
            await asyncio.sleep(0.2)
