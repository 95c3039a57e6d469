"""Reads type and size of an image from its header. Nothing here decodes an image."""

from __future__ import annotations

import struct

_MARKERS_WITHOUT_SIZE = frozenset([0xC4, 0xC8, 0xCC])
# A colour profile takes up to 256 segments. A file with more is made to keep us busy.
_MAX_SEGMENTS = 1000


def detect_media_type(data: bytes) -> str | None:
    """Return the media type, or None if models do not take it."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def read_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the header, or None when it is cut off or invalid."""
    try:
        match detect_media_type(data):
            case "image/png":
                return struct.unpack_from(">II", data, 16)
            case "image/gif":
                return struct.unpack_from("<HH", data, 6)
            case "image/webp":
                return _read_webp_size(data)
            case "image/jpeg":
                return _read_jpeg_size(data)
    except struct.error:
        pass
    return None


def _read_webp_size(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        low, high = struct.unpack_from("<I", data, 23), struct.unpack_from("<I", data, 26)
        return (low[0] >> 8) + 1, (high[0] >> 8) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def _read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Walk the segments up to the one that holds the size."""
    position = 2
    for _ in range(_MAX_SEGMENTS):
        mark, kind, length = struct.unpack_from(">BBH", data, position)
        if mark != 0xFF:
            return None
        if 0xC0 <= kind <= 0xCF and kind not in _MARKERS_WITHOUT_SIZE:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return width, height
        position += 2 + length
    return None
