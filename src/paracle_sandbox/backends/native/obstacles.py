"""Why native sandboxes cannot be made here, all reasons at once, and the one remedy for them.

What can be read is read: capabilities, sysctls, AppArmor's profile, what covers /proc. Whether a
seccomp filter refuses a system call is measured, by making it with arguments that the kernel itself
refuses with another error: nothing changes, and nobody has to guess. What can be known in no other
way is tried, each step in a process of its own (``jail/trial.py``): after a failure, and before
``auto`` takes native where a filter or a profile of AppArmor is in force.

Imported by ``auto`` before anything is started, and so without what takes long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache

from ...host.platforms import user_id

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from ...errors import BackendUnavailableError
    from ...settings import Settings

Read = Callable[[str], str]

_EPERM, _EACCES, _ENOSPC, _ENOSYS = 1, 13, 28, 38
_NEWUSER, _NO_FLAG = 0x10000000, 0x1
_NO_FILE, _BAD_POINTER, _ALL_FLAGS = -1, 1, 0x7FFFFFFF
_FILTERED = "2"  # Seccomp: in /proc/self/status
# Numbers of the kernel's capabilities. The first is named when there is none of them.
_CAPABILITIES = {
    "CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12, "CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_SETPCAP": 8,
    "CAP_CHOWN": 0, "CAP_KILL": 5,
}  # fmt: skip
# Those that a kernel may have, and the value that forbids user namespaces to who is not root.
_RESTRICTED = "kernel.apparmor_restrict_unprivileged_userns"
_SWITCHES = {
    "user.max_user_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    _RESTRICTED: "1",
}
_REFUSE_NOTHING = ("(unconfined)", "(complain)")  # modes of AppArmor's profiles
# Directories of /proc that are there to be mounted on.
_FOR_MOUNTS = ("/sys/fs/binfmt_misc", "/fs/nfsd")
_TRIAL_SECONDS = 20.0
_PROFILES = "python3 -m paracle_sandbox.backends.native.profiles"
# Whoever has a wheel has no docs/: what must be done is in the error, the page has the reasons.
PAGE = "docs/containers.md in the source of Paracle Sandbox"
_AS_USER = {
    "docker": "--security-opt seccomp=paracle-seccomp.json --security-opt systempaths=unconfined "
    "--security-opt apparmor=unconfined",
    "podman": "--security-opt seccomp=paracle-seccomp.json --security-opt unmask=ALL "
    "--security-opt apparmor=unconfined",
}
_AS_ROOT = (
    "--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=paracle-seccomp.json "
    "--security-opt apparmor=unconfined --cgroupns host -v /sys/fs/cgroup:/sys/fs/cgroup:rw"
)


def problem(settings: Settings) -> str | None:
    """Why no native sandbox could be started here; None when nothing speaks against it."""
    from .spawner_process import default_python

    euid = user_id()
    python = settings.python or default_python()
    return native_problem(euid, read_file, lambda: tried(python, euid))


def native_problem(euid: int, read: Read, tried: Callable[[], Iterable[str]] = tuple) -> str | None:
    """All causes together, as one text; None when there is none.

    ``read`` gives the text of a file, and an empty one for a file that is not there. ``tried`` says
    what a trial finds; it is called only where nothing else does and the process is confined."""
    causes = [cause for _, cause in find(euid, read)]
    if not causes and is_confined(read):
        causes += tried()
    return "; ".join(dict.fromkeys(causes)) or None


def find(
    euid: int, read: Read, refused: Callable[[bool], list[str]] | None = None
) -> list[tuple[str, str]]:
    """Each obstacle with the step of a start that it would end; none when nothing speaks against
    a start. Takes microseconds where no filter is in force.

    ``read`` gives the text of a file, and an empty one for a file that is not there."""
    status = read("/proc/self/status")
    mounts = read("/proc/self/mountinfo")
    found = _of_root(status, mounts) if euid == 0 else _of_user(read, mounts)
    if _field(status, "Seccomp") == _FILTERED:
        has_rights = euid == 0 and all(step == "cgroup" for step, _ in found)
        calls = (refused or refused_calls)(has_rights)
        if calls:
            step = "user namespace" if euid else "pid namespace"
            found.insert(0, (step, f"a seccomp filter refuses {_and(calls)}"))
    return found


def _of_root(status: str, mounts: str) -> list[tuple[str, str]]:
    found = []
    bits = int(_field(status, "CapEff") or "-1", 16)
    missing = [name for name, number in _CAPABILITIES.items() if not bits >> number & 1]
    if missing:
        found.append(("pid namespace", f"root lacks {_and(missing)}"))
    if _is_read_only(mounts, ("cgroup", "cgroup2")):
        found.append(("cgroup", "the cgroup file system is read-only, so that no limit can be set"))
    return found


def _is_read_only(mounts: str, kinds: tuple[str, ...]) -> bool:
    """Whether there are file systems of these kinds, and all of them are read-only."""
    rows = [line.partition(" - ") for line in mounts.splitlines()]
    options = [
        row[0].split()[5] for row in rows if row[2].startswith(tuple(f"{k} " for k in kinds))
    ]
    return bool(options) and all(one.startswith("ro") for one in options)


def _of_user(read: Read, mounts: str) -> list[tuple[str, str]]:
    found = []
    for switch, forbids in _SWITCHES.items():
        if read(f"/proc/sys/{switch.replace('.', '/')}").strip() != forbids:
            continue
        # That one is for programs without a profile; a profile says for itself.
        if switch != _RESTRICTED or _label(read) == "unconfined":
            found.append(("user namespace", f"{switch} is {forbids}"))
    covered = covered_in_proc(mounts)
    if covered:
        shown = _and([*covered[:2], *(["more"] if len(covered) > 2 else [])])
        found.append(("proc", f"{shown} are covered, so that the kernel allows no new /proc"))
    return found


def covered_in_proc(mountinfo: str) -> list[str]:
    """What is mounted over parts of /proc. In a user namespace the kernel allows a new /proc only
    where one that shows everything can be seen: then this is empty."""
    rows = [line.split() for line in mountinfo.splitlines()]
    whole = [row for row in rows if len(row) > 8 and row[row.index("-") + 1] == "proc"]
    covered: list[str] = []
    for row in whole:
        if row[3] != "/":
            continue  # a part of it, bound elsewhere
        over = [one[4] for one in rows if len(one) > 4 and one[1] == row[0]]
        over = [path for path in over if not path.endswith(_FOR_MOUNTS)]
        if not over:
            return []
        covered += over
    return covered


def refused_calls(with_rights: bool) -> list[str]:
    """Those of the system calls of a start that a seccomp filter refuses. ``with_rights``: this
    process has the capabilities, without which the kernel itself refuses two of them."""
    import ctypes
    import platform

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # What the kernel says to each: EINVAL, EBADF, EFAULT, EINVAL, EINVAL.
    by_name: dict[str, Callable[[], int]] = {
        "unshare": lambda: int(libc.unshare(_NEWUSER | _NO_FLAG)),
        "setns": lambda: int(libc.setns(_NO_FILE, 0)),
        "mount": lambda: int(
            libc.mount(*[ctypes.c_void_p(_BAD_POINTER)] * 3, ctypes.c_ulong(0), None)
        ),
        "umount2": lambda: int(libc.umount2(b"/", _ALL_FLAGS)),
        "mount_setattr": lambda: int(libc.syscall(442, _NO_FILE, b"", _ALL_FLAGS, None, 0)),
    }
    pivot_root = {"x86_64": 155, "aarch64": 41}.get(platform.machine())
    if with_rights and pivot_root is not None:
        pointer = ctypes.c_void_p(_BAD_POINTER)
        by_name["pivot_root"] = lambda: int(libc.syscall(pivot_root, pointer, pointer))
    refused = []
    for name, call in by_name.items():
        if call() < 0 and ctypes.get_errno() in (_EPERM, _EACCES, _ENOSYS):
            refused.append(name)
    return refused


def explain(python: str, step: str, message: str) -> BackendUnavailableError:
    """The error for a start that failed. Takes as long as a start of Python."""
    from ...errors import BackendUnavailableError

    reasons, remedy = look(python)
    first = f"Native sandboxes cannot start: {step}: {message}."
    return BackendUnavailableError(" ".join(filter(None, (first, reasons, remedy))), step=step)


def look(python: str) -> tuple[str, str]:
    """All obstacles in a sentence, and what to do about them; empty where there are none."""
    euid = os.geteuid()
    found = find(euid, read_file)
    failed = try_steps(python)
    found += _of_trial(failed)
    if failed and not found:
        found = _as_it_failed(failed)
    if not found:
        return "", ""
    causes = list(dict.fromkeys(cause for _, cause in found))
    reasons = f"Here {'; '.join(causes)}."
    return reasons, remedy_for(causes, euid, container_kind(read_file))


def is_confined(read: Read) -> bool:
    """By a seccomp filter, or by a profile of AppArmor: each may refuse what ``find`` cannot ask
    for without rights that only a sandbox in the making has."""
    is_filtered = _field(read("/proc/self/status"), "Seccomp") == _FILTERED
    return is_filtered or bool(_profile(read))


@cache
def tried(python: str, euid: int) -> tuple[str, ...]:
    """What a trial says is in the way, where ``find`` knows of nothing. Takes as long as a start of
    Python, but only once: neither a filter nor a profile is ever taken off a process."""
    failed = try_steps(python)
    found = _of_trial(failed) or _as_it_failed(failed)
    return tuple(dict.fromkeys(cause for _, cause in found))


def _of_trial(failed: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The causes that the failed steps tell."""
    found = []
    calls = {"hostname": "sethostname", "root": "pivot_root"}
    refused = [
        calls[one["step"]] for one in failed if one["step"] in calls and one["errno"] != _EACCES
    ]
    # To the root of a namespace of its own nobody but a filter refuses these so.
    if refused and _field(read_file("/proc/self/status"), "Seccomp") == _FILTERED:
        found.append(("namespaces", f"a seccomp filter refuses {_and(refused)}"))
    errors = {one["errno"] for one in failed}
    if _ENOSPC in errors:
        found.append(("user namespace", "the namespaces that sysctl user.max_* allows are used up"))
    profile = _profile(read_file)
    if profile and _EACCES in errors:
        found.append(("private mounts", f"the AppArmor profile {profile} refuses mounts"))
    return found


