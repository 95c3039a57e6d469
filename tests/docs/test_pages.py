"""What pages show as data can be read, and their figures are those of the benchmarks.

What they show as programs and commands is tried on fresh machines: tests/fresh.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
from benchmarks.__main__ import SUMMARY, write_page
from pages import REPOSITORY, blocks

import paracle_sandbox

DATA_PAGES = ["README.md", "docs/guide.md", "docs/agents.md", "docs/mcp.md",
              "docs/reference/api.md", "docs/service.md", "docs/reference/settings.md"]  # fmt: skip


@pytest.mark.parametrize("page", DATA_PAGES)
def test_what_pages_show_as_data_can_be_read(page: str) -> None:
    for block in blocks(page, "json"):
        json.loads(block.text)
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)


def test_the_first_line_of_python_is_right_for_a_type_checker() -> None:
    """run() promises what the line takes from its answer: not a key that may be missing."""
    assert 'run("print(6 * 7)")["result"]["stdout"]' in blocks("README.md", "python")[0].text
    kinds = get_type_hints(paracle_sandbox.ExecutionResult, include_extras=True)
    assert kinds["result"] is paracle_sandbox.CommandResult


# Figures


def test_the_benchmarks_write_between_the_marks_of_the_pages(tmp_path: Path) -> None:
    for name in ("README.md", "docs/performance.md"):
        page = tmp_path / Path(name).name
        page.write_text((REPOSITORY / name).read_text())
        before, after = re.split(
            r"<!-- bench:begin -->.*<!-- bench:end -->", page.read_text(), flags=re.DOTALL
        )
        write_page(page, "new figures")
        assert page.read_text() == (
            f"{before}<!-- bench:begin -->\nnew figures\n<!-- bench:end -->{after}"
        )
    with pytest.raises(ValueError, match="bench:begin"):
        write_page(REPOSITORY / "LICENSE", "new figures")


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    readme, page = (REPOSITORY / n for n in ("README.md", "docs/performance.md"))
    for what, name in SUMMARY.items():
        (measured,) = re.findall(
            rf"^\| {re.escape(what)} \| (.*?) \|", page.read_text(), re.MULTILINE
        )
        assert f"\n| {name} | {measured} |" in readme.read_text()
    run = re.compile(r"^One run of `.*$", re.MULTILINE)
    assert run.findall(readme.read_text()) == run.findall(page.read_text())


def test_the_first_command_of_the_readme_is_a_target() -> None:
    first = blocks("README.md", "bash")[0].text.split()
    assert first[:2] == ["make", "run"]
    targets = (REPOSITORY / "Makefile").read_text()
    for line in blocks("README.md", "bash")[0].text.splitlines():
        words = shlex.split(line, comments=True)
        assert f"\n{words[1]}:" in targets
