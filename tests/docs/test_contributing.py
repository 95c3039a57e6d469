"""The pages for contributors name files, targets and markers that are there."""

from __future__ import annotations

import re
import tomllib

import pytest
from pages import REPOSITORY

PAGES = ("CONTRIBUTING.md", "RELEASE.md", "tests/README.md")
SOURCE = "src/paracle_sandbox"


def words(page: str) -> list[str]:
    """What stands in backticks, and the words of its commands."""
    content = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", content, re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", content, flags=re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", text), *" ".join(lines).split()]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    named = [
        word.rstrip("/")
        for word in words(page)
        if re.fullmatch(r"[\w./-]+(\.py|\.md|\.sh|/|\.toml|\.txt)", word)
        and not word.startswith(("/", "."))
    ]
    assert named
    folders = (REPOSITORY, REPOSITORY / SOURCE, REPOSITORY / "tests")
    missing = [one for one in named if not any((folder / one).exists() for folder in folders)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_targets_that_are_named_are_there(page: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    content = (REPOSITORY / page).read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z]+)\b", content)) - {"a", "sure"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_folder_and_marker_of_the_tests_is_explained() -> None:
    content = (REPOSITORY / "tests/README.md").read_text(encoding="utf-8")
    tests = [path for path in (REPOSITORY / "tests").iterdir() if [*path.glob("test_*.py")]]
    assert not [path.name for path in tests if f"`{path.name}/`" not in content]
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    for marker in settings["tool"]["pytest"]["ini_options"]["markers"]:
        assert f"`{re.split('[(:]', marker)[0]}" in content
