"""What is measured of our own: every row of the budget."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from paracle_sandbox import Sandbox, SandboxConfig, run
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings, load_settings

from .measure import Times, in_a_burst, per_second, timed

_MIB = 1 << 20
_HELLO = "print('hello')"
_STOCK_SETTLES_SECONDS = 2.0
_DEEP_STOCK_SETTLES_SECONDS = 2.5
_MOLDS = 3


@asynccontextmanager
async def backend(
    *, stock: int | None = None, off: tuple[str, ...] = ()
) -> AsyncIterator[NativeBackend]:
    settings = replace(load_settings(), speed_off=off)
    if stock is not None:
        settings = replace(settings, stock=stock)
    native = NativeBackend(settings)
    try:
        yield native
    finally:
        await native.close()


def sandbox(native: NativeBackend, **options: object) -> Sandbox:
    return Sandbox(native, new_sandbox_id(), SandboxConfig.model_validate(options))


async def fresh_hello(native: NativeBackend, code: str = _HELLO, **options: object) -> None:
    """Create, run, destroy: nothing is left over from one to the next."""
    async with sandbox(native, **options) as place:
        result = await place.run_code(code)
        if result["exit_code"] != 0:
            raise RuntimeError(result["stderr"])


async def warm(native: NativeBackend) -> None:
    await fresh_hello(native)
    await asyncio.sleep(_STOCK_SETTLES_SECONDS)


async def fresh_times(name: str, stock: int | None, count: int, pause: float) -> Times:
    async with backend(stock=stock) as native:
        await warm(native)
        return await timed(name, lambda: fresh_hello(native), count, pause)


async def run_times(name: str, count: int, pause: float) -> Times:
    """Of later calls: the first one starts what is kept for them."""
    hello = functools.partial(run, _HELLO, backend="native")
    await asyncio.to_thread(hello)
    await asyncio.sleep(_STOCK_SETTLES_SECONDS)
    return await timed(name, lambda: asyncio.to_thread(hello), count, pause)


async def live_times(count: int, pause: float) -> tuple[Times, Times]:
    """Python hello and shell true in a sandbox that is there."""
    async with backend() as native:
        await warm(native)
        async with sandbox(native) as place:
            hello = await timed("hello, live", lambda: place.run_code(_HELLO), count, pause)
            true = await timed("sh true, live", lambda: place.execute("true"), count, pause)
    return hello, true


async def speed_times(off: tuple[str, ...], count: int) -> tuple[Times, Times]:
    """A fresh sandbox, then a program in a live one, without what is named."""
    async with backend(off=off) as native:
        await warm(native)
        fresh = await timed("fresh", lambda: fresh_hello(native), count)
        async with sandbox(native) as place:
            hello = await timed("hello, live", lambda: place.run_code(_HELLO), count)
    return fresh, hello


async def throughput(at_once: int, seconds: float, stock: int | None) -> float:
    """As long as it goes on: what a stock holds is soon used up."""
    async with backend(stock=stock) as native:
        await warm(native)
        return await per_second(lambda _: fresh_hello(native), at_once, seconds)


async def bursts(
    bare: Callable[[int], Awaitable[object]], at_once: int, count: int, rounds: int
) -> tuple[float, float]:
    """So many, per second, when all of them are there, and as many of the bare ones: of the rounds,
    each with both, the one whose ratio is the median. What others do to the machine meets both.
    In turns with new zygotes: where things come to lie in the memory of one makes a difference."""
    found: list[tuple[float, float]] = []
    for _ in range(_MOLDS):
        # None has to be made meanwhile: that begins when few are left.
        async with backend(stock=count + at_once) as native:
            await fresh_hello(native)
            for _ in range(rounds // _MOLDS):
                rates = []
                for action in (lambda _: fresh_hello(native), bare):
                    await asyncio.sleep(_DEEP_STOCK_SETTLES_SECONDS)
                    rates.append(await in_a_burst(action, at_once, count))
                found.append((rates[0], rates[1]))
    found.sort(key=lambda pair: pair[0] / pair[1])
    return found[len(found) // 2]


async def pandas_times(count: int) -> Times | None:
    """Create + import pandas + destroy, in the ml template; None where it is not built."""
    async with backend() as native:
        if not native.templates.get("ml").is_built:
            return None
        image = {"base_image": "paracle/sandbox:ml"}
        await fresh_hello(native, **image)
        await asyncio.sleep(_STOCK_SETTLES_SECONDS)
        action = lambda: fresh_hello(native, "import pandas", **image)  # noqa: E731
        return await timed("import pandas, fresh", action, count)


# Longer than a sandbox keeps a Python ready for a first program.
_IDLE_SECONDS = 7.0
_SOME = 50


async def many_idle(count: int) -> tuple[float, float, float]:
    """MiB of PSS for each of many idle sandboxes, and create times (ms): the mean of the first and
    of the last 50, because of some that follow each other one waits and another does not."""
    # Each sandbox costs this process a descriptor.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A virtual machine has its memory from the host when it is first used: not ours to measure.
    subprocess.run([sys.executable, "-c", f"bytearray(b'x') * ({count} << 22)"], check=True)
    async with backend() as native:
        await warm(native)
        places, times = [], []
        for _ in range(count):
            place = sandbox(native)
            start = time.perf_counter()
            await place.start()
            times.append((time.perf_counter() - start) * 1e3)
            places.append(place)
        await asyncio.sleep(_IDLE_SECONDS)
        pss = sum(_pss(native.init_pid(place.sandbox_id)) for place in places) / count / _MIB
        await asyncio.gather(*(place.stop() for place in places))
    some = min(_SOME, count // 4)
    return pss, statistics.mean(times[:some]), statistics.mean(times[-some:])


def _pss(init_pid: int) -> int:
    """Of every process of the sandbox, in bytes."""
    from paracle_sandbox.backends.machine.process_isolation import processes

    total = 0
    for pid in processes(init_pid):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


async def stream_speed(megabytes: int) -> tuple[float, float]:
    """MB/s of standard output to a callback, and how much the host's memory grew (MiB)."""
    seen = 0

    def on_bytes(_name: str, chunk: bytes) -> None:
        nonlocal seen
        seen += len(chunk)

    async with backend() as native, sandbox(native, cpu_cores=2) as place:
        before = _peak_memory()
        start = time.perf_counter()
        await place.execute(["head", "-c", f"{megabytes}M", "/dev/zero"], on_output_bytes=on_bytes)
        seconds = time.perf_counter() - start
    assert seen == megabytes * _MIB
    return seen / seconds / 1e6, _peak_memory() - before


async def copy_speed(megabytes: int) -> tuple[float, float, float]:
    """MB/s in and out for one large file, and how much the host's memory grew (MiB)."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in"), Path(folder, "out")
        block = os.urandom(_MIB)
        with source.open("wb") as file:
            for _ in range(megabytes):
                file.write(block)
        async with backend() as native, sandbox(native, disk_mb=4096, cpu_cores=2) as place:
            before = _peak_memory()
            start = time.perf_counter()
            await place.copy_to(source, "big")
            middle = time.perf_counter()
            await place.copy_from("big", target)
            end = time.perf_counter()
        if _digest(source) != _digest(target):
            raise RuntimeError("what came back is not what went in")
    size = megabytes * _MIB / 1e6
    return size / (middle - start), size / (end - middle), _peak_memory() - before


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cli_command() -> list[str]:
    example = Path(__file__).resolve().parent.parent / "examples" / "hello.py"
    return [sys.executable, "-m", "paracle_sandbox", "sandbox", "execute", str(example)]


def settings() -> Settings:
    return load_settings()
