"""``paracle agents`` as a user starts it: every mode, the fall-back, the way back of changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.paracle_cli import Cli, end, on_a_terminal, wait_for

pytest.importorskip("openai", reason="asks models: pip install '.[agents]'")
pytest.importorskip("anthropic", reason="asks models: pip install '.[agents]'")

from agents.broken_project import broken_project, check_mended, fixing, words  # noqa: E402
from agents.model_server import Turn, model_server  # noqa: E402

FALLBACK = "⚠️  Sandbox mode not available, falling back to safe mode"
MODES = ["safe", "sandbox", "review", "yolo"]
# The argument of printf: the content of a file that the agent changed.
SHELL_ESCAPE = r"\033]0;title 2\007\n"


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path, OPENAI_API_KEY="test", ANTHROPIC_API_KEY="test")
    yield cli
    wait_for(lambda: not cli.remains())


@pytest.fixture
def project(cli: Cli) -> Path:
    return broken_project(cli.home / "project")


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_fixes_a_failing_test_and_the_diff_applies(cli: Cli, project: Path, dialect: str) -> None:
    with model_server(fixing) as chat:
        done = cli.run(*words(chat, dialect), "--workspace", str(project), "--apply", "--output",
                       "result.json")  # fmt: skip
    check_mended(cli.home, project, done)


def test_without_apply_nothing_is_written(cli: Cli, project: Path) -> None:
    with model_server(fixing) as chat:
        done = cli.run(*words(chat), "--file", str(project), stdin=b"n\n")
        assert done.code == 0 and "+    return a + b" in done.stdout
        assert "a - b" in (project / "calc.py").read_text()
        done = cli.run(*words(chat, mode="yolo"), "--workspace", str(project))
        assert done.code == 0 and "Nothing was written" in done.stderr
        assert "a - b" in (project / "calc.py").read_text()
        done = cli.run(*words(chat), "--workspace", str(project), stdin=b"y\n")
        assert done.code == 0 and "a + b" in (project / "calc.py").read_text()


@pytest.mark.parametrize("left_out", ["", ".git", ".venv"])
def test_what_is_made_in_an_empty_folder_comes_back(cli: Cli, left_out: str) -> None:
    folder = cli.home / "empty"
    (folder / left_out).mkdir(parents=True)
    make = {"command": "mkdir d; echo made > d/new.txt"}
    turns = [Turn("", [("sandbox_shell", make)]), Turn("ok")]
    with model_server(turns) as chat:
        done = cli.run(*words(chat), "--workspace", str(folder), "--apply", "--json")
    assert done.code == 0 and done.json["applied"], done
    assert (folder / "d" / "new.txt").read_text() == "made\n"


def test_what_may_not_come_back_does_not(cli: Cli, project: Path) -> None:
    """Hooks, links, files that the user changed meanwhile."""
    outside = cli.home / "outside"
    outside.mkdir()
    (project / "link").symlink_to(outside)
    script = (
        "mkdir -p .git/hooks link; echo evil > .git/hooks/pre-commit; echo evil > link/f; "
        "echo new > new.txt; rm run.sh; echo mine >> calc.py; ln -s /etc/passwd stolen"
    )

    def meanwhile() -> None:
        (project / "calc.py").write_text("changed by the user\n")

    turns = [Turn("", [("sandbox_shell", {"command": script})]), Turn("done", before=meanwhile)]
    with model_server(turns) as chat:
        done = cli.run(*words(chat), "--workspace", str(project), "--apply")
    assert not list((project / ".git" / "hooks").iterdir())
    assert not list(outside.iterdir()) and "is a link" in done.stderr
    assert not (project / "stolen").exists()
    assert (project / "calc.py").read_text() == "changed by the user\n"
    assert (project / "new.txt").read_text() == "new\n"
    assert not (project / "run.sh").exists()


@pytest.mark.case("F19")
def test_what_tools_run_by_themselves_is_shown_and_not_written(cli: Cli, project: Path) -> None:
    """This includes files that do not exist yet. The test looks at the host's own files."""
    planted = [
        ".git/hooks/post-checkout", ".bashrc", ".vscode/tasks.json", ".claude/settings.json",
        ".cargo/config.toml", ".husky/pre-commit", ".devcontainer/devcontainer.json", ".mcp.json",
        ".exrc", ".github/workflows/x.yml", "sub/.envrc", "conftest.py", "tests/ConfTest.py",
        "pyvenv.cfg", "env/pyvenv.cfg", "lib/x.pth", "sitecustomize.py", "my.code-workspace",
        "bare/HEAD", "bare/config", "bare/objects/x", "bare/refs/x", "linked/HEAD",
        "linked/commondir", "case/head", "case/config", "case/Objects/x", "case/REFS/x",
        "forged\n+++ b/calc.py",
    ]  # fmt: skip
    code = (
        "import os\n"
        f"for path in {[*planted, 'plain.txt', '.gitignore']!r}:\n"
        "    os.makedirs(os.path.dirname('./' + path), exist_ok=True)\n"
        "    open(path, 'w').write('evil')\n"
    )
    turns = [Turn("", [("python_execute", {"code": code})]), Turn("done")]
    before = sorted(path.relative_to(project) for path in project.rglob("*"))
    with model_server(turns) as chat:
        done = cli.run(*words(chat), "--workspace", str(project), "--apply", "--output", "out.json")
    after = sorted(path.relative_to(project) for path in project.rglob("*"))
    assert sorted({*after} - {*before}) == [Path(".gitignore"), Path("plain.txt")]
    shown = {
        c["path"]: c["diff"] for c in json.loads((cli.home / "out.json").read_text())["changes"]
    }
    for path in planted:
        if path.split("/")[0] not in (".git", ".vscode") and "envrc" not in path:
            assert path in shown, "it is shown all the same"
    assert not any(line.startswith("+++ b/calc.py") for line in "".join(shown.values()).split("\n"))
    assert "conftest.py: tools may run what is in conftest.py by themselves" in done.stderr


