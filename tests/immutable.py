"""Mark a file or folder so that not even root can remove it."""

from __future__ import annotations

import fcntl
import os
import struct

_GETFLAGS, _SETFLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10


def mark(path: str, *, immutable: bool) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        flags = struct.unpack("i", fcntl.ioctl(fd, _GETFLAGS, bytes(4)))[0]
        flags = flags | _IMMUTABLE if immutable else flags & ~_IMMUTABLE
        fcntl.ioctl(fd, _SETFLAGS, struct.pack("i", flags))
    finally:
        os.close(fd)
