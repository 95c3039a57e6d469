"""A watchdog for event loops: one that stands still for over 200 ms in our code is a failure.

A callback of an asyncio loop is timed from its start to its end. While it runs, a thread looks at
its stack every 25 ms. If that thread cannot look (a parser in C holds the interpreter), the task of
the callback is examined afterwards. A callback is *stalled* if it kept its loop for longer than the
limit, and *ours* if most of those looks found a module of the package in its stack.

Delays of a busy machine are not counted: the time that the thread waited for a processor (the
kernel counts it), the time that the hypervisor took, and the start of a process or a thread, which
has to wait for its turn. The delay of a busy disk is measured: once a callback waits for longer
than a moment, a thread creates and removes a file of its own, and the time that this takes is not
counted. Importing a module is not counted, since it happens once. In the process of the tests,
collecting the garbage of the tests is not counted either.

``install()`` watches this process, and ``stalls()`` returns the stalls since the last call. For
processes that tests start there is the folder ``watched``: with it on PYTHONPATH they watch
themselves, and append their stalls to the file that PARACLE_TEST_STALLS names. ``environment()``
sets this up, with files that ``stalls()`` reads as well. uvloop hides its callbacks, so a heartbeat
on the loop replaces them there: the time by which it is late counts.

The thread that looks has a table of descriptors of its own, so that tests can count those of the
process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

# An emulated machine gets more time: a second there does the work of a twentieth.
LIMIT_SECONDS = float(os.environ.get("PARACLE_TEST_LOOP_SECONDS", "0.2"))
LOOK_SECONDS = 0.025
WAIT_SECONDS = 0.075
BEAT_SECONDS = 0.05
REPORT_VARIABLE = "PARACLE_TEST_STALLS"
WATCHED = Path(__file__).parent / "watched"

_PACKAGE = re.compile(r"/paracle_sandbox/(?!testing/)")
_TESTS = str(Path(__file__).parent) + os.sep
_LOOP = re.compile(r"/asyncio/(runners|base_events|events)\.py$|/loop_watch\.py$")
_IMPORT = "<frozen importlib._bootstrap>"
_STARTS = {
    ("subprocess.py", "_execute_child"),
    ("threading.py", "start"),
    # It starts the spawner with os.posix_spawn, which holds the interpreter until that one runs.
    ("spawner_process.py", "_launch"),
}
_COROUTINE = 0x80 | 0x100 | 0x200  # the code flags of coroutines and asynchronous generators
_CLONE_FILES = 0x400
_TICK = os.sysconf("SC_CLK_TCK")


class _Callback:
    """A callback that is running, with what the watching thread has seen of it."""

    __slots__ = ("begin", "cpu", "looks", "lost")

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.cpu = time.thread_time()
        self.lost: float | None = None  # the time that the thread had lost at the look before
        self.looks: list[tuple[bool, list[str]]] = []


_running: dict[int, _Callback] = {}
_threads: dict[int, int] = {}  # the threads of the loops, as Python and the kernel number them
_found: list[str] = []
_report: Path | None = None
_reports: Path | None = None  # processes that tests start report there
_disk_asked = threading.Event()
_disk_waits: deque[tuple[float, float]] = deque(
    maxlen=64
)  # when a file of its own was in the works
_collections: deque[tuple[int, float, float]] = deque(maxlen=64)


def install(report: Path | None = None) -> None:
    """Watch all asyncio loops of this process from now on."""
    global _report
    _report = report
    if report is None:
        gc.callbacks.append(_time_collection)
    original: Callable[[Any], None] = asyncio.Handle._run  # type: ignore[attr-defined]

    def _run(self: Any) -> None:
        ident = threading.get_ident()
        outer = _running.get(ident)
        if ident not in _threads:
            _threads[ident] = threading.get_native_id()
        _running[ident] = callback = _Callback()
        try:
            original(self)
        finally:
            if time.perf_counter() - callback.begin > LIMIT_SECONDS:
                _judge(callback, getattr(self._callback, "__self__", None))
            if outer is None:
                _running.pop(ident, None)
            else:
                _running[ident] = outer

    asyncio.Handle._run = _run  # type: ignore[attr-defined]
    _start_threads()


def _start_threads() -> None:
    # gettempdir() tries its directories by writing: later the process may not be able to write.
    place = tempfile.gettempdir() if _report is None else str(_report.parent)
    for name, work in (("look", _look), ("disk", functools.partial(_try_disk, place))):
        begun = threading.Event()
        threading.Thread(
            target=_apart, args=(begun, work), name=f"loop-watch-{name}", daemon=True
        ).start()
        begun.wait()


def _apart(begun: threading.Event, work: Callable[[], None]) -> None:
    # A signal of the process goes to any thread that accepts it, also one that tests block.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _leave_descriptors()
    begun.set()
    work()


def _leave_descriptors() -> None:
    """Stop sharing descriptors with the other threads.

    This thread would keep those open that the others close, and the process at the other end would
    wait.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FILES) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    os.closerange(3, 1 << 20)


