"""Output as it comes, input as it is needed, and a program that is stopped in the middle."""

import asyncio

from paracle_sandbox import SandboxManager

COUNT = """
import time
for number in range(3):
    print(f"step {number}")
    time.sleep(0.1)
"""
DOUBLE = """
import sys
for line in sys.stdin:
    sys.stdout.write(f"{2 * int(line)}\\n")
"""


async def main() -> None:
    async with SandboxManager() as manager, manager.managed_sandbox() as sandbox:
        # A callback sees text while the program runs; the result has all of it.
        await sandbox.run_code(COUNT, on_stdout=lambda text: print(text, end=""))

        # An iterator sees bytes. Leaving it ends the program.
        async for name, data in sandbox.stream("yes"):
            print(f"{name}: {data[:6]!r} and more")
            break

        # A command in the background: feed it, read it, stop it.
        async with await sandbox.start_code(DOUBLE, stdin=True) as command:
            output = command.output()
            for number in (4, 21):
                await command.write_stdin(f"{number}\n")
                _, answer = await anext(output)
                print(f"{number} doubled is {answer.decode().strip()}")


asyncio.run(main())
