"""What the spawner hears of a mold that dies at the worst moment."""

from __future__ import annotations

import os
import select
import signal
import socket

import pytest

from paracle_sandbox.jail.mold import Mold


@pytest.mark.timeout(30)
def test_the_end_of_a_mold_is_heard_though_its_child_has_its_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        signal.pause()
    dead = os.fork()
    if dead == 0:
        os._exit(1)
    theirs.close()
    mold = Mold.__new__(Mold)
    mold._socket, mold._owed, mold.pidfd = ours, 0, os.pidfd_open(dead)
    mold._news = select.poll()
    for fd in (ours.fileno(), mold.pidfd):
        mold._news.register(fd, select.POLLIN)
    try:
        with pytest.raises(BrokenPipeError):
            mold._receive()
    finally:
        os.kill(child, signal.SIGKILL)
        for pid in (child, dead):
            os.waitpid(pid, 0)
        os.close(mold.pidfd)
        ours.close()
