"""Monitors what a program uses while it runs: samples, a warning, averages and peaks."""

import asyncio

from paracle_sandbox import SandboxConfig, SandboxManager, SandboxMonitor, Stats

GROW = """
import time
held = []
for _ in range(11):
    held.append(bytearray(10_000_000))
    time.sleep(0.1)
time.sleep(0.5)
"""


def on_warning(stats: Stats) -> None:
    """The monitor calls this for each sample above 80 % of the memory or CPU limit."""
    print(f"high usage: CPU {stats['cpu_percent']:.0f} %, memory {stats['memory_percent']:.0f} %")


async def main() -> None:
    config = SandboxConfig(memory_mb=128)
    async with (
        SandboxManager() as manager,
        manager.managed_sandbox(config) as sandbox,
        SandboxMonitor(sandbox, interval_seconds=0.2, on_warning=on_warning) as monitor,
    ):
        await sandbox.run_code(GROW)

    for sample in monitor.get_history(limit=3):
        print(f"{sample['timestamp']}: {sample['memory_mb']:.0f} MB")
    print(f"average CPU: {monitor.get_averages()['cpu_percent']:.1f} %")
    print(f"peak memory: {monitor.get_peaks()['memory_mb']:.0f} MB")


asyncio.run(main())
