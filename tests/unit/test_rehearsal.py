"""What the zygote plays through must leave no trace in the zygote."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import _signal, concurrent.futures.process, concurrent.futures.thread, ctypes, faulthandler, gc
import os, resource, signal, socket, sys, threading

from paracle_sandbox.guest.processes import process_table as children
from paracle_sandbox.guest.prefork import early_exit as ends, preforked as seed
from paracle_sandbox.guest import kernel
from paracle_sandbox.guest.python import exit as program_end, stack as program_stack
from paracle_sandbox.guest.processes import spawn as guest_start
from paracle_sandbox.guest.processes.command import Command
from paracle_sandbox.guest.python.program import make_ready
from paracle_sandbox.guest.python.exit import Ending
from paracle_sandbox.guest.python.interpreter_state import forget_guest
from paracle_sandbox.guest.processes.stdio import Output
from paracle_sandbox.guest.wire import Channel
from paracle_sandbox.jail.filters import seccomp
from paracle_sandbox.jail.child import Order, Start, keep_only
from paracle_sandbox.jail.confine import Filters, Identity, Shape
from paracle_sandbox.jail.limits.sandbox_resources import Place
from paracle_sandbox.jail.warmup.rehearsal import rehearse


def process():
    names = "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Umask"
    lines = open("/proc/self/status").read().splitlines()
    status = [line for line in lines if line.startswith((*names, "Cap"))]
    spaces = [os.readlink("/proc/self/ns/" + name) for name in sorted(os.listdir("/proc/self/ns"))]
    limits = [resource.getrlimit(kind) for kind in range(16)]
    mounted = [line.split()[4] for line in open("/proc/self/mountinfo")]
    mounts = [mounted.count(place) for place in ("/", "/proc", "/dev/pts", "/tmp", "/home")]
    score, files = open("/proc/self/oom_score_adj").read(), sorted(os.listdir("/proc/self/fd"))
    children = open("/proc/self/task/%d/children" % os.getpid()).read()
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    names = os.getcwd(), socket.gethostname()
    found = status, spaces, limits, mounts, names, score, files, children, handlers
    return *found, os.getsid(0), faulthandler.is_enabled()


def interpreter():
    lists = sys.argv[:], sys.path[:], sys.warnoptions[:]
    modules, scope = dict(sys.modules), dict(vars(sys))
    threads = [thread.name for thread in threading.enumerate()], threading.excepthook
    futures = concurrent.futures.thread._shutdown, concurrent.futures.process._global_shutdown
    threads += threading._SHUTTING_DOWN, *futures
    return *lists, modules, scope, threads, threading.main_thread().is_alive(), ends._announced[:]


start = Start(-1, Place(None, None), Filters(seccomp.program(), True), {}, {}, "python3")
setup = {"env": {"PATH": "/bin"}, "python": "/usr/bin/python3", "working_dir": "/workspace"}
places = os, signal, _signal, faulthandler, gc, socket
places += children, ends, kernel._libc, program_end, program_stack, seed, guest_start
make_ready(setup["env"], setup["python"])
forget_guest()
before, inside, functions = process(), interpreter(), [dict(vars(place)) for place in places]
for shape in (Shape(), Shape(tmpfs_mb=64, read_only=False, working_dir="/home/me")):
    # The last of the steps, and what comes first and last of a program, outside and inside.
    last = keep_only.__code__, Command._verdict.__code__, Ending.leave.__code__
    last += Channel.receive.__code__, Output._move.__code__
    kept = rehearse(Order("slot", shape, Identity(1, 1, False), 1 << 28, setup), start)
    for code in last:
        assert any(item is code for item in kept), "it did not come to the end"
if hasattr(ctypes.CDLL(None), "malloc_trim"):  # of other libraries that is not known
    laid = [f.__code__ for f in (Channel.receive, Channel.send, Output._move, Command.start)]
    assert max(map(id, laid)) - min(map(id, laid)) < 128 << 10, "not side by side"
assert process() == before
assert interpreter() == inside
assert [dict(vars(place)) for place in places] == functions
"""


def test_a_rehearsal_comes_to_its_end_and_changes_nothing() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)


def test_what_is_made_after_gaps_were_filled_lies_beside_the_heads_of_pools() -> None:
    code = """
from paracle_sandbox.jail.warmup.rehearsal import _fill_gaps
sizes = list(range(48, 513, 16))
def beside_heads():
    return sum(id(bytes(size - 33)) % (16 << 10) < 4096 for size in sizes)
before = beside_heads()
kept = _fill_gaps()
print(len(sizes), before, beside_heads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sizes, before, after = map(int, done.stdout.split())
    # All but those of which something else has let go since.
    assert before < sizes - 3 <= after


def test_what_is_made_after_gaps_were_filled_lies_at_the_end_of_the_heap() -> None:
    code = """
from paracle_sandbox.jail import kernel
from paracle_sandbox.jail.warmup.rehearsal import _fill_gaps
sizes = list(range(520, 4000, 60)) * 5
blocks = [b"x" * size for size in sizes]
del blocks[::2]
def before_the_end():
    made = [b"x" * size for size in sizes[::2]]
    return sum(id(one) < end for one in made)
end = kernel.trim_heap() - 4096
before = before_the_end()
end = kernel.trim_heap() - 4096
kept = _fill_gaps()
print(hasattr(kernel._libc, "malloc_trim"), len(sizes[::2]), before, before_the_end())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gnu, *found = done.stdout.split()
    if gnu != "True":
        pytest.skip("the C library is another than GNU's: where its memory ends is not known")
    made, before, after = map(int, found)
    assert before > made - 10, "there was no gap"
    assert after < 10
