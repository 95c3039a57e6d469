"""The ioctls of btrfs that a volume needs, and an empty file system: no btrfs-progs is called.

Except for `write_seed` every function takes the descriptor of a directory on the file system and
raises OSError with a message that names the step. Structures and numbers are those of
<linux/btrfs.h> and <linux/btrfs_tree.h>.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Final

_MAGIC: Final = 0x94
_WRITE: Final = 1
_READ: Final = 2


def _request(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | number


_RESIZE: Final = _request(_WRITE, 3, 4096)
_SYNC: Final = _MAGIC << 8 | 8
_START_SYNC: Final = _request(_READ, 24, 8)
_SUBVOL_CREATE: Final = _request(_WRITE, 14, 4096)
_SNAP_DESTROY: Final = _request(_WRITE, 15, 4096)
_SNAP_DESTROY_V2: Final = _request(_WRITE, 63, 4096)
_TREE_SEARCH: Final = _request(_READ | _WRITE, 17, 4096)
_INO_LOOKUP: Final = _request(_READ | _WRITE, 18, 4096)
_QUOTA_CTL: Final = _request(_READ | _WRITE, 40, 16)
_QGROUP_CREATE: Final = _request(_WRITE, 42, 16)
_QGROUP_LIMIT: Final = _request(_READ, 43, 48)
_QUOTA_RESCAN_WAIT: Final = _MAGIC << 8 | 46
_FITRIM: Final = 0xC0185879

_QUOTA_ENABLE: Final = 1
_QUOTA_ENABLE_SIMPLE: Final = 4
_LIMIT_REFERENCED: Final = 1
_SPEC_BY_ID: Final = 1 << 4
_NAME_MAX: Final = 255

_ROOT_TREE: Final = 1
_ROOT_REF: Final = 156
_SUBVOLUME_INODE: Final = 256
_U64_MAX: Final = 2**64 - 1
_SEED: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seed.btrfs")
_SEED_PIECE: Final = struct.Struct(">IH")
_SUPERBLOCK: Final = 64 * 1024
_SUPERBLOCK_BYTES: Final = 4096
_METADATA_UUID: Final = 1 << 10
_SEARCH_KEY: Final = struct.Struct("=7QIIIIQQQQ")
_SEARCH_HEADER: Final = struct.Struct("=QQQII")


def _ioctl(fd: int, request: int, argument: bytearray, step: str) -> None:
    try:
        fcntl.ioctl(fd, request, argument)
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, f"btrfs: {step}: {os.strerror(number)}") from error


def _named(name: str) -> bytearray:
    """struct btrfs_ioctl_vol_args: an unused descriptor and a name."""
    encoded = os.fsencode(name)
    if not encoded or len(encoded) > _NAME_MAX or b"/" in encoded or encoded in (b".", b".."):
        raise ValueError(f"not a subvolume name: {name!r}")
    return bytearray(struct.pack("=q4088s", 0, encoded))


def create_subvolume(fd: int, name: str) -> None:
    _ioctl(fd, _SUBVOL_CREATE, _named(name), f"create subvolume {name}")


def delete_subvolume(fd: int, name: str) -> None:
    """Unlink a subvolume whatever it holds; the kernel frees its blocks in the background."""
    _ioctl(fd, _SNAP_DESTROY, _named(name), f"delete subvolume {name}")


def delete_subvolume_by_id(fd: int, subvolume: int) -> None:
    argument = bytearray(struct.pack("=qQQ32xQ4032x", 0, 0, _SPEC_BY_ID, subvolume))
    _ioctl(fd, _SNAP_DESTROY_V2, argument, f"delete subvolume {subvolume}")


def subvolume_id(fd: int) -> int:
    """The id of the subvolume that the directory is in."""
    argument = bytearray(struct.pack("=QQ4080x", 0, _SUBVOLUME_INODE))
    _ioctl(fd, _INO_LOOKUP, argument, "read the subvolume's id")
    return int.from_bytes(argument[:8], "little")


def nested_subvolumes(fd: int, subvolume: int) -> list[int]:
    """Ids of the subvolumes directly inside this one, read from the tree of roots: no path that
    untrusted code made is opened. At most one search's worth; ask again after deleting those."""
    # Key: tree, then least and greatest object, offset and transaction; then types and a count.
    key = _SEARCH_KEY.pack(
        _ROOT_TREE, subvolume, subvolume, 0, _U64_MAX, 0, _U64_MAX, _ROOT_REF, _ROOT_REF, 4096,
        0, 0, 0, 0, 0,
    )  # fmt: skip
    argument = bytearray(key.ljust(4096, b"\0"))
    _ioctl(fd, _TREE_SEARCH, argument, "look for nested subvolumes")
    found: list[int] = []
    position = _SEARCH_KEY.size
    for _ in range(_SEARCH_KEY.unpack_from(argument)[9]):
        _, _, child, _, length = _SEARCH_HEADER.unpack_from(argument, position)
        found.append(child)
        position += _SEARCH_HEADER.size + length
    return found