def _as_it_failed(failed: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["step"], f"{one['step']}: {one['message']}") for one in failed]


def remedy_for(causes: list[str], euid: int, container: str) -> str:
    """What takes all of the causes away, without a second error after the first. ``container`` is
    what container_kind says."""
    text = "; ".join(causes)
    host = _host_remedy(text)
    if container:
        profile = f"{_PROFILES} seccomp > paracle-seccomp.json writes the profile"
        if container == "kubernetes":
            way = (
                "Give the pod a Localhost seccomp profile, procMount: Unmasked, hostUsers: false "
                f"and an ordinary user; {_PROFILES} pod prints one"
            )
            return f"{host} {way}. {profile}. See {PAGE}, or use another backend.".strip()
        if container == "incus":
            return (
                f"{host} Let the container nest others: incus config set NAME "
                "security.nesting=true, and restart it; or use another backend."
            ).strip()
        way = f"{container} run {'' if euid else '--user 1000:1000 '}{_AS_USER[container]}"
        as_root = "" if euid else f" To stay root, with exact limits: {container} run {_AS_ROOT}."
        return (
            f"{host} Start the container with: {way} ({profile}).{as_root} {PAGE} has this for "
            "compose, dev containers and Kubernetes; or use another backend."
        ).strip()
    if "seccomp filter" in text:
        return (
            f"{host} Whatever has started this process filters its system calls: in a systemd unit "
            "take RestrictNamespaces= and SystemCallFilter= away; a container needs "
            f"{_AS_USER['docker']} ({_PROFILES} seccomp > paracle-seccomp.json writes the profile)."
        ).strip()
    if euid == 0 and not host:
        return f"Run it with all capabilities of root, or as an ordinary user. See {PAGE}."
    return f"{host} Or run as root.".strip() if host else ""