def test_diff_applies_elsewhere_and_modes_come_back(cli: Cli, project: Path) -> None:
    """Other programs can apply the diff that is shown."""
    (project / "end.txt").write_text("no newline")
    (project / "page.txt").write_text("one\x0cstill one\x85line\ntwo\n")
    script = (
        "printf 'no newline here' > end.txt; sed -i s/two/2/ page.txt; echo hi > new.txt; "
        "chmod +x calc.py; chmod -x run.sh"
    )
    turns = [Turn("", [("sandbox_shell", {"command": script})]), Turn("done")]
    copy = cli.home / "copy"
    shutil.copytree(project, copy)
    with model_server(turns) as chat:
        done = cli.run(*words(chat), "--workspace", str(project), "--apply", "--json")
    assert done.code == 0 and done.json["applied"], done
    changes = {change["path"]: change["diff"] for change in done.json["changes"]}
    assert set(changes) == {"end.txt", "page.txt", "new.txt", "calc.py", "run.sh"}
    assert "now executable" in changes["calc.py"] and "no longer" in changes["run.sh"]
    patch = "".join(changes[name] for name in ("end.txt", "page.txt", "new.txt"))
    subprocess.run(["git", "apply"], cwd=copy, input=patch.encode(), check=True)
    for name in ("end.txt", "page.txt", "new.txt"):
        assert (copy / name).read_bytes() == (project / name).read_bytes(), name
    assert os.access(project / "calc.py", os.X_OK) and not os.access(project / "run.sh", os.X_OK)


# Modes


@pytest.mark.parametrize("mode", MODES)
def test_dry_run(cli: Cli, mode: str) -> None:
    done = cli.run("agents", "run", "coder", "--task", "x", "--mode", mode, "--dry-run")
    assert done.code == 0 and "Execution Plan" in done.stdout and mode in done.stdout
    plan = cli.run("agents", "run", "coder", "--task", "x", "--mode", mode, "--dry-run", "--json")
    assert plan.json["config"]["sandbox"] is (mode != "safe")


def test_dry_run_says_what_is_missing(cli: Cli) -> None:
    plan = ["agents", "run", "coder", "--task", "x", "--dry-run"]
    priced = cli.run(*plan, "--cost-limit", "1")
    assert priced.code == 0 and "$1" in priced.stdout and "--price" in priced.stderr
    assert "--price" not in cli.run(*plan, "--cost-limit", "1", "--price", "3/15").stderr
    for more in ([], ["--json"]):
        unnamed = cli.run(*plan, "--provider", "google", *more)
        assert unnamed.code == 0 and "--model" in unnamed.stderr
        assert "None" not in unnamed.stdout
    assert "--model" not in cli.run(*plan, "--provider", "google", "--model", "g").stderr


def test_use_sandbox_of_the_configuration(cli: Cli) -> None:
    plan = ["agents", "run", "coder", "--task", "x", "--dry-run", "--json"]
    assert cli.run(*plan).json["config"]["mode"] == "safe"
    cli.env["PARACLE_CONFIG"] = str(cli.home / "config.toml")
    (cli.home / "config.toml").write_text("[sandbox]\nuse_sandbox = true\n")
    assert cli.run(*plan).json["config"]["mode"] == "sandbox"
    assert cli.run(*plan, "--mode", "safe").json["config"]["sandbox"] is False


