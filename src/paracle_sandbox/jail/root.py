"""The file system that sandboxes of one template see: built once, shared read-only by all.

The spawner makes it in a mount namespace of its own and pivots into it. A sandbox forked from
the spawner so starts in a world where the host's files do not exist; what is its own
(/proc, /dev/pts, /dev/shm, /workspace, /tmp) it mounts itself, see ``confine``.
"""

from __future__ import annotations

import contextlib
import os
import site
import stat
import sys

from . import kernel

EMPTY = "/.empty"
# Where the commands of the template's packages are: first in the PATH of programs.
COMMANDS = "/template/bin"
VOLUME = "/.volume"
# In a user namespace the kernel allows a new /proc only beside one that shows everything.
OTHER_PROC = "/.proc"
BOOT_ID = "/etc/.boot_id"
READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_EMPTY = ("/proc", "/sys", "/dev", "/tmp", "/run", "/var", "/home", "/opt", "/srv", "/mnt",
          "/root", "/etc", "/workspace", EMPTY, VOLUME, OTHER_PROC)  # fmt: skip
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9),
            "tty": (5, 0)}  # fmt: skip
# What programs need of the host's /etc, and what says nothing about its users. Files are
# copied, because every mount costs each sandbox a little; directories are shown read-only.
_ETC_COPIED = ("ld.so.cache", "ld.so.conf", "mime.types", "services", "protocols",
               "ssl/openssl.cnf", "debian_version", "localtime")  # fmt: skip
_ETC_SHOWN = ("alternatives", "fonts", "ssl/certs", "pki/tls/certs", "pki/ca-trust")

_PIP = """\
import glob, os, runpy, sys

try:
    import pip
except ImportError:
    try:
        import ensurepip
        wheels = os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl")
        sys.path.insert(0, glob.glob(wheels)[0])
    except (ImportError, IndexError):
        sys.exit("There is no pip in this sandbox: build the template again, or install ensurepip.")


def has_network():
    try:
        with open("/proc/net/route") as file:
            return len(file.readlines()) > 1
    except OSError:
        return True


sys.argv[0] = "pip"
try:
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
except SystemExit as end:
    if end.code and {"install", "download"} & set(sys.argv) and not has_network():
        print("This sandbox has no network. From outside, sandbox.install() installs packages.",
              file=sys.stderr)
    raise
"""
_USERS = """\
root:x:0:0:root:/root:/usr/sbin/nologin
paracle:x:1000:1000:Paracle:/tmp:/bin/sh
nobody:x:65534:65534:nobody:/:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\nparacle:x:1000:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"


def build(root: str, template_dir: str | None, *, rootless: bool) -> None:
    """Lay out the tree at ``root``, an existing directory, in this mount namespace."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    for path in _EMPTY:
        os.mkdir(root + path, 0o755)
    os.symlink("/tmp", root + "/var/tmp")
    os.symlink("/run", root + "/var/run")
    _show_system(root)
    _show_python(root, template_dir)
    kernel.set_attributes(root + "/usr/local", READ_ONLY)
    _make_etc(root)
    make_dev(root)
    _show(root, "/sys/devices/system/cpu")
    write_boot_id(root)
    if rootless:
        kernel.bind("/proc", root + OTHER_PROC)


def write_boot_id(root: str) -> None:
    """Make a boot id of our own, which the machine's other processes do not have."""
    text = os.urandom(16).hex()
    parts = text[:8], text[8:12], "4" + text[13:16], "a" + text[17:20], text[20:]
    with open(root + BOOT_ID, "w", encoding="ascii") as file:
        file.write("-".join(parts) + "\n")


def enter(root: str) -> None:
    """Make it the root of this process. The old one is gone from this namespace."""
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.umount(".")
    os.chdir("/")
    # The volume, and only the volume, stays writable below.
    kernel.set_attributes("/", kernel.ATTR_RDONLY, recursive=False)


