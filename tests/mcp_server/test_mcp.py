"""``paracle mcp`` as clients of the official SDK meet it, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.paracle_cli import Cli, end, wait_for

mcp = pytest.importorskip("mcp", reason="talks to the server: pip install '.[mcp]'")
from mcp import Client, StdioServerParameters  # noqa: E402
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

PNG = """
class P:
    def _repr_png_(self):
        return bytes([137]) + b"PNG\\r\\n"
P()
"""


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    wait_for(lambda: not cli.remains())


@asynccontextmanager
async def over_stdio(cli: Cli, mode: str = "auto") -> AsyncIterator[Client]:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "paracle_sandbox", "mcp"], env=cli.env
    )
    async with Client(command, mode=mode) as client:
        yield client


@pytest.fixture
def url(cli: Cli) -> Iterator[str]:
    process = cli.start("mcp", "--http", "--port", "0")
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        end(process)


def text(result: Any) -> str:
    return str(result.content[0].text)


async def every_tool(client: Client) -> None:
    names = {tool.name for tool in (await client.list_tools()).tools}
    assert names == {
        "python_execute", "python_session", "sandbox_shell", "sandbox_files", "install_packages",
        "sandbox_vision", "list_sandboxes", "create_sandbox", "destroy_sandbox",
    }  # fmt: skip
    result = await client.call_tool("python_execute", {"code": "print(6 * 7)"})
    assert text(result) == "42\n" and not result.is_error
    assert result.structured_content is not None and result.structured_content["exit_code"] == 0
    await client.call_tool("python_session", {"code": "x = 1"})
    assert text(await client.call_tool("python_session", {"code": "x + 1"})) == "2"
    picture = await client.call_tool("python_session", {"code": PNG})
    assert picture.content[1].mime_type == "image/png"
    await client.call_tool(
        "sandbox_files", {"action": "create_file", "file_path": "a.txt", "file_contents": "hello"}
    )
    assert text(await client.call_tool("sandbox_shell", {"command": "cat a.txt"})) == "hello"
    failed = await client.call_tool("sandbox_shell", {"command": "exit 3"})
    assert failed.is_error and "exit code 3" in text(failed)
    assert (await client.call_tool("install_packages", {"packages": ["-r", "x"]})).is_error
    assert "main" in text(await client.call_tool("list_sandboxes", {}))
    made = await client.call_tool("create_sandbox", {"name": "other"})
    assert made.structured_content == {"sandbox": "other"}
    apart = await client.call_tool("sandbox_shell", {"command": "ls", "sandbox": "other"})
    assert text(apart) == "(no output)"
    assert not (await client.call_tool("destroy_sandbox", {"sandbox": "other"})).is_error
    gone = await client.call_tool("sandbox_shell", {"command": "ls", "sandbox": "other"})
    assert gone.is_error and "no sandbox 'other'" in text(gone)
    assert (await client.call_tool("no_such_tool", {})).is_error
    for wrong in ({"sandbox": ["x"], "command": "ls"}, {"sandbox": 5, "command": "ls"}):
        assert "must be text" in text(await client.call_tool("sandbox_shell", wrong))
    assert "must be text" in text(await client.call_tool("create_sandbox", {"name": {}}))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_every_tool_over_stdio(cli: Cli, mode: str) -> None:
    async with over_stdio(cli, mode) as client:
        await every_tool(client)


async def test_every_tool_in_an_http_session(url: str) -> None:
    async with Client(url, mode="legacy") as client:
        await every_tool(client)


async def test_http_clients_do_not_see_each_other(url: str, cli: Cli) -> None:
    async with Client(url, mode="legacy") as one, Client(url, mode="legacy") as other:
        await one.call_tool("sandbox_shell", {"command": "echo mine > f"})
        assert (await other.call_tool("sandbox_shell", {"command": "cat f"})).is_error
        assert text(await one.call_tool("sandbox_shell", {"command": "cat f"})) == "mine\n"
    wait_for(lambda: not sandboxes(cli))


def sandboxes(cli: Cli) -> list[Any]:
    listed: list[Any] = cli.run("sandbox", "list", "--json").json
    return listed


async def test_http_without_a_session(url: str, cli: Cli) -> None:
    """The newer protocol: one sandbox for a call, or a named one for several."""
    async with Client(url, mode="2026-07-28") as client:
        await client.call_tool("sandbox_shell", {"command": "echo 1 > f"})
        assert (await client.call_tool("sandbox_shell", {"command": "cat f"})).is_error
        assert not sandboxes(cli)
        made = await client.call_tool("create_sandbox", {})
        assert made.structured_content is not None
        there = {"sandbox": made.structured_content["sandbox"]}
        await client.call_tool("python_session", {"code": "x = 1", **there})
        assert text(await client.call_tool("python_session", {"code": "x", **there})) == "1"
        assert text(await client.call_tool("list_sandboxes", {})).startswith("You have no sandbox")
        guessed = await client.call_tool("sandbox_shell", {"command": "ls", "sandbox": "x"})
        assert guessed.is_error and there["sandbox"] not in ascii(guessed.structured_content)
        assert not (await client.call_tool("destroy_sandbox", there)).is_error
    assert not sandboxes(cli)


def tool_call(url: str, tool: str, arguments: dict[str, Any], **headers: str) -> tuple[int, str]:
    """A call of the newer protocol as raw HTTP: status and body."""
    version = "2026-07-28"
    meta = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": tool, "arguments": arguments, "_meta": meta}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    sent = {
        "content-type": "application/json", "accept": "application/json, text/event-stream",
        "mcp-protocol-version": version, "mcp-method": "tools/call", "mcp-name": tool, **headers,
    }  # fmt: skip
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_no_client_learns_the_name_of_anothers_sandbox(url: str, cli: Cli) -> None:
    """V1: neither with a session, nor without, nor under a session's id that it made up."""
    async with Client(url, mode="2026-07-28") as one, Client(url, mode="2026-07-28") as other:
        made = await one.call_tool("create_sandbox", {})
        assert made.structured_content is not None
        there = {"sandbox": made.structured_content["sandbox"]}
        await one.call_tool("sandbox_shell", {"command": "echo mine > f", **there})
        [record] = sandboxes(cli)
        secrets = (there["sandbox"], record["sandbox_id"])
        guesses: list[tuple[str, dict[str, Any]]] = [
            ("sandbox_shell", {"command": "cat f"}),
            ("sandbox_shell", {"command": "cat f", "sandbox": "x"}),
            ("sandbox_shell", {"command": "cat f", "sandbox": "sandbox-1"}),
            ("list_sandboxes", {}),
            ("destroy_sandbox", {}),
            ("destroy_sandbox", {"sandbox": "x"}),
        ]
        heard = [ascii(await other.call_tool(tool, given)) for tool, given in guesses]
        for session in ("forged", "stdio", record["sandbox_id"], "0" * 32):
            for tool, given in guesses:
                _, answer = await asyncio.to_thread(
                    tool_call, url, tool, given, **{"mcp-session-id": session}
                )
                assert "jsonrpc" in answer, answer
                heard.append(answer)
        assert not [text for text in heard if any(secret in text for secret in secrets)]
        assert not [text for text in heard if "mine" in text]
        assert [one["sandbox_id"] for one in sandboxes(cli)] == [record["sandbox_id"]]
        assert text(await one.call_tool("sandbox_shell", {"command": "cat f", **there})) == "mine\n"


