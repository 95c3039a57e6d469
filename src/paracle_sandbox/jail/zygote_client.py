"""The spawner's side of the zygote: have it started, have it fork.

It imports nothing of what the zygote is made of: that is imported in the new process alone.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import kernel
from .child import Child
from .limits.sandbox_resources import Place

MAX_MESSAGE = 1 << 16
READY = b"ready"
if TYPE_CHECKING:  # before Python 3.9 this cannot be evaluated
    _Answer = tuple[bytes, list[int]]


class Zygote:
    """Forks it. ``become``: what it does there, with its end of the socket. ``not_theirs``:
    descriptors that are closed in it. ``missing``: modules that could not be imported."""

    def __init__(
        self, become: Callable[[socket.socket], object], not_theirs: tuple[int, ...] = ()
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.missing: list[str] = []
        pid = os.fork()
        if pid == 0:
            try:
                for fd in (*not_theirs, self._socket.detach()):
                    os.close(fd)
                become(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self.pidfd = kernel.pidfd_open(pid)
        self._news = select.poll()
        for fd in (self._socket.fileno(), self.pidfd):
            self._news.register(fd, select.POLLIN)

    def wait_until_ready(self) -> None:
        """It has imported what is ours: from then on our files need not be seen any more."""
        packet, _ = self._receive()
        assert packet == READY

    def begin(self, place: Place, options: dict[str, Any], network: int, rights: int) -> str:
        """Tell it what its children need, when the root is the one that they will have. Returns
        why there is no Landlock, or nothing. Raises OSError.

        ``network``: the host's, -1 if there is nothing to give up; ``rights``: all that it has."""
        groups = place.cgroups.directories if place.cgroups else []
        fds = [*groups, *([place.volume.root] if place.volume else [])]
        root = os.stat("/")
        details = {
            "root": [root.st_dev, root.st_ino],
            "cgroups": len(groups),
            "cgroup_version": place.cgroups.version if place.cgroups else 0,
            "volume": place.volume is not None,
            "is_born_in_group": place.is_born_in_group,
            "network": network >= 0,
            "capabilities": rights,
            "failpoints": options["failpoints"],
            "env": options["setup"]["env"],
            "python": options["setup"]["python"],
        }
        fds += [network] if network >= 0 else []
        self._send(b"begin", json.dumps(details).encode(), tuple(fds))
        answer = json.loads(self._receive()[0])
        if "errno" in answer:
            raise OSError(answer["errno"], answer["message"])
        self.missing = self.preload(options["modules"])
        return str(answer["landlock_note"])

    def preload(self, modules: list[str]) -> list[str]:
        """Import them once, so that no sandbox pays for them. Returns those that failed."""
        self._send(b"import", json.dumps(modules).encode())
        return list(json.loads(self._receive()[0]))

    def begin_fork(self, child: Child, setup: dict[str, Any], group: int | None = None) -> None:
        """Have the process forked that becomes PID 1 of a new pid namespace, in the cgroup that
        a descriptor names, if one does. Raises OSError.

        `end_fork` has to come next."""
        host_end, guest_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child.status, child.host_end = ours, host_end
        with guest_end, theirs:
            ours.send(child.order(setup))
            fds = guest_end.fileno(), theirs.fileno(), *(() if group is None else (group,))
            self._send(b"fork", b"%d" % len(fds), fds)

    def end_fork(self, child: Child) -> None:
        """It is there, and waits for a word. Raises OSError, and then it ends by itself, if it is
        there: nobody can kill it, and it may be in its groups already."""
        try:
            answer, fds = self._receive()
            self._take(child, answer, fds)
        except OSError:
            child.hang_up()
            raise

    def _take(self, child: Child, answer: bytes, fds: list[int]) -> None:
        if not fds:
            if answer.isdigit():  # it was forked, and its descriptor was not to be had: it ends
                raise OSError(errno.EMFILE, "the spawner has too many open files")
            number, _, text = answer.decode().partition(" ")
            raise OSError(int(number), text)
        assert child.status is not None
        child.pid, child.pidfd = int(answer), fds[0]
        child.status.setblocking(False)

    def _send(self, word: bytes, details: bytes, fds: tuple[int, ...] = ()) -> None:
        kernel.send_fds(self._socket, [word, b" ", details], fds)

    def end_with(self, owner_fd: int) -> None:
        """From now on, wait for no answer when the owner's process has ended: a template may have
        the zygote hang, and what its owner had must go all the same."""
        self._news.register(owner_fd, select.POLLIN)

    def _receive(self) -> _Answer:
        # A child that was just forked has the zygote's end of the socket, too: that tells no end.
        told = {fd for fd, _ in self._news.poll()}
        if self._socket.fileno() not in told:
            which = "zygote" if self.pidfd in told else "owner"
            raise BrokenPipeError(32, f"the {which} has ended")
        packet, received = kernel.recv_fds(self._socket, MAX_MESSAGE, 1)
        if not packet:
            raise BrokenPipeError(32, "the zygote has ended")
        return packet, received
