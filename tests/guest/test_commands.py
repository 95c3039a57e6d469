"""Tests of the guest as a real process over a real socket: commands, kills, and odd hosts."""

from __future__ import annotations

import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wireclient import BASE_ENV, GuestClient

from paracle_sandbox.channel import frames

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[GuestClient]:
    with GuestClient(tmp_path) as client:
        yield client


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def script(guest: GuestClient, text: str, *argv: str, **request: object) -> int:
    """Run Python source by a real interpreter."""
    return guest.exec(sys.executable, "-I", "-c", textwrap.dedent(text), *argv, **request)


# Ordinary commands


def test_says_hello_and_answers_ping(guest: GuestClient) -> None:
    assert guest.hello["protocol"] == 1
    assert guest.hello["pid"] == guest.process.pid
    assert guest.wait(guest.open("ping")).result == {}


def test_output_is_exact_bytes_and_streams_are_separate(guest: GuestClient) -> None:
    answer = guest.run("sh", "-c", r"printf 'a\000\377\n'; printf 'e\376' >&2; exit 3")
    assert answer.result == {"exit_code": 3}
    assert bytes(answer.stdout) == b"a\x00\xff\n"
    assert bytes(answer.stderr) == b"e\xfe"
    assert answer.pid is not None


def test_large_output_is_complete(guest: GuestClient) -> None:
    answer = guest.run("sh", "-c", "seq 1 2000000; echo done >&2")
    assert bytes(answer.stdout) == b"".join(b"%d\n" % n for n in range(1, 2000001))
    assert bytes(answer.stderr) == b"done\n"


def test_slow_reader_stalls_the_writer_in_bounded_memory(guest: GuestClient) -> None:
    guest.granting = False
    before = resident_kib(guest.process.pid)
    stream = guest.exec("head", "-c", str(64 << 20), "/dev/zero")
    guest.poll(0.1)
    time.sleep(0.3)
    while len(guest.answer(stream).stdout) < frames.WINDOW - 100:
        guest.poll(1)
    guest.poll(0.2)
    assert len(guest.answer(stream).stdout) <= frames.WINDOW
    assert resident_kib(guest.process.pid) - before < 8 << 10
    assert guest.wait(guest.open("ping")).result == {}, "a stalled stream stalls nobody else"
    guest.granting = True
    guest.grant(stream, len(guest.answer(stream).stdout))
    assert guest.wait(stream).result == {"exit_code": 0}
    assert len(guest.answer(stream).stdout) == 64 << 20


def test_what_was_written_before_the_end_waits_for_credit(guest: GuestClient) -> None:
    guest.granting = False
    total = frames.WINDOW + 50_000
    stream = guest.exec("head", "-c", str(total), "/dev/zero")
    guest.wait_until(lambda: len(guest.answer(stream).stdout) > frames.WINDOW - 100)
    guest.poll(0.2)
    assert not guest.answer(stream).ended
    guest.granting = True
    guest.grant(stream, frames.WINDOW)
    assert guest.wait(stream).result == {"exit_code": 0}
    assert len(guest.answer(stream).stdout) == total


def test_host_that_does_not_read_the_socket(guest: GuestClient) -> None:
    streams = [guest.exec("head", "-c", "3000000", "/dev/zero") for _ in range(4)]
    time.sleep(0.5)
    assert resident_kib(guest.process.pid) < 80 << 10
    for stream in streams:
        assert guest.wait(stream).result == {"exit_code": 0}
        assert len(guest.answer(stream).stdout) == 3_000_000


def test_stdin_in_order_and_to_the_end(guest: GuestClient) -> None:
    stream = guest.exec("cat", stdin=True)
    sent = b"".join(b"%07d\n" % n for n in range(250_000))
    for start in range(0, len(sent), 100_000):
        guest.data(stream, sent[start : start + 100_000])
        guest.poll(0)
    guest.end(stream)
    assert guest.wait(stream).result == {"exit_code": 0}
    assert bytes(guest.answer(stream).stdout) == sent


