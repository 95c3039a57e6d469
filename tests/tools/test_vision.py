"""Pictures in a sandbox, as a model sees them."""

from __future__ import annotations

import importlib.util
import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image as Pillow

from paracle_sandbox import LocalSandboxClient, SandboxVisionTool
from paracle_sandbox.tools.image_headers import detect_media_type, read_size


def drawn(kind: str, width: int = 30, height: int = 20) -> bytes:
    target = io.BytesIO()
    lossless = {"lossless": True} if kind == "WEBP" else {}
    Pillow.new("RGB", (width, height), "red").save(target, kind, **lossless)
    return target.getvalue()


def large_png(width: int, height: int) -> bytes:
    """Large on the screen, small on the disk."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes((width + 7) // 8)) * height, 9)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_what_and_how_large(kind: str) -> None:
    data = drawn(kind)
    assert detect_media_type(data) == f"image/{kind.lower()}" and read_size(data) == (30, 20)
    for cut in range(len(data)):
        read_size(data[:cut])  # whatever is left of it raises nothing
    assert detect_media_type(b"<svg/>") is None and read_size(b"") is None


def test_segments_without_end_are_not_followed() -> None:
    """Each of these takes a step of two bytes; what comes after them is never looked at."""
    frame = b"\xff\xc0\0\x11\x08\0\x14\0\x1e"
    assert read_size(b"\xff\xd8" + b"\xff\xe0\0\x02" * 10 + frame) == (30, 20)
    assert read_size(b"\xff\xd8" + b"\xff\xe0\0\x02" * 10_000 + frame) is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
async def test_see_image(client: LocalSandboxClient, kind: str) -> None:
    data = drawn(kind)
    await client.write_file("plots/a b.bin", data)
    answer = await SandboxVisionTool(client).call({"path": "plots/a b.bin"})
    assert not answer.is_error and "30 x 20" in answer.text
    [image] = answer.images
    assert image.data == data and image.media_type == f"image/{kind.lower()}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"just text", "no PNG, JPEG, GIF or WebP"),
        (b"", "no PNG, JPEG, GIF or WebP"),
        (b"\x89PNG\r\n\x1a\n" + bytes(11 << 20), "at most 10"),
        (b"\x89PNG\r\n\x1a\n" + bytes(6 << 20), "install pillow"),
        (large_png(9000, 10), "8000 pixels"),
    ],
)
async def test_what_cannot_be_shown(client: LocalSandboxClient, content: bytes, words: str) -> None:
    await client.write_file("f.png", content)
    answer = await SandboxVisionTool(client).call({"file_path": "f.png"})
    assert answer.is_error and words in answer.text and not answer.images


async def test_missing_and_outside(client: LocalSandboxClient) -> None:
    tool = SandboxVisionTool(client)
    assert "not found" in (await tool.call({"file_path": "none.png"})).text
    assert (await tool.call({"file_path": "../etc/passwd"})).data["kind"] == "file"


async def test_large_ones_are_made_smaller_inside(client: LocalSandboxClient) -> None:
    spec = importlib.util.find_spec("PIL")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    sandbox = await client.sandbox()
    site = (await sandbox.execute(["python3", "-m", "site", "--user-site"]))["stdout"].strip()
    for folder in (package, *package.parent.glob("pillow.libs")):
        await sandbox.copy_to(folder, f"{site}/{folder.name}")
    await client.write_file("large.png", large_png(9000, 4500))
    answer = await SandboxVisionTool(client).call({"image_path": "large.png"})
    assert not answer.is_error, answer.text
    assert read_size(answer.images[0].data) == (1920, 960)
    assert (await sandbox.execute("ls -A /tmp | grep paracle"))["stdout"] == ""
