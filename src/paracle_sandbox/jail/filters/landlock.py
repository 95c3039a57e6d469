"""Landlock: a second layer below the mounts that says where files may be read and written.

Everything that this kernel can mediate is handled, so what no rule allows is refused. From ABI 6
on, signals and abstract sockets do not leave the sandbox either; that matters where it shares
the host's network. Network rules are left to the network namespace. What Landlock does not see
(stat, chdir, chmod, chown, utime, extended attributes) is left to the mounts.

It binds the calling thread and what that starts: call it while there is only one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from ..kernel import in_memory
from . import syscalls

# Below ABI 2 files can never be moved from one directory to another.
MINIMUM_ABI = 2

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_MAKE_CHAR = 1 << 6
_MAKE_BLOCK = 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
# The rights of ABI 1 are the lowest 13 bits; ABI 2 adds REFER, 3 TRUNCATE, 5 IOCTL_DEV.
_HANDLED_BY_ABI = ((5, 0xFFFF), (3, 0x7FFF), (2, 0x3FFF))
_FOR_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE | _READ_DIR | _TRUNCATE | _IOCTL_DEV
_NEVER = _MAKE_CHAR | _MAKE_BLOCK

_ABI_WITH_SCOPES = 6
_SCOPE_ABSTRACT_SOCKET_AND_SIGNAL = 0b11

_QUERY_VERSION = 1
_RULE_PATH_BENEATH = 1


# handled_access_fs, handled_access_net, scoped. Older kernels take the longer structure as long
# as what they do not know is zero.
_RULESET_ATTRIBUTES = struct.Struct("=QQQ")
_PATH_BENEATH = struct.Struct("=Qi")  # allowed_access, parent_fd


def abi() -> int:
    """The version that this kernel speaks; 0 if it has no Landlock or has it switched off."""
    try:
        return syscalls.invoke("landlock_create_ruleset", 0, 0, _QUERY_VERSION)
    except OSError:  # ENOSYS: not built; EOPNOTSUPP: not enabled at boot; EPERM: filtered away
        return 0


def unavailable() -> str | None:
    """Why Landlock cannot be used here, or None if it can."""
    version = abi()
    if version == 0:
        return "the kernel has no Landlock, or it is not in the lsm= boot parameter"
    if version < MINIMUM_ABI:
        return f"the kernel has Landlock ABI {version}, {MINIMUM_ABI} (Linux 5.19) is needed"
    return None


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str] = ()) -> None:
    """Confine this thread for good. no_new_privs must have been set.

    Below `read` files may be read and executed; below `write` everything but making devices;
    `devices` may be read, written and controlled. OSError names the step or path that failed.
    """
    reason = unavailable()
    if reason:
        raise OSError(errno.EOPNOTSUPP, f"landlock: {reason}")
    version = abi()
    handled = next(rights for least, rights in _HANDLED_BY_ABI if version >= least)
    scoped = _SCOPE_ABSTRACT_SOCKET_AND_SIGNAL if version >= _ABI_WITH_SCOPES else 0
    ruleset = _ruleset(handled, scoped)
    try:
        for paths, rights in ((read, _READ), (write, handled & ~_NEVER), (devices, _DEVICE)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        syscalls.invoke("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _ruleset(handled: int, scoped: int) -> int:
    """The descriptor of an empty one."""
    attributes = in_memory(_RULESET_ATTRIBUTES.pack(handled, 0, scoped))
    address = ctypes.addressof(attributes)
    size = _RULESET_ATTRIBUTES.size
    return syscalls.invoke("landlock_create_ruleset", address, size, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _FOR_A_FILE
        rule = in_memory(_PATH_BENEATH.pack(rights, parent))
        address = ctypes.addressof(rule)
        syscalls.invoke("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, address, 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(parent)