async def test_a_made_up_session_holds_nothing(url: str, cli: Cli) -> None:
    """What two requests with one invented id make is not kept for that id, nor counted together."""
    forged = {"mcp-session-id": "invented"}

    def ask(tool: str, **given: Any) -> str:
        return tool_call(url, tool, given, **forged)[1]

    assert "no output" in await asyncio.to_thread(ask, "sandbox_shell", command="echo 1 > f")
    assert "No such file" in await asyncio.to_thread(ask, "sandbox_shell", command="cat f")
    assert not sandboxes(cli)
    made = json.loads((await asyncio.to_thread(ask, "create_sandbox")).split("data: ")[-1])
    assert len(made["result"]["structuredContent"]["sandbox"]) == 32, made
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE", headers=forged))
    with caught.value:
        assert caught.value.code == 404
    assert len(sandboxes(cli)) == 1


async def test_concurrent_calls(cli: Cli) -> None:
    async with over_stdio(cli) as client:
        calls = (client.call_tool("python_execute", {"code": f"print({i})"}) for i in range(8))
        assert [text(r) for r in await asyncio.gather(*calls)] == [f"{i}\n" for i in range(8)]


async def test_progress(cli: Cli) -> None:
    seen: list[str | None] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    async with over_stdio(cli) as client:
        code = "print('step 0', flush=True)"
        await client.call_tool("python_execute", {"code": code}, progress_callback=on_progress)
        await client.call_tool("list_sandboxes", {})
    assert seen == ["step 0"]


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_cancelled_call_is_stopped(cli: Cli, transport: str, request: Any) -> None:
    async with AsyncExitStack() as stack:
        if transport == "stdio":
            client = await stack.enter_async_context(over_stdio(cli))
        else:
            address = request.getfixturevalue("url")
            client = await stack.enter_async_context(Client(address, mode="legacy"))
        started = asyncio.Event()

        async def on_progress(*_: Any) -> None:
            started.set()

        code = "import subprocess\nprint('on', flush=True)\nsubprocess.run(['sleep', '1234'])"
        call = asyncio.create_task(
            client.call_tool("python_execute", {"code": code}, progress_callback=on_progress)
        )
        await asyncio.wait_for(started.wait(), 30)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        for _ in range(200):
            if text(
                await client.call_tool("sandbox_shell", {"command": "pgrep -x sleep; true"})
            ) == ("(no output)"):
                return
            await asyncio.sleep(0.05)
        pytest.fail("what was cancelled still runs")


