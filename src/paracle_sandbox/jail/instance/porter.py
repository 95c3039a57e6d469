"""The two processes of ours that stay root of an instance, so that it ends with its guest.

    attached     what the server started; lives as long as the rest, so that its stream does
      └─ porter  in a session of its own; ends the whole instance after the guest
           └─ guest: PID 1 of a pid namespace (see inner.py)

The server may kill what it started when its client is gone: that must not be the porter. The text
of this file runs before everything else, because both keep in memory what is loaded here, and the
sandbox pays for it.
"""

import ctypes
import os
from typing import NoReturn

_NEW_PID_NAMESPACE = 0x20000000
_POWER_OFF = 0x4321FEDC


def leave_porter() -> None:
    """Returns in the process that is to be the guest, and in no other."""
    child = os.fork()
    if child:
        _let_go(0, 1, 2)
        _, status = os.waitpid(child, 0)
        os._exit(1 if status else 0)
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_PID_NAMESPACE):
        why = os.strerror(ctypes.get_errno())
        os.write(2, f"paracle-step pid namespace: {why}\n".encode())
        os._exit(1)
    guest = os.fork()
    if guest:
        _be_porter(libc, guest)


def _be_porter(libc: ctypes.CDLL, guest: int) -> NoReturn:
    _let_go(0, 1)
    try:
        _tell(os.waitpid(guest, 0)[1])  # fails when the other end is closed
    finally:
        # In a pid namespace the kernel kills the first process, and with it the instance.
        libc.reboot(ctypes.c_uint(_POWER_OFF))
        os._exit(1)


def _tell(status: int) -> None:
    """Say how the guest ended."""
    killed = os.WIFSIGNALED(status)
    how = f"killed by signal {os.WTERMSIG(status)}" if killed else f"exit {os.WEXITSTATUS(status)}"
    os.write(2, f"paracle-guest ended: {how}\n".encode())


def _let_go(*fds: int) -> None:
    """Of the channel: it ends when the guest ends."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)