def test_safe_reads_and_runs_nothing(cli: Cli, project: Path) -> None:
    turns = [
        Turn("", [("read_files", {"action": "list_files"})]),
        Turn("", [("read_files", {"action": "read_file", "path": "calc.py"})]),
        Turn("", [("read_files", {"action": "read_file", "path": "../../etc/passwd"})]),
        Turn("", [("python_execute", {"code": "print('ran')"})]),
        Turn("ok"),
    ]
    with model_server(turns) as chat:
        done = cli.run(*words(chat, mode="safe"), "--workspace", str(project))
        listed, read, outside, run = chat.tool_texts()
    assert done.code == 0, done
    assert "calc.py" in listed and ".git" not in listed and "a - b" in read
    assert "was not given" in outside and "no tool 'python_execute'" in run
    assert [t["function"]["name"] for t in chat.requests[0]["tools"]] == ["read_files"]


def test_review_asks_before_each_call(cli: Cli) -> None:
    turns = [
        Turn("", [("sandbox_shell", {"command": "echo one"})]),
        Turn("", [("sandbox_shell", {"command": "echo two"})]),
        Turn("ok"),
    ]
    with model_server(turns) as chat:
        done = cli.run(*words(chat, mode="review"), stdin=b"too risky\ny\n")
        denied, allowed = chat.tool_texts()
    assert done.code == 0 and "Allow this call?" in done.stderr
    assert "too risky" in denied and allowed == "two\n"


def test_who_allows_a_call_sees_all_of_it_or_that_it_was_cut(cli: Cli) -> None:
    hidden = f"echo {'a' * 3000}; echo the-end-of-it"
    flood = f"echo {'b' * 200_000}"
    turns = [
        Turn("", [("sandbox_shell", {"command": hidden})]),
        Turn("", [("sandbox_shell", {"command": flood})]),
        Turn("ok"),
    ]
    with model_server(turns) as chat:
        done = cli.run(*words(chat, mode="review"), stdin=b"n\nn\n")
    assert "the-end-of-it" in done.stderr.split("Allow this call?")[0]
    assert "more characters are not shown]" in done.stderr


def test_yolo_is_in_a_sandbox_unless_the_host_is_named(cli: Cli) -> None:
    turns = [Turn("", [("sandbox_shell", {"command": "id -un; ls /"})]), Turn("ok")]
    with model_server(turns) as chat:
        assert cli.run(*words(chat, mode="yolo")).code == 0
        assert chat.tool_texts()[0].startswith("paracle\n")
    with model_server(turns) as chat:
        done = cli.run(*words(chat, mode="yolo"), "--host")
        assert done.code == 0 and "not isolated" in done.stderr
        assert not chat.tool_texts()[0].startswith("paracle\n")
    refused = cli.run("agents", "run", "coder", "--task", "x", "--mode", "sandbox", "--host")
    assert refused.code == 2


@pytest.mark.parametrize("mode", ["sandbox", "review", "yolo"])
@pytest.mark.parametrize("backend", ["native", "docker"])
def test_falls_back_to_safe_and_says_so(cli: Cli, backend: str, mode: str) -> None:
    cli.env["PARACLE_PYTHON"] = "/no/such/python"
    cli.env["DOCKER_HOST"] = f"unix://{cli.home}/none.sock"
    turns = [Turn("", [("python_execute", {"code": "print(1)"})]), Turn("ok")]
    with model_server(turns) as chat:
        done = cli.run(*words(chat, mode=mode), "--backend", backend, "--json")
        assert done.code == 0 and FALLBACK in done.stderr
        assert done.json["config"] == {"mode": "safe", "sandbox": False, "auto_approve": False,
                                       "requires_approval": False, "on_host": False}  # fmt: skip
        assert "no tool" in chat.tool_texts()[0]
        asked = len(chat.requests)
        refused = cli.run(*words(chat, mode=mode), "--backend", backend, "--require-sandbox")
    assert refused.code == 3 and "nothing was run" in refused.stderr
    assert len(chat.requests) == asked, "the model is not even asked"


