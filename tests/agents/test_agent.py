"""SandboxAgent over real HTTP, with native sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cli.paracle_cli import Cli, wait_for

pytest.importorskip("openai", reason="asks models: pip install '.[agents]'")
pytest.importorskip("anthropic", reason="asks models: pip install '.[agents]'")

from agents.model_server import Conversation, Script, Turn, model_server  # noqa: E402
from paracle_sandbox import Sandbox, SandboxError  # noqa: E402
from paracle_sandbox.agents import (  # noqa: E402
    Event,
    Limits,
    Options,
    SandboxAgent,
    SandboxManus,
    ToolCall,
)
from paracle_sandbox.tools import Tool, ToolResult  # noqa: E402
from paracle_sandbox.tools.schema import schema  # noqa: E402


@pytest.fixture(params=["openai", "anthropic"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def agent_over(
    script: Script, dialect: str = "openai", **options: Any
) -> AsyncIterator[tuple[SandboxAgent, Conversation]]:
    with model_server(script) as conversation:
        url = conversation.url + ("/v1" if dialect == "openai" else "")
        asked = Options(
            base_url=url, api_key="test", max_retries=options.pop("max_retries", 0),
            stream=options.pop("stream", True),
        )  # fmt: skip
        async with SandboxAgent("m", provider=dialect, options=asked, **options) as agent:
            yield agent, conversation


async def test_computes_and_answers(dialect: str) -> None:
    script = [Turn("I compute.", [("python_execute", {"code": "print(6 * 7)"})]), Turn("It is 42.")]
    async with agent_over(script, dialect) as (agent, conversation):
        result = await agent.run("What is 6 * 7?")
        assert result.success and result.text == "It is 42." and result.steps == 2
        assert conversation.tool_texts() == ["42\n"]
        assert (result.usage.input_tokens, result.usage.output_tokens) == (200, 20)
        assert agent.client.sandbox_id is not None
        first = conversation.requests[0]
        tools = [t.get("function", t)["name"] for t in first["tools"]]
        assert tools == [
            "python_execute", "sandbox_shell", "sandbox_files", "install_packages",
            "sandbox_vision",
        ]  # fmt: skip
    assert agent.client.sandbox_id is None


async def test_variables_stay_between_calls(dialect: str) -> None:
    script = [
        Turn(
            "", [("python_execute", {"code": "x = 20"}), ("sandbox_shell", {"command": "echo hi"})]
        ),
        Turn("", [("python_execute", {"code": "x + 1"})]),
        Turn("done"),
    ]
    async with agent_over(script, dialect) as (agent, conversation):
        assert (await agent.run("go")).success
        assert conversation.tool_texts() == ["(no output)", "hi\n", "21"]


async def test_events_stream(dialect: str) -> None:
    script = [Turn("Let me see.", [("sandbox_shell", {"command": "echo out"})]), Turn("The end.")]
    async with agent_over(script, dialect) as (agent, _):
        events = [event async for event in agent.stream("go")]
    kinds = [event.kind for event in events]
    assert kinds[0] == "step" and kinds[-1] == "end" and kinds.count("step") == 2
    assert "".join(e.text for e in events if e.kind == "text") == "Let me see.The end."
    assert kinds.count("text") > 2, "it comes in pieces"
    assert [e.text for e in events if e.kind == "tool_output"] == ["out\n"]
    call = next(e for e in events if e.kind == "tool_call")
    assert json.loads(call.data["arguments"]) == {"command": "echo out"}
    assert events[-1].data["status"] == "done"


async def test_answers_that_are_not_streamed(dialect: str) -> None:
    calls = [("sandbox_shell", {"command": "echo out"}), ("python_execute", {"code": "6 * 7"})]
    length = "length" if dialect == "openai" else "max_tokens"
    script = [Turn("Let me see.", calls), Turn("half", finish=length), Turn("The end.")]
    async with agent_over(script, dialect, stream=False) as (agent, conversation):
        events = [event async for event in agent.stream("go")]
        assert conversation.tool_texts() == ["out\n", "42"]
    assert not any(request["stream"] for request in conversation.requests)
    assert [e.text for e in events if e.kind == "text"] == ["Let me see.", "half", "The end."]
    end = events[-1].data
    assert end["status"] == "done" and events[-1].text == "The end.", end
    assert "cut off" in json.dumps(conversation.requests[-1])


WRONG_ANSWERS = {
    "no JSON": b"<html>busy</html>",
    "another API": b'{"answer": 42}',
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("wrong", WRONG_ANSWERS)
async def test_whole_answers_that_are_none(dialect: str, wrong: str) -> None:
    script = [Turn(raw=WRONG_ANSWERS[wrong])]
    async with agent_over(script, dialect, stream=False) as (agent, _):
        result = await asyncio.wait_for(agent.run("go"), 60)
    assert result.status == "error" and result.error, result


async def test_leaving_the_stream_stops_the_task() -> None:
    script = [Turn("", [("sandbox_shell", {"command": "echo on; exec sleep 1234"})])]
    async with agent_over(script) as (agent, _):
        stream = agent.stream("go")
        async for event in stream:
            if event.kind == "tool_output":
                break
        await stream.aclose()  # type: ignore[attr-defined]
        sandbox = await agent.client.sandbox()
        assert (await sandbox.execute("pgrep -x sleep"))["exit_code"] == 1


@pytest.mark.parametrize("how", ["cancel", "task"])
async def test_cancelled_in_the_middle_of_a_step(dialect: str, how: str) -> None:
    script = [Turn("", [("sandbox_shell", {"command": "echo on; sleep 1234"})])]
    started = asyncio.Event()

    def on_event(event: Event) -> None:
        if event.kind == "tool_output":
            started.set()

    async with agent_over(script, dialect) as (agent, _):
        work = asyncio.create_task(agent.run("go", on_event=on_event))
        await asyncio.wait_for(started.wait(), 30)
        sandbox = await agent.client.sandbox()
        if how == "cancel":
            agent.cancel()
            assert (await work).status == "cancelled"
        else:
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
        assert (await sandbox.execute("pgrep -x sleep"))["exit_code"] == 1, "the tree is gone"
    assert not sandbox.is_running


async def test_timeout_of_the_whole_task() -> None:
    script = [Turn("", [("sandbox_shell", {"command": "sleep 1234"})])]
    async with agent_over(script) as (agent, _):
        result = await agent.run("go", timeout=1.5)
    assert result.status == "timeout" and not result.success
    assert agent.client.sandbox_id is None


async def test_step_limit(dialect: str) -> None:
    def script(request: dict[str, Any]) -> Turn:
        return Turn("", [("sandbox_shell", {"command": f"echo {len(request['messages'])}"})])

    async with agent_over(script, dialect, limits=Limits(max_steps=3)) as (agent, conversation):
        result = await agent.run("never done")
    assert result.status == "step_limit" and result.steps == 3 and not result.success
    assert len(conversation.requests) == 3


async def test_cost_limit() -> None:
    script = [Turn("", [("sandbox_shell", {"command": "true"})], tokens=(1_000_000, 100_000))]
    limits = Limits(max_cost=5.0, price=(3.0, 15.0))
    async with agent_over(script, limits=limits) as (agent, _):
        result = await agent.run("dear")
    assert result.status == "cost_limit" and result.steps == 2
    assert result.cost == pytest.approx(9.0)


async def test_cost_of_an_endpoint_that_does_not_count() -> None:
    notices: list[str] = []

    def on_event(event: Event) -> None:
        notices.extend([event.text] if event.kind == "notice" else [])

    script = [
        Turn(f"{n} " + "long " * 1000, [("sandbox_shell", {"command": f"echo {n}"})], tokens=(0, 0))
        for n in range(20)
    ]
    limits = Limits(max_cost=0.1, price=(3.0, 15.0))
    async with agent_over(script, limits=limits) as (agent, _):
        result = await agent.run("dear", on_event=on_event)
    assert result.status == "cost_limit" and 1 < result.steps < 8
    assert notices == ["The endpoint does not count tokens; cost is estimated."]


def test_limits_that_could_not_be_kept_are_refused() -> None:
    with pytest.raises(ValueError, match="price"):
        Limits(max_cost=1.0)
    with pytest.raises(ValueError, match="max_steps"):
        Limits(max_steps=0)


async def test_model_that_loops(dialect: str) -> None:
    script = [Turn("Again.", [("sandbox_shell", {"command": "ls"})])]
    async with agent_over(script, dialect) as (agent, conversation):
        result = await agent.run("go")
    assert result.status == "loop" and result.steps == 6
    assert "exactly this 3 times" in json.dumps(conversation.requests[-1])


@pytest.mark.parametrize("broken", ['{"code": "print(1)"', "", "[1, 2]", '{"code": 5}', "nonsense"])
async def test_broken_arguments_are_explained(dialect: str, broken: str) -> None:
    script = [
        Turn("", [("python_execute", broken)]),
        Turn("", [("python_execute", {"code": "print('mended')"})]),
        Turn("ok"),
    ]
    async with agent_over(script, dialect) as (agent, conversation):
        assert (await agent.run("go")).success
        first, second = conversation.tool_texts()
    assert second == "mended\n"
    assert any(
        word in first for word in ("not valid JSON", "missing", "one JSON object", "must be")
    )


async def test_call_that_was_cut_off(dialect: str) -> None:
    length = "length" if dialect == "openai" else "max_tokens"
    half = '{"action": "create_file", "file_path": "f", "file_contents": "aaa'
    script = [Turn("", [("sandbox_files", half)], finish=length), Turn("ok")]
    async with agent_over(script, dialect) as (agent, conversation):
        assert (await agent.run("go")).success
        assert "not valid JSON" in conversation.tool_texts()[0]
    assert "in smaller parts" in json.dumps(conversation.requests[-1]["messages"][-1])


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m",
            "choices": choices}  # fmt: skip
    return f"data: {json.dumps(body)}\n\n".encode()


CALL = {"name": "sandbox_shell", "arguments": '{"command": "echo hi"}'}
PECULIAR = {
    "no index": {"id": "a", "type": "function", "function": CALL},
    "an object": {"index": 0, "id": "a",
                  "function": {"name": "sandbox_shell", "arguments": {"command": "echo hi"}}},
    "no id": {"index": 0, "function": CALL},
    "a far index": {"index": 10**9, "id": "a", "function": CALL},
}  # fmt: skip


@pytest.mark.parametrize("call", PECULIAR)
async def test_peculiar_endpoints(call: str) -> None:
    """Some endpoints deviate from OpenAI's API, and send neither usage nor the last mark."""
    asks = chunk({"role": "assistant", "content": None, "tool_calls": [PECULIAR[call]]})
    done = chunk({"reasoning_content": "hm"}) + chunk({"content": "done"})
    async with agent_over([Turn(raw=asks), Turn(raw=done)]) as (agent, conversation):
        result = await agent.run("go")
        assert result.success and result.text == "done", result
        assert conversation.tool_texts() == ["hi\n"]


