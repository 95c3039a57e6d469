"""G and H. What the inside learns of the host: processes, settings, devices, secrets."""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import uuid
from pathlib import Path

import oracles
import pytest
from hostile_fixtures import Make, Weak
from probes import report

from paracle_sandbox.backends.machine import process_isolation
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox

LIST_PROCESSES = """
import json, os
found = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    entry = {}
    for name in ("cmdline", "environ", "comm", "status", "stat", "wchan", "stack", "mountinfo"):
        try:
            with open("/proc/%s/%s" % (pid, name), "rb") as file:
                entry[name] = file.read().decode("latin-1")
        except OSError:
            pass
    found[pid] = entry
print(json.dumps(found))
"""


@pytest.mark.case("G01")
async def test_only_their_own_processes(native: NativeBackend, sandbox: Sandbox) -> None:
    secret = f"marker{secrets.token_hex(8)}"
    marker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)", secret], env={"SECRET": secret}
    )
    try:
        found = await report(sandbox, LIST_PROCESSES)
        count = len(process_isolation.processes(native.init_pid(sandbox.sandbox_id)))
        assert len(found) <= count + 3 and len(found) < 10
        assert secret not in json.dumps(found)
        # The same program outside sees the marker.
        outside = subprocess.run(
            [sys.executable, "-c", LIST_PROCESSES], capture_output=True, text=True, check=True
        )
        assert secret in outside.stdout
    finally:
        marker.kill()
        marker.wait()


