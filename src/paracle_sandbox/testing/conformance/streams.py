"""Checks of output as it comes: callbacks, iterators, ptys, and the output limit."""

from __future__ import annotations

import asyncio
import hashlib

from ...errors import ResourceLimitError, SandboxTimeoutError
from ...sandbox.sandbox import Sandbox
from .case import Case
from .expect import contains, equal, eventually, expect, expect_output, raises
from .registry import check

_MB = 1 << 20
# It prints 64 MB, and records its progress.
_TALKER = """\
import os
block = b"x" * 65536
for number in range(1024):
    done = 0
    while done < len(block):
        done += os.write(1, block[done:])
    if number % 16 == 0:
        with open("progress.new", "w") as file:
            file.write(str(number))
        os.rename("progress.new", "progress")
"""
_BLOCKS = 1024


@check()
async def callbacks_see_output_as_it_comes(case: Case) -> None:
    """The first line arrives while the program still runs; all of it arrives, in order."""
    sandbox = await case.sandbox()
    first = asyncio.Event()
    seen: list[str] = []

    def collect(text: str) -> None:
        seen.append(text)
        first.set()

    script = "echo 1; read line; for i in 2 3 4; do echo $i; done"
    command = await sandbox.start_command(script, stdin=True, on_stdout=collect)
    await asyncio.wait_for(first.wait(), 120)
    equal((command.poll(), "".join(seen)), (None, "1\n"))
    await command.write_stdin("\n")
    result = await command.wait()
    equal("".join(seen), "1\n2\n3\n4\n")
    equal(result["stdout"], "1\n2\n3\n4\n")


@check()
async def each_stream_has_its_callback(case: Case) -> None:
    """on_stdout and on_stderr get their stream, plain or async, and on_output_bytes gets both."""
    sandbox = await case.sandbox()
    out: list[str] = []
    err: list[str] = []
    raw: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    async def collect(text: str) -> None:
        await asyncio.sleep(0)
        err.append(text)

    def collect_bytes(name: str, chunk: bytes) -> None:
        raw[name] += chunk

    await sandbox.run_code(
        "import sys; print('out'); print('err', file=sys.stderr)",
        on_stdout=out.append, on_stderr=collect, on_output_bytes=collect_bytes,
    )  # fmt: skip
    equal(("".join(out), "".join(err)), ("out\n", "err\n"))
    equal(raw, {"stdout": b"out\n", "stderr": b"err\n"})


@check()
async def characters_are_never_cut(case: Case) -> None:
    """A callback gets whole characters, though their bytes come one by one."""
    sandbox = await case.sandbox()
    text = "é€😀"
    code = (
        f"import os, time\nfor byte in {text.encode()!r}:\n"
        "    os.write(1, bytes([byte])); time.sleep(0.02)"
    )
    seen: list[str] = []
    await sandbox.run_code(code, on_stdout=seen.append)
    equal("".join(seen), text)


@check()
async def a_callback_that_raises_stops_the_program(case: Case) -> None:
    """The callback's own error comes out of the call, and the program is stopped."""
    sandbox = await case.sandbox()

    class Stop(Exception):
        pass

    def stop(text: str) -> None:
        raise Stop(text)

    await raises(Stop, sandbox.execute("echo now; sleep 1000", on_stdout=stop))
    equal(sandbox.in_use, 0, "operations under way")


@check()
async def stream_yields_both(case: Case) -> None:
    """stream() yields the name and bytes of both streams as they come."""
    sandbox = await case.sandbox()
    seen = {"stdout": b"", "stderr": b""}
    async for name, chunk in sandbox.stream("printf out; printf err >&2; exit 3"):
        seen[name] += chunk
    equal(seen, {"stdout": b"out", "stderr": b"err"})


@check()
async def stream_raises_at_the_end(case: Case) -> None:
    """A program that was stopped yields what it printed, then raises."""
    sandbox = await case.sandbox()
    seen: list[bytes] = []

    async def follow() -> None:
        async for _, chunk in sandbox.stream("echo begun; sleep 1000", timeout=2):
            seen.append(chunk)

    await raises(SandboxTimeoutError, follow())
    expect(b"".join(seen) in (b"begun\n", b""), f"got {seen}")


async def _read_progress(sandbox: Sandbox) -> int:
    if not await sandbox.exists("progress"):
        return 0
    return int(await sandbox.read_file("progress"))


