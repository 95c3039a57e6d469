"""Checks of commands: their input, environment and exact output."""

from __future__ import annotations

import asyncio
import hashlib

from ...errors import SandboxFileNotFoundError
from ...sandbox.sandbox import Sandbox
from .case import Case
from .expect import contains, equal, expect, expect_output, raises
from .registry import check

_TURNS = """
import os
for number in range(1, 101):
    os.write(2 - number % 2, b"%d\\n" % number)
"""


async def _capture_stdout(sandbox: Sandbox, program: str) -> bytes:
    """Return the exact bytes that a Python program writes to its stdout."""
    command = await sandbox.start_command(["python3", "-c", program])
    equal((await command.wait())["exit_code"], 0, "exit code")
    return command.stdout_bytes


@check(quick=True)
async def stdout_and_stderr_are_separate(case: Case) -> None:
    """Both streams come back separately, and nothing is added."""
    sandbox = await case.sandbox()
    result = await sandbox.execute("printf out; printf err >&2")
    expected = {"exit_code": 0, "stdout": "out", "stderr": "err",
                "timed_out": False, "truncated": False}  # fmt: skip
    equal(result, expected)


@check(quick=True)
async def exit_codes(case: Case) -> None:
    """The exit code is the program's own, whatever it is."""
    sandbox = await case.sandbox()
    for code in (0, 1, 2, 42, 137, 255):
        equal((await sandbox.execute(f"exit {code}"))["exit_code"], code)


@check()
async def signals_are_negative(case: Case) -> None:
    """A program that signal N ended has the exit code -N."""
    sandbox = await case.sandbox()
    for number in (9, 11, 15):
        result = await sandbox.execute(["sh", "-c", f"kill -{number} $$"])
        equal(result["exit_code"], -number)


@check()
async def a_missing_program_is_127(case: Case) -> None:
    """A program that is not there is a result with 127 and its name, as in a shell."""
    sandbox = await case.sandbox()
    for command in ("no-such-program --flag", ["no-such-program"], ["/no/such/program"]):
        result = await sandbox.execute(command)
        equal(result["exit_code"], 127, str(command))
        contains(result["stderr"], "no" if isinstance(command, str) else command[0])


@check()
async def not_executable_is_126(case: Case) -> None:
    """A file that may not be executed is a result with 126."""
    sandbox = await case.sandbox()
    await sandbox.write_file("plain.txt", "hello")
    equal((await sandbox.execute(["./plain.txt"]))["exit_code"], 126)
    equal((await sandbox.execute("./plain.txt"))["exit_code"], 126)


@check()
async def scripts_can_be_executed(case: Case) -> None:
    """The working directory is not noexec."""
    sandbox = await case.sandbox()
    await sandbox.write_file("script", "#!/bin/sh\necho ran $1\n")
    equal(await sandbox.run_command("chmod +x script && ./script well"), "ran well\n")


@check()
async def stdin_is_fed(case: Case) -> None:
    """stdin may be text or bytes, and ends; without any it is empty, not ours."""
    sandbox = await case.sandbox()
    equal((await sandbox.execute("cat", stdin="héllo"))["stdout"], "héllo")
    equal((await sandbox.execute("cat", stdin=b""))["stdout"], "")
    equal((await sandbox.execute("cat"))["stdout"], "")


@check()
async def a_large_stdin(case: Case) -> None:
    """Five megabytes go in whole; a program that reads none of it ends all the same."""
    sandbox = await case.sandbox()
    data = bytes(range(256)) * (5 << 12)
    result = await sandbox.execute("sha256sum", stdin=data)
    equal(result["stdout"].split()[0], hashlib.sha256(data).hexdigest())
    equal((await sandbox.execute("exit 3", stdin=data))["exit_code"], 3)


@check()
async def stdin_can_be_kept_open(case: Case) -> None:
    """A program can answer each line before the next is written."""
    sandbox = await case.sandbox()
    echo = "while read line; do echo got $line; done; echo bye"
    async with await sandbox.start_command(echo, stdin=True) as command:
        answers = command.output()
        for word in ("one", "two"):
            await command.write_stdin(f"{word}\n")
            await expect_output(answers, f"got {word}\n".encode(), command)
        await command.close_stdin()
        equal((await command.wait())["stdout"], "got one\ngot two\nbye\n")


