"""Every row of the catalogue of hostile code has a test that says so, or a reason why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
# How many rows each letter has, and the numbers that were never given.
ROWS = {
    "A": (10, {8}), "B": (10, {4, 9}), "C": (11, {3, 9}), "D": (10, {3, 7}), "E": (8, {6}),
    "F": (20, {3, 13}), "G": (9, {6}), "H": (8, {6}), "I": (13, {10}),
    "J": (10, {6}), "K": (7, set()), "L": (11, {5}), "M": (14, {7}),
    "N": (20, {7, 13, 18}), "O": (8, set()),
}  # fmt: skip
# G04 and I13 have tests with containers alone, for they are about images that bring a /dev or /proc
# of their own. The native backend takes none: jail.root makes the root and what is in /dev, each
# sandbox mounts a procfs of its own there, and nothing writes labels of AppArmor or SELinux.
WITHOUT_A_TEST: dict[str, str] = {
    "N16": "the service has no proxy for ports of a sandbox",
    "O01": "there is no backend for Kubernetes",
    "O02": "there is no backend for Kubernetes",
    "O03": "there is no backend for Kubernetes",
    "O08": "there is no backend for Kubernetes; copy_from of all backends is F11",
}


def rows() -> set[str]:
    return {
        f"{letter}{number:02}"
        for letter, (last, gaps) in ROWS.items()
        for number in range(1, last + 1)
        if number not in gaps
    }


def marked() -> Iterator[tuple[str, str]]:
    """Each row that a test names, with where."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path}:{node.lineno}"
                    yield argument.value, f"{path.relative_to(TESTS)}:{node.lineno}"


def test_every_row_has_a_test() -> None:
    found = {row for row, _ in marked()}
    assert rows() - found - set(WITHOUT_A_TEST) == set()
    assert found & set(WITHOUT_A_TEST) == set(), "these have a test, and a reason for none"


def test_marks_name_rows_that_there_are() -> None:
    assert [(row, where) for row, where in marked() if row not in rows()] == []
