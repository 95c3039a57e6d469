"""Tests of programs in a series: they are forked by a process that does nothing else, as children
of the guest."""

from __future__ import annotations

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

from wireclient import Answer, GuestClient

from paracle_sandbox.guest.prefork.fork_server import ForkServer
from paracle_sandbox.guest.prefork.policy import HURRY_SECONDS
from paracle_sandbox.guest.prefork.preforked import Preforked
from paracle_sandbox.guest.processes.process_table import Children

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[GuestClient]:
    with GuestClient(tmp_path) as client:
        yield client


def run(guest: GuestClient, source: str) -> Answer:
    return guest.wait(guest.open("python", path="p.py", source=textwrap.dedent(source), argv=[]))


def children_of(guest: GuestClient) -> set[int]:
    pid = guest.process.pid
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def have_fork_server(guest: GuestClient) -> int:
    """Run programs, one right after the other, until a process stays when all others have ended."""
    for _ in range(100):
        staying = children_of(guest)
        for _ in range(5):
            assert run(guest, "pass").result == {"exit_code": 0}
            staying &= children_of(guest)
        if staying:
            (fork_server,) = staying
            return fork_server
    raise AssertionError("there was no series")


def run_in_series(guest: GuestClient, source: str) -> Answer:
    """Run a program by a process that was forked ahead, with a fork server there."""
    for _ in range(100):
        fork_server = have_fork_server(guest)
        ready = children_of(guest) - {fork_server}
        answer = run(guest, source)
        if answer.pid in ready:
            return answer
    raise AssertionError("there was no series")


def test_in_a_series_the_fork_server_forks(guest: GuestClient) -> None:
    for _ in range(100):
        fork_server = have_fork_server(guest)
        since = time.monotonic()
        assert run(guest, "pass").result == {"exit_code": 0}
        while len(children_of(guest)) != 2 and time.monotonic() - since < HURRY_SECONDS / 2:
            time.sleep(0.001)
        found = children_of(guest)
        time.sleep(HURRY_SECONDS / 10)
        if len(found) != 2 or children_of(guest) != found:
            continue  # the last had not gone yet, or the next was not there
        os.kill(fork_server, signal.SIGSTOP)
        before = children_of(guest)
        running = guest.open("python", path="p.py", source="import time; time.sleep(0.4)", argv=[])
        guest.wait_until(lambda: guest.answer(running).pid)  # noqa: B023
        followed = time.monotonic() - since < HURRY_SECONDS
        time.sleep(0.1)
        meanwhile = children_of(guest) - before - {guest.answer(running).pid}
        os.kill(fork_server, signal.SIGCONT)
        guest.wait_until(lambda: guest.answer(running).ended)  # noqa: B023
        afterwards = children_of(guest) - before - {guest.answer(running).pid}
        if followed and afterwards:  # else it may not have been soon enough
            assert not meanwhile
            return
    raise AssertionError("there was no series")


def test_programs_of_a_series_are_children_of_the_guest(guest: GuestClient) -> None:
    pids = set()
    for _ in range(3):
        answer = run_in_series(guest, "import os; print(os.getppid(), os.getsid(0), os.getpid())")
        parent, session, pid = map(int, answer.stdout.split())
        assert (parent, session, answer.pid) == (guest.process.pid, pid, pid)
        pids.add(pid)
    assert len(pids) == 3


def test_what_the_c_library_knows_of_itself_is_right(guest: GuestClient) -> None:
    """The library's own fork keeps the number of the thread and the list of its locks up to
    date."""
    source = """
        import ctypes, os, threading
        libc = ctypes.CDLL(None)
        address, locks, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        assert libc.prctl(40, ctypes.byref(address), 0, 0, 0) == 0
        call = {"x86_64": 274, "aarch64": 100}[os.uname().machine]
        assert libc.syscall(call, 0, ctypes.byref(locks), ctypes.byref(size)) == 0
        number = ctypes.c_int.from_address(address.value).value
        found = []
        thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
        thread.start()
        thread.join()
        assert found[0] not in (0, os.getpid())
        print(number == os.getpid() == threading.get_native_id(), bool(locks.value), size.value)
    """
    alone = run(guest, source)
    in_series = run_in_series(guest, source)
    assert bytes(alone.stdout) == b"True True 24\n", bytes(alone.stderr)
    assert bytes(in_series.stdout) == bytes(alone.stdout), bytes(in_series.stderr)


def test_a_program_of_a_series_can_end_by_its_own_signal(guest: GuestClient) -> None:
    answer = run_in_series(guest, "import signal; signal.raise_signal(signal.SIGTERM)")
    assert answer.result == {"exit_code": -signal.SIGTERM}