def test_stdin_that_nobody_reads_is_no_failure(guest: GuestClient) -> None:
    stream = guest.exec("sh", "-c", "exec <&-; sleep 0.2; echo ok", stdin=True)
    for _ in range(10):
        guest.data(stream, bytes(200_000))
    answer = guest.wait(stream)
    assert (answer.result, bytes(answer.stdout)) == ({"exit_code": 0}, b"ok\n")


def test_no_stdin_is_the_null_device(guest: GuestClient) -> None:
    assert guest.run("cat").result == {"exit_code": 0}


def test_environment(guest: GuestClient) -> None:
    merged = dict(
        line.split("=", 1)
        for line in guest.run("env", env={"B": "ü=1"}).stdout.decode().splitlines()
    )
    assert merged == {**BASE_ENV, "B": "ü=1"}
    alone = guest.run("/usr/bin/env", env={"A": "1"}, clear_env=True)
    assert bytes(alone.stdout) == b"A=1\n"


def test_path_of_the_given_environment_is_searched(guest: GuestClient, tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "mytool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho mine\n")
    tool.chmod(0o755)
    answer = guest.run("mytool", env={"PATH": f"/nowhere:{tool.parent}:/bin"})
    assert bytes(answer.stdout) == b"mine\n"
    assert guest.run("mytool").result == {"exit_code": 127}