@pytest.mark.case("E05")
def test_nothing_of_a_model_or_a_program_steers_the_terminal(cli: Cli, project: Path) -> None:
    """Words, a call that is to be allowed, what a tool printed, an error, and a diff. Each has a
    number of its own, by which it is known that it was shown."""

    def hostile(number: int) -> str:
        return f"\x1b]0;title {number}\x07\x1b[2J"

    command = {"command": f"echo '{hostile(1)}'; printf '{SHELL_ESCAPE}' > new.txt"}
    missing = {"action": "read_file", "file_path": f"no/{hostile(3)}"}

    def raw(arguments: dict[str, str]) -> str:
        """Return JSON with raw control characters, which an honest model would escape."""
        text = json.dumps(arguments)
        return text.replace("\\u001b", "\x1b").replace("\\u0007", "\x07")

    turns = [
        Turn(hostile(0), [("sandbox_shell", raw(command))]),
        Turn("", [("sandbox_files", raw(missing))]),
        Turn(f"done {hostile(4)}"),
    ]
    answers = cli.home / "answers"
    answers.write_text("y\ny\nn\n")
    with model_server(turns) as chat, answers.open() as stdin:
        asked = words(chat, mode="review")
        shown = on_a_terminal(cli, *asked, "--workspace", str(project), "--verbose", stdin=stdin)
    assert b"\x1b" not in shown and b"\x07" not in shown, shown
    escaped = [rb"\x1b]0;title %d\x07" % number for number in range(5)]
    assert [text for text in escaped if text not in shown] == [], shown
    assert shown.count(escaped[1]) >= 3, "in the call, in its approval and in what it printed"


# Ends


@pytest.mark.parametrize(
    ("turns", "flags", "code", "status"),
    [
        ([Turn("", [("sandbox_shell", {"command": "ls"})])], ["--max-steps", "2"], 1, "step_limit"),
        ([Turn("", [("sandbox_shell", {"command": "ls"})])], [], 1, "loop"),
        ([Turn("", [("sandbox_shell", {"command": "sleep 99"})])], ["--timeout", "3"], 124,
         "timeout"),
        ([Turn(status=401)], [], 3, "error"),
        ([Turn("", [("sandbox_shell", {"command": "ls"})], tokens=(10**6, 0))],
         ["--cost-limit", "1", "--price", "3/15"], 1, "cost_limit"),
    ],
    ids=["step_limit", "loop", "timeout", "error", "cost_limit"],
)  # fmt: skip
def test_endings(cli: Cli, turns: list[Turn], flags: list[str], code: int, status: str) -> None:
    with model_server(turns) as chat:
        done = cli.run(*words(chat), *flags, "--json")
    assert done.code == code and done.json["status"] == status, done


def test_interrupted(cli: Cli) -> None:
    reached: list[bool] = []
    turns = [Turn("", [("sandbox_shell", {"command": "touch /tmp/on; sleep 1234"})])]
    with model_server(turns) as chat:
        process = cli.start(*words(chat))
        try:
            wait_for(lambda: chat.requests and cli.records())
            reached.append(True)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            end(process)
    assert reached


def test_nobody_reads_on(cli: Cli) -> None:
    """``| head -1``: it ends quietly, and leaves nothing."""
    turns = [Turn("words " * 100, [("sandbox_shell", {"command": f"echo {n}"})]) for n in range(9)]
    with model_server(turns) as chat:
        process = cli.start(*words(chat))
        try:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.read(3)
            process.stdout.close()
            said = process.stderr.read().decode()
            assert process.wait(60) == 128 + signal.SIGPIPE and "Traceback" not in said
        finally:
            process.stdout = None
            end(process)


def test_stream_and_inputs(cli: Cli) -> None:
    inside = {"code": "import json; print(json.load(open('/tmp/inputs.json'))['who'])"}
    turns = [Turn("", [("python_execute", inside)]), Turn("Hello there.")]
    with model_server(turns) as chat:
        done = cli.run(*words(chat), "--input", "who=world", "--no-stream", "--verbose")
        assert chat.tool_texts() == ["world\n"]
    assert done.stdout == "Hello there.\n" and "2 steps, 200 tokens in" in done.stderr
    assert not any(request["stream"] for request in chat.requests)
    assert '\\"who\\": \\"world\\"' in json.dumps(chat.requests[0]["messages"])


# Agents


def test_list_and_show(cli: Cli) -> None:
    listed = cli.run("agents", "list", "--json").json
    assert [agent["name"] for agent in listed] == ["analyst", "coder", "reviewer"]
    assert "careful software engineer" in cli.run("agents", "show", "coder").stdout
    missing = cli.run("agents", "show", "poet")
    assert missing.code == 2 and "analyst, coder, reviewer" in missing.stderr