@pytest.mark.parametrize("status", [0, 1, 3])
def test_status_and_output_of_a_program_of_a_series(guest: GuestClient, status: int) -> None:
    answer = run_in_series(guest, f"print('out'); raise SystemExit({status})")
    assert answer.result == {"exit_code": status}
    assert bytes(answer.stdout) == b"out\n"


def test_programs_of_a_series_share_nothing(guest: GuestClient) -> None:
    source = """
        import builtins, os, random, sys
        print(getattr(builtins, "mark", None), random.random(), os.urandom(4).hex(), sys.argv)
        builtins.mark = "left by another"
    """
    shown = [run_in_series(guest, source).stdout.split() for _ in range(3)]
    assert all(words[0] == b"None" for words in shown)
    assert len({bytes(words[1]) for words in shown}) == 3


def test_each_program_of_a_series_has_its_own_surroundings(guest: GuestClient) -> None:
    """This also holds where they differ from those that the process was prepared for."""
    have_fork_server(guest)
    source = "import os, sys; print(os.environ.get('COLOUR'), sys.argv[1:], os.getcwd())"
    for number in range(6):
        env = {"COLOUR": f"c{number}"} if number % 2 else {}
        stream = guest.open("python", path="p.py", source=source, argv=[str(number)], env=env)
        shown = bytes(guest.wait(stream).stdout).decode().split()
        assert shown[:2] == [f"c{number}" if number % 2 else "None", f"['{number}']"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_nobody_needs_the_fork_server(guest: GuestClient, number: int) -> None:
    """Programs may send any signal to it."""
    for _ in range(3):
        fork_server = have_fork_server(guest)
        os.kill(fork_server, number)
        for expected in range(5):
            answer = run(guest, f"print({expected})")
            assert (answer.result, bytes(answer.stdout)) == (
                {"exit_code": 0},
                b"%d\n" % expected,
            )


def test_a_fork_server_that_nobody_wants_ends(guest: GuestClient) -> None:
    have_fork_server(guest)
    deadline = time.monotonic() + 20
    while children_of(guest):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)
    assert bytes(run(guest, "print(1)").stdout) == b"1\n"


def test_to_kill_what_is_left_does_not_touch_the_fork_server(guest: GuestClient) -> None:
    leaving = """
        import os, time
        left = os.fork()
        if left == 0:
            os.setsid(), os.close(1), os.close(2)
            time.sleep(60)
        print(left)
    """
    fork_server = have_fork_server(guest)
    left = int(run(guest, leaving).stdout)
    assert Path(f"/proc/{left}").exists()
    assert guest.wait(guest.open("kill_leftovers")).result == {"survivors": 0}
    assert not Path(f"/proc/{left}").exists()
    assert fork_server in children_of(guest)


def test_where_it_is_off_there_is_none(tmp_path: Path) -> None:
    with GuestClient(tmp_path, fork_server=False) as guest:
        for _ in range(4):
            staying = children_of(guest)
            for _ in range(5):
                assert run(guest, "pass").result == {"exit_code": 0}
                staying &= children_of(guest)
            assert not staying


def test_where_processes_are_few_there_is_none(guest: GuestClient) -> None:
    for _ in range(4):
        staying = children_of(guest)
        for _ in range(5):
            few = {"path": "p.py", "source": "pass", "argv": [], "few_processes": True}
            assert guest.wait(guest.open("python", **few)).result == {"exit_code": 0}
            staying &= children_of(guest)
        assert not staying


def test_a_fork_server_that_was_stopped_ends_too(guest: GuestClient) -> None:
    os.kill(have_fork_server(guest), signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while children_of(guest):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def test_after_the_end_of_a_fork_server_programs_are_as_before(guest: GuestClient) -> None:
    """Also when it ends before anybody has read what it said of the last that it forked."""
    for _ in range(3):
        fork_server = have_fork_server(guest)
        run(
            guest, f"import os, time; time.sleep(0.05); os.kill({fork_server}, 9); time.sleep(0.05)"
        )
        for _ in range(5):
            answer = run(guest, "import os; print(os.getppid())")
            assert int(answer.stdout) == guest.process.pid, "it has a keeper"


def test_one_that_could_not_be_had_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    children = Children[object]()
    monkeypatch.setattr(children, "_preforked", Preforked(ours, lambda: 0, {}))
    with theirs:
        assert children.take_preforked() is None
        assert not children.has_preforked
        assert theirs.recv(1) == b"", "whoever is there after all has to hear that nobody is"


@pytest.mark.parametrize(("answer", "pid"), [(b"12", 12), (b"-1", 0)])
def test_answers_of_a_fork_server(answer: bytes, pid: int) -> None:
    fork_server = ForkServer.__new__(ForkServer)
    fork_server.pid = 0
    fork_server._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(answer)
        assert fork_server._answer() == pid
    fork_server.close()
    assert fork_server._answer() == 0
