"""Checks of terminals: commands share directory, variables and functions; output is exact."""

from __future__ import annotations

import asyncio

from ...errors import SandboxExecutionError, SandboxTimeoutError
from ...sandbox.terminal import Terminal
from .case import Case
from .expect import equal, raises
from .registry import check


async def _open_terminal(case: Case, **options: object) -> Terminal:
    terminal = Terminal(await case.sandbox(), **options)  # type: ignore[arg-type]
    await terminal.init()
    return terminal


@check(quick=True)
async def state_is_kept(case: Case) -> None:
    """Directory, variables, exports and functions last from one command to the next."""
    terminal = await _open_terminal(case)
    await terminal.run("mkdir -p deep/er; cd deep/er; plain='a  b'; export SHARED='c$d'")
    await terminal.run('greet() { echo "hello $1"; }')
    equal(await terminal.run_command("echo ${PWD##*/deep/}"), "er\n")
    equal(await terminal.run_command('echo "$plain"; printenv SHARED'), "a  b\nc$d\n")
    equal(await terminal.run_command("greet you"), "hello you\n")


@check()
async def it_begins_as_asked(case: Case) -> None:
    """env_vars and working_dir of the terminal are there from the first command on."""
    sandbox = await case.sandbox()
    await sandbox.mkdir("start")
    async with Terminal(sandbox, "start", {"GIVEN": "a 'value'"}) as terminal:
        equal(await terminal.run_command('basename "$PWD"; echo "$GIVEN"'), "start\na 'value'\n")
        await terminal.run("unset GIVEN; cd ..")
        equal(await terminal.run_command('echo "[${GIVEN-gone}]"; ls -d start'), "[gone]\nstart\n")


@check()
async def exit_codes_are_known(case: Case) -> None:
    """Each command has its own exit code; exit ends the command, not the terminal."""
    terminal = await _open_terminal(case)
    equal((await terminal.run("false"))["exit_code"], 1)
    equal((await terminal.run("(exit 42)"))["exit_code"], 42)
    equal((await terminal.run("word=kept; exit 3"))["exit_code"], 3)
    result = await terminal.run("echo $word")
    equal((result["exit_code"], result["stdout"]), (0, "kept\n"))
    equal((await terminal.run("no-such-program"))["exit_code"], 127)


@check()
async def a_timeout_leaves_it_usable(case: Case) -> None:
    """After a command was stopped the next one works, with the state from before."""
    terminal = await _open_terminal(case)
    await terminal.run("mkdir -p dir; cd dir; word=kept")
    await raises(SandboxTimeoutError, terminal.run("word=lost; sleep 1000", timeout=1))
    equal(await terminal.run_command('echo "$word $(basename $PWD)"'), "kept dir\n")


@check()
async def output_is_exact(case: Case) -> None:
    """Prompts, "echo $?", digits and blank lines are output; nothing is echoed or removed."""
    terminal = await _open_terminal(case)
    text = "\n42\n\n$ \necho $?\n0\nroot@host:/# \n\n"
    equal(await terminal.run_command(f"printf %s '{text}'"), text)
    equal(await terminal.run_command("python3 -c 'print(42)'"), "42\n")
    equal(await terminal.run_command("echo one\necho two\n\necho three"), "one\ntwo\nthree\n")
    equal(await terminal.run_command("printf no-newline"), "no-newline")


@check()
async def streams_are_separate(case: Case) -> None:
    """stderr is apart from stdout, and bytes that are no text do not raise."""
    terminal = await _open_terminal(case)
    result = await terminal.run("echo out; echo err >&2; printf '\\377\\n'")
    equal((result["stdout"], result["stderr"]), ("out\n\ufffd\n", "err\n"))
    result = await terminal.run("echo 'open")
    equal(result["exit_code"] != 0, True, "a syntax error fails")
    equal(await terminal.run_command("echo next"), "next\n")


@check()
async def large_commands(case: Case) -> None:
    """A command of 300 KB runs, and so does an empty one."""
    terminal = await _open_terminal(case)
    text = "x" * 300_000
    equal(await terminal.run_command(f"word='{text}'; echo ${{#word}}"), "300000\n")
    equal((await terminal.run(""))["exit_code"], 0)


@check()
async def one_at_a_time(case: Case) -> None:
    """Commands given together run one after the other, in order."""
    terminal = await _open_terminal(case)
    commands = (f"number=${{number}}{n}; echo $number" for n in range(1, 5))
    texts = await asyncio.gather(*(terminal.run_command(command) for command in commands))
    equal(texts, ["1\n", "12\n", "123\n", "1234\n"])


@check()
async def terminals_are_apart(case: Case) -> None:
    """Two terminals of one sandbox share its files and nothing else."""
    sandbox = await case.sandbox()
    async with Terminal(sandbox) as one, Terminal(sandbox) as two:
        await one.run("word=one; echo shared >file; mkdir d; cd d")
        equal(await two.run_command('echo "[$word]"; cat file'), "[]\nshared\n")


@check()
async def closing_is_idempotent(case: Case) -> None:
    """A closed terminal refuses commands; closing it again is a no-op."""
    terminal = await _open_terminal(case)
    await terminal.close()
    await terminal.close()
    await raises(SandboxExecutionError, terminal.run("true"))
