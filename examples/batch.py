"""Many jobs side by side: each in its own sandbox, none able to spoil another."""

import asyncio

from paracle_sandbox import SandboxConfig, SandboxExecutor

COUNT_PRIMES = """
import json
limit = json.load(open("inputs.json"))["limit"]
print(sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, limit)))
"""


async def main() -> None:
    config = SandboxConfig(memory_mb=256, timeout_seconds=60)
    jobs = [{"agent_code": COUNT_PRIMES, "inputs": {"limit": n}} for n in (100, 1_000, 10_000)]
    # Three that go wrong, each in its own way: a failure, a deadline, a limit.
    jobs.append({"agent_code": "raise ValueError('a bug in the program')"})
    jobs.append({"agent_code": "while True: pass", "timeout": 1})
    jobs.append({"agent_code": "x = bytearray(10**9)", "monitor": False})

    async with SandboxExecutor() as executor:
        results = await executor.execute_batch(jobs, config=config, max_concurrent=3)

    # The order is that of the jobs, whichever ended first.
    for number, result in enumerate(results):
        if result["success"]:
            print(f"job {number}: {result['result']['stdout'].strip()} primes")
        else:
            # error_type names the exception that execute_agent() would have raised.
            kind = result.get("error_type", "failed")
            print(f"job {number}: {kind}: {result['error'].strip().splitlines()[-1]}")


asyncio.run(main())