def _host_remedy(text: str) -> str:
    """As root, on the machine itself."""
    remedies = []
    if _RESTRICTED in text:
        remedies.append(
            f"Load an AppArmor profile for this program alone: {_PROFILES} apparmor | sudo tee "
            "/etc/apparmor.d/paracle-sandbox && sudo apparmor_parser -r "
            "/etc/apparmor.d/paracle-sandbox."
        )
    switches = {
        "kernel.unprivileged_userns_clone is 0": "kernel.unprivileged_userns_clone=1",
        "user.max_user_namespaces is 0": "user.max_user_namespaces=10000",
        "user.max_*": "user.max_user_namespaces=100000",
    }
    wanted = [value for cause, value in switches.items() if cause in text]
    if wanted:
        remedies.append(f"As root of the machine: sysctl {' '.join(wanted)}.")
    return " ".join(remedies)


def try_steps(python: str) -> list[dict[str, Any]]:
    """The steps that fail in a trial; none where the trial itself cannot be run."""
    import json
    import subprocess
    import tempfile

    package = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from paracle_sandbox.jail.trial import main; main(sys.argv[2])"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="paracle-trial-") as folder:
            done = subprocess.run(
                [python, "-I", "-S", "-E", "-c", program, package, folder],
                capture_output=True, timeout=_TRIAL_SECONDS, check=False, cwd="/",
                env={"LANG": "C.UTF-8"}, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def container_kind(read: Read) -> str:
    """docker, podman, kubernetes or incus, if this process is in a container of it; else empty.
    What is like one, and cannot be told apart, counts as docker."""
    mounts = read("/proc/self/mountinfo")
    if " fuse.lxcfs " in mounts:  # which shows it its own limits in /proc
        return "incus"
    # All of them give a container an /etc/hosts of its own. A file that marks an image, such as
    # /.dockerenv, is also in machines that were made from one.
    if not covered_in_proc(mounts) and " /etc/hosts " not in mounts:
        return ""
    if "/kubelet/pods/" in mounts:  # where that file comes from
        return "kubernetes"
    return "podman" if os.path.exists("/run/.containerenv") else "docker"


def read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _field(status: str, name: str) -> str:
    return (f"\n{status}".partition(f"\n{name}:")[2].split("\n", 1)[0]).strip()


def _label(read: Read) -> str:
    return read("/proc/self/attr/current").strip("\0\n ")


def _profile(read: Read) -> str:
    """The profile of AppArmor that refuses this process something. Other security modules have
    labels, too, but only AppArmor ends them with a mode."""
    label = _label(read)
    return label if label.endswith(")") and not label.endswith(_REFUSE_NOTHING) else ""


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
