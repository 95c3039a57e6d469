"""Rules for the calls whose fate hangs on their arguments.

Rules look at the low 32 bits of an argument, unless they say otherwise. The kernel takes nearly
all of these arguments as `int`, so a rule that compared all 64 would be passed by setting a high
bit. Of an address it takes all 64: whether one is NULL is asked of both words.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..shape import UID_INSIDE

FULL = 0xFFFFFFFF


class Verdict(enum.Enum):
    ALLOW = "ALLOW"
    DENY = "EPERM"
    ABSENT = "ENOSYS"
    INVALID = "EINVAL"
    IGNORE = "0"  # it does nothing, and says that all is well


class Case(NamedTuple):
    values: Mapping[str, int]
    then: Tree


class Check(NamedTuple):
    """Compare one word of one argument, under a mask, with the values of each case."""

    argument: int
    mask: int
    cases: tuple[Case, ...]
    otherwise: Tree
    high: bool = False  # the upper word, and not the lower one


if TYPE_CHECKING:  # before Python 3.10 this cannot be evaluated
    Tree = Verdict | Check


def only(argument: int, values: Mapping[str, int], mask: int = FULL) -> Check:
    return Check(argument, mask, (Case(values, Verdict.ALLOW),), Verdict.DENY)


def never(argument: int, values: Mapping[str, int], mask: int = FULL) -> Check:
    return Check(argument, mask, (Case(values, Verdict.DENY),), Verdict.ALLOW)


def decide(tree: Tree, arguments: Sequence[int]) -> Verdict:
    """Decide about a call with these arguments: all forms of the filter must decide the same."""
    while isinstance(tree, Check):
        word = arguments[tree.argument] >> (32 if tree.high else 0) & FULL & tree.mask
        matching = (case.then for case in tree.cases if word in case.values.values())
        tree = next(matching, tree.otherwise)
    return tree


def only_null(argument: int) -> Check:
    """Allow the call if this address is NULL."""
    upper = Check(argument, FULL, (Case({"NULL": 0}, Verdict.ALLOW),), Verdict.DENY, high=True)
    return Check(argument, FULL, (Case({"NULL": 0}, upper),), Verdict.DENY)


def only_self(argument: int, then: Tree = Verdict.ALLOW) -> Check:
    """Allow the call, or go on, if this pid is 0, which means the caller. Which other numbers mean
    the caller, or a process that it may look after, cannot be known here."""
    return Check(argument, FULL, (Case({"self": 0}, then),), Verdict.DENY)


def only_own_ids(*arguments: int) -> Tree:
    """Allow the call if each of these ids is the caller's own, or -1, which leaves it as it is."""
    if not arguments:
        return Verdict.ALLOW
    first, *rest = arguments
    values = {"own": UID_INSIDE, "as it is": FULL}
    return Check(first, FULL, (Case(values, only_own_ids(*rest)),), Verdict.DENY)


_LOW_BYTE = 0xFF
_NEW_NAMESPACES = 0x7E020000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_SOCKET_TYPE = 0xF  # the rest are SOCK_NONBLOCK and SOCK_CLOEXEC
_STREAM_DGRAM = {"SOCK_STREAM": 1, "SOCK_DGRAM": 2}

_SOCKET = Check(
    0,
    FULL,
    (
        Case({"AF_UNIX": 1}, only(1, {**_STREAM_DGRAM, "SOCK_SEQPACKET": 5}, _SOCKET_TYPE)),
        Case(
            {"AF_INET": 2, "AF_INET6": 10},
            Check(
                1,
                _SOCKET_TYPE,
                (
                    Case(
                        _STREAM_DGRAM,
                        # Not SCTP, MPTCP, SMC, UDP-Lite: large, and unused by Python.
                        only(2, {"IP": 0, "ICMP": 1, "TCP": 6, "UDP": 17, "ICMPV6": 58}),
                    ),
                ),
                Verdict.DENY,
            ),
        ),
        # getaddrinfo and if_nameindex list the interfaces with it.
        Case(
            {"AF_NETLINK": 16},
            Check(
                2,
                FULL,
                (Case({"ROUTE": 0}, only(1, {"SOCK_DGRAM": 2, "SOCK_RAW": 3}, _SOCKET_TYPE)),),
                Verdict.DENY,
            ),
        ),
    ),
    Verdict.DENY,
)

