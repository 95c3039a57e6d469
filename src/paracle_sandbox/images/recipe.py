"""The recipes of images. An image has a Dockerfile, a list of packages, and an image below it.

The files are in the folder ``docker`` of the project, and in the installed package. The digest of a
recipe is a label of its image, so that an image of older files is recognised.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import SandboxError

_SHARED = "list_packages.py"


@dataclass(frozen=True)
class Recipe:
    """One image. ``base`` is the variant that it starts from, if it is one of ours.
    ``has_packages`` is False if it adds only packages of Debian."""

    variant: str
    image: str
    base: str | None = None
    has_packages: bool = True

    @property
    def dockerfile(self) -> str:
        return "Dockerfile.sandbox" + ("" if self.base is None else f".{self.variant}")

    def files(self) -> dict[str, bytes]:
        """Return the files of the build context, under the names that the Dockerfile uses."""
        names = [self.dockerfile, _SHARED]
        if self.has_packages:
            names.append(f"packages/{self.variant}.txt")
        return {name: _read(name) for name in names}

    def digest(self) -> str:
        """Return a digest of everything that the image is made of."""
        whole = hashlib.sha256(b"" if self.base is None else RECIPES[self.base].digest().encode())
        for name, content in sorted(self.files().items()):
            whole.update(f"{name} {len(content)}\n".encode() + content)
        return whole.hexdigest()[:16]


RECIPES = {
    recipe.variant: recipe
    for recipe in (
        Recipe("sandbox", "paracle/sandbox:latest"),
        Recipe("dev", "paracle/sandbox:dev", "sandbox"),
        Recipe("ml", "paracle/sandbox:ml", "sandbox"),
        Recipe("api", "paracle/sandbox:api", "sandbox"),
        Recipe("browser", "paracle/sandbox:browser", "sandbox", has_packages=False),
    )
}


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the build context as a tar file. The same files give the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _read(name: str) -> bytes:
    here = Path(__file__).resolve()
    # An installed package has the folder beside this file, a checkout at its root.
    for folder in (here.parent / "docker", here.parents[3] / "docker"):
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    raise SandboxError(
        f"docker/{name} is missing from the installation. Install paracle-sandbox again."
    )
