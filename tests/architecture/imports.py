"""Who imports whom in the package, read from the source and not by importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "paracle_sandbox"
ROOT = Path(__file__).resolve().parents[2] / "src" / PACKAGE


@dataclass(frozen=True)
class Import:
    """One imported module. ``types_only`` is under ``if TYPE_CHECKING``: it never runs."""

    importer: str
    imported: str
    line: int
    types_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@cache
def files() -> dict[str, Path]:
    """Every module of ours by its name without the package: ``backends.base``, ``guest``."""
    return {_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(files()[name].read_text(encoding="utf-8"))


@cache
def own_imports() -> tuple[Import, ...]:
    """Imports of our own modules; ``from .x import y`` names x.y where that is a module."""
    return tuple(entry for name in files() for entry in _imports(name) if entry.imported)


def foreign_imports(name: str) -> set[str]:
    """The top-level names of what a module imports from elsewhere, the future aside."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - {"__future__", PACKAGE}


def _imports(name: str) -> Iterator[Import]:
    for node, types_only in _nodes(tree(name), False):
        for target in _targets(name, node):
            yield Import(name, target, node.lineno, types_only)


def _nodes(node: ast.AST, types_only: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, types_only
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for inner in child.body:
                yield from _nodes(ast.Module([inner], []), True)
            for inner in child.orelse:
                yield from _nodes(ast.Module([inner], []), types_only)
        else:
            yield from _nodes(child, types_only)


def _targets(importer: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        ours = (alias.name for alias in node.names if alias.name.startswith(PACKAGE + "."))
        yield from (name.removeprefix(PACKAGE + ".") for name in ours)
        return
    base = _base(importer, node)
    if base is None:
        return
    for alias in node.names:
        inner = f"{base}.{alias.name}".lstrip(".")
        # What is no module of its own is a name out of the module, or of the package itself.
        yield inner if inner in files() else base or "__init__"


def _base(importer: str, node: ast.ImportFrom) -> str | None:
    module = node.module or ""
    if not node.level:
        head, _, rest = module.partition(".")
        return rest if head == PACKAGE else None
    parts = importer.split(".") if importer != "__init__" else []
    is_package = files()[importer].name == "__init__.py"
    above = node.level - is_package
    kept = parts[: len(parts) - above] if above else parts
    return ".".join([*kept, module] if module else kept)
