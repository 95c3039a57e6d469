"""The picture in ARCHITECTURE.md, held to: layers, stdlib-only folders, light imports."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from imports import PACKAGE, ROOT, Import, files, foreign_imports, own_imports, tree

from paracle_sandbox import errors

# A module may import those of its own layer and of the layers below. New modules go here.
LAYERS = {
    0: "errors exceptions results config host",
    1: "settings audit ids",
    2: "backends channel images",
    3: "sandbox sessions",
    4: "manager executor background client compat",
    5: "cli service __main__ tools mcp agents",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}

# The folders that stand beside the layers, and the modules of ours that each may import.
ASIDE = {
    "guest": ("guest", "channel.frames"),
    "jail": ("jail", "guest", "channel.frames", "host.own_directory"),
}
BESIDE_LAYERS = {*ASIDE, "testing", "__init__"}

# There is one extractor, and the guest has it: the host uses it on its own disk.
EXTRACTOR = ("guest.files.dirwalk", "guest.files.staging", "guest.files.archive")
ON_OUR_DISK = ("sandbox.host_copy", "backends.machine.drafts")

# What may know a concrete backend by name. Everybody else asks these.
ASSEMBLERS = ("backends.registry",)
# What the command line starts before it imports anything else.
PRESTART = "backends.native.prestart"
# What backends share: how this machine's kernel is read and told, and what engines keep for us.
SHARED = ("backends.health_probe", "backends.machine")
SEAM = ("backends", "backends.base", "backends.values", *SHARED, *ASSEMBLERS)

FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "core", "misc"}
# Reading these back would run, or half trust, what was written by somebody else.
UNSAFE_FORMATS = {"pickle", "marshal", "shelve", "yaml"}
# For the guest to read, never the other way.
WRITES_UNSAFE_FORMATS = {"channel.bootstrap"}
# Where the environment is read: settings by their job; the others run inside, or in tests.
# What starts ahead of all imports cannot wait for the settings.
READS_ENVIRONMENT = ("settings", "guest", "jail", "testing")


def top(name: str) -> str:
    return name.partition(".")[0]


def is_below(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def host_modules() -> list[str]:
    """Those that run with the user's rights: neither inside a sandbox nor tests."""
    return [name for name in files() if top(name) not in (*ASIDE, "testing")]


def complaints(found: list[Import]) -> str:
    return "\n".join(map(str, found))


def test_every_module_has_a_layer() -> None:
    homeless = {top(name) for name in files()} - set(LAYER_OF) - BESIDE_LAYERS
    assert not homeless, f"give them a layer in LAYERS: {sorted(homeless)}"
    gone = set(LAYER_OF) - {top(name) for name in files()}
    assert not gone, f"no longer there: {sorted(gone)}"


def test_imports_point_down() -> None:
    wrong = [
        entry
        for entry in own_imports()
        if top(entry.importer) in LAYER_OF
        and top(entry.imported) in LAYER_OF
        and LAYER_OF[top(entry.imported)] > LAYER_OF[top(entry.importer)]
    ]
    assert not wrong, complaints(wrong)


@pytest.mark.parametrize("folder", ASIDE)
def test_stdlib_folders_import_little_of_ours(folder: str) -> None:
    wrong = [
        entry
        for entry in own_imports()
        if is_below(entry.importer, folder)
        and not any(is_below(entry.imported, place) for place in ASIDE[folder])
    ]
    assert not wrong, complaints(wrong)


@pytest.mark.parametrize("folder", [*ASIDE, "channel"])
def test_stdlib_folders_need_nothing_installed(folder: str) -> None:
    for name in files():
        if is_below(name, folder):
            assert foreign_imports(name) <= set(sys.stdlib_module_names), name


def test_nobody_imports_the_jail() -> None:
    """It is a privileged program: started, never loaded into the user's process."""
    wrong = [
        entry
        for entry in own_imports()
        if is_below(entry.imported, "jail") and not is_below(entry.importer, "jail")
    ]
    assert not wrong, complaints(wrong)


def test_only_the_jail_and_the_extractor_import_the_guest() -> None:
    wrong = [
        entry
        for entry in own_imports()
        if is_below(entry.imported, "guest")
        and top(entry.importer) not in ASIDE
        and not (entry.importer in ON_OUR_DISK and entry.imported in EXTRACTOR)
    ]
    assert not wrong, complaints(wrong)


