"""What makes an image of ours out of a plain one: the packages, and a program that installs them.

The packages are fetched on this machine, with its own pip and its own configuration, for the
Python of the image; the instance that becomes the image has no network and sees no address of an
index. The program runs inside as root, and does what docker/Dockerfile.sandbox does.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ...errors import SandboxError
from ...images.recipe import Recipe

FOLDER = "/root/paracle-build"
_SECONDS = 600.0
_PLATFORMS = {
    "x86_64": "manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 linux_x86_64",
    "aarch64": "manylinux_2_28_aarch64 manylinux_2_17_aarch64 manylinux2014_aarch64 linux_aarch64",
}

# argv: the folder, the list of packages, the name of the image.
PROGRAM = """
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
            capture_output=True, text=True, check=False, timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SandboxError("pip did not fetch the packages in time.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip does not say why"])[-1]
        raise SandboxError(f"The packages for Python {python} cannot be had: {last[:300]}")