# Programs that the kernel runs on each packet, and protocols stacked on TCP. Low bytes are
# enough to tell these from every level and option that works on the sockets above.
_SETSOCKOPT = Check(
    1,
    _LOW_BYTE,
    (
        Case(
            {"SOL_SOCKET": 1},
            never(
                2,
                {
                    "SO_ATTACH_FILTER": 26,
                    "SO_ATTACH_BPF": 50,
                    "SO_ATTACH_REUSEPORT_CBPF": 51,
                    "SO_ATTACH_REUSEPORT_EBPF": 52,
                },
                _LOW_BYTE,
            ),
        ),
        Case({"SOL_TCP": 6}, never(2, {"TCP_ULP": 31}, _LOW_BYTE)),
    ),
    Verdict.ALLOW,
)

# A request is direction, size, type, number. Type and number decide here, so that the variants
# of a request for other sizes of its argument share its fate.
_IOCTL = Check(
    1,
    0xFF00,
    (
        # Typing into, talking for and stacking on a terminal.
        Case(
            {"terminal": 0x5400},
            never(
                1,
                {"TIOCSTI": 0x12, "TIOCLINUX": 0x1C, "TIOCCONS": 0x1D, "TIOCSETD": 0x23},
                _LOW_BYTE,
            ),
        ),
        # An immutable file would outlive its sandbox.
        Case({"file flags": 0x6600}, never(1, {"FS_IOC_SETFLAGS": 0x02}, _LOW_BYTE)),
        Case({"file attributes": 0x5800}, never(1, {"FS_IOC_FSSETXATTR": 0x20}, _LOW_BYTE)),
        # Workspaces are btrfs subvolumes with a quota, and no program inside has business with
        # descriptors of namespaces.
        Case({"btrfs": 0x9400, "namespaces": 0xB700}, Verdict.DENY),
    ),
    Verdict.ALLOW,
)

_PRCTL = Check(
    0,
    FULL,
    (
        Case(
            {
                "SET_PDEATHSIG": 1,
                "GET_PDEATHSIG": 2,
                "GET_DUMPABLE": 3,
                "SET_DUMPABLE": 4,
                "GET_KEEPCAPS": 7,
                "SET_NAME": 15,
                "GET_NAME": 16,
                "GET_SECCOMP": 21,
                "CAPBSET_READ": 23,
                "GET_TSC": 25,
                "GET_SECUREBITS": 27,
                "SET_TIMERSLACK": 29,
                "GET_TIMERSLACK": 30,
                "SET_CHILD_SUBREAPER": 36,
                "GET_CHILD_SUBREAPER": 37,
                "SET_NO_NEW_PRIVS": 38,
                "GET_NO_NEW_PRIVS": 39,
                "SET_THP_DISABLE": 41,
                "GET_THP_DISABLE": 42,
                "SVE_GET_VL": 51,
                "GET_SPECULATION_CTRL": 52,
                "SET_TAGGED_ADDR_CTRL": 55,
                "GET_TAGGED_ADDR_CTRL": 56,
                "SME_GET_VL": 64,
                "SET_MDWE": 65,
                "GET_MDWE": 66,
                "GET_AUXV": 0x41555856,
                "SET_VMA": 0x53564D41,
            },
            Verdict.ALLOW,
        ),
        # As where the kernel has no filters: programs that confine themselves go on without.
        Case({"SET_SECCOMP": 22}, Verdict.INVALID),
    ),
    Verdict.DENY,
)

_ARCH_PRCTL = only(
    0,
    {
        "SET_GS": 0x1001,
        "SET_FS": 0x1002,
        "GET_FS": 0x1003,
        "GET_GS": 0x1004,
        # Matrix registers are asked for before use.
        "GET_XCOMP_SUPP": 0x1021,
        "GET_XCOMP_PERM": 0x1022,
        "REQ_XCOMP_PERM": 0x1023,
        # The loader sets up shadow stacks; the first is how older ones ask.
        "CET_STATUS": 0x3001,
        "SHSTK_ENABLE": 0x5001,
        "SHSTK_DISABLE": 0x5002,
        "SHSTK_LOCK": 0x5003,
        "SHSTK_STATUS": 0x5005,
    },
)

