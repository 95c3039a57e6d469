"""The volume that holds every workspace of one spawner: btrfs in a sparse file without a name.

How it vanishes. The image is a file that was never linked into a directory; the loop device over
it clears itself at its last close; the mount is in the spawner's private mount namespace. So each
thing is held only by the next, and the first by the processes in the namespace: when the last of
them is gone, killed or not, the kernel unmounts, frees the loop device and returns the space.

How it starts. mkfs would be one more program to have and to wait for, so an empty file system is
shipped as a seed, written into the file under a fresh id (the kernel does not mount one id twice)
and grown to its size once mounted.

What the caller must do. Code inside may make a subvolume of its own, and that one has no limit:
the seccomp filter has to refuse FORBIDDEN_IOCTLS.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import stat
import struct
import uuid
import zlib
from typing import Final

from . import btrfs, kernel

# BTRFS_IOC_SNAP_CREATE, SUBVOL_CREATE, SNAP_CREATE_V2, SUBVOL_CREATE_V2.
FORBIDDEN_IOCTLS: Final = (0x50009401, 0x5000940E, 0x50009417, 0x50009418)

MINIMUM_BYTES: Final = 256 * 1024 * 1024

_SEED: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seed.btrfs.gz")
_BLOCK: Final = 4096
_SUPERBLOCK: Final = 64 * 1024
_METADATA_UUID: Final = 1 << 10

_LOOP_MAJOR: Final = 7
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LO_FLAGS_AUTOCLEAR: Final = 4
_LO_FLAGS_DIRECT_IO: Final = int(os.environ.get("VOLDIO", "16"))
_LOOP_ATTEMPTS: Final = 64

_MS_NOATIME: Final = 1024
_OPTIONS: Final = os.environ.get("VOLOPT", "nobarrier,nodatasum,discard=async,commit=5")


class VolumeUnavailable(Exception):
    """This machine cannot have a volume: why, and what would help."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")
        self.reason = reason
        self.remedy = remedy