@pytest.mark.case("H01", "H04")
async def test_no_environment_of_the_host(
    make: Make, native: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"SECRET_{secrets.token_hex(8)}"
    for name in ("SECRET_CANARY", "PIP_BREAK_SYSTEM_PACKAGES"):  # the second one is ours, too
        monkeypatch.setenv(name, secret)
    sandbox = await make()
    found = await report(sandbox, LIST_PROCESSES)
    own = await report(sandbox, "import json, os\nprint(json.dumps(dict(os.environ)))")
    shell = (await sandbox.execute("env; export -p; cat /proc/self/environ"))["stdout"]
    assert secret not in json.dumps(found) and secret not in shell
    # An engine adds the name that it made up, and our images add how Python is to run.
    added = {"HOSTNAME": "sandbox", "PYTHONDONTWRITEBYTECODE": "1"}
    if native.name in ("docker", "gvisor"):
        own = {name: value for name, value in own.items() if added.get(name) != value}
    assert set(own) <= {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_CTYPE",
                        "PYTHONUNBUFFERED", "PIP_BREAK_SYSTEM_PACKAGES", "PWD",
                        "TMPDIR"}  # fmt: skip
    init = native.init_pid(sandbox.sandbox_id)
    for pid in (init, *_ancestors(init)):
        raw = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert secret.encode() not in raw
    # Control: a process that is simply started does inherit it.
    done = subprocess.run(["env"], capture_output=True, text=True, check=True)
    assert secret in done.stdout


def _ancestors(pid: int) -> list[int]:
    """Return the spawner and its launcher, and their ancestors up to this process."""
    found = []
    while True:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid in (os.getpid(), 0, 1):
            return found
        found.append(pid)


SCAN_MEMORY = """
import json, sys
needles = [bytes.fromhex(n) for n in %r]
found = []
own = 0
for line in open("/proc/self/maps"):
    fields = line.split()
    if "r" not in fields[1] or "[v" in line:
        continue
    start, end = (int(x, 16) for x in fields[0].split("-"))
    with open("/proc/self/mem", "rb", 0) as memory:
        memory.seek(start)
        try:
            data = memory.read(end - start)
        except (OSError, OverflowError):
            continue
    # What this program holds itself (its source, its list) is hexadecimal or reversed.
    for number, needle in enumerate(needles):
        if needle[::-1] in data:
            found.append([number, line.strip()])
print(json.dumps(found))
"""


def _scanner(*words: str) -> str:
    """Build a program that finds the words in the memory of its process without containing them."""
    return SCAN_MEMORY % [word.encode()[::-1].hex() for word in words]


@pytest.mark.case("H02")
async def test_no_secret_of_the_manager_in_any_memory(
    make: Make, native: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"APIKEY{secrets.token_hex(12)}"
    monkeypatch.setenv("SANDBOX_API_KEY", secret)
    sandbox = await make()
    assert await report(sandbox, _scanner(secret)) == []
    # The same search from outside, in every process of the sandbox.
    for pid in process_isolation.processes(native.init_pid(sandbox.sandbox_id)):
        assert not _memory_has(pid, secret.encode())
    assert _memory_has(os.getpid(), secret.encode())


@pytest.mark.case("H02", "G09")
async def test_a_sandbox_holds_nothing_of_its_neighbours(make: Make) -> None:
    """Every sandbox is a copy of the zygote's memory.

    The names of other sandboxes and their labels must not be in it.
    """
    label = f"tenant{secrets.token_hex(12)}"
    first = await make(labels={"owner": label})
    await first.run_code("print(1)")
    for _ in range(8):  # more than the stock, so that some are forked afterwards
        later = await make()
        found = await report(later, _scanner(label, first.sandbox_id))
        assert found == [], "a label or id of another sandbox is in the memory of this one"


@pytest.mark.case("H02")
async def test_orders_of_earlier_sandboxes_are_not_in_the_memory_of_later_ones(
    make: Make, native: NativeBackend
) -> None:
    """A working directory, for example, may say to which user a sandbox belongs."""
    word = f"place{secrets.token_hex(12)}"
    for _ in range(2):
        await make(SandboxConfig(working_dir=f"/{word}"))
    later = await make(SandboxConfig(working_dir="/elsewhere"))  # this one is forked now
    await later.execute("true")
    for pid in process_isolation.processes(native.init_pid(later.sandbox_id)):
        assert not _memory_has(pid, word.encode())


@pytest.mark.case("H02")
async def test_the_memory_scanner_can_fail(sandbox: Sandbox) -> None:
    word = f"word{secrets.token_hex(8)}"
    code = f"held = bytes.fromhex({word.encode().hex()!r})\n" + _scanner(word)
    assert await report(sandbox, code) != []


def _memory_has(pid: int, needle: bytes) -> bool:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        memory = open(f"/proc/{pid}/mem", "rb", 0)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended meanwhile
    with memory:
        for line in lines:
            fields = line.split()
            if "r" not in fields[1] or "[v" in line:
                continue
            start, end = (int(x, 16) for x in fields[0].split("-"))
            try:
                memory.seek(start)
                if needle in memory.read(end - start):
                    return True
            except (OSError, OverflowError, ValueError):
                continue
    return False


WRITE_SETTINGS = """
import json, os
wrote, tried = [], 0
def attempt(path):
    global tried
    tried += 1
    try:
        with open(path, "r+") as file:
            content = file.read(4096)
            file.seek(0)
            file.write(content or "0")
            wrote.append(path)
    except (OSError, UnicodeDecodeError):
        pass
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
             "/sys/kernel/uevent_helper", "/proc/sys/fs/binfmt_misc/register", "/proc/sys/vm/drop_caches",
             "/proc/sys/kernel/hostname", "/proc/mtrr", "/proc/irq/default_smp_affinity",
             "/proc/sys/kernel/ns_last_pid", "/proc/sys/user/max_user_namespaces", "/proc/kpagecount"):
    attempt(path)
for top in ("/proc/sys", "/sys"):
    for folder, _, names in os.walk(top):
        for name in names:
            attempt(os.path.join(folder, name))
print(json.dumps([wrote, tried]))
"""


@pytest.mark.case("G02")
async def test_no_setting_of_the_kernel_can_be_written(sandbox: Sandbox, weak: Weak) -> None:
    before = oracles.host_state()
    wrote, tried = await report(sandbox, WRITE_SETTINGS)
    assert wrote == [] and tried > 100
    assert oracles.host_state() == before
    # Unconfined it writes, and it writes the value that is there.
    control = WRITE_SETTINGS.replace('for top in ("/proc/sys", "/sys"):', "for top in ():")
    control = control.replace('"/proc/sysrq-trigger", ', "").replace(
        '"/proc/sys/vm/drop_caches",', ""
    )
    assert "/proc/sys/kernel/core_pattern" in weak.report(control)[0]


READ_KERNEL = """
import json, os
found = {}
for path in ("/proc/kcore", "/proc/kallsyms", "/proc/keys", "/proc/timer_list", "/proc/sched_debug",
             "/proc/config.gz", "/proc/cmdline", "/proc/kmsg", "/proc/slabinfo", "/proc/vmallocinfo",
             "/proc/key-users", "/proc/interrupts", "/proc/softirqs", "/proc/schedstat", "/proc/locks",
             "/proc/pressure", "/proc/partitions", "/proc/diskstats", "/proc/kpageflags",
             "/dev/kmsg", "/sys/kernel/notes", "/sys/firmware", "/sys/kernel/slab",
             "/sys/class/dmi/id/product_uuid", "/sys/kernel/debug", "/sys/kernel/security",
             "/sys/class/net", "/sys/block", "/proc/sys/kernel/random/uuid"):
    try:
        if os.path.isdir(path):
            found[path] = " ".join(os.listdir(path))
        else:
            with open(path, "rb") as file:
                found[path] = file.read(65536).decode("latin-1")
    except OSError:
        pass
try:
    found["modules"] = open("/proc/modules").read()
except OSError:
    pass
print(json.dumps(found))
"""


@pytest.mark.case("G03")
async def test_kernel_internals_are_masked(sandbox: Sandbox, weak: Weak) -> None:
    found = await report(sandbox, READ_KERNEL)
    modules = found.pop("modules", "")
    found.pop("/proc/sys/kernel/random/uuid", None)  # the kernel creates it anew at each read
    assert {path for path, text in found.items() if text} == set()
    assert all(line.endswith("0x0000000000000000") or "(" in line for line in modules.splitlines())
    control = weak.report(READ_KERNEL)
    assert control["/proc/kallsyms"] and control["/proc/cmdline"] and control["/proc/interrupts"]


DEVICES = """
import json, os, stat
answers, found = {}, {}
for name, kind, number in (("blk", stat.S_IFBLK, (8, 0)), ("mem", stat.S_IFCHR, (1, 1)),
                           ("null", stat.S_IFCHR, (1, 3)), ("loop", stat.S_IFBLK, (7, 0)),
                           ("whiteout", stat.S_IFCHR, (0, 0))):
    for place in ("/tmp", "/workspace", "/dev/shm", "/dev", "."):
        try:
            os.mknod("%s/%s-node" % (place, name), kind | 0o666, os.makedev(*number))
            answers["%s %s" % (place, name)] = "OK"
        except OSError as error:
            answers["%s %s" % (place, name)] = os.strerror(error.errno)
opened = []
for name in ("mem", "kmem", "port", "sda", "vda", "loop0", "loop-control", "kvm", "fuse", "net/tun",
             "vsock", "vhost-vsock", "kmsg", "mapper/control", "btrfs-control", "userfaultfd", "console"):
    try:
        os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK)
        opened.append(name)
    except OSError:
        pass
print(json.dumps([answers, opened, sorted(os.listdir("/dev"))]))
"""


@pytest.mark.case("G05")
async def test_no_devices_but_the_handful(sandbox: Sandbox, weak: Weak) -> None:
    answers, opened, names = await report(sandbox, DEVICES)
    assert "OK" not in answers.values() and opened == []
    assert set(names) <= {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm",
                          "fd", "stdin", "stdout", "stderr"}  # fmt: skip
    (weak.directory / "here").mkdir()
    control = weak.report(
        DEVICES.replace('("/tmp", "/workspace", "/dev/shm", "/dev", ".")', '(".",)')
    )
    assert control[0][". mem"] == "OK" and "loop-control" in control[1]


@pytest.mark.case("G07")
async def test_names_of_the_machine_are_made_up(sandbox: Sandbox) -> None:
    code = """
import json, os, socket
def read(path):
    try:
        return open(path).read().strip()
    except OSError:
        return ""
print(json.dumps({"host": socket.gethostname(), "node": os.uname().nodename,
    "machine": read("/etc/machine-id") or read("/var/lib/dbus/machine-id"),
    "boot": read("/proc/sys/kernel/random/boot_id"),
    "domain": read("/proc/sys/kernel/domainname"), "interfaces": [n for _, n in socket.if_nameindex()],
    "passwd": read("/etc/passwd"), "resolv": read("/etc/resolv.conf"), "fstab": read("/etc/fstab")}))
"""
    found = await report(sandbox, code)
    assert found["host"] == found["node"] == "sandbox"
    assert set(found["machine"]) <= {"0"}
    assert uuid.UUID(found["boot"]).version == 4
    assert found["boot"] != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found["interfaces"] == ["lo"]
    assert found["resolv"] == "" and found["fstab"] == ""
    host_users = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()}
    inside = {line.split(":")[0] for line in found["passwd"].splitlines()}
    assert inside == {"root", "paracle", "nobody"} and host_users - inside


FILES_OF_PROC = """
import json, os
found = {}
for name in os.listdir("/proc"):
    path = "/proc/" + name
    if os.path.isfile(path) and not os.path.islink(path):
        try:
            with open(path, "rb") as file:
                found[name] = file.read(1 << 16).decode(errors="replace")
        except OSError:
            pass
print(json.dumps(found))
"""
ADDRESSES = re.compile(r"^\s*([0-9a-f]+)-([0-9a-f]+) :", re.MULTILINE)


def _visible_inside() -> str:
    document = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    (visible,) = re.findall(r"\n## Visible inside\n(.*?)\n## ", document, re.DOTALL)
    return str(visible)


@pytest.mark.case("G08")
async def test_figures_of_the_machine_are_documented(sandbox: Sandbox, weak: Weak) -> None:
    """SECURITY.md names each file that reveals something about the machine."""
    found = await report(sandbox, FILES_OF_PROC)
    shown = {name for name, text in found.items() if text}
    assert {"uptime", "loadavg", "meminfo", "cpuinfo", "version", "stat"} <= shown
    named = set(re.findall(r"`([a-z_-]+)`", _visible_inside()))
    assert shown - named == set()
    for name in ("iomem", "ioports"):
        assert all(
            int(part, 16) == 0 for one in ADDRESSES.findall(found.get(name, "")) for part in one
        )
    assert {"keys", "kallsyms"} <= set(weak.report(FILES_OF_PROC, namespaces=False)) - named


FILES_BELOW = """
import json, os
found = {}
for top in ("/proc/sys", "/proc/tty", "/proc/driver", "/sys"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if os.read(fd, 1):
                    found[path] = os.fstat(fd).st_mode
            except OSError:
                pass
            finally:
                os.close(fd)
print(json.dumps(found))
"""


@pytest.mark.case("G08")
async def test_settings_and_figures_of_the_kernel_are_documented(sandbox: Sandbox) -> None:
    """Settings, which root may write, are documented by their folder.

    Files that can only be read are figures, and need a name of their own or their folder's.
    """
    found = await report(sandbox, FILES_BELOW)
    shown = ("/proc/sys/fs/file-nr", "/proc/tty/drivers", "/sys/devices/system/cpu/online")
    assert set(shown) <= set(found)
    own = "/proc/sys/net/"  # of the sandbox's network
    named = set(re.findall(r"`([\w/.-]+)`", _visible_inside()))

    def is_named(path: str, mode: int) -> bool:
        is_setting = path.startswith("/proc/sys/") and mode & 0o222
        parts = re.sub("^/proc/(sys/)?", "", path).strip("/").split("/")
        names = ["/".join(parts[:end]) for end in range(1 if is_setting else 2, len(parts) + 1)]
        return not named.isdisjoint([*names, *(f"/{name}" for name in names)])

    assert not is_named("/proc/sys/fs/made-up", 0o444) and is_named("/proc/sys/fs/made-up", 0o644)
    assert not is_named("/sys/devices/made-up", 0o444)
    unnamed = [path for path, mode in found.items() if not is_named(path, mode)]
    assert [path for path in unnamed if not path.startswith(own)] == []


SEARCH = """
import json, os, stat, sys
words = ("docker.sock", "containerd.sock", "kubeconfig", ".netrc", "id_rsa", "id_ed25519", "config.toml",
         "credentials", ".X11-unix", "wayland-0", "system_bus_socket", "agent.sock", "shadow", "gshadow",
         ".bash_history", "authorized_keys", ".git-credentials", ".pypirc", "crontab")
found, sockets = [], []
for folder, folders, names in os.walk("/", onerror=lambda e: None):
    folders[:] = [f for f in folders if os.path.join(folder, f) not in ("/proc", "/usr/share", "/usr/include")]
    for name in names + folders:
        path = os.path.join(folder, name)
        if name in words and not path.startswith(("/usr/bin/", "/usr/lib/", sys.base_prefix + "/")):
            found.append(path)
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                sockets.append(path)
        except OSError:
            pass
print(json.dumps([found, sockets, sorted(os.listdir("/")), os.listdir("/run"), os.listdir("/home"),
    os.listdir("/var"), os.path.exists("/var/run/secrets")]))
"""


@pytest.mark.case("H03", "K04", "O04")
async def test_no_credentials_or_sockets_to_be_found(sandbox: Sandbox, weak: Weak) -> None:
    found, sockets, top, run, home, var, secrets_dir = await report(sandbox, SEARCH)
    assert [path for path in found if not path.startswith("/usr/")] == [] and sockets == []
    assert run == [] and home == [] and set(var) <= {"tmp", "run"} and not secrets_dir
    assert not {"boot", "media", "lost+found", "work"} & set(top)
    assert "/etc/shadow" in weak.report(SEARCH, namespaces=False)[0]


@pytest.mark.case("H03")
async def test_the_root_of_the_host_is_not_shown(sandbox: Sandbox) -> None:
    """Of the host's home and data directories only the interpreter's own may be visible."""
    own = {sys.base_prefix, sys.base_exec_prefix}
    listing = await sandbox.execute("find /root /home /srv /opt /mnt -maxdepth 4 2>/dev/null")
    for path in listing["stdout"].split():
        assert any(
            prefix.startswith(path) or path.startswith(prefix + "/") for prefix in own
        ) or path in ("/root", "/home", "/srv", "/opt", "/mnt"), path


@pytest.mark.case("H04")
async def test_nothing_of_the_configuration_is_on_a_command_line(
    make: Make, native: NativeBackend
) -> None:
    secret = f"value{secrets.token_hex(8)}"
    sandbox = await make(SandboxConfig(env_vars={"TOKEN": secret}), labels={"key": secret})
    await sandbox.execute(["true"], env={"TOKEN": secret})
    init = native.init_pid(sandbox.sandbox_id)
    for pid in (init, *_ancestors(init)):
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.case("H05")
async def test_errors_and_logs_hold_no_secret(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"SECRET{secrets.token_hex(8)}"
    monkeypatch.setenv("SANDBOX_API_KEY", secret)
    caplog.set_level("DEBUG")
    sandbox = await make()
    said = []
    for action in (
        sandbox.read_file("../../etc/shadow"),
        sandbox.read_file("missing"),
        sandbox.execute(["no-such-program"], env={"TOKEN": secret}),
        sandbox.execute(["true"], cwd="/nowhere", env={"TOKEN": secret}),
    ):
        try:
            said.append(str(await action))
        except Exception as error:
            said.append(f"{error!r} {error}")
    assert secret not in caplog.text and secret not in " ".join(said)


LEAVE_BEHIND = """
import os
for path in ("/tmp/.bashrc", "/workspace/.profile", "/workspace/sitecustomize.py", "/tmp/python3",
             "/dev/shm/left", "/tmp/.local/lib/python3.11/site-packages/evil.pth", "/workspace/json.py"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("import os; os.system('touch /tmp/pwned')")
if not os.fork():
    os.setsid()
    while True:
        os.sched_yield()
"""
BASELINE = """
import json, os
found = []
for top in ("/workspace", "/tmp", "/dev/shm", "/run", "/var", "/home", "/opt", "/srv", "/mnt"):
    for folder, folders, names in os.walk(top):
        folders[:] = [f for f in folders if not f.startswith(".paracle-")]
        found += [os.path.join(folder, n) for n in names + folders]
print(json.dumps([sorted(found), len(list(filter(str.isdigit, os.listdir("/proc"))))]))
"""


@pytest.mark.case("H07", "D05")
async def test_nothing_of_a_tenant_reaches_the_next(make: Make) -> None:
    fresh = await report(await make(), BASELINE)
    for _ in range(6):  # more than the stock
        tenant = await make()
        await tenant.run_code(LEAVE_BEHIND)
        assert (await report(tenant, BASELINE))[0] != fresh[0]
        await tenant.stop()
        assert (await report(await make(), BASELINE))[0] == fresh[0]


@pytest.mark.case("H08")
async def test_forks_of_one_spawner_draw_different_numbers(make: Make) -> None:
    code = """
import json, os, random, secrets, tempfile, uuid
print(json.dumps([os.urandom(8).hex(), random.random(), secrets.token_hex(8), str(uuid.uuid4()),
                  tempfile.mktemp()]))
"""
    drawn = [await report(await make(), code) for _ in range(5)]
    drawn += [await report(await make(), code) for _ in range(2)]
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(column), column


@pytest.mark.case("G01", "H03")
async def test_no_path_of_this_machine_on_a_command_line(sandbox: Sandbox) -> None:
    """/proc shows command lines to every user, so they must not tell where the package lives."""
    import paracle_sandbox

    found = await report(sandbox, LIST_PROCESSES)
    package = str(Path(paracle_sandbox.__file__).parents[1])
    assert package not in json.dumps([entry.get("cmdline") for entry in found.values()])


@pytest.mark.case("H03")
async def test_mounts_name_no_directory_of_ours(sandbox: Sandbox, native: NativeBackend) -> None:
    shown = (await sandbox.execute("cat /proc/self/mountinfo /proc/self/mounts"))["stdout"]
    assert native.settings.state_dir not in shown
    assert sandbox.sandbox_id not in shown
