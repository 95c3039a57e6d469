"""A backend of another distribution: found by its entry point, used by its name, held to the whole
contract, and no trouble to the others when it is broken."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from cli.paracle_cli import SOURCE, Cli
from docs.pages import blocks
from paracle_sandbox import SandboxManager, get_backend, load_settings
from paracle_sandbox.backends import registry
from paracle_sandbox.errors import BackendUnavailableError, SandboxError
from paracle_sandbox.settings import Settings

# What the page for authors of backends shows.
MODULE, CONTRACT = (block.text for block in blocks("docs/backends.md", "python"))
(POINTS,) = (block.text for block in blocks("docs/backends.md", "toml"))


def bring(place: Path, name: str, points: str, **modules: str) -> None:
    """Put a distribution onto the path, as an installer leaves it."""
    info = place / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[paracle_sandbox.backends]\n{points}\n")
    for module, text in modules.items():
        (place / f"{module}.py").write_text(text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on this process's own path."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A wheel with a backend, installed by pip into a directory of its own."""
    wheel = tmp_path / "toy_backend-1.0-py3-none-any.whl"
    info = "toy_backend-1.0.dist-info"
    (group,) = tomllib.loads(POINTS)["project"]["entry-points"].items()
    points = f"[{group[0]}]\n" + "".join(f"{name} = {path}\n" for name, path in group[1].items())
    files = {
        "toy_backend.py": MODULE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
         "--target", target, wheel],
        check=True, timeout=120,
    )  # fmt: skip
    return target