class Volume:
    """A mounted volume. It works through descriptors, so also after the caller changed its root."""

    def __init__(self, mountpoint: str, root: int, groups: int) -> None:
        self.mountpoint = mountpoint
        self._root = root
        self._groups = groups
        self._retired: collections.deque[int] = collections.deque()

    @classmethod
    def create(cls, image_dir: str, size_bytes: int, mountpoint: str) -> Volume:
        """Make a volume of at most `size_bytes` and mount it; space is taken only as it is used.

        The caller is root, in a private mount namespace whose mounts do not propagate. Raises
        VolumeUnavailable when the machine cannot do this, OSError when a step fails all the same.
        """
        require_support()
        image, identity = _make_image(image_dir, size_bytes)
        try:
            loop, device = _attach(image)
        finally:
            os.close(image)
        try:
            _mount(device, mountpoint)
        finally:
            os.close(loop)
        root = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        btrfs.grow_to_device(root)
        btrfs.enable_quota(root)
        groups = os.open(f"/sys/fs/btrfs/{identity}/qgroups", os.O_RDONLY | os.O_DIRECTORY)
        return cls(mountpoint, root, groups)

    def path(self, name: str) -> str:
        return os.path.join(self.mountpoint, name)

    def open(self, name: str) -> int:
        """A descriptor of the subvolume's directory, for a caller that no longer sees its path."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        return os.open(name, flags, dir_fd=self._root)

    def create_subvolume(self, name: str) -> None:
        """An empty directory, owned by root, without a limit until `limit` sets one."""
        btrfs.create_subvolume(self._root, name)

    def limit(self, name: str, size_bytes: int) -> None:
        """Let the subvolume hold `size_bytes`, its own metadata included; may be called again."""
        btrfs.limit_subvolume(self._root, self._id(name), size_bytes)

    def usage(self, name: str) -> tuple[int, int]:
        """Bytes used and allowed, from the kernel's own counters and so at no cost: what is stored
        and what is promised to writes still in memory. Exact right after a write was refused for
        the limit; what was removed is counted up to one commit longer."""
        group = f"0_{self._id(name)}"
        # Not the reservations for metadata: worst cases, a hundred times what will be written.
        used = self._figure(group, "referenced") + self._figure(group, "rsv_data")
        return used, self._figure(group, "max_referenced")

    def delete_subvolume(self, name: str) -> None:
        """Remove a subvolume at once, whatever is in it or holds it open; its blocks come back in
        the background. Raises FileNotFoundError when there is none of that name."""
        subvolume = self._id(name)
        try:
            btrfs.delete_subvolume(self._root, name)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            self._delete_nested(subvolume)
            btrfs.delete_subvolume(self._root, name)
        self._retired.append(subvolume)
        self._forget_quotas()

    def trim(self) -> None:
        """Give freed space back to the host now rather than within some minutes."""
        btrfs.sync(self._root)
        btrfs.trim(self._root)

    def close(self) -> None:
        """Let go of the mount, which the namespace still holds."""
        os.close(self._root)
        os.close(self._groups)

    def _delete_nested(self, subvolume: int) -> None:
        """Deepest first, and without recursion, because untrusted code chose the depth."""
        pending = [subvolume]
        while pending:
            children = btrfs.nested_subvolumes(self._root, pending[-1])
            if children:
                pending += children
                continue
            leaf = pending.pop()
            if leaf != subvolume:
                btrfs.delete_subvolume_by_id(self._root, leaf)
                self._retired.append(leaf)

    def _forget_quotas(self) -> None:
        """Two at a time keeps up with one deletion each, and deletion stays cheap."""
        for _ in range(min(2, len(self._retired))):
            oldest = self._retired.popleft()
            if not btrfs.remove_quota_group(self._root, oldest):
                self._retired.append(oldest)

    def _figure(self, group: str, name: str) -> int:
        fd = os.open(f"{group}/{name}", os.O_RDONLY, dir_fd=self._groups)
        with contextlib.closing(os.fdopen(fd, "rb")) as figure:
            return int(figure.read())

    def _id(self, name: str) -> int:
        fd = self.open(name)
        try:
            return btrfs.subvolume_id(fd)
        finally:
            os.close(fd)


def require_support() -> None:
    """Raise VolumeUnavailable unless this looks like a machine that can have a volume."""
    if os.geteuid() != 0:
        raise VolumeUnavailable("Volumes need root.", "Run as root.")
    if not os.path.exists("/dev/loop-control"):
        raise VolumeUnavailable(
            "There is no /dev/loop-control.", "Load the loop module: modprobe loop."
        )


def _make_image(directory: str, size_bytes: int) -> tuple[int, uuid.UUID]:
    """A sparse file that no directory names, holding the seed under an id of its own."""
    if size_bytes < MINIMUM_BYTES:
        raise ValueError(f"a volume needs at least {MINIMUM_BYTES} bytes, not {size_bytes}")
    with open(_SEED, "rb") as seed:
        records = zlib.decompress(seed.read(), wbits=31)
    identity = uuid.uuid4()
    image = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(image, size_bytes - size_bytes % _BLOCK)
        for start in range(0, len(records), 8 + _BLOCK):
            (offset,) = struct.unpack_from(">Q", records, start)
            block = records[start + 8 : start + 8 + _BLOCK]
            if offset == _SUPERBLOCK:
                block = _with_identity(block, identity)
            os.pwrite(image, block, offset)
    except OSError:
        os.close(image)
        raise
    return image, identity


def _with_identity(superblock: bytes, identity: uuid.UUID) -> bytes:
    """Give the file system a new id; the old one, which every block repeats, stays as the
    metadata id, so that only the superblock changes (METADATA_UUID, Linux 5.0)."""
    block = bytearray(superblock)
    block[571:587] = block[32:48]
    block[32:48] = identity.bytes
    (features,) = struct.unpack_from("<Q", block, 188)
    struct.pack_into("<Q", block, 188, features | _METADATA_UUID)
    struct.pack_into("<I", block, 0, _crc32c(block[32:]))
    return bytes(block)


def _crc32c(content: bytes | bytearray) -> int:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _attach(image: int) -> tuple[int, str]:
    """A loop device over the image: its descriptor, which keeps it until it is mounted, and path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_LOOP_ATTEMPTS):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            loop = _open_loop(number, device)
            try:
                _configure(loop, image)
                return loop, device
            except OSError as error:
                os.close(loop)
                # Another process took this one between the two calls.
                if error.errno != errno.EBUSY:
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "loop: every free device was taken by others first")


def _open_loop(number: int, device: str) -> int:
    with contextlib.suppress(FileExistsError):
        # Where /dev is no devtmpfs, as in a container, nobody made the node.
        os.mknod(device, 0o660 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
    return os.open(device, os.O_RDWR | os.O_CLOEXEC)


def _configure(loop: int, image: int) -> None:
    """LOOP_CONFIGURE with struct loop_config: descriptor, block size, loop_info64."""
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    info = struct.pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)
    argument = bytearray(struct.pack("=II", image, _BLOCK) + info + bytes(64))
    fcntl.ioctl(loop, _LOOP_CONFIGURE, argument)


def _mount(device: str, mountpoint: str) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | _MS_NOATIME
    try:
        kernel.mount(device, mountpoint, "btrfs", flags, _OPTIONS)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise VolumeUnavailable(
                "The kernel has no btrfs.", "Load it: modprobe btrfs."
            ) from error
        raise