@pytest.mark.parametrize("pieces", ["whole", "in pieces"])
async def test_calls_that_share_an_index(pieces: str) -> None:
    """Told apart by their ids; but an id for every piece of a call does not make it many."""

    def call(id: str | None, name: str | None, arguments: str) -> bytes:
        function = {"name": name, "arguments": arguments}
        return chunk({"tool_calls": [{"index": 0, "id": id, "function": function}]})

    one, two = '{"command": "echo one"}', '{"command": "echo two"}'
    if pieces == "whole":
        asks = call("a", "sandbox_shell", one) + call("b", "sandbox_shell", two)
    else:
        asks = call("a", "sandbox_shell", one[:9]) + call("a2", None, one[9:])
        asks += call("b", "sandbox_shell", two[:9]) + call(None, None, two[9:])
    async with agent_over([Turn(raw=asks), Turn("done")]) as (agent, conversation):
        assert (await agent.run("go")).success
        assert conversation.tool_texts() == ["one\n", "two\n"]


async def test_unknown_tool_and_failing_program(dialect: str) -> None:
    script = [
        Turn("", [("fly", {}), ("sandbox_shell", {"command": "exit 7"})]),
        Turn("", [("sandbox_shell", {"command": "sleep 60", "timeout": 0.3})]),
        Turn("ok"),
    ]
    async with agent_over(script, dialect) as (agent, conversation):
        assert (await agent.run("go")).success
        unknown, failed, slow = conversation.tool_texts()
    assert "no tool 'fly'" in unknown and "exit code 7" in failed and "timed out" in slow


