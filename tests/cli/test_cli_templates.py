"""Templates as a user builds them: of wheels on this disk, or of an index that never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paracle_cli import SOURCE, Cli, Done, end, make_wheel, wait_for

from paracle_sandbox.backends.native.template_kinds import PACKAGES
from paracle_sandbox.backends.native.template_pip import step_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")

_USES_IT = "import requests; print(requests.version)"
_NO_CONFIG = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """With the packages of the default template at hand, and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in PACKAGES["default"]:
        make_wheel(wheels, name)
    return Cli(
        tmp_path, SANDBOX_MODE="native", PARACLE_TEMPLATE_BUILD="1", PIP_FIND_LINKS=str(wheels),
        **_NO_CONFIG,
    )  # fmt: skip


@pytest.fixture
def silent(cli: Cli) -> Iterator[Cli]:
    """pip waits for an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        del cli.env["PIP_NO_INDEX"], cli.env["PIP_FIND_LINKS"]
        cli.env["PIP_INDEX_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        yield cli


def use(cli: Cli, **options: object) -> Done:
    return cli.run("sandbox", "execute", cli.program(_USES_IT), **options)


def hidden(cli: Cli) -> list[str]:
    """What builders have left, beside their locks and those of users."""
    found = (path.name for path in (cli.home / "data/templates").glob(".*"))
    return sorted(n for n in found if not n.endswith(".lock") and not n.startswith(".use-"))


def installers(cli: Cli) -> list[str]:
    """Processes that install into the templates of this test."""
    place = str(cli.home / "data/templates").encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


def builder(cli: Cli) -> int:
    """The process that runs pip."""
    (found,) = [pid for pid in installers(cli) if b"template_builder" in command_of(pid)]
    return int(found)


def command_of(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_build_says_little_and_first_use_builds(cli: Cli) -> None:
    done = cli.run("template", "build", "default")
    assert done.code == 0, done
    steps = [f"collecting {name}" for name in PACKAGES["default"]]
    steps.append(f"installing {len(steps)} packages")
    assert done.stderr.splitlines() == [
        "Building the default template", *(f"  {step}" for step in steps)
    ]  # fmt: skip
    assert use(cli).stdout == "1.0\n"
    assert cli.run("template", "remove", "default").code == 0
    again = use(cli)
    assert again.stdout == "1.0\n"
    assert "Building the default template, once" in again.stderr
    assert "may import requests: waiting for the default template" in again.stderr


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting requests", "collecting requests"),
        ("Collecting PyYAML", "collecting PyYAML"),
        ("Processing ./wheels/click-8.3.0-py3-none-any.whl (from -r x)", "collecting click"),
        ("Processing /opt/certifi-2026.1-py3-none-any.whl", ""),
        ("Collecting urllib3<3,>=1.26 (from requests)", ""),
        ("  Downloading pydantic_core-2.41.5-cp311-cp311-manylinux_2_17_x86_64.whl (2.1 MB)",
         "downloading pydantic_core 2.41.5 (2.1 MB)"),
        ("  Downloading https://a.org/b/c/numpy-2.3-cp311-x.whl (16 MB)",
         "downloading numpy 2.3 (16 MB)"),
        ("  Downloading idna-3.11-py3-none-any.whl (71 kB)", ""),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("WARNING: something", ""),
    ],
)  # fmt: skip
def test_what_is_told_of_pips_words(line: str, step: str) -> None:
    assert step_of(line, PACKAGES["default"]) == step


def test_what_pip_said_is_shown_when_it_failed(cli: Cli) -> None:
    (next((cli.home / "wheels").glob("requests-*"))).unlink()
    for words, code in (["default"], 3), (["default", "--if-missing"], 0):
        done = cli.run("template", "build", *words)
        assert done.code == code
        assert "ERROR: No matching distribution found for requests" in done.stderr.splitlines()
    without = use(cli)
    assert "ERROR: Could not find a version" not in without.stderr, "the cause in one line will do"
    assert "No matching distribution found for requests" in without.stderr
    assert "requests is not there: " in without.stderr


def test_an_index_that_cannot_be_reached_is_asked_once(cli: Cli) -> None:
    """R23. By `make run`, which builds first and then runs a program that would."""
    del cli.env["PIP_NO_INDEX"], cli.env["PIP_FIND_LINKS"]
    cli.env["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"
    done = cli.run("template", "build", "default", "--if-missing")
    assert (done.code, "cannot be reached: [Errno 111]" in done.stderr) == (0, True), done
    done = cli.run("sandbox", "execute", cli.program("print(1)"))
    assert (done.code, done.stdout) == (0, "1\n"), done
    first = done.stderr.splitlines()[0]
    assert first.startswith("Sandboxes run with the standard library alone: ")
    assert "the package index cannot be reached" in first and "once" not in first


def test_other_packages_of_the_interpreter_are_no_concern(cli: Cli) -> None:
    """pip compares what it installs with what is there, though no sandbox will see that."""
    venv = cli.home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "needy-1.0.dist-info").mkdir()
    (packages / "needy-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: needy\nVersion: 1.0\nRequires-Dist: requests<1\n"
    )
    cli.env["PARACLE_PYTHON"] = str(venv / "bin/python")
    done = cli.run("template", "build", "default")
    assert (done.code, "needy" in done.stderr) == (0, False), done


def test_files_can_be_read_inside_whatever_the_umask(cli: Cli) -> None:
    assert cli.run("template", "build", "default", umask=0o077).code == 0
    assert use(cli).stdout == "1.0\n"


def test_nothing_of_the_working_directory_is_run(cli: Cli) -> None:
    """It may be a project that nobody has read."""
    for name in ("pip", "tempfile"):
        (cli.home / f"{name}.py").write_text(f"open({str(cli.home / 'ran')!r}, 'w')\n")
    program = cli.program(_USES_IT)
    starter = "import sys; sys.path.remove(''); from paracle_sandbox.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", starter, "sandbox", "execute", program],
        env=cli.env, cwd=cli.home, capture_output=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    assert not (cli.home / "ran").exists()
    assert done.stdout == b"1.0\n", done


def test_nor_to_find_out_where_packages_come_from(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    program = (
        "from paracle_sandbox.sandbox.package_index import index_of_this_machine as a\n"
        "from paracle_sandbox.images.package_index import read_machine_files as b\n"
        "print(a().partition(':')[0], type(b()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env={"PYTHONPATH": str(SOURCE)}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not (tmp_path / "ran").exists()
    assert done.stdout.startswith("http")


@pytest.mark.parametrize(
    "variable", ["PIP_REQUIRE_VIRTUALENV=1", "PIP_USER=1", "PYTHONPATH=/nowhere"]
)
def test_pip_may_be_told_otherwise(cli: Cli, variable: str) -> None:
    name, _, value = variable.partition("=")
    cli.env[name] = f"{value}:{cli.env[name]}" if name in cli.env else value
    done = cli.run("template", "build", "default")
    assert done.code == 0, done


def test_a_directory_that_cannot_be_written_leaves_the_standard_library(cli: Cli) -> None:
    (cli.home / "file").write_text("")
    cli.env["PARACLE_DATA_DIR"] = str(cli.home / "file/data")
    done = cli.run("sandbox", "execute", cli.program("print(1)"))
    assert done.stdout == "1\n", done
    assert "PARACLE_DATA_DIR" in done.stderr and "standard library alone" in done.stderr
    done = cli.run("template", "build", "default")
    assert (done.code, "PARACLE_DATA_DIR" in done.stderr) == (3, True), done


def test_whoever_ignores_the_end_of_children_can_build(cli: Cli) -> None:
    program = (
        "import signal, paracle_sandbox as p\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"print(p.run({_USES_IT!r})['result']['stdout'])"
    )
    assert python(cli, program) == "1.0\n\n"


def test_inside_a_running_event_loop_it_is_built_too(cli: Cli) -> None:
    program = (
        "import asyncio, paracle_sandbox as p\n"
        f"async def main(): return p.run({_USES_IT!r})\n"
        "print(asyncio.run(main())['result']['stdout'])"
    )
    assert python(cli, program) == "1.0\n\n"


def python(cli: Cli, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=cli.env, cwd=cli.home, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done
    return done.stdout.decode()


def test_processes_that_come_together_build_once(cli: Cli) -> None:
    program = cli.program(_USES_IT)
    started = [cli.start("sandbox", "execute", program) for _ in range(3)]
    try:
        ends = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            end(process)
    assert [out for out, _ in ends] == [b"1.0\n"] * 3, ends
    assert sum(err.count(b"Building the default template") for _, err in ends) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("words", ["template build default", "sandbox execute --template api -"])
def test_a_signal_while_it_builds_leaves_nothing(
    silent: Cli, words: str, number: signal.Signals
) -> None:
    """As Ctrl-C does, to all of the group; and the next one tries again."""
    process = silent.start(*words.split(), process_group=0)
    try:
        wait_for(lambda: installers(silent) and hidden(silent))
        os.killpg(process.pid, number)
        process.communicate(timeout=20)
    finally:
        end(process)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    wait_for(lambda: not installers(silent) and hidden(silent) == [])
    assert killed or silent.live_remains() == []


def test_what_a_killed_builder_left_is_gone_with_the_next(silent: Cli, cli: Cli) -> None:
    """pip ends with its builder, and a program that waits for the packages is not stuck."""
    process = silent.start("sandbox", "execute", cli.program("print(1)"))
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == (b"1\n", 0), err
    wait_for(lambda: len(installers(silent)) == 2 and hidden(silent))
    os.kill(builder(silent), signal.SIGKILL)
    wait_for(lambda: not installers(silent))
    assert hidden(cli)
    cli.env.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(cli.home / "wheels"))
    assert cli.run("template", "build", "default").code == 0
    assert hidden(cli) == []


@pytest.mark.parametrize("verb", ["build", "remove"])
def test_a_sandbox_keeps_the_template_that_it_began_with(cli: Cli, verb: str) -> None:
    assert cli.run("template", "build", "default").code == 0
    source = "import sys; print('up', flush=True); input(); " + _USES_IT
    process = cli.start("sandbox", "execute", cli.program(source), stdin=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        make_wheel(cli.home / "wheels", "requests", "2.0")
        assert cli.run("template", verb, "default").code == 0
        out, _ = process.communicate(b"\n", timeout=60)
    finally:
        end(process)
    assert out == b"1.0\n"
    assert use(cli).stdout == "2.0\n"
    assert cli.run("template", "remove", "default").code == 0
    assert hidden(cli) == [], "nobody uses it any more"
