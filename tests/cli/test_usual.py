"""The usual command is read and run without what every other needs, and comes out the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from paracle_cli import SOURCE, Cli

from paracle_sandbox.cli import usual
from paracle_sandbox.cli.execute import Order
from paracle_sandbox.cli.sandbox import Network, app

# Each takes longer to import than to make a sandbox, or has no business in a short command.
HEAVY = {"typer", "click", "pydantic", "rich", "_ssl", "hashlib", "tempfile", "shutil", "email",
         "importlib.metadata", "multiprocessing", "paracle_sandbox.executor",
         "paracle_sandbox.manager"}  # fmt: skip
# What the spawner's processes can do without. All of it would be in every sandbox.
HEAVY_INSIDE = {"dataclasses", "inspect", "uuid", "platform", "pkgutil", "subprocess", "asyncio"}


def test_it_knows_the_flags_of_the_command() -> None:
    command: Any = typer.main.get_command(app).commands["execute"]  # type: ignore[attr-defined]
    flags = {
        flag
        for parameter in command.params
        if parameter.param_type_name == "option"
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    known = {*usual.LIMITS, *usual.TEXTS, *usual.SWITCHES, "--env", "--network"}
    # What is more than one file with its limits is left to the other parser.
    more = {"-c", "-i", "-t", "--workspace", "--file", "--install", "--save", "--apply", "--diff",
            "--exit-code", "--allow-degraded", "--help"}  # fmt: skip
    assert known == flags - more
    assert set(usual.NETWORKS) == {network.value for network in Network}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("a.py", {}),
        ("-", {"file": "-"}),
        ("a.py x y", {"args": ["x", "y"]}),
        ("a.py -- --cpu -x", {"args": ["--cpu", "-x"]}),
        ("--cpu 2 a.py --memory=256", {"limits": {"cpu_cores": 2.0, "memory_mb": 256}}),
        ("a.py --timeout 20 --timeout 30", {"limits": {"timeout_seconds": 30}}),
        ("a.py --network bridge", {"limits": {"network_mode": "bridge"}}),
        ("a.py --env A=1 --env=B=2=3", {"env": ["A=1", "B=2=3"]}),
        ("a.py -v --json --raw", {"verbose": True, "as_json": True, "raw": True}),
        ("a.py -q", {"quiet": True}),
        ("a.py --no-monitor --monitor", {"monitor": True}),
        ("a.py --inputs i --output o", {"inputs": "i", "output": "o"}),
        ("a.py --template ml --backend fake", {"template": "ml", "backend": "fake"}),
    ],
)
def test_it_reads_what_is_plainly_right(words: str, fields: dict[str, Any]) -> None:
    read = usual.read(["sandbox", "execute", *words.split()])
    assert read is not None
    expected = {"file": "a.py", "args": [], "limits": {}, "env": [], **fields}
    assert Order(**read) == Order(**expected)


@pytest.mark.parametrize(
    "words",
    [
        "", "--help", "a.py --help", "a.py -h", "a.py --cpu", "a.py --cpu x", "a.py --memory 1.5",
        "a.py --network lan", "a.py --nothing", "a.py -vv", "a.py --json=1", "a.py --cpu -1",
        "a.py --output --json", "--", "-- make test", "-c 1", "a.py -q -it", "a.py --apply",
    ],
)  # fmt: skip
def test_it_leaves_everything_else_alone(words: str) -> None:
    assert usual.read(["sandbox", "execute", *words.split()]) is None


@pytest.mark.parametrize("words", [[], ["sandbox"], ["sandbox", "health"], ["execute", "a.py"]])
def test_it_reads_no_other_command(words: list[str]) -> None:
    assert usual.read(words) is None


@pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")
def test_a_short_command_imports_little(tmp_path: Path) -> None:
    cli = Cli(tmp_path, PYTHONPATH=str(SOURCE))  # without the watchdog, which imports more
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *cli.argv("sandbox", "execute")[1:], cli.program("")],
        env=cli.env, cwd=cli.home, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "paracle_sandbox.backends.native.spawner_client" in imported
    assert not HEAVY & imported


def test_a_spawner_imports_little() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); "
        "from paracle_sandbox.jail.launch import _import_everything; "
        "_import_everything(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-E", "-c", code], capture_output=True, text=True, check=True
    )
    assert not HEAVY_INSIDE & set(done.stdout.split())
