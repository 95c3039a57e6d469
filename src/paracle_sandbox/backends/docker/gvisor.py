"""The gvisor backend: containers whose kernel is gVisor's, and a refusal if it is not.

A runtime is a name in the engine's configuration, and a name can be wired to anything. So each
sandbox is asked before anything else happens in it: from outside, what the engine says it started
and, on this machine, which program the container's process really is; from inside, what the
kernel says of itself.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ...channel.bootstrap import boot_message
from ...errors import BackendUnavailableError
from ...settings import Settings
from .attach_channel import AttachChannel
from .backend import DockerBackend, Owned
from .engine import EngineRefused
from .spec import guest_setup

RUNTIME = "runsc"
_PROBE_SECONDS = 30.0
_MAX_ANSWER = 16 << 10
# What the kernel logged when it booted; gVisor answers with the words of its own.
_PROBE = """
import ctypes, os
text = ctypes.create_string_buffer(4096)
ctypes.CDLL(None).klogctl(3, text, 4096)
with open("/proc/version", "rb") as file:
    os.write(1, (text.value + file.read()).replace(b"\\n", b" ")[:8000] + b"\\n")
"""
_SIGNS = (b"gVisor", b"4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016")


class GvisorBackend(DockerBackend):
    """Containers under runsc, or under another runtime that is gVisor by another name. Of
    DOCKER_SANDBOX_RUNTIME that is believed only if it begins with runsc: it is meant for docker
    too."""

    name = "gvisor"
    _probe = _PROBE
    has_own_kernel = True

    def __init__(self, settings: Settings | None = None, runtime: str | None = None) -> None:
        super().__init__(settings, runtime)
        named = self.settings.docker_runtime or ""
        self.runtime = runtime or (named if named.startswith(RUNTIME) else RUNTIME)

    async def _boot(self, sandbox_id: str, owned: Owned, channel: AttachChannel) -> None:
        await self.engine.start(owned.container)
        seen = await self._from_outside(owned) or await self._from_inside(channel)
        if seen:
            raise BackendUnavailableError(
                f"The sandbox is not under gVisor: {seen}. Nothing was run in it. Register runsc "
                "as a runtime of the engine (runsc install), and restart the engine.",
                sandbox_id,
                step="gvisor",
            )
        # Opening a terminal does not make it the controlling one there, nor does a change of its
        # size send a signal.
        setup = {**guest_setup(owned.config), "simple_terminals": True}
        await channel.send(boot_message(setup))

    async def _from_outside(self, owned: Owned) -> str:
        """What speaks against it; empty when nothing does."""
        try:
            answer = await self.engine.inspect(owned.container)
        except EngineRefused as refused:
            return f"the engine cannot say what it started ({refused.message})"
        if answer["HostConfig"].get("Runtime") != self.runtime:
            return f"the engine started it with {answer['HostConfig'].get('Runtime')!r}"
        owned.pid = int(answer["State"].get("Pid") or 0)
        return await asyncio.to_thread(_not_runsc, owned.pid, owned.container)

    async def _from_inside(self, channel: AttachChannel) -> str:
        said = b""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                while not said.endswith(b"\n") and len(said) < _MAX_ANSWER:
                    piece = await channel.receive()
                    if not piece:
                        return f"its first process has ended: {channel.last_words}"
                    said += piece
        except TimeoutError:
            return "it does not say what it is"
        if any(sign in said for sign in _SIGNS):
            return ""
        return f"its kernel says {said[-200:].decode(errors='replace')!r}"


def _not_runsc(pid: int, container: str) -> str:
    """Of a process of this machine: what it is, if it is not gVisor. Only root may look."""
    try:
        ours = container in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""
    if not ours or program.startswith(RUNTIME):
        return ""
    return f"its process is {program}"