async def test_killed_stdio_client_leaves_nothing(cli: Cli) -> None:
    client = """
import asyncio, sys
from mcp import Client, StdioServerParameters
async def main():
    server = StdioServerParameters(command=sys.executable, args=["-m", "paracle_sandbox", "mcp"],
                                   env=dict(__import__("os").environ))
    async with Client(server) as client:
        await client.call_tool("sandbox_shell", {"command": "sleep 1000", "blocking": False})
        print("ready", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", client], env=cli.env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert cli.records()
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not cli.remains())
    finally:
        process.kill()
        process.communicate()


async def test_http_client_that_vanishes(url: str, cli: Cli) -> None:
    """It says nothing on its way out: the stream it listened on breaks."""
    transport = streamable_http_client(url, terminate_on_close=False)
    async with Client(transport, mode="legacy") as client:
        await client.call_tool("sandbox_shell", {"command": "true"})
        assert sandboxes(cli)
    wait_for(lambda: not sandboxes(cli), 60)


async def test_http_client_killed_in_the_middle_of_a_call(url: str, cli: Cli) -> None:
    client = f"""
import asyncio
from mcp import Client
async def on_progress(*_): print("running", flush=True)
async def main():
    async with Client({url!r}, mode="legacy") as client:
        await client.call_tool("sandbox_shell", {{"command": "echo on; exec sleep 4321"}},
                               progress_callback=on_progress)
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", client], env=cli.env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        assert sandboxes(cli)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: not sandboxes(cli), 60)
    finally:
        process.kill()
        process.communicate()


