"""Tests of what the spawner notices when a zygote dies at the worst moment."""

from __future__ import annotations

import os
import signal
import socket

import pytest

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