def _try_disk(place: str) -> None:
    """Measure on demand how long the disk takes for next to nothing."""
    while True:
        _disk_asked.wait()
        begin = time.perf_counter()
        _disk_waits.append((begin, math.inf))
        with contextlib.suppress(OSError):
            name = os.path.join(place, f".loop-watch-{os.getpid()}")
            file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, b"x")
                os.fsync(file)
            finally:
                os.close(file)
                os.unlink(name)
        _disk_waits[-1] = (begin, time.perf_counter())
        _disk_asked.clear()


def _time_collection(phase: str, _: object) -> None:
    now, ident = time.perf_counter(), threading.get_ident()
    if phase == "start":
        _collections.append((ident, now, now))
    elif _collections and _collections[-1][0] == ident:
        _collections[-1] = (ident, _collections[-1][1], now)


def watch_uvloop() -> None:
    """Give each uvloop that begins to run a heartbeat.

    This has to be called before uvloop is imported.
    """
    original = asyncio._set_running_loop  # type: ignore[attr-defined]

    def _set_running_loop(loop: Any) -> None:
        original(loop)
        if loop is not None and type(loop).__module__.startswith("uvloop"):
            loop.call_soon(_beat, loop)

    asyncio._set_running_loop = _set_running_loop  # type: ignore[attr-defined]
    asyncio.events._set_running_loop = _set_running_loop  # type: ignore[attr-defined]


def _beat(loop: Any) -> None:
    ident = threading.get_ident()
    callback = _running.pop(ident, None)
    if callback is not None:
        if time.perf_counter() - callback.begin > LIMIT_SECONDS:
            _judge(callback)
    _threads[ident] = threading.get_native_id()
    following = _Callback()
    following.begin += BEAT_SECONDS
    _running[ident] = following
    loop.call_later(BEAT_SECONDS, _beat, loop)


def environment(*paths: str | Path) -> dict[str, str]:
    """Return the environment of a process that imports from these paths and watches itself;
    ``stalls()`` has what it found."""
    global _reports
    if _reports is None:
        _reports = Path(tempfile.mkdtemp(prefix="loop-watch-"))
        atexit.register(shutil.rmtree, _reports, ignore_errors=True)
    return {
        "PYTHONPATH": os.pathsep.join([str(WATCHED), *map(str, paths)]),
        REPORT_VARIABLE: str(_reports / "stalls"),
    }


def watched_environment() -> dict[str, str]:
    """Return this process's environment, changed so that a process of ours watches itself, too."""
    source = Path(__file__).resolve().parents[1] / "src"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {**os.environ, **environment(source, *paths)}


def stalls() -> list[str]:
    """Return the stalls since the last call, each with its stack.

    They include those of processes that were started with ``environment()``.
    """
    found = _found[:]
    del _found[: len(found)]
    if _reports is not None and (report := _reports / "stalls").exists():
        found.append(f"of a process {report.replace(_reports / 'read').read_text()}")
    return found


