"""scripts/engines.sh on folders of its own: what it starts ends, however that goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import engines

pytestmark = pytest.mark.timeout(300)

CACHE = Path(os.environ.get("PARACLE_TEST_CACHE", "/var/cache/paracle-sandbox-tests"))


class Script:
    def __init__(self, folder: Path) -> None:
        self.run_folder, self.cache = folder / "run", folder / "cache"
        self.cache.mkdir()
        self.shared_before = _shared()
        # What is costly to make is taken from the engine that runs already.
        for part in (*CACHE.glob("base-*.tar"), CACHE / "runsc"):
            (self.cache / part.name).symlink_to(part)
        self.environment = {
            **os.environ,
            "PARACLE_TEST_RUN": str(self.run_folder),
            "PARACLE_TEST_CACHE": str(self.cache),
            "DOCKER_HOST": f"unix://{self.run_folder}/docker.sock",
        }

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [engines.SCRIPT, *words], env=self.environment, capture_output=True, text=True,
            check=False, timeout=200,
        )  # fmt: skip

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        argv = [engines.SCRIPT, *words]
        return subprocess.Popen(argv, env=self.environment, start_new_session=True)

    def docker(self, *words: str) -> str:
        return subprocess.run(
            ["docker", *words], env=self.environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def pid(self, name: str) -> int:
        return int((self.run_folder / f"{name}.pid").read_text())

    def remains(self) -> list[str]:
        """Processes, mounts, bridges, cgroups and files that the engine has left."""
        found = [f"file {path}" for path in self.run_folder.glob("*")]
        found += [f"process {line}" for line in _command_lines() if str(self.run_folder) in line]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(self.run_folder.parent) in line]
        return found + sorted(_shared() - self.shared_before)


def _shared() -> set[str]:
    """Links, and cgroups that engines of the tests have made."""
    links = (f"link {name}" for name in os.listdir("/sys/class/net"))
    groups = (f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob("*/paracle-sandbox-tests-*"))
    return {*links, *groups}


def _command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "engines.sh" not in line:
            yield line


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    script = Script(tmp_path_factory.mktemp("engine"))  # a short name: sockets have short paths
    yield script
    assert script("stop").returncode == 0
    assert script.remains() == []


def test_starting_twice_is_starting_once(script: Script) -> None:
    assert script("status").returncode == 1
    assert script("start").returncode == 0
    first = script.pid("dockerd")
    assert script("start", "docker").returncode == 0
    assert script("status", "docker", "gvisor").returncode == 0
    assert script.pid("dockerd") == first
    assert script.docker("run", "--rm", "python:3.12-slim", "python", "-c", "print(1)") == "1"
    options = ["run", "--rm", "--runtime", "runsc", "--network", "none"]
    assert "gVisor" in script.docker(*options, "python:3.10-slim", "dmesg")


def test_incus_is_started_with_all_it_needs(script: Script, tmp_path: Path) -> None:
    """It looks for nft once. One that was started without is not what tests can use, and goes."""
    without = tmp_path / "bin"
    without.mkdir()
    for folder in filter(os.path.isdir, script.environment["PATH"].split(":")):
        for program in os.listdir(folder):
            if program != "nft" and not (without / program).exists():
                (without / program).symlink_to(os.path.join(folder, program))
    (script.run_folder).mkdir()
    hand = {**script.environment, "PATH": str(without), "INCUS_DIR": str(script.cache / "incus")}
    (script.cache / "incus").mkdir()
    log = script.run_folder / "incusd.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [INCUSD, "--group", "root", "--logfile", str(script.run_folder / "own.log")],
            env=hand, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    (script.run_folder / "incusd.pid").write_text(f"{daemon.pid}\n")
    (script.run_folder / "incus").symlink_to(script.cache / "incus")
    await_that(lambda: firewall(script))
    assert firewall(script) == "xtables", "the case that this is about"
    assert script("start", "incus").returncode == 0
    assert firewall(script) == "nftables"
    assert daemon.wait(30) is not None


INCUSD = "/usr/libexec/incus/incusd"


def firewall(script: Script) -> str:
    environment = {**script.environment, "INCUS_DIR": str(script.cache / "incus"),
                   "INCUS_CONF": str(script.run_folder / "client")}  # fmt: skip
    done = subprocess.run(
        ["incus", "query", "/1.0"], env=environment, capture_output=True, text=True, check=False
    )
    return str(json.loads(done.stdout)["environment"]["firewall"]) if done.returncode == 0 else ""


def test_daemons_that_were_killed_are_cleared_away(script: Script) -> None:
    assert script("start").returncode == 0
    script.docker("network", "create", "left")
    script.docker("run", "-d", "--network", "left", "python:3.12-slim", "sleep", "1000")
    script.docker("run", "-d", "--runtime", "runsc", "python:3.12-slim", "sleep", "1000")
    for name in ("dockerd", "containerd"):
        os.kill(script.pid(name), signal.SIGKILL)
    # A start finds half an engine, and makes a whole and empty one of it.
    assert script("start").returncode == 0
    assert script.docker("ps", "-aq") == ""
    assert "left" not in script.docker("network", "ls")


def test_an_engine_that_cannot_start_leaves_nothing(script: Script) -> None:
    (script.cache / "docker").write_text("a file where a folder should be")
    done = script("start")
    assert done.returncode == 1
    assert "engines: " in done.stderr
    assert script.remains() == []
    # A command is run in any case, and hears why.
    done = script("run", "sh", "-c", 'echo "$PARACLE_ENGINES_REASON"; exit 7')
    assert done.returncode == 7
    assert "engines: " in done.stdout


def test_the_last_of_two_runs_stops_the_engine(script: Script, tmp_path: Path) -> None:
    wait = "docker version >/dev/null && touch $0.up && until [ -e $0 ]; do sleep 0.1; done"
    names = [str(tmp_path / name) for name in ("first", "second")]
    runs = [script.begin("run", "sh", "-c", wait, name) for name in names]
    await_that(lambda: all(Path(f"{name}.up").exists() for name in names))
    Path(names[0]).touch()
    assert runs[0].wait(60) == 0
    assert script("status").returncode == 0
    Path(names[1]).touch()
    assert runs[1].wait(60) == 0
    assert script.remains() == []


def test_an_interrupted_run_stops_the_engine(script: Script, tmp_path: Path) -> None:
    up = tmp_path / "up"
    run = script.begin("run", "sh", "-c", 'touch "$0"; exec sleep 1000', str(up))
    await_that(up.exists)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(60) == 128 + signal.SIGTERM
    assert script.remains() == []


def test_an_engine_that_was_there_before_a_run_stays(script: Script) -> None:
    assert script("start").returncode == 0
    assert script("run", "false").returncode == 1
    assert script("status").returncode == 0