@check()
async def env_is_added(case: Case) -> None:
    """env_vars of the configuration and env of the call are there; the call's win."""
    sandbox = await case.sandbox(env_vars={"FIRST": "1", "BOTH": "config"})
    show = 'printf %s "$FIRST/$BOTH/$ONLY/${PATH:+path}"'
    equal(await sandbox.run_command(show), "1/config//path")
    odd = "with 'quotes' \"and\" $signs\nand lines é"
    output = await sandbox.run_command(show, env={"BOTH": "call", "ONLY": odd})
    equal(output, f"1/call/{odd}/path")


@check()
async def env_can_be_replaced(case: Case) -> None:
    """clear_env leaves only what the call gives."""
    sandbox = await case.sandbox(env_vars={"FIRST": "1"})
    result = await sandbox.execute(["/usr/bin/env"], env={"ONLY": "this"}, clear_env=True)
    equal(result["stdout"], "ONLY=this\n")


@check()
async def cwd_is_taken(case: Case) -> None:
    """cwd is relative to the working directory or absolute; a missing one is not found."""
    sandbox = await case.sandbox()
    await sandbox.write_file("deep/er/file", "x")
    equal(await sandbox.run_command("ls", cwd="deep/er"), "file\n")
    equal(await sandbox.run_command("pwd", cwd="/tmp"), "/tmp\n")
    await raises(SandboxFileNotFoundError, sandbox.execute("pwd", cwd="nowhere"))


@check()
async def as_many_arguments_as_the_kernel_takes(case: Case) -> None:
    """More than a megabyte of arguments and environment arrives, in whatever letters."""
    sandbox = await case.sandbox()
    word = "\u4e2d" * 40_000
    show = (
        "import os, sys; word = '\u4e2d' * 40_000;"
        "print(sys.argv[1:] == [word] * 10, os.environ['BIG'] == word, sys.stdin.read())"
    )
    argv, env = ["python3", "-c", show, *[word] * 10], {"BIG": word}
    output = await sandbox.run_command(argv, env=env, stdin="after it")
    equal(output, "True True after it\n")
    result = await sandbox.run_code(show, [word] * 10, env=env, stdin="after it")
    equal(result["stdout"], "True True after it\n")
    refused = await sandbox.execute(["true", "x" * (200 << 10)])
    equal(refused["exit_code"], 126)
    contains(refused["stderr"], "too long")  # gVisor takes it for a name


@check()
async def stderr_can_be_merged_in_order(case: Case) -> None:
    """merge_stderr has both streams arrive as stdout, in the order in which they were written."""
    sandbox = await case.sandbox()
    lines = "".join(f"{n}\n" for n in range(1, 101))
    script = "for i in $(seq 50); do echo $((2*i-1)); echo $((2*i)) >&2; done"
    for running in (sandbox.start_command(script, merge_stderr=True),
                    sandbox.start_code(_TURNS, merge_stderr=True)):  # fmt: skip
        result = await (await running).wait()
        equal((result["stdout"], result["stderr"]), (lines, ""))
    missing = await sandbox.execute(["no-such-program"], merge_stderr=True)
    equal((missing["exit_code"], missing["stderr"]), (127, ""))
    contains(missing["stdout"], "not found")


@check()
async def commands_installed_for_the_user_are_found(case: Case) -> None:
    """Commands that ``pip install --user`` puts into ~/.local/bin are in the PATH."""
    sandbox = await case.sandbox()
    make = "mkdir -p ~/.local/bin; printf '#!/bin/sh\\necho mine' >~/.local/bin/mine-alone"
    await sandbox.execute(f"{make}; chmod +x ~/.local/bin/mine-alone")
    equal(await sandbox.run_command(["mine-alone"]), "mine\n")


@check()
async def an_argv_meets_no_shell(case: Case) -> None:
    """A list goes to the program as it is: nothing expands, splits or vanishes."""
    sandbox = await case.sandbox()
    argv = ["$HOME", "*", "a b", "it's", '"', "", ";echo", "é\n", "-n"]
    program = "import sys; print(sys.argv[1:])"
    result = await sandbox.execute(["python3", "-c", program, *argv])
    equal(result["stdout"], f"{argv}\n")


@check()
async def a_shell_command_is_taken_whole(case: Case) -> None:
    """A str is a shell program of any form: quotes, lines, pipes, here-documents."""
    sandbox = await case.sandbox()
    equal(await sandbox.run_command("echo 'it works' | wc -c"), "9\n")
    equal(await sandbox.run_command('echo "it\'s"'), "it's\n")
    script = "for i in 1 2; do\n  echo $i\ndone\ncat <<'EOF'\n$ not expanded\n\nEOF\n"
    equal(await sandbox.run_command(script), "1\n2\n$ not expanded\n\n")