_FCNTL = only(
    1,
    {
        "DUPFD": 0,
        "GETFD": 1,
        "SETFD": 2,
        "GETFL": 3,
        "SETFL": 4,
        "GETLK": 5,
        "SETLK": 6,
        "SETLKW": 7,
        "SETOWN": 8,
        "GETOWN": 9,
        "SETSIG": 10,
        "GETSIG": 11,
        "SETOWN_EX": 15,
        "GETOWN_EX": 16,
        "OFD_GETLK": 36,
        "OFD_SETLK": 37,
        "OFD_SETLKW": 38,
        "GETLEASE": 1025,
        "DUPFD_QUERY": 1027,
        "CREATED_QUERY": 1028,
        "DUPFD_CLOEXEC": 1030,
        "SETPIPE_SZ": 1031,
        "GETPIPE_SZ": 1032,
        "ADD_SEALS": 1033,
        "GET_SEALS": 1034,
        "GET_RW_HINT": 1035,
        "SET_RW_HINT": 1036,
        "GET_FILE_RW_HINT": 1037,
        "SET_FILE_RW_HINT": 1038,
    },
)

# Huge pages come from a pool of the whole machine, and count against no memory limit.
_MMAP = never(3, {"MAP_HUGETLB": 0x40000}, 0x40000)
_MEMFD_CREATE = never(1, {"MFD_HUGETLB": 0x4}, 0x4)

# Programs run as the user that the guest runs as. One that takes its descriptors away, or its turn
# on the processor, keeps it from killing what it has to kill.
_PRLIMIT = Check(0, FULL, (Case({"self": 0}, Verdict.ALLOW),), only_null(2))
_SETPRIORITY = Check(
    0, FULL, (Case({"PRIO_PROCESS": 0, "PRIO_PGRP": 1}, only_self(1)),), Verdict.DENY
)
_IOPRIO_SET = Check(
    0,
    FULL,
    (
        Case(
            {"IOPRIO_WHO_PROCESS": 1, "IOPRIO_WHO_PGRP": 2},
            only_self(1, only(2, {"NONE": 0, "BE": 0x4000, "IDLE": 0x6000}, 0xE000)),
        ),
    ),
    Verdict.DENY,
)

_FILE_KINDS = {"unset": 0, "S_IFIFO": 0x1000, "S_IFREG": 0x8000, "S_IFSOCK": 0xC000}
_FILE_KIND = 0xF000
_RESET_ON_FORK = 0x40000000

RULES: dict[str, Tree] = {
    "clone": only(0, {"no new namespace": 0}, _NEW_NAMESPACES),
    "socket": _SOCKET,
    "socketpair": only(0, {"AF_UNIX": 1}),
    "setsockopt": _SETSOCKOPT,
    "ioctl": _IOCTL,
    "fcntl": _FCNTL,
    "prctl": _PRCTL,
    "arch_prctl": _ARCH_PRCTL,
    "mmap": _MMAP,
    "memfd_create": _MEMFD_CREATE,
    "personality": only(0, {"PER_LINUX": 0, "query": 0xFFFFFFFF}),
    "mknod": only(1, _FILE_KINDS, _FILE_KIND),
    "mknodat": only(2, _FILE_KINDS, _FILE_KIND),
    "sched_setscheduler": only_self(
        0, only(1, {"OTHER": 0, "BATCH": 3, "IDLE": 5}, FULL & ~_RESET_ON_FORK)
    ),
    "sched_setparam": only_self(0),
    "prlimit64": _PRLIMIT,
    "setpriority": _SETPRIORITY,
    "ioprio_set": _IOPRIO_SET,
    # Nobody becomes anybody else, but may say who they are: with POSIX_SPAWN_RESETIDS, which GNU
    # make uses, the C library calls setresuid(-1, getuid(), -1).
    "setuid": only(0, {"own": UID_INSIDE}),
    "setgid": only(0, {"own": UID_INSIDE}),
    "setreuid": only_own_ids(0, 1),
    "setregid": only_own_ids(0, 1),
    "setresuid": only_own_ids(0, 1, 2),
    "setresgid": only_own_ids(0, 1, 2),
}