@pytest.mark.parametrize(
    ("kind", "content", "sent_as"),
    [
        ("png", "bytes([137]) + b'PNG\\r\\n'", "iVBORw0K"),
        ("jpeg", "bytes([255, 216, 255])", "/9j/"),
    ],
)
async def test_pictures_reach_the_model(
    dialect: str, kind: str, content: str, sent_as: str
) -> None:
    code = f"class P:\n    def _repr_{kind}_(self): return {content}\nP()"
    script = [Turn("", [("python_execute", {"code": code})]), Turn("I see.")]
    async with agent_over(script, dialect) as (agent, conversation):
        assert (await agent.run("draw")).success
    sent = json.dumps(conversation.requests[-1]["messages"])
    assert sent_as in sent and f"image/{kind}" in sent


async def test_empty_and_cut_off_answers(dialect: str) -> None:
    length = "length" if dialect == "openai" else "max_tokens"
    script = [Turn(""), Turn("half", finish=length), Turn("whole")]
    async with agent_over(script, dialect) as (agent, conversation):
        result = await agent.run("go")
    assert result.success and result.text == "whole"
    assert "cut off" in json.dumps(conversation.requests[-1])


async def test_endpoint_that_fails(dialect: str) -> None:
    async with agent_over([Turn(status=401)], dialect) as (agent, _):
        result = await agent.run("go")
    assert result.status == "error" and result.error and "did not answer" in result.error


