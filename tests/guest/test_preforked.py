"""Programs that are forked ahead of need, and how they end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wireclient import GuestClient

from paracle_sandbox.guest.loop import Loop
from paracle_sandbox.guest.prefork.policy import HURRY_SECONDS
from paracle_sandbox.guest.processes import kill_tree
from paracle_sandbox.guest.processes.process_table import Children

pytestmark = pytest.mark.timeout(60)

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
A_SIGNAL = signal.SIGRTMIN + 7


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[GuestClient]:
    with GuestClient(tmp_path) as client:
        yield client


def start(guest: GuestClient, source: str) -> int:
    return guest.open("python", path="p.py", source=textwrap.dedent(source), argv=[])


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def wait_for(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def have_preforked(guest: GuestClient) -> int:
    for _ in range(2):  # whoever runs two will run a third
        assert guest.wait(start(guest, "pass")).result == {"exit_code": 0}
    wait_for(lambda: len(children_of(guest.process.pid)) == 1)
    return children_of(guest.process.pid).pop()


def have_hurried_program(guest: GuestClient) -> int:
    """Have a preforked process that was forked while a program ran that had followed another one at
    once."""
    for _ in range(100):
        time.sleep(2 * HURRY_SECONDS)  # a longer series has another way
        guest.wait(start(guest, "pass"))
        before = children_of(guest.process.pid)
        running = start(guest, "import time; time.sleep(0.2)")
        guest.wait_until(lambda: guest.answer(running).pid)  # noqa: B023
        guest.wait_until(lambda: guest.answer(running).ended)  # noqa: B023
        forked = children_of(guest.process.pid) - before - {guest.answer(running).pid}
        if forked:
            return forked.pop()
    raise AssertionError("there was no hurry")


def test_whoever_is_in_a_hurry_has_the_next_program_while_one_runs(guest: GuestClient) -> None:
    ahead = have_hurried_program(guest)
    running = start(guest, "import time; time.sleep(60)")
    guest.wait_until(lambda: guest.answer(running).pid)
    assert guest.answer(running).pid == ahead
    guest.signal(running, kill=True)
    assert guest.wait(running).result == {"exit_code": -9, "killed": True}
    assert bytes(guest.wait(start(guest, "print(4)")).stdout) == b"4\n"


def test_none_is_forked_ahead_where_that_is_off(tmp_path: Path) -> None:
    with GuestClient(tmp_path, preforks_at_once=True, preforked=False) as guest:
        for number in range(5):
            assert bytes(guest.wait(start(guest, f"print({number})")).stdout) == b"%d\n" % number
            assert not children_of(guest.process.pid)


def test_a_preforked_program_that_nobody_wants_ends(guest: GuestClient) -> None:
    have_preforked(guest)
    wait_for(lambda: not children_of(guest.process.pid), seconds=20)


@pytest.mark.parametrize("status", [0, 1, 2, 120, 255])
def test_status_of_a_program_that_was_forked_ahead(guest: GuestClient, status: int) -> None:
    ahead = have_hurried_program(guest)
    answer = guest.wait(start(guest, f"print('out'); raise SystemExit({status})"))
    assert answer.result == {"exit_code": status}
    assert bytes(answer.stdout) == b"out\n"
    assert answer.pid == ahead


def test_a_command_does_not_see_what_has_ended(guest: GuestClient) -> None:
    for _ in range(5):
        ahead = have_hurried_program(guest)
        # Memory that is there to the end, and takes the kernel a few milliseconds.
        ended = start(guest, "import builtins; builtins.much = b'x' * (40 << 20)")
        assert guest.wait(ended).pid == ahead
        seen = guest.run("sh", "-c", f"test -e /proc/{ahead}; echo $?")
        assert bytes(seen.stdout) == b"1\n"


def test_nor_does_whoever_asks_for_files(guest: GuestClient) -> None:
    for _ in range(5):
        ahead = have_hurried_program(guest)
        ended = start(guest, "import builtins; builtins.much = b'x' * (40 << 20)")
        assert guest.wait(ended).pid == ahead
        assert guest.wait(guest.open("stat", path=".")).error is None
        assert not Path(f"/proc/{ahead}").exists()


def test_what_a_program_held_is_free_for_the_next(guest: GuestClient) -> None:
    """An object that is never freed holds it to the very end, which comes after the memory is
    freed."""
    holding = """
        import builtins, fcntl, socket
        builtins.lock = open("lock", "w")
        fcntl.flock(builtins.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        builtins.port = socket.socket()
        builtins.port.bind(("127.0.0.1", %d))
        builtins.port.listen()
        builtins.much = b"x" * (80 << 20)
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    have_hurried_program(guest)
    for _ in range(5):
        answer = guest.wait(start(guest, holding % number))
        assert answer.result == {"exit_code": 0}, bytes(answer.stderr)


def test_a_program_that_forbids_signals_ends_as_it_would(guest: GuestClient) -> None:
    have_hurried_program(guest)
    strict = """
        import os, sys
        def hook(event, _):
            if event == "os.kill":
                raise RuntimeError("not here")
        sys.addaudithook(hook)
        os.kill = os.getpid = None
        print("fine")
    """
    answer = guest.wait(start(guest, strict))
    assert answer.result == {"exit_code": 0}
    assert (bytes(answer.stdout), bytes(answer.stderr)) == (b"fine\n", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, A_SIGNAL])
def test_what_was_sent_before_is_not_for_the_program(guest: GuestClient, number: int) -> None:
    ahead = have_hurried_program(guest)
    os.kill(ahead, number)
    answer = guest.wait(start(guest, "print(5)"))
    assert answer.result == {"exit_code": 0}
    assert bytes(answer.stdout) == b"5\n"
    assert answer.pid == ahead


