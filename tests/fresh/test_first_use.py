"""The first use of everything on a fresh machine, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from agents.broken_project import broken_project, check_mended, fixing, words
from agents.model_server import model_server
from cli.paracle_cli import end, wait_for
from fresh.conftest import NO_INDEX, Index, Machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")

# The packages of the test's index know only this.
WANTING = "import requests; print(requests.version)"
FIRST_OUTPUT_SECONDS = 2.0
LOOPS = ("asyncio", "uvloop")


@pytest.mark.parametrize("loop", LOOPS)
def test_the_first_program_runs_before_the_template_is_there(
    machine: Machine, index: Index, loop: str
) -> None:
    machine.use(loop)
    first = machine.run("sandbox", "execute", machine.program("print('first')"))
    assert (first.code, first.stdout) == (0, "first\n"), first
    assert first.stderr.count("Building the default template, once") == 1
    second = machine.run("sandbox", "execute", machine.program("print('second')"))
    assert (second.stdout, "template" in second.stderr) == ("second\n", False), second
    assert not machine.is_built and machine.builders(), "it goes on when the first has ended"
    waiting = machine.start("sandbox", "execute", machine.program(WANTING))
    try:
        assert waiting.stderr is not None
        assert b"may import requests: waiting for the default" in waiting.stderr.readline()
        index.is_open.set()
        out, err = waiting.communicate(timeout=120)
    finally:
        end(waiting)
    assert out == b"1.0\n", err
    assert machine.is_built
    later = machine.run("sandbox", "execute", machine.program(WANTING))
    assert (later.stdout, "template" in later.stderr) == ("1.0\n", False), later


FIRST_PROGRAM: dict[str, Callable[[Machine], subprocess.Popen[Any]]] = {
    "execute": lambda machine: machine.start("sandbox", "execute", "-c", "print(6 * 7)"),
    "run": lambda machine: machine.starts(
        "import paracle_sandbox as p; print(p.run('print(6 * 7)')['result']['stdout'], end='')"
    ),
}


@pytest.mark.clock
@pytest.mark.parametrize("way", FIRST_PROGRAM)
def test_the_first_output_comes_within_two_seconds(
    machines: Callable[[], Machine], way: str
) -> None:
    """From the start of the process, on a machine where each is the first; no package was given."""
    took = []
    for machine in (machines() for _ in range(3)):
        began = time.monotonic()
        process = FIRST_PROGRAM[way](machine)
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == 42
            took.append(time.monotonic() - began)
            process.wait(60)
        finally:
            end(process)
        assert not machine.is_built
    assert statistics.median(took) <= FIRST_OUTPUT_SECONDS, took


def test_a_person_who_waits_sees_what_is_done(machine: Machine, index: Index) -> None:
    """Each step in one line of the terminal, which is empty before the program prints."""
    ours, theirs = pty.openpty()
    program = machine.program(WANTING)
    process = machine.start("sandbox", "execute", program, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        seen = ""
        while "waiting for the default template" not in seen:
            seen += os.read(ours, 4096).decode()
        index.is_open.set()
        while "1.0\r\n" not in seen:
            seen += os.read(ours, 4096).decode()
        process.wait(60)
    finally:
        os.close(ours)
        end(process)
    assert "collecting requests" in seen
    assert re.search(r"\x1b\[K1\.0\r\n", seen), seen


@pytest.mark.parametrize("loop", LOOPS)
def test_a_live_sandbox_gains_the_packages(machine: Machine, index: Index, loop: str) -> None:
    """run_async() and a sandbox of a manager, in one program that uses this event loop."""
    source = f"""
import {loop} as loop
import paracle_sandbox as p
async def main():
    print((await p.run_async("print('run')"))["result"]["stdout"], end="", flush=True)
    async with p.SandboxManager().managed_sandbox() as sandbox:
        print((await sandbox.run_code("print('live')"))["stdout"], end="", flush=True)
        input()
        print((await sandbox.run_code({WANTING!r}))["stdout"], end="", flush=True)
    async with p.SandboxExecutor() as executor:
        print((await executor.execute_agent({WANTING!r}))["result"]["stdout"], end="", flush=True)