@check()
async def a_slow_reader_stalls_the_program(case: Case) -> None:
    """A program waits while its output is not read; afterwards everything arrives."""
    sandbox = await case.sandbox()
    async with await sandbox.start_code(_TALKER) as command:
        chunks = command.output()
        size = len((await anext(chunks))[1])
        stalled_at, same = -1, 0
        while same < 5:
            await asyncio.sleep(0.2)
            now = await _read_progress(sandbox)
            same = same + 1 if now == stalled_at else 0
            stalled_at = now
        expect(stalled_at < _BLOCKS // 2, f"it ran ahead by {stalled_at * 65536} bytes")
        async for _, chunk in chunks:
            size += len(chunk)
        equal(size, _BLOCKS * 65536, "bytes received")
        result = await command.wait()
    equal((result["exit_code"], result["truncated"]), (0, True))


@check()
async def leaving_a_stream_early_stops_it(case: Case) -> None:
    """Closing the stream of an endless program ends the program."""
    sandbox = await case.sandbox()
    chunks = sandbox.stream("yes")
    async for _, chunk in chunks:
        contains(chunk.decode(), "y\n")
        break
    await chunks.aclose()  # type: ignore[attr-defined]

    async def idle() -> bool:
        return sandbox.in_use == 0

    await eventually(idle, "it still runs")


@check(quick=True)
async def too_much_output_is_an_error(case: Case) -> None:
    """Output above the limit stops the program with ResourceLimitError if no callback reads it."""
    sandbox = await case.sandbox()
    error = await raises(ResourceLimitError, sandbox.execute("yes", max_output=10_000))
    equal((error.resource_type, error.limit), ("output", 10_000))
    expect(error.usage is not None and error.usage > 10_000, f"usage is {error.usage}")
    equal(error.stdout, ("y\n" * 5_000), "what it had printed")
    equal(await sandbox.run_command("echo next"), "next\n")


@check()
async def the_configured_output_limit(case: Case) -> None:
    """max_output_mb of the configuration holds where the call says nothing."""
    sandbox = await case.sandbox(max_output_mb=1)
    error = await raises(ResourceLimitError, sandbox.execute("yes"))
    equal((error.resource_type, error.limit, len(error.stdout)), ("output", _MB, _MB))
    result = await sandbox.execute(f"head -c {_MB} /dev/zero")
    equal((len(result["stdout"]), result["truncated"]), (_MB, False))


@check()
async def followed_output_is_never_too_much(case: Case) -> None:
    """A callback gets all output; the result keeps a part and says so."""
    sandbox = await case.sandbox()
    digest = hashlib.sha256()
    result = await sandbox.execute(
        f"head -c {4 * _MB} /dev/zero", max_output=1000,
        on_output_bytes=lambda _, chunk: digest.update(chunk),
    )  # fmt: skip
    equal(digest.hexdigest(), hashlib.sha256(bytes(4 * _MB)).hexdigest(), "what was delivered")
    equal((result["exit_code"], result["truncated"]), (0, True))
    equal(len(result["stdout"]), 1000, "what was kept")


@check()
async def a_pty_is_a_terminal(case: Case) -> None:
    """A program with pty has a controlling terminal of the given size as all three streams."""
    sandbox = await case.sandbox()
    program = (
        "import os; print([os.isatty(n) for n in (0, 1, 2)], tuple(os.get_terminal_size()));"
        "open('/dev/tty').close()"
    )
    result = await sandbox.execute(["python3", "-c", program], pty=(40, 120))
    equal(result["stdout"], "[True, True, True] (120, 40)\r\n", result["stderr"])
    result = await sandbox.execute(["python3", "-c", "import os; print(os.isatty(1))"])
    equal(result["stdout"], "False\n")


@check()
async def a_pty_can_be_resized(case: Case) -> None:
    """resize() changes the size, and the program gets SIGWINCH."""
    sandbox = await case.sandbox()
    program = """
import os, signal, threading
changed = threading.Event()
signal.signal(signal.SIGWINCH, lambda *_: changed.set())
print("ready", flush=True)
while not changed.wait(0.05):
    pass
print(tuple(os.get_terminal_size()))
"""
    command = await sandbox.start_command(["python3", "-c", program], pty=(24, 80))
    chunks = command.output()
    await expect_output(chunks, b"ready\r\n", command)
    await command.resize(50, 132)
    equal((await command.wait())["stdout"], "ready\r\n(132, 50)\r\n")


@check()
async def a_pty_takes_control_characters(case: Case) -> None:
    """^C typed into a pty interrupts the program, and ^D ends its input."""
    sandbox = await case.sandbox()
    command = await sandbox.start_command(["cat"], stdin=True, pty=True)
    await command.write_stdin("line\n\x04")
    equal((await command.wait())["exit_code"], 0)
    # Python and not sh: some shells lose an interrupt that comes just when they start a program.
    program = "import time; print('up', flush=True); time.sleep(1000)"
    command = await sandbox.start_command(["python3", "-c", program], stdin=True, pty=True)
    await expect_output(command.output(), b"up\r\n", command)
    await command.write_stdin("\x03")
    expect((await command.wait())["exit_code"] in (-2, 130), f"exit code {command.poll()}")
