"""The tools: what models send, what they get, and what programs get."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from paracle_sandbox import (
from paracle_sandbox.errors import SandboxError
    LocalSandboxClient,
    SandboxConfig,
    SandboxFileNotFoundError,
    SandboxManager,
    SandboxTimeoutError,
    Settings,
)
from paracle_sandbox.tools import (
    NormalPythonExecute,
    PackageInstallTool,
    PythonExecute,
    SandboxBrowserTool,
    SandboxFilesTool,
    SandboxShellTool,
    SandboxVisionTool,
    Tool,
    Toolbox,
    sandbox_tools,
)
from paracle_sandbox.tools.arguments import extract_code
from paracle_sandbox.tools.terminals import MAX_TERMINALS
from service.index_server import IndexServer, wheel

# Python


async def test_print_42(client: LocalSandboxClient) -> None:
    result = await PythonExecute(client).execute("print(42)")
    assert result["observation"] == "42\n"
    assert result["success"] and result["exit_code"] == 0


async def test_sandbox_is_made_once_and_used_again(client: LocalSandboxClient) -> None:
    tool = PythonExecute(client)
    await tool.execute("open('kept.txt', 'w').write('here')")
    first = client.sandbox_id
    result = await tool.execute("print(open('kept.txt').read())")
    assert result["observation"] == "here\n" and client.sandbox_id == first


async def test_own_client_is_cleaned_up() -> None:
    tool = PythonExecute()
    await tool.execute("print(1)")
    assert tool.client.sandbox_id is not None
    await tool.cleanup()
    assert tool.client.sandbox_id is None


async def test_failing_code_is_a_result(client: LocalSandboxClient) -> None:
    result = await PythonExecute(client).execute("print('a')\n1/0")
    assert not result["success"] and result["exit_code"] == 1
    assert result["observation"].startswith("a\n") and "ZeroDivisionError" in result["observation"]


async def test_timeout_is_raised_to_programs_and_told_to_models(
    client: LocalSandboxClient,
) -> None:
    tool = PythonExecute(client)
    with pytest.raises(SandboxTimeoutError):
        await tool.execute("while True: pass", timeout=0.5)
    answer = await tool.call({"code": "print('x', flush=True)\nwhile True: pass", "timeout": 0.5})
    assert answer.is_error and answer.data["kind"] == "timeout"
    assert "timed out" in answer.text and "longer timeout" in answer.text and "x" in answer.text
    assert (await tool.call({"code": "print('next works')"})).text == "next works\n"


@pytest.mark.parametrize("name", ["code", "python_code", "script", "source"])
async def test_code_under_other_names(client: LocalSandboxClient, name: str) -> None:
    assert (await PythonExecute(client).call({name: "print(1)"})).text == "1\n"


def test_code_in_fences() -> None:
    assert extract_code("```python\nprint(1)\n```") == "print(1)\n"
    message = "Run this:\n```python\nimport math\nprint(math.pi)\n```\nplease"
    assert extract_code(message) == "import math\nprint(math.pi)\n"
    assert extract_code("print('```')") == "print('```')"


async def test_stateful(client: LocalSandboxClient) -> None:
    tool = PythonExecute(client, stateful=True)
    assert (await tool.call({"code": "x = 20"})).text == "(no output)"
    assert (await tool.call({"code": "x + 1"})).text == "21"
    failure = await tool.call({"code": "print('a')\nx / 0"})
    assert failure.is_error and failure.text.startswith("a\nTraceback")
    assert "NameError" in (await tool.call({"code": "x", "reset": True})).text
    await tool.close()


async def test_stateful_over_a_lost_sandbox(client: LocalSandboxClient) -> None:
    tool = PythonExecute(client, stateful=True)
    await tool.call({"code": "x = 1"})
    await client.create()
    assert "NameError" in (await tool.call({"code": "x"})).text


async def test_streamed_output(client: LocalSandboxClient) -> None:
    seen: list[str] = []
    tool = PythonExecute(client)
    await tool.call({"code": "print('now')"}, on_output=seen.append)
    assert "".join(seen) == "now\n"


async def test_normal_python_execute(client: LocalSandboxClient) -> None:
    tool = NormalPythonExecute(client)
    answer = await tool.call({"code": "print(2)", "code_type": "report"})
    assert answer.text == "2\n" and answer.data["code_type"] == "report"
    wrong = await tool.call({"code": "print(2)", "code_type": "poem"})
    assert wrong.is_error and "process, report, others" in wrong.text


async def test_normal_python_execute_for_programs(client: LocalSandboxClient) -> None:
    tool = NormalPythonExecute(client)
    result = await tool.execute("print(2)", code_type="report")
    assert result["observation"] == "2\n" and result["code_type"] == "report"
    assert (await tool.execute("print(3)"))["success"]
    with pytest.raises(ValueError, match="report"):
        await tool.execute("print(2)", code_type="poem")  # type: ignore[arg-type]


# Packages


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    server = IndexServer(wheel("simple", "1.0"), wheel("other", "2.0"))
    monkeypatch.setenv("SANDBOX_PACKAGE_INDEX", server.url)
    yield server
    server.close()


async def test_several_packages_in_one_request(
    client: LocalSandboxClient, index: IndexServer
) -> None:
    """The sandbox has no network: the packages come over its channel."""
    tool = PackageInstallTool(client)
    answer = await tool.call({"package": "simple and other"})
    assert answer.text == "Installed simple, other." and not answer.is_error, answer.text
    code = "import simple, other; print(simple.VERSION, other.VERSION)"
    assert (await PythonExecute(client).call({"code": code})).text == "1.0 2.0\n"
    assert (await tool.call({"packages": ["--index-url", "x"]})).is_error
    missing = await tool.call({"packages": ["simple", "no-such-thing"]})
    assert missing.is_error and "no-such-thing" in missing.text


async def test_code_may_name_the_packages_it_needs(
    client: LocalSandboxClient, index: IndexServer
) -> None:
    tool = NormalPythonExecute(client)
    code = "import simple; print(simple.VERSION)"
    assert (await tool.call({"code": code, "packages": ["simple"]})).text == "1.0\n"
    failed = await tool.call({"code": "print('ran')", "packages": ["no-such-thing"]})
    assert failed.is_error and "Could not install" in failed.text and "ran" not in failed.text
    assert not failed.data["success"] and failed.data["exit_code"]
    assert (await tool.execute(code, packages=["simple"]))["observation"] == "1.0\n"
    with pytest.raises(ValueError):
        await tool.execute("print('ran')", packages=["--index-url"])


async def test_a_session_sees_what_was_installed(
    client: LocalSandboxClient, index: IndexServer
) -> None:
    tool = PythonExecute(client, stateful=True)
    assert "ModuleNotFoundError" in (await tool.call({"code": "import simple"})).text
    await PackageInstallTool(client).call({"packages": "simple"})
    assert (await tool.call({"code": "import simple\nsimple.VERSION"})).text == "'1.0'"
    await tool.close()


async def test_packages_fail_clearly(
    client: LocalSandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = PackageInstallTool(client)
    monkeypatch.setenv("SANDBOX_PACKAGES", "0")
    off = await tool.call({"packages": "numpy"})
    assert off.is_error and "switched off by the operator" in off.text
    pip = await SandboxShellTool(client).call({"command": "python3 -m pip install numpy"})
    assert pip.is_error and pip.data["exit_code"] != 0 and pip.data["stderr"]


# Shell


async def test_shell_foreground(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    assert (await tool.call({"command": "pwd"})).text == "/workspace\n"
    answer = await tool.call({"cmd": "echo out; echo err >&2; exit 3"})
    assert answer.is_error and answer.text == "out\n[stderr]: err\n(exit code 3)"
    assert answer.data["exit_code"] == 3
    assert (await tool.call({"command": "true"})).text == "(no output)"
    assert "'command' is missing" in (await tool.call({})).text
    fidelity = await tool.call({"command": "printf '\\n$ echo $?\\n\\n'"})
    assert fidelity.text == "\n$ echo $?\n\n"


async def test_shell_terminal_keeps_directory_and_variables(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    await tool.call({"command": "mkdir -p 'a b'; cd 'a b'; X=7", "session_name": "main"})
    answer = await tool.call({"command": "pwd; echo $X", "session_name": "main"})
    assert answer.text == "/workspace/a b\n7\n"
    other = await tool.call({"command": "pwd", "session_name": "other", "folder": "a b"})
    assert other.text == "/workspace/a b\n"
    await tool.call({"command": 'mkdir "it\'s"', "session_name": "other"})
    moved = await tool.call({"command": "pwd", "session_name": "other", "folder": "a b/it's"})
    assert moved.text == "/workspace/a b/it's\n"
    stuck = await tool.call({"command": "sleep 60", "session_name": "main", "timeout": 0.5})
    assert stuck.data["kind"] == "timeout"
    assert (await tool.call({"command": "echo $X", "session_name": "main"})).text == "7\n"


async def test_a_folder_of_a_terminal_is_below_the_working_directory(
    client: LocalSandboxClient,
) -> None:
    tool = SandboxShellTool(client)
    await tool.call({"command": "mkdir -p a b; cd a", "session_name": "main"})
    moved = await tool.call({"command": "pwd", "session_name": "main", "folder": "b"})
    assert moved.text == "/workspace/b\n"
    absolute = await tool.call({"command": "pwd", "session_name": "main", "folder": "/tmp"})
    assert absolute.text == "/tmp\n"
    for name in ("main", "new"):
        lost = await tool.call({"command": "touch ran", "session_name": name, "folder": "none"})
        assert lost.is_error and "/workspace/none" in lost.text
    assert (await tool.call({"command": "find /workspace /tmp -name ran"})).text == ("(no output)")
    assert (await tool.call({"command": "pwd", "session_name": "new"})).text == "/workspace\n"


async def test_a_terminal_is_ended(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    await tool.call({"command": "X=7", "session_name": "main"})
    ended = await tool.call({"action": "terminate_command", "session_name": "main"})
    assert not ended.is_error and "is ended" in ended.text
    assert "Nothing runs" in (await tool.call({"action": "list_commands"})).text
    last = {"command": "echo [$X]", "session_name": "main", "kill_session": True}
    assert (await tool.call(last)).text == "[]\n"
    late = {"command": "sleep 60", "session_name": "late", "timeout": 0.5, "kill_session": True}
    assert (await tool.call(late)).data["kind"] == "timeout"
    assert "Nothing runs" in (await tool.call({"action": "list_commands"})).text
    assert (await tool.call({"command": "ls -d /tmp/.paracle-term-*"})).is_error, "left behind"


async def test_terminals_are_bounded(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    for number in range(MAX_TERMINALS):
        assert not (await tool.call({"command": "true", "session_name": f"t{number}"})).is_error
    refused = await tool.call({"command": "true", "session_name": "more"})
    assert refused.is_error and "end some first" in refused.text
    assert not (await tool.call({"command": "true", "session_name": "t0"})).is_error
    await tool.call({"action": "terminate", "session_name": "t0"})
    assert not (await tool.call({"command": "true", "session_name": "more"})).is_error
    await client.create()
    assert not (await tool.call({"command": "true", "session_name": "anew"})).is_error
    assert (await tool.call({"action": "list"})).text == "anew: terminal"


async def test_what_a_terminal_prints_is_streamed(client: LocalSandboxClient) -> None:
    seen: list[str] = []
    tool = SandboxShellTool(client)
    request = {"command": "echo out; echo err >&2", "session_name": "main"}
    await tool.call(request, on_output=seen.append)
    assert sorted("".join(seen).split()) == ["err", "out"]


async def test_shell_for_programs(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    assert (await tool.execute("exit 3"))["exit_code"] == 3
    assert (await tool.execute(["echo", "a  b"]))["stdout"] == "a  b\n"
    assert (await tool.execute(["pwd"], action="run", folder="/tmp"))["stdout"] == "/tmp\n"
    done = await tool.execute(action="execute_command", command="echo hi; exit 3")
    assert (done["stdout"], done["exit_code"], done["success"]) == ("hi\n", 3, False)
    await tool.execute("cd /tmp", action="run", session_name="main")
    there = await tool.execute("pwd", action="run", session_name="main")
    assert there["observation"] == "/tmp\n" and there["success"]
    started = await tool.execute("sleep 1000", action="execute_command", blocking=False)
    name = started["session_name"]
    assert (
        "still runs"
        in (await tool.execute(action="check_command_output", session_name=name))["observation"]
    )
    assert (await tool.execute(action="terminate_command", session_name=name))["success"]
    with pytest.raises(ValueError, match="must be one of"):
        await tool.execute("ls", action="juggle")
    with pytest.raises(SandboxTimeoutError):
        await tool.execute("sleep 60", 0.5, action="execute_command")


async def test_shell_background(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    started = await tool.call(
        {"command": "echo first; while ! test -f go; do sleep 0.05; done; echo second",
         "blocking": False, "session_name": "job"}
    )  # fmt: skip
    assert not started.is_error
    assert "still runs" in (await tool.call({"action": "poll", "session_name": "job"})).text
    again = await tool.call({"command": "x", "blocking": False, "session_name": "job"})
    assert again.is_error and "still runs" in again.text
    assert "job: runs" in (await tool.call({"action": "list_commands"})).text
    await tool.call({"command": "touch go"})
    await tool._background["job"].command.wait()
    answer = await tool.call({"action": "check_command_output", "session_name": "job"})
    assert "second" in answer.text and "exit code 0" in answer.text
    assert (
        "no background command"
        in (await tool.call({"action": "kill", "session_name": "none"})).text.lower()
    )


async def test_shell_background_tells_each_thing_once(client: LocalSandboxClient) -> None:
    """Both streams grow between two looks."""
    tool = SandboxShellTool(client)
    script = (
        "echo a; echo b >&2; touch one; while ! test -f go; do sleep 0.02; done; echo c; echo d >&2"
    )
    await tool.call({"command": script, "blocking": False, "session_name": "job"})
    await tool.call({"command": "while ! test -f one; do sleep 0.02; done"})
    seen = ""
    async with asyncio.timeout(30):
        while not ("a" in seen and "b" in seen):
            seen += (await tool.call({"action": "poll", "session_name": "job"})).data["output"]
            await asyncio.sleep(0.02)
    assert sorted(seen.replace("[stderr]: ", "").split()) == ["a", "b"]
    await tool.call({"command": "touch go"})
    await tool._background["job"].command.wait()
    last = await tool.call({"action": "poll", "session_name": "job"})
    assert last.data["output"] == "c\n[stderr]: d\n" and "exit code 0" in last.text


async def test_normal_python_execute_may_remember(client: LocalSandboxClient) -> None:
    tool = NormalPythonExecute(client, stateful=True)
    await tool.call({"code": "x = 5", "code_type": "process"})
    assert (await tool.call({"code": "x + 1"})).text == "6"
    assert "NameError" in (await tool.call({"code": "x", "reset": True})).text
    await tool.close()


async def test_parts_of_a_file(client: LocalSandboxClient) -> None:
    tool = SandboxFilesTool(client)
    await client.write_file("long.txt", "".join(f"line {n}\n" for n in range(1, 10_001)))
    whole = await tool.call({"action": "read_file", "path": "long.txt"})
    assert "left out" in whole.text and "start_line" in whole.text
    part = await tool.call({"action": "read", "path": "long.txt", "start_line": 5000, "end": 5001})
    assert part.text == "line 5000\nline 5001\n"
    beyond = await tool.call({"action": "read", "path": "long.txt", "offset": "20000"})
    assert beyond.is_error and "has 10000 lines" in beyond.text


async def test_shell_background_is_ended(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    await tool.call({"command": "sleep 1000", "blocking": "false", "name": "long"})
    answer = await tool.call({"action": "terminate", "session": "long"})
    assert "is ended" in answer.text
    assert (await tool.call({"command": "pgrep -x sleep; true"})).text == "(no output)"
    await tool.call({"command": "sleep 1000", "blocking": False})
    await tool.close()
    assert (await tool.call({"command": "pgrep -x sleep; true"})).text == "(no output)"


@pytest.mark.parametrize(
    "request_", [{"action": "terminate"}, {"action": "check", "kill_session": True}]
)
async def test_the_only_background_command_is_ended_without_a_name(
    client: LocalSandboxClient, request_: dict[str, Any]
) -> None:
    tool = SandboxShellTool(client)
    await tool.call({"command": "sleep 1000", "blocking": False, "name": "long"})
    answer = await tool.call(request_)
    assert not answer.is_error and "ended" in answer.text
    assert "Nothing runs" in (await tool.call({"action": "list_commands"})).text


# Files


async def test_files(client: LocalSandboxClient) -> None:
    tool = SandboxFilesTool(client)
    await tool.call({"action": "create_file", "path": "a/b.txt", "content": "one two\n"})
    assert (await tool.call({"action": "read_file", "filename": "a/b.txt"})).text == "one two\n"
    again = await tool.call({"action": "create_file", "path": "a/b.txt", "content": ""})
    assert again.is_error and "exists already" in again.text
    assert not (
        await tool.call(
            {"action": "str_replace", "path": "a/b.txt", "old_str": "two", "new_str": "2"}
        )
    ).is_error
    await tool.call({"action": "write", "path": "c.sh", "text": "echo", "permissions": "755"})
    await tool.call({"action": "edit", "path": "c.sh", "old": "echo", "new": "ls"})
    assert (await (await client.sandbox()).stat("c.sh"))["mode"] & 0o777 == 0o755
    await tool.call({"action": "rename", "path": "c.sh", "target": "d.sh"})
    listed = await tool.call({"action": "list_files", "recursive": True})
    assert listed.data["files"] == ["a", "a/b.txt", "d.sh"]
    assert (await tool.call({"action": "read", "path": "a/b.txt"})).text == "one 2\n"
    assert (await tool.call({"action": "delete", "path": "a"})).is_error
    assert not (await tool.call({"action": "delete", "path": "a", "recursive": True})).is_error


async def test_files_for_programs(client: LocalSandboxClient) -> None:
    tool = SandboxFilesTool(client)
    made = await tool.execute(action="create_file", file_path="a", file_contents="x")
    assert made["success"] and "Written 1 bytes" in made["observation"]
    assert (await tool.execute(action="read_file", file_path="a"))["content"] == "x"
    assert (await tool.execute(action="list_files"))["files"] == ["a"]
    with pytest.raises(SandboxFileNotFoundError):
        await tool.execute(action="read_file", file_path="none")
    with pytest.raises(ValueError, match="'file_path' is missing"):
        await tool.execute(action="read_file")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"action": "read_file", "path": "none"}, "not found"),
        ({"action": "read_file", "path": "../etc/passwd"}, "relative to the working directory"),
        ({"action": "str_replace", "path": "f", "old_str": "x"}, "does not occur"),
        ({"action": "str_replace", "path": "f", "old_str": "a"}, "occurs 2 times"),
        ({"action": "str_replace", "path": "f"}, "'old_str' is missing"),
        ({"action": "create_file", "path": "g"}, "'file_contents' is missing"),
        ({"action": "read_file"}, "'file_path' is missing"),
        ({"action": "juggle", "path": "f"}, "must be one of"),
        ({"action": "read_file", "path": "f", "colour": "red"}, "no argument 'colour'"),
        ({"action": "write", "path": "f", "content": "x", "permissions": "rw"}, "such as 644"),
    ],
)
async def test_files_errors_say_what_to_do(
    client: LocalSandboxClient, request_: dict[str, str], words: str
) -> None:
    await client.write_file("f", "a-a")
    answer = await SandboxFilesTool(client).call(request_)
    assert answer.is_error and words in answer.text


async def test_directories_and_names(client: LocalSandboxClient) -> None:
    """B60."""
    tool = SandboxFilesTool(client)

    async def ok(**request: object) -> bool:
        return not (await tool.call(request)).is_error

    assert await ok(action="mkdir", path="made/deep")
    assert await ok(action="create", path="no/such/parent/file.txt", content="x")
    assert await ok(action="rename", path="no/such/parent/file.txt", target="made/file.txt")
    assert not await ok(action="delete", path="made"), "there is something in it"
    assert not await ok(action="delete", path="made/file"), "not its whole name"
    assert not await ok(action="delete", path="made/file.tx*")
    assert not await ok(action="delete", path="Made/file.txt")
    assert await ok(action="delete", path="made/deep")
    assert await ok(action="DELETE", path="made", recursive=True)
    listed = await tool.call({"action": "list_files", "recursive": True})
    assert listed.data["files"] == ["no", "no/such", "no/such/parent"]


async def test_archives(client: LocalSandboxClient) -> None:
    box = Toolbox(sandbox_tools(client))
    make = (
        "import shutil, gzip, os, tarfile, zipfile\nos.mkdir('d')\nopen('d/f', 'w').write('x')\n"
        "for kind in ('zip', 'tar', 'gztar', 'bztar'): shutil.make_archive(kind, kind, '.', 'd')\n"
        "gzip.open('plain.txt.gz', 'w').write(b'y')\nopen('none.zip', 'w').write('no archive')\n"
        "with zipfile.ZipFile('evil.zip', 'w') as z: z.writestr('../../tmp/out', 'z')"
    )
    assert (await box.call("python", {"code": make})).text == "(no output)"
    for name in ("zip.zip", "tar.tar", "gztar.tar.gz", "bztar.tar.bz2"):
        answer = await box.call("unzip_file", {"archive": name, "dest": f"out/{name}"})
        assert not answer.is_error, answer.text
        assert await client.read_file(f"out/{name}/d/f") == "x"
    await box.call("unzip_file", {"path": "plain.txt.gz"})
    assert await client.read_file("plain.txt") == "y"
    no = await box.call("unzip_file", {"path": "none.zip"})
    assert no.is_error and "no zip, tar or gzip" in no.text
    assert "not found" in (await box.call("unzip_file", {"path": "missing.zip"})).text
    await box.call("unzip_file", {"path": "evil.zip"})
    assert not await (await client.sandbox()).exists("/tmp/out")
    await box.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"code": "print(1)", "description": "shows one"},
        {"arguments": {"code": "print(1)"}},
        '"{\\"code\\": \\"print(1)\\"}"',
        '```json\n{"code": "print(1)"}\n```',
        '{"code": "print(1)\n"}',
        {"code": ["x = 1", "print(x)"]},
        {"code": "```py\nprint(1)\n```", "timeout": "5"},
    ],
    ids=["remark", "wrapped", "twice", "fenced", "raw newline", "lines", "fenced code"],
)
async def test_arguments_as_models_write_them(client: LocalSandboxClient, arguments: Any) -> None:
    answer = await PythonExecute(client).call(arguments)
    assert answer.text == "1\n", answer


@pytest.mark.parametrize(
    "arguments",
    [
        {"Code": "print(1)", "language": "python"},
        {"command": "print(1)"},
        {"pythonCode": "print(1)", "timeout-seconds": "30s"},
        {"code": "print(1)", "Code": "print(2)", "timeout": "30 seconds"},
        {"code": None, "script": "print(1)"},
    ],
)
def test_other_spellings_of_arguments(arguments: dict[str, Any]) -> None:
    found = PythonExecute().checked(arguments)
    assert found.pop("timeout", 30) == 30 and found == {"code": "print(1)"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"filePath": "a", "oldText": "x", "new_text": "y"}, {"old_str": "x", "new_str": "y"}),
        ({"filepath": "a", "Old-String": "x"}, {"old_str": "x"}),
        ({"dir": "a"}, {}),
        ({"folder": "a"}, {}),
        ({"file_path": "a", "name": "b"}, {}),
    ],
)
def test_other_spellings_of_files(arguments: dict[str, Any], found: dict[str, str]) -> None:
    checked = SandboxFilesTool().checked({"Operation": "Edit", **arguments})
    assert checked == {"action": "str_replace", "file_path": "a", **found}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"workingDirectory": "a"}, {"folder": "a"}),
        ({"working_dir": "a"}, {"folder": "a"}),
        ({"background": True}, {"blocking": False}),
        ({"is_background": "false"}, {"blocking": True}),
        ({"runInBackground": "true"}, {"blocking": False}),
        ({"run_in_background": None}, {}),
        ({"background": True, "blocking": True}, {"blocking": True}),
        ({"timeout": "30s"}, {"timeout": 30.0}),
    ],
)
def test_other_spellings_of_shell(arguments: dict[str, Any], found: dict[str, Any]) -> None:
    assert SandboxShellTool().checked({"cmd": "ls", **arguments}) == {"command": "ls", **found}


@pytest.mark.parametrize("timeout", ["s", "thirty", "30x", "-5s", "nan"])
async def test_no_number_of_seconds(timeout: str) -> None:
    answer = await SandboxShellTool().call({"command": "ls", "timeout": timeout})
    assert answer.is_error and "timeout must be" in answer.text


async def test_a_command_as_a_list_is_one_command(client: LocalSandboxClient) -> None:
    tool = SandboxShellTool(client)
    assert (await tool.call({"command": ["printf", "[%s]", "a b", "c"]})).text == "[a b][c]"
    assert (await tool.call({"cmd": ["sh", "-c", "echo $0 $1", "x", "y"]})).text == "x y\n"
    assert (await tool.call({"script": ["cd /tmp", "pwd"]})).text == "/tmp\n"


@pytest.mark.parametrize("how", [{}, {"session_name": "main"}])
async def test_every_command_is_run(client: LocalSandboxClient, how: dict[str, Any]) -> None:
    """No command is refused. This one would wipe a disk, but a sandbox has none."""
    tool = SandboxShellTool(client)
    answer = await tool.call({"command": "mkfs.none /dev/sda", **how})
    assert answer.data["exit_code"] == 127 and "not found" in answer.text
    assert (await tool.execute("mkfs.none /dev/sda"))["exit_code"] == 127


@pytest.mark.parametrize("how", [{}, {"session_name": "main"}, {"blocking": False}])
async def test_a_policy_of_the_callers_own_refuses(
    client: LocalSandboxClient, how: dict[str, Any]
) -> None:
    tool = SandboxShellTool(client, policy=lambda one: "not this one" if "touch" in one else None)
    answer = await tool.call({"command": "touch made", **how})
    assert answer.is_error and "not this one" in answer.text
    with pytest.raises(SandboxError, match="not this one"):
        await tool.execute(["touch", "made"])
    with pytest.raises(SandboxError, match="not this one"):
        await tool.execute("touch made", action="execute_command")
    assert (await tool.execute("ls"))["stdout"] == ""


async def test_a_directory_is_deleted_under_other_names(client: LocalSandboxClient) -> None:
    tool = SandboxFilesTool(client)
    await tool.call({"action": "mkdir", "dir": "a/b"})
    assert (await tool.call({"action": "delete_directory", "folder": "a"})).is_error
    request = {"action": "delete_directory", "folder": "a", "recursive": True}
    assert not (await tool.call(request)).is_error
    assert (await tool.call({"action": "list_files"})).data["files"] == []


# All of them


async def test_toolbox_routes(client: LocalSandboxClient) -> None:
    box = Toolbox(sandbox_tools(client))
    assert (await box.call("execute_python", {"script": "print(1)"})).text == "1\n"
    assert (await box.call("run_shell", '{"cmd": "echo 2"}')).text == "2\n"
    await box.call("write_file", {"path": "x.txt", "data": "3"})
    assert (await box.call("read_file", {"file_path": "x.txt"})).text == "3"
    assert "x.txt" in (await box.call("list_files", {})).text
    unknown = await box.call("launch_rocket", {})
    assert unknown.is_error and "python_execute" in unknown.text
    assert "'code' is missing" in (await box.call("python_execute", {})).text
    broken = await box.call("python_execute", '{"code": "print(1)"')
    assert broken.is_error and "not valid JSON" in broken.text
    assert "JSON object" in (await box.call("python_execute", "[1]")).text
    await box.close()


async def test_without_isolation_the_model_is_told() -> None:
    nowhere = SandboxManager(1, backend="daytona", settings=Settings(daytona_key=None))
    client = LocalSandboxClient(nowhere, SandboxConfig())
    try:
        answer = await PythonExecute(client).call({"code": "print(1)"})
    finally:
        await client.cleanup()
    assert answer.is_error and answer.data["kind"] == "unavailable"


def test_formats() -> None:
    tools: list[Tool] = [PythonExecute(), NormalPythonExecute(), SandboxShellTool(),
                         SandboxFilesTool(), PackageInstallTool(), SandboxVisionTool(),
                         SandboxBrowserTool()]  # fmt: skip
    for tool in tools:
        openai, anthropic = tool.to_openai(), tool.to_anthropic()
        assert openai["function"]["name"] == anthropic["name"] == tool.name
        schema = anthropic["input_schema"]
        assert openai["function"]["parameters"] == schema and schema["type"] == "object"
        assert set(schema["required"]) <= set(schema["properties"])
        assert set(tool.aliases.values()) <= set(schema["properties"])
        assert not set(tool.aliases) & set(schema["properties"])
        assert all(p["description"] for p in schema["properties"].values())
