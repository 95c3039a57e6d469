"""Repeated calls of run() share one spawner, which ends with the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.paracle_cli import Cli, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")

_COMMON = """
import asyncio, os, sys, threading
from pathlib import Path
import paracle_sandbox as p

def spawners():
    '''The children of this process.'''
    tasks = os.listdir("/proc/self/task")
    found = [Path(f"/proc/self/task/{task}/children").read_text().split() for task in tasks]
    return sorted(pid for pids in found for pid in pids)

def go(text="out", **options):
    assert p.run(f"print({text!r})", **options)["result"]["stdout"] == text + "\\n"

"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def python(cli: Cli, source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _COMMON + source], env=cli.env, cwd=cli.home,
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    # The next start of any spawner removes what a killed one left.
    assert cli.run("sandbox", "cleanup").code == 0
    wait_for(lambda: not cli.live_remains())


def test_one_spawner_serves_scripts_notebooks_and_threads(cli: Cli) -> None:
    python(
        cli,
        """
go()
first = spawners()
assert len(first) == 1, first
go()
async def cell(): go()
asyncio.run(cell())
threads = [threading.Thread(target=go, args=(str(number),)) for number in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert spawners() == first, spawners()
# Its sandboxes do not stay, and what failed does not end it.
try:
    p.run("while True: pass", timeout=0.2)
except p.SandboxTimeoutError:
    pass
assert not [name for name in os.listdir(os.environ["PARACLE_STATE_DIR"]) if name.startswith("sb-")]
go()
assert spawners() == first
# Other settings are another backend, in the place of the first.
before = spawners()
os.environ["PARACLE_STOCK"] = "0"
go()
assert len(spawners()) == 1 and spawners() != before
""",
    )


def test_a_forked_child_has_its_own_and_the_parent_keeps_its(cli: Cli) -> None:
    python(
        cli,
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while there are threads
go()
mine = spawners()
child = os.fork()
if child == 0:
    go()
    theirs = spawners()
    assert len(theirs) == 1 and theirs != mine
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
go()
assert spawners() == mine
""",
    )


def test_callbacks_are_called_in_the_thread_of_the_caller(cli: Cli) -> None:
    python(
        cli,
        """
seen = []
def note(text): seen.append((text, threading.current_thread()))
async def later(text): seen.append(text)
go(on_stdout=note)
go(on_stdout=later)
async def cell(): go(on_stdout=note)
asyncio.run(cell())
main = threading.main_thread()
assert seen == [("out\\n", main), "out\\n", ("out\\n", main)], seen
def broken(text): raise KeyError("mine")
try:
    go(on_stdout=broken)
except KeyError as error:
    assert error.args == ("mine",)
else:
    raise AssertionError("it was lost")
go()
""",
    )


def test_a_spawner_that_was_killed_is_replaced(cli: Cli) -> None:
    python(
        cli,
        """
go()
first = spawners()
os.kill(int(first[0]), 9)
while True:
    try:
        go()
        break
    except p.SandboxError:  # it was in use until its end was heard of
        continue
assert len(spawners()) == 1 and spawners() != first
""",
    )