def test_working_directory(guest: GuestClient, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").touch()
    assert guest.run("pwd").stdout.decode().strip() == str(tmp_path)
    assert guest.run("pwd", cwd="sub").stdout.decode().strip() == str(tmp_path / "sub")
    assert guest.run("pwd", cwd="/usr").stdout.decode().strip() == "/usr"
    assert guest.run("pwd", cwd="absent").error["code"] == "not_found"
    assert guest.run("pwd", cwd="file").error["code"] == "not_directory"


@pytest.mark.parametrize("kept", [False, True])
def test_not_found_and_not_executable(guest: GuestClient, tmp_path: Path, kept: bool) -> None:
    if kept:
        take_direct_place(guest)
    (tmp_path / "plain").write_text("no program")
    missing = guest.run("no-such-program")
    assert missing.result == {"exit_code": 127}
    assert bytes(missing.stderr) == b"paracle: no-such-program: command not found\n"
    plain = guest.run("./plain")
    assert plain.result == {"exit_code": 126}
    assert plain.stderr.startswith(b"paracle: ./plain: ")
    assert guest.run("/usr").result == {"exit_code": 126}
    assert guest.run("").result == {"exit_code": 127}


def test_death_by_signal(guest: GuestClient) -> None:
    assert guest.run("sh", "-c", "kill -SEGV $$").result == {"exit_code": -signal.SIGSEGV}


FD_LISTING = """
import os
names = os.listdir("/proc/self/fd")  # and the descriptor of this listing, closed by now
print(sorted(int(n) for n in names if os.path.exists("/proc/self/fd/" + n)))
"""


@pytest.mark.parametrize("pty", [None, {"rows": 24, "columns": 80}])
def test_programs_hold_exactly_three_descriptors(guest: GuestClient, pty: object) -> None:
    other = guest.exec("sleep", "60", stdin=True)
    for _ in range(3):
        listing = guest.wait(script(guest, FD_LISTING, pty=pty))
        assert bytes(listing.stdout).strip() == b"[0, 1, 2]"
        request = {"path": "fds.py", "source": FD_LISTING, "pty": pty}
        listing = guest.wait(guest.open("python", **request))
        assert bytes(listing.stdout).strip() == b"[0, 1, 2]", bytes(listing.stderr)
    guest.signal(other, kill=True)
    guest.wait(other)


STATE = """
import os, signal
text = open("/proc/self/status").read()
def mask(name):
    return int(text.split(name + ":")[1].split()[0], 16)
python_ignores = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
glibc_ignores = 0b11 << 31  # its own two, after posix_spawn
print(mask("SigBlk"), mask("SigIgn") & ~python_ignores & ~glibc_ignores,
      os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(),
      open("/proc/self/oom_score_adj").read().strip())
"""


def test_programs_start_clean(guest: GuestClient) -> None:
    expected = b"0 0 True True 1000\n"
    for _ in range(3):
        assert bytes(guest.wait(script(guest, STATE)).stdout) == expected
        answer = guest.wait(guest.open("python", path="state.py", source=STATE))
        assert bytes(answer.stdout) == expected, bytes(answer.stderr)
        ignored = guest.run("grep", "SigIgn", "/proc/self/status").stdout.split()[1]
        assert int(ignored, 16) & ~(0b11 << 31) == 0


@pytest.mark.clock
def test_background_child_that_keeps_stdout_does_not_delay(guest: GuestClient) -> None:
    started = time.monotonic()
    answer = guest.run("sh", "-c", "sleep 30 & echo $!; exit 4")
    assert time.monotonic() - started < 5
    assert answer.result == {"exit_code": 4}
    assert alive(int(answer.stdout)), "it may live on, until the sandbox ends"


def test_background_child_that_keeps_writing_does_not_delay(guest: GuestClient) -> None:
    answer = guest.run("sh", "-c", "yes & exit 0")
    assert answer.result == {"exit_code": 0}
    assert len(answer.stdout) <= 4 << 20


def test_signal_goes_to_the_group(guest: GuestClient) -> None:
    stream = guest.exec(
        "sh", "-c", "trap 'echo got; exit 5' TERM; echo up; while :; do sleep 1; done"
    )
    guest.wait_until(lambda: guest.answer(stream).stdout == b"up\n")
    guest.signal(stream, signal=int(signal.SIGTERM))
    answer = guest.wait(stream)
    assert (answer.result, bytes(answer.stdout)) == ({"exit_code": 5}, b"up\ngot\n")


def test_signal_before_the_program_is_there(guest: GuestClient) -> None:
    stream = guest.exec("sleep", "60")
    guest.signal(stream, signal=int(signal.SIGTERM))
    assert guest.wait(stream).result == {"exit_code": -signal.SIGTERM}


# Terminals


def test_terminal_is_controlling_and_can_be_resized(guest: GuestClient) -> None:
    text = "stty size; tty < /dev/tty; read line; stty size; echo got $line"
    for _ in range(3):
        stream = guest.exec("sh", "-c", text, pty={"rows": 30, "columns": 100})
        guest.wait_until(lambda s=stream: b"/dev/" in guest.answer(s).stdout)
        guest.signal(stream, resize=[40, 120])
        guest.data(stream, b"hello\n")
        answer = guest.wait(stream)
        assert answer.result == {"exit_code": 0}
        lines = bytes(answer.stdout).split(b"\r\n")
        assert lines[0] == b"30 100"
        assert lines[-3:-1] == [b"40 120", b"got hello"]


def test_terminal_end_is_control_d_and_output_is_complete(guest: GuestClient) -> None:
    stream = guest.exec("sh", "-c", "cat; seq 1 20000", pty={"rows": 24, "columns": 80})
    guest.data(stream, b"line\n")
    guest.end(stream)
    answer = guest.wait(stream)
    assert answer.result == {"exit_code": 0}
    assert bytes(answer.stdout).endswith(b"\r\n19999\r\n20000\r\n")


def test_terminal_interrupt_key(guest: GuestClient) -> None:
    stream = guest.exec("cat", pty={"rows": 24, "columns": 80})
    guest.data(stream, b"up\n")
    guest.wait_until(lambda: guest.answer(stream).stdout.count(b"up") == 2)  # echo, then cat
    guest.data(stream, b"\x03")
    assert guest.wait(stream).result == {"exit_code": -signal.SIGINT}


def test_python_has_the_terminal(guest: GuestClient) -> None:
    source = "import os; print(os.isatty(0), os.ctermid(), os.tcgetpgrp(0) == os.getpid())"
    size = {"rows": 5, "columns": 9}
    answer = guest.wait(guest.open("python", path="t.py", source=source, pty=size))
    assert bytes(answer.stdout) == b"True /dev/tty True\r\n"


# Python


def test_python_runs_a_given_source(guest: GuestClient, tmp_path: Path) -> None:
    source = "import sys, os\nprint(sys.argv[1:], os.environ['A'], os.getcwd())\nsys.exit(7)\n"
    request = {"path": "p/m.py", "source": source, "argv": ["x"], "env": {"A": "b"}}
    for fresh in (False, True, False, False):
        answer = guest.wait(guest.open("python", fresh=fresh, **request))
        assert answer.result == {"exit_code": 7}, bytes(answer.stderr)
        assert bytes(answer.stdout) == b"['x'] b %s\n" % str(tmp_path).encode()
    assert (tmp_path / "p" / "m.py").read_text() == source


def test_python_source_replaces_links_and_pipes(guest: GuestClient, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "link.py").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("link.py", "pipe.py"):
        answer = guest.wait(guest.open("python", path=name, source="print(1)"))
        assert bytes(answer.stdout) == b"1\n"
    assert (tmp_path / "victim").read_text() == "keep"
    (tmp_path / "folder.py").mkdir()
    answer = guest.wait(guest.open("python", path="folder.py", source="print(1)"))
    assert answer.error["code"] == "is_directory"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["folder.py", "link.py", "pipe.py", "victim"]


def test_python_stdin_and_large_source(guest: GuestClient) -> None:
    source = "import sys\nprint(len(sys.stdin.buffer.read()))\n" + "#" * 200_000
    for _ in range(3):
        stream = guest.open("python", path="s.py", source=source, stdin=True)
        guest.data(stream, bytes(12345))
        guest.end(stream)
        assert bytes(guest.wait(stream).stdout) == b"12345\n"


# Kill

TREE = """
import os, signal, sys, time
path = sys.argv[1]

def hide(depth):
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    with open(path, "a") as file:
        file.write("%d\\n" % os.getpid())
    if depth:
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            hide(depth - 1)
    while True:
        time.sleep(60)

hide(4)
"""


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.clock
def test_kill_takes_the_whole_tree_and_nothing_else(
    guest: GuestClient, tmp_path: Path, first: bool
) -> None:
    """The first command is the direct one, the others have keepers."""
    stream = script(guest, TREE, str(tmp_path / "pids")) if first else 0
    other = guest.exec("sh", "-c", "sleep 60 & while read line; do echo $line; done", stdin=True)
    background = guest.run("sh", "-c", "sleep 60 >/dev/null & echo $!")
    if not first:
        stream = script(guest, TREE, str(tmp_path / "pids"))
    wait_for(lambda: len(pids_in(tmp_path / "pids")) == 5)
    started = time.monotonic()
    guest.signal(stream, kill=True)
    assert guest.wait(stream).result == {"exit_code": -9, "killed": True}
    assert time.monotonic() - started < 2
    assert not [pid for pid in pids_in(tmp_path / "pids") if alive(pid)]
    assert alive(int(background.stdout)), "a child of another command"
    guest.data(other, b"still here\n")
    guest.end(other)
    assert guest.wait(other).result == {"exit_code": 0}
    assert bytes(guest.answer(other).stdout) == b"still here\n"


def test_kill_at_once(guest: GuestClient) -> None:
    for _ in range(30):
        stream = guest.exec("sleep", "60")
        guest.signal(stream, kill=True)
        answer = guest.wait(stream)
        assert answer.result == {"exit_code": -9, "killed": True}
        assert answer.pid is None or not alive(answer.pid)


def test_kill_needs_no_reader(guest: GuestClient) -> None:
    guest.granting = False
    stream = guest.exec("cat", "/dev/zero")
    guest.wait_until(lambda: len(guest.answer(stream).stdout) > frames.WINDOW - 100)
    guest.signal(stream, kill=True)
    assert guest.wait(stream).result == {"exit_code": -9, "killed": True}


def test_kill_keeps_what_was_said_before(guest: GuestClient) -> None:
    stream = guest.exec("sh", "-c", "echo last words; sleep 60")
    guest.wait_until(lambda: guest.answer(stream).pid)
    guest.wait_until(lambda: guest.answer(stream).stdout)
    guest.signal(stream, kill=True)
    assert bytes(guest.wait(stream).stdout) == b"last words\n"


def take_direct_place(guest: GuestClient) -> int:
    """Make the next command have a keeper.

    It cannot be the direct one while orphans are being killed.
    """
    while True:
        stream = guest.exec("sleep", "60")
        guest.wait_until(lambda: guest.answer(stream).pid)
        stat = Path(f"/proc/{guest.answer(stream).pid}/stat").read_text()
        if int(stat.rpartition(")")[2].split()[1]) == guest.process.pid:
            return stream
        guest.signal(stream, kill=True)
        guest.wait(stream)


def test_kill_of_stopped_processes_and_a_stopped_keeper(guest: GuestClient) -> None:
    take_direct_place(guest)
    stream = guest.exec("sh", "-c", "kill -STOP $PPID; echo $PPID; sleep 60 & kill -STOP $$")
    guest.wait_until(lambda: guest.answer(stream).stdout)
    guest.signal(stream, kill=True)
    answer = guest.wait(stream)
    assert answer.result == {"exit_code": -9, "killed": True}
    wait_for(lambda: not alive(int(answer.stdout)))


def test_kill_of_a_program_that_stops_its_keeper_again_and_again(guest: GuestClient) -> None:
    """The keeper may never get to report what it started.

    Then it is killed with its whole tree. How far it gets is a race, so the test runs several
    rounds.
    """
    text = "kill -STOP $PPID; echo $PPID; while kill -STOP $PPID; do :; done"
    for _ in range(12):
        beside = take_direct_place(guest)
        stream = guest.exec("sh", "-c", text)
        guest.wait_until(lambda: guest.answer(stream).stdout)  # noqa: B023
        guest.signal(stream, kill=True)
        answer = guest.wait(stream)
        assert answer.result == {"exit_code": -9, "killed": True}
        wait_for(lambda: not alive(int(answer.stdout)))  # noqa: B023
        guest.signal(beside, kill=True)
        guest.wait(beside)
    assert guest.run("true").result == {"exit_code": 0}


def test_killed_keeper_is_no_success_and_leaves_no_orphan(
    guest: GuestClient, tmp_path: Path
) -> None:
    text = "setsid sleep 60 & echo $!; kill -KILL $PPID; sleep 60; exit 0"
    for _ in range(4):
        direct = take_direct_place(guest)
        answer = guest.run("sh", "-c", text)
        assert answer.result == {"exit_code": -9}
        # Here no process can tell any more which orphan belongs to which command.
        assert guest.wait(direct).result == {"exit_code": -9}
        assert not alive(int(answer.stdout))
        assert not alive(answer.pid)
    assert guest.run("true").result == {"exit_code": 0}


def test_killed_keeper_of_a_background_child(guest: GuestClient) -> None:
    take_direct_place(guest)
    answer = guest.run("sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $! $PPID")
    child, keeper = map(int, answer.stdout.split())
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not alive(child))
    assert guest.run("true").result == {"exit_code": 0}