def _show_system(root: str) -> None:
    _show(root, "/usr")
    if not sys.base_prefix.startswith("/usr/local"):
        # Sandboxes need not know the administrator's own programs.
        kernel.mount("tmpfs", root + "/usr/local", "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
        os.mkdir(root + "/usr/local/bin")
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _show(root, path)


def _show_python(root: str, template_dir: str | None) -> None:
    """The interpreter at its own path, its packages replaced by the template's."""
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix)):
        if not os.path.exists(root + os.path.join(prefix, "lib")):
            _show(root, prefix)
    interpreter = os.path.realpath(sys.executable)
    if not interpreter.startswith("/usr/bin/"):
        for name in ("python", "python3"):
            with contextlib.suppress(OSError):
                os.symlink(interpreter, f"{root}/usr/local/bin/{name}")
    elif not os.path.exists(root + "/usr/bin/python"):
        os.symlink(interpreter, root + "/usr/local/bin/python")
    packages = None
    for directory in package_dirs():
        if packages is None and template_dir is not None:
            if _cover(root, directory, template_dir, make=True):
                packages = directory
        else:
            _cover(root, directory, root + EMPTY, make=False)
    _show_commands(root, packages, interpreter)


def _show_commands(root: str, packages: str | None, interpreter: str) -> None:
    """What the template's packages install as commands, and a pip for the interpreter inside: the
    pip of the host, if it has one, belongs to another."""
    os.makedirs(root + COMMANDS)
    for name in ("pip", "pip3"):
        path = f"{root}{COMMANDS}/{name}"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!{interpreter}\n{_PIP}")
        os.chmod(path, 0o755)  # noqa: S103 - everybody inside may run it
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(f"{root}{packages}/bin") if packages else ():
            with contextlib.suppress(FileExistsError):
                os.symlink(f"{packages}/bin/{name}", f"{root}{COMMANDS}/{name}")


def package_dirs() -> list[str]:
    """List where this interpreter looks for packages, first the folder that is surely there."""
    dirs = list(dict.fromkeys(site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])))
    return sorted(dirs, key=lambda path: not os.path.isdir(path))


def _cover(root: str, directory: str, source: str, *, make: bool) -> bool:
    target = root + directory
    if not os.path.isdir(target):
        if not make:
            return False
        try:
            os.makedirs(target)
        except OSError:
            return False
    kernel.bind(source, target, READ_ONLY)
    return True


def _show(root: str, path: str) -> None:
    """Bind a host directory or file at the same place, read-only."""
    if os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        _touch(root + path)
    kernel.bind(path, root + path, READ_ONLY)


def _make_etc(root: str) -> None:
    files = {
        "passwd": _USERS,
        "group": _GROUP,
        "hosts": _HOSTS,
        "nsswitch.conf": _NSSWITCH,
        "hostname": "sandbox\n",
        "machine-id": "0" * 32 + "\n",
        "resolv.conf": "",
        "shells": "/bin/sh\n/bin/bash\n",
    }
    for name, text in files.items():
        with open(f"{root}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    if os.path.exists("/usr/lib/os-release"):
        os.symlink("../usr/lib/os-release", root + "/etc/os-release")
    for name in _ETC_COPIED:
        with contextlib.suppress(OSError):
            _copy("/etc/" + name, f"{root}/etc/{name}")
    for name in _ETC_SHOWN:
        if os.path.isdir("/etc/" + name):
            _show(root, "/etc/" + name)


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as file:
        content = file.read(1 << 20)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(content)


def make_dev(root: str) -> None:
    dev = root + "/dev"
    kernel.mount("tmpfs", dev, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "mode=755,size=64k")
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    for name, number in _DEVICES.items():
        _make_device(f"{dev}/{name}", "/dev/" + name, os.makedev(*number))
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0",
             "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}  # fmt: skip
    for name, target in links.items():
        os.symlink(target, f"{dev}/{name}")
    kernel.set_attributes(dev, kernel.ATTR_RDONLY, recursive=False)


def _make_device(path: str, source: str, number: int) -> None:
    """A node of our own; in a user namespace, where none can be made, the host's, bound."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, number)
        os.chmod(path, 0o666)  # noqa: S103  a device of everybody, past the umask
    except PermissionError:
        # Never trust a name: what is bound must be the device it claims to be.
        found = os.stat(source, follow_symlinks=False)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != number:
            raise OSError(0, "is not the device it should be", source) from None
        _touch(path)
        kernel.mount(source, path, "", kernel.MS_BIND)
        kernel.set_attributes(path, kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