loop.run(main())
"""
    process = machine.starts(source)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["run\n", "live\n"]
        assert not machine.is_built
        index.is_open.set()
        out, err = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (0, "1.0\n1.0\n"), err


@pytest.mark.parametrize("loop", LOOPS)
def test_run_in_a_script_and_in_a_notebook(machine: Machine, loop: str) -> None:
    machine.use(loop)
    source = f"""
import asyncio, paracle_sandbox as p
def go(): print(p.run("print('out')")["result"]["stdout"], end="", flush=True)
go()
async def cell():
    assert type(asyncio.get_running_loop()).__module__.startswith("{loop}")
    go()
asyncio.run(cell())
"""
    process = machine.starts(source)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, machine.is_built) == (0, "out\nout\n", False), err


@pytest.mark.parametrize("loop", LOOPS)
def test_the_line_that_serve_prints_works(machine: Machine, index: Index, loop: str) -> None:
    machine.env["SANDBOX_API_PORT"] = "0"
    if loop == "asyncio":
        stub = machine.home / "stub"
        stub.mkdir()
        (stub / "uvloop.py").write_text("raise ImportError")
        machine.env["PYTHONPATH"] = f"{stub}:{machine.env['PYTHONPATH']}"
    with served(machine) as line:
        wait_for(machine.builders)  # before anybody asks for anything
        answer = curl(line)
        assert answer["success"] and answer["output"] == "42\n", answer
        wait_for(lambda: curl(ready_of(line)) == {"ready": True}, 60)
        assert not machine.is_built
        index.is_open.set()
        answer = curl(with_code(line, WANTING))
        assert answer["output"] == "1.0\n", answer


def ready_of(line: list[str]) -> list[str]:
    address = next(word for word in line if word.startswith("http://"))
    return ["curl", "-s", f"{address.partition('/sandbox/')[0]}/ready"]


def with_code(line: list[str], code: str) -> list[str]:
    body = line.index("-d") + 1
    return [*line[:body], json.dumps({"code": code}), *line[body + 1 :]]


def shell_words(line: str) -> list[str]:
    """As the shell reads it, which a key may be left to: it is in a file, and not in logs."""
    given = f"set -- {line.strip()}\nprintf '%s\\0' \"$@\""
    done = subprocess.run(["sh", "-c", given], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@contextmanager
def served(machine: Machine, stderr: IO[bytes] | None = None) -> Iterator[list[str]]:
    """``paracle serve``; the words of the line that it says to try."""
    process = machine.start("serve", stderr=stderr)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        yield shell_words(next(line.decode() for line in lines if b"curl" in line))
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        end(process)


def curl(line: list[str]) -> Any:
    return json.loads(subprocess.run(line, capture_output=True, check=True, timeout=120).stdout)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_the_first_call_of_an_mcp_client(
    machine: Machine, index: Index, way: str, loop: str
) -> None:
    machine.use(loop)
    if way == "stdio":
        command, *arguments = machine.argv("mcp")
        server = StdioServerParameters(command=command, args=arguments, env=machine.env)
        async with Client(server) as client:
            await asyncio.to_thread(wait_for, machine.builders)  # before the first call
            await use_tools(client, machine, index)
        return
    process = machine.start("mcp", "--http", "--port", "0")
    try:
        assert process.stderr is not None
        url = None
        while url is None:
            url = re.search(r"http://\S+", process.stderr.readline().decode())
        wait_for(machine.builders)  # before the first client
        async with Client(streamable_http_client(url[0])) as client:
            await use_tools(client, machine, index)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        end(process)


async def use_tools(client: Client, machine: Machine, index: Index) -> None:
    assert await call(client, "python_execute", code="print(6 * 7)") == "42\n"
    assert await call(client, "python_session", code="6 * 7") == "42"
    assert not machine.is_built and machine.builders()
    index.is_open.set()
    assert await call(client, "python_execute", code=WANTING) == "1.0\n"


async def call(client: Client, tool: str, **arguments: str) -> str:
    return str((await client.call_tool(tool, arguments)).content[0].text)  # type: ignore[union-attr]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("packages", ["packages on the way", "no index"])
def test_the_first_task_of_an_agent(machine: Machine, packages: str, loop: str) -> None:
    machine.use(loop)
    machine.env["OPENAI_API_KEY"] = "test"
    if packages == "no index":
        machine.env["PIP_INDEX_URL"] = NO_INDEX
    project = broken_project(machine.home / "project")
    machine.owns(project)
    with model_server(fixing) as chat:
        done = machine.run(*words(chat), "--workspace", str(project), "--apply", "--output",
                           "result.json")  # fmt: skip
    check_mended(machine.home, project, done)
    assert not machine.is_built


def test_without_an_index_programs_run_and_it_is_said_once(machine: Machine) -> None:
    machine.env["PIP_INDEX_URL"] = NO_INDEX
    first = machine.run("sandbox", "execute", machine.program("print(1)"))
    assert (first.code, first.stdout) == (0, "1\n"), first
    wait_for(lambda: not machine.builders(), 60)
    (failed,) = machine.home.rglob(".default.failed")
    noted = json.loads(failed.read_text())["at"]
    second = machine.run("sandbox", "execute", machine.program("print(2)"))
    assert second.stdout == "2\n"
    assert "the package index cannot be reached: [Errno 111]" in second.stderr
    assert "paracle template build default" in second.stderr
    third = machine.run("sandbox", "execute", machine.program("print(3)"))
    assert (third.stdout, "template" in third.stderr) == ("3\n", False), third
    wanting = machine.run("sandbox", "execute", machine.program(WANTING))
    assert wanting.code == 1 and "requests is not there" in wanting.stderr, wanting
    assert "No module named 'requests'" in wanting.stderr
    assert json.loads(failed.read_text())["at"] == noted, "it was not tried again"
    assert Path(failed).stat().st_uid == (machine.user or 0)


UNREACHED = "the package index cannot be reached: [Errno 111]"
MISSING = "requests is not there"
NO_MODULE = "No module named 'requests'"


def test_without_an_index_run_works_and_says_what_is_missing(machine: Machine) -> None:
    machine.env["PIP_INDEX_URL"] = NO_INDEX
    source = f"""
