"""SandboxVisionTool shows a model an image file of the sandbox."""

from __future__ import annotations

from typing import ClassVar

from ..sandbox.sandbox import Sandbox
from .arguments import ArgumentFault
from .image_headers import detect_media_type, read_size
from .result import Image, ToolResult
from .schema import schema, text
from .tool import SandboxTool

MAX_READ = 10 << 20
MAX_SENT = 5 << 20
MAX_PIXELS = 8000
# Models see no more than this: larger images are scaled down inside the sandbox.
FITTING = (1920, 1080)
_SHRINK_SECONDS = 30.0

# Runs inside: the host never decodes an image of untrusted code.
_SHRINK = """
import io, sys
from PIL import Image, ImageOps
width, height = int(sys.argv[2]), int(sys.argv[3])
picture = ImageOps.exif_transpose(Image.open(sys.argv[1]))
picture.thumbnail((width, height))
clear = picture.mode in ("RGBA", "LA", "P")
target = io.BytesIO()
picture.convert("RGBA" if clear else "RGB").save(target, "PNG" if clear else "JPEG", quality=85)
open(sys.argv[4], "wb").write(target.getvalue())
"""


class SandboxVisionTool(SandboxTool):
    """Shows an image as it is, or scaled down if it is large and the sandbox has Pillow."""

    name = "sandbox_vision"
    description = (
        "See a picture file of the sandbox: PNG, JPEG, GIF or WebP. Use it to look at plots, "
        "screenshots and pictures that were given or made."
    )
    parameters = schema(
        ["file_path"],
        action=text("What to do; see_image if left out.", enum=["see_image"]),
        file_path=text("The picture, relative to the working directory."),
    )
    aliases: ClassVar = {
        "path": "file_path", "filename": "file_path", "file": "file_path", "image": "file_path",
        "image_path": "file_path", "name": "file_path",
    }  # fmt: skip

    async def run(self, file_path: str, action: str = "see_image") -> ToolResult:
        sandbox = await self.sandbox()
        size = (await sandbox.stat(file_path))["size"]
        if size > MAX_READ:
            raise ArgumentFault(
                f"{file_path} has {size >> 20} MB; at most {MAX_READ >> 20} can be looked at. "
                "Make it smaller first."
            )
        data = await sandbox.read_bytes(file_path, max_bytes=MAX_READ)
        image = Image(data, _check_media_type(file_path, data))
        if not _is_within(data, FITTING):
            image = await self._shrink(sandbox, file_path) or image
        if len(image.data) > MAX_SENT or not _is_within(image.data, (MAX_PIXELS, MAX_PIXELS)):
            raise ArgumentFault(
                f"{file_path} is too large for a model, at most {MAX_SENT >> 20} MB and "
                f"{MAX_PIXELS} pixels a side, and could not be made smaller here. Save it in a "
                "smaller size, or install pillow so that it can be."
            )
        width, height = read_size(image.data) or (0, 0)
        data_of = {"media_type": image.media_type, "bytes": len(image.data), "width": width,
                   "height": height}  # fmt: skip
        shown = f"{file_path}: {image.media_type}, {width} x {height} pixels."
        return ToolResult(shown, images=(image,), data=data_of)

    async def _shrink(self, sandbox: Sandbox, path: str) -> Image | None:
        """Return the image scaled down, or None if the sandbox has no Pillow."""
        target = "/tmp/.paracle-smaller"
        argv = ["python3", "-c", _SHRINK, path, *map(str, FITTING), target]
        if (await sandbox.execute(argv, _SHRINK_SECONDS))["exit_code"]:
            return None
        try:
            data = await sandbox.read_bytes(target, max_bytes=MAX_READ)
        finally:
            await sandbox.remove(target)
        return Image(data, _check_media_type(path, data))


def _check_media_type(path: str, data: bytes) -> str:
    kind = detect_media_type(data)
    if kind is None:
        raise ArgumentFault(f"{path} is no PNG, JPEG, GIF or WebP. Convert it, or read it as text.")
    return kind


def _is_within(data: bytes, most: tuple[int, int]) -> bool:
    """Whether the image is within the limits, by its size in bytes and the size in its header."""
    width, height = read_size(data) or (0, 0)
    return len(data) <= MAX_SENT and width <= most[0] and height <= most[1]