async def test_endpoint_that_recovers(dialect: str) -> None:
    script = [Turn(status=500), Turn("back")]
    async with agent_over(script, dialect, max_retries=2) as (agent, _):
        result = await agent.run("go")
    assert result.success and result.text == "back" and result.steps == 1


BROKEN = {
    "cut off in the middle": Turn("half an answer", cut_after=2),
    "no JSON": Turn(raw=b"data: {nonsense\n\n"),
    "no events": Turn(raw=b"<html>busy</html>"),
    "nothing": Turn(raw=b""),
    "an error as an event": Turn(
        raw=b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", '
        b'"message": "busy"}}\n\n'
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_endpoint_that_breaks_off(dialect: str, broken: str) -> None:
    """However it fails, the task ends with a result, and the sandbox is removed."""
    script = [Turn("", [("sandbox_shell", {"command": "true"})]), BROKEN[broken]]
    async with agent_over(script, dialect) as (agent, conversation):
        result = await asyncio.wait_for(agent.run("go"), 60)
    assert result.status == "error" and result.error, result
    assert len(conversation.requests) <= 4


async def test_model_that_breaks_off_is_asked_again(dialect: str) -> None:
    notices: list[str] = []

    def on_event(event: Event) -> None:
        notices.extend([event.text] if event.kind == "notice" else [])

    script = [Turn("half an ans", cut_after=3), Turn("a whole answer")]
    async with agent_over(script, dialect) as (agent, _):
        result = await agent.run("go", on_event=on_event)
    assert result.success and result.text == "a whole answer" and result.steps == 1
    assert len(notices) == 1 and "asked again" in notices[0]


async def test_endpoint_that_stalls(dialect: str) -> None:
    """Cancelled while the model thinks, and a limit of the whole task meanwhile."""
    go = threading.Event()
    asked = threading.Event()

    def stall() -> None:
        asked.set()
        go.wait(60)

    try:
        async with agent_over([Turn("late", before=stall)], dialect) as (agent, _):
            work = asyncio.create_task(agent.run("go"))
            await asyncio.to_thread(asked.wait, 30)
            agent.cancel()
            assert (await asyncio.wait_for(work, 10)).status == "cancelled"
            assert (await agent.run("go", timeout=0.3)).status == "timeout"
    finally:
        go.set()


async def test_one_task_at_a_time() -> None:
    script = [Turn("", [("sandbox_shell", {"command": "echo on; sleep 1234"})])]
    started = asyncio.Event()

    def on_event(event: Event) -> None:
        if event.kind == "tool_output":
            started.set()

    async with agent_over(script) as (agent, _):
        work = asyncio.create_task(agent.run("go", on_event=on_event))
        await asyncio.wait_for(started.wait(), 30)
        with pytest.raises(SandboxError, match="at work"):
            await agent.run("more", timeout=5)
        agent.cancel()
        assert (await work).status == "cancelled"


async def test_review(dialect: str) -> None:
    asked: list[str] = []

    async def approve(call: ToolCall) -> bool | str:
        asked.append(call.name)
        return True if len(asked) == 2 else "not on my watch"

    script = [
        Turn("", [("sandbox_shell", {"command": "rm -rf /"})]),
        Turn("", [("sandbox_shell", {"command": "echo fine"})]),
        Turn("ok"),
    ]
    async with agent_over(script, dialect, approve=approve) as (agent, conversation):
        assert (await agent.run("go")).success
        denied, allowed = conversation.tool_texts()
    assert "did not allow" in denied and "not on my watch" in denied and allowed == "fine\n"
    assert asked == ["sandbox_shell", "sandbox_shell"]


async def test_sandbox_that_is_lost_is_made_again() -> None:
    """Once between two calls, once in the middle of one."""
    places: list[Sandbox] = []
    notices: list[str] = []
    losses: list[asyncio.Task[None]] = []

    async def furnish(sandbox: Sandbox) -> None:
        places.append(sandbox)
        await sandbox.write_file("given.txt", f"place {len(places)}\n")

    def on_event(event: Event) -> None:
        if event.kind == "notice":
            notices.append(event.text)
        between = event.kind == "tool_result" and len(places) == 1
        in_the_middle = event.kind == "tool_output" and "place 2" in event.text
        if between or in_the_middle:
            losses.append(asyncio.create_task(places[-1].condemn("the test wants it so")))

    command = "cat given.txt; touch mine; grep -q 2 given.txt && sleep 1234"
    script = [
        Turn("", [("sandbox_shell", {"command": "touch mine"})]),
        Turn("", [("sandbox_shell", {"command": command})]),
        Turn("ok"),
    ]
    async with agent_over(script, furnish=furnish) as (agent, conversation):
        result = await agent.run("go", on_event=on_event)
        await asyncio.gather(*losses)
        first, second = conversation.tool_texts()
    assert result.success and len(places) == 3
    assert first == "(no output)"
    assert second.startswith("place 3\n") and "was replaced" in second
    assert len(notices) == 1 and "made again" in notices[0]


async def test_execute_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('from a file', os.getcwd())")
    agent = await SandboxManus.create()
    try:
        assert (await agent.execute_code("print(42)"))["stdout"] == "42\n"
        assert (await agent.execute_code(script))["stdout"] == "from a file /workspace\n"
    finally:
        await agent.cleanup()
        await agent.cleanup()
    assert agent.client.sandbox_id is None


def server_file(folder: Path) -> Path:
    path = folder / "mcp.json"
    server = {"command": sys.executable, "args": ["-m", "paracle_sandbox", "mcp"],
              "env": {"PYTHONPATH": str(Path(__file__).parents[2] / "src"),
                      "PARACLE_STATE_DIR": str(folder / "state"),
                      "PARACLE_DATA_DIR": str(folder / "data"),
                      "PARACLE_TEMPLATE_BUILD": "0"}}  # fmt: skip
    path.write_text(json.dumps({"mcpServers": {"other place": server}}))
    return path


async def test_mcp_server_as_tools(tmp_path: Path, dialect: str) -> None:
    name = "mcp_other_place_python_execute"
    script = [Turn("", [(name, {"code": "print('elsewhere')"})]), Turn("ok")]
    async with agent_over(script, dialect, mcp_servers=server_file(tmp_path)) as (agent, chat):
        assert (await agent.run("go")).success
        assert chat.tool_texts() == ["elsewhere\n"]
        await agent.disconnect_mcp_server("other place")
        assert agent.tools.find(name) is None


MCP_KEY = "the-key-of-this-client"


@pytest.mark.parametrize("key", [MCP_KEY, "wrong"])
async def test_mcp_server_over_http_with_a_key(tmp_path: Path, key: str) -> None:
    cli = Cli(tmp_path, PARACLE_MCP_KEY=MCP_KEY)
    server = cli.start("mcp", "--http", "--port", "0")
    try:
        assert server.stderr is not None
        url = server.stderr.readline().decode().split()[-1]
        spec = {"far": {"type": "http", "url": url, "headers": {"Authorization": f"Bearer {key}"}}}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": spec}))
        script = [Turn("", [("mcp_far_sandbox_shell", {"command": "echo far"})]), Turn("ok")]
        async with agent_over(script, mcp_servers=tmp_path / "mcp.json") as (agent, chat):
            if key == MCP_KEY:
                assert (await agent.run("go")).success
                assert chat.tool_texts() == ["far\n"]
            else:
                with pytest.raises(SandboxError, match="'far' cannot be used"):
                    await agent.run("go")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
    wait_for(lambda: not cli.remains())


async def test_mcp_server_that_dies_is_told_to_the_model(tmp_path: Path) -> None:
    name = "mcp_other_place_python_execute"
    script = [
        Turn("", [(name, {"code": "print(1)"})]),
        Turn("", [("kill_it", {})]),
        Turn("", [(name, {"code": "print(2)"})]),
        Turn("", [("sandbox_shell", {"command": "echo own"})]),
        Turn("ok"),
    ]
    file = server_file(tmp_path)

    class KillIt(Adder):
        name = "kill_it"
        parameters = schema([])

        async def run(self) -> ToolResult:  # type: ignore[override]
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    environment = (process / "environ").read_bytes()
                    ours = str(tmp_path).encode() in environment
                    if ours and words[1:4] == [b"-m", b"paracle_sandbox", b"mcp"]:
                        os.kill(int(process.name), signal.SIGKILL)
            return ToolResult("killed")

    async with agent_over(script, mcp_servers=file) as (agent, chat):
        agent.tools.add(KillIt())
        result = await asyncio.wait_for(agent.run("go"), 90)
        assert result.success, result
        first, _, lost, own = chat.tool_texts()
    assert first == "1\n" and "failed" in lost and own == "own\n"


async def test_mcp_server_that_is_not_there(tmp_path: Path) -> None:
    broken = {"x": {"command": str(tmp_path / "none")}}
    async with agent_over([Turn("ok")], mcp_servers=broken) as (agent, _):
        with pytest.raises(SandboxError, match="'x' cannot be used"):
            await agent.run("go")


class Adder(Tool):
    name = "add"
    description = "Adds."
    parameters = schema(["a", "b"], a={"type": "number"}, b={"type": "number"})

    async def run(self, a: float, b: float) -> ToolResult:
        return ToolResult(str(a + b))


async def test_own_tools_need_no_sandbox(dialect: str) -> None:
    script = [Turn("", [("add", {"a": 1, "b": "2"})]), Turn("three")]
    async with agent_over(script, dialect, tools=[Adder()]) as (agent, conversation):
        assert (await agent.run("go")).success
        assert conversation.tool_texts() == ["3.0"]
        assert agent.client.sandbox_id is None


class Broken(Adder):
    async def run(self, a: float, b: float) -> ToolResult:
        raise RuntimeError("out of order")


async def test_own_tool_that_raises_is_told_to_the_model(dialect: str) -> None:
    script = [Turn("", [("add", {"a": 1, "b": 2})]), Turn("then not")]
    async with agent_over(script, dialect, tools=[Broken()]) as (agent, conversation):
        assert (await agent.run("go")).success
        assert "out of order" in conversation.tool_texts()[0]


@contextmanager
def unset(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    for name in names:
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.mark.parametrize("provider", ["openai", "anthropic", "google", "mistral", "groq"])
async def test_missing_key_is_said(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with unset(monkeypatch, f"{provider.upper()}_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        async with SandboxAgent("m", provider=provider) as agent:
            try:
                result = await agent.run("go")
            except SandboxError as error:
                assert "KEY" in str(error).upper()
            else:
                assert result.status == "error" and result.error and "key" in result.error.lower()
