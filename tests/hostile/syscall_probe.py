"""Build probe programs that make system calls directly, and read their reports."""

from __future__ import annotations

import json
from collections.abc import Mapping

from paracle_sandbox.jail.filters.syscalls import NUMBERS, architecture

Call = tuple[int | str, ...]

DENIED = {"EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT", "ENOENT", "EROFS", "ENODEV"}

PRELUDE = """
import ctypes, errno, json, os, socket, sys
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_ulong] * 6
_kept = []
def _argument(value):
    # Text is a path or name, given as a pointer; numbers are taken as they are.
    if isinstance(value, str):
        _kept.append(ctypes.create_string_buffer(value.encode()))
        return ctypes.addressof(_kept[-1])
    return value & 0xFFFFFFFFFFFFFFFF
def call(number, *arguments):
    padded = [_argument(a) for a in arguments] + [0] * (6 - len(arguments))
    ctypes.set_errno(0)
    result = _libc.syscall(number, *padded)
    return "OK" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def each(calls):
    # One child each: some of the calls would change or end the caller.
    answers = {}
    for name, (number, *arguments) in calls.items():
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(write, call(number, *arguments).encode())
            os._exit(0)
        os.close(write)
        answer = os.read(read, 100).decode()
        os.close(read)
        _, status = os.waitpid(pid, 0)
        answers[name] = answer or "KILLED"
    return answers
"""

BAD_POINTER = 1


def program(calls: Mapping[str, Call]) -> str:
    """Build a program that makes each call and reports name -> OK or the errno's name.

    A call is a name of the table and its arguments. A key may add a remark after a space.
    """
    numbers = NUMBERS[architecture()]
    spelled = {
        name: [numbers[name.split()[0]], *arguments]
        for name, arguments in calls.items()
        if name.split()[0] in numbers
    }
    return f"{PRELUDE}\nprint(json.dumps(each(json.loads({json.dumps(spelled)!r}))))\n"


def refused(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the calls that were not refused. There must be none."""
    return {name: answer for name, answer in answers.items() if answer not in DENIED}
