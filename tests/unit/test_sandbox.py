"""Tests of one sandbox over FakeBackend: the real guest, without isolation."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paracle_sandbox.backends.base import Usage
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    ResourceLimitError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxExecutionError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxPathError,
    SandboxTimeoutError,
)
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.testing.fake import FakeBackend

MIB = 1 << 20


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    fake = FakeBackend()
    yield fake
    fake.destroy_error = None
    await fake.close()


@pytest.fixture
async def sandbox(backend: FakeBackend) -> AsyncIterator[Sandbox]:
    async with Sandbox(backend, "box", SandboxConfig(max_output_mb=1)) as running:
        yield running


def _alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Life


async def test_nothing_works_before_the_start(backend: FakeBackend) -> None:
    sandbox = Sandbox(backend, "box", SandboxConfig())
    assert not sandbox.is_running and not backend.created
    for attempt in (sandbox.execute("true"), sandbox.read_file("x"), sandbox.get_stats()):
        with pytest.raises(SandboxExecutionError, match="Sandbox not started"):
            await attempt


async def test_start_makes_one_and_stop_removes_it(backend: FakeBackend) -> None:
    sandbox = Sandbox(backend, "box", SandboxConfig(), labels={"a": "b"})
    await sandbox.start()
    await sandbox.start()
    assert sandbox.is_running and backend.created == ["box"]
    assert [(i.sandbox_id, i.labels) for i in await backend.list_sandboxes()] == [
        ("box", {"a": "b"})
    ]
    directory = backend.directory_of("box")
    await sandbox.stop()
    await sandbox.cleanup()
    await sandbox.close()
    assert not sandbox.is_running and backend.destroyed == ["box"]
    assert not os.path.exists(directory)


async def test_a_failed_start_leaves_nothing(backend: FakeBackend) -> None:
    backend.create_error = SandboxCreationError("no room")
    with pytest.raises(SandboxCreationError, match="no room"):
        await Sandbox(backend, "box").start()
    assert await backend.list_sandboxes() == []


async def test_a_taken_id_does_not_harm_its_owner(backend: FakeBackend, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxConflictError):
        await Sandbox(backend, "box").start()
    assert (await sandbox.execute("echo fine"))["stdout"] == "fine\n"


async def test_a_guest_that_dies_at_once_leaves_nothing(backend: FakeBackend) -> None:
    class Stillborn(FakeBackend):
        async def connect(self, sandbox_id: str):  # type: ignore[no-untyped-def]
            self.kill_guest(sandbox_id)
            return await super().connect(sandbox_id)

    stillborn = Stillborn()
    with pytest.raises(SandboxCreationError):
        await Sandbox(stillborn, "box").start()
    assert await stillborn.list_sandboxes() == [] and stillborn.destroyed == ["box"]


async def test_context_stops_also_when_the_body_raises(backend: FakeBackend) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Sandbox(backend, "box").context():
            raise ZeroDivisionError
    assert backend.destroyed == ["box"]


@pytest.mark.parametrize("kills", [True, False])
async def test_a_guest_that_is_killed_does_not_hear_before_that_it_ends(kills: bool) -> None:
    class Watching(FakeBackend):
        kills_guests = kills

        async def destroy(self, sandbox_id: str) -> None:
            heard.append(self._sandboxes[sandbox_id].host_end.fileno() < 0)
            await super().destroy(sandbox_id)

    heard: list[bool] = []
    async with Sandbox(Watching(), "box") as sandbox:
        await sandbox.execute("true")
    assert heard == [not kills]


async def test_a_stopped_one_says_that_it_was(sandbox: Sandbox) -> None:
    await sandbox.stop()
    with pytest.raises(SandboxExecutionError, match="was stopped"):
        await sandbox.execute("true")


async def test_stop_ends_what_runs(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.execute("echo begun; sleep 60"))
    while not sandbox.in_use:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await sandbox.stop()
    with pytest.raises(SandboxExecutionError, match="was stopped while the program ran"):
        await running


# Programs


async def test_a_failed_program_is_a_result(sandbox: Sandbox) -> None:
    result = await sandbox.execute("echo out; echo err >&2; exit 3")
    assert result == {
        "exit_code": 3,
        "stdout": "out\n",
        "stderr": "err\n",
        "timed_out": False,
        "truncated": False,
    }


async def test_a_list_is_an_argv_and_meets_no_shell(sandbox: Sandbox) -> None:
    odd = "a b'c\"d$HOME;`true`\n"
    assert (await sandbox.execute(["printf", "%s", odd]))["stdout"] == odd


async def test_a_missing_program(sandbox: Sandbox) -> None:
    result = await sandbox.execute(["no-such-program"])
    assert result["exit_code"] == 127 and "not found" in result["stderr"]


async def test_exact_bytes_and_replaced_text(sandbox: Sandbox) -> None:
    command = await sandbox.start_command("printf '\\377\\n42\\n\\n$ '")
    result = await command.wait()
    assert command.stdout_bytes == b"\xff\n42\n\n$ "
    assert result["stdout"] == "\ufffd\n42\n\n$ "


async def test_env_cwd_and_stdin(sandbox: Sandbox) -> None:
    await sandbox.mkdir("sub")
    result = await sandbox.execute(
        "cat; echo $A; basename $PWD", env={"A": "1 2"}, cwd="/workspace/sub", stdin="in\n"
    )
    assert result["stdout"] == "in\n1 2\nsub\n"
    assert (await sandbox.execute("cat"))["stdout"] == ""
    with pytest.raises(SandboxFileNotFoundError, match="not found"):
        await sandbox.execute("true", cwd="/workspace/none")


@pytest.mark.parametrize("stdin", [b"in", bytearray(b"in"), memoryview(b"in"), "in"])
async def test_stdin_may_be_any_kind_of_bytes(sandbox: Sandbox, stdin: Any) -> None:
    assert (await sandbox.execute("cat", stdin=stdin, timeout=10))["stdout"] == "in"


@pytest.mark.parametrize("stdin", [5, 0, ["in"], io.BytesIO(b"in")])
async def test_stdin_that_cannot_be_written_is_refused(sandbox: Sandbox, stdin: Any) -> None:
    with pytest.raises(TypeError, match="stdin must be"):
        await sandbox.execute("cat", stdin=stdin, timeout=10)
    assert sandbox.in_use == 0


async def test_a_timeout_that_is_no_number_is_refused(sandbox: Sandbox) -> None:
    wrong: Any = "5"
    with pytest.raises(TypeError, match="timeout must be a number"):
        await sandbox.execute("true", timeout=wrong)
    assert sandbox.in_use == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_output": "1k"}, {"max_output": -1}, {"env": ["A=B"]}, {"env": "A=B"}, {"pty": "yes"},
        {"pty": (24,)}, {"pty": (0, 80)}, {"pty": (70000, 80)}, {"cwd": 5}, {"stdin": "\ud800"},
        {"on_stdout": "print"}, {"on_stderr": 5}, {"on_output_bytes": []},
    ],
)  # fmt: skip
async def test_an_option_that_cannot_be_meant_starts_nothing(
    sandbox: Sandbox, options: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, ValueError)):
        await sandbox.execute("cat", **options)
    assert not sandbox.in_use


async def test_what_cannot_be_a_program_is_told_in_plain_words(sandbox: Sandbox) -> None:
    wrong: Any
    for wrong in (None, 5, b"true", Path("/bin/true")):
        with pytest.raises(TypeError, match="a command must be a str or a list of strings, not"):
            await sandbox.execute(wrong)
        with pytest.raises(TypeError, match="code must be a str, not"):
            await sandbox.run_code(wrong)
    for wrong in ("one text", None, b"x"):
        with pytest.raises(TypeError, match="args must be a list of strings, not"):
            await sandbox.run_code("pass", wrong)
        with pytest.raises(TypeError, match="args must be a list of strings, not"):
            await sandbox.run_file("x.py", wrong)


async def test_a_directory_may_be_a_path_object(sandbox: Sandbox) -> None:
    await sandbox.mkdir("sub")
    result = await sandbox.execute("basename $PWD", cwd=PurePosixPath("sub"), pty=None)
    assert result["stdout"] == "sub\n"


async def test_more_stdin_than_anything_buffers(sandbox: Sandbox) -> None:
    result = await sandbox.execute("wc -c", stdin=bytes(10 * MIB))
    assert int(result["stdout"]) == 10 * MIB


async def test_a_script_longer_than_any_argument(sandbox: Sandbox) -> None:
    result = await sandbox.execute("echo begin\n" + "# filler\n" * 50_000 + "echo end")
    assert result["stdout"] == "begin\nend\n"


@pytest.mark.parametrize("command", [[], ["a\0b"], "a\0b"])
async def test_what_cannot_be_a_command(sandbox: Sandbox, command: str | list[str]) -> None:
    with pytest.raises(ValueError):
        await sandbox.execute(command)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
async def test_what_cannot_be_a_timeout(sandbox: Sandbox, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await sandbox.execute("true", timeout)
    assert sandbox.in_use == 0


async def test_an_infinite_timeout_is_no_limit(sandbox: Sandbox) -> None:
    sandbox.config.__dict__["timeout_seconds"] = 0.2  # what None would be
    result = await sandbox.execute("sleep 0.5; echo late", float("inf"))
    assert result["stdout"] == "late\n"


async def test_a_misspelt_option(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="evn"):
        await sandbox.execute("true", evn={})  # type: ignore[call-arg]


async def test_run_command_is_text(sandbox: Sandbox) -> None:
    assert await sandbox.run_command("echo 42; echo noise >&2") == "42\n"
    assert await sandbox.run_command("echo 42; echo why >&2; false") == "42\nwhy\n"


async def test_run_code(sandbox: Sandbox) -> None:
    await sandbox.write_file("beside.py", "value = 7")
    code = "import sys, beside; print(sys.argv[1:], beside.value); print(input()); 1/0"
    result = await sandbox.run_code(code, ["a", "b c"], stdin="typed")
    assert result["stdout"] == "['a', 'b c'] 7\ntyped\n"
    assert "ZeroDivisionError" in result["stderr"] and result["exit_code"] == 1


async def test_code_runs_do_not_clash_and_leave_no_file(sandbox: Sandbox) -> None:
    codes = [f"print({n}, __file__)" for n in range(8)]
    codes += ["x = 1\n" * 100_000 + "print(8, __file__)"]
    results = await asyncio.gather(*(sandbox.run_code(code) for code in codes))
    lines = [result["stdout"].split() for result in results]
    assert [int(line[0]) for line in lines] == list(range(9))
    await sandbox.execute("true")
    assert not any([await sandbox.exists(line[1]) for line in lines])


async def test_run_file(sandbox: Sandbox) -> None:
    await sandbox.write_file("dir/main.py", "import sys, near; print(near.N, sys.argv[1:])")
    await sandbox.write_file("dir/near.py", "N = 5")
    assert (await sandbox.run_file("dir/main.py", ["x"]))["stdout"] == "5 ['x']\n"
    assert (await sandbox.run_file("/workspace/dir/main.py"))["stdout"] == "5 []\n"


# Time


@pytest.mark.clock
async def test_a_timeout_kills_the_tree_and_keeps_the_output(sandbox: Sandbox) -> None:
    script = "echo so far; (trap '' TERM; setsid sleep 60) & echo $! > pid; sleep 60"
    begun = time.monotonic()
    with pytest.raises(SandboxTimeoutError, match="Execution timed out after 0.5 seconds") as e:
        await sandbox.execute(script, timeout=0.5)
    assert time.monotonic() - begun < 4
    assert (e.value.timeout_seconds, e.value.stdout) == (0.5, "so far\n")
    assert isinstance(e.value, TimeoutError)
    assert not _alive(int(await sandbox.read_file("pid")))
    assert (await sandbox.execute("echo next"))["stdout"] == "next\n"


async def test_a_timeout_leaves_other_commands_alone(sandbox: Sandbox) -> None:
    other = await sandbox.start_command("sleep 1; echo survived")
    with pytest.raises(SandboxTimeoutError):
        await sandbox.execute("sleep 60", timeout=0.2)
    assert (await other.wait())["stdout"] == "survived\n"


async def test_a_guest_that_does_not_confirm_loses_its_sandbox(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    running = asyncio.create_task(sandbox.execute("echo x; sleep 60", timeout=0.5))
    await asyncio.sleep(0.3)
    backend.freeze_guest("box")
    with pytest.raises(SandboxTimeoutError, match="sandbox was destroyed"):
        await running
    assert backend.destroyed == ["box"] and not sandbox.is_running


async def test_cancelling_kills_the_tree(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.execute("echo $$ > pid; sleep 60"))
    while not await sandbox.exists("pid") or not (await sandbox.read_file("pid")).strip():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _alive(int(await sandbox.read_file("pid")))
    assert sandbox.in_use == 0


# Background commands


async def test_a_background_command(sandbox: Sandbox) -> None:
    command = await sandbox.start_command(
        "read line; echo got $line; read line; exit 4", stdin=True
    )
    assert command.poll() is None and sandbox.in_use == 1
    with pytest.raises(TimeoutError, match="still runs"):
        await command.wait(timeout=0.05)
    await command.write_stdin("one\n")
    await command.write_stdin(b"two\n")
    result = await command.wait()
    assert (result["stdout"], result["exit_code"], command.poll()) == ("got one\n", 4, 4)
    assert command.pid is not None and sandbox.in_use == 0
    with pytest.raises(BrokenPipeError):
        await command.write_stdin("three")


async def test_input_that_nobody_would_read_is_refused(sandbox: Sandbox) -> None:
    async with await sandbox.start_command("sleep 60") as command:
        with pytest.raises(BrokenPipeError, match="stdin=True"):
            await command.write_stdin("lost")
    async with await sandbox.start_command("cat; sleep 60", stdin=True) as command:
        await command.write_stdin("heard")
        await command.close_stdin()
        await command.close_stdin()
        with pytest.raises(BrokenPipeError, match="close it last"):
            await command.write_stdin("lost")


async def test_input_that_nobody_could_write_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="use start_command"):
        await sandbox.execute("cat", stdin=True)
    with pytest.raises(ValueError, match="or give the input itself"):
        await sandbox.run_code("input()", stdin=True)
    with pytest.raises(ValueError, match="write_stdin"):
        async for _ in sandbox.stream("cat", stdin=True):
            pass
    assert sandbox.in_use == 0


async def test_signals_and_sizes_that_are_none_are_refused(sandbox: Sandbox) -> None:
    async with await sandbox.start_command("sleep 60", pty=True) as command:
        for number in (0, -1, 65, 10**9):
            with pytest.raises(ValueError, match="not the number of a signal"):
                await command.send_signal(number)
        for size in ((0, 80), (24, 70000), (-1, -1)):
            with pytest.raises(ValueError, match="a terminal size"):
                await command.resize(*size)
        assert command.poll() is None


async def test_signals_and_kill(sandbox: Sandbox) -> None:
    command = await sandbox.start_command(
        "trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.05; done"
    )
    async for _, chunk in command.output():
        if b"ready" in chunk:
            break
    await command.send_signal(10)
    assert (await command.wait())["stdout"] == "ready\ncaught\n"

    killed = await sandbox.start_command("sleep 60")
    await killed.kill()
    await killed.kill()
    assert (await killed.wait())["exit_code"] == -9


async def test_leaving_the_block_kills(sandbox: Sandbox) -> None:
    async with await sandbox.start_command("sleep 60") as command:
        pass
    assert command.poll() == -9


async def test_a_terminal_of_a_size(sandbox: Sandbox) -> None:
    command = await sandbox.start_command("stty size; read x; stty size", pty=(10, 33))
    async for _, chunk in command.output():
        if b"10 33" in chunk:
            break
    await command.resize(20, 44)
    await command.write_stdin("\n")
    assert "20 44" in (await command.wait())["stdout"]


# Output


async def test_too_much_output_is_stopped(sandbox: Sandbox) -> None:
    with pytest.raises(ResourceLimitError, match="Output limit exceeded") as caught:
        await sandbox.execute("yes")
    error = caught.value
    assert (error.resource_type, error.limit) == ("output", MIB)
    assert error.usage is not None and error.usage > MIB
    assert len(error.stdout) == MIB and error.stdout.startswith("y\ny\n")


async def test_a_callback_sees_everything(sandbox: Sandbox) -> None:
    sizes = {"stdout": 0, "stderr": 0}

    def count(name: str, data: bytes) -> None:
        sizes[name] += len(data)

    result = await sandbox.execute(
        "head -c 9000000 /dev/zero; head -c 5 /dev/zero >&2", on_output_bytes=count
    )
    assert sizes == {"stdout": 9_000_000, "stderr": 5}
    assert result["truncated"] and len(result["stdout"]) + len(result["stderr"]) == MIB


async def test_text_callbacks_get_whole_characters(sandbox: Sandbox) -> None:
    texts: list[str] = []

    async def keep(text: str) -> None:
        texts.append(text)

    await sandbox.execute("printf '\\303'; sleep 0.1; printf '\\251\\303'", on_stdout=keep)
    assert "".join(texts) == "é\ufffd" and "\ufffd" not in texts[0]


async def test_a_callback_that_raises_stops_the_command(sandbox: Sandbox) -> None:
    def refuse(text: str) -> None:
        raise LookupError("not this")

    with pytest.raises(LookupError, match="not this"):
        await sandbox.execute("echo x; sleep 60", on_stdout=refuse)


async def test_a_callback_that_cancels_stops_the_command(sandbox: Sandbox) -> None:
    def give_up(text: str) -> None:
        raise asyncio.CancelledError

    command = await sandbox.start_command("echo hi; sleep 60", on_stdout=give_up)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(command.wait(), 10)
    assert command.poll() == -9
    assert not sandbox.in_use


async def test_a_callback_that_hangs_does_not_outlast_the_deadline(sandbox: Sandbox) -> None:
    async def hang(text: str) -> None:
        await asyncio.sleep(60)

    with pytest.raises(SandboxTimeoutError):
        await sandbox.execute("echo x; sleep 60", timeout=0.3, on_stdout=hang)
    assert sandbox.is_running


async def test_streaming_is_never_stopped_for_its_size(sandbox: Sandbox) -> None:
    total = 0
    async for name, chunk in sandbox.stream("head -c 20000000 /dev/zero"):
        assert name == "stdout"
        total += len(chunk)
    assert total == 20_000_000


async def test_a_slow_follower_stalls_the_command(sandbox: Sandbox) -> None:
    command = await sandbox.start_command("head -c 40000000 /dev/zero; touch done")
    output = command.output()
    total = len((await anext(output))[1])
    await asyncio.sleep(0.3)
    assert not await sandbox.exists("done")
    async for _, chunk in output:
        total += len(chunk)
    assert total == 40_000_000 and await sandbox.exists("done")


async def test_a_stream_that_is_left_kills_and_one_that_is_late_raises(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxTimeoutError):
        async for _ in sandbox.stream("yes | head -c 100; sleep 60", timeout=0.3):
            pass
    stream = sandbox.stream("yes")
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert sandbox.in_use == 0


# Limits


async def test_the_kernels_oom_kill_is_a_memory_limit(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    backend.usage_of["box"] = Usage(oom_kills=1, memory_peak_bytes=512 * MIB)
    with pytest.raises(ResourceLimitError, match=r"512 MB \(OOM killed\)") as caught:
        await sandbox.execute("echo x; kill -9 $$")
    error = caught.value
    assert (error.resource_type, error.limit, error.usage) == ("memory", 512 * MIB, 512 * MIB)
    assert error.stdout == "x\n"
    # It is counted once: the next failure has another cause.
    assert (await sandbox.execute("exit 137"))["exit_code"] == 137


async def test_an_oom_kill_stops_what_still_runs(backend: FakeBackend, sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.execute("sleep 60"))
    await asyncio.sleep(0.1)
    backend.usage_of["box"] = Usage(oom_kills=1)
    with pytest.raises(ResourceLimitError, match="Memory limit"):
        async with asyncio.timeout(5):
            await running


async def test_less_memory_is_used_up_sooner(backend: FakeBackend) -> None:
    """A program that ends at once is not examined, unless it had the time to use up its memory."""
    async with Sandbox(backend, "box", SandboxConfig(memory_mb=128)) as sandbox:
        backend.usage_of["box"] = Usage(oom_kills=1)
        with pytest.raises(ResourceLimitError, match="Memory limit"):
            await sandbox.execute("sleep 0.03")
        assert (await sandbox.execute("sleep 0.03"))["exit_code"] == 0


async def test_an_oom_killed_child_outweighs_a_success(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    running = asyncio.create_task(sandbox.execute("sleep 0.4"))
    await asyncio.sleep(0.1)
    backend.usage_of["box"] = Usage(oom_kills=2)
    with pytest.raises(ResourceLimitError, match="Memory limit"):
        await running


@pytest.mark.parametrize(
    ("usage", "kind"), [(Usage(pids_denied=3), "pids"), (Usage(disk_full=True), "disk")]
)
async def test_other_limits_need_a_failure(
    backend: FakeBackend, sandbox: Sandbox, usage: Usage, kind: str
) -> None:
    backend.usage_of["box"] = usage
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.execute("false")
    assert caught.value.resource_type == kind
    backend.usage_of["box"] = replace(usage, pids_denied=2 * usage.pids_denied)
    assert (await sandbox.execute("sleep 0.1"))["exit_code"] == 0


async def test_a_process_that_was_refused_before_is_nobodys_failure_unless_it_says_so(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    """A program that ends at once may have used fewer processes than it wanted, which cannot be
    seen."""
    assert (await sandbox.execute("true"))["exit_code"] == 0
    backend.usage_of["box"] = Usage(pids_denied=3)
    assert (await sandbox.execute("exit 7"))["exit_code"] == 7
    for denied, words in ((4, "sh: 1: Cannot fork"), (5, "can't start new thread")):
        assert (await sandbox.execute("true"))["exit_code"] == 0
        backend.usage_of["box"] = Usage(pids_denied=denied)
        with pytest.raises(ResourceLimitError, match="Process limit"):
            await sandbox.execute(f'echo "{words}" >&2; exit 1')


async def test_a_disk_that_was_full_before_is_nobodys_failure_unless_it_says_so(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    backend.usage_of["box"] = Usage(disk_full=True)
    with pytest.raises(ResourceLimitError):
        await sandbox.execute("exit 1")
    assert (await sandbox.execute("echo unrelated >&2; exit 1"))["exit_code"] == 1
    for words in ("cp: No space left on device", "open x: disk quota exceeded"):
        with pytest.raises(ResourceLimitError, match="Disk limit"):
            await sandbox.execute(f"echo '{words}' >&2; exit 1")


@pytest.mark.parametrize("kept", [0, 100_000], ids=["nothing kept", "the beginning kept"])
async def test_what_a_full_disk_made_a_program_say_counts_also_when_it_is_not_kept(
    backend: FakeBackend, sandbox: Sandbox, kept: int
) -> None:
    """The service and callers that follow the output do not keep it."""
    backend.usage_of["box"] = Usage(disk_full=True)
    with pytest.raises(ResourceLimitError):
        await sandbox.execute("exit 1")
    noisy = "head -c 300000 /dev/zero; echo 'cp: No space left on device'; exit 1"
    for command, is_told in ((noisy, True), (noisy.replace("No space", "Nothing"), False)):
        seen: list[bytes] = []
        running = await sandbox.start_command(
            command, max_output=kept, on_output_bytes=lambda _, data, seen=seen: seen.append(data)
        )
        if is_told:
            with pytest.raises(ResourceLimitError, match="Disk limit"):
                await running.wait()
        else:
            assert (await running.wait())["exit_code"] == 1
        assert b"".join(seen).endswith(b"left on device\n")


async def test_137_alone_means_nothing(sandbox: Sandbox) -> None:
    assert (await sandbox.execute("exit 137"))["exit_code"] == 137
    assert (await sandbox.execute("kill -9 $$"))["exit_code"] == -9


async def test_a_sandbox_that_dies_under_a_program(backend: FakeBackend, sandbox: Sandbox) -> None:
    command = await sandbox.start_command("echo last words; sleep 60")
    await anext(command.output())
    backend.kill_guest("box")
    with pytest.raises(SandboxExecutionError, match="died while the program ran") as caught:
        await command.wait()
    assert caught.value.stdout == "last words\n" and not sandbox.is_running


async def test_a_sandbox_that_dies_of_memory_says_so(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    command = await sandbox.start_command("echo x; sleep 60")
    await anext(command.output())
    backend.usage_of["box"] = Usage(oom_kills=1)
    backend.kill_guest("box")
    with pytest.raises(ResourceLimitError, match="Memory limit"):
        await command.wait()


# Files


async def test_files_round_trip(sandbox: Sandbox) -> None:
    await sandbox.write_file('new dir/it\'s "here".txt', "text é\nEOF\n")
    assert await sandbox.read_file('new dir/it\'s "here".txt') == "text é\nEOF\n"
    await sandbox.write_file("/workspace/raw", b"\xff\x00")
    assert await sandbox.read_bytes("raw") == b"\xff\x00"
    assert await sandbox.read_file("raw", encoding=None) == b"\xff\x00"
    assert await sandbox.read_file("raw", errors="replace") == "\ufffd\x00"
    with pytest.raises(UnicodeDecodeError, match="read_bytes") as caught:
        await sandbox.read_file("raw")
    assert isinstance(caught.value, SandboxFileError) and caught.value.filename == "raw"
    await sandbox.write_file("empty", "")
    assert await sandbox.read_file("empty") == ""


async def test_a_large_file_round_trips(sandbox: Sandbox) -> None:
    content = os.urandom(12 * MIB)
    await sandbox.write_file("big", content)
    assert await sandbox.read_bytes("big") == content


async def test_a_reader_may_take_longer_than_an_operation(backend: FakeBackend) -> None:
    short = SandboxConfig().model_copy(update={"timeout_seconds": 0.5})
    async with Sandbox(backend, "short", short) as sandbox:
        content = os.urandom(5 * MIB)
        await sandbox.write_file("large", content)
        pieces = sandbox.read_stream("large")
        seen = await anext(pieces)
        await asyncio.sleep(1)
        assert sandbox.in_use == 1
        async for piece in pieces:
            seen += piece
        assert seen == content
        assert not sandbox.in_use
        with pytest.raises(SandboxFileNotFoundError):
            await anext(sandbox.read_stream("missing"))


async def test_a_listing_that_comes_with_the_result(sandbox: Sandbox) -> None:
    command = await sandbox.start_command("sleep 0.2; mkdir d; touch d/f", then_listed=True)
    await command.wait()
    assert sorted(one["name"] for one in await sandbox.listed_after(command)) == ["d", "f"]
    with pytest.raises(SandboxFileError):
        await sandbox.listed_after(command)  # it is read once
    with pytest.raises(SandboxFileError):
        await sandbox.listed_after(await sandbox.start_command("true"))


async def test_a_listing_nobody_reads_costs_nothing(sandbox: Sandbox) -> None:
    await sandbox.execute("for n in $(seq 300); do touch $n; done")
    for command in ("true", "sleep 30"):
        async with await sandbox.start_command(command, timeout=0.5, then_listed=True) as running:
            with suppress(SandboxTimeoutError):
                await running.wait()
        with pytest.raises(SandboxFileError):
            await sandbox.listed_after(running)
    assert len(await sandbox.list_files()) == 300
    assert sandbox.in_use == 0


async def test_directories(sandbox: Sandbox) -> None:
    await sandbox.write_file("d/a.txt", "1")
    await sandbox.mkdir("d/sub/deep")
    names = sorted(entry["name"] for entry in await sandbox.list_files("d"))
    assert names == ["a.txt", "sub"]
    assert len(await sandbox.list_files("d", recursive=True)) == 3
    entry = await sandbox.stat("d/a.txt")
    assert (entry["kind"], entry["size"]) == ("file", 1)
    await sandbox.move("d/a.txt", "d/b.txt")
    assert not await sandbox.exists("d/a.txt") and await sandbox.exists("d/b.txt")
    with pytest.raises(SandboxFileError):
        await sandbox.remove("d")
    await sandbox.remove("d", recursive=True)
    assert not await sandbox.exists("d")


async def test_a_missing_file_is_not_found(sandbox: Sandbox, tmp_path: Path) -> None:
    for attempt in (
        sandbox.read_file("none"),
        sandbox.stat("none"),
        sandbox.remove("none"),
        sandbox.copy_from("none", tmp_path / "x"),
        sandbox.copy_to(tmp_path / "none", "x"),
    ):
        with pytest.raises(FileNotFoundError, match="not found"):
            await attempt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/passwd", "/workspace/../etc/x", "a\0b", "/workspace2/x"],
)
async def test_paths_that_leave_are_refused_and_recorded(
    sandbox: Sandbox, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paracle_sandbox.audit"):
        with pytest.raises(SandboxPathError):
            await sandbox.read_file(path)
    [record] = caplog.records
    assert (record.event, record.sandbox_id) == ("path_escape", "box")  # type: ignore[attr-defined]


async def test_a_link_that_leaves_is_refused_and_recorded(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    await sandbox.execute("ln -s /etc/passwd link")
    with caplog.at_level(logging.WARNING, "paracle_sandbox.audit"):
        with pytest.raises(SandboxPathError):
            await sandbox.read_file("link")
    assert caplog.records[0].event == "path_escape"  # type: ignore[attr-defined]
    assert caplog.records[0].details == {"path": "link"}  # type: ignore[attr-defined]


async def test_copies_of_files(sandbox: Sandbox, tmp_path: Path) -> None:
    content = os.urandom(5 * MIB + 1)
    (tmp_path / "in.bin").write_bytes(content)
    (tmp_path / "in.bin").chmod(0o755)
    await sandbox.copy_to(tmp_path / "in.bin", "new/dir/")
    assert await sandbox.read_bytes("new/dir/in.bin") == content
    assert (await sandbox.stat("new/dir/in.bin"))["mode"] & 0o111
    await sandbox.copy_from("new/dir/in.bin", tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == content
    (tmp_path / "target").mkdir()
    await sandbox.copy_from("/workspace/new/dir/in.bin", tmp_path / "target")
    assert (tmp_path / "target/in.bin").read_bytes() == content


@pytest.mark.parametrize("directory", ["/workspace", ".", "dir", PurePosixPath("dir")])
async def test_a_file_copied_to_a_directory_is_put_into_it(
    sandbox: Sandbox, tmp_path: Path, directory: Any
) -> None:
    await sandbox.mkdir("dir")
    (tmp_path / "in.txt").write_text("in")
    await sandbox.copy_to(tmp_path / "in.txt", directory)
    assert await sandbox.read_file(PurePosixPath(directory) / "in.txt") == "in"


async def test_a_path_is_named_once_when_something_is_wrong_with_it(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFileError) as caught:
        await sandbox.read_file(".")
    assert str(caught.value).startswith("Is a directory: /")
    await sandbox.write_file("file", "x")
    with pytest.raises(SandboxFileError) as caught:
        await sandbox.list_files("file")
    assert str(caught.value).count("file") == 1


async def test_of_two_paths_the_wrong_one_is_named(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    await sandbox.write_file("a.txt", "a")
    await sandbox.execute("ln -s /etc out")
    with pytest.raises(SandboxFileNotFoundError, match=r"target.*missing/b\.txt"):
        await sandbox.move("a.txt", "missing/b.txt")
    with pytest.raises(SandboxFileNotFoundError, match=r"missing\.txt"):
        await sandbox.move("missing.txt", "a.txt")
    with pytest.raises(SandboxPathError, match="out/b") as caught:
        await sandbox.move("a.txt", "out/b")
    assert caught.value.path == "out/b"
    assert [record.getMessage().count("out/b") for record in caplog.records] == [1]
    assert await sandbox.read_file("a.txt") == "a"


async def test_nothing_exists_below_a_file(sandbox: Sandbox) -> None:
    await sandbox.write_file("file", "x")
    assert not await sandbox.exists("file/below")
    assert not await sandbox.exists("file/below/that")
    assert await sandbox.exists("file")


@pytest.mark.parametrize("content", [None, 5, ["x"], {}])
async def test_content_that_is_none_is_refused(sandbox: Sandbox, content: Any) -> None:
    with pytest.raises(TypeError, match="content must be a str or bytes, not"):
        await sandbox.write_file("file", content)
    assert not await sandbox.exists("file")


async def test_an_empty_path_of_the_host_is_not_the_current_directory(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").write_text("p")
    await sandbox.write_file("tree/file", "x")
    with pytest.raises(SandboxPathError, match="empty"):
        await sandbox.copy_to("", "tree")
    for path in ("tree", "tree/file"):
        with pytest.raises(SandboxPathError, match="empty"):
            await sandbox.copy_from(path, "")
    assert [entry["name"] for entry in await sandbox.list_files("tree")] == ["file"]
    assert os.listdir() == ["private"]
    await sandbox.copy_to(".", "tree")
    assert await sandbox.read_file("tree/private") == "p"


async def test_a_special_file_of_the_host_is_not_waited_for(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(SandboxFileError, match="not a regular file"):
            await asyncio.wait_for(sandbox.copy_to(path, "x"), 10)
    assert not await sandbox.exists("x")


async def test_a_path_may_be_a_path_object(
    sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await sandbox.write_file(Path("dir") / "p.txt", "p")
    assert await sandbox.read_file(PurePosixPath("/workspace/dir/p.txt")) == "p"
    (tmp_path / "in").write_text("i")
    await sandbox.copy_to(tmp_path / "in", PurePosixPath("dir/in"))
    await sandbox.copy_from(Path("dir"), tmp_path / "out")
    assert (tmp_path / "out/in").read_text() == "i"
    assert {entry["name"] for entry in await sandbox.list_files(Path("dir"))} == {"p.txt", "in"}
    assert (await sandbox.run_file(Path("dir/p.txt")))["exit_code"] == 1
    assert not caplog.records


async def test_what_is_no_path_is_no_security_event(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: list[Any] = [3, None, b"bytes", ["list"]]
    for path in wrong:
        with pytest.raises(TypeError):
            await sandbox.read_file(path)
        with pytest.raises(TypeError):
            await sandbox.copy_to("/etc/hostname", path)
    with pytest.raises(SandboxPathError, match="empty"):
        await sandbox.write_file("", "x")
    assert not caplog.records


async def test_copies_of_trees(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "a").mkdir()
    (source / "a/data").write_bytes(bytes(3 * MIB))
    (source / "note").write_text("n")
    await sandbox.copy_to(source, "tree")
    assert (await sandbox.stat("tree/a/data"))["size"] == 3 * MIB
    await sandbox.copy_from("tree", tmp_path / "back")
    found = sorted(str(p.relative_to(tmp_path / "back")) for p in (tmp_path / "back").rglob("*"))
    assert found == ["a", "a/data", "empty", "note"]


async def test_copies_out_are_limited(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.execute("mkdir t; head -c 3000000 /dev/zero > t/big; touch t/1 t/2 t/3")
    with pytest.raises(SandboxFileError):
        await sandbox.copy_from("t/big", tmp_path / "x", max_bytes=1000)
    with pytest.raises(SandboxFileError):
        await sandbox.copy_from("t", tmp_path / "x", max_bytes=1000)
    with pytest.raises(SandboxFileError):
        await sandbox.copy_from("t", tmp_path / "x", max_entries=2)
    assert list(tmp_path.iterdir()) == []


# Figures


async def test_stats(backend: FakeBackend, sandbox: Sandbox) -> None:
    backend.usage_of["box"] = Usage(cpu_seconds=1.0, memory_bytes=256 * MIB, processes=3)
    stats = await sandbox.get_stats()
    assert (stats["memory_mb"], stats["memory_percent"], stats["processes"]) == (256, 50, 3)
    assert stats["memory_limit_mb"] == 512 and stats["cpu_percent"] > 0
    assert (await sandbox.get_stats())["cpu_percent"] == 0
    await sandbox.check_limits()
    backend.usage_of["box"] = Usage(memory_bytes=500 * MIB)
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.check_limits()
    assert (caught.value.limit, caught.value.usage) == (512 * MIB, 500 * MIB)


async def test_use_is_counted(sandbox: Sandbox) -> None:
    before = sandbox.last_used
    await sandbox.write_file("x", "y")
    assert sandbox.last_used > before and sandbox.in_use == 0


@pytest.mark.parametrize(("most", "few"), [(16, True), (256, None)])
async def test_the_guest_hears_that_processes_are_few(
    backend: FakeBackend, most: int, few: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    config = SandboxConfig(max_processes=most)
    async with Sandbox(backend, "box", config) as sandbox:
        connection = sandbox._live()
        opened = connection.open

        def noting(request: dict[str, object], **options: object) -> object:
            asked.append(request.get("few_processes"))
            return opened(request, **options)

        monkeypatch.setattr(connection, "open", noting)
        await sandbox.run_code("pass")
    assert asked[0] is few


# Output of a program inside that the host parses


async def test_packages_are_those_that_programs_can_import(
    backend: FakeBackend, sandbox: Sandbox
) -> None:
    folder = "lib/named-1.5.dist-info"
    await sandbox.write_file(
        f"{folder}/METADATA", "Metadata-Version: 2.1\nName: named\nVersion: 1.5\n"
    )
    planted = "import sys; sys.stdout.write('[' * (16 << 20)); sys.exit()"
    for name in ("json", "site", "importlib"):
        await sandbox.write_file(f"{name}.py", planted)
    sandbox.config.env_vars["PYTHONPATH"] = f"{backend.directory_of('box')}/lib"
    found = await sandbox.installed_packages()
    assert {"name": "named", "version": "1.5"} in found


@pytest.mark.parametrize("said", ["no table", "x\ty\n" * 20_000, "\t\t\n", "[" * (16 << 20)])
async def test_a_list_of_packages_that_is_none(
    backend: FakeBackend, sandbox: Sandbox, said: str
) -> None:
    """The program that lists the packages belongs to the sandbox and may print anything."""
    place = backend.directory_of("box")
    python = f"#!/bin/sh\nhead -c {len(said)} {place}/said"
    await sandbox.write_file("said", said)
    await sandbox.write_file("bin/python3", python)
    await sandbox.execute("chmod +x bin/python3")
    sandbox.config.env_vars["PATH"] = f"{place}/bin:{os.environ['PATH']}"
    with pytest.raises((SandboxExecutionError, ResourceLimitError)):
        await sandbox.installed_packages()