def test_testing_imports_nothing_above_it_and_nobody_imports_testing() -> None:
    wrong = [
        entry
        for entry in own_imports()
        if (is_below(entry.importer, "testing") and is_below(entry.imported, "cli"))
        or (is_below(entry.imported, "testing") and not is_below(entry.importer, "testing"))
    ]
    assert not wrong, complaints(wrong)


def test_only_the_assemblers_name_a_backend() -> None:
    """No backend imports another, and what lies above asks the registry.
    That holds for types as well: a name in an annotation ties the two together."""

    def family(name: str) -> str | None:
        shared = name in SEAM or is_below(name, "backends.machine")
        is_concrete = is_below(name, "backends") and not shared
        return name.split(".")[1] if is_concrete else None

    wrong = [
        entry
        for entry in own_imports()
        if family(entry.imported)
        and family(entry.imported) != family(entry.importer)
        and entry.importer not in ASSEMBLERS
        and entry.imported != PRESTART
        and not is_below(entry.importer, "testing")
    ]
    assert not wrong, complaints(wrong)


def test_there_are_no_cycles() -> None:
    """Imports inside functions count: two modules that need each other are one module."""
    edges: dict[str, set[str]] = {name: set() for name in files()}
    for entry in own_imports():
        if not entry.types_only and entry.importer != entry.imported:
            edges[entry.importer].add(entry.imported)
    left = without_leaves(edges)
    assert not left, f"in or above a cycle: {left}"


# Folders whose parts still need each other. Take one out as soon as its test says that it passes.
CYCLIC = {
    "guest": "processes and python ask prefork, which works for them",
    "service": "middleware and users know each other's journal",
}


def folders() -> list[object]:
    found = sorted({name.rpartition(".")[0] for name in files()})
    return [
        pytest.param(
            name,
            id=name or "root",
            marks=pytest.mark.xfail(reason=CYCLIC[name], strict=True) if name in CYCLIC else (),
        )
        for name in found
    ]


@pytest.mark.parametrize("folder", folders())
def test_there_are_no_cycles_between_the_parts_of_a_folder(folder: str) -> None:
    """A folder counts as one, whichever of its modules imports or is imported: two folders that
    need each other cannot be read one after the other."""
    edges: dict[str, set[str]] = {}
    for entry in own_imports():
        importer, imported = (part_of(folder, one) for one in (entry.importer, entry.imported))
        if importer and imported and importer != imported and not entry.types_only:
            edges.setdefault(importer, set()).add(imported)
            edges.setdefault(imported, set())
    left = without_leaves(edges)
    assert not left, f"in or above a cycle: {left}"


def part_of(folder: str, name: str) -> str:
    """The module or the folder directly in ``folder`` that a module is or belongs to."""
    inside = name.removeprefix(f"{folder}.") if folder else name
    return inside.partition(".")[0] if inside != name or not folder else ""


def without_leaves(edges: dict[str, set[str]]) -> dict[str, list[str]]:
    """What is left of a graph when all that leads nowhere is taken away again and again."""
    while leaves := {name for name, below in edges.items() if not below}:
        edges = {name: below - leaves for name, below in edges.items() if name not in leaves}
    return {name: sorted(below) for name, below in edges.items()}


def test_no_module_is_a_drawer() -> None:
    wrong = [name for name in files() if FORBIDDEN_NAMES & set(name.split("."))]
    assert not wrong, f"name them by what they hold: {wrong}"


def test_the_environment_is_read_in_one_place() -> None:
    wrong = [
        f"{name}:{line}"
        for name in files()
        # The kind of the user's terminal is no setting of ours.
        if top(name) not in READS_ENVIRONMENT and name not in (PRESTART, "cli.tty")
        for line in environment_reads(tree(name))
    ]
    assert not wrong, f"make it a setting: {wrong}"


def environment_reads(module: ast.Module) -> list[int]:
    """Lines that use os.environ or os.getenv, except to set a variable."""
    writes = {
        id(node.func.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setdefault"
    }
    return [
        node.lineno
        for node in ast.walk(module)
        if id(node) not in writes
        and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "os.getenvb")
    ] + [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and {alias.name for alias in node.names} & {"environ", "environb", "getenv", "getenvb"}
    ]


