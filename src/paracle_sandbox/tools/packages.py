"""Installing packages into a sandbox, in whichever way it offers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from ..results import CommandResult
from ..sandbox import Sandbox
from .arguments import ArgumentFault
from .result import ToolResult, failed, shortened
from .tool import SandboxTool, schema, seconds, texts

INSTALL_SECONDS = 300.0
_PIP = (
    "python3", "-m", "pip", "install", "--user", "--no-input", "--no-cache-dir",
    "--disable-pip-version-check", "--progress-bar", "off",
)  # fmt: skip
Installer = Callable[..., Awaitable[CommandResult]]


def installer_of(sandbox: Sandbox) -> Installer | None:
    """How packages get into this sandbox; None when they do not.

    The one place that knows: a sandbox may offer install() of its own, which needs no network;
    else pip inside does it over the sandbox's network."""
    offered: Installer | None = getattr(sandbox, "install", None)
    if offered is not None:
        return offered
    if sandbox.config.network_mode == "none":
        return None

    async def with_pip(*requirements: str, timeout: float) -> CommandResult:
        argv = [*_PIP, "--", *requirements]
        return await sandbox.execute(argv, timeout)

    return with_pip


async def install(
    sandbox: Sandbox, packages: Sequence[str], timeout: float = INSTALL_SECONDS
) -> ToolResult:
    """Install the packages, and say how it went. Raises SandboxError when it was stopped."""
    wanted = [package.strip() for package in packages if package.strip()]
    if not wanted:
        raise ArgumentFault("Name at least one package.")
    if any(package.startswith("-") for package in wanted):
        raise ArgumentFault("Name packages only, without options of pip.")
    installer = installer_of(sandbox)
    if installer is None:
        return failed(
            f"Packages cannot be installed: this sandbox has no network. {', '.join(wanted)} "
            "must come with its image or template, or the user must allow a network. Go on "
            "without, or use the standard library.",
            kind="unavailable",
        )
    try:
        result = await installer(*wanted, timeout=timeout)
    except ValueError as error:
        raise ArgumentFault(str(error)) from None
    if result["exit_code"]:
        said = shortened(result["stderr"] or result["stdout"], 4000)
        return failed(f"Could not install {', '.join(wanted)}:\n{said}", **result)
    return ToolResult(f"Installed {', '.join(wanted)}.", data=dict(result))


class PackageInstallTool(SandboxTool):
    """Packages for the Python of the sandbox; they go with it."""

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
        """As run(), for programs: ``observation`` and ``success``."""
        result = await self.run(packages, timeout)
        return {"observation": result.text, "success": not result.is_error}
