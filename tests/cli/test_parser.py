"""One parser reads all commands: what it takes, what it says of mistakes, and what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paracle_cli import SOURCE, Cli, on_a_terminal

from paracle_sandbox.cli import execute, help
from paracle_sandbox.cli.commands import ROOT
from paracle_sandbox.cli.execute import Order
from paracle_sandbox.cli.exit_codes import UsageFault
from paracle_sandbox.cli.parser import Command, Group, find, walk

# Each takes longer to import than to make a sandbox, or has no business in a short command.
HEAVY = {"typer", "click", "pydantic", "rich", "_ssl", "hashlib", "tempfile", "shutil", "email",
         "importlib.metadata", "multiprocessing", "paracle_sandbox.executor",
         "paracle_sandbox.manager"}  # fmt: skip
# What the spawner's processes can do without. All of it would be in every sandbox.
HEAVY_INSIDE = {"dataclasses", "inspect", "uuid", "platform", "pkgutil", "subprocess", "asyncio"}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, SANDBOX_MODE="fake")


# Reading


def order_of(*words: str) -> Order:
    name, entry, rest = find(ROOT, ["sandbox", "execute", *words])
    assert not isinstance(entry, Group)
    return execute._order(entry.build(name).read(rest))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("a.py", {}),
        ("-", {"file": "-"}),
        ("a.py x y", {"args": ["x", "y"]}),
        ("a.py x --quiet y", {"args": ["x", "y"], "quiet": True}),
        ("a.py -- --cpu -x", {"args": ["--cpu", "-x"]}),
        ("a.py -- x -- y", {"args": ["x", "--", "y"]}),
        ("-- ls -l", {"file": None, "command": ["ls", "-l"]}),
        ("-it -- bash", {"file": None, "command": ["bash"], "tty": True}),
        ("-c 1 x -- -y", {"file": None, "code": "1", "args": ["x", "-y"]}),
        ("-c -1", {"file": None, "code": "-1"}),
        ("-c a=b=c", {"file": None, "code": "a=b=c"}),
        ("-qc -x", {"file": None, "code": "-x", "quiet": True}),
        ("-c=1", {"file": None, "code": "1"}),
        ("-cprint()", {"file": None, "code": "print()"}),
        ("--cpu 2 a.py --memory=256", {"limits": {"cpu_cores": "2", "memory_mb": "256"}}),
        ("a.py --timeout 20 --timeout 30", {"limits": {"timeout_seconds": "30"}}),
        ("a.py --network bridge", {"limits": {"network_mode": "bridge"}}),
        ("a.py --env A=1 --env=B=2=3 --env C=-x", {"env": ["A=1", "B=2=3", "C=-x"]}),
        ("a.py -v --json --raw", {"verbose": True, "as_json": True, "raw": True}),
        ("a.py -qt", {"quiet": True, "tty": True}),
        ("a.py --no-monitor", {"monitor": False}),
        ("a.py --no-monitor --monitor", {"monitor": True}),
        ("a.py --inputs i --output --json", {"inputs": "i", "output": "--json"}),
        ("a.py --template ml --backend fake", {"template": "ml", "backend": "fake"}),
        ("a.py --exit-code program", {"own_exit_code": True}),
    ],
)
def test_words_become_an_order(words: str, fields: dict[str, Any]) -> None:
    read = order_of(*words.split())
    limits = {name: value for name, value in read.limits.items() if value is not None}
    expected = {"file": "a.py", "args": [], "env": [], **fields, "limits": limits}
    assert {**vars(read), "limits": limits} == {
        **vars(Order(**expected)),
        "limits": fields.get("limits", {}),
        "env": expected["env"] or (),
        "args": expected["args"] if expected.get("command") is None else (),
    }


def test_an_empty_value_is_a_value() -> None:
    assert order_of("a.py", "--save", "").save == ""
    assert order_of("a.py", "--save=").save == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sandbx", "There is no command paracle sandbx. Did you mean sandbox? See: paracle --help"),
        (
            "sandbox execut",
            "There is no command paracle sandbox execut. Did you mean execute or exec? "
            "See: paracle sandbox --help",
        ),
        ("--versio", "There is no option --versio. Did you mean --version? See: paracle --help"),
        ("sandbox --json", "There is no option --json. See: paracle sandbox --help"),
        (
            "sandbox execute --netwrk=x",
            "There is no option --netwrk. Did you mean --network? See: paracle sandbox execute "
            "--help",
        ),
        ("sandbox execute --out x", "There is no option --out."),
        ("sandbox execute -z", "There is no option -z."),
        ("sandbox execute -9", "There is no option -9."),
        ("sandbox execute --cpu", "--cpu: its value is missing."),
        ("sandbox execute --json=1", "--json: it takes no value (got '1')."),
        ("sandbox execute -ix", "There is no option -x."),
        ("sandbox execute -q=1", "-q: it takes no value (got '1')."),
        (
            "sandbox execute --exit-code mine",
            "--exit-code: it must be one of documented, program (got 'mine').",
        ),
        ("serve --port 65536", "--port: it must be from 0 to 65535 (got '65536')."),
        ("audit show --last x", "--last: it must be a whole number (got 'x')."),
        ("agents run a", "--task is missing. See: paracle agents run --help"),
        ("agents run a -t x --max-tokens 0", "must be at least 1 (got '0')."),
        ("sandbox cp a", "The argument TARGET is missing. See: paracle sandbox cp --help"),
        ("sandbox cp a b c", "There is no argument for 'c'."),
        ("sandbox rm", "The argument ID is missing."),
    ],
)
def test_a_mistake_is_named_with_what_is_near(words: str, message: str) -> None:
    with pytest.raises(UsageFault) as error:
        name, node, rest = find(ROOT, words.split())
        node.build(name).read(rest)
    assert message in str(error.value)


def test_a_mistake_is_one_line_and_two(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", "--netwrk", "none")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: There is no option --netwrk. Did you mean --network?")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["sandbox"], ["keys"]])
def test_without_a_command_help_is_an_error(cli: Cli, words: list[str]) -> None:
    done = cli.run(*words)
    assert (done.code, done.stdout) == (2, "")
    assert f"Usage: {' '.join(['paracle', *words])} [OPTIONS] COMMAND" in done.stderr


# Help


TREE = dict(walk(ROOT))


def groups(node: Group = ROOT, words: str = "paracle") -> dict[str, Group]:
    found = {words: node}
    for name, one in node.commands.items():
        if isinstance(one, Group):
            found |= groups(one, f"{words} {name}")
    return found


@pytest.mark.parametrize("words", TREE)
def test_help_fits_into_80_columns_and_says_everything(words: str) -> None:
    command = TREE[words]
    lines = list(help.help_lines(command, groups().get(words)))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for flag in command.flags:
        assert re.search(rf"^  .*(?<!\S){re.escape(flag)}\b", text, re.MULTILINE), flag
    for argument in command.arguments:
        assert argument.metavar in lines[0]
    assert all(one.help for one in command.arguments)
    assert all(option.help for options in command.sections.values() for option in options)


@pytest.mark.parametrize("words", groups())
def test_a_group_says_of_its_commands_what_they_say_themselves(words: str) -> None:
    for name, entry in groups()[words].commands.items():
        told = " ".join(TREE[f"{words} {name}"].text.split())
        assert told.startswith(entry.summary.rstrip(".")), name


def test_a_group_shows_its_commands_under_headings(cli: Cli) -> None:
    text = cli.run("--help").stdout
    assert [text.index(f"\n{one}:\n") for one in ("Sandboxes", "Service", "Agents", "Options")]
    assert "  -h, --help" in text


def test_help_has_colour_on_a_terminal_alone(cli: Cli) -> None:
    cli.env["TERM"] = "xterm"
    assert "\x1b" not in cli.run("--help").stdout
    assert b"\x1b[1mUsage:\x1b[0m" in on_a_terminal(cli, "--help")
    assert b"\x1b" not in on_a_terminal(Cli(cli.home, NO_COLOR="1"), "--help")
    assert b"\x1b" not in on_a_terminal(Cli(cli.home, TERM="dumb"), "--help")


def test_help_wins_over_what_is_wrong_beside_it(cli: Cli) -> None:
    for words in (["--bogus", "--help"], ["-h"], ["a.py", "--cpu", "1", "--help"]):
        done = cli.run("sandbox", "execute", *words)
        assert (done.code, done.stdout[:30]) == (0, "Usage: paracle sandbox execute"), done
    # Behind the dashes it is the program's.
    done = cli.run("sandbox", "execute", cli.program("import sys; print(sys.argv[1:])"), "--", "-h")
    assert (done.code, done.stdout) == (0, "['-h']\n")


def test_what_a_limit_may_be_is_told_from_the_one_table() -> None:
    command = Command("x")
    execute.declare_execute(command)
    helps = {flag: action.help for flag, action in command._by_flag.items()}
    assert helps["--memory"] == "Memory in MB (128-16384) [default: 512]"
    assert helps["--cpu"] == "CPU cores (0.1-16.0) [default: 1.0]"


# Imports


def imported_by(cli: Cli, *words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *cli.argv(*words)[1:]],
        env=cli.env, cwd=cli.home, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))


@pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")
@pytest.mark.parametrize("words", [["program.py"], ["-c", "print(1)"], ["-q", "--", "true"]])
def test_a_short_command_imports_little(tmp_path: Path, words: list[str]) -> None:
    cli = Cli(tmp_path, PYTHONPATH=str(SOURCE))  # without the watchdog, which imports more
    cli.program("")
    imported = imported_by(cli, "sandbox", "execute", *words)
    assert "paracle_sandbox.backends.native.spawner_client" in imported
    assert not HEAVY & imported


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["sandbox", "--help"]])
def test_help_imports_next_to_nothing(tmp_path: Path, words: list[str]) -> None:
    imported = imported_by(Cli(tmp_path, PYTHONPATH=str(SOURCE)), *words)
    assert not (HEAVY | {"asyncio", "logging", "dataclasses", "json"}) & imported
    ours = {name for name in imported if name.startswith("paracle_sandbox.")}
    assert {name for name in ours if ".cli" not in name} <= {
        "paracle_sandbox.errors", "paracle_sandbox.host", "paracle_sandbox.host.platforms",
    }  # fmt: skip


def test_a_command_imports_no_other(tmp_path: Path) -> None:
    imported = imported_by(Cli(tmp_path, PYTHONPATH=str(SOURCE)), "template", "list")
    ours = {name.rpartition(".")[2] for name in imported if name.startswith("paracle_sandbox.cli.")}
    assert not ours & {"execute", "program", "attach", "list_cleanup", "health", "image", "serve",
                       "keys", "audit", "mcp", "completion", "help"}  # fmt: skip


@pytest.mark.parametrize(
    "imports",
    [
        "from paracle_sandbox.jail.launch import _import_spawner; _import_spawner(path)",
        "import paracle_sandbox.jail.zygote",
    ],
    ids=["spawner", "zygote"],
)
def test_what_sandboxes_come_from_imports_little(imports: str) -> None:
    code = f"import sys; path = {str(SOURCE)!r}; sys.path.insert(0, path); {imports}; "
    command = [sys.executable, "-I", "-S", "-E", "-c", f"{code}print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not HEAVY_INSIDE & set(done.stdout.split())
