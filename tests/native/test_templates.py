"""Tests of templates: names of images, one build at a time, and a machine without a package
index."""

import asyncio
import fcntl
import json
import os
import sys
from pathlib import Path
from stat import S_ISREG

import pytest

from paracle_sandbox import Sandbox, SandboxConfig, SandboxCreationError, SandboxError
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.spawner_process import default_python
from paracle_sandbox.backends.native.template_kinds import MANIFEST
from paracle_sandbox.backends.native.templates import Templates, template_name
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("paracle/sandbox:latest", "default"),
        ("paracle/sandbox", "default"),
        ("paracle/sandbox:ml", "ml"),
        ("docker.io/paracle/sandbox:dev", "dev"),
        ("python:3.12-slim", "default"),
        ("python", "default"),
    ],
)
def test_images_stand_for_templates(image: str, name: str) -> None:
    assert template_name(image) == name


@pytest.mark.parametrize(
    "image", ["ubuntu", "node:20", "paracle/other", "registry.example/paracle/sandbox:latest"]
)
def test_any_other_image_points_to_docker(image: str) -> None:
    with pytest.raises(SandboxCreationError, match=f"Image not found: {image}.*--backend docker"):
        template_name(image)


def test_an_unknown_tag_names_the_known_ones() -> None:
    with pytest.raises(SandboxCreationError, match="paracle/sandbox:ml"):
        template_name("paracle/sandbox:nonsense")


VERSION = ".".join(map(str, sys.version_info[:3]))
MINOR = VERSION.rpartition(".")[0]


@pytest.mark.parametrize("tag", ["", ":3", ":latest", ":slim", f":{MINOR}", f":{VERSION}-slim"])
async def test_an_image_of_our_python_is_the_default_template(tag: str, tmp_path: Path) -> None:
    templates = Templates(settings_in(tmp_path, template_build=False))
    assert (await templates.for_image(f"python{tag}")).name == "default"


@pytest.mark.parametrize("tag", ["3.8-slim", "2.7", "3.99", f"{VERSION}99-slim", f"{MINOR}9"])
async def test_an_image_of_another_python_is_refused(tag: str, tmp_path: Path) -> None:
    """It would run on ours without any warning."""
    backend = NativeBackend(settings_in(tmp_path, template_build=False))
    with pytest.raises(SandboxCreationError) as caught:
        async with Sandbox(backend, new_sandbox_id(), SandboxConfig(base_image=f"python:{tag}")):
            pass
    for word in (VERSION, f"python:{tag}", "paracle/sandbox:latest", "SANDBOX_MODE=docker"):
        assert word in str(caught.value)
    assert not (tmp_path / "state").exists(), "nothing was started"


async def test_the_images_of_older_settings_go_on_to_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are defaults, so programs that name no image get them.

    The result names the image that was asked for.
    """
    templates = Templates(settings_in(tmp_path, template_build=False))
    for image in ("python:3.12-slim", "python:3.10-slim"):
        for _ in range(2):
            assert (await templates.for_image(image)).name == "default"
    assert caplog.text.count(f"run Python {VERSION}") == (MINOR != "3.10")


def settings_in(folder: Path, **options: object) -> Settings:
    return Settings(
        state_dir=str(folder / "state"), data_dir=str(folder / "data"), stock=0, **options
    )  # type: ignore[arg-type]


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip find nothing at once, as without a network but quicker."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_without_an_index_the_standard_library_is_left(
    no_index: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(code: str) -> str:
        backend = NativeBackend(settings_in(tmp_path))
        try:
            async with Sandbox(backend, new_sandbox_id(), SandboxConfig()) as sandbox:
                return (await sandbox.run_code(code))["stdout"]
        finally:
            await backend.close()

    said = []
    plain = "import json, sys; print(json.dumps(1))"
    wanting = "try: import requests\nexcept ImportError: print('none')"
    for code in (wanting, plain, wanting, plain):
        caplog.clear()
        assert asyncio.run(run(code)) == ("none\n" if code is wanting else "1\n")
        said.append(caplog.text)
    # The first one waited and got the message; the others do not try again for a while.
    assert "Building the default template" in said[0]
    assert "requests is not there" in said[0] and "paracle template build default" in said[0]
    assert "standard library alone" in said[1], "and that is said in full once"
    assert "requests is not there" in said[2] and "waiting" not in said[2]
    assert said[3] == "", "a program that needs no packages need not hear of it again"


async def test_after_a_while_a_long_lived_process_tries_again(
    no_index: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that was started without a network gets its packages when there is one."""
    templates = Templates(settings_in(tmp_path))
    failed = tmp_path / "data/templates/.default.failed"

    def begun() -> int:
        return caplog.text.count("Building the default template")

    async def failed_at(other_than: float) -> float:
        while not failed.exists() or json.loads(failed.read_text())["at"] == other_than:
            await asyncio.sleep(0.01)
        return float(json.loads(failed.read_text())["at"])

    await templates.for_image("paracle/sandbox:latest")
    first = await failed_at(0)
    await templates.for_image("paracle/sandbox:latest")
    assert begun() == 1
    long_ago = first - 2 * 3600
    failed.write_text(json.dumps({**json.loads(failed.read_text()), "at": long_ago}))
    async with asyncio.timeout(60):
        while begun() == 1:  # the builder has reported its failure, and may not have ended yet
            await templates.for_image("paracle/sandbox:latest")
            await asyncio.sleep(0.01)
    assert begun() == 2
    await failed_at(long_ago)