def asked(url: str, **headers: str) -> int:
    """The status of an initialisation with these headers."""
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize",
            "params": {"protocolVersion": "2025-06-18", "capabilities": {},
                       "clientInfo": {"name": "t", "version": "1"}}}  # fmt: skip
    sent = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    request = urllib.request.Request(url, json.dumps(body).encode(), {**sent, **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_pages_of_others_are_turned_away(url: str) -> None:
    """A browser on this machine must not be a way in: neither by its page's origin, nor by a name
    that somebody points here."""
    assert asked(url) == 200
    port = url.split(":")[2].split("/")[0]
    assert asked(url, Origin=f"http://127.0.0.1:{port}") == 200
    assert asked(url, Origin="https://evil.example") == 403
    assert asked(url, Origin="null") == 403
    assert asked(url, Host="evil.example") == 421
    assert asked(url, Host=f"evil.example:{port}") == 421


PNG_FILE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
)


async def test_pictures_of_the_sandbox_are_images(cli: Cli) -> None:
    code = f"import base64; open('p.png', 'wb').write(base64.b64decode('{PNG_FILE}'))"
    picture = (
        f"import base64\ndata = base64.b64decode('{PNG_FILE}')\n"
        "class P:\n    def _repr_png_(self): return data\ndisplay(P(), P())"
    )
    async with over_stdio(cli) as client:
        await client.call_tool("python_execute", {"code": code})
        seen = await client.call_tool("sandbox_vision", {"file_path": "p.png"})
        assert seen.content[1].type == "image" and seen.content[1].data == PNG_FILE
        shown = await client.call_tool("python_session", {"code": picture})
        assert [part.type for part in shown.content] == ["text", "image", "image"]


async def test_stateful_python_over_the_protocol(cli: Cli) -> None:
    """Interrupted by its time, it keeps its variables; told to, it forgets them."""
    async with over_stdio(cli) as client:

        async def cell(code: str, **more: Any) -> Any:
            return await client.call_tool("python_session", {"code": code, **more})

        await cell("x = 5")
        late = await cell("while True: pass", timeout=1)
        assert late.is_error and "still there" in text(late)
        assert text(await cell("x")) == "5"
        refused = await cell("input('who? ')")
        assert refused.is_error and "nobody can answer" in text(refused)
        assert len(text(await cell("list(range(10**6))"))) < 50_000
        assert "NameError" in text(await cell("x", reset=True))


KEYS = ("the-key-of-one-client", "the-key-of-another-one")


@contextmanager
def with_keys(cli: Cli) -> Iterator[str]:
    """Its address."""
    cli.env["PARACLE_MCP_KEY"] = " ".join(KEYS)
    process = cli.start("mcp", "--http", "--port", "0")
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline().decode())
        assert found
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_http_key(cli: Cli) -> None:
    with with_keys(cli) as url:
        assert asked(url) == 401
        assert asked(url, Authorization="Bearer another") == 401
        assert [asked(url, Authorization=f"Bearer {key}") for key in KEYS] == [200, 200]


def test_who_guesses_http_keys_has_to_wait(cli: Cli) -> None:
    """The others have not to: those of an address that comes through a proxy which is named, and
    those whose key was right from there before."""
    cli.env["SANDBOX_TRUSTED_PROXIES"] = "127.0.0.1"

    def of(address: str, key: str) -> int:
        return asked(url, Authorization=f"Bearer {key}", **{"X-Forwarded-For": address})

    with with_keys(cli) as url:
        assert of("192.0.2.1", KEYS[0]) == 200
        assert [of("192.0.2.1", "one that is set wrong") for _ in range(3)] == [401] * 3
        guesses = [of("192.0.2.1", f"guess {number}") for number in range(60)]
        assert guesses == [401] * 59 + [429]
        assert of("192.0.2.1", KEYS[1]) == 429, "not even a right guess is told"
        assert of("192.0.2.1", KEYS[0]) == 200
        assert of("192.0.2.2", KEYS[1]) == 200


def test_open_address_needs_a_key(cli: Cli) -> None:
    done = cli.run("mcp", "--http", "--host", "0.0.0.0", "--port", "0")
    assert done.code == 3 and "PARACLE_MCP_KEY" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_key_is_one_that_nobody_guesses(cli: Cli, host: str) -> None:
    cli.env["PARACLE_MCP_KEY"] = f"{KEYS[0]} s3cret"
    done = cli.run("mcp", "--http", "--host", host, "--port", "0")
    assert done.code != 0 and "PARACLE_MCP_KEY is too weak" in done.stderr


def test_a_body_with_too_much_in_it_is_refused(url: str) -> None:
    sent = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    for body in (b"[" + b"0," * 1_000_000 + b"0]", b'{"x": "' + b"x" * (5 << 20) + b'"}'):
        try:
            urllib.request.urlopen(urllib.request.Request(url, body, sent), timeout=60)
        except urllib.error.HTTPError as error:
            with error:
                assert error.code == 413
        except (BrokenPipeError, ConnectionResetError, urllib.error.URLError):
            pass  # it hung up before it had all
        else:
            pytest.fail("it was taken")


def test_missing_sdk_names_the_command(cli: Cli) -> None:
    (cli.home / "mcp.py").write_text("raise ModuleNotFoundError(\"No module\", name='mcp')\n")
    cli.env["PYTHONPATH"] = f"{cli.home}:{cli.env['PYTHONPATH']}"
    done = cli.run("mcp")
    assert done.code == 3 and "pip install '.[mcp]'" in done.stderr
