"""The library under each Python that it supports: 3.11 to 3.14, each with packages of its own.

The environments are made once, in the cache of the tests, from what pyproject.toml says.
PARACLE_LONG=1 runs all of ``make check`` under each that is supported.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pythons import SCRIPT, require_interpreter

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# Tried, and not supported yet. The test fails when it works: then pyproject.toml, docs/guide.md and
# this say so.
NOT_YET = {"3.14": "code of run_code() does not find the modules of the working directory"}
# Of the extras, all but daytona's, and of what tests need, what these ones do.
EXTRAS = ("docker", "incus", "network", "remote", "service", "mcp", "agents")
OF_TESTS = ("hypothesis", "pytest", "pyyaml")
QUICK = ["tests/unit", "tests/conformance/test_fake.py"]
# As in the target check of the Makefile.
WHOLE = [*QUICK, "tests/guest", "tests/conformance/test_native.py"]
INSTALL_SECONDS, RUN_SECONDS = 900, 1800


def requirements() -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [
        *project["dependencies"],
        *(one for extra in EXTRAS for one in extras[extra]),
        *(one for one in extras["dev"] if one.startswith(OF_TESTS)),
    ]


def environment(version: str) -> Path:
    """The interpreter of an environment with the packages; made anew when other ones are needed."""
    python = require_interpreter(version)
    needed = sorted(set(requirements()))
    key = hashlib.sha256("\n".join([python, *needed]).encode()).hexdigest()[:12]
    folder = cache() / f"host-{version}-{key}"
    with one_at_a_time(cache() / f"host-{version}.lock"):
        done = folder / "installed"
        if not done.exists():
            for command in (
                [python, "-m", "venv", "--clear", str(folder)],
                [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--prefer-binary",
                 "--disable-pip-version-check", *needed],
            ):  # fmt: skip
                made = subprocess.run(
                    command, capture_output=True, text=True, timeout=INSTALL_SECONDS
                )
                if made.returncode != 0:
                    pytest.skip(f"no packages for Python {version}: {made.stderr.strip()[-600:]}")
            done.touch()
        # As if it were installed from here: programs that tests start without PYTHONPATH find it.
        packages = folder / "lib" / f"python{version}" / "site-packages"
        (packages / "paracle_sandbox_checkout.pth").write_text(f"{REPOSITORY / 'src'}\n")
    return folder / "bin/python"


def cache() -> Path:
    asked = subprocess.run([SCRIPT, "cache"], capture_output=True, text=True, check=True)
    folder = Path(asked.stdout.strip())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_what_is_said_to_be_supported_is_tried() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    start = "Programming Language :: Python :: "
    said = {one.removeprefix(start) for one in project["classifiers"] if one.startswith(start)}
    assert said == set(VERSIONS) - set(NOT_YET)


@pytest.mark.timeout(INSTALL_SECONDS + RUN_SECONDS)
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(
            version,
            marks=[pytest.mark.xfail(reason=NOT_YET[version], raises=AssertionError)]
            if version in NOT_YET else [],
        )
        for version in VERSIONS
    ],
)  # fmt: skip
def test_the_library_under(version: str) -> None:
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip("this run itself is under it")
    python = environment(version)
    tests = WHOLE if os.environ.get("PARACLE_LONG") and version not in NOT_YET else QUICK
    # Not below this test's own folder: the path of a unix socket has to be short.
    with tempfile.TemporaryDirectory(prefix="py") as folder:
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-m", "not clock", "-p", "no:cacheprovider",
             "--basetemp", f"{folder}/t", *tests],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