def test_an_installed_one_keeps_the_whole_contract(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{installed}"}
    done = subprocess.run(
        [sys.executable, "-c", CONTRACT],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = [line for line in done.stdout.splitlines() if line.startswith("kept: ")]
    assert len(kept) >= 60


def test_the_command_line_knows_it_by_name(installed: Path, tmp_path: Path) -> None:
    cli = Cli(tmp_path, PYTHONPATH=f"{SOURCE}:{installed}")
    for words in (["--backend", "toy"], []):
        if not words:
            cli.env["SANDBOX_MODE"] = "toy"
        done = cli.run("sandbox", "execute", cli.program("print(6 * 7)"), *words)
        assert (done.code, done.stdout) == (0, "42\n"), done.stderr
    done = cli.run("sandbox", "health", "--json")
    assert done.json["available"] is True
    del cli.env["SANDBOX_MODE"]
    done = cli.run("sandbox", "health", "--json")
    assert done.json["backends"][-1]["backend"] == "toy"
    done = cli.run("sandbox", "execute", cli.program(""), "--backend", "tow")
    assert done.code == 2 and "there is no 'tow'; known are auto, native" in done.stderr
    assert done.stderr.rstrip().endswith("toy")


async def test_a_manager_takes_it(place: Path) -> None:
    bring(place, "a-toy", "toy = a_toy:ToyBackend", a_toy=MODULE)
    async with SandboxManager(backend="toy", settings=Settings()) as manager:
        sandbox = await manager.create()
        assert (await sandbox.run_code("print(1)"))["stdout"] == "1\n"
    assert get_backend(None, load_settings({"SANDBOX_MODE": " Toy "})).name == "toy"


def test_a_built_in_name_stays_ours(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    points = "\n".join(f"{name} = evil:make" for name in ("fake", "auto", "local", "toy"))
    bring(place, "evil", points, evil="raise SystemError('imported')")
    assert type(get_backend("fake", Settings())).__module__ == "paracle_sandbox.testing.fake"
    assert "toy" in registry.known_names()
    for name in ("fake", "auto", "local"):
        assert f"evil 1.0 brings a backend {name!r}, which is built in" in caplog.text


BROKEN = {
    "no module": ("toy = missing_module:Toy", "", "ModuleNotFoundError"),
    "no attribute": ("toy = broken:Toy", "", "AttributeError"),
    "fails": ("toy = broken:make", "def make(settings): raise KeyError('x')", "KeyError: 'x'"),
    "leaves": ("toy = broken:make", "raise SystemExit(3)", "SystemExit: 3"),
    "no backend": ("toy = broken:make", "def make(settings): return 3", "TypeError"),
    "other name": ("toy = broken:FakeBackend",
                   "from paracle_sandbox.testing.fake import FakeBackend as Fake\n"
                   "def FakeBackend(settings): return Fake()", "has the name 'fake', not 'toy'"),
}  # fmt: skip


@pytest.mark.parametrize(("points", "text", "reason"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_one_is_named_and_breaks_no_other(
    place: Path, points: str, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    bring(place, "brittle", points, broken=text)
    with pytest.raises(BackendUnavailableError) as caught:
        get_backend("toy", Settings())
    assert "brittle 1.0" in str(caught.value) and reason in str(caught.value)
    [health] = await registry.examine("toy", Settings())
    assert not health.available and "brittle 1.0" in health.detail
    assert get_backend("fake", Settings()).name == "fake"


async def test_one_whose_methods_fail_breaks_no_listing(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = MODULE.replace("return await self._places.", "raise ZeroDivisionError; ")
    failing = failing.replace("await self._places.close()", "raise ZeroDivisionError")
    bring(place, "bad", "toy = bad_toy:ToyBackend", bad_toy=failing)
    monkeypatch.setattr(registry, "_LISTED", ())
    async with registry.AsyncExitStack() as stack:
        assert await registry.find_sandboxes(Settings(), stack, None) == []
    assert "bad 1.0 fails: ZeroDivisionError" in caplog.text, "when it is closed"
    assert await registry.sweep(Settings()) == 0
    [health] = await registry.examine("toy", Settings())
    assert not health.available and "bad 1.0 fails: ZeroDivisionError" in health.detail


def test_unreadable_metadata_hide_no_other(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    bring(place, "torn", "this line has no sign", a_toy=MODULE)
    bring(place, "a-toy", "toy = a_toy:ToyBackend")
    assert get_backend("toy", Settings()).name == "toy"
    assert "The backends of torn 1.0 cannot be read" in caplog.text


def test_two_of_a_name_are_both_named(place: Path) -> None:
    bring(place, "one", "toy = a_toy:ToyBackend", a_toy=MODULE)
    bring(place, "two", "toy = a_toy:ToyBackend")
    with pytest.raises(BackendUnavailableError, match=r"'toy': one 1\.0 and two 1\.0"):
        get_backend("toy", Settings())


@pytest.mark.parametrize("name", ["toy", "TOY", "Fake"])
def test_a_file_cannot_choose_it(place: Path, tmp_path: Path, name: str) -> None:
    bring(place, "a-toy", "toy = a_toy:ToyBackend", a_toy=MODULE)
    (tmp_path / "config.toml").write_text(f'[sandbox]\nmode = "{name}"\n')
    with pytest.raises(SandboxError, match="not taken from a file; set SANDBOX_MODE"):
        load_settings({}, tmp_path / "config.toml")


def test_entry_points_are_not_read_for_what_is_built_in(place: Path) -> None:
    bring(place, "a-toy", "toy = a_toy:ToyBackend", a_toy=MODULE)
    program = (
        "import sys\nfrom paracle_sandbox import get_backend, load_settings\n"
        "get_backend(None, load_settings()).name\n"
        "print(*({'importlib.metadata', 'a_toy'} & sys.modules.keys()))"
    )
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{place}", "SANDBOX_MODE": "native"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_auto_never_takes_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(place, "a-toy", "toy = a_toy:ToyBackend", a_toy=MODULE)
    problems = dict.fromkeys(registry.AUTO_ORDER, lambda _: "no")
    monkeypatch.setattr(registry, "PROBLEMS", problems)
    assert registry.choose(Settings()) in registry.AUTO_ORDER