def _look() -> None:
    lost: dict[int, float] = {}
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.perf_counter()
        frames = None
        before, lost = lost, {ident: _lost(native) for ident, native in list(_threads.items())}
        for ident, callback in list(_running.items()):
            if now - callback.begin < LOOK_SECONDS:
                continue
            if callback.lost is None:
                callback.lost = before.get(ident, lost.get(ident, 0.0))
            if now - callback.begin >= WAIT_SECONDS:
                _disk_asked.set()
            frames = frames or sys._current_frames()
            look = _describe(frames.get(ident))
            if look[1]:
                callback.looks.append(look)
        del frames


def _judge(callback: _Callback, task: object = None) -> None:
    """Judge a callback that took long. The loop's own thread calls this at its end."""
    end = time.perf_counter()
    collecting = _within(
        callback.begin, end,
        ((a, b) for ident, a, b in list(_collections) if ident == threading.get_ident()),
    )  # fmt: skip
    used = time.thread_time() - callback.cpu - collecting
    stood = end - callback.begin - collecting
    looks = callback.looks or [_look_at(task)]
    if callback.lost is not None:
        stood -= _lost(threading.get_native_id()) - callback.lost
        stood -= _within(callback.begin, end, list(_disk_waits))
    else:  # whatever it was did not let another thread of Python run: it computed
        stood = min(stood, used)
    stood = max(stood, used)  # that much it had in any case
    if stood <= LIMIT_SECONDS or sum(ours for ours, _ in looks) * 2 <= len(looks):
        return
    stack = next((stack for ours, stack in reversed(looks) if ours), ["(no look at it)"])
    where = "\n".join(f"    {line}" for line in stack)
    text = f"stood still for {stood:.2f} s (of it {used:.2f} s computing):\n{where}"
    _found.append(text)
    if _report is not None:
        # A test may have left the process no descriptor for that.
        with contextlib.suppress(OSError), _report.open("a") as report:
            report.write(text + "\n")


def _within(begin: float, end: float, periods: Iterable[tuple[float, float]]) -> float:
    """Return how much of a time lies in these periods, which do not overlap."""
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in periods)


def _describe(innermost: FrameType | None) -> tuple[bool, list[str]]:
    """Return whether a module of the package is at work there, and the stack, outermost call first.

    If a test, its program (``-c``) or a sample of a document calls a plain function of ours in its
    own coroutine, the test is responsible for it.
    """
    frames: list[FrameType] = []
    frame = innermost
    # The thread goes on while its frames are read: Python 3.11 may then hand out something else.
    while isinstance(frame, FrameType) and not _LOOP.search(frame.f_code.co_filename):
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    stack = [f"{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}" for f in frames]
    ours = False
    caller = ""
    for entry in frames:
        name = entry.f_code.co_filename
        if name == _IMPORT or (os.path.basename(name), entry.f_code.co_name) in _STARTS:
            return False, stack
        if _PACKAGE.search(name) and not ours:
            theirs = caller.startswith(_TESTS) or caller.endswith(".md") or caller == "<string>"
            if theirs and not entry.f_code.co_flags & _COROUTINE:
                return False, stack
            ours = True
        caller = name
    return ours, stack[-25:]


def _look_at(task: object) -> tuple[bool, list[str]]:
    """Return where a task is now, and whether anything of the package is part of it."""
    stack = []
    waiting = task.get_coro() if isinstance(task, asyncio.Task) else None
    while (code := getattr(waiting, "cr_code", None)) is not None:
        stack.append(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")
        waiting = getattr(waiting, "cr_await", None)
    return any(_PACKAGE.search(call) for call in stack), stack


def _lost(native: int) -> float:
    """Return the seconds so far in which a thread was ready to run and could not, or the hypervisor
    had the processor."""
    try:
        with open(f"/proc/self/task/{native}/schedstat") as file:
            queued = int(file.read().split()[1]) / 1e9
        with open("/proc/stat") as file:
            stolen = int(file.readline().split()[8]) / _TICK
    except (OSError, IndexError, ValueError):
        return 0.0  # the thread has ended, or this kernel keeps no such figures
    return queued + stolen
