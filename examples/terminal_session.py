"""A terminal: commands that share directory, variables and functions; one that hangs is killed."""

import asyncio

from paracle_sandbox import SandboxManager, SandboxTimeoutError, Terminal


async def main() -> None:
    async with (
        SandboxManager() as manager,
        manager.managed_sandbox() as sandbox,
        Terminal(sandbox, env_vars={"GREETING": "hello"}) as terminal,
    ):
        await terminal.run("mkdir -p project && cd project")
        await terminal.run('greet() { echo "$GREETING, $1"; }')
        print(await terminal.run_command("pwd; greet world"), end="")

        try:
            await terminal.run("echo started; sleep 60", timeout=1)
        except SandboxTimeoutError as error:
            print(f"stopped after {error.timeout_seconds:g} s; it had said {error.stdout!r}")

        # The terminal is as it was before the command that was killed.
        print(await terminal.run_command("pwd"), end="")
        result = await terminal.run("exit 3")
        print(f"exit code {result['exit_code']}")


asyncio.run(main())
