"""Tools for a model: what it sends, what it gets, and what happens when that is nonsense."""

import asyncio

from paracle_sandbox import LocalSandboxClient, SandboxConfig
from paracle_sandbox.tools import PythonExecute, Toolbox, sandbox_tools


async def main() -> None:
    async with LocalSandboxClient(config=SandboxConfig()) as client:
        tools = Toolbox(sandbox_tools(client))
        print((await tools.call("python_execute", {"code": "print(6 * 7)"})).text, end="")

        # The names that models use instead, and arguments as the JSON text that APIs deliver.
        await tools.call("write_file", {"path": "notes.txt", "content": "from the model"})
        print((await tools.call("run_shell", '{"cmd": "cat notes.txt"}')).text)

        # Variables that stay.
        python = PythonExecute(client, stateful=True)
        await python.call({"code": "x = 20"})
        print("x is", (await python.call({"code": "x + 1"})).text)

        # Errors say what to do next.
        slow = await tools.call("python_execute", {"code": "while True: pass", "timeout": 1})
        print(slow.text)
        print((await tools.call("python_execute", '{"code": "print(1)"')).text)


asyncio.run(main())
