"""The volume that holds every workspace of one spawner: btrfs in a sparse file without a name.

How it vanishes. The image is a file that was never linked into a directory; the loop device over
it clears itself at its last close; the mount is in the spawner's private mount namespace. So each
thing is held only by the next, and the first by the processes in the namespace: when the last of
them is gone, killed or not, the kernel unmounts, frees the loop device and returns the space.

How it starts. mkfs would be one more program to have and to wait for, so an empty file system is
shipped as a seed, written into the file under a fresh id (the kernel does not mount one id twice)
and grown to its size once mounted.

What the caller must do. btrfs lets anybody make a subvolume in a directory of theirs, and it would
have no limit: the seccomp filter has to refuse FORBIDDEN_IOCTLS. And if the disk under the image
fills up, btrfs turns read-only for good (`broken`), so `size_bytes` has to fit in the free space
(`space`), and a spawner whose volume is broken gets no more sandboxes.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
from typing import Final

from .. import kernel
from . import btrfs

# BTRFS_IOC_SNAP_CREATE, SUBVOL_CREATE, SNAP_CREATE_V2, SUBVOL_CREATE_V2, SUBVOL_SETFLAGS: what
# needs no privilege and would leave the quota or hinder removal. The kernel looks at 32 bits only.
FORBIDDEN_IOCTLS: Final = (0x50009401, 0x5000940E, 0x50009417, 0x50009418, 0x4008941A)

MINIMUM_BYTES: Final = 256 * 1024 * 1024

_BLOCK: Final = 4096

_LOOP_MAJOR: Final = 7
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LO_FLAGS_AUTOCLEAR: Final = 4
_LO_FLAGS_DIRECT_IO: Final = 16
_LOOP_ATTEMPTS: Final = 64

_MS_NOATIME: Final = 1024
# Nothing here outlives a crash: no barriers, no checksums of data. The commit interval is how long
# what was removed keeps its blocks. Discarding them with the commit costs no measurable time, while
# "async" would give them back to the host only ten seconds after it.
_OPTIONS: Final = "nobarrier,nodatasum,discard=sync,commit=5"
# A workspace that held so much is not left until the next commit.
_MUCH_BYTES: Final = 64 * 1024 * 1024
_FREED_SECONDS: Final = 1.0  # before that it is no use to ask whether what was removed is gone


# Not the reservations for metadata: worst cases, a hundred times what will be written.
_USED: Final = ("referenced", "rsv_data")
_ALLOWED: Final = "max_referenced"


class VolumeUnavailable(Exception):
    """This machine cannot have a volume: why, and what would help."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")
        self.reason = reason
        self.remedy = remedy


class Volume:
    """A mounted volume. It works through descriptors, so also after the caller changed its root."""

    def __init__(self, mountpoint: str, root: int, groups: int, groups_path: str) -> None:
        self.mountpoint = mountpoint
        self.identity = groups_path.split("/")[-2]
        self._root = root
        self._groups = groups
        self._groups_path = groups_path
        self._retired: collections.deque[tuple[float, int]] = collections.deque()

    @classmethod
    def create(cls, image_dir: str, size_bytes: int, mountpoint: str) -> Volume:
        """Make a volume of at most `size_bytes` and mount it; space is taken only as it is used.

        The caller is root, in a private mount namespace whose mounts do not propagate. Raises
        VolumeUnavailable when the machine cannot do this, OSError when a step fails all the same.
        """
        _require_root()
        image, identity = _make_image(image_dir, size_bytes)
        try:
            loop, device = _attach(image)
        finally:
            os.close(image)
        try:
            _mount(device, mountpoint)
        finally:
            os.close(loop)
        try:
            return cls(mountpoint, *_prepare(mountpoint, identity))
        except OSError:
            kernel.umount(mountpoint)
            raise

    @classmethod
    def adopt(cls, root: int) -> Volume:
        """The same in another process, as far as to make subvolumes and to limit them."""
        return cls("", root, -1, "//")

    @property
    def root(self) -> int:
        """What `adopt` takes."""
        return self._root

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
        used = sum(self._figure(group, figure) for figure in _USED)
        return used, self._figure(group, _ALLOWED)

    def figures(self, name: str) -> tuple[list[str], str]:
        """The files with what `usage` adds up and with what is allowed, for who sees the machine's
        own /sys."""
        group = f"{self._groups_path}/0_{self._id(name)}"
        return [f"{group}/{figure}" for figure in _USED], f"{group}/{_ALLOWED}"

    def commit(self) -> None:
        """Write down what is pending: `usage` then no longer counts what was removed."""
        btrfs.sync(self._root)

    def delete_subvolume(self, name: str) -> None:
        """Remove a subvolume at once, whatever is in it or holds it open; its blocks come back in
        the background. Raises FileNotFoundError when there is none of that name."""
        subvolume = self._id(name)
        held = 0
        with contextlib.suppress(OSError, ValueError):  # that is for the sake of speed only
            held = self._figure(f"0_{subvolume}", "referenced")
        try:
            btrfs.delete_subvolume(self._root, name)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            self._delete_nested(subvolume)
            btrfs.delete_subvolume(self._root, name)
        self._retire(subvolume)
        self._forget_quotas()
        if held > _MUCH_BYTES:
            with contextlib.suppress(OSError):
                btrfs.start_sync(self._root)

    @property
    def broken(self) -> bool:
        """Whether the kernel gave the volume up, as it does when the host's disk is full."""
        return bool(os.fstatvfs(self._root).f_flag & os.ST_RDONLY)

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
                self._retire(leaf)

    def _retire(self, subvolume: int) -> None:
        self._retired.append((time.monotonic() + _FREED_SECONDS, subvolume))

    def _forget_quotas(self) -> None:
        """Two at a time keeps up with one deletion each, and deletion stays cheap."""
        for _ in range(2):
            if not self._retired or time.monotonic() < self._retired[0][0]:
                break
            _, oldest = self._retired.popleft()
            if not btrfs.remove_quota_group(self._root, oldest):
                self._retire(oldest)

    def _figure(self, group: str, name: str) -> int:
        fd = os.open(f"{group}/{name}", os.O_RDONLY, dir_fd=self._groups)
        try:
            return int(os.read(fd, 32))
        finally:
            os.close(fd)

    def _id(self, name: str) -> int:
        fd = self.open(name)
        try:
            return btrfs.subvolume_id(fd)
        finally:
            os.close(fd)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise VolumeUnavailable("Volumes need root.", "Run as root.")


