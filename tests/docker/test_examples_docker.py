"""What the documentation shows works in containers too, as it stands.

The examples and pages are those of ``tests/fresh``; only the backend is another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engines
from docs.pages import REPOSITORY, Block, blocks
from fresh.test_documentation import EXAMPLES, SAYS, files_of_the_pages

PAGES = ["README.md", "docs/guide.md"]
# Of templates, which are native's; of images of other engines; and what does not end by itself.
UNSAFE = ("paracle template build", "paracle sandbox execute --template",
          "paracle image build --incus", "paracle serve")  # fmt: skip
# Commands that take a backend. `cleanup --all --force` would end sandboxes of other tests.
_COMMAND = re.compile(r"paracle sandbox (execute|test|health)\b")
_ELSEWHERE = re.compile(r"--backend|--template")


@pytest.fixture(autouse=True)
def in_containers(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engines.require("docker")
    base = tmp_path_factory.mktemp("examples")
    (base / "bin").mkdir()
    command = base / "bin" / "paracle"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paracle_sandbox "$@"\n')
    command.chmod(0o755)
    for name, value in {
        "SANDBOX_MODE": "docker", "DOCKER_HOST": engines.DOCKER_HOST,
        "PARACLE_STATE_DIR": f"{base}/state", "PARACLE_DATA_DIR": f"{base}/data",
        "PARACLE_TEMPLATE_BUILD": "0", "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(base / "bin"), os.environ["PATH"]]),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def made_by(pid: int) -> list[str]:
    shown = subprocess.run(
        ["docker", "ps", "-a", "--format", "{{.Names}} {{.Label \"paracle.owner\"}}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in shown.stdout.splitlines() if f"/{pid}/" in line]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path, tmp_path: Path) -> None:
    inside = ["-m", "paracle_sandbox", "sandbox", "execute", "--backend", "docker"]
    words = [*(inside if path.name == "hello.py" else []), str(path)]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        said, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    for text in SAYS[path.name]:
        assert text in said, said
    assert "Unclosed" not in complaints and "Traceback" not in complaints, complaints
    assert not list(tmp_path.iterdir()), "it left something where it was started"
    assert not made_by(process.pid), "it left a container"


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page(page: str) -> None:
    given = json.dumps([dataclasses.asdict(block) for block in blocks(page, "python")])
    follow = REPOSITORY / "tests/docs/follow.py"
    done = subprocess.run([sys.executable, str(follow), "DockerBackend"], input=given,
                          capture_output=True, text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr


def command_lines() -> list[tuple[Block, str]]:
    return [
        (block, line)
        for page in (*PAGES, "docs/reference/cli.md", "docs/reference/docker.md")
        for block in blocks(page, "bash")
        for line in block.text.splitlines()
        if _COMMAND.search(line) and not line.startswith(UNSAFE)
    ]


@pytest.mark.parametrize(
    ("block", "line"), [pytest.param(*c, id=c[1][:60]) for c in command_lines()]
)
def test_command(block: Block, line: str, tmp_path: Path) -> None:
    if "--backend gvisor" in line:
        engines.require("gvisor")
    if not _ELSEWHERE.search(line):
        line = _COMMAND.sub(r"\g<0> --backend docker", line)
    folder = files_of_the_pages(tmp_path / "files")
    done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True,
                          timeout=240, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, f"{block}: {line}\n{done.stdout}{done.stderr}"


def test_the_commands_are_found() -> None:
    lines = [line for _, line in command_lines()]
    for words in ("--inputs", "--output", "--cpu", "sandbox test", "sandbox health"):
        assert any(words in line for line in lines), f"no command with {words} is tried"
