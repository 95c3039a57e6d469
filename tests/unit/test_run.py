"""Tests of run(): one call, with or without an event loop, which leaves nothing behind."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paracle_sandbox import SandboxConfig, SandboxTimeoutError, run, run_async
from paracle_sandbox.testing.fake import FakeBackend


def test_run() -> None:
    backend = FakeBackend()
    result = run("print('hello')", backend=backend)
    assert result["success"]
    assert result["result"]["stdout"] == "hello\n"
    assert asyncio.run(backend.list_sandboxes()) == []


def test_everything_can_be_passed(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text("import json, sys, os\n"
                    "print(json.load(open('inputs.json')), sys.argv[1:], sys.stdin.read())\n"
                    "print(os.environ['A'])\n", encoding="utf-8")  # fmt: skip
    seen: list[str] = []
    result = run(
        file, config=SandboxConfig(memory_mb=256), inputs={"x": 1}, args=["y"], stdin=b"z",
        env={"A": "B"}, timeout=20, monitor=True, on_stdout=seen.append, backend=FakeBackend(),
    )  # fmt: skip
    assert result["result"]["stdout"] == "{'x': 1} ['y'] z\nB\n" == "".join(seen)
    assert result["stats"]["memory_limit_mb"] == 256
    assert "monitoring" in result["stats"]


def test_errors_come_through() -> None:
    with pytest.raises(SandboxTimeoutError):
        run("while True: pass", timeout=0.3, backend=FakeBackend())
    assert run("raise SystemExit(2)", backend=FakeBackend())["success"] is False


async def test_inside_a_running_loop() -> None:
    assert run("print(1)", backend=FakeBackend())["result"]["stdout"] == "1\n"
    assert (await run_async("print(2)", backend=FakeBackend()))["result"]["stdout"] == "2\n"
    with pytest.raises(SandboxTimeoutError):
        run("while True: pass", timeout=0.3, backend=FakeBackend())


INTERRUPTED = """
import asyncio, signal, sys
from paracle_sandbox import run
from paracle_sandbox.testing.fake import FakeBackend

backend = FakeBackend()

def interrupt(text):
    signal.raise_signal(signal.SIGINT)  # which Python handles in the main thread

async def main():
    code = "print(1, flush=True)\\nwhile True: pass"
    run(code, on_stdout=interrupt, backend=backend)

start = asyncio.run if sys.argv[1] == "script" else asyncio.new_event_loop().run_until_complete
try:
    start(main())
except KeyboardInterrupt:
    print("interrupted,", len(asyncio.run(backend.list_sandboxes())), "left")
"""


@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_an_interrupt_inside_a_running_loop_ends_the_program(kind: str) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, kind]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted, 0 left\n", done.stderr


def test_from_many_threads_at_once() -> None:
    outputs: list[str] = []

    def work(number: int) -> None:
        result = run(f"print({number})", backend="fake")
        outputs.append(result["result"]["stdout"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == ["0\n", "1\n", "2\n", "3\n"]
