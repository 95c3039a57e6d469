"""The command line above the seam: usage, exit codes, what it shows and where."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paracle_cli import SOURCE, Cli, end, on_a_terminal, wait_for

from paracle_sandbox import __version__
from paracle_sandbox.backends.base import Health, Layer
from paracle_sandbox.cli import execute, health
from paracle_sandbox.cli.list_cleanup import id_width
from paracle_sandbox.cli.output import plain_columns, printable
from paracle_sandbox.sandbox import execution


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, SANDBOX_MODE="fake")


# Usage


def test_version(cli: Cli) -> None:
    done = cli.run("--version")
    assert (done.code, done.stdout) == (0, f"paracle {__version__}\n")


@pytest.mark.parametrize("words", [[], ["sandbox"], ["template"]])
def test_help_names_every_command(cli: Cli, words: list[str]) -> None:
    done = cli.run(*words, "--help")
    names = {
        "": ["sandbox", "template", "--version", "--install-completion", "Examples:"],
        "sandbox": ["health", "test", "execute", "list", "cleanup", "exec", "shell", "cp", "rm"],
        "template": ["list", "build", "remove"],
    }["".join(words)]
    assert done.code == 0
    assert [name for name in names if name not in done.stdout] == []


def test_help_of_execute_names_every_flag_exit_code_and_an_example(cli: Cli) -> None:
    text = cli.run("sandbox", "execute", "--help").stdout
    flags = "--cpu --memory --disk --timeout --network --inputs --monitor --no-monitor --output "
    flags += "--verbose -v --json --backend --template --env --raw none|bridge|host"
    wanted = [*flags.split(), "124", "130", "paracle sandbox execute agent.py"]
    assert [word for word in wanted if word not in text] == []


def test_completion_script_is_shown(cli: Cli) -> None:
    cli.env["_PARACLE_COMPLETE"] = "source_bash"
    assert "_PARACLE_COMPLETE" in cli.run().stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (
            "paracle sandbox ",
            {"health", "test", "execute", "list", "cleanup", "exec", "shell", "cp", "logs", "rm"},
        ),
        ("paracle sandbox execute --disk 256 --ne", {"--network"}),
        ("paracle sandbox execute --network ", {"none", "bridge", "host"}),
        ("paracle sandbox execute --template d", {"default", "dev"}),
        ("paracle sandbox list --backend incus", {"incus", "incus-vm"}),
        ("paracle sandbox health --backend n", {"native"}),
        ("paracle template build ", {"default", "dev", "ml", "api"}),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_flags_and_values(
    cli: Cli, shell: str, words: str, offered: set[str]
) -> None:
    cli.env.update(
        _PARACLE_COMPLETE=f"complete_{shell}", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")),
        _TYPER_COMPLETE_ARGS=words, _TYPER_COMPLETE_FISH_ACTION="get-args",
    )  # fmt: skip
    said = cli.run().stdout
    # zsh quotes each word, with what it means behind; fish has that after a tab.
    lines = re.findall(r'(?:^|\(\()"(.+?)"', said, re.M) if shell == "zsh" else said.splitlines()
    assert {line.partition("\t")[0] for line in lines} == offered, said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bogus"], "--bogus"),
        (["--cpu", "many"], "--cpu"),
        (["--cpu", "99"], "--cpu: "),
        (["--memory", "1"], "--memory: "),
        (["--disk", "1"], "--disk: "),
        (["--timeout", "0"], "--timeout: "),
        (["--network", "moon"], "--network"),
        (["--env", "NAME"], "--env: write NAME=VALUE"),
        (["--env", "1=2"], "--env: "),
        (["--template", "nope"], "--template: there is no 'nope'"),
        (["--backend", "nope"], "--backend: there is no 'nope'"),
        (["--inputs", "missing.json"], "--inputs: file not found: missing.json"),
        (["--output", "no/such/dir/out.json"], "--output: cannot write"),
    ],
)
def test_wrong_usage_is_two_and_one_line(cli: Cli, words: list[str], message: str) -> None:
    done = cli.run("sandbox", "execute", cli.program("print('ran')"), *words)
    assert done.code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\0", "[" * 100_000])
def test_bad_inputs_are_two(cli: Cli, text: str) -> None:
    (cli.home / "inputs.json").write_text(text)
    done = cli.run("sandbox", "execute", cli.program(""), "--inputs", "inputs.json")
    assert done.code == 2
    assert done.stderr.startswith("Error: --inputs: inputs.json ")
    assert done.stderr.count("\n") == 1


def test_a_missing_file_and_a_directory_are_two(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", "missing.py")
    assert (done.code, done.stderr) == (2, "Error: File not found: missing.py\n")
    done = cli.run("sandbox", "execute", ".")
    assert (done.code, done.stderr) == (
        2, "Error: . is a folder with neither __main__.py nor main.py: name the file\n"
    )  # fmt: skip


def test_a_wrong_setting_is_two(cli: Cli) -> None:
    cli.env["PARACLE_STOCK"] = "many"
    done = cli.run("sandbox", "list")
    assert done.code == 2
    assert "PARACLE_STOCK" in done.stderr


def test_a_backend_that_is_not_there_is_three_with_a_remedy(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", cli.program(""), "--backend", "docker")
    assert done.code == 3
    assert "Docker" in done.stderr
    assert "SANDBOX_MODE=native" in done.stderr


# execute


def test_streams_and_exit_code_of_a_success(cli: Cli) -> None:
    source = "import sys; print('out'); print('err', file=sys.stderr)"
    done = cli.run("sandbox", "execute", cli.program(source))
    assert (done.code, done.stdout, done.stderr) == (0, "out\n", "err\n")


def test_a_failing_program_is_one(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", cli.program("raise SystemExit(7)"))
    assert (done.code, done.stderr) == (1, "")
    done = cli.run("sandbox", "execute", cli.program("raise SystemExit(7)"), "--verbose")
    assert done.code == 1
    assert "❌ Execution Failed\nError: exit code 7\n" in done.stderr


def test_a_person_is_shown_a_summary(cli: Cli) -> None:
    shown = on_a_terminal(cli, "sandbox", "execute", cli.program("print('out', end='')"))
    lines = shown.decode().replace(_FAKE, "").splitlines()
    assert lines[:2] == ["out", "✅ Execution Successful"]
    names, values = lines[2:4]
    assert names.split() == ["time", "cpu", "memory", "peak", "disk"]
    assert values.index(" of 512 MB") > names.index("memory peak"), "the columns are not in line"
    shown = on_a_terminal(cli, "sandbox", "execute", cli.program("print('out')"), "--quiet")
    assert shown.decode().replace(_FAKE, "") == "out\r\n"


def test_json_is_the_whole_of_stdout_and_equals_the_output_file(cli: Cli) -> None:
    source = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = cli.run("sandbox", "execute", cli.program(source), "--json", "--output", "out.json")
    assert (done.code, done.stderr) == (1, "")
    result = done.json
    assert result == json.loads((cli.home / "out.json").read_text())
    assert result["success"] is False
    assert result["error"] == "err\n"
    assert result["result"]["stdout"] == "out\n"
    assert result["result"]["exit_code"] == 3
    assert result["stats"]["monitoring"]["history_samples"] >= 1


def test_no_monitor_leaves_the_monitoring_out(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", cli.program(""), "--json", "--no-monitor")
    assert "monitoring" not in done.json["stats"]


def test_exact_bytes_come_out_of_a_pipe(cli: Cli) -> None:
    source = "import os; os.write(1, bytes(range(256)) * 1000)"
    done = cli.run("sandbox", "execute", cli.program(source))
    assert done.stdout_bytes == bytes(range(256)) * 1000


def test_inputs_arguments_and_variables_reach_the_program(cli: Cli) -> None:
    (cli.home / "data.json").write_text('{"n": 41}')
    source = (
        "import json, os, sys\n"
        "print(json.load(open('inputs.json'))['n'] + 1, sys.argv[1:], os.environ['WORD'])"
    )
    done = cli.run(
        "sandbox", "execute", cli.program(source), "--inputs", "data.json", "--monitor",
        "--verbose", "--env", "WORD=a=b", "--", "--cpu", "x y",
    )  # fmt: skip
    assert (done.code, done.stdout) == (0, "42 ['--cpu', 'x y'] a=b\n")
    assert "Configuration" in done.stderr
    assert "a=b" not in done.stderr, "a variable may hold a secret"


def test_a_dash_reads_the_program_from_stdin(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", "-", stdin=b"print(6 * 7)\n")
    assert (done.code, done.stdout) == (0, "42\n")


def test_what_is_piped_in_reaches_the_program(cli: Cli) -> None:
    source = "import sys; print(len(sys.stdin.buffer.read()))"
    done = cli.run("sandbox", "execute", cli.program(source), stdin=b"x" * 3_000_000)
    assert (done.code, done.stdout) == (0, "3000000\n")


def test_an_idle_pipe_as_stdin_does_not_hold_the_command(cli: Cli) -> None:
    reader, writer = os.pipe()
    try:
        process = cli.start("sandbox", "execute", cli.program("print(1)"), stdin=reader)
        stdout, _ = process.communicate(timeout=60)
    finally:
        os.close(reader)
        os.close(writer)
    assert (process.returncode, stdout) == (0, b"1\n")


def test_a_program_and_its_user_can_talk(cli: Cli) -> None:
    source = "print('name?', flush=True); print('hello', input(), flush=True); input()"
    process = cli.start("sandbox", "execute", cli.program(source), stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"name?\n"
        process.stdin.write(b"ada\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello ada\n", "output and input are live"
        process.stdin.close()
        assert process.wait(60) == 1
    finally:
        process.stdin = None
        end(process)


def test_stdout_that_is_closed_early_ends_the_command_quietly(cli: Cli) -> None:
    source = "while True: print('y' * 1000)"
    process = cli.start("sandbox", "execute", cli.program(source))
    try:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10_000)
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.stdout = None
        end(process)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "words", ["execute -", "execute program.py", "list", "health --json", "test --json"]
)
def test_streams_that_are_closed_are_as_good_as_nothing(cli: Cli, words: str, closed: str) -> None:
    cli.program("print('hi')")
    command = shlex.join(cli.argv("sandbox", *words.split()))
    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}"], env=cli.env, cwd=cli.home, capture_output=True,
        input=b"print('hi')", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert b"Traceback" not in done.stderr
    if ">&-" not in closed.split():
        # What is for stderr does not come here instead.
        expected = b"" if words.endswith("-") and "<&-" in closed else b"hi\n"
        assert not words.startswith("execute") or done.stdout == expected


def test_the_error_of_a_closed_stderr_goes_nowhere(cli: Cli) -> None:
    command = shlex.join(cli.argv("sandbox", "execute", "nothing.py"))
    done = subprocess.run(
        ["sh", "-c", f"{command} 2>&-"], env=cli.env, cwd=cli.home, capture_output=True
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_stderr_that_nobody_reads_changes_no_exit_code(cli: Cli) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for words, code in (["nothing.py"], 2), ([cli.program("import sys; sys.exit(5)")], 1):
            process = cli.start("sandbox", "execute", *words, stderr=writer)
            process.communicate(timeout=60)
            assert process.returncode == code
    finally:
        os.close(writer)


def test_inputs_may_be_empty(cli: Cli) -> None:
    (cli.home / "data.json").write_text("{}")
    program = cli.program("print(open('inputs.json').read())")
    assert cli.run("sandbox", "execute", program, "--inputs", "data.json").stdout == "{}\n"


def test_the_result_may_go_to_a_pipe_with_a_name(cli: Cli) -> None:
    os.mkfifo(cli.home / "pipe")
    process = cli.start("sandbox", "execute", cli.program("print(1)"), "--output", "pipe")
    try:
        assert json.loads((cli.home / "pipe").read_text())["success"] is True
        assert process.wait(60) == 0
    finally:
        end(process)


def test_no_file_is_made_before_there_is_a_result(cli: Cli) -> None:
    source = "import time; print('up', flush=True); time.sleep(300)"
    process = cli.start("sandbox", "execute", cli.program(source), "--output", "out.json")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        end(process)
    assert not (cli.home / "out.json").exists()


_FAKE = "The fake backend isolates nothing: programs run as plain processes.\r\n"
_HOSTILE = "\\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x9b31m\\u202egnp.exe\\rX"


@pytest.mark.case("E05")
def test_a_terminal_is_shown_control_sequences_escaped(cli: Cli) -> None:
    source = f"import sys; print('é 漢字\\tok {_HOSTILE}'); sys.exit('{_HOSTILE}')"
    shown = on_a_terminal(cli, "sandbox", "execute", cli.program(source)).decode()
    assert "é 漢字\tok \\x1b]52;c;ZXZpbA==\\x07\\x1b[2J" in shown
    assert [c for c in "\x1b\x07\x9b\u202e" if c in shown] == []
    assert "\rX" not in shown


@pytest.mark.case("E05")
def test_raw_lets_them_through(cli: Cli) -> None:
    shown = on_a_terminal(cli, "sandbox", "execute", cli.program("print('\\x1b[1m')"), "--raw")
    assert b"\x1b[1m" in shown


def test_verbose_on_a_terminal_shows_tables(cli: Cli) -> None:
    shown = on_a_terminal(cli, "sandbox", "execute", cli.program(""), "-v").decode()
    assert "memory peak" in shown
    assert "averages" in shown


# health, test, list, cleanup, template


def test_health_of_a_backend_that_works(cli: Cli) -> None:
    done = cli.run("sandbox", "health")
    assert done.code == 0
    assert "✅ Sandbox Available" in done.stdout


def test_health_of_one_that_does_not(cli: Cli) -> None:
    cli.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    done = cli.run("sandbox", "health", "--backend", "docker", "-v")
    assert done.code == 1
    assert "❌ Sandbox Not Available" in done.stdout
    assert "Docker not available: the Docker daemon is not running" in done.stdout
    as_json = cli.run("sandbox", "health", "--backend", "docker", "--json")
    assert as_json.code == 1
    assert as_json.json["backends"][0]["backend"] == "docker"


def test_health_can_be_copied_from_a_narrow_terminal(cli: Cli) -> None:
    """No word of a remedy is cut or broken into lines, and nothing is said twice."""
    shown = on_a_terminal(cli, "sandbox", "health", "--backend", "incus").decode()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n")
    assert plain.splitlines()[:2] == ["🔍 Sandbox Health Check", "❌ Sandbox Not Available"]
    said = cli.run("sandbox", "health", "--backend", "incus", "--json").json["backends"][0]
    assert plain.count(said["detail"]) == 1
    assert plain.count("SANDBOX_MODE=native") == 1
    assert shown != plain, "it is coloured for eyes"
    assert "\x1b" not in cli.run("sandbox", "health", "--backend", "incus").stdout


def test_health_shows_all_remedies_once_and_none_that_is_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remedy = "Run this:\n  sudo sysctl -w " + "x" * 100
    advice = "No cgroups. Mount them. `paracle sandbox health` shows what this machine lacks."
    layers = (Layer("seccomp", True), Layer("landlock", False, "no Landlock", remedy))
    works = Health("native", True, "all but one", layers=layers)
    fails = [Health("docker", False, "not installed", remedy), Health("incus", False, advice)]
    health._show([works, *fails], "native", True, False)
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[1] == "✅ Sandbox Available: native"
    assert lines[-1] == "Not available here: docker, incus (--verbose tells why)"
    assert said.count("x" * 100) == 1 and "in force: seccomp\n" in said
    health._show([works, *fails], "docker", False, False)
    said = capsys.readouterr().out
    assert said.splitlines()[1] == "❌ Sandbox Not Available"
    assert said.count("x" * 100) == 1 and "✗ incus: No cgroups. Mount them.\n" in said
    assert "paracle sandbox health" not in said


def test_list_and_cleanup_of_nothing(cli: Cli) -> None:
    assert cli.run("sandbox", "list").stdout == "No active sandboxes\n"
    assert cli.run("sandbox", "list", "--json").json == []
    assert "Nothing to clean up" in cli.run("sandbox", "cleanup").stdout
    done = cli.run("sandbox", "cleanup", "--all")
    assert (done.code, done.stdout) == (0, "No active sandboxes\n")
    assert cli.run("sandbox", "cleanup", "--all", "--force", "--json").json["removed"] == 0


@pytest.mark.parametrize("words", [["list"], ["cleanup"], ["cleanup", "--all", "--force"]])
def test_a_backend_to_look_at_by_name(words: list[str], tmp_path: Path) -> None:
    """Of all, one that cannot be had has nothing; whoever names it wants to know."""
    cli = Cli(tmp_path, DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert cli.run("sandbox", *words).code == 0
    assert cli.run("sandbox", *words, "--backend", "native").code == 0
    missing = cli.run("sandbox", *words, "--backend", "docker")
    assert missing.code == 3
    assert "Docker not available" in missing.stderr
    assert cli.run("sandbox", *words, "--backend", "nonsense").code == 2


def _template_dir(cli: Cli) -> Path:
    version = "{}.{}.{}".format(*sys.version_info[:3])
    return cli.home / "data" / "templates" / f"default-CPython_{version}"


def test_templates_are_listed_and_removed(cli: Cli) -> None:
    assert [t["built"] for t in cli.run("template", "list", "--json").json] == [False] * 4
    _template_dir(cli).mkdir(parents=True)
    (_template_dir(cli) / "paracle-template.json").write_text("{}")
    listed = {t["name"]: t["built"] for t in cli.run("template", "list", "--json").json}
    assert listed["default"] is True
    assert "is there already" in cli.run("template", "build", "default", "--if-missing").stdout
    assert "removed" in cli.run("template", "remove", "default").stdout
    assert cli.run("template", "remove", "default", "--json").json["removed"] is False
    assert not _template_dir(cli).exists()


def test_an_unknown_template_is_two(cli: Cli) -> None:
    for verb in ("build", "remove"):
        done = cli.run("template", verb, "nope")
        assert (done.code, "known are default" in done.stderr) == (2, True)


def test_a_build_without_an_index_warns_or_fails(cli: Cli) -> None:
    cli.env.update(
        PIP_INDEX_URL="http://127.0.0.1:9/", PIP_RETRIES="0", PIP_CONFIG_FILE="/dev/null"
    )
    done = cli.run("template", "build", "default")
    assert done.code == 3
    assert "paracle template build default" in done.stderr
    done = cli.run("template", "build", "default", "--if-missing")
    assert done.code == 0
    assert "standard library alone" in done.stderr


# Parts


@given(st.text())
def test_printable_text_steers_no_terminal(text: str) -> None:
    shown = printable(text)
    assert not any(ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 for c in shown)
    assert printable(shown) == shown


@given(st.lists(st.text("AB", min_size=1, max_size=12), min_size=1, unique=True))
def test_shortened_ids_stay_distinct(ids: list[str]) -> None:
    width = id_width(ids)
    assert len({name[:width] for name in ids}) == len(ids)


def test_plain_columns_line_up() -> None:
    assert plain_columns([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc  d"]


def test_files_inside_have_the_names_that_the_executor_gives_them() -> None:
    assert execute.CODE_FILE == execution.CODE_FILE


def test_the_command_line_names_no_backend() -> None:
    for path in (SOURCE / "paracle_sandbox" / "cli").glob("*.py"):
        for node in _runtime_imports(ast.parse(path.read_text())):
            if node == "backends.native.prestart":
                continue  # it starts what `auto` is likely to need, before there is a registry
            assert "native" not in node and "docker" not in node, path.name


def _runtime_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return []
    found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    for child in ast.iter_child_nodes(node):
        found += _runtime_imports(child)
    return found


def test_a_short_command_imports_no_rich(cli: Cli) -> None:
    code = (
        "import sys, paracle_sandbox.cli.app as m; m.run(['sandbox', 'execute', sys.argv[1]]);"
        "print(sorted({'rich', 'paracle_sandbox.executor', 'paracle_sandbox.manager'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, cli.program("")],
        env=cli.env, cwd=cli.home, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


def test_ctrl_c_during_any_import_is_quiet(cli: Cli) -> None:
    program = (
        "import os, sys\n"
        "from paracle_sandbox.cli.app import main\n"
        "class Interrupts:\n"
        "    def find_spec(self, *_): os.kill(os.getpid(), 2)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=cli.env, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")


def test_sigterm_ends_with_143(cli: Cli) -> None:
    source = "import time; print('up', flush=True); time.sleep(60)"
    process = cli.start("sandbox", "execute", cli.program(source))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: process.poll()) == 143
    finally:
        end(process)
