"""The filter does what the policy says: the compiled programs are run in a simulator."""

import ctypes
import errno
import itertools
import json
import os
import pathlib
import tempfile

import pytest

from paracle_sandbox.jail.filters import bpf, engine_profile, policy, rules, seccomp, syscalls
from paracle_sandbox.jail.filters.rules import Check, Verdict

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
ARCHITECTURES = tuple(syscalls.NUMBERS)
HIGH_BIT = 1 << 32
KILL = 0x80000000
RETURNS = {
    Verdict.ALLOW: 0x7FFF0000,
    Verdict.DENY: 0x00050000 | errno.EPERM,
    Verdict.ABSENT: 0x00050000 | errno.ENOSYS,
    Verdict.INVALID: 0x00050000 | errno.EINVAL,
    Verdict.IGNORE: 0x00050000,
}


class Simulator:
    """Run a program as the kernel would, and record each instruction and each branch that was
    taken."""

    JUMPS = {
        0x15: lambda a, k: a == k,
        0x25: lambda a, k: a > k,
        0x35: lambda a, k: a >= k,
        0x45: lambda a, k: a & k != 0,
    }

    def __init__(self, program):
        self.program = bpf.decode(program)
        self.taken = set()

    def run(self, architecture, number, arguments=()):
        padded = [*arguments, *[0] * (6 - len(arguments))]
        words = [number, architecture, 0, 0]
        for argument in padded:
            words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
        accumulator, position = 0, 0
        while True:
            code, k, jump_true, jump_false, _ = self.program[position]
            way = None
            position += 1
            if code == 0x06:
                self.taken.add((position - 1, way))
                return k
            if code == 0x20:
                assert k % 4 == 0
                accumulator = words[k // 4]
            elif code == 0x54:
                accumulator &= k
            elif code == 0x05:
                skip = k
            else:
                way = self.JUMPS[code](accumulator, k)
                skip = jump_true if way else jump_false
            self.taken.add((position - 1, way))
            if code & 0x07 == 0x05:
                position += skip


def words_of_interest(tree, found=None):
    """Return values to try for each argument that a rule examines: its values, their neighbours,
    and extremes."""
    found = {} if found is None else found
    if isinstance(tree, Check):
        values = {value for case in tree.cases for value in case.values.values()}
        near = {value ^ flip for value in values for flip in (0, 1, 0x80000000, ~tree.mask)}
        near |= {0, 0xFFFFFFFF, tree.mask, tree.mask & -tree.mask}
        words = found.setdefault(tree.argument, set())
        # A rule may examine an argument twice under different masks: try both parts together.
        near = {n & 0xFFFFFFFF for n in near}
        if tree.high:
            near = {n << 32 for n in near}
        words |= {before | n for before in (0, *words) for n in near}
        for subtree in (*(case.then for case in tree.cases), tree.otherwise):
            words_of_interest(subtree, found)
    return found


def calls_of_interest(tree):
    if isinstance(tree, Verdict):
        yield from ARGUMENTS_OF_RULES
        return
    interesting = words_of_interest(tree)
    for words in itertools.product(*interesting.values()):
        arguments = [0] * 6
        for index, word in zip(interesting, words, strict=True):
            arguments[index] = word
        yield arguments
        yield [word ^ HIGH_BIT for word in arguments]


# These are for calls without a rule, which must not end up in the routine of a rule: arguments that
# each rule allows, and arguments that it does not.
ARGUMENTS_OF_RULES = [
    next(each for each in calls_of_interest(tree) if rules.decide(tree, each) is verdict)
    for tree in rules.RULES.values()
    for verdict in (Verdict.ALLOW, Verdict.DENY)
]


def known_numbers(architecture):
    return {number: name for name, number in syscalls.NUMBERS[architecture].items()}


def test_every_known_call_has_exactly_one_place_in_the_table():
    places = [
        *policy.names(policy.ALLOWED),
        *policy.names(policy.DENIED),
        *policy.names(policy.ABSENT),
        *policy.names(policy.IGNORED),
        *rules.RULES,
    ]
    known = set().union(*syscalls.NUMBERS.values())
    assert sorted(places) == sorted(set(places))
    assert set(places) == known


@pytest.mark.case("J07")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_program_equals_policy_for_every_call_and_covers_every_way(architecture):
    simulator = Simulator(seccomp.program(architecture))
    audit = seccomp.AUDIT_ARCHITECTURE[architecture]
    table, known = policy.table(), known_numbers(architecture)
    for number in (*range(1024), 0x3FFFFFFF):
        tree = table[known[number]] if number in known else Verdict.ABSENT
        for arguments in calls_of_interest(tree):
            expected = RETURNS[rules.decide(tree, arguments)]
            assert simulator.run(audit, number, arguments) == expected, (number, arguments)
    for number in (0x40000000, 0x40000000 | 1, 0xFFFFFFFF):
        assert simulator.run(audit, number) == RETURNS[Verdict.ABSENT]
    assert simulator.run(0, 0) == KILL
    assert simulator.taken == all_ways(simulator.program)


def all_ways(program):
    return {
        (index, way)
        for index, each in enumerate(program)
        for way in ((True, False) if each.code in Simulator.JUMPS else (None,))
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_architecture_is_killed_whatever_it_calls(architecture):
    simulator = Simulator(seccomp.program(architecture))
    i386, arm, riscv64, big_endian_arm64 = 0x40000003, 0x40000028, 0xC00000F3, 0x800000B7
    others = set(seccomp.AUDIT_ARCHITECTURE.values()) - {seccomp.AUDIT_ARCHITECTURE[architecture]}
    for other in (i386, arm, riscv64, big_endian_arm64, 0, 0xFFFFFFFF, *others):
        for number in (0, 1, 20, 102, 435, 0x40000000):
            assert simulator.run(other, number) == KILL


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_will_take_the_program(architecture):
    program = bpf.decode(seccomp.program(architecture))
    assert len(program) < 4096
    assert program[-1].code == bpf.RETURN
    for index, each in enumerate(program):
        jumps = each.code & 0x07 == 0x05
        furthest = max(each.jump_true, each.jump_false, each.k if each.code == bpf.JUMP else 0)
        assert not jumps or index + 1 + furthest < len(program)


ALLOW, DENY, ABSENT = Verdict.ALLOW, Verdict.DENY, Verdict.ABSENT
SIGCHLD = 17
MINUS_1 = 0xFFFFFFFF
OWN = (1000, MINUS_1)
# This is written by hand: the table must not be its own judge.
FACTS = [
    ("clone", [SIGCHLD], ALLOW),
    ("clone", [0x3D0F00], ALLOW),  # a thread
    ("clone", [0x4000 | 0x100 | SIGCHLD], ALLOW),  # vfork
    *(("clone", [SIGCHLD | flag], DENY) for flag in (1 << 17, *(1 << b for b in range(25, 31)))),
    ("clone3", [0, 0], ABSENT),
    ("unshare", [0x10000000], DENY),
    ("socket", [1, 1 | 0o2000000, 0], ALLOW),
    ("socket", [2, 1 | 0o4000, 6], ALLOW),
    ("socket", [10, 2, 17], ALLOW),
    ("socket", [16, 3 | 0o2000000, 0], ALLOW),  # NETLINK_ROUTE
    *(("socket", [16, 3, family], DENY) for family in (4, 6, 9, 12, 15, 16)),
    *(("socket", [family, 1, 0], DENY) for family in (0, 3, 9, 15, 17, 21, 29, 30, 31, 38, 40, 44)),
    *(("socket", [2, kind, 1], DENY) for kind in (3, 3 | 0o2000000, 4, 5, 6, 10)),
    ("socket", [2, 1, 132], DENY),  # SCTP
    ("socket", [2, 1, 262], DENY),  # MPTCP
    ("socketpair", [1, 1, 0], ALLOW),
    ("socketpair", [30, 1, 0], DENY),
    ("setsockopt", [3, 1, 2], ALLOW),
    ("setsockopt", [3, 1, 26], DENY),
    ("setsockopt", [3, 6, 1], ALLOW),
    ("setsockopt", [3, 6, 31], DENY),
    *(("ioctl", [0, ok], ALLOW) for ok in (0x5401, 0x5413, 0x541B, 0x540E, 0x80045430, 0x8912)),
    *(("ioctl", [0, tty], DENY) for tty in (0x5412, 0x541C, 0x541D, 0x5423)),
    *(("ioctl", [0, flag], DENY) for flag in (0x40086602, 0x40046602, 0x401C5820)),
    ("ioctl", [0, 0x80086601], ALLOW),  # FS_IOC_GETFLAGS
    *(("ioctl", [0, btrfs], DENY) for btrfs in (0x50009401, 0x5000940E, 0x50009417, 0x50009418)),
    ("personality", [0], ALLOW),
    ("personality", [0xFFFFFFFF], ALLOW),
    ("personality", [0x0040000], DENY),
    ("personality", [0x0400000], DENY),
    *(("prctl", [option], ALLOW) for option in (1, 4, 15, 36, 38, 0x53564D41)),
    *(("prctl", [option], DENY) for option in (8, 24, 28, 35, 47, 53, 59, 62, 67, 0x59616D61)),
    *(("prctl", [22, mode], Verdict.INVALID) for mode in (1, 2)),
    *(("seccomp", [operation, flags], ABSENT) for operation in (0, 1, 2) for flags in (0, 1, 8)),
    *((name, [], Verdict.IGNORE) for name in ("sync", "syncfs")),
    ("mmap", [0, 4096, 3, 0x22], ALLOW),
    ("mmap", [0, 4096, 3, 0x100022], ALLOW),  # MAP_FIXED_NOREPLACE
    *(("mmap", [0, 4096, 3, huge], DENY) for huge in (0x40022, 0x78040022)),  # of 2 MiB, of 1 GiB
    ("memfd_create", [0, 3], ALLOW),
    *(("memfd_create", [0, huge], DENY) for huge in (4, 7, 0x78000004)),
    ("mknodat", [0, 0, 0o010644], ALLOW),
    ("mknodat", [0, 0, 0o100644], ALLOW),
    ("mknodat", [0, 0, 0o140644], ALLOW),
    ("mknodat", [0, 0, 0o020644], DENY),
    ("mknodat", [0, 0, 0o060644], DENY),
    *(("fcntl", [0, ok], ALLOW) for ok in (1, 6, 7, 37, 1030, 1031, 1033)),
    *(("fcntl", [0, lease], DENY) for lease in (1024, 1026, 1040)),
    ("sched_setscheduler", [0, 0], ALLOW),
    ("sched_setscheduler", [0, 5 | 0x40000000], ALLOW),
    *(("sched_setscheduler", [0, policy], DENY) for policy in (1, 2, 6, 1 | 0x40000000)),
    ("sched_setscheduler", [1, 0], DENY),
    ("sched_setparam", [0], ALLOW),
    ("sched_setparam", [1], DENY),
    ("sched_setaffinity", [1], ALLOW),  # as the C library does for a thread
    ("ioprio_set", [1, 0, 2 << 13 | 4], ALLOW),
    ("ioprio_set", [1, 0, 1 << 13], DENY),
    *(("ioprio_set", [*who, 2 << 13 | 4], DENY) for who in ((1, 1), (2, 1), (3, 0))),
    ("setpriority", [0, 0, 19], ALLOW),
    ("setpriority", [1, 0, 19], ALLOW),
    *(("setpriority", [*who, 19], DENY) for who in ((0, 1), (1, 1), (2, 0), (2, 1000))),
    ("prlimit64", [0, 7, 0x7FFF0000], ALLOW),
    *(("prlimit64", [1, 7, new], DENY) for new in (1, 0x7FFF0000)),
    *((f"set{kind}id", [1000], ALLOW) for kind in "ug"),
    *((f"set{kind}id", [other], DENY) for kind in "ug" for other in (0, 1, 999, 65534, MINUS_1)),
    *((f"setre{kind}id", ids, ALLOW) for kind in "ug" for ids in itertools.product(OWN, repeat=2)),
    *((f"setres{kind}id", ids, ALLOW) for kind in "ug" for ids in itertools.product(OWN, repeat=3)),
    *((f"setre{kind}id", ids, DENY) for kind in "ug" for ids in ([0, MINUS_1], [1000, 1001])),
    *(
        (f"setres{kind}id", ids, DENY)
        for kind in "ug"
        for ids in ([0, 1000, 1000], [MINUS_1, 0, MINUS_1], [MINUS_1, 1000, 0], [65534] * 3)
    ),
    *((f"setfs{kind}id", [own], DENY) for kind in "ug" for own in (1000, MINUS_1)),
]
# Both words of an address count, so these are not tried with high bits added.
ADDRESSES = [
    ("prlimit64", [1, 7, 0], ALLOW),  # it only asks
    ("prlimit64", [1, 7, 1 << 32], DENY),
    ("prlimit64", [1, 7, 0x7FFF << 32], DENY),
    ("prlimit64", [1 << 32, 7, 1 << 32], ALLOW),  # the kernel takes the pid as an int
]
MUST_STAY = """
    futex futex_waitv rseq set_robust_list membarrier close_range copy_file_range statx faccessat2
    openat2 memfd_create pidfd_open pidfd_send_signal getrandom prlimit64 sched_getaffinity
    sched_setaffinity sysinfo sendfile signalfd4 eventfd2 timerfd_create epoll_create1 epoll_pwait
    inotify_init1 splice tee fallocate fadvise64 mremap madvise pkey_mprotect pkey_alloc pkey_free
    waitid execveat rt_sigreturn exit_group
"""
MUST_GO = """
    ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd bpf perf_event_open
    userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key
    init_module finit_module delete_module kexec_load kexec_file_load reboot swapon syslog vhangup
    lookup_dcookie nfsservctl mount umount2 move_mount fsopen fsconfig open_tree mount_setattr
    pivot_root quotactl acct setns unshare chroot memfd_secret remap_file_pages vmsplice
    fanotify_init shmget semget msgget mq_open open_by_handle_at name_to_handle_at clock_settime
    adjtimex settimeofday sethostname setdomainname mbind setuid setgid setgroups setresuid
    setresgid setreuid setregid setfsuid setfsgid
    sched_setattr file_setattr
"""
FACTS += [(name, [], ALLOW) for name in MUST_STAY.split()]
FACTS += [(name, [], DENY) for name in MUST_GO.split()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_facts_hold_also_when_high_bits_are_set(architecture):
    simulator = Simulator(seccomp.program(architecture))
    audit = seccomp.AUDIT_ARCHITECTURE[architecture]
    for name, arguments, verdict in FACTS:
        number = syscalls.NUMBERS[architecture][name]
        for high in (0, HIGH_BIT, 0xFFFFFFFF << 32):
            result = simulator.run(audit, number, [word | high for word in arguments])
            assert result == RETURNS[verdict], (name, arguments, high)
    for name, arguments, verdict in ADDRESSES:
        result = simulator.run(audit, syscalls.NUMBERS[architecture][name], arguments)
        assert result == RETURNS[verdict], (name, arguments)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_program_is_the_reviewed_one(architecture):
    """After a change of the table run ``python3 -m paracle_sandbox.jail.filters.seccomp``."""
    listing = bpf.listing(seccomp.instructions(architecture))
    assert listing == (GOLDEN / f"seccomp_{architecture}.txt").read_text()


def test_oci_profile_is_the_reviewed_one():
    """After a change run ``python3 -m paracle_sandbox.jail.filters.engine_profile``."""
    assert engine_profile.text() == (GOLDEN / "seccomp_oci.json").read_text()
    assert json.loads(engine_profile.text()) == engine_profile.profile()


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_uint),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def compiled_by_an_engine(profile):
    """Return the profile as container engines compile it, and the calls that their library
    knows."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    library.seccomp_init.restype = ctypes.c_void_p
    add = library.seccomp_rule_add_array
    add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    context = ctypes.c_void_p(library.seccomp_init(0x00050000 | profile["defaultErrnoRet"]))
    known = set()
    for entry in profile["syscalls"]:
        allowed = entry["action"] == "SCMP_ACT_ALLOW"
        action = 0x7FFF0000 if allowed else 0x00050000 | entry["errnoRet"]
        if action == 0x00050000 | profile["defaultErrnoRet"]:
            continue  # runc and crun skip such rules; their library would refuse them
        given = [(a["index"], 7, a["value"], a["valueTwo"]) for a in entry.get("args", ())]
        comparisons = (_Comparison * len(given))(*given)
        for name in entry["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:
                known.add(name)
                assert add(context, action, number, len(given), comparisons) == 0, entry
    with tempfile.TemporaryFile() as file:
        assert library.seccomp_export_bpf(context, file.fileno()) == 0
        library.seccomp_release(context)
        file.seek(0)
        return file.read(), known


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="compiles for the machine it is on")
def test_engines_compile_the_profile_to_the_same_policy():
    program, known = compiled_by_an_engine(engine_profile.profile())
    simulator = Simulator(program)
    audit = seccomp.AUDIT_ARCHITECTURE["x86_64"]
    for name, tree in policy.table().items():
        if name not in known and tree is not ABSENT:
            continue
        number = syscalls.NUMBERS["x86_64"][name]
        for arguments in calls_of_interest(tree):
            verdict = rules.decide(tree, arguments)
            refused_by_arguments = isinstance(tree, Check) and verdict is not ALLOW
            expected = RETURNS[ABSENT if refused_by_arguments else verdict]
            assert simulator.run(audit, number, arguments) == expected, (name, arguments)
    assert len(known) > 300
    assert simulator.run(audit, 600) == RETURNS[ABSENT]
    assert simulator.run(0x40000003, 20) in (0, KILL)
    assert simulator.run(audit, 0x40000000 | 1) in (0, KILL)
