"""The audit log has what each agent did. An agent that breaks limits or is stopped ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cli.paracle_cli import Cli, end, wait_for

pytest.importorskip("openai", reason="asks models: pip install '.[agents]'")

from agents.broken_project import words  # noqa: E402
from agents.model_server import Turn, model_server  # noqa: E402
from paracle_sandbox.agents import Limits, Options, SandboxAgent  # noqa: E402
from paracle_sandbox.audit.log import AuditLog, read, verify  # noqa: E402


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path, OPENAI_API_KEY="test")
    yield cli
    wait_for(lambda: not cli.remains())


def own_agent(cli: Cli, name: str) -> None:
    folder = cli.home / ".config/paracle/agents"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"You are {name}.\n")


def audited(cli: Cli, *flags: str) -> list[dict[str, Any]]:
    done = cli.run("agents", "audit", *flags, "--json")
    assert done.code == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_call_is_written_down_by_agent(cli: Cli) -> None:
    own_agent(cli, "clerk")
    turns = [
        Turn("", [("sandbox_shell", {"command": "echo fine"})]),
        Turn("", [("sandbox_shell", {"command": "mkfs.none /dev/sda"})]),
        Turn("", [("sandbox_files", {"action": "read_file", "path": "../../etc/shadow"})]),
        Turn("", [("sandbox_shell", {"command": "exit 3"})]),
        Turn("ok"),
    ]
    assert audited(cli) == []
    with model_server(turns) as chat:
        asked = words(chat)
        asked[2] = "clerk"
        assert cli.run(*asked).code == 0
        assert cli.run(*words(chat)).code == 0
    lines = audited(cli, "clerk")
    assert [line["event"] for line in lines if line["event"] != "security"] == [
        "task", "tool_call", "tool_call", "tool_call", "tool_call", "end",
    ]  # fmt: skip
    calls = [line for line in lines if line["event"] == "tool_call"]
    assert [call["outcome"] for call in calls] == ["ok", "failed", "file", "failed"]
    assert calls[0]["arguments"] == '{"command": "echo fine"}' and calls[0]["sandbox_id"]
    kinds = {line["kind"] for line in audited(cli, "clerk", "--event", "security")}
    assert kinds == {"path_escape"}
    assert {line["agent"] for line in audited(cli)} == {"clerk", "coder"}
    assert cli.run("agents", "audit", "--verify").code == 0
    summary = cli.run("agents", "audit", "--summary", "--json").json
    assert set(summary) == {"clerk", "coder"}
    assert (summary["clerk"]["tool_calls"], summary["clerk"]["blocked"]) == (4, 0)
    assert (summary["clerk"]["failed"], summary["clerk"]["tasks"]) == (3, 1)
    assert summary["clerk"]["ends"] == {"done": 1}
    assert "clerk" in cli.run("agents", "audit", "--summary").stdout
    assert cli.run("agents", "audit", "--prune", "1", "--json").json == {"removed": 0}
    assert cli.run("agents", "audit", "--prune", "0", "--json").json["removed"] == 9
    assert [line["event"] for line in audited(cli)] == ["pruned"]
    assert cli.run("agents", "audit", "--verify").code == 0


def test_a_log_that_cannot_be_written_is_said_and_stops_nothing(cli: Cli) -> None:
    (cli.home / "data").mkdir()
    (cli.home / "data" / "agents").write_text("in the way")
    with model_server([Turn("ok")]) as chat:
        done = cli.run(*words(chat))
    assert done.code == 0 and "is not written down" in done.stderr


def test_pruning_keeps_the_rest_whole(tmp_path: Path) -> None:
    """A writer that has the log open continues after pruning, also after a second one."""
    path = tmp_path / "log"
    log, other = AuditLog(path), AuditLog(path)
    for number in range(5):
        log.record("old", number=number)
    between = time.time()
    while time.time() <= between:  # the clock's next tick
        pass
    other.record("new")
    assert log.prune(between) == 5
    kept = list(read(path))
    assert [line["event"] for line in kept] == ["pruned", "new"] and kept[0]["removed"] == 5
    other.record("newer")
    log.record("newest")
    assert log.prune(between) == 0
    assert [line["event"] for line in read(path)] == ["pruned", "new", "newer", "newest"]
    assert verify(path).broken_at is None and verify(path).lines == 4
    text = path.read_text()
    path.write_text(text.replace('"removed":5', '"removed":4'))
    assert verify(path).broken_at == 1
    path.write_text(text.replace('"event":"new"', '"event":"mew"'))
    assert verify(path).broken_at == 2
    path.write_text(text)
    assert log.prune(time.time() + 1) == 3
    log.record("after")
    assert [line["event"] for line in read(path)] == ["pruned", "after"]
    assert list(read(path))[0]["removed"] == 8 and verify(path).broken_at is None
    log.close()
    other.close()


def test_pruning_removes_files_that_were_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=1000)
    for number in range(30):
        log.record("old", number=number)
    files = len(list(tmp_path.iterdir()))
    assert files > 3
    kept = [line["time"] for line in read(path)][20]
    before = datetime.strptime(kept, "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()
    assert log.prune(before) == 20
    lines = list(read(path))
    assert (lines[0]["event"], lines[0]["removed"]) == ("pruned", 20)
    assert [line["number"] for line in lines[1:]] == list(range(20, 30))
    assert len(list(tmp_path.iterdir())) < files and verify(path).broken_at is None
    log.record("new")
    assert verify(path).broken_at is None
    assert log.prune(time.time() + 1) == 11 and len(list(tmp_path.glob("[!.]*"))) == 1
    log.record("last")
    assert [line["event"] for line in read(path)] == ["pruned", "last"]
    assert verify(path).broken_at is None and list(read(path))[-1]["n"] == 32
    log.close()


async def test_who_breaks_limits_again_and_again_is_stopped(tmp_path: Path) -> None:
    code = "print('x' * (6 << 20))"  # more than a cell may print
    script = [Turn("", [("python_execute", {"code": f"{code} # {i}"})]) for i in range(9)]
    log = AuditLog(tmp_path / "log")
    with model_server(script) as chat:
        async with SandboxAgent(
            "m", provider="openai",
            options=Options(base_url=chat.url + "/v1", api_key="x"), name="greedy", audit=log,
            limits=Limits(max_breaches=3),
        ) as agent:  # fmt: skip
            result = await agent.run("go")
            assert result.status == "killed" and result.steps == 3 and result.error
            assert agent.client.sandbox_id is None, "its sandbox is gone at once"
    log.close()
    lines = list(read(tmp_path / "log"))
    assert [line["outcome"] for line in lines if line["event"] == "tool_call"] == ["limit"] * 3
    assert lines[-1]["status"] == "killed" and lines[-1]["agent"] == "greedy"


def test_one_agent_is_stopped_and_no_other(cli: Cli) -> None:
    own_agent(cli, "clerk")
    turns = [Turn("", [("sandbox_shell", {"command": "sleep 1234"})])]
    with model_server(turns) as chat:
        asked = words(chat)
        asked[2] = "clerk"
        clerk, coder = cli.start(*asked), cli.start(*words(chat))
        try:
            wait_for(lambda: len(agents_at_work(cli)) == 2, 60)
            assert cli.run("agents", "stop", "nobody", "--json").json["removed"] == 0
            stopped = cli.run("agents", "stop", "clerk", "--json").json
            assert stopped["interrupted"] == [clerk.pid]
            assert clerk.wait(30) == 130
            assert audited(cli, "clerk")[-1]["status"] == "cancelled"
            assert agents_at_work(cli) == ["coder"] and coder.poll() is None
            assert cli.run("agents", "stop", "coder").code == 0
            assert coder.wait(30) == 130
        finally:
            end(clerk)
            end(coder)


def agents_at_work(cli: Cli) -> list[str]:
    listed = cli.run("sandbox", "list", "--json").json
    return sorted(e["labels"]["agent"] for e in listed if "agent" in e["labels"])  # others probe
