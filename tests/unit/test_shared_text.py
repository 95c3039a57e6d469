"""Forks find the interpreter's code where it is mapped already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import paracle_sandbox

# In a process of its own: what a mapping has once, it keeps.
SHOW = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from paracle_sandbox.jail.warmup.shared_text import _large_mappings, share_code
if sys.argv[2] == "shared":
    share_code()
spans = {"%x-%x" % span for span in _large_mappings()}
def resident(pid):
    found, span = {}, None
    for line in open("/proc/%d/smaps" % pid):
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            span = head
        elif span in spans and head == "Rss:":
            found[span] = int(line.split()[1])
    return found
child = os.fork()
if child == 0:
    signal.pause()
found = resident(child), resident(os.getpid())
os.kill(child, 9)
os.wait()
print(json.dumps([(found[0][span], found[1][span]) for span in spans]))
"""


def mapped_in_a_fork(how: str) -> list[list[int]]:
    """Of each large mapping: how much of it the fork has, and who it is forked from."""
    package = Path(paracle_sandbox.__file__).parents[1]
    shown = subprocess.run(
        [sys.executable, "-I", "-c", SHOW, package, how], capture_output=True, text=True, check=True
    )
    return list(json.loads(shown.stdout))


@pytest.mark.timeout(60)
def test_a_fork_has_at_once_what_was_used_of_the_code() -> None:
    shared, alone = mapped_in_a_fork("shared"), mapped_in_a_fork("alone")
    assert len(shared) > 1
    assert sum(fork for fork, _ in shared) >= 0.95 * sum(parent for _, parent in shared)
    assert sum(fork for fork, _ in alone) < 0.8 * sum(parent for _, parent in alone), "no measure"
