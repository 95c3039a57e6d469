"""Builds the images on an Incus server: an instance of a plain image, provisioned, published.

    base image ── instance without a network ── packages, user, init ── image paracle/sandbox

The packages are fetched on this machine, with its own pip and its own configuration, for the
Python of the image; the instance that becomes the image has no network and sees no address of an
index. A program inside, as root, then does what docker/Dockerfile.sandbox does. The instance
carries our keys like one that is kept ready, so that what a build leaves behind when it is killed
is swept.
"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import SandboxError
from ...images.recipe import RECIPES, Recipe
from ...settings import Settings
from ..machine.owner import Owner
from .errors import creation_error
from .images import alias_of, image_source
from .instances import Instances, Maker
from .labels import WARM, owner_keys, warm_name
from .remotes import Remotes
from .server import Refused, Server
from .spec import CONTAINER, Place, command_body, instance_body
from .storage import Homes

_FOLDER = "/root/paracle-build"
_DOWNLOAD_SECONDS = 600.0
_PLATFORMS = {
    "x86_64": "manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 linux_x86_64",
    "aarch64": "manylinux_2_28_aarch64 manylinux_2_17_aarch64 manylinux2014_aarch64 linux_aarch64",
}

# argv: the folder, the list of packages, the name of the image.
_PROGRAM = """
import glob, os, stat, subprocess, sys, tarfile
folder, packages, image = sys.argv[1:]
with tarfile.open(folder + ".tar") as tar:
    tar.extractall(folder)
pip = glob.glob(folder + "/wheels/pip-*.whl")[0]
subprocess.run([sys.executable, pip + "/pip", "install", "--no-index", "--find-links",
    folder + "/wheels", "--break-system-packages", "--root-user-action", "ignore",
    "--disable-pip-version-check", "--no-warn-script-location", "--no-cache-dir",
    "--ignore-installed", "-q", "-r", folder + "/" + packages], check=True)
def add(path, name, line):
    with open(path) as file:
        lines = file.read().splitlines()
    kept = [l for l in lines if l.split(":")[0] != name and l.split(":")[2:3] != ["1000"]]
    with open(path, "w") as file:
        file.write("\\n".join([*kept, line, ""]))
add("/etc/passwd", "paracle", "paracle:x:1000:1000::/home/paracle:/bin/sh")
add("/etc/group", "paracle", "paracle:x:1000:")
for path in ("/workspace", "/home/paracle"):
    os.makedirs(path, exist_ok=True)
    os.chown(path, 1000, 1000)
