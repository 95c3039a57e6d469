"""Run the whole contract again as an ordinary user: without root and cgroups, with user
namespaces."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = 54321  # no file on a machine belongs to this user
SECONDS = 900


def _as_user(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    # env comes in between: setpriv itself still has root's powers when it executes a program.
    setpriv = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "env", "--"]
    return subprocess.run([*setpriv, *command], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def interpreter() -> str:
    """Return an interpreter of our own version that the user may run: our packages have compiled
    parts."""
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    wanted = ".".join(map(str, sys.version_info[:2]))
    for python in (
        os.path.realpath(sys.executable),
        "/usr/bin/python3",
        f"/usr/bin/python{wanted}",
    ):
        try:
            if _as_user([python, "-I", "-c", version]).stdout.strip() == wanted:
                return python
        except OSError:
            continue
    pytest.skip(f"no Python {wanted} that an ordinary user may run; apt install python3")


def readable_packages(place: Path) -> Path:
    """Copy the installed packages to a folder that the user can read."""
    packages = Path(pytest.__file__).parents[1]
    if _as_user(["test", "-r", str(packages / "pytest/__init__.py")]).returncode != 0:
        ignore = shutil.ignore_patterns("__pycache__")
        return Path(shutil.copytree(packages, place / "packages", ignore=ignore))
    (place / "packages").symlink_to(packages)
    return place / "packages"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Provide a copy of the project that the user can read, and a home that belongs to the user."""
    place = Path(tempfile.mkdtemp(prefix="paracle-user-"))
    try:
        place.chmod(0o755)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", place / "src", ignore=ignore)
        shutil.copytree(ROOT / "tests" / "conformance", place / "tests/conformance", ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", place)
        readable_packages(place)
        (place / "home").mkdir()
        os.chown(place / "home", USER, USER)
        yield place
    finally:
        shutil.rmtree(place)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="test_native.py runs as this ordinary user already")
def test_the_contract_holds_for_an_ordinary_user(folder: Path) -> None:
    command = [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider",
               "tests/conformance/test_native.py"]  # fmt: skip
    done = _as_user(command, cwd=folder, env=_environment(folder), timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
    print(done.stdout.splitlines()[-1])


LIMITS = """
import resource
for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_NPROC):
    print(resource.getrlimit(kind)[1])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_limits_of_a_user_that_are_lower_stay(folder: Path) -> None:
    """Only root may raise them, so sandboxes are created with them."""
    data = 400 << 20
    lower = ["prlimit", "--nofile=600:600", f"--data={data}:{data}", "--nproc=200:200"]
    command = [interpreter(), "-m", "paracle_sandbox", "sandbox", "execute", "-q",
               "--backend", "native", "-c", LIMITS]  # fmt: skip
    env = {**_environment(folder), "PARACLE_TEMPLATE_BUILD": "0"}
    done = _as_user([*lower, *command], cwd=folder, env=env, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["600", str(data), "200"]), done.stderr


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "home"),
        "PYTHONPATH": f"{folder}/src:{folder}/packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
    }
