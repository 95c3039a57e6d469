"""The command line over real native sandboxes: limits, signals, other processes, leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paracle_cli import Cli, cgroups_of, end, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")

_SLEEPER = "import time; print('up', flush=True); time.sleep(300)"
# What an interpreter says that was interrupted before it came to a program.
_ENDS_OF_PYTHON = (b"Could not import runpy", b"Fatal Python error: init_")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, SANDBOX_MODE="native")


@pytest.fixture
def sleeper(cli: Cli) -> Iterator[subprocess.Popen[bytes]]:
    """Another process with a live sandbox."""
    process = cli.start("sandbox", "execute", cli.program(_SLEEPER))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        end(process)
        wait_for(lambda: not cli.remains())


def test_execute_runs_inside_and_leaves_nothing(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", cli.program("import os; print(os.getuid(), os.getcwd())"))
    assert (done.code, done.stdout) == (0, "1000 /workspace\n"), done
    assert cli.remains() == []


def test_the_umask_is_not_the_owners(cli: Cli) -> None:
    before = os.umask(0o077)
    try:
        done = cli.run("sandbox", "execute", cli.program("import os; print(oct(os.umask(0)))"))
    finally:
        os.umask(before)
    assert done.stdout == "0o22\n", done


def test_health_is_that_of_the_backend_that_is_used(cli: Cli) -> None:
    """Others may work: a program would not be run there."""
    cli.env.update(SANDBOX_MODE="auto", PARACLE_PYTHON="/bin/false")
    done = cli.run("sandbox", "health", "--json")
    names = [one["backend"] for one in done.json["backends"]]
    assert names == ["remote", "native", "docker", "incus", "gvisor", "incus-vm", "daytona"]
    assert (done.code, done.json["available"]) == (1, False)


def test_health_and_test_pass(cli: Cli) -> None:
    done = cli.run("sandbox", "health")
    assert done.code == 0, done
    assert "seccomp" in done.stdout
    as_json = cli.run("sandbox", "health", "--json").json
    assert as_json["available"] is True
    assert {layer["name"] for layer in as_json["backends"][0]["layers"]} >= {"seccomp"}
    done = cli.run("sandbox", "test", "--cpu", "0.5", "--memory", "256")
    assert (done.code, "✅ Test Passed" in done.stdout) == (0, True), done
    assert cli.run("sandbox", "test", "--json").json["passed"] is True
    assert cli.remains() == []


def test_health_and_test_say_what_is_broken(cli: Cli) -> None:
    cli.env["PARACLE_PYTHON"] = "/bin/false"
    done = cli.run("sandbox", "health")
    assert (done.code, "❌ Sandbox Not Available" in done.stdout) == (1, True), done
    done = cli.run("sandbox", "test")
    assert (done.code, "❌ Test Failed" in done.stdout) == (1, True), done
    assert "Traceback" not in done.stderr


def test_a_failing_step_is_three_and_named(cli: Cli) -> None:
    cli.env["PARACLE_FAILPOINTS"] = "seccomp"
    done = cli.run("sandbox", "execute", cli.program("print('ran')"))
    assert (done.code, done.stdout) == (3, ""), done
    assert "seccomp" in done.stderr
    assert "Traceback" not in done.stderr
    words = ("--json", "--output", "out.json")
    done = cli.run("sandbox", "execute", cli.program("print('ran')"), *words)
    assert done.code == 3 and done.json["error_type"] == "SandboxCreationError"
    assert json.loads((cli.home / "out.json").read_text()) == done.json
    assert cli.remains() == []


def test_a_timeout_is_124_and_keeps_what_was_printed(cli: Cli) -> None:
    done = cli.run(
        "sandbox", "execute", cli.program(_SLEEPER), "--timeout", "10", "--output", "out.json"
    )
    assert (done.code, done.stdout) == (124, "up\n"), done
    assert "timed out after 10 seconds" in done.stderr
    result = json.loads((cli.home / "out.json").read_text())
    assert (result["success"], result["error_type"]) == (False, "SandboxTimeoutError")
    assert (result["result"]["stdout"], result["result"]["timed_out"]) == ("up\n", True)
    assert cli.remains() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: memory limits need a writable cgroup")
def test_a_memory_limit_is_three_and_named(cli: Cli) -> None:
    source = "print('up', flush=True); x = b'x' * (1 << 30)"
    done = cli.run("sandbox", "execute", cli.program(source), "--memory", "128", "--json")
    assert done.code == 3, done
    assert done.json["error_type"] == "ResourceLimitError"
    assert "memory" in done.json["error"].lower()
    assert cli.remains() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(
    cli: Cli, sleeper: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    groups = [group for record in cli.records() for group in cgroups_of(record)]
    assert cli.remains()
    sleeper.send_signal(number)
    _, stderr = sleeper.communicate(timeout=30)
    assert sleeper.returncode == 128 + number
    assert b"Traceback" not in stderr
    assert cli.remains() == []
    assert [group for group in groups if group.exists()] == []


def test_two_signals_end_it_at_once_and_still_leave_nothing(
    cli: Cli, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.send_signal(signal.SIGINT)
    sleeper.send_signal(signal.SIGINT)
    assert sleeper.wait(30) == 130
    wait_for(lambda: not cli.remains(), 5)


def test_a_signal_while_it_starts_leaves_nothing(cli: Cli) -> None:
    for seconds in (0.05, 0.15, 0.25, 0.35):
        process = cli.start("sandbox", "execute", cli.program(_SLEEPER))
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        # Before our first line runs, Python itself dies of it.
        by_python = process.returncode == 1 and stderr.startswith(_ENDS_OF_PYTHON)
        assert by_python or process.returncode in (130, -signal.SIGINT), stderr
        assert b"Traceback" not in stderr or process.returncode != 130
        wait_for(lambda: not cli.live_remains(), 5)
        # A spawner that was only coming up may leave an empty directory for the next sweep.
        cli.run("sandbox", "cleanup")
        assert cli.remains() == []


def test_a_blocked_reader_does_not_keep_ctrl_c_from_working(cli: Cli) -> None:
    process = cli.start("sandbox", "execute", cli.program("while True: print('y' * 1000)"))
    try:
        assert process.stdout is not None
        process.stdout.read(1000)  # and no more: the pipe fills up
        wait_for(lambda: cli.records())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        wait_for(lambda: not cli.remains(), 5)
    finally:
        end(process)


def test_list_sees_the_sandbox_of_another_process(
    cli: Cli, sleeper: subprocess.Popen[bytes]
) -> None:
    (entry,) = cli.run("sandbox", "list", "--json").json
    assert (entry["backend"], entry["owner_pid"], entry["owner_alive"]) == (
        "native", sleeper.pid, True,
    )  # fmt: skip
    assert len(cli.run("sandbox", "list", "--json", "--backend", "native").json) == 1
    assert cli.run("sandbox", "list", "--json", "--backend", "fake").json == []
    shown = cli.run("sandbox", "list").stdout
    assert entry["sandbox_id"][:8] in shown
    assert "CPU %" in shown and "Memory MB" in shown and "Memory %" in shown
    assert "1 sandbox(es)" in shown


def test_cleanup_without_all_keeps_what_is_in_use(
    cli: Cli, sleeper: subprocess.Popen[bytes]
) -> None:
    done = cli.run("sandbox", "cleanup")
    assert done.code == 0
    assert "paracle sandbox cleanup --all" in done.stdout
    assert sleeper.poll() is None
    assert len(cli.run("sandbox", "list", "--json").json) == 1


@pytest.mark.parametrize("answer", [b"n\n", b"\n", b"", b"nonsense\n"])
def test_cleanup_asks_and_no_cancels(
    cli: Cli, sleeper: subprocess.Popen[bytes], answer: bytes
) -> None:
    done = cli.run("sandbox", "cleanup", "--all", stdin=answer)
    assert done.code == 0, done
    assert "Destroy 1 sandbox(es)? [y/N]" in done.stderr
    done = cli.run("sandbox", "cleanup", "--all", "--json", stdin=answer)
    assert done.json == {"removed": 0, "remaining": 1, "failed": []}
    assert len(cli.run("sandbox", "list", "--json").json) == 1


@pytest.mark.parametrize(("words", "answer"), [(["--force"], b""), ([], b"y\n")])
def test_cleanup_removes_the_sandbox_of_a_live_process(
    cli: Cli, sleeper: subprocess.Popen[bytes], words: list[str], answer: bytes
) -> None:
    done = cli.run("sandbox", "cleanup", "--all", *words, stdin=answer)
    assert (done.code, done.stdout) == (0, "✅ Cleaned up 1 sandbox(es)\n"), done
    assert cli.run("sandbox", "list").stdout == "No active sandboxes\n"
    _, stderr = sleeper.communicate(timeout=30)
    assert sleeper.returncode == 3, "its owner learns that the sandbox is gone"
    assert b"Traceback" not in stderr
    assert cli.remains() == []


def test_cleanup_removes_what_a_killed_process_left(
    cli: Cli, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.send_signal(signal.SIGKILL)
    sleeper.wait(30)
    done = cli.run("sandbox", "cleanup", "--all", "--force")
    assert done.code == 0, done
    assert cli.run("sandbox", "list").stdout == "No active sandboxes\n"
    wait_for(lambda: not cli.remains(), 5)


def test_cleanup_sweeps_a_record_whose_process_is_gone(cli: Cli) -> None:
    """As after a power cut: the record is there, and nothing else."""
    cli.state.mkdir()
    (cli.state / "instances").mkdir()
    content = {"id": "LOST", "instance": 7, "state": "running", "owner": {"pid": 1}}
    (cli.state / "LOST.json").write_text(json.dumps(content))
    (entry,) = cli.run("sandbox", "list", "--json").json
    assert (entry["sandbox_id"], entry["owner_alive"]) == ("LOST", False)
    assert "(dead)" in cli.run("sandbox", "list").stdout
    done = cli.run("sandbox", "cleanup")
    assert (done.code, "✅ Cleaned up 1 sandbox(es)" in done.stdout) == (0, True), done
    assert cli.records() == []


# Sandboxes of other processes


def test_one_of_another_process_is_refused_with_the_reason(
    cli: Cli, sleeper: subprocess.Popen[bytes]
) -> None:
    (listed,) = cli.run("sandbox", "list", "--json").json
    short = listed["sandbox_id"][:10]
    for words in (
        ["exec", short, "--", "id"],
        ["cp", f"{short}:x", "."],
        ["cp", "program.py", f"{short}:"],
    ):
        done = cli.run("sandbox", *words)
        assert done.code == (125 if words[0] == "exec" else 3), done
        assert f"only by process {sleeper.pid}" in done.stderr
    done = cli.run("sandbox", "logs", short)
    assert (done.code, "--output FILE" in done.stderr) == (3, True), done
    assert cli.run("sandbox", "shell", short).code == 2
    assert sleeper.poll() is None


def test_rm_asks_whose_it_is(cli: Cli, sleeper: subprocess.Popen[bytes]) -> None:
    (listed,) = cli.run("sandbox", "list", "--json").json
    short = listed["sandbox_id"][:10]
    done = cli.run("sandbox", "rm", short)
    assert (done.code, f"in use by process {sleeper.pid}" in done.stderr) == (2, True), done
    assert cli.records()
    done = cli.run("sandbox", "rm", short, "--force", "--json")
    assert (done.code, done.json) == (0, {"removed": [listed["sandbox_id"]]}), done
    assert cli.run("sandbox", "list", "--json").json == []
    done = cli.run("sandbox", "rm", short)
    assert (done.code, "There is no sandbox" in done.stderr) == (2, True), done
