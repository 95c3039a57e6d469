"""Stands in for the guest: a warm `python3 -I -S -E` that forks once for each program.

Started with the folder of the package and the number of a socket. Each message on the socket is
a JSON request with three descriptors; each answer is the wait status of the program.
"""

import array
import json
import os
import signal
import socket
import sys
import traceback

sys.path.insert(0, sys.argv[1])
from paracle_sandbox.guest.python.program import become_program  # noqa: E402

del sys.path[0]

import argparse  # noqa: E402,F401
import asyncio  # noqa: E402,F401
import concurrent.futures.process  # noqa: E402,F401
import ctypes  # noqa: E402,F401
import dataclasses  # noqa: E402,F401
import decimal  # noqa: E402,F401
import inspect  # noqa: E402,F401
import logging  # noqa: E402,F401
import multiprocessing.pool  # noqa: E402,F401
import multiprocessing.spawn  # noqa: E402,F401
import random  # noqa: E402,F401
import re  # noqa: E402,F401
import selectors  # noqa: E402,F401
import subprocess  # noqa: E402,F401
import tempfile  # noqa: E402,F401
import threading  # noqa: E402,F401
import typing  # noqa: E402,F401
import unittest  # noqa: E402,F401
import warnings  # noqa: E402,F401


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the guest has handlers of its own too
    while True:
        message, descriptors = receive(channel)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            run(json.loads(message), descriptors)
        for fd in descriptors:
            os.close(fd)
        channel.sendall(b"%d\n" % os.waitpid(pid, 0)[1])


def receive(channel: socket.socket) -> "tuple[bytes, list[int]]":
    descriptors = array.array("i")
    message, ancillary, _, _ = channel.recvmsg(1 << 16, socket.CMSG_SPACE(3 * 4))
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return message, list(descriptors)


def run(request: "dict", descriptors: "list[int]") -> None:
    try:
        for number, fd in enumerate(descriptors):
            os.dup2(fd, number)
        os.closerange(3, 256)
        os.chdir(request["cwd"])
        os.setsid()
        become_program(request["spec"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


main()
