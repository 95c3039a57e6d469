"""Completion, in the shells that are here and as each of them asks for it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paracle_cli import Cli

from paracle_sandbox.cli.completion import offer


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """With ``paracle`` on the PATH, as a shell finds it."""
    cli = Cli(tmp_path, SANDBOX_MODE="fake")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "paracle").write_text(f'#!/bin/sh\nexec {sys.executable} -m paracle_sandbox "$@"\n')
    (folder / "paracle").chmod(0o755)
    cli.env["PATH"] = f"{folder}:{cli.env['PATH']}"
    return cli


def install(cli: Cli, shell: str) -> None:
    """From that shell, which is how the command knows it."""
    done = subprocess.run(
        [shell, "-c", "paracle --install-completion; exit $?"], env=cli.env, cwd=cli.home,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{shell} completion installed in {cli.home}" in done.stdout


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not here")


# Words, and what is offered for the last of them.
LINES = {
    "paracle ": "sandbox template image serve keys audit agents mcp",
    "paracle key": "keys",
    "paracle --": "--version --install-completion --show-completion --help",
    "paracle template ": "list build remove",
    "paracle template build d": "default dev",
    "paracle image build br": "browser",
    "paracle sandbox execute --network ": "none bridge host",
    "paracle sandbox execute a.py --cpu 1 --mem": "--memory",
    "paracle sandbox execute --exit-code p": "program",
    "paracle sandbox rm --for": "--force",
    "paracle sandbox list --backend gv": "gvisor",
    "paracle agents run coder --provider o": "openai ollama",
    "paracle agents run coder -t 'a task' --mode s": "safe sandbox",
    "paracle nothing ": "",
    "paracle sandbox shell -qx ": "",
    "paracle sandbox execute -- --network ": "",
}


@pytest.mark.parametrize("line", LINES)
def test_what_is_offered(line: str) -> None:
    words = line.replace("'a task'", "a_task").split(" ")
    assert [word for word, _ in offer(words[1:-1], words[-1])] == LINES[line].split()


def test_values_behind_an_equals_sign() -> None:
    assert offer(["sandbox", "execute"], "--network=b") == [("--network=bridge", "")]


def test_commands_and_options_say_what_they_mean() -> None:
    found = dict(offer(["sandbox"], ""))
    assert found["rm"] == "Remove sandboxes of any process."
    assert all(len(meaning) <= 60 for meaning in found.values())
    assert dict(offer(["sandbox", "rm"], "--f")) == {"--force": "Also while it is in use."}


@needs("bash")
@pytest.mark.parametrize("line", LINES)
def test_bash(cli: Cli, line: str) -> None:
    install(cli, "bash")
    words = line.replace("'a task'", "a_task").split(" ")
    program = (
        "source ~/.bashrc; complete -p paracle >&2; "
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_paracle_completion paracle; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program], env=cli.env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == LINES[line].split(), done.stderr
    assert "-F _paracle_completion paracle" in done.stderr


@needs("bash")
def test_bash_is_told_once(cli: Cli) -> None:
    (cli.home / ".bashrc").write_text("# mine\n")
    install(cli, "bash")
    once = (cli.home / ".bashrc").read_text()
    install(cli, "bash")
    assert (cli.home / ".bashrc").read_text() == once
    assert once.startswith("# mine\n") and once.count("source ") == 1


@needs("zsh")
def test_zsh(cli: Cli) -> None:
    install(cli, "zsh")
    program = (
        "_arguments() { print -r -- $@ }; _files() { print files }; compdef() { :; }; "
        "source ~/.zfunc/_paracle; words=(paracle sandbox execute --network b); CURRENT=5; "
        "_paracle_completion"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", program], env=cli.env, capture_output=True, text=True, timeout=60
    )
    assert '"bridge"' in done.stdout, done.stderr


@needs("fish")
def test_fish(cli: Cli) -> None:
    install(cli, "fish")
    done = subprocess.run(
        ["fish", "-c", "complete -C 'paracle sandbox execute --network b'"], env=cli.env,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["bridge"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_can_be_shown(cli: Cli, shell: str) -> None:
    """For the shell of the login, where none that we know is above us."""
    cli.env["SHELL"] = f"/usr/bin/{shell}"
    cli.env["_PARACLE_COMPLETE"] = f"source_{shell}"
    asked = cli.run()
    del cli.env["_PARACLE_COMPLETE"]
    assert (asked.code, "paracle" in asked.stdout) == (0, True), asked
    shown = cli.run("--show-completion")
    assert shown.code == 0 and "_PARACLE_COMPLETE" in shown.stdout, shown


def test_fish_asks_first_whether_there_is_anything(cli: Cli) -> None:
    cli.env |= {"_PARACLE_COMPLETE": "complete_fish", "_PARACLE_COMPLETE_FOR": "condition"}
    for line, code in (("paracle sand", 0), ("paracle sandbox execute ", 1)):
        cli.env["_PARACLE_COMPLETE_LINE"] = line
        done = cli.run()
        assert (done.code, done.stdout, done.stderr) == (code, "", "")


def test_an_unknown_shell_is_two(cli: Cli) -> None:
    cli.env["_PARACLE_COMPLETE"] = "complete_tcsh"
    done = cli.run()
    assert (done.code, "known shells are bash, zsh, fish" in done.stderr) == (2, True)
