"""What goes wrong around a command is one line that says what to do, and never a traceback."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paracle_cli import Cli, Done, end

from paracle_sandbox import SandboxConfig

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root: a small disk is mounted"
)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, SANDBOX_MODE="fake")


def on_a_full_disk(cli: Cli, place: Path, *words: str) -> Done:
    """The command, in a mount namespace where there is no room below ``place``; what is there
    afterwards is printed after a line of dashes."""
    place.mkdir(parents=True, exist_ok=True)
    where = shlex.quote(str(place))
    script = (
        f"mount -t tmpfs -o size=64k,mode=700 tmpfs {where}; echo old > {where}/old.json; "
        f"head -c 1M /dev/zero > {where}/filler 2>/dev/null; "
        f"{shlex.join(cli.argv(*words))}; code=$?; "
        f"echo ------; ls -A {where}; cat {where}/old.json; exit $code"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], env=cli.env, cwd=cli.home, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def is_one_line(done: Done) -> bool:
    # What is left of the fake backend's warning where it is logged.
    lines = done.stderr.removeprefix("WARNING ").splitlines()
    return len(lines) == 1 and lines[0].startswith("Error: ") and "Unexpected" not in lines[0]


@needs_root
def test_a_result_is_saved_whole_or_not_at_all(cli: Cli) -> None:
    disk = cli.home / "disk"
    words = ("sandbox", "execute", "-c", "print('x' * 100_000)", "--json", "--output")
    for name in ("new.json", "old.json"):
        done = on_a_full_disk(cli, disk, *words, f"{disk}/{name}")
        assert (done.code, is_one_line(done)) == (3, True), done
        assert f"--output: {disk}/{name} cannot be written: No space left" in done.stderr
        assert done.stdout.endswith("------\nfiller\nold.json\nold\n"), "the old one, and no half"


@needs_root
def test_keys_on_a_full_disk(cli: Cli) -> None:
    for words in (("make", "ann"), ("list",)):
        done = on_a_full_disk(cli, cli.home / "data" / "service", "keys", *words)
        assert (done.code, is_one_line(done)) == (3, True), done
        assert "Make room" in done.stderr or "No space left" in done.stderr


@pytest.mark.parametrize(
    "words", [("keys", "list"), ("keys", "make", "ann"), ("keys", "revoke", "x"), ("serve",)]
)
def test_a_damaged_database(cli: Cli, words: tuple[str, ...]) -> None:
    directory = cli.home / "data" / "service"
    directory.mkdir(parents=True)
    (directory / "keys.db").write_bytes(b"this is no database" * 100)
    done = cli.run(*words, *(["--port", "0"] if words == ("serve",) else []))
    assert (done.code, is_one_line(done)) == (3, True), done
    assert "keys.db" in done.stderr and "file is not a database" in done.stderr


_FOREIGN = [b"{}", b"[1]", b"null", b'{"n": "x", "time": 1, "event": null, "cost": "x"}', b"\xff",
            b"[" * 100_000, b"no JSON"]  # fmt: skip


@pytest.mark.parametrize("line", _FOREIGN, ids=lambda line: repr(line[:20]))
def test_foreign_lines_of_the_logs(cli: Cli, line: bytes) -> None:
    cli.env["SANDBOX_MODE"] = "fake"
    assert cli.run("keys", "make", "ann").code == 0
    log = cli.home / "data" / "service" / "audit.jsonl"
    log.write_bytes(log.read_bytes() + line + b"\n")
    journal = cli.home / "data" / "agents" / "audit.jsonl"
    journal.parent.mkdir(exist_ok=True)
    journal.write_bytes(line + b"\n")
    for words, code in (
        (["audit", "show"], 0), (["keys", "make", "bob"], 0), (["audit", "show", "--json"], 0),
        (["audit", "verify"], 1), (["agents", "audit"], 0), (["agents", "audit", "--summary"], 0),
    ):  # fmt: skip
        done = cli.run(*words)
        assert (done.code, "Traceback" in done.stderr, "Unexpected" in done.stderr) == (
            code, False, False,
        ), done  # fmt: skip
    assert "key_made" in cli.run("audit", "show").stdout


def test_what_is_printed_to_a_full_disk(cli: Cli) -> None:
    for words in (
        ["sandbox", "list"],
        ["sandbox", "list", "--json"],
        ["sandbox", "execute", "-c", "print(1)"],
    ):
        with open("/dev/full", "w") as full:
            process = cli.start(*words, stdout=full)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 3, stderr
        assert b"Traceback" not in stderr and b"No space left on device" in stderr


def test_a_mistake_of_ours_is_told_in_a_line(cli: Cli) -> None:
    program = (
        "import paracle_sandbox.cli.list_cleanup as i, sys\n"
        "def broken(*_): raise KeyError('n')\n"
        "i.list_sandboxes = broken\n"
        "from paracle_sandbox.cli.app import run\n"
        "sys.exit(run(['sandbox', 'list']))\n"
    )
    for level, traceback in (("warning", False), ("debug", True)):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True,
            env={**cli.env, "PARACLE_SANDBOX_LOG_LEVEL": level},
        )  # fmt: skip
        assert done.returncode == 3
        assert "Unexpected KeyError: 'n'" in done.stderr
        assert not traceback or "LOG_LEVEL=debug" in done.stderr


def test_a_taken_port(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (["mcp", "--http"], ["serve"]):
            done = cli.run(*words, "--port", port)
            assert (done.code, is_one_line(done)) == (3, True), done
            assert f"Cannot listen on 127.0.0.1 port {port}" in done.stderr
            assert "--port" in done.stderr


def test_mcp_says_on_a_terminal_what_it_is(cli: Cli) -> None:
    ours, theirs = pty.openpty()
    process = cli.start("mcp", stdin=theirs)
    try:
        assert process.stderr is not None
        said = b""
        while b"Ctrl-C ends it" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert b"mcpServers" in said and b"--http" in said
        process.send_signal(2)
        _, rest = process.communicate(timeout=60)
        assert b"Traceback" not in rest
        assert process.stdout is not None
    finally:
        end(process)
        os.close(ours)
        os.close(theirs)


def test_a_layer_that_cannot_be_waived_is_two(cli: Cli) -> None:
    words = ("sandbox", "execute", cli.program("print(1)"))
    done = cli.run(*words, "--allow-degraded", "seccomp")
    assert (done.code, is_one_line(done)) == (2, True), done
    assert "--allow-degraded: there is no layer 'seccomp'" in done.stderr
    cli.env["PARACLE_SANDBOX_ALLOW_DEGRADED"] = "everything"
    done = cli.run(*words)
    assert (done.code, "PARACLE_SANDBOX_ALLOW_DEGRADED" in done.stderr) == (2, True), done


OWN_LIMITS = """
import resource
print(*(resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_NPROC)))
"""
LOWER_KIB = 400 << 10  # than what a sandbox has by default


@needs_root
def test_a_layer_is_waived_by_name(cli: Cli) -> None:
    """By root on a machine without control groups: refused, unless a flag or a setting allows it,
    for this way in as for all. Root of a container may neither raise limits nor change those of
    other users' processes (CAP_SYS_RESOURCE); limits that are lower already stay."""
    cli.env["SANDBOX_MODE"] = "native"
    words = cli.argv("sandbox", "execute", "-q", cli.program(OWN_LIMITS))
    as_in_a_container = "setpriv --bounding-set -sys_resource"
    lower = f"ulimit -d {LOWER_KIB}"
    without = f"umount -Rl /sys/fs/cgroup; {lower}; exec {as_in_a_container} {shlex.join(words)}"

    def run(flags: str = "", **variables: str) -> tuple[int, bytes]:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", f"{without} {flags}"], env={**cli.env, **variables},
            cwd=cli.home, capture_output=True, stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    refusal = b"Limits cannot be kept"
    for flags, variables in (("", {}), ("", {"PARACLE_SANDBOX_ALLOW_DEGRADED": "firewall"})):
        code, said = run(flags, **variables)
        assert (code, refusal in said, b"--allow-degraded cgroup" in said) == (3, True, True), said
    ran = (0, f"{LOWER_KIB << 10} {SandboxConfig().max_processes}\n".encode())
    assert run("--allow-degraded cgroup") == ran
    assert run(PARACLE_SANDBOX_ALLOW_DEGRADED="cgroup") == ran
    assert cli.remains() == []


def test_health_tells_of_a_distribution_that_shadows_ours(cli: Cli) -> None:
    """Both bring the command, and the other one has a folder of our name as well."""
    site = cli.home / "site"
    record = site / "paracle-9.9.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: paracle\nVersion: 9.9\n")
    (record / "RECORD").write_text("paracle_sandbox/other.py,,\nparacle-9.9.dist-info/RECORD,,\n")
    (record / "entry_points.txt").write_text("[console_scripts]\nparacle = paracle.cli:main\n")
    quiet = cli.run("sandbox", "health", "--backend", "fake")
    assert "Another distribution" not in quiet.stderr
    cli.env["PYTHONPATH"] = str(site)
    told = cli.run("sandbox", "health", "--backend", "fake", "--json")
    assert "paracle, brings the package paracle_sandbox and the command paracle" in told.stderr
    assert told.json["available"]