import json, paracle_sandbox as p
print(json.dumps([p.run(code) for code in ("print('first')", {WANTING!r})]))
"""
    process = machine.starts(source)
    out, err = process.communicate(timeout=120)
    first, wanting = json.loads(out)
    assert (first["success"], first["result"]["stdout"]) == (True, "first\n")
    assert not wanting["success"] and NO_MODULE in wanting["result"]["stderr"], wanting
    assert MISSING in err and UNREACHED in err, err


def test_without_an_index_the_service_is_ready(machine: Machine) -> None:
    machine.env.update(PIP_INDEX_URL=NO_INDEX, SANDBOX_API_PORT="0")
    log = machine.home / "log"
    with log.open("wb") as stderr, served(machine, stderr) as line:
        answer = curl(line)
        assert answer["success"] and answer["output"] == "42\n", answer
        wait_for(lambda: curl(ready_of(line)) == {"ready": True}, 60)
        answer = curl(with_code(line, WANTING))
        assert not answer["success"] and NO_MODULE in json.dumps(answer), answer
    assert MISSING in log.read_text() and UNREACHED in log.read_text(), log.read_text()


async def test_without_an_index_an_mcp_client_is_told(machine: Machine) -> None:
    machine.env["PIP_INDEX_URL"] = NO_INDEX
    log = machine.home / "log"
    arguments = ["-c", f'exec "$@" 2>{log}', "sh", *machine.argv("mcp")]
    server = StdioServerParameters(command="sh", args=arguments, env=machine.env)
    async with Client(server) as client:
        assert await call(client, "python_execute", code="print(6 * 7)") == "42\n"
        assert NO_MODULE in await call(client, "python_execute", code=WANTING)
    assert MISSING in log.read_text() and UNREACHED in log.read_text(), log.read_text()
