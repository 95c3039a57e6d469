"""The usage of a sandbox without a cgroup: the sum over its processes.

The kernel keeps no sum where there is no cgroup, so each process is looked at, and each of its open
files, because a file that is only in memory (memfd_create) belongs to nobody's mapped memory. A
hostile sandbox decides how much that is, and a look at one process may even wait for what that
process does. So a look is made in a thread of its own, it gives up after a number of descriptors
and an amount of CPU time, and each sandbox has one look at a time. A sandbox that cannot be looked
through says so in ``Usage.incomplete``: its memory limit cannot be kept, and it is treated as one
that is above it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import replace

from ..base import Usage
from ..machine.cgroup_usage import file_content, network_bytes

# Far more than programs have, and a tenth of a second of looking.
MOST_DESCRIPTORS = 16_384
# Of the thread, so that a busy machine takes nothing from it.
_MOST_CPU_SECONDS = 1.0
# Nothing that is honest holds up a look for so long.
_MOST_SECONDS = 30.0

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What the link to a file that memfd_create made begins with.
_MEMORY_FILE = "/memfd:"

_Found = Usage | FileNotFoundError


class ProcessLooks:
    """The looks at one sandbox."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._begun = float("-inf")
        self._last: _Found = Usage()
        self._stuck: threading.Thread | None = None

    async def usage(self, init_pid: int, *, network_mode: str) -> Usage:
        """Raises FileNotFoundError when the sandbox is gone."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._turn = loop, asyncio.Lock()
        asked = time.monotonic()
        async with self._turn:
            # Several that wait for the same look share the next one.
            if self._begun < asked:
                begun = time.monotonic()
                self._last = await self._look(loop, init_pid, network_mode)
                self._begun = begun
        if isinstance(self._last, FileNotFoundError):
            raise self._last
        return self._last

    async def _look(
        self, loop: asyncio.AbstractEventLoop, init_pid: int, network_mode: str
    ) -> _Found:
        if self._stuck is not None and self._stuck.is_alive():
            return Usage(incomplete=_HELD_UP)
        found: asyncio.Future[_Found] = loop.create_future()

        def look() -> None:
            answer: _Found
            try:
                answer = read_processes(init_pid)
                received, sent = network_bytes(init_pid, network_mode)
                answer = replace(answer, network_rx_bytes=received, network_tx_bytes=sent)
            except FileNotFoundError as error:
                answer = error
            except OSError as error:
                answer = Usage(incomplete=f"its processes cannot be looked at: {error}")
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_answer, found, answer)

        # Not one of a pool: a sandbox that holds up its look must not hold up those at others.
        thread = threading.Thread(target=look, name="paracle-usage", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                return await found
        except TimeoutError:
            self._stuck = thread
            return Usage(incomplete=_HELD_UP)


def _answer(found: asyncio.Future[_Found], answer: _Found) -> None:
    if not found.done():  # it was cancelled
        found.set_result(answer)


_HELD_UP = "a look at its processes is held up"


def read_processes(init_pid: int) -> Usage:
    """Sum over the processes below this one. Raises FileNotFoundError when it is gone."""
    if not os.path.exists(f"/proc/{init_pid}"):
        raise FileNotFoundError(f"/proc/{init_pid}")
    pids, usage = _tree(init_pid)
    until = time.thread_time() + _MOST_CPU_SECONDS
    memory = shared = 0
    incomplete = _too_many_descriptors(pids)
    files: dict[tuple[int, int], int] = {}
    left = MOST_DESCRIPTORS
    for pid in pids:
        own, in_common = _mapped(pid)
        memory += own
        shared += in_common
        if not incomplete:
            left -= _add_memory_files(pid, files, left)
            if left <= 0:
                incomplete = _MANY_DESCRIPTORS
        if time.thread_time() > until:
            incomplete = incomplete or f"a look at its {len(pids)} processes takes too long"
            break
    # What is shared may be mapped files of that kind, or not be files at all.
    memory += max(shared, sum(files.values()))
    return replace(usage, memory_bytes=memory, memory_peak_bytes=memory, incomplete=incomplete)


_MANY_DESCRIPTORS = f"its processes have more than {MOST_DESCRIPTORS:,} open files"


def init_cpu(init_pid: int) -> float:
    """The seconds of CPU of a sandbox that is quite new: of its first process, and of those that
    it has waited for."""
    fields = _stat(init_pid)
    return sum(map(int, fields[11:15])) / _TICKS if fields else 0.0


def _tree(init_pid: int) -> tuple[list[int], Usage]:
    """The processes of a sandbox, and what their first lines say: threads and CPU."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields:
                stats[int(name)] = fields
                children.setdefault(int(fields[1]), []).append(int(name))
    ticks = threads = 0
    pids: list[int] = []
    waiting = [init_pid]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        fields = stats.get(pid, [])
        if fields:
            pids.append(pid)
            threads += int(fields[17])
            ticks += int(fields[11]) + int(fields[12])
            if pid == init_pid:
                ticks += int(fields[13]) + int(fields[14])
    return pids, Usage(cpu_seconds=ticks / _TICKS, processes=threads)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; empty when it is gone."""
    try:
        text = file_content(f"/proc/{pid}/stat")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _too_many_descriptors(pids: list[int]) -> str:
    """Without looking at each: Linux 6.2 and later tell the number as the size of the directory."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += os.stat(f"/proc/{pid}/fd").st_size
    return _MANY_DESCRIPTORS if total > MOST_DESCRIPTORS else ""


def _mapped(pid: int) -> tuple[int, int]:
    """The bytes that a process has mapped, of its own and of memory that it shares: its part."""
    try:
        words = [line.split() for line in file_content(f"/proc/{pid}/smaps_rollup").splitlines()]
        parts = {word[0]: int(word[1]) << 10 for word in words if word[-1] == "kB"}
        return parts["Pss_Anon:"], parts["Pss_Shmem:"]
    except (OSError, KeyError):  # it is gone, or it is our guest, which lets nobody look
        return _unshared_pages(pid) * _PAGE, 0


def _unshared_pages(pid: int) -> int:
    try:
        fields = file_content(f"/proc/{pid}/statm").split()
    except OSError:
        return 0
    return max(0, int(fields[1]) - int(fields[2]))


def _add_memory_files(pid: int, files: dict[tuple[int, int], int], most: int) -> int:
    """The bytes of each open file that is in memory only, whether it is mapped or not. Returns how
    many descriptors were looked at, at most so many."""
    looked = 0
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            looked += 1
            if looked >= most:
                break
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path).startswith(_MEMORY_FILE):
                    about = os.stat(entry.path)
                    files[about.st_dev, about.st_ino] = about.st_blocks * 512
    return looked