def test_killed_preforked_is_replaced(guest: GuestClient) -> None:
    for _ in range(2):  # if two of them ran, a third one can run
        assert script_output(guest, "print(1)") == b"1\n"
    children = Path(f"/proc/{guest.process.pid}/task/{guest.process.pid}/children")
    wait_for(lambda: children.read_text().split())
    ahead = [int(pid) for pid in children.read_text().split()]
    for pid in ahead:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, ahead)))
    for _ in range(3):
        assert script_output(guest, "print(2)") == b"2\n"


def test_a_preforked_program_comes_after_the_listing_that_follows(
    guest: GuestClient,
) -> None:
    for _ in range(2):
        stream = guest.open("python", path="s.py", source="pass", argv=[])
        listing = guest.open("list", path=".", after=stream)
        assert guest.wait(stream).result == {"exit_code": 0}
        assert "count" in guest.wait(listing).result
    children = Path(f"/proc/{guest.process.pid}/task/{guest.process.pid}/children")
    wait_for(lambda: children.read_text().split())
    assert script_output(guest, "print(3)") == b"3\n"


def test_a_listing_waits_for_the_command_it_follows(guest: GuestClient) -> None:
    command = guest.exec("sh", "-c", "read line; echo $line > made", stdin=True)
    listing = guest.open("list", path=".", after=command)
    assert guest.wait(guest.open("list", path=".")).result["count"] == 0
    assert not guest.answer(listing).ended, "it did not wait"
    guest.data(command, b"now\n")
    assert guest.wait(command).result == {"exit_code": 0}
    assert guest.wait(listing).result["count"] == 1


