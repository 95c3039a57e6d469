"""Tests of the filter on this kernel: programs run under it in a process of their own."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

import paracle_sandbox
from paracle_sandbox.jail.filters import syscalls

SOURCE = str(pathlib.Path(paracle_sandbox.__file__).parent.parent)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.uname().machine not in syscalls.NUMBERS,
    reason="the filter is for Linux on x86_64 and aarch64",
)

TOOLS = """
import ctypes, errno, os, sys
from paracle_sandbox.jail.filters import policy, seccomp, syscalls

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_ulong] * 6
libc.syscall.restype = ctypes.c_long
NUMBERS = syscalls.NUMBERS[syscalls.architecture()]

def attempt(call, *arguments):
    "The errno of a system call made as it stands, 0 if it worked."
    number = NUMBERS[call] if isinstance(call, str) else call
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments, *[0] * (6 - len(arguments)))
    return ctypes.get_errno() if result == -1 else 0

def confine():
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    seccomp.install(seccomp.program())
"""


def run(body, confined=True):
    """Run a program under the filter (or, as a control, without it)."""
    confine = "confine()\n" if confined else "\n"
    return subprocess.run(
        [sys.executable, "-c", TOOLS + confine + textwrap.dedent(body)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )


def check(body, confined=True):
    done = run(body, confined)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_denied_calls_answer_eperm_before_their_arguments_are_looked_at():
    check("""
        for name in policy.names(policy.DENIED):
            if name in NUMBERS:
                assert attempt(name, 1, 1, 1, 1, 1, 1) == errno.EPERM, name
    """)


def test_without_the_filter_the_same_attempts_reach_the_kernel():
    check(
        """
        for name in ("mount", "add_key", "io_uring_setup", "process_vm_readv", "mq_open", "shmget"):
            assert attempt(name, 1, 1, 1, 1, 1, 1) not in (errno.EPERM, 0), name
        """,
        confined=False,
    )


def test_unknown_calls_and_clone3_are_not_implemented():
    check("""
        for number in (max(NUMBERS.values()) + 1, 512, 547, 600, 1000, 0x3fffffff):
            assert attempt(number, 1, 1) == errno.ENOSYS, number
        assert attempt("clone3", 1, 88) == errno.ENOSYS
    """)


def test_arguments_are_refused_with_and_without_high_bits():
    check("""
        refused = [
            ("clone", 0x10000000 | 17), ("socket", 38, 5, 0), ("socket", 40, 1, 0),
            ("socket", 17, 3, 0), ("socket", 2, 3, 1), ("socket", 16, 3, 12),
            ("ioctl", 0, 0x5412, 1), ("ioctl", 0, 0x541C, 1), ("ioctl", 0, 0x40086602, 1),
            ("ioctl", 0, 0x50009401, 1), ("personality", 0x40000), ("prctl", 35, 1, 1),
            ("prctl", 0x59616d61, 1), ("fcntl", 0, 1024, 0),
            ("mknodat", 3, 1, 0o020644, 0x103), ("sched_setscheduler", 0, 1, 1),
            ("sched_setscheduler", 1, 0, 1), ("setpriority", 0, 1, 19), ("setpriority", 2, 0, 19),
            ("prlimit64", 1, 7, 1, 0), ("ioprio_set", 1, 1, 0x4004),
            ("setuid", 0), ("setgid", 0), ("setreuid", 0, 0), ("setregid", 0xffffffff, 0),
            ("setresuid", 0xffffffff, 0, 0xffffffff), ("setresgid", 1000, 1000, 1001),
            ("mmap", 0, 1 << 21, 3, 0x40022, 0xffffffff), ("memfd_create", 1, 4),
        ]
        for name, *arguments in refused:
            for high in (0, 1 << 32, 0xffffffff << 32):
                words = [word | high for word in arguments]
                assert attempt(name, *words) == errno.EPERM, (name, arguments, high)
    """)


def test_no_further_filter_may_be_added():
    check("""
        try:
            seccomp.install(seccomp.program())
        except OSError as error:
            assert error.errno == errno.ENOSYS
        else:
            raise AssertionError("installed")
        for mode in (1, 2):
            assert attempt("prctl", 22, mode, 1) == errno.EINVAL
    """)


def test_file_systems_of_the_host_are_not_flushed():
    check("""
        assert attempt("sync") == attempt("syncfs", 0xffffffff) == 0  # or it were no descriptor
    """)


def test_limits_of_others_can_be_read():
    check("""
        import resource
        assert resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)[0] > 0
        assert attempt("prlimit64", os.getppid(), 7, 1 << 32, 0) == errno.EPERM
    """)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_filter_needs_no_new_privs():
    done = run("os.setuid(65534)\nseccomp.install(seccomp.program())", confined=False)
    assert "PermissionError" in done.stderr and "seccomp" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_ids_can_be_said_again_and_not_changed():
    """This also holds where the saved ids would allow more: here they are root's."""
    check("""
        os.setgroups([])
        os.setresgid(1000, 1000, 0)
        os.setresuid(1000, 1000, 0)
        confine()
        for kind in ("uid", "gid"):
            for ids in ((-1, 1000, -1), (1000, 1000, -1), (-1, -1, -1)):
                getattr(os, "setres" + kind)(*ids)
            getattr(os, "setre" + kind)(-1, 1000)
            for call, ids in (("setres", (-1, 0, -1)), ("setre", (-1, 0)), ("set", (0,))):
                try:
                    getattr(os, call + kind)(*ids)
                except PermissionError:
                    continue
                raise AssertionError((call, kind))
        assert os.getresuid() == os.getresgid() == (1000, 1000, 0)
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], os.environ, resetids=True)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """, confined=False)  # fmt: skip


