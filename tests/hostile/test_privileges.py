"""I. Namespaces, mounts, privileges: the posture from outside, and attempts to better it."""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import oracles
import pytest
from hostile_fixtures import Make, Weak
from probes import report
from syscall_probe import BAD_POINTER, DENIED, PRELUDE, program, refused

from paracle_sandbox.backends.machine import process_isolation
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.sandbox.sandbox import Sandbox

THREADS = """
import os, threading, time
stop = threading.Event()
for _ in range(50):
    threading.Thread(target=stop.wait, daemon=True).start()
for argv in (["sleep", "60"], ["setsid", "sleep", "60"]):
    if not os.fork():
        os.execvp(argv[0], argv)
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(60)
print("ready", flush=True)
time.sleep(60)
"""
KINDS_OF_FD = ("pipe:", "socket:", "anon_inode:[eventpoll]", "/dev/null")


async def _background(sandbox: Sandbox, code: str, **options: object) -> object:
    ready = asyncio.Event()
    command = await sandbox.start_code(
        code, on_stdout=lambda text: ready.set(), timeout=100, **options
    )
    await asyncio.wait_for(ready.wait(), 20)
    return command


def _check_posture(native: NativeBackend, sandbox: Sandbox) -> int:
    """Check that every thread of every process is confined exactly as it should be.

    Returns how many there were.
    """
    init = native.init_pid(sandbox.sandbox_id)
    first = process_isolation.read_posture(init)
    base = native.settings.uid_base
    assert base <= first.uids[0] < base + 8192 * 1024
    # Containers are in the host's user namespace. All have the same user, each in its own group.
    is_container = native.name in ("docker", "gvisor")
    expected = process_isolation.Posture(
        uids=(first.uids[0],) * 4,
        gids=(first.uids[0],) * 4,
        groups=(first.uids[0],) if is_container else (),
        capabilities=(0,) * 5,
        no_new_privs=1,
        seccomp=2,
        own_namespaces=frozenset(process_isolation.NAMESPACES)
        - ({"user"} if is_container else set()),
    )
    places = oracles.namespaces_of(init)
    count = 0
    for pid in process_isolation.processes(init):
        try:
            for thread in process_isolation.threads(pid):
                assert process_isolation.read_posture(pid, thread) == expected, (pid, thread)
                count += 1
            assert oracles.namespaces_of(pid) == places
            _check_files(init, pid)
        except (FileNotFoundError, ProcessLookupError):
            assert pid != init  # any other one may have ended meanwhile
    # All Incus servers of a machine give out the same uids.
    only_in = places["user"] if native.name == "incus" else None
    assert is_container or oracles.wait_until(
        lambda: (
            set(oracles.processes_of_uid(first.uids[0], only_in))
            == set(process_isolation.processes(init))
        )
    )
    return count


def _check_files(init: int, pid: int) -> None:
    # For a moment a program that is being loaded has its libraries open, and a new child of the
    # guest has whatever the guest has. Neither is yet what it will be.
    assert oracles.wait_until(lambda: not _strange_files(init, pid)), _strange_files(init, pid)
    root, inner = os.stat(f"/proc/{init}/root/"), os.stat(f"/proc/{pid}/root/")
    assert (root.st_dev, root.st_ino) == (inner.st_dev, inner.st_ino)
    host = os.stat("/")
    assert (root.st_dev, root.st_ino) != (host.st_dev, host.st_ino)
    # A working directory of the host would be shown as a path that its root does not have.
    place = os.stat(f"/proc/{pid}/cwd/")
    ours = [os.stat(path) for path in ("/", os.getcwd())]
    assert (place.st_dev, place.st_ino) not in {(one.st_dev, one.st_ino) for one in ours}


def _strange_files(init: int, pid: int) -> list[tuple[int, int, str]]:
    found = []
    for fd, what in oracles.descriptors(pid).items():
        if pid == init and what == "/proc/1/oom_score_adj":
            continue  # the guest's own score, in the sandbox's own /proc
        try:
            mode = os.stat(f"/proc/{pid}/fd/{fd}").st_mode
        except FileNotFoundError:
            os.stat(f"/proc/{pid}/ns/pid")  # closed meanwhile, unless the whole process is gone
            continue
        if not what.startswith(KINDS_OF_FD) or stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            found.append((pid, fd, what))
    return found


