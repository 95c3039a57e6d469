"""Tests of what the spawner notices when a zygote dies at the worst moment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from test_spawner import GRANT, SHAPE

from paracle_sandbox.jail import kernel
from paracle_sandbox.jail.child import Child
from paracle_sandbox.jail.limits.sandbox_resources import Grant
from paracle_sandbox.jail.shape import Identity
from paracle_sandbox.jail.zygote import serve
from paracle_sandbox.jail.zygote_client import Zygote


@pytest.mark.timeout(30)
def test_the_end_of_a_zygote_is_heard_though_its_socket_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The socket is still open in a child that the zygote has just forked."""
    copies: list[socket.socket] = []
    real = socket.socketpair

    def pair(*kind: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = real(*kind)
        copies.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", pair)
    zygote = Zygote(lambda control: serve(control, ""))
    try:
        zygote.wait_until_ready()
        signal.pidfd_send_signal(zygote.pidfd, signal.SIGKILL)
        with pytest.raises(BrokenPipeError):
            zygote._receive()
    finally:
        os.waitid(os.P_PIDFD, zygote.pidfd, os.WEXITED)
        os.close(zygote.pidfd)
        for end in (zygote._socket, *copies):
            end.close()


def answering(answer: bytes) -> Callable[[socket.socket], None]:
    """What a zygote does that gives one answer, without descriptors, and then hangs."""

    def become(control: socket.socket) -> None:
        control.recv(1 << 16)
        control.send(answer)
        signal.pause()

    return become


@contextlib.contextmanager
def running(become: Callable[[socket.socket], None]) -> Iterator[Zygote]:
    zygote = Zygote(become)
    try:
        yield zygote
    finally:
        signal.pidfd_send_signal(zygote.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, zygote.pidfd, os.WEXITED)
        os.close(zygote.pidfd)
        zygote._socket.close()


@pytest.mark.timeout(30)
def test_a_zygote_that_hangs_does_not_outlive_its_owner() -> None:
    """A template may hang it for good. The spawner stops to wait when the owner has ended."""
    owner = subprocess.Popen(["sleep", "1000"])
    with running(lambda _: signal.pause()) as zygote, open_pidfd(owner.pid) as pidfd:
        zygote.end_with(pidfd)
        threading.Timer(0.2, owner.kill).start()
        with pytest.raises(BrokenPipeError, match="the owner has ended"):
            zygote.wait_until_ready()
    owner.wait()


@contextlib.contextmanager
def open_pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("answer", [b"77", b"12 Cannot allocate memory"])
def test_a_child_that_cannot_be_watched_is_told_to_end(answer: bytes) -> None:
    """It may be in its cgroup already, which cannot be removed before it has ended."""
    child = Child("slot", SHAPE, Identity(1, 1, False), Grant.asked(GRANT))
    with running(answering(answer)) as zygote:
        with pytest.raises(OSError):
            zygote.begin_fork(child, {})
            waits = child.status
            zygote.end_fork(child)
        assert (child.status, child.host_end, child.pid) == (None, None, 0)
        assert waits is not None and waits.fileno() == -1


def test_descriptors_that_are_received_are_not_inherited() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        kernel.send_fds(ours, [b"x"], [0, 1, 2])
        message, fds = kernel.recv_fds(theirs, 16, 2)
        try:
            assert (message, len(fds)) == (b"x", 2)
            assert not any(map(os.get_inheritable, fds))
        finally:
            for fd in fds:
                os.close(fd)
