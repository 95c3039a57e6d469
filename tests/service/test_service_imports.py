"""What the service and the remote backend need is loaded by nobody else, and asked for by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from service_process import ServiceProcess

HEAVY = {"fastapi", "uvicorn", "starlette", "httpx2", "websockets", "prometheus_client"}


def python(home: ServiceProcess, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=home.env, cwd=home.home, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


def test_running_a_program_loads_nothing_of_it(tmp_path: Path) -> None:
    home = ServiceProcess(tmp_path, SANDBOX_MODE="fake")
    (tmp_path / "hello.py").write_text("print('hello')")
    done = python(
        home,
        "import sys\n"
        "from paracle_sandbox.cli.app import run\n"
        "code = run(['sandbox', 'execute', 'hello.py'])\n"
        "print(code, *sys.modules)",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "hello", done
    code, *modules = lines[-1].split()
    assert code == "0"
    assert not HEAVY & set(modules)


def test_a_missing_extra_is_named_with_its_command(tmp_path: Path) -> None:
    home = ServiceProcess(tmp_path, SANDBOX_MODE="fake")
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        done = python(
            home,
            f"import sys; sys.modules[{module!r}] = None\n"
            "from paracle_sandbox.cli.app import run\n"
            "sys.exit(run(['serve']))",
        )
        assert done.returncode == 2, done
        assert "pip install '.[service]'" in done.stderr


def test_a_missing_extra_of_the_remote_backend_is_named(tmp_path: Path) -> None:
    home = ServiceProcess(tmp_path)
    program = (
        "import sys, asyncio; sys.modules[{!r}] = None\n"
        "from paracle_sandbox import SandboxConfig, Settings\n"
        "from paracle_sandbox.backends.registry import get_backend\n"
        "backend = get_backend('remote', Settings(api_url='http://127.0.0.1:9'))\n"
        "try: asyncio.run(backend.{})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for module, call in (
        ("httpx2", "create('x', SandboxConfig(), {})"),
        ("websockets", "connect('x')"),
    ):
        done = python(home, program.format(module, call))
        assert done.stdout.startswith("BackendUnavailableError"), done
        assert "pip install '.[remote]'" in done.stdout, done
