"""Installing packages in a sandbox, whether it has a network or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from .errors import SandboxError, SandboxExecutionError
from .results import CommandResult
from .sandbox_commands import SandboxCommands

INSTALL_SECONDS = 300.0

# Where a place has no pip of its own, Python carries one to install it from.
_PIP = """
import glob, os, sys
sys.path[:] = [path for path in sys.path if path]
try:
    import pip
except ImportError:
    import ensurepip
    found = glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl"))
    if not found:
        sys.exit("there is no pip in this sandbox: choose an image or template that has one")
    sys.path.insert(0, found[0])
import runpy
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_OPTIONS = (
    "install", "--user", "--isolated", "--no-input", "--no-cache-dir", "--no-warn-script-location",
    "--disable-pip-version-check", "--break-system-packages", "--progress-bar", "off",
    "--retries", "1", "--timeout", "60",
)  # fmt: skip
_LIST = """
import json
from importlib.metadata import distributions
found = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
print(json.dumps(sorted(found.items())))
"""


class SandboxPackages(SandboxCommands):
    """Packages come from the index of the settings and from nowhere else."""

    async def install(
        self,
        *requirements: str,
        timeout: float = INSTALL_SECONDS,
        index_url: str | None = None,
    ) -> CommandResult:
        """Install packages for this sandbox alone; programs that start afterwards import them.

        Requirements are names with extras, versions and markers, as in PEP 508; files,
        addresses and options raise ValueError before anything runs. Works without a network:
        pip runs inside, and only the package index is passed on to it. Raises SandboxError when
        the operator has switched packages off.
        """
        wanted = [checked_requirement(one) for one in requirements]
        if not wanted:
            raise ValueError("name at least one package")
        from .package_index import PackageIndex
        from .package_relay import serving

        index = PackageIndex(await asyncio.to_thread(_index_address, index_url))
        async with serving(self._live(), index) as port:
            address = f"http://127.0.0.1:{port}/simple/"
            argv = ["python3", "-c", _PIP, *_OPTIONS, "--index-url", address, "--", *wanted]
            return await self.execute(argv, timeout)

    async def installed_packages(self) -> list[dict[str, str]]:
        """Name and version of what programs inside can import."""
        found = await self.execute(["python3", "-c", _LIST])
        try:
            rows: Any = json.loads(found["stdout"])
            return [{"name": str(name), "version": str(version)} for name, version in rows]
        except (ValueError, TypeError) as error:
            raise SandboxExecutionError(
                f"The packages cannot be listed: {found['stderr'][:200]}", self.sandbox_id
            ) from error


def checked_requirement(text: str) -> str:
    """A requirement in its plain form. Raises ValueError for anything that is not a name with
    extras, versions and markers."""
    from packaging.requirements import InvalidRequirement, Requirement

    if any(ord(letter) < 32 for letter in text) or text.lstrip().startswith("-"):
        raise ValueError(f"Not a package: {text!r}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise ValueError(
            f"Not a package: {text!r}; write a name, with versions if need be: 'pandas>=2.0'"
        ) from None
    if requirement.url is not None:
        raise ValueError(f"Packages come from the index only, not from an address: {text!r}")
    return str(requirement)


def _index_address(given: str | None) -> str:
    from .package_index import index_of_this_machine
    from .settings import load_settings

    settings = load_settings()
    if not settings.packages:
        raise SandboxError("Packages are switched off by the operator (SANDBOX_PACKAGES)")
    return given or settings.package_index or index_of_this_machine()