@pytest.mark.parametrize("how", ["ended", "never", "refused"])
def test_a_listing_does_not_wait_for_what_does_not_run(guest: GuestClient, how: str) -> None:
    streams = {"ended": guest.exec("true"), "refused": guest.exec("no such program"), "never": 999}
    for stream in (streams["ended"], streams["refused"]):
        guest.wait(stream)
    assert "count" in guest.wait(guest.open("list", path=".", after=streams[how])).result


@pytest.mark.parametrize("first", ["command", "listing"])
def test_a_command_and_the_listing_after_it_can_both_be_killed(
    guest: GuestClient, first: str
) -> None:
    command = guest.exec("sleep", "60")
    listing = guest.open("list", path=".", after=command)
    guest.signal(command if first == "command" else listing, kill=True)
    if first == "listing":
        assert guest.wait(listing).result == {"killed": True}
        guest.signal(command, kill=True)
    assert guest.wait(command).result == {"exit_code": -9, "killed": True}
    if first == "command":
        assert "count" in guest.wait(listing).result
    assert guest.run("true").result == {"exit_code": 0}


def script_output(guest: GuestClient, source: str) -> bytes:
    stream = guest.open("python", path="p.py", source=source, argv=[])
    return bytes(guest.wait(stream).stdout)


def test_what_a_command_left_keeps_the_direct_place(guest: GuestClient) -> None:
    left = int(guest.run("sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!").stdout)
    stream = guest.exec("sleep", "60")
    guest.wait_until(lambda: guest.answer(stream).pid)
    guest.signal(stream, kill=True)
    assert guest.wait(stream).result == {"exit_code": -9, "killed": True}
    assert alive(left), "it belongs to another command"
    sweep = guest.open("kill_leftovers")
    assert guest.wait(sweep).result == {"survivors": 0}
    assert not alive(left)