def test_a_failed_build_leaves_nothing(no_index: None, tmp_path: Path) -> None:
    templates = Templates(settings_in(tmp_path))
    with pytest.raises(SandboxError, match="could not be installed") as caught:
        asyncio.run(templates.build("api"))
    assert "No matching distribution" in "".join(caught.value.__notes__)
    left = [path.name for path in (tmp_path / "data/templates").iterdir()]
    assert sorted(left) == [".api.failed", ".api.lock"]
    assert not templates.get("api").is_built


def test_a_template_is_seen_inside_and_can_be_removed(tmp_path: Path) -> None:
    """A package that is put there by hand stands for one that pip would have installed."""
    templates = Templates(settings_in(tmp_path))
    path = templates._path("default")
    path.mkdir(parents=True)
    (path / "made_up.py").write_text("answer = 42\n")
    (path / "paracle-template.json").write_text("{}")

    async def run() -> list[str]:
        backend = NativeBackend(settings_in(tmp_path))
        try:
            async with Sandbox(backend, new_sandbox_id(), SandboxConfig()) as sandbox:
                forked = await sandbox.run_code("import made_up; print(made_up.answer)")
                started = await sandbox.execute(
                    "python3 -c 'import made_up; print(made_up.answer)'"
                )
                written = await sandbox.run_code("import made_up; open(made_up.__file__, 'w')")
            return [forked["stdout"], started["stdout"], written["stderr"]]
        finally:
            await backend.close()

    forked, started, written = asyncio.run(run())
    assert (forked, started) == ("42\n", "42\n")
    assert "Read-only file system" in written or "Permission denied" in written
    assert templates.remove("default") and not templates.remove("default")


def test_the_commands_of_packages_are_found(tmp_path: Path) -> None:
    """These are the commands of the template, those that a program installs, and a pip of the
    interpreter inside."""
    templates = Templates(settings_in(tmp_path))
    path = templates._path("default")
    (path / "bin").mkdir(parents=True)
    (path / "paracle-template.json").write_text("{}")
    (path / "made_up.py").write_text("answer = 42\n")
    tool = path / "bin" / "made-up"
    tool.write_text(f"#!{default_python()}\nimport made_up\nprint(made_up.answer)\n")
    tool.chmod(0o755)

    async def run() -> tuple[str, ...]:
        backend = NativeBackend(settings_in(tmp_path))
        try:
            async with Sandbox(backend, new_sandbox_id(), SandboxConfig()) as sandbox:
                theirs = await sandbox.run_command("made-up")
                own = "mkdir -p ~/.local/bin; printf '#!/bin/sh\necho own' >~/.local/bin/mine"
                await sandbox.execute(f"{own}; chmod +x ~/.local/bin/mine")
                version = await sandbox.run_command("pip --version")
                refused = await sandbox.execute("pip install --retries 0 surely-not-there")
                return theirs, await sandbox.run_command("mine"), version, refused["stderr"]
        finally:
            await backend.close()

    theirs, own, version, refused = asyncio.run(run())
    assert (theirs, own) == ("42\n", "own\n")
    python = ".".join(map(str, sys.version_info[:2]))
    assert version.startswith("pip ") and f"(python {python})" in version
    assert "externally-managed" not in refused and "sandbox.install()" in refused


def test_a_lock_on_what_everybody_can_read_stops_nobody(no_index: None, tmp_path: Path) -> None:
    """Another user, or a program inside, can lock any file that it can open.

    So only files that it cannot open are locked.
    """
    templates = Templates(settings_in(tmp_path))
    path = templates._path("default")
    path.mkdir(parents=True)
    (path / "paracle-template.json").write_text("{}")

    async def run() -> str:
        backend = NativeBackend(settings_in(tmp_path))
        try:
            async with asyncio.timeout(60):
                async with Sandbox(backend, new_sandbox_id(), SandboxConfig()) as sandbox:
                    found = [child.stat() for child in path.parent.iterdir()]
                    assert all(f.st_mode & 0o777 == 0o600 for f in found if S_ISREG(f.st_mode))
                    return (await sandbox.run_code("print(1)"))["stdout"]
        finally:
            await backend.close()

    locks = [os.open(place, os.O_RDONLY) for place in (path, path.parent, path / MANIFEST)]
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert asyncio.run(run()) == "1\n"
        assert templates.remove("default")
        assert not list(path.parent.glob(".default-*")), "nobody uses it any more"
    finally:
        for lock in locks:
            os.close(lock)
