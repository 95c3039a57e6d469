"""The six usage examples of the guide, in one program: python examples/25_sandbox_basics.py"""

import asyncio

from paracle_sandbox import (
    Sandbox,
    SandboxConfig,
    SandboxExecutor,
    SandboxManager,
    SandboxMonitor,
    Stats,
)

READ_INPUTS = """
import json

with open('/workspace/inputs.json') as f:
    inputs = json.load(f)

print(f"Hello {inputs['name']}!")
"""

COUNT_SLOWLY = """
import time
for i in range(5):
    print(f"Iteration {i + 1}")
    time.sleep(0.2)
"""

INTENSIVE_TASK = """
import time
end = time.monotonic() + 1.5
while time.monotonic() < end:
    sum(range(100_000))
print("done")
"""


async def simple_execution(executor: SandboxExecutor) -> None:
    result = await executor.execute_agent(
        agent_code="print('Hello from sandbox!')",
        config=SandboxConfig(cpu_cores=0.5, memory_mb=256),
        monitor=False,
    )
    print(f"Success: {result['success']}")
    print(f"Output: {result['result']['stdout']}", end="")


async def with_inputs(executor: SandboxExecutor) -> None:
    result = await executor.execute_agent(
        agent_code=READ_INPUTS,
        inputs={"name": "Paracle"},
        config=SandboxConfig(),
    )
    print(f"Output: {result['result']['stdout']}", end="")


async def with_monitoring(executor: SandboxExecutor) -> None:
    result = await executor.execute_agent(
        agent_code=COUNT_SLOWLY,
        config=SandboxConfig(),
        monitor=True,
    )
    if "monitoring" in result["stats"]:
        monitoring = result["stats"]["monitoring"]
        print(f"Average CPU: {monitoring['averages']['cpu_percent']:.1f}%")
        print(f"Peak memory: {monitoring['peaks']['memory_mb']:.1f} MB")


async def batch_execution(executor: SandboxExecutor) -> None:
    jobs = [
        {"agent_code": f"print('Job {i}')", "inputs": {"id": i}, "monitor": False}
        for i in range(1, 6)
    ]
    results = await executor.execute_batch(jobs, max_concurrent=3)
    for i, result in enumerate(results, 1):
        print(f"Job {i}: {'✓' if result['success'] else '✗'}")


async def manager_context(manager: SandboxManager) -> None:
    async with manager.managed_sandbox(SandboxConfig()) as sandbox:
        await sandbox.write_file("script.py", "print('from a file of the sandbox')")
        result = await sandbox.execute("python3 script.py")
        print(result["stdout"], end="")
        await custom_monitoring(sandbox)
    print(f"Sandboxes left: {len(manager.active_sandboxes)}")


async def custom_monitoring(sandbox: Sandbox) -> None:
    def on_warning(stats: Stats) -> None:
        print(f"High usage: CPU {stats['cpu_percent']:.0f}%, memory {stats['memory_percent']:.0f}%")

    monitor = SandboxMonitor(sandbox, interval_seconds=0.5, on_warning=on_warning)
    await sandbox.write_file("intensive_task.py", INTENSIVE_TASK)
    async with monitor:
        await sandbox.execute("python3 intensive_task.py")
    print(f"Average CPU: {monitor.get_averages()['cpu_percent']:.1f}%")


async def main() -> None:
    # One executor serves all of them: it keeps its backend, and closes it at the end.
    async with SandboxExecutor() as executor:
        for example in (simple_execution, with_inputs, with_monitoring, batch_execution):
            print(f"--- {example.__name__}")
            await example(executor)
    print("--- manager_context")
    async with SandboxManager(max_concurrent=5) as manager:
        await manager_context(manager)


asyncio.run(main())