def test_all_programs_are_killed_and_say_so(guest: GuestClient) -> None:
    source = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(60)"
    streams = [script(guest, source) for _ in range(3)]
    for stream in streams:
        guest.wait_until(lambda stream=stream: len(guest.answer(stream).stdout.split()) == 2)
    pids = [int(pid) for stream in streams for pid in guest.answer(stream).stdout.split()]
    assert guest.wait(guest.open("kill_programs")).result == {"survivors": 0}
    assert not any(map(alive, pids))
    for stream in streams:
        assert guest.wait(stream).result == {"exit_code": -9, "killed": True}
    assert guest.run("true").result == {"exit_code": 0}


BOMB = """
import os, signal, sys, time
os.nice(5)
until = time.monotonic() + 20  # should the test fail
count = 0
with open(sys.argv[1], "a") as file:
    file.write("%d\\n" % os.getpid())
while time.monotonic() < until:
    if len(open(sys.argv[1]).read().split()) > int(sys.argv[3]):
        time.sleep(0.001)
        continue
    if os.fork() == 0:
        if sys.argv[2] == "setsid":
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(sys.argv[1], "a") as file:
            file.write("%d\\n" % os.getpid())
"""


@pytest.mark.parametrize("how", ["group", "setsid"])
def test_kill_of_a_fork_bomb(guest: GuestClient, tmp_path: Path, how: str) -> None:
    # Hundreds of processes starve a guest that may not raise its priority and is not PID 1 as in a
    # sandbox.
    most = 200 if os.geteuid() == 0 else 16
    pids = tmp_path / "pids"
    stream = script(guest, BOMB, str(pids), how, str(most))
    wait_for(lambda: len(pids_in(pids)) >= most // 4, 20)
    guest.signal(stream, kill=True)
    assert guest.wait(stream).result == {"exit_code": -9, "killed": True}
    assert not [pid for pid in pids_in(pids) if alive(pid)]
    assert guest.run("true").result == {"exit_code": 0}


AS_FIRST_PROCESS = ("unshare", "-Urpf", "--mount-proc", "--kill-child")


def inside(first: int) -> list[int]:
    """Count the living processes of the namespace whose first process this one is, without
    itself."""
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == namespace and alive(int(name)):
                found.append(int(name))
        except OSError:
            continue
    return [pid for pid in found if pid != first]


def starve(guest: int, how: str) -> None:
    if how == "memory":
        status = Path(f"/proc/{guest}/status").read_text()
        size = int(status.split("VmSize:")[1].split()[0]) << 10
        resource.prlimit(guest, resource.RLIMIT_AS, (size, size))
        return
    taken = set(map(int, os.listdir(f"/proc/{guest}/fd")))
    free = min(set(range(1024)) - taken)
    most = free + 1 if how == "all descriptors but one" else 3
    resource.prlimit(guest, resource.RLIMIT_NOFILE, (most, most))


@pytest.mark.parametrize("how", ["descriptors", "all descriptors but one", "memory"])
def test_a_starved_guest_confirms_no_kill_that_it_did_not_do(tmp_path: Path, how: str) -> None:
    """The guest may confirm when nothing of the command is left, or end, and its sandbox with
    it."""
    with GuestClient(tmp_path, wrap=AS_FIRST_PROCESS) as guest:
        children = Path(f"/proc/{guest.process.pid}/task/{guest.process.pid}/children")
        first = int(children.read_text())
        guest.exec("sleep", "1000")  # without it, everything is killed without a walk
        stream = script(guest, TREE, str(tmp_path / "pids"))
        wait_for(lambda: len(pids_in(tmp_path / "pids")) == 5)
        trees = [pid for pid in inside(first) if b"hide" in cmdline(pid)]
        assert len(trees) >= 5
        starve(first, how)
        guest.signal(stream, kill=True)
        try:
            answer = guest.wait(stream)
        except (EOFError, ConnectionError):
            wait_for(lambda: not alive(first))
        else:
            assert answer.result == {"exit_code": -9, "killed": True}
        assert not [pid for pid in trees if alive(pid)]


# The channel


@pytest.mark.parametrize("last", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096) + b"\xff" * 16])
def test_end_of_channel_or_garbage_ends_everything(
    guest: GuestClient, tmp_path: Path, last: bytes
) -> None:
    background = guest.run("sh", "-c", "sleep 60 & echo $!")
    script(guest, TREE, str(tmp_path / "pids"))
    wait_for(lambda: len(pids_in(tmp_path / "pids")) == 5)
    if last:
        guest.send(last)
    else:
        guest.socket.close()
    assert guest.process.wait(10) == 0
    pids = [*pids_in(tmp_path / "pids"), int(background.stdout)]
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "exec"},
        {"op": "exec", "argv": []},
        {"op": "exec", "argv": "ls"},
        {"op": "exec", "argv": [1]},
        {"op": "exec", "argv": ["a\0b"]},
        {"op": "exec", "argv": ["\ud800"]},
        {"op": "exec", "argv": ["ls"], "env": []},
        {"op": "exec", "argv": ["ls"], "env": {"A": 1}},
        {"op": "exec", "argv": ["ls"], "env": {"A=B": "1"}},
        {"op": "exec", "argv": ["ls"], "env": {"": "1"}},
        {"op": "exec", "argv": ["ls"], "cwd": 7},
        {"op": "exec", "argv": ["ls"], "pty": True},
        {"op": "exec", "argv": ["ls"], "pty": {"rows": 0, "columns": 80}},
        {"op": "exec", "argv": ["ls"], "pty": {"rows": 1 << 20, "columns": 80}},
        {"op": "python"},
        {"op": "python", "path": "x.py", "source": 1},
        {"op": "python", "path": "x.py", "source": "#" * 300_000},
    ],
)
def test_malformed_requests_are_invalid(guest: GuestClient, request_: dict[str, object]) -> None:
    answer = guest.wait(guest.open(**request_))
    assert answer.error["code"] == "invalid"
    assert guest.wait(guest.open("ping")).result == {}


