"""Installing packages in a sandbox, whether it has a network or not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..errors import InvalidValueError, SandboxError, SandboxExecutionError
from ..results import CommandResult
from .commands import Commands
from .life import Life

if TYPE_CHECKING:
    from .package_index import PackageIndex

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
# Isolated (-I), so that no file of the working directory is imported in the place of a module; the
# folders that programs import from are added as data: none of their code runs.
_LIST = """
import os, site, sys
from importlib.metadata import distributions
extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
folders = extra + sys.path + [site.getusersitepackages()]
found = {}
for one in distributions(path=[folder for folder in folders if os.path.isabs(folder)]):
    name = one.metadata["Name"]
    if name:
        found.setdefault(name, one.version)
for name, version in sorted(found.items()):
    print(" ".join(str(name).split()), " ".join(str(version).split()), sep="\\t")
"""
# What a program inside says is bounded before it is looked at.
MAX_PACKAGES = 10_000
_MAX_LIST_BYTES = 1 << 20


class Packages:
    """The part of a sandbox that installs packages. They come from the index of the settings and
    from nowhere else. Its public methods are described at Sandbox."""

    def __init__(self, life: Life, commands: Commands) -> None:
        self._life = life
        self._commands = commands

    async def install(
        self,
        *requirements: str,
        timeout: float = INSTALL_SECONDS,
        index_url: str | None = None,
    ) -> CommandResult:
        wanted = [checked_requirement(one) for one in requirements]
        if not wanted:
            raise InvalidValueError("name at least one package")
        from .package_proxy import serving

        index = await asyncio.to_thread(_index, index_url)
        async with serving(self._life.live(), index) as port:
            address = f"http://127.0.0.1:{port}/simple/"
            argv = ["python3", "-c", _PIP, *_OPTIONS, "--index-url", address, "--", *wanted]
            return await self._commands.execute(argv, timeout)

    async def installed_packages(self) -> list[dict[str, str]]:
        found = await self._commands.execute(
            ["python3", "-I", "-c", _LIST], max_output=_MAX_LIST_BYTES
        )
        lines = found["stdout"].split("\n", MAX_PACKAGES)
        rows = [line.split("\t") for line in lines if line]
        if found["exit_code"] or any(len(row) != 2 for row in rows):
            raise SandboxExecutionError(
                f"The packages cannot be listed: {found['stderr'][:200]}", self._life.sandbox_id
            )
        return [{"name": name, "version": version} for name, version in rows]


def checked_requirement(text: str) -> str:
    """A requirement in its plain form. Raises ValueError for anything that is not a name with
    extras, versions and markers."""
    from packaging.requirements import InvalidRequirement, Requirement

    if any(ord(letter) < 32 for letter in text) or text.lstrip().startswith("-"):
        raise InvalidValueError(f"Not a package: {text!r}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise InvalidValueError(
            f"Not a package: {text!r}; write a name, with versions if need be: 'pandas>=2.0'"
        ) from None
    if requirement.url is not None:
        raise InvalidValueError(f"Packages come from the index only, not from an address: {text!r}")
    return str(requirement)


def _index(given: str | None) -> PackageIndex:
    from ..settings import load_settings
    from .package_index import PackageIndex, index_of_this_machine

    settings = load_settings()
    if not settings.packages:
        raise SandboxError("Packages are switched off by the operator (SANDBOX_PACKAGES)")
    address = given or settings.package_index or index_of_this_machine()
    return PackageIndex(address, settings.package_hosts)
