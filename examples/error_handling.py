"""A program that failed is a result; a program that was stopped is an exception."""

import asyncio

from paracle_sandbox import (
    ResourceLimitError,
    SandboxConfig,
    SandboxExecutionError,
    SandboxExecutor,
    SandboxTimeoutError,
)

PROGRAMS = {
    "a bug": "print('so far'); 1 / 0",
    "an exit code": "raise SystemExit(3)",
    "too slow": "print('so far', flush=True)\nwhile True: pass",
    "too much memory": "x = bytearray(10**9)",
    "too much disk": "open('big', 'wb').write(bytes(400_000_000))",
    "too much output": "while True: print('x' * 1000)",
    "too many processes": "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(60)",
}


async def run(executor: SandboxExecutor, code: str) -> str:
    config = SandboxConfig(memory_mb=256, disk_mb=256, max_processes=32)
    try:
        result = await executor.execute_agent(code, config, timeout=5, rollback_on_error=True)
    except SandboxTimeoutError as error:
        return f"timed out after {error.timeout_seconds:g} s, had printed {error.stdout!r}"
    except ResourceLimitError as error:
        return f"limit reached: {error.resource_type} ({error.usage:.0f} of {error.limit:.0f})"
    except SandboxExecutionError as error:
        return f"the sandbox broke: {error}; stderr {error.stderr!r}"
    if not result["success"]:
        code = result["result"]["exit_code"]
        return f"failed with exit code {code}: {result['error'].strip().splitlines()[-1]}"
    return "succeeded"


async def main() -> None:
    async with SandboxExecutor() as executor:
        for name, code in PROGRAMS.items():
            print(f"{name}: {await run(executor, code)}")


asyncio.run(main())