device = os.stat("/").st_dev
for place, folders, files in os.walk("/"):
    folders[:] = [f for f in folders if os.lstat(os.path.join(place, f)).st_dev == device]
    for name in files:
        path = os.path.join(place, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & 0o6000:
            os.chmod(path, stat.S_IMODE(mode) & ~0o6000)
os.makedirs("/usr/share/paracle", exist_ok=True)
os.replace(folder + "/list_packages.py", "/usr/share/paracle/list_packages.py")
if os.path.exists("/usr/bin/dpkg-query"):
    subprocess.run([sys.executable, "/usr/share/paracle/list_packages.py", image], check=True)
if not os.path.lexists("/sbin/init"):
    # For servers that do not let an instance start with another program.
    with open("/sbin/init", "w") as file:
        file.write("#!/bin/sh\\ntrap 'exit 0' TERM INT PWR\\n"
            "while :; do sleep 86400 & wait $!; done\\n")
    os.chmod("/sbin/init", 0o755)
subprocess.run(["rm", "-rf", folder, folder + ".tar"], check=True)
"""

_RECIPE = "paracle.recipe"
_VARIANT = "paracle.variant"
_PYTHON = "import platform, sys; print('%d.%d' % sys.version_info[:2], platform.machine())"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """An image of ours on a server."""

    alias: str
    fingerprint: str
    size_mb: int
    current: bool


class ImageBuilder:
    """The images of one server. ``async with`` it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._remotes = Remotes(settings)
        self._server = Server(self._remotes.get(settings.incus_remote))
        self._instances = Instances(self._server)
        self._homes = Homes(self._server, settings)

    async def __aenter__(self) -> ImageBuilder:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._homes.close()
        await self._server.close()

    async def find(self, recipe: Recipe) -> Built | None:
        try:
            fingerprint = await self._alias_target(alias_of(recipe.image))
            if fingerprint is None:
                return None
            image = await self._server.get(f"/1.0/images/{fingerprint}")
        except Refused as refused:
            raise _failed(recipe, refused.message) from refused
        properties = image.get("properties") or {}
        return Built(
            alias_of(recipe.image),
            fingerprint,
            round(int(image.get("size") or 0) / 1_000_000),
            properties.get(_RECIPE) == recipe.digest(),
        )

    async def build(self, recipe: Recipe, base: str, progress: Progress) -> Built:
        """Build it, and first what it starts from. Raises SandboxError when a step fails."""
        if recipe.base is not None:
            below = RECIPES[recipe.base]
            there = await self.find(below)
            if there is None or not there.current:
                await self.build(below, base, progress)
            base = below.image
        token = secrets.token_hex(8)
        name = warm_name(token)
        try:
            progress(f"starting from {base}")
            await self._make(name, token, base)
            await self._provision(name, recipe, progress)
            progress(f"publishing {alias_of(recipe.image)}")
            await self._publish(name, recipe)
        except Refused as refused:
            raise _failed(recipe, refused.message) from refused
        finally:
            with suppress(Refused, SandboxError):
                await self._instances.remove(name)
        built = await self.find(recipe)
        if built is None:
            raise _failed(recipe, "the server has built it, but does not have it")
        return built

    async def _make(self, name: str, token: str, base: str) -> None:
        owner = Owner.of(os.getpid())
        keys = {**owner_keys("incus", token, owner), WARM: token}
        place = Place(CONTAINER, await self._homes.pool(), keys=keys)
        source = await image_source(self._server, self._remotes, base)
        # Published when it is stopped, so it must not go then.
        body = {**instance_body(name, source, place), "ephemeral": False}
        try:
            await Maker(self._instances).make_stopped(body)
        except Refused as refused:
            raise creation_error(refused, name, base) from refused
        await self._instances.start(name)

    async def _provision(self, name: str, recipe: Recipe, progress: Progress) -> None:
        said = (await self._run(name, ["python3", "-I", "-c", _PYTHON])).split()
        if len(said) != 2:
            raise SandboxError("The base image has no python3; choose one that has, with --from.")
        python, architecture = said
        progress(f"fetching the packages for Python {python}")
        context = await asyncio.to_thread(build_context, recipe, python, architecture)
        progress(f"installing them ({len(context) >> 20} MB)")
        path = f"/1.0/instances/{quote(name)}/files?path={quote(_FOLDER + '.tar')}"
        kind = {"X-Incus-type": "file", "X-Incus-mode": "0600", "X-Incus-uid": "0"}
        await self._server.upload(path, context, {**kind, "X-Incus-gid": "0"})
        command = ["python3", "-c", _PROGRAM, _FOLDER, packages_file(recipe), recipe.image]
        await self._run(name, command)

    async def _run(self, name: str, command: list[str]) -> str:
        """What it prints. Raises SandboxError when it fails."""
        channel = await self._server.execute(name, command_body(command))
        try:
            output = b""
            while piece := await channel.receive():
                output += piece
            ended = await self._server.finished(channel.operation)
            code = int((ended.get("metadata") or {}).get("return", -1))
            if code:
                raise SandboxError(
                    f"A step of the build ended with {code}: {(await channel.last_words())[-300:]}"
                )
        finally:
            await channel.close()
        return output.decode(errors="replace")

    async def _publish(self, name: str, recipe: Recipe) -> None:
        alias = alias_of(recipe.image)
        await self._instances.stop(name)
        before = await self._alias_target(alias)
        body: dict[str, Any] = {
            "source": {"type": "instance", "name": name},
            "public": False,
            # Unpacked at every create without a ready instance.
            "compression_algorithm": "none",
            "properties": {
                "description": f"Paracle Sandbox, {recipe.variant}",
                _RECIPE: recipe.digest(),
                _VARIANT: recipe.variant,
            },
        }
        done = await self._server.change("POST", "/1.0/images", body)
        fingerprint = str((done.get("metadata") or {})["fingerprint"])
        await self._point(alias, fingerprint, exists=before is not None)
        if before is not None and before != fingerprint:
            await self._forget(before)

    async def _point(self, alias: str, fingerprint: str, *, exists: bool) -> None:
        if exists:
            path = f"/1.0/images/aliases/{quote(alias, safe='')}"
            await self._server.change("PUT", path, {"target": fingerprint, "description": ""})
            return
        body = {"name": alias, "target": fingerprint, "description": ""}
        await self._server.change("POST", "/1.0/images/aliases", body)

    async def _forget(self, fingerprint: str) -> None:
        """An older build of ours that no other alias names."""
        image = await self._server.get(f"/1.0/images/{fingerprint}")
        if _RECIPE in (image.get("properties") or {}) and not image.get("aliases"):
            with suppress(Refused):  # something may still be made from it
                await self._server.change("DELETE", f"/1.0/images/{fingerprint}")

    async def _alias_target(self, alias: str) -> str | None:
        try:
            found = await self._server.get(f"/1.0/images/aliases/{quote(alias, safe='')}")
        except Refused as refused:
            if refused.is_absence:
                return None
            raise
        return str(found["target"])


def _failed(recipe: Recipe, reason: str) -> SandboxError:
    return SandboxError(
        f"The image {recipe.image} could not be built: {reason[:300]}. "
        f"Try again with: paracle image build --incus {recipe.variant}"
    )


def packages_file(recipe: Recipe) -> str:
    return f"packages/{recipe.variant}.txt"


def build_context(recipe: Recipe, python: str, architecture: str) -> bytes:
    """A tar file with the wheels and the recipe's own files. Blocks for as long as pip does.

    Raises SandboxError when a package cannot be had as a wheel for that Python."""
    files = {name: text for name, text in recipe.files().items() if "Dockerfile" not in name}
    packed = io.BytesIO()
    with (
        tempfile.TemporaryDirectory(prefix="paracle-wheels-") as folder,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        listed = Path(folder) / "packages.txt"
        listed.write_bytes(files[packages_file(recipe)])
        wheels = Path(folder) / "wheels"
        _download(listed, wheels, python, architecture)
        for wheel in sorted(wheels.iterdir()):
            tar.add(wheel, f"wheels/{wheel.name}")
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def download_command(listed: Path, wheels: Path, python: str, architecture: str) -> list[str]:
    platforms = _PLATFORMS.get(architecture, f"linux_{architecture}").split()
    return [
        sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--only-binary", ":all:", "--python-version", python, "--implementation", "cp",
        *(word for name in platforms for word in ("--platform", name)),
        "--dest", str(wheels), "-r", str(listed), "pip",
    ]  # fmt: skip


def _download(listed: Path, wheels: Path, python: str, architecture: str) -> None:
    try:
        done = subprocess.run(
            download_command(listed, wheels, python, architecture),
            capture_output=True, text=True, check=False, timeout=_DOWNLOAD_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SandboxError("pip did not fetch the packages in time.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip does not say why"])[-1]
        raise SandboxError(f"The packages for Python {python} cannot be had: {last[:300]}")