def test_the_host_reads_no_unsafe_format() -> None:
    wrong = {name: foreign_imports(name) & UNSAFE_FORMATS for name in host_modules()}
    wrong = {name: formats for name, formats in wrong.items() if formats}
    for name in set(wrong) & WRITES_UNSAFE_FORMATS:
        calls = [n.attr for n in ast.walk(tree(name)) if isinstance(n, ast.Attribute)]
        assert "dumps" in calls
        assert not {"load", "loads"} & {
            ast.unparse(n).partition(".")[2]
            for n in ast.walk(tree(name))
            if isinstance(n, ast.Attribute) and ast.unparse(n).partition(".")[0] in wrong[name]
        }
        del wrong[name]
    assert not wrong, wrong


def test_the_guest_is_written_for_python_3_8() -> None:
    for name, path in files().items():
        if is_below(name, "guest") or name == "channel.frames":
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 8))


@pytest.mark.parametrize(
    "name",
    ["sessions.layout", "sessions.printers", "sessions.notebook", "sessions.values",
     "sessions.driver", "tools.browser_program"],
)  # fmt: skip
def test_programs_for_the_inside_are_not_imported(name: str) -> None:
    """They are read and sent, and have to do with any Python that the guest has."""
    assert foreign_imports(name) <= set(sys.stdlib_module_names)
    used = [entry for entry in own_imports() if name in (entry.importer, entry.imported)]
    assert all(entry.types_only for entry in used), complaints(used)
    ast.parse(files()[name].read_text(encoding="utf-8"), feature_version=(3, 8))


def loaded_by(program: str) -> set[str]:
    """The modules that a fresh interpreter has after a program of one line."""
    start = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); {program}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{start}; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


SDKS = {"anthropic", "daytona", "fastapi", "mcp", "openai", "uvicorn"}


def test_importing_the_package_costs_nothing() -> None:
    loaded = loaded_by("import paracle_sandbox")
    heavy = {"pydantic", "asyncio", "typer", "rich", "subprocess", "socket", "httpx2", *SDKS}
    assert not heavy & loaded
    assert {name for name in loaded if is_below(name, PACKAGE)} == {PACKAGE}, "only its own names"


def test_names_of_agents_and_tools_do_not_load_the_sdks() -> None:
    """A model, an MCP server or a cloud costs a second of imports: who asks one, pays."""
    names = "SandboxAgent, SandboxManus, PythonExecute, SandboxShellTool, PythonSession"
    loaded = loaded_by(f"from paracle_sandbox import {names}")
    assert is_loaded("agents", loaded) and is_loaded("tools", loaded)
    assert not SDKS & loaded


def is_loaded(name: str, loaded: set[str]) -> bool:
    return f"{PACKAGE}.{name}" in loaded


def test_all_is_complete() -> None:
    package = importlib.import_module("paracle_sandbox")
    typed = {
        alias.name
        for node in ast.walk(tree("__init__"))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert typed | {"__version__"} == set(package.__all__)
    assert package.__all__ == sorted(package.__all__), "sorted, so that two edits meet"
    for name in package.__all__:
        assert getattr(package, name) is not None, name
    own = {n for n, value in vars(errors).items() if isinstance(value, type)}
    assert own <= set(package.__all__)
    with pytest.raises(AttributeError):
        package.no_such_name  # noqa: B018


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    above: dict[int, str] = {}
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        name = next((word for word in line.split() if word in vars(errors)), None)
        if name is not None:
            depth = line.index(name) // 4
            above[depth] = name
            drawn[name] = above.get(depth - 1)
    own = {n: value for n, value in vars(errors).items() if isinstance(value, type)}
    assert drawn == {
        name: kind.__bases__[0].__name__ if kind.__bases__[0].__name__ in own else None
        for name, kind in own.items()
    }


def test_no_two_test_files_have_one_name():
    """Pytest would collect only the first of them, and stop."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert Path(__file__).name in names
    assert sorted(set(names)) == sorted(names)


def test_who_watches_a_neighbour_is_marked_as_reading_clocks():
    """How fast a neighbour is says something only where no other test runs beside it."""
    found = 0
    for path in sorted((Path(__file__).parents[1] / "hostile").glob("test_*.py")):
        module = ast.parse(path.read_text())
        marks = " ".join(ast.unparse(n) for n in module.body if isinstance(n, ast.Assign))
        for test in module.body:
            if isinstance(test, ast.AsyncFunctionDef) and "scene.neighbour()" in ast.unparse(test):
                found += 1
                marked = marks + " ".join(ast.unparse(one) for one in test.decorator_list)
                assert "pytest.mark.clock" in marked, f"{path.name}: {test.name}"
    assert found >= 8
