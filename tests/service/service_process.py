"""A real service process on the loopback, with its own state, data and keys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

import loop_watch

SOURCE = Path(__file__).resolve().parents[2] / "src"
START_SECONDS = 60.0
STOP_SECONDS = 30.0


class ServiceProcess:
    """``paracle serve`` below one directory; start it again for a successor."""

    def __init__(self, home: Path, **variables: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.data = home / "service"
        self.key = ""
        self.url = ""
        self.lines: list[str] = []
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PYTHONPATH": f"{loop_watch.WATCHED}:{SOURCE}",
            loop_watch.REPORT_VARIABLE: str(home / "stalls"),
            "PARACLE_STATE_DIR": str(home / "state"),
            "PARACLE_DATA_DIR": str(home / "data"),
            "SANDBOX_DATA_DIR": str(self.data),
            "PARACLE_TEMPLATE_BUILD": "0",
            "SANDBOX_MODE": "native",
            "SANDBOX_API_PORT": "0",
            "PYTHONWARNINGS": "error::ResourceWarning",
            **variables,
        }
        self.process: subprocess.Popen[str] | None = None
        self.errors = home / "stderr.txt"

    def start(self) -> ServiceProcess:
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paracle_sandbox", "serve"],
                env=self.env, cwd=self.home, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "curl" in line:
                break
        assert self.lines and "curl" in self.lines[-1], self.errors.read_text()
        found = re.search(r"http://\S+", self.lines[0])
        assert found, self.lines
        self.url = found[0]
        if key_file := re.search(r"/\S+/first-key", self.lines[1]):
            self.key = Path(key_file[0]).read_text().strip()
        elif "SANDBOX_API_KEY" in self.env:
            self.key = self.env["SANDBOX_API_KEY"]
        wait_until(self._is_ready, START_SECONDS, self.errors)
        return self

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.errors.read_text()
        try:
            return httpx2.get(f"{self.url}/ready", timeout=30).status_code == 200
        except httpx2.HTTPError:
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_SECONDS)
        self._close()

    def stop(self) -> int:
        """SIGTERM, as an operator would; how it ended."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_SECONDS)
        self._close()
        return code

    def _close(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        if (stalls := self.home / "stalls").exists():
            raise AssertionError(f"the service's event loop {stalls.read_text()}")

    def client(self, key: str | None = None, **options: Any) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url, headers={"X-API-Key": self.key if key is None else key},
            timeout=60, **options,
        )  # fmt: skip

    def keys(self, *words: str) -> str:
        return self.paracle("keys", *words).stdout.strip()

    def paracle(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paracle_sandbox", *words],
            env=self.env, cwd=self.home, capture_output=True, text=True, timeout=60,
        )  # fmt: skip


def wait_until(condition: Callable[[], bool], seconds: float, *context: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        shown = "".join(path.read_text() for path in context if path.exists())
        assert time.monotonic() < deadline, f"not within {seconds} s\n{shown[-3000:]}"
        time.sleep(0.05)
