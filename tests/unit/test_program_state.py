"""A forked program finds fresh state, although modules of the process that it comes from have kept
some."""

from __future__ import annotations

import subprocess
import sys

import pytest

RECORDED = """
import sys, types
seeds = []
sys.modules["_ssl"] = types.SimpleNamespace(RAND_add=lambda *given: seeds.append(given))
from paracle_sandbox.guest.python.interpreter_state import reset_modules
reset_modules(), reset_modules()
print(len(set(seeds)), {(len(seed), entropy) for seed, entropy in seeds})
"""
# These are two forks of one process that has used OpenSSL. Each is the first process of a
# namespace, as that process is: OpenSSL cannot tell by the pid that it was forked.
FORKED = """
import ctypes, os, sys, _ssl
from paracle_sandbox.guest.python.interpreter_state import reset_modules
NEW_PROCESSES = 0x20000000
def in_namespace(work):
    if os.fork() == 0:
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_PROCESSES) != 0:
            print("skip", os.strerror(ctypes.get_errno()), flush=True)
        elif os.fork() == 0:
            work()
        else:
            os.wait()
        os._exit(0)
    os.wait()
def say():
    assert os.getpid() == 1
    if "reset" in sys.argv:
        reset_modules()
    print(_ssl.RAND_bytes(16).hex(), flush=True)
def use_and_fork():
    _ssl.RAND_bytes(16)
    in_namespace(say)
    in_namespace(say)
in_namespace(use_and_fork)
"""


def said(program: str, *arguments: str) -> list[str]:
    """Run the code in a process of its own, because this process uses what is reset there."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_openssl_is_given_another_seed_in_each_program() -> None:
    assert said(RECORDED) == ["2 {(48, 48)}"]


def test_openssl_gives_forks_of_one_number_different_bytes() -> None:
    unaware = said(FORKED)
    if len(unaware) != 2 or unaware[0] != unaware[1]:
        pytest.skip(f"not to be shown here: {unaware}")
    first, second = said(FORKED, "reset")
    assert first != second
