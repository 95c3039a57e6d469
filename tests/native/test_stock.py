"""A sandbox from the stock is as good after a pause as when it was made."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, until

from paracle_sandbox import Sandbox
from paracle_sandbox.guest.prefork.policy import KEEP_SECONDS, LOOK_SECONDS

LONGER = KEEP_SECONDS + 2 * LOOK_SECONDS


def python_ready(scene: Scene, sandbox: Sandbox) -> bool:
    pid = scene.backend.init_pid(sandbox.sandbox_id)
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def test_a_python_is_ready_in_stock_and_for_a_while_after_it():
    async with Scene(stock=1) as scene:
        first = await scene.sandbox()
        await first.execute("true")  # when that is over, one more is made
        await asyncio.sleep(LONGER)
        sandbox = await scene.sandbox()
        assert python_ready(scene, sandbox)
        await until(lambda: not python_ready(scene, sandbox), LONGER + 20, "its memory is given up")
        assert (await sandbox.run_code("print(1)"))["stdout"] == "1\n"


async def test_a_sandbox_maps_no_library_that_only_the_way_to_it_needs():
    """Each library is a handful of mappings, which every process has to copy and to free."""
    async with Scene(stock=1) as scene:
        sandbox = await scene.sandbox()
        pid = scene.backend.init_pid(sandbox.sandbox_id)
        maps = Path(f"/proc/{pid}/maps").read_text()
    assert "/python" in maps, "it shows nothing"
    assert not [name for name in ("libz", "zlib", "_opcode", "_heapq") if f"/{name}." in maps]


async def test_large_pieces_of_memory_are_given_back_as_in_any_python():
    """The C library maps them separately, unless its threshold was changed."""
    code = """
import ctypes
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_size_t
address = malloc(ctypes.c_size_t(512 << 10))
with open("/proc/self/maps") as maps:
    heap = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("[heap]")]
print(bool(heap), any(int(start, 16) <= address < int(end, 16) for start, end in heap))
"""
    async with Scene(stock=1) as scene:
        await (await scene.sandbox()).execute("true")
        await asyncio.sleep(1.0)
        assert (await (await scene.sandbox()).run_code(code))["stdout"] == "True False\n"