def grow_to_device(fd: int) -> None:
    _ioctl(fd, _RESIZE, bytearray(struct.pack("=q4088s", 0, b"1:max")), "grow to the device")


def enable_quota(fd: int) -> None:
    """Turn quotas on: simple quotas where the kernel has them (6.7), which charge an extent to the
    subvolume that wrote it and cost next to nothing; else the older kind, slower on snapshots."""
    simple = bytearray(struct.pack("=QQ", _QUOTA_ENABLE_SIMPLE, 0))
    try:
        _ioctl(fd, _QUOTA_CTL, simple, "enable simple quotas")
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("=QQ", _QUOTA_ENABLE, 0)), "enable quotas")
    # Figures mean nothing before the first scan is done.
    _ioctl(fd, _QUOTA_RESCAN_WAIT, bytearray(8), "wait for the first quota scan")


def limit_subvolume(fd: int, subvolume: int, size_bytes: int) -> None:
    """Limit what a subvolume may reference. `fd` is better not inside it: the kernel would count
    16 KiB for the change itself until the next commit."""
    argument = bytearray(struct.pack("=6Q", subvolume, _LIMIT_REFERENCED, size_bytes, 0, 0, 0))
    _ioctl(fd, _QGROUP_LIMIT, argument, f"limit to {size_bytes} bytes")


def remove_quota_group(fd: int, subvolume: int) -> bool:
    """Forget the quota of a deleted subvolume; False while its blocks are still being freed."""
    try:
        _ioctl(fd, _QGROUP_CREATE, bytearray(struct.pack("=QQ", 0, subvolume)), "remove a quota")
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        # Linux 6.11 and later remove it on their own.
        if error.errno != errno.ENOENT:
            raise
    return True


def sync(fd: int) -> None:
    """Commit what is pending; afterwards every figure is exact."""
    _ioctl(fd, _SYNC, bytearray(8), "sync")


def start_sync(fd: int) -> None:
    """Begin what `sync` does, and do not wait for it."""
    _ioctl(fd, _START_SYNC, bytearray(8), "start a sync")


def trim(fd: int) -> int:
    """Give unused blocks back to the backing file now; returns how many bytes were offered."""
    argument = bytearray(struct.pack("=QQQ", 0, _U64_MAX, 0))
    _ioctl(fd, _FITRIM, argument, "trim")
    return int.from_bytes(argument[8:16], "little")


def write_seed(image: int, identity: bytes) -> None:
    """Write an empty file system with this id (16 bytes) into an empty file of 48 MiB or more.

    The seed is smaller than 64 MiB, so there is no second superblock to change.
    """
    for offset, piece in _seed():
        os.pwrite(image, piece, offset)
    superblock = os.pread(image, _SUPERBLOCK_BYTES, _SUPERBLOCK)
    os.pwrite(image, _with_identity(superblock, identity), _SUPERBLOCK)


def _seed() -> Iterator[tuple[int, bytes]]:
    """Yield each piece that is not zero, and its offset."""
    with open(_SEED, "rb") as file:
        content = file.read()
    position = 0
    while position < len(content):
        offset, length = _SEED_PIECE.unpack_from(content, position)
        position += _SEED_PIECE.size + length
        yield offset, content[position - length : position]


def _with_identity(superblock: bytes, identity: bytes) -> bytes:
    """Only the superblock changes: the id that every block repeats stays, as the id of the
    metadata, and the file system shows the new one (METADATA_UUID, Linux 5.0)."""
    block = bytearray(superblock)
    block[571:587] = block[32:48]
    block[32:48] = identity
    (features,) = struct.unpack_from("<Q", block, 188)
    struct.pack_into("<Q", block, 188, features | _METADATA_UUID)
    struct.pack_into("<I", block, 0, _crc32c(block[32:]))
    return bytes(block)


def _crc32c(content: bytearray) -> int:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