def test_threads_and_programs_started_are_under_it():
    out = check("""
        import subprocess, threading
        show = ["grep", "-h", "Seccomp:", "/proc/self/status"]
        thread = threading.Thread(target=lambda: print(open("/proc/thread-self/status").read()))
        thread.start()
        thread.join()
        subprocess.run(show)
    """)
    assert [line for line in out.split("\n") if "Seccomp:" in line] == ["Seccomp:\t2"] * 2


CALL_AS_I386 = """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid())
os._exit(0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="has no other way in")
def test_the_32_bit_way_in_is_killed():
    if "True" not in run(CALL_AS_I386, confined=False).stdout:
        pytest.skip("this kernel has no 32-bit calls")
    assert run(CALL_AS_I386).returncode == -signal.SIGSYS


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="is a half of x86-64")
def test_x32_is_refused():
    check("assert attempt(0x40000000 | NUMBERS['getpid']) == errno.ENOSYS")


WORKING_PROGRAMS = {
    "threads": """
        import threading, concurrent.futures
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(int, range(100))) == 4950
    """,
    "subprocess": """
        import subprocess
        assert subprocess.check_output(["sh", "-c", "echo a | cat"]) == b"a\\n"
        assert subprocess.run(["true"], start_new_session=True, close_fds=True).returncode == 0
    """,
    "tools": """
        import subprocess, tempfile
        script = "touch a && cp -p a b && mkfifo f && tar cf t.tar a b f && mkdir d && " \\
            "tar xpf t.tar -C d && mv d/a c && ln -s c l && chmod 4755 c && ls -la && rm -r d"
        with tempfile.TemporaryDirectory() as where:
            subprocess.run(["sh", "-ec", script], cwd=where, check=True, stdout=-3)
    """,
    "asyncio": """
        import asyncio
        async def main():
            async def echo(reader, writer):
                writer.write(await reader.read(5))
                await writer.drain()
                writer.close()
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello")
            assert await reader.read(5) == b"hello"
            writer.close()
            child = await asyncio.create_subprocess_exec("echo", "x", stdout=-1)
            assert (await child.communicate())[0] == b"x\\n"
            server.close()
        asyncio.run(main())
    """,
    "sqlite3": """
        import sqlite3, tempfile
        with tempfile.TemporaryDirectory() as where:
            base = sqlite3.connect(where + "/db")
            base.execute("pragma journal_mode=wal")
            base.execute("create table t (x)")
            base.execute("insert into t values (1)")
            base.commit()
            assert base.execute("select x from t").fetchall() == [(1,)]
            base.close()
    """,
    "ctypes": """
        compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        numbers = (ctypes.c_int * 3)(3, 1, 2)
        at = lambda address: ctypes.c_int.from_address(address).value
        libc.qsort(numbers, 3, 4, compare(lambda a, b: at(a) - at(b)))
        assert list(numbers) == [1, 2, 3]
    """,
    "memory": """
        import fcntl, mmap
        file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, 4096)
        fcntl.fcntl(file, 1033, 1)
        with mmap.mmap(file, 4096) as shared:
            shared.madvise(mmap.MADV_DONTNEED)
            shared[:2] = b"ok"
        assert os.pread(file, 2, 0) == b"ok"
    """,
    "pty": """
        import pty
        child, terminal = pty.fork()
        if child == 0:
            os.execvp("sh", ["sh", "-c", "stty size && tty >/dev/null && echo fine"])
        text = b""
        while b"fine" not in text:
            text += os.read(terminal, 1000)
        assert os.waitpid(child, 0)[1] == 0
    """,
    "signals and timers": """
        import signal, time
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not seen:
            time.sleep(0.005)
        process = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(process, 0)
    """,
    "sockets": """
        import socket
        a, b = socket.socketpair()
        a.sendall(b"x")
        assert b.recv(1) == b"x"
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()
        socket.create_server(("127.0.0.1", 0)).close()
        assert socket.if_nameindex()
        assert socket.getaddrinfo("127.0.0.1", 80)
    """,
    "limits": """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(1)
        os.sync()
    """,
}


@pytest.mark.parametrize("program", WORKING_PROGRAMS)
def test_ordinary_programs_work(program):
    check(WORKING_PROGRAMS[program])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_works(method, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        TOOLS
        + textwrap.dedent(f"""
            import multiprocessing
            if __name__ == "__main__":
                confine()
                context = multiprocessing.get_context("{method}")
                with context.Pool(2) as pool:
                    assert pool.map(abs, [-1, -2]) == [1, 2]
                with context.Lock():
                    print(context.Value("i", 7).value)
        """)
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
