"""scripts/setup.sh, on a project that needs no package index: fresh, again, moved, broken off."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from paracle_cli import SOURCE

_PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "paracle-sandbox"
version = "1"
"""
# The least that pip takes: a wheel with a command, and a path to the sources.
_BACKEND = """\
import os, zipfile
FILES = {
    "METADATA": "Metadata-Version: 2.1\\nName: paracle-sandbox\\nVersion: 1\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "entry_points.txt": "[console_scripts]\\nparacle = answer:answer\\n",
    "RECORD": "",
}
def build_editable(folder, settings=None, metadata=None):
    name = "paracle_sandbox-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("paracle.pth", os.getcwd())
        for file, text in FILES.items():
            wheel.writestr(f"paracle_sandbox-1.dist-info/{file}", text)
    return name
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "a project"
    (place / "scripts").mkdir(parents=True)
    shutil.copy2(SOURCE.parent / "scripts/setup.sh", place / "scripts")
    (place / "pyproject.toml").write_text(_PROJECT)
    (place / "backend.py").write_text(_BACKEND)
    (place / "answer.py").write_text("def answer(): print(__file__)\n")
    return place


def set_up(project: Path) -> str:
    """What it says. Afterwards the command is there, and is that of this place."""
    done = subprocess.run(
        [project / "scripts/setup.sh", ".venv"], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done
    said = subprocess.run([project / ".venv/bin/paracle"], capture_output=True, text=True)
    assert said.stdout == f"{project}/answer.py\n", said
    return done.stdout


def test_once_and_again_where_it_was_moved_to(project: Path) -> None:
    assert set_up(project).startswith("Making .venv ...")
    assert set_up(project) == ""
    moved = project.rename(project.with_name("moved"))
    assert set_up(moved).startswith("Installing")
    assert set_up(moved) == ""


def test_one_that_was_broken_off_is_completed(project: Path) -> None:
    subprocess.run(["python3", "-m", "venv", "--without-pip", project / ".venv"], check=True)
    set_up(project)