@pytest.mark.case("I01")
async def test_posture_of_every_thread(native: NativeBackend, sandbox: Sandbox) -> None:
    assert _check_posture(native, sandbox) >= 1  # this is the guest alone
    first = await _background(sandbox, THREADS)
    assert _check_posture(native, sandbox) >= 50 + 4
    await sandbox.execute("true")
    await sandbox.execute("true")
    ready = asyncio.Event()
    shell = await sandbox.start_command(
        "echo ready; sleep 60; true", stdin=True, on_stdout=lambda text: ready.set()
    )
    await asyncio.wait_for(ready.wait(), 20)
    assert _check_posture(native, sandbox) > 50 + 4
    await shell.kill()
    await first.kill()
    assert _check_posture(native, sandbox) >= 1


@pytest.mark.case("I01")
async def test_the_posture_check_can_fail() -> None:
    """The same reader sees that this very process is not confined."""
    own = process_isolation.read_posture(os.getpid())
    assert own.has_capabilities and own.seccomp == 0 and not own.own_namespaces


@pytest.mark.case("I01")
async def test_the_kernel_takes_programs_first_when_memory_ends(
    native: NativeBackend, sandbox: Sandbox
) -> None:
    command = await _background(sandbox, THREADS)
    init = native.init_pid(sandbox.sandbox_id)
    assert _oom_score(init) <= 0
    # The programs have been started. Until they have become "sleep", another moment passes.
    assert oracles.wait_until(lambda: _oom_scores_of(init, "sleep") == [1000, 1000])
    await command.kill()


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def _oom_scores_of(init: int, name: str) -> list[int]:
    found = []
    for pid in process_isolation.processes(init):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(_oom_score(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.case("I01")
async def test_uids_are_one_per_sandbox(make: Make, host_uid: Callable[[Sandbox], int]) -> None:
    uids = [host_uid(await make()) for _ in range(6)]
    assert len(set(uids)) == 6 and 0 not in uids


NEW_NAMESPACES = {
    "user": 0x10000000, "mnt": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x8000000,
    "uts": 0x4000000, "cgroup": 0x2000000,
}  # fmt: skip


@pytest.mark.case("I02")
async def test_no_new_namespaces(native: NativeBackend, sandbox: Sandbox, weak: Weak) -> None:
    calls = {}
    for name, flag in NEW_NAMESPACES.items():
        for high in (0, 1 << 32):
            calls[f"unshare {name} {high}"] = (flag | high,)
            calls[f"clone {name} {high}"] = (flag | high | 17, 0, 0, 0, 0)
    calls["unshare time"] = (0x80,)
    calls["clone3"] = (BAD_POINTER, 88)
    places = oracles.namespaces_of(native.init_pid(sandbox.sandbox_id))
    answers = await report(sandbox, program(calls))
    assert not refused(answers)
    assert answers["clone3"] == "ENOSYS"
    running = await _background(sandbox, THREADS)
    _check_posture(native, sandbox)
    assert oracles.namespaces_of(native.init_pid(sandbox.sandbox_id)) == places
    await running.kill()
    control = weak.report(program({name: calls[name] for name in calls if "unshare" in name}))
    assert control["unshare user 0"] == "OK"


SETNS = (
    PRELUDE
    + """
answers, opened = {}, []
for pid in ["self", "1", *filter(str.isdigit, os.listdir("/proc"))]:
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
        try:
            fd = os.open("/proc/%s/ns/%s" % (pid, kind), os.O_RDONLY)
        except OSError as error:
            continue
        opened.append("%s %s" % (pid, kind))
        answers["%s %s" % (pid, kind)] = call(308, fd, 0)
try:
    answers["pidfd"] = call(308, os.pidfd_open(1), 0x20000000)
except OSError:
    pass
kept = [os.readlink("/proc/self/fd/%s" % n) for n in range(3) if os.path.exists("/proc/self/fd/%d" % n)]
print(json.dumps([answers, kept]))
"""
)


@pytest.mark.case("I03")
async def test_no_way_into_another_namespace(
    native: NativeBackend, sandbox: Sandbox, weak: Weak
) -> None:
    before = oracles.namespaces_of(native.init_pid(sandbox.sandbox_id))
    answers, kept = await report(sandbox, SETNS)
    assert not refused(answers)
    namespaces = tuple(f"{name}:[" for name in before)
    assert not [name for name in kept if name.startswith(namespaces)]

    def held() -> list[str]:
        pids = process_isolation.processes(native.init_pid(sandbox.sandbox_id))
        names = [name for pid in pids for name in oracles.descriptors(pid).values()]
        return [name for name in names if name.startswith(namespaces)]

    # The probe has opened them, and reports its end before it is gone.
    assert oracles.wait_until(lambda: not held()), held()
    control, _ = weak.report(SETNS)
    assert "OK" in control.values()


MOUNTS = {
    "mount bind": ("/", "/tmp", "", 0x1000, 0),
    "mount tmpfs": ("none", "/tmp", "tmpfs", 0, 0),
    "mount remount rw": ("none", "/", "", 0x20 | 0x1000, 0),
    "mount proc": ("proc", "/tmp", "proc", 0, 0),
    "mount propagate": ("none", "/", "", 0x4000 | 0x100000, 0),
    "umount2": ("/proc", 2),
    "move_mount": (-1, "", -1, "", 0),
    "fsopen": ("tmpfs", 0),
    "fsconfig": (-1, 0, "", 0, 0),
    "fsmount": (-1, 0, 0),
    "fspick": (-100, "/", 0),
    "open_tree": (-100, "/", 1),
    "mount_setattr": (-100, "/", 0, BAD_POINTER, 32),
    "pivot_root": ("/tmp", "/tmp"),
    "chroot": ("/tmp",),
    "swapon": ("/tmp/x", 0),
    "quotactl": (0x80000200, "/dev/loop0", 0, BAD_POINTER),
    "acct": ("/tmp/x",),
    "statmount": (BAD_POINTER, BAD_POINTER, 1, 0),
    "listmount": (BAD_POINTER, BAD_POINTER, 1, 0),
}


@pytest.mark.case("I04", "F02", "F16")
async def test_no_mounts(native: NativeBackend, sandbox: Sandbox, weak: Weak) -> None:
    init = native.init_pid(sandbox.sandbox_id)
    host, inside = oracles.host_mounts(), oracles.mountinfo(init)
    assert not refused(await report(sandbox, program(MOUNTS)))
    assert oracles.host_mounts() == host
    assert oracles.mountinfo(init) == inside
    control = weak.report(program(MOUNTS))
    assert {control[name] for name in ("mount tmpfs", "open_tree", "chroot", "fsopen")} == {"OK"}


@pytest.mark.case("I04", "F16")
async def test_flags_of_every_mount(native: NativeBackend, sandbox: Sandbox) -> None:
    own = {"/workspace", "/tmp", "/dev/shm", "/dev/pts", "/proc"}
    devices = {"/dev", "/dev/pts"}
    for line in oracles.mountinfo(native.init_pid(sandbox.sandbox_id)):
        _, _, _, _, place, options, *rest = line.split()
        flags = set(options.split(","))
        assert "nosuid" in flags, line
        assert ("rw" in flags) == (place in own), line
        # A mask is /dev/null itself, and the node must remain one.
        if place not in devices and not line.split()[3] == "/null":
            assert "nodev" in flags, line
        if place == "/dev/shm" or place.startswith("/proc"):
            assert "noexec" in flags or "/.empty" in line, line
        assert not [word for word in rest if word.startswith(("shared:", "master:"))], line


SETUID = """
import json, os, shutil, subprocess, stat
found = {}
planted = "/tmp/planted"
shutil.copy("/bin/sh", planted)
for mode in (0o4755, 0o6755, 0o2755):
    try:
        os.chmod(planted, mode)
        answer = subprocess.run([planted, "-p", "-c", "id -u; id -g"], capture_output=True, text=True)
        found["planted %o" % mode] = answer.stdout.split()
    except OSError as error:
        found["planted %o" % mode] = [str(os.getuid()), str(os.getgid())]
host = [os.path.join(d, n) for d in ("/usr/bin", "/usr/sbin", "/usr/lib") if os.path.isdir(d)
        for n in os.listdir(d)]
setuid = []
for path in host:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        continue
    if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        setuid.append(path)
status = {}
for path in setuid:
    # Started and looked at while it lives: the kernel decides at exec.
    reader, writer = os.pipe()
    process = subprocess.Popen([path], stdin=reader, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        with open("/proc/%d/status" % process.pid) as file:
            status[path] = [l.split()[1:5] for l in file if l.startswith(("Uid:", "Gid:"))]
    except OSError:
        pass
    process.kill()
    process.wait()
    os.close(reader); os.close(writer)
print(json.dumps([found, status]))
"""


@pytest.mark.case("I05")
async def test_setuid_programs_gain_nothing(sandbox: Sandbox) -> None:
    found, status = await report(sandbox, SETUID)
    for name, ids in found.items():
        assert ids == ["1000", "1000"], name
    for path, ids in status.items():
        assert ids in ([], [["1000"] * 4] * 2), (path, ids)


@pytest.mark.case("I05")
async def test_the_setuid_probe_can_fail() -> None:
    """A shell with the bit set does change its user where nothing forbids it."""
    import shutil
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="paracle-setuid-") as name:
        Path(name).chmod(0o755)
        shell = Path(name, "sh")
        shutil.copy("/bin/sh", shell)
        shell.chmod(0o4755)
        done = subprocess.run(
            [shell, "-p", "-c", "id -u"], user=65534, group=65534, capture_output=True, text=True
        )
    assert done.stdout.strip() == "0"


@pytest.mark.case("I06")
async def test_file_capabilities_cannot_be_set(sandbox: Sandbox) -> None:
    code = """
import json, os, struct
open("/tmp/x", "w").close()
answers = []
for size, revision in ((20, 0x02000000), (24, 0x03000000)):
    value = struct.pack("<IIIII", revision | 1, 0xffffffff, 0, 0xff, 0) + struct.pack("<I", 0) * (size > 20)
    try:
        os.setxattr("/tmp/x", "security.capability", value)
        answers.append("OK")
    except OSError as error:
        answers.append(error.errno)
print(json.dumps(answers))
"""
    assert set(await report(sandbox, code)) <= {1, 13, 22}


IDENTITY = {
    "setuid": (0,), "setgid": (0,), "setreuid": (0, 0), "setregid": (0, 0),
    "setresuid": (0, 0, 0), "setresgid": (0, 0, 0), "setreuid effective": (-1, 0),
    "setresuid effective": (-1, 0, -1), "setresgid saved": (1000, 1000, 0), "setfsuid": (0,), "setfsgid": (0,),
    "setgroups none": (0, 0), "setgroups one": (1, BAD_POINTER), "capset": (BAD_POINTER, 0),
}  # fmt: skip


@pytest.mark.case("I07")
async def test_nobody_changes_who_they_are(sandbox: Sandbox, weak: Weak) -> None:
    assert not refused(await report(sandbox, program(IDENTITY)))
    maps = """
import json
answers = {}
for name in ("uid_map", "gid_map", "setgroups"):
    try:
        with open("/proc/self/" + name, "w") as file:
            file.write("allow" if name == "setgroups" else "0 0 1")
        answers[name] = "OK"
    except OSError as error:
        answers[name] = error.errno
import os
print(json.dumps([answers, os.getgroups(), os.getresuid(), open("/proc/self/setgroups").read()]))
"""
    answers, groups, ids, setgroups = await report(sandbox, maps)
    assert "OK" not in answers.values()
    assert groups in ([], [1000]) and set(ids) == {1000} and setgroups.strip() == "deny"
    assert weak.report(program(IDENTITY))["setgroups none"] == "OK"


@pytest.mark.case("I08")
async def test_personality_cannot_be_changed(sandbox: Sandbox, weak: Weak) -> None:
    calls = {
        "personality no randomisation": (0x0040000,),
        "personality read implies exec": (0x0400000,),
        "personality high": (0x0040000 | 1 << 32,),
        "personality 32 bit": (8,),
        "personality compat": (0x0200000,),
    }
    assert not refused(await report(sandbox, program(calls)))
    assert set(weak.report(program(calls)).values()) == {"OK"}


LOOSER = (
    PRELUDE
    + """
import struct
def install(action, flags=0, operation=1):
    code = struct.pack("<HBBI", 6, 0, 0, action)
    program = ctypes.create_string_buffer(code)
    head = ctypes.create_string_buffer(struct.pack("<H6xQ", 1, ctypes.addressof(program)))
    _kept.extend([program, head])
    return call(317, operation, flags, ctypes.addressof(head))
answers = {"allow all": install(0x7fff0000)}
answers["listener"] = install(0x7fc00000, flags=8)
answers["listener tsync"] = install(0x7fc00000, flags=8 | 16)
answers["strict"] = call(317, 0, 0, 0)
# Each would take memory that is nobody's, until a limit of the whole machine is reached.
answers["prctl filter"] = call(157, 22, 2, ctypes.addressof(_kept[-1]))
answers["prctl strict"] = call(157, 22, 1)
answers["after: unshare"] = call(272, 0x10000000)
answers["after: ptrace"] = call(101, 0)
answers["after: bpf"] = call(321, 0, 1, 8)
print(json.dumps(answers))
"""
)


@pytest.mark.case("I11")
async def test_a_filter_of_their_own_loosens_nothing(
    native: NativeBackend, sandbox: Sandbox
) -> None:
    answers = await report(sandbox, LOOSER)
    # A kernel without filters answers like this; programs that confine themselves then go on.
    assert {answers.pop(f"prctl {mode}") for mode in ("filter", "strict")} <= {"EINVAL", *DENIED}
    assert not refused(answers)
    assert _check_posture(native, sandbox)
    assert (await sandbox.execute(["echo", "ok"]))["stdout"] == "ok\n"


CGROUPS = """
import glob, json, os
found = []
for pattern in ("/sys/fs/cgroup*", "/sys/fs/cgroup/*/cgroup.procs", "/proc/*/root/sys/fs/cgroup",
                "/cgroup*", "/dev/cgroup*"):
    found += glob.glob(pattern)
for name in ("release_agent", "cgroup.procs", "notify_on_release"):
    for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"):
        try:
            with open(os.path.join(top, name), "w") as file:
                file.write("1")
            found.append("WROTE " + name)
        except OSError:
            pass
print(json.dumps([found, open("/proc/self/cgroup").read()]))
"""


@pytest.mark.case("I12", "G09")
async def test_cgroups_are_out_of_reach(native: NativeBackend, sandbox: Sandbox) -> None:
    owned = native._owned[sandbox.sandbox_id]
    groups = owned.record["cgroups"] if native.name == "native" else owned.cgroups
    agents = {p: p.read_text() for p in Path("/sys/fs/cgroup").glob("*/release_agent")}
    running = await _background(sandbox, THREADS)
    found, shown = await report(sandbox, CGROUPS)
    assert not found
    # The namespace hides its own path and the names of its neighbours.
    assert all(line.split(":", 2)[2] == "/" for line in shown.splitlines()), shown
    init = native.init_pid(sandbox.sandbox_id)
    for path in groups.values():
        group = Path(path) / "cgroup.procs"
        assert oracles.wait_until(
            lambda group=group: (
                set(process_isolation.processes(init)) == set(map(int, group.read_text().split()))
            )
        ), path
    assert agents == {p: p.read_text() for p in Path("/sys/fs/cgroup").glob("*/release_agent")}
    await running.kill()


ESCAPE_CHROOT = (
    PRELUDE
    + """
outcome = []
kept = os.open("/", os.O_RDONLY)
os.makedirs("/tmp/jail", exist_ok=True)
outcome.append(call(161, "/tmp/jail"))
os.fchdir(kept)
for _ in range(64):
    os.chdir("..")
outcome.append(call(161, "."))
outcome.append(call(155, ".", "."))
here, root = os.stat("."), os.stat("/")
print(json.dumps([outcome, (here.st_ino, here.st_dev) == (root.st_ino, root.st_dev),
                  sorted(os.listdir("."))]))
"""
)


@pytest.mark.case("F02")
async def test_the_root_cannot_be_left(native: NativeBackend, sandbox: Sandbox, weak: Weak) -> None:
    init = native.init_pid(sandbox.sandbox_id)
    before = os.stat(f"/proc/{init}/root/")
    outcome, same, names = await report(sandbox, ESCAPE_CHROOT)
    assert not set(outcome) - {"EPERM", "ENOSYS"}
    assert same and "workspace" in names
    if native.name == "native":  # elsewhere the root is that of an image, which may have one
        assert "boot" not in names
    after = os.stat(f"/proc/{init}/root/")
    assert (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino)
    assert "OK" in weak.report(ESCAPE_CHROOT)[0]
