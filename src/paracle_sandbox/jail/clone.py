"""Fork a sandbox's first process straight into its cgroup and its pid namespace, by clone3.

To move a process into a cgroup the kernel waits until no process is in the middle of a fork, which
takes some 10 ms after a pause. A process that is born there need not be moved. Only version 2 of
cgroups has that, since Linux 5.7; `can_clone_into` finds out once, when a spawner starts, and where
it cannot be done each child writes itself into its groups instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct

from ..guest.clone import CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID, fork_by, main_thread
from . import kernel
from .limits.cgroups import Cgroups

_SYS_CLONE3 = 435  # the same number on every architecture
_CLONE_INTO_CGROUP = 0x200000000
_FLAGS = CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
_PROBE = "probe"
_PROBE_SECONDS = 0.5


def clone_arguments(flags: int, child_tid: int, cgroup: int = 0) -> bytes:
    """The kernel's ``struct clone_args``, as far as it goes since 5.7."""
    pidfd = parent_tid = stack = stack_size = tls = set_tid = set_tid_size = 0
    return struct.pack(
        "=11Q",
        *(flags, pidfd, child_tid, parent_tid, signal.SIGCHLD),
        *(stack, stack_size, tls, set_tid, set_tid_size, cgroup),
    )


def fork_into(namespaces: int, cgroup: int | None = None) -> int:
    """Fork into new namespaces, and into the cgroup of version 2 that a descriptor names. Returns
    the pid here, and 0 there. Raises OSError."""
    thread = main_thread()
    if thread is None:
        raise OSError(errno.ENOSYS, "this C library is not known")
    flags = _FLAGS | namespaces | (0 if cgroup is None else _CLONE_INTO_CGROUP)
    arguments = clone_arguments(flags, thread.tid, cgroup or 0)
    place = kernel.in_memory(arguments)
    return fork_by(_SYS_CLONE3, ctypes.byref(place), ctypes.c_size_t(len(arguments)))


def can_clone_into(cgroups: Cgroups) -> bool:
    """Try it. Older kernels answer E2BIG or EINVAL, the filter of a container ENOSYS or EPERM."""
    if cgroups.version != 2:
        return False
    try:
        cgroups.create(_PROBE)
        with cgroups.open(_PROBE) as group:
            pid = fork_into(kernel.CLONE_NEWPID, group)
            if pid == 0:
                os._exit(0)
        with contextlib.suppress(ChildProcessError):  # a spawner's children are reaped for it
            os.waitpid(pid, 0)
    except OSError:
        return False
    finally:
        cgroups.remove(_PROBE, _PROBE_SECONDS)
    return True