def test_unknown_operations(guest: GuestClient) -> None:
    for op in ("no-such-op", "", None, 7, ["exec"], "__class__"):
        assert guest.wait(guest.open(op)).error["code"] == "unknown_op"  # type: ignore[arg-type]


def test_frames_for_unknown_streams_and_odd_signals_are_ignored(guest: GuestClient) -> None:
    guest.data(99, b"x")
    guest.end(99)
    guest.grant(99, 5)
    guest.signal(99, kill=True)
    stream = guest.exec("sleep", "60")
    for number in (0, 999, "x", None):
        guest.signal(stream, signal=number)
    for size in ([1], 5, [0, 0]):
        guest.signal(stream, resize=size)
    guest.send(frames.encode(frames.SIGNAL, stream, b"not json"))
    assert guest.wait(guest.open("ping")).result == {}
    assert not guest.answer(stream).ended
    guest.signal(stream, kill=True)
    assert guest.wait(stream).result == {"exit_code": -9, "killed": True}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into a guest's descriptors")
def test_leaves_no_zombies_and_no_descriptors(guest: GuestClient) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{guest.process.pid}/fd"))

    def dead_children() -> list[str]:
        path = Path(f"/proc/{guest.process.pid}/task/{guest.process.pid}/children")
        return [pid for pid in path.read_text().split() if not alive(int(pid))]

    for _ in range(4):
        guest.run("true")
    before = descriptors()
    for _ in range(20):
        guest.run("sh", "-c", "(sleep 0 &) ; (sleep 0 &)")
        guest.run("no-such-program")
        guest.run("true", cwd="absent")
        guest.run("true", pty={"rows": 24, "columns": 80})
        stream = guest.exec("sleep", "60")
        guest.signal(stream, kill=True)
        guest.wait(stream)
    wait_for(lambda: not dead_children())
    wait_for(lambda: descriptors() <= before + 1)  # a preforked one comes and goes


def test_survives_a_storm_of_signals(guest: GuestClient) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        for _ in range(50):
            os.kill(guest.process.pid, number)
    assert guest.run("echo", "ok").stdout == b"ok\n"


def test_many_at_once(guest: GuestClient) -> None:
    streams = [guest.exec("sh", "-c", f"sleep 0.2; echo {n}") for n in range(40)]
    for number, stream in enumerate(streams):
        assert guest.wait(stream).stdout == b"%d\n" % number