@check()
async def a_very_long_command(case: Case) -> None:
    """A shell program longer than any argument may be runs too."""
    sandbox = await case.sandbox()
    text = "é" * 150_000
    equal(await sandbox.run_command(f"printf %s '{text}' | wc -c"), f"{2 * len(text)}\n")


@check()
async def what_makes_no_command_is_refused(case: Case) -> None:
    """An empty argv, a NUL byte or a timeout of nothing is a ValueError, and starts nothing."""
    sandbox = await case.sandbox()
    await raises(ValueError, sandbox.execute([]))
    await raises(ValueError, sandbox.execute(["echo", "a\0b"]))
    await raises(ValueError, sandbox.execute("true", timeout=0))
    equal(sandbox.in_use, 0, "operations under way")


@check()
async def big_output_is_complete(case: Case) -> None:
    """Eight megabytes come out whole."""
    sandbox = await case.sandbox()
    program = (
        "import hashlib, sys; h = hashlib.sha256()\n"
        "for i in range(1024):\n"
        "    block = hashlib.sha256(b'%d' % i).digest() * 256\n"
        "    h.update(block); sys.stdout.buffer.write(block)\n"
        "sys.stderr.write(h.hexdigest())\n"
    )
    command = await sandbox.start_command(["python3", "-c", program])
    await command.wait()
    equal(len(command.stdout_bytes), 8 << 20, "size")
    digest = hashlib.sha256(command.stdout_bytes).hexdigest()
    equal(digest, command.stderr_bytes.decode(), "hash")


@check()
async def bytes_are_exact(case: Case) -> None:
    """Every byte value comes out as it is; the text has replacements and never raises."""
    sandbox = await case.sandbox()
    program = "import sys; sys.stdout.buffer.write(bytes(range(256)) + b'\\r\\n\\n')"
    expected = bytes(range(256)) + b"\r\n\n"
    equal(await _capture_stdout(sandbox, program), expected)
    result = await sandbox.execute(["python3", "-c", program])
    equal(result["stdout"], expected.decode("utf-8", "replace"))


@check()
async def output_is_not_interpreted(case: Case) -> None:
    """Blank lines, digits, prompts and escape sequences are output like any other."""
    sandbox = await case.sandbox()
    text = "\n\n42\n$ \necho $?\n# \n>>> \n\x1b[31mred\x1b[0m\n\n"
    await sandbox.write_file("text", text)
    equal(await sandbox.run_command("cat text"), text)


@check()
async def a_background_child_does_not_delay(case: Case) -> None:
    """A command is over when it ends, though a child of it keeps its stdout open."""
    sandbox = await case.sandbox()
    result = await sandbox.execute("sleep 1000 & echo done", timeout=200)
    equal(result["stdout"], "done\n")
    code = "import subprocess; subprocess.Popen(['sleep', '1000']); print('done')"
    equal((await sandbox.run_code(code, timeout=200))["stdout"], "done\n")


@check()
async def commands_run_side_by_side(case: Case) -> None:
    """Twenty commands at once each get their own output."""
    sandbox = await case.sandbox()
    texts = await asyncio.gather(*(sandbox.run_command(f"echo {n}") for n in range(20)))
    equal(texts, [f"{n}\n" for n in range(20)])
    equal(sandbox.in_use, 0, "operations under way")


@check()
async def run_command_is_text(case: Case) -> None:
    """run_command() returns the output, and stderr as well if the program failed."""
    sandbox = await case.sandbox()
    equal(await sandbox.run_command("echo out; echo note >&2"), "out\n")
    equal(await sandbox.run_command("echo out; echo why >&2; exit 1"), "out\nwhy\n")


@check()
async def common_tools_are_there(case: Case) -> None:
    """A shell finds python3 and the usual tools."""
    sandbox = await case.sandbox()
    equal(await sandbox.run_command("python3 -c 'print(6 * 7)'"), "42\n")
    tools = "for t in sh cat ls cp mv rm mkdir grep sed tar; do command -v $t || exit 1; done"
    result = await sandbox.execute(tools)
    expect(result["exit_code"] == 0, f"the first of these that is missing: {result['stdout']}")
