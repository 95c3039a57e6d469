"""What it costs to start the command line, as a multiple of what bare Python costs.

    python benchmarks/command_line.py [ROUNDS]

Each row is the median of ROUNDS runs (20): user and system time of the command as the console
script starts it, beside ``python3 -c pass`` with the same interpreter. What it starts and waits for
counts in the first column; the second is the command's own process, to which the budget applies.
Templates are not built, and the state directory is the benchmark's own.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Each command, and how many times bare Python it may cost.
BUDGET: dict[tuple[str, ...], float] = {
    ("sandbox", "execute", "hello.py"): 8.0,
    ("--help",): 6.0,
    ("sandbox", "list"): 8.0,
}


# What the console script runs. Its last line on stderr is the processor time of its own process.
PROGRAM = """
import os, sys, time
from paracle_sandbox.cli import exit_codes
from paracle_sandbox.cli.app import main
exit_codes.before_leaving.append(lambda: os.write(2, b"%d" % time.process_time_ns()))
sys.argv[0] = "paracle"
main()
"""


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hello.py").write_text("print('hello')\n")
        bare, _ = median_ms(["-c", "pass"], rounds, folder)
        print(f"{'python3 -c pass':<32} {bare:7.1f} ms")
        missed = 0
        for words, most in BUDGET.items():
            used, own = median_ms(["-c", PROGRAM, *words], rounds, folder)
            verdict = "ok" if own <= most * bare else "MISSED"
            missed += verdict == "MISSED"
            print(
                f"{' '.join(['paracle', *words]):<32} {used:7.1f} ms, its own process {own:6.1f} ms"
                f" = {own / bare:4.1f}x (at most {most:g}x) {verdict}"
            )
    return 1 if missed else 0


def median_ms(words: list[str], rounds: int, folder: str) -> tuple[float, float]:
    source = str(Path(__file__).resolve().parents[1] / "src")
    env = {
        "PATH": os.environ["PATH"], "HOME": folder, "LANG": "C.UTF-8", "PYTHONPATH": source,
        "PARACLE_TEMPLATE_BUILD": "0",
        "PARACLE_STATE_DIR": f"{folder}/state", "PARACLE_DATA_DIR": f"{folder}/data",
    }  # fmt: skip
    cpu_ms(words, env, folder)  # compiles what was not compiled yet
    runs = [cpu_ms(words, env, folder) for _ in range(rounds)]
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


def cpu_ms(words: list[str], env: dict[str, str], folder: str) -> tuple[float, float]:
    """Of the command with what it waited for, and of its own process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=folder, check=True, stdin=subprocess.DEVNULL,
        capture_output=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    own = done.stderr.splitlines()[-1:] or [b"0"]
    return 1000 * used, int(own[0]) / 1e6


if __name__ == "__main__":
    sys.exit(main())
