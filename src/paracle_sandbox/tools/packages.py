"""PackageInstallTool installs packages into a sandbox, also into one without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..sandbox.packages import INSTALL_SECONDS
from ..sandbox.sandbox import Sandbox
from .arguments import ArgumentFault
from .result import ToolResult, make_failure, shorten
from .schema import schema, seconds, texts
from .tool import SandboxTool


async def install(
    sandbox: Sandbox, packages: Sequence[str], timeout: float = INSTALL_SECONDS
) -> ToolResult:
    """Install the packages. A failure is a result; raises SandboxError when pip was stopped."""
    wanted = [package.strip() for package in packages if package.strip()]
    if not wanted:
        raise ArgumentFault("Name at least one package.")
    try:
        result = await sandbox.install(*wanted, timeout=timeout)
    except ValueError as error:
        raise ArgumentFault(str(error)) from None
    if result["exit_code"]:
        output = shorten(result["stderr"] or result["stdout"], 4000)
        return make_failure(f"Could not install {', '.join(wanted)}:\n{output}", **result)
    return ToolResult(f"Installed {', '.join(wanted)}.", data=dict(result))


class PackageInstallTool(SandboxTool):
    """Installs packages for the Python of the sandbox. They are gone when the sandbox is."""

    name = "install_packages"
    description = "Install Python packages into the sandbox, several at once if need be."
    parameters = schema(
        ["packages"],
        packages=texts("Names, with versions if they matter: numpy, pandas==2.2."),
        timeout=seconds("Seconds it may take; 300 if left out."),
    )
    aliases: ClassVar = {
        "package": "packages", "name": "packages", "names": "packages",
        "requirements": "packages", "package_name": "packages", "timeout_seconds": "timeout",
    }  # fmt: skip

    async def run(self, packages: Sequence[str], timeout: float = INSTALL_SECONDS) -> ToolResult:
        return await install(await self.sandbox(), packages, timeout)

    async def execute(self, *packages: str, timeout: float = INSTALL_SECONDS) -> dict[str, Any]:
        """Install packages, for programs: returns ``observation`` and ``success``."""
        result = await self.run(packages, timeout)
        return {"observation": result.text, "success": not result.is_error}
