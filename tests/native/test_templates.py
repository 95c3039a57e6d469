"""Templates: names of images, one build at a time, and what happens without a package index."""

import asyncio
import os
from pathlib import Path

import pytest

from paracle_sandbox import Sandbox, SandboxConfig, SandboxCreationError, SandboxError
from paracle_sandbox.backends.native.backend import NativeBackend
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


def settings_in(folder: Path, **options: object) -> Settings:
    return Settings(
        state_dir=str(folder / "state"), data_dir=str(folder / "data"), stock=0, **options
    )  # type: ignore[arg-type]


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds nothing, at once: as without a network, but quicker."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_without_an_index_the_standard_library_is_left(
    no_index: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> tuple[str, str]:
        backend = NativeBackend(settings_in(tmp_path))
        try:
            async with Sandbox(backend, new_sandbox_id(), SandboxConfig()) as sandbox:
                result = await sandbox.run_code("import json, sys; print(json.dumps(1))")
            template = await backend.templates.for_image("paracle/sandbox:latest")
            return result["stdout"], template.note
        finally:
            await backend.close()

    stdout, note = asyncio.run(run())
    assert stdout == "1\n"
    assert "could not be installed" in note and "paracle template build default" in note
    # Remembered: the next process does not try again for a while.
    assert list((tmp_path / "data/templates").glob(".default.failed"))
    caplog.clear()
    asyncio.run(run())
    assert "standard library alone" in caplog.text, "said by every process that goes without"


def test_a_failed_build_leaves_nothing(no_index: None, tmp_path: Path) -> None:
    templates = Templates(settings_in(tmp_path))
    with pytest.raises(SandboxError, match="could not be installed") as caught:
        asyncio.run(templates.build("api"))
    assert "No matching distribution" in "".join(caught.value.__notes__)
    left = [path.name for path in (tmp_path / "data/templates").iterdir()]
    assert sorted(left) == [".api.failed", ".api.lock"]
    assert templates.get("api").path is None


def test_a_template_is_seen_inside_and_can_be_removed(tmp_path: Path) -> None:
    """A package that is put there by hand stands for what pip would have installed."""
    templates = Templates(settings_in(tmp_path))
    path = templates._path("default")
    path.mkdir(parents=True)
    (path / "made_up.py").write_text("answer = 42\n")

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
