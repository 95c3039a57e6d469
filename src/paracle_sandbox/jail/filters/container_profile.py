"""A seccomp profile for a container in which native sandboxes are made.

It is an allow list: what programs in sandboxes may call, what programs in containers commonly call
beside that, and what sandboxes are made with. It names no call that loads code into the kernel,
changes the machine's clock or swap, or opens files by their handles. (The profile in oci.py is
another: that is for containers which are sandboxes themselves.)

    python3 -m paracle_sandbox.jail.filters.container_profile     prints the profile
"""

from __future__ import annotations

import json
from typing import Any

from . import policy
from .rules import RULES

# What sandboxes are made with, once they are root of a user namespace of their own.
_NATIVE = """
    unshare setns mount umount2 mount_setattr move_mount open_tree fsopen fsconfig fsmount
    fspick pivot_root chroot sethostname capset clone3 pidfd_getfd seccomp statmount listmount
"""
# What else programs of a container call, such as a shell, a package manager or a debugger. Where
# one of these needs a capability, the kernel asks for it. (Calls that sandboxes may make with some
# arguments are in RULES, and may be made with any.)
_COMMON = """
    setfsuid setfsgid setgroups
    shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents
    mbind set_mempolicy get_mempolicy set_mempolicy_home_node
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp
    get_robust_list sync sched_setattr name_to_handle_at vmsplice remap_file_pages memfd_secret
    cachestat modify_ldt get_thread_area set_thread_area syncfs
"""
# Without their 32-bit siblings, which have calls of their own.
_ARCHITECTURES: list[dict[str, Any]] = [
    {"architecture": name, "subArchitectures": []}
    for name in ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
]
_AF_VSOCK = 40  # reaches a virtual machine's host past its network
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_ENOSYS = 38
_NOT_FOR_CONTAINERS = {"uprobe", "uretprobe"}


def profile() -> dict[str, Any]:
    """Make a profile for ``docker run --security-opt seccomp=FILE``, and for Kubernetes."""
    names = {*policy.names(policy.ALLOWED), *RULES, *_NATIVE.split(), *_COMMON.split()}
    with_arguments = {"socket", "personality"}
    plain = sorted(names - with_arguments - _NOT_FOR_CONTAINERS)
    # Programs fall back on "there is no such call", and on nothing else.
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _ENOSYS,
        "archMap": _ARCHITECTURES,
        "syscalls": [
            {"names": plain, "action": "SCMP_ACT_ALLOW"},
            _argument("socket", 0, _AF_VSOCK, "SCMP_CMP_NE"),
            *(_argument("personality", 0, value, "SCMP_CMP_EQ") for value in _PERSONALITIES),
        ],
    }


def _argument(name: str, index: int, value: int, op: str) -> dict[str, Any]:
    args = [{"index": index, "value": value, "op": op}]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}


if __name__ == "__main__":
    print(json.dumps(profile(), indent=1))
