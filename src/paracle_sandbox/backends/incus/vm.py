"""The incus-vm backend: the same instances, as virtual machines.

A machine takes longer: it boots a kernel, and nothing can be run in it before its agent answers.
Whether this server can have machines at all is checked first, and the error names what is missing.
"""

from __future__ import annotations

import asyncio

from ...errors import SandboxCreationError
from .backend import IncusBackend
from .errors import no_machines
from .exec_channel import ExecChannel
from .server import Refused
from .spec import MACHINE

BOOT_SECONDS = 180.0
_PAUSE_SECONDS = 0.5
_DRIVER = "qemu"
_WARNING = "instance type not operational"


class IncusMachineBackend(IncusBackend):
    """Virtual machines of an Incus server."""

    name = "incus-vm"
    kind = MACHINE
    boot_seconds = BOOT_SECONDS

    async def _check_machine(self) -> None:
        server = await self.server.get("/1.0")
        drivers = str((server.get("environment") or {}).get("driver", ""))
        if _DRIVER not in drivers:
            raise no_machines(await self._missing_piece())

    async def _missing_piece(self) -> str:
        """Return what the server found missing when it started."""
        try:
            warnings = await self.server.get("/1.0/warnings?recursion=1")
        except Refused:
            return ""  # only its administrator may read them
        for warning in warnings:
            if str(warning.get("type", "")).lower() == _WARNING:
                return str(warning.get("last_message", ""))
        return ""

    async def _attach(self, instance: str) -> ExecChannel:
        """Attach as soon as the agent answers."""
        deadline = asyncio.get_running_loop().time() + self.boot_seconds
        while True:
            try:
                return await super()._attach(instance)
            except Refused as refused:
                if "agent" not in refused.message.lower():
                    raise
                if asyncio.get_running_loop().time() > deadline:
                    raise SandboxCreationError(
                        f"The virtual machine has booted for {self.boot_seconds:.0f} seconds and "
                        f"its agent does not answer ({refused.message}). Its image must have "
                        "incus-agent, as the cloud and default images of Incus have.",
                        step="agent",
                    ) from refused
            await asyncio.sleep(_PAUSE_SECONDS)
