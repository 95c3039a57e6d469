"""The package as users get it: a wheel in a new environment, and ``make run`` in a clone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cli.paracle_cli import SOURCE, wait_for
from conformance.test_as_user import interpreter
from fresh.conftest import Index, Machine
from paracle_sandbox.images.package_index import read_listing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")

ROOT = SOURCE.parent
PACKAGE = "paracle_sandbox"
WANTING = "import requests; print(requests.version)"


@pytest.fixture(scope="session")
def wheel(place: Path) -> Path:
    """Built from a copy, so that nothing is left in the source."""
    ignore = shutil.ignore_patterns("__pycache__")
    copy = place / "project"
    for folder in ("src", "docker"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place / "built", copy]
    subprocess.run(build, check=True, timeout=240)
    (wheel,) = (place / "built").glob("*.whl")
    return wheel


# What each extra is for, in our source.
WAYS_IN = {
    "agents": ["agents"],
    "docker": ["backends/docker"],
    "incus": ["backends/incus"],
    "mcp": ["mcp", "cli/mcp.py"],
    "network": ["backends/native"],
    "remote": ["backends/remote"],
    "service": ["service", "cli/serve.py"],
}


def pip(home: Path, *words: object) -> None:
    """For the environment there, with this machine's own configuration of pip."""
    command = [sys.executable, "-m", "pip", "--python", home / "bin/python", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def environment(home: Path, *wanted: object) -> Path:
    """A new one, which an ordinary user may use, too: what is wanted, and what that depends on."""
    python = interpreter() if os.geteuid() == 0 else sys.executable
    subprocess.run([python, "-m", "venv", "--without-pip", home], check=True, timeout=120)
    pip(home, "install", "-q", "--no-compile", "--root-user-action", "ignore", *wanted)
    pip(home, "check")
    return home


@pytest.fixture(scope="session")
def installed(place: Path, wheel: Path) -> Path:
    return environment(place / "venv", wheel)


@pytest.mark.parametrize("extra", WAYS_IN)
def test_an_extra_brings_all_that_its_way_in_imports(
    place: Path, wheel: Path, installed: Path, extra: str
) -> None:
    home = environment(place / f"venv-{extra}", f"{wheel}[{extra}]")
    foreign = {name for part in WAYS_IN[extra] for name in imports_of(SOURCE / PACKAGE / part)}
    assert not_there(installed, foreign), "without the extra something is missing"
    ours = {name for part in WAYS_IN[extra] for name in modules_of(SOURCE / PACKAGE / part)}
    assert not_there(home, foreign | ours) == []
    shutil.rmtree(home)


def imports_of(part: Path) -> set[str]:
    """The modules of others that this source imports, at whatever moment it does."""
    names: set[str] = set()
    for file in [part] if part.is_file() else part.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module))
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


def modules_of(part: Path) -> set[str]:
    files = [part] if part.is_file() else part.rglob("*.py")
    paths = [file.relative_to(SOURCE).with_suffix("") for file in files]
    return {".".join(path.parts).removesuffix(".__init__") for path in paths}


def not_there(home: Path, names: set[str]) -> list[str]:
    """Which of them cannot be imported with what is installed in this environment."""
    program = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""
    command = [home / "bin/python", "-I", "-c", program, *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_the_extras_are_known_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = {"dev", "docs", "daytona"}  # daytona's is installed for the tests of a stand-in for it
    assert set(project["optional-dependencies"]) == {*WAYS_IN, *others}


def test_the_wheel_in_a_new_environment(machine: Machine, installed: Path, index: Index) -> None:
    """Its command and its library, with what it depends on and nothing else."""
    home = installed
    del machine.env["PYTHONPATH"]
    machine.in_environment(home)

    command = str(home / "bin/paracle")
    file = machine.program("print('command')")
    done = subprocess.run(
        machine.become(command, "sandbox", "execute", file), env=machine.env, cwd=machine.home,
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "command\n"), done
    assert "Building the default template" in done.stderr
    source = f"""
import paracle_sandbox as p
assert p.__file__.startswith({str(home)!r}), p.__file__
print(p.run("print('library')")["result"]["stdout"], end="", flush=True)
input()
print(p.run({WANTING!r})["result"]["stdout"], end="")
"""
    process = machine.starts(source)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "library\n"
        assert not machine.is_built
        index.is_open.set()
        out, err = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (0, "1.0\n"), err


def is_of_a_person(variable: str) -> bool:
    """What would lead to caches and settings of whoever runs the tests, or into their checkout."""
    return variable.startswith(("PARACLE_", "XDG_", "PYTHON", "VIRTUAL_ENV", "PIP_CACHE"))


def pip_configuration(path: Path) -> Path:
    """All by which pip reaches packages here, also what is in a person's home."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = {k: v for k, v in read_listing(listing).items() if "cache" not in k}
    lines = [f"{name} = {' '.join(value.split())}" for name, value in options.items()]
    path.write_text("\n".join(["[global]", *lines, ""]))
    return path


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is tested is not in a repository")
def test_make_run_in_a_clone(tmp_path: Path) -> None:
    """It builds the template before it runs the program, and shows that."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=120)
    home = tmp_path / "home"
    home.mkdir()
    env = {
        **{name: value for name, value in os.environ.items() if not is_of_a_person(name)},
        "HOME": str(home),
        "PIP_CONFIG_FILE": str(pip_configuration(tmp_path / "pip.conf")),
        "PARACLE_DATA_DIR": str(tmp_path / "data"),
        "PARACLE_STATE_DIR": str(tmp_path / "state"),
        "PYTHON": sys.executable,
    }
    done = subprocess.run(
        ["make", "run"], cwd=clone, env=env, capture_output=True, text=True, timeout=280,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, _, after = done.stdout.partition("✅ Template default built")
    assert "Hello from inside" in after and "Hello from inside" not in before
    assert "collecting requests" in done.stderr and "waiting" not in done.stderr
    wait_for(lambda: not list((tmp_path / "state").glob("*.json")))
