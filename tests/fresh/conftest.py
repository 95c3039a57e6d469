"""A machine on which nothing of ours was ever run: empty data, state, cache and home directories.

What pip installs comes from a package index of the test on the loopback: tiny packages with the
names of those of all templates, which are given out only after the test has said so. So a program
that has printed before that has not waited for them, however slow the machine is.

Every process watches its event loops (``loop_watch``), but for those of a virtual environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import loop_watch
from cli.paracle_cli import SOURCE, Cli, make_wheel, wait_for
from conformance.test_as_user import USER, interpreter, readable_packages
from paracle_sandbox.backends.native.template_kinds import PACKAGES


class Index:
    """A package index that answers when it was opened, and until then lets pip wait."""

    def __init__(self, folder: Path) -> None:
        self.is_open = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.is_open.wait(120)
                name = self.path.strip("/").rpartition("/")[2]
                if not name.endswith(".whl"):
                    name = name.replace("-", "_")  # as files of packages are called
                path = folder / (name if name.endswith(".whl") else f"{name}-1.0-py3-none-any.whl")
                body, kind = f'<a href="/{path.name}">{path.name}</a>'.encode(), "text/html"
                if name.endswith(".whl"):
                    body, kind = path.read_bytes(), "application/octet-stream"
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"

    def __enter__(self) -> Index:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open.set()
        self.server.shutdown()
        self.server.server_close()


NO_INDEX = "http://127.0.0.1:9/simple"


class Machine(Cli):
    """``paracle`` as root or as an ordinary user, below a home that was empty at first."""

    def __init__(self, home: Path, interpreter: str, user: int | None, path: str) -> None:
        super().__init__(home)
        self.user = user
        self._interpreter = interpreter
        del self.env["PARACLE_TEMPLATE_BUILD"]
        self.env.update(
            PYTHONPATH=path, XDG_RUNTIME_DIR=str(home / "run"), XDG_CACHE_HOME=str(home / "cache"),
            TMPDIR=str(home / "tmp"), PIP_CONFIG_FILE=os.devnull, PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
        self.env[loop_watch.REPORT_VARIABLE] = str(self.stalls)
        if user is not None:  # finds its directories below its home by itself
            del self.env["PARACLE_STATE_DIR"], self.env["PARACLE_DATA_DIR"]
            self.state = home / "run/paracle-sandbox"
        for folder in (home / "run", home / "tmp"):
            folder.mkdir(mode=0o700)
        self.owns(home)

    @property
    def stalls(self) -> Path:
        """Where its processes tell of event loops that stood still."""
        return self.home / "stalls"

    def use(self, loop: str) -> None:
        """From now on with this event loop, asyncio's or uvloop."""
        self.env["PARACLE_TEST_EVENT_LOOP"] = loop

    def argv(self, *words: str) -> list[str]:
        return self.python("-m", "paracle_sandbox", *words)

    def interpreter(self, *words: str) -> list[str]:
        """Python, for a process that is its user already."""
        return [self._interpreter, *words]

    def python(self, *words: str) -> list[str]:
        return self.become(*self.interpreter(*words))

    def become(self, *words: str) -> list[str]:
        """A command, as the user of this machine."""
        if self.user is None:
            return list(words)
        # By way of env: setpriv itself still has root's powers when it executes what it is given.
        user = (f"--reuid={self.user}", f"--regid={self.user}")
        return ["setpriv", *user, "--clear-groups", "env", "--", *words]

    def in_environment(self, home: Path) -> None:
        """From now on with the interpreter of a virtual environment."""
        self._interpreter = str(home / "bin/python")

    def starts(self, source: str) -> subprocess.Popen[str]:
        """A program of the library's, which says what it has done and goes on after each line."""
        return subprocess.Popen(
            self.python("-c", source), env=self.env, cwd=self.home, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @property
    def is_built(self) -> bool:
        return any(self.home.rglob("paracle-template.json"))

    def builders(self) -> list[str]:
        """Processes that install something below its home."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = file.read_bytes()
                if str(self.home).encode() in line and b"templates" in line:
                    found.append(file.parent.name)
        return found

    def owns(self, *paths: Path) -> None:
        """These are its user's, with all that is in them."""
        if self.user is not None:
            for path in paths:
                for one in (path, *path.rglob("*")):
                    os.chown(one, self.user, self.user, follow_symlinks=False)


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """Where an ordinary user may go, too."""
    place = Path(tempfile.mkdtemp(prefix="paracle-fresh-"))
    try:
        place.chmod(0o755)
        yield place
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="session")
def user_path(place: Path) -> str:
    """PYTHONPATH of the ordinary user: our source, what it imports, and what watches it, where it
    can read them."""
    ignore = shutil.ignore_patterns("__pycache__")
    watched = shutil.copytree(loop_watch.WATCHED, place / "tests/watched", ignore=ignore)
    shutil.copy(loop_watch.__file__, place / "tests")
    source = shutil.copytree(SOURCE, place / "src", ignore=ignore)
    shutil.copytree(SOURCE.parent / "docker", place / "docker")  # what images are made of
    return f"{watched}:{source}:{readable_packages(place)}"


@pytest.fixture(scope="session")
def wheels(place: Path) -> Path:
    folder = place / "wheels"
    folder.mkdir()
    for name in {name for names in PACKAGES.values() for name in names}:
        make_wheel(folder, name.replace("-", "_"))
    return folder


@pytest.fixture
def index(wheels: Path) -> Iterator[Index]:
    with Index(wheels) as index:
        yield index


@pytest.fixture(params=["root", "user"])
def machines(
    request: pytest.FixtureRequest, place: Path, index: Index, user_path: str
) -> Iterator[Callable[[], Machine]]:
    """Each call is one more."""
    with new_machines(request.param, place, index, user_path) as make:
        yield make


@contextmanager
def new_machines(
    who: str, place: Path, index: Index, user_path: str
) -> Iterator[Callable[[], Machine]]:
    """Of root or of an ordinary user. In the end nothing may be left of what ran on them."""
    if who == "user" and os.geteuid() != 0:
        pytest.skip("that is who runs the tests")
    user = USER if who == "user" else None
    python = sys.executable if user is None else interpreter()
    made = []

    def make() -> Machine:
        home = Path(tempfile.mkdtemp(prefix="home-", dir=place))
        made.append(Machine(home, python, user, user_path))
        made[-1].env["PIP_INDEX_URL"] = index.url
        return made[-1]

    yield make
    index.is_open.set()
    for machine in made:
        wait_for(lambda machine=machine: not machine.builders(), 60)
        wait_for(lambda machine=machine: not machine.remains())
        assert not machine.stalls.exists(), machine.stalls.read_text()


@pytest.fixture
def machine(machines: Callable[[], Machine]) -> Machine:
    return machines()