def _prepare(mountpoint: str, identity: bytes) -> tuple[int, int, str]:
    """Grow the mounted seed and turn quotas on: descriptors of its root and its quota figures, and
    where those are."""
    with contextlib.ExitStack() as undo:
        root = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, root)
        btrfs.grow_to_device(root)
        btrfs.enable_quota(root)
        path = f"/sys/fs/btrfs/{_shown(identity)}/qgroups"
        groups = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        undo.pop_all()
        return root, groups, path


def _shown(identity: bytes) -> str:
    """Format it as uuid does, which takes longer to import than all else that makes a volume."""
    text = identity.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _make_image(directory: str, size_bytes: int) -> tuple[int, bytes]:
    """A sparse file that no directory names, holding an empty file system with an id of its own."""
    if size_bytes < MINIMUM_BYTES:
        raise ValueError(f"a volume needs at least {MINIMUM_BYTES} bytes, not {size_bytes}")
    identity = os.urandom(16)
    image = _open_unnamed(directory)
    try:
        os.ftruncate(image, size_bytes - size_bytes % _BLOCK)
        btrfs.write_seed(image, identity)
    except OSError:
        os.close(image)
        raise
    return image, identity


def _open_unnamed(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # A file system without O_TMPFILE, such as an older overlayfs.
    path = os.path.join(directory, f".volume-{os.urandom(16).hex()}")
    image = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return image


def _attach(image: int) -> tuple[int, str]:
    """A loop device over the image: its path, and its descriptor, which keeps it until mounted."""
    try:
        control = os.open("/dev/loop-control", os.O_RDWR)
    except OSError as error:
        reason = f"/dev/loop-control cannot be opened ({error.strerror})."
        raise VolumeUnavailable(reason, "Load the loop module: modprobe loop.") from error
    try:
        for _ in range(_LOOP_ATTEMPTS):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            with contextlib.ExitStack() as undo:
                loop = _open_loop(number, device)
                undo.callback(os.close, loop)
                if _configure(loop, image):
                    undo.pop_all()
                    return loop, device
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "loop: every free device was taken by others first")


def _open_loop(number: int, device: str) -> int:
    # Where /dev is no devtmpfs, as in a container, no node was made.
    with contextlib.suppress(FileExistsError):
        os.mknod(device, 0o660 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
    return os.open(device, os.O_RDWR)


def _configure(loop: int, image: int) -> bool:
    """Put the device over the image; False when another process took the device first."""
    # Direct, or every byte would be cached twice.
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    # struct loop_config: descriptor, block size, struct loop_info64, 64 bytes of reserve.
    argument = bytearray(struct.pack("=II52xI176x64x", image, _BLOCK, flags))
    try:
        fcntl.ioctl(loop, _LOOP_CONFIGURE, argument)
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise VolumeUnavailable(
            f"The loop device refused its image ({error.strerror}).", "Linux 5.8 is needed."
        ) from error


def _mount(device: str, mountpoint: str) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | _MS_NOATIME
    try:
        kernel.mount(device, mountpoint, "btrfs", flags, _OPTIONS)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise VolumeUnavailable("The kernel has no btrfs.", "modprobe btrfs.") from error
        if error.errno == errno.EPERM:
            raise VolumeUnavailable("Mounting is not allowed.", "Grant CAP_SYS_ADMIN.") from error
        raise