def own_agent(cli: Cli, name: str, text: str) -> None:
    folder = cli.home / ".config/paracle/agents"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_own_agents(cli: Cli) -> None:
    own_agent(
        cli, "poet.md", "---\ndescription: rhymes\ntools: [files]\nmodel: verse-1\n---\nRhyme.\n"
    )
    own_agent(
        cli,
        "clerk.yaml",
        "name: clerk\nmax_steps: 3 # few\ninstructions: |\n  File it.\n\n  Now.\n",
    )
    listed = {a["name"]: a for a in cli.run("agents", "list", "--json").json}
    assert listed["poet"]["tools"] == ["files"] and listed["poet"]["model"] == "verse-1"
    assert (
        listed["clerk"]["instructions"] == "File it.\n\nNow." and listed["clerk"]["max_steps"] == 3
    )
    with model_server([Turn("A rhyme.")]) as chat:
        url = chat.url + "/v1"
        done = cli.run(
            "agents", "run", "poet", "--task", "x", "--mode", "sandbox", "--base-url", url
        )
    assert done.code == 0 and done.stdout == "A rhyme.\n"
    asked = chat.requests[0]
    assert asked["model"] == "verse-1" and asked["messages"][0]["content"] == "Rhyme."
    assert [t["function"]["name"] for t in asked["tools"]] == ["sandbox_files"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("---\ntools: [wings]\n---\nFly.", "no tool 'wings'"),
        ("---\ncolour: red\n---\nFly.", "no key 'colour'"),
        ("---\nname: x\n---\n", "needs instructions"),
        ("---\nname: x\n", "no closing ---"),
        ("---\nmax_steps: many\n---\nGo.", "must be a number"),
        ("---\nmodel: {a: b}\n---\nGo.", "more YAML"),
    ],
)
def test_wrong_agent_files_say_what_is_wrong(cli: Cli, text: str, message: str) -> None:
    own_agent(cli, "odd.md", text)
    for order in (["show", "odd"], ["run", "odd", "--task", "x", "--dry-run"]):
        done = cli.run("agents", *order)
        assert done.code == 2 and message in done.stderr and "odd.md" in done.stderr


def test_one_wrong_agent_file_does_not_stop_the_others(cli: Cli) -> None:
    own_agent(cli, "poet.md", "Rhyme.\n")
    own_agent(cli, "odd.md", "")
    own_agent(cli, "analyst.yaml", "instructions: {")
    (cli.home / ".config/paracle/agents/bytes.md").write_bytes(b"\xff\xfe")
    for name in ("coder", "poet"):
        done = cli.run("agents", "run", name, "--task", "x", "--dry-run")
        assert done.code == 0, done
    listed = cli.run("agents", "list")
    assert listed.code == 0 and "needs instructions" in listed.stdout
    wrong = {
        a["name"]: a["error"] for a in cli.run("agents", "list", "--json").json if "error" in a
    }
    assert set(wrong) == {"odd", "analyst", "bytes"} and "bytes.md" in wrong["bytes"]
    assert cli.run("agents", "show", "poet").code == 0
    # The user's own was meant, not the built-in one of that name.
    assert "analyst.yaml" in cli.run("agents", "show", "analyst").stderr
    missing = cli.run("agents", "show", "painter")
    assert missing.code == 2 and "coder, reviewer, poet" in missing.stderr
    assert "odd.md" in missing.stderr, "it may be the one that was meant"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "x"], "KEY=VALUE"),
        (["--file", "none"], "no file none"),
        (["--workspace", "none"], "no folder none"),
        (["--cost-limit", "1"], "--price"),
        (["--price", "cheap"], "3/15"),
        (["--mcp", "none.json"], "none.json"),
        (["--mcp", "a/same.txt"], "mcp.json"),
        (["--memory", "1"], "--memory"),
        (["--mode", "wild"], "wild"),
        (["--timeout", "0"], "--timeout"),
        (["--max-steps", "0"], "--max-steps"),
        (["--file", "a/same.txt", "--file", "b/same.txt"], "same name"),
    ],
)
def test_wrong_usage(cli: Cli, flags: list[str], message: str) -> None:
    for folder in ("a", "b"):
        (cli.home / folder).mkdir()
        (cli.home / folder / "same.txt").write_text(folder)
    done = cli.run("agents", "run", "coder", "--task", "x", *flags)
    assert done.code == 2 and message in done.stderr


def test_missing_sdk_names_the_command(cli: Cli, check: Callable[[], None] = lambda: None) -> None:
    (cli.home / "openai.py").write_text("raise ModuleNotFoundError('No module', name='openai')\n")
    cli.env["PYTHONPATH"] = f"{cli.home}:{cli.env['PYTHONPATH']}"
    done = cli.run("agents", "run", "coder", "--task", "x")
    assert done.code == 3 and "pip install '.[agents]'" in done.stderr