def test_what_a_program_leaves_is_found_before_it_is_gone(guest: GuestClient) -> None:
    leaving = """
        import builtins, os, time
        if os.fork() == 0:
            os.close(1), os.close(2)
            time.sleep(60)
        builtins.much = b"x" * (80 << 20)
        print(open("/proc/self/task/%d/children" % os.getpid()).read())
    """
    for _ in range(3):
        have_hurried_program(guest)
        answer = guest.wait(start(guest, leaving))
        assert guest.wait(guest.open("kill_leftovers")).result == {"survivors": 0}
        left = int(answer.stdout)
        assert not Path(f"/proc/{left}").exists() or "Z" in state_of(left)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_forks_of_a_program_are_not_its_end(guest: GuestClient) -> None:
    have_hurried_program(guest)
    answer = guest.wait(
        start(guest, "import os, time\nif os.fork(): os.wait(); time.sleep(0.1); print('parent')")
    )
    assert answer.result == {"exit_code": 0}
    assert bytes(answer.stdout) == b"parent\n"


def test_signals_of_a_program_are_not_its_end(guest: GuestClient) -> None:
    """Whoever sends all there are to everybody has not come to its end by that."""
    have_hurried_program(guest)
    storm = f"""
        import os, signal, time
        for number in ({A_SIGNAL}, {A_SIGNAL + 1}, signal.SIGCHLD):
            os.kill(os.getppid(), number)
        time.sleep(0.3)
        print("to the end")
    """
    answer = guest.wait(start(guest, storm))
    assert answer.result == {"exit_code": 0}
    assert bytes(answer.stdout) == b"to the end\n"


def descriptors_of(guest: GuestClient) -> list[str]:
    return os.listdir(f"/proc/{guest.process.pid}/fd")


def hold_still(pid: int) -> None:
    """Stop a process as its tracer, which does not let it go on for SIGCONT, but for SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, pid, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may trace what cannot be looked into")
@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["at once", "after a while"])
def test_a_preforked_program_that_dies_with_its_program_unread_costs_nothing(
    guest: GuestClient, seconds: float
) -> None:
    """It happens when the program before killed all others: the kernel needs a moment for that."""
    ahead, before = have_preforked(guest), descriptors_of(guest)
    hold_still(ahead)
    running = guest.open(
        "python",
        path="p.py",
        source="print(input(), __import__('os').getpid())",
        argv=[],
        stdin=True,
    )
    guest.data(running, b"given\n")
    guest.wait(guest.open("ping"))
    time.sleep(seconds)
    os.kill(ahead, signal.SIGKILL)
    os.waitpid(ahead, 0)
    answer = guest.wait(running)
    assert answer.result == {"exit_code": 0}
    said, pid = answer.stdout.split()
    assert (said, int(pid)) == (b"given", answer.pid)
    assert answer.pid != ahead
    wait_for(lambda: len(descriptors_of(guest)) <= len(before))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may trace what cannot be looked into")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_for_a_program_waits_until_it_is_there(guest: GuestClient, number: int) -> None:
    """A process that takes its place gets the signal, too."""
    ahead = have_preforked(guest)
    hold_still(ahead)
    running = start(guest, "import time; time.sleep(20); print('ran')")
    guest.wait(guest.open("ping"))
    guest.signal(running, signal=int(number))
    guest.wait(guest.open("ping"))
    os.kill(ahead, signal.SIGKILL)
    os.waitpid(ahead, 0)
    answer = guest.wait(running)
    assert answer.result == {"exit_code": -number}
    assert bytes(answer.stdout) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may trace what cannot be looked into")
def test_a_signal_reaches_the_program_of_a_slow_process(guest: GuestClient) -> None:
    ahead = have_preforked(guest)
    hold_still(ahead)
    running = start(guest, "import time; time.sleep(20); print('ran')")
    guest.wait(guest.open("ping"))
    guest.signal(running, signal=int(signal.SIGTERM))
    guest.wait(guest.open("ping"))
    if ctypes.CDLL(None).ptrace(PTRACE_DETACH, ahead, None, None) != 0:
        raise OSError("ptrace")
    answer = guest.wait(running)
    assert (answer.pid, answer.result) == (ahead, {"exit_code": -signal.SIGTERM})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may trace what cannot be looked into")
def test_a_preforked_program_that_is_killed_on_request_is_not_replaced(guest: GuestClient) -> None:
    ahead = have_preforked(guest)
    hold_still(ahead)
    running = start(guest, "print('ran')")
    guest.wait(guest.open("ping"))
    guest.signal(running, kill=True)
    wait_for(lambda: os.waitpid(ahead, os.WNOHANG)[0] == ahead)
    answer = guest.wait(running)
    assert answer.result == {"exit_code": -9, "killed": True}
    assert bytes(answer.stdout) == b""


def test_whoever_kills_everything_gives_the_preforked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preforked process is dying then, and would take the next program with it."""
    events: list[object] = []
    children = Children[object]()
    monkeypatch.setattr(children, "alone", lambda _: True)
    monkeypatch.setattr(children, "drop_preforked", lambda: events.append("given up"))
    monkeypatch.setattr(kill_tree, "_kill", events.append)
    monkeypatch.setattr(kill_tree.Walk, "run", lambda _: None)
    monkeypatch.setattr(kill_tree.os, "getpid", lambda: 1)
    kill_tree.TreeKill(Loop(), children, None, events.append).round()
    assert events == [-1, "given up", 0]
