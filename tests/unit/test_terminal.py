"""A terminal keeps its state between commands, with bash and with a plain sh."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paracle_sandbox.errors import SandboxExecutionError, SandboxTimeoutError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.sandbox.terminal import Terminal
from paracle_sandbox.testing.fake import FakeBackend


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    backend = FakeBackend()
    async with Sandbox(backend, "box") as running:
        yield running
    await backend.close()


@pytest.fixture(params=["bash", "dash"])
async def terminal(sandbox: Sandbox, request: pytest.FixtureRequest) -> AsyncIterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed here; the package has that name")
    async with Terminal(sandbox, env_vars={"GIVEN": "a b"}, shell=request.param) as running:
        yield running


@pytest.fixture
async def bash(sandbox: Sandbox) -> AsyncIterator[Terminal]:
    async with Terminal(sandbox, shell="bash") as running:
        yield running


async def test_directory_and_variables_are_kept(terminal: Terminal) -> None:
    await terminal.run("mkdir -p 'sub dir' && cd 'sub dir'; plain=5; export Y=\"it's\n2\"")
    assert (await terminal.run_command('basename "$PWD"; pwd')).count("sub dir\n") == 2
    assert await terminal.run_command('echo $GIVEN $plain "$Y"') == "a b 5 it's\n2\n"
    assert await terminal.run_command("sh -c 'echo [$plain] $GIVEN'") == "[] a b\n"
    await terminal.run("cd ..")
    assert (await terminal.run_command("cd -")).endswith("/sub dir\n")


async def test_what_was_unset_stays_unset(terminal: Terminal) -> None:
    await terminal.run("unset GIVEN HOME; readonly R=1; umask 027")
    assert await terminal.run_command("echo ${GIVEN-gone} ${HOME-gone} $R; umask") == (
        "gone gone 1\n0027\n"
    )


async def test_output_is_exact(terminal: Terminal) -> None:
    assert await terminal.run_command("printf '42\\n\\n$ echo $?\\n '") == "42\n\n$ echo $?\n "
    assert await terminal.run_command("") == ""
    assert await terminal.run_command("# only a comment") == ""
    assert await terminal.run_command("cat <<'EOF'\nline $x\nEOF\n") == "line $x\n"
    result = await terminal.run("echo out; echo err >&2; echo $#")
    assert (result["stdout"], result["stderr"]) == ("out\n0\n", "err\n")


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("(exit 4)", 4), ("false", 1), ("no-such-program", 127), ("echo 'open", 2)],
)
async def test_the_exit_code_is_the_shells_own(terminal: Terminal, command: str, code: int) -> None:
    await terminal.run("kept=yes")
    result = await terminal.run(command)
    assert result["exit_code"] == code and "_paracle" not in result["stderr"]
    assert await terminal.run_command("echo $kept") == "yes\n"


async def test_the_last_exit_code_can_be_asked_for(terminal: Terminal) -> None:
    for command, code in (("(exit 3)", 3), ("exit 4", 4), ("true", 0), ("echo 'open", 2)):
        await terminal.run(command)
        assert (await terminal.run("echo $?"))["stdout"] == f"{code}\n"
        assert (await terminal.run("echo $?"))["stdout"] == "0\n"
    await terminal.run("set -e; false")
    assert (await terminal.run("echo on"))["stdout"] == "on\n"


async def test_state_is_saved_by_exit_too(terminal: Terminal) -> None:
    await terminal.run("x=1; exit 5")
    assert await terminal.run_command("echo $x") == "1\n"


async def test_options_are_kept_and_do_not_disturb_the_saving(terminal: Terminal) -> None:
    assert (await terminal.run("set -eu; set -C; set -f"))["exit_code"] == 0
    assert (await terminal.run("false; echo not reached"))["stdout"] == ""
    assert await terminal.run_command("echo *") == "*\n"
    await terminal.run("set +euCf; x=2; set -x")
    result = await terminal.run("echo $x")
    assert result["stdout"] == "2\n" and result["stderr"].lstrip("+") == " echo 2\n"


async def test_a_trap_of_the_user_runs_and_state_is_saved(terminal: Terminal) -> None:
    assert await terminal.run_command("trap 'echo bye' EXIT; x=3") == "bye\n"
    assert await terminal.run_command("echo $x") == "3\n"


async def test_a_timeout_leaves_the_former_state(terminal: Terminal) -> None:
    await terminal.run("x=before")
    with pytest.raises(SandboxTimeoutError) as caught:
        await terminal.run("x=after; echo partial; sleep 60", timeout=0.5)
    assert caught.value.stdout == "partial\n"
    assert await terminal.run_command("echo $x") == "before\n"


async def test_a_command_longer_than_any_argument(terminal: Terminal) -> None:
    assert await terminal.run_command("printf %s " + "a" * 90_000 + " | wc -c") == "90000\n"
    lines = "x=$((x + 1))\n" * 30_000
    assert await terminal.run_command("x=0\n" + lines + "echo $x") == "30000\n"


async def test_commands_wait_their_turn(terminal: Terminal) -> None:
    await terminal.run("n=0")
    await asyncio.gather(*(terminal.run("n=$((n + 1))") for _ in range(5)))
    assert await terminal.run_command("echo $n") == "5\n"


async def test_bash_keeps_functions_aliases_and_arrays(bash: Terminal) -> None:
    await bash.run("f() { echo \"f $1\"; }; export -f f; alias hi='echo hello'; a=(1 '2 3')")
    await bash.run("shopt -s extglob; set -o pipefail; declare -A m=([k]='v w')")
    assert await bash.run_command("f x; hi you; echo \"${a[1]} ${m[k]}\"; bash -c 'f y'") == (
        "f x\nhello you\n2 3 v w\nf y\n"
    )
    assert await bash.run_command("false | true; echo $?; [[ ab == +(a|b) ]] && echo ok") == (
        "1\nok\n"
    )


async def test_two_terminals_are_apart(sandbox: Sandbox) -> None:
    async with Terminal(sandbox) as one, Terminal(sandbox, working_dir="/tmp") as two:
        await one.run("x=1; cd /")
        assert await two.run_command("echo [$x]; pwd") == "[]\n/tmp\n"


async def test_a_directory_that_vanished(terminal: Terminal) -> None:
    await terminal.run("mkdir gone; cd gone; rmdir ../gone")
    assert (await terminal.run("echo still here"))["stdout"] == "still here\n"


async def test_life(sandbox: Sandbox) -> None:
    terminal = Terminal(sandbox)
    with pytest.raises(SandboxExecutionError, match="not initialised"):
        await terminal.run("true")
    await terminal.init()
    await terminal.init()
    assert await terminal.run_command("echo up") == "up\n"
    await terminal.close()
    await terminal.close()
    left = [entry["name"] for entry in await sandbox.list_files("/tmp")]
    assert not [name for name in left if name == terminal.directory.rsplit("/", 1)[1]]


async def test_what_is_no_command_and_no_shell(sandbox: Sandbox, terminal: Terminal) -> None:
    wrong: Any
    for wrong in (None, 5, b"true", ["true"]):
        with pytest.raises(TypeError, match="a command must be a str, not"):
            await terminal.run(wrong)
    other = Terminal(sandbox, shell="no-such-shell")
    with pytest.raises(SandboxExecutionError, match="no-such-shell"):
        await other.init()
    assert not await sandbox.exists(other.directory)
