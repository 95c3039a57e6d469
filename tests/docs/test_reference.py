"""The reference is complete, and names nothing that is not there."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from pages import REPOSITORY, code_words, sections

import paracle_sandbox
from paracle_sandbox import errors
from paracle_sandbox.cli.app import app
from paracle_sandbox.settings import SHARED_KEYS, settings_table

API, CLI, ERRORS, SETTINGS = (
    f"docs/reference/{name}.md" for name in ("api", "cli", "errors", "settings")
)
CLASSES = [
    "Sandbox",
    "SandboxManager",
    "SandboxExecutor",
    "SandboxMonitor",
    "Terminal",
    "LocalSandboxClient",
]
# Every command has it; the page says so at its top.
HELP = {"--help", "-h"}


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


# Settings


def rows(name: str) -> dict[str, list[str]]:
    """The table rows of a page by their first cell in backticks."""
    lines = (line for line in page(name).splitlines() if line.startswith("| `"))
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return {row[0].strip("` "): row for row in cells}


@pytest.mark.parametrize("key", settings_table())
def test_setting(key: str) -> None:
    setting = settings_table()[key]
    row = rows(SETTINGS).get(setting.variable)
    assert row is not None, f"{SETTINGS} has no row for {setting.variable}"
    assert row[1] == f"`{key}`"
    assert all(row[2:]), f"{setting.variable}: every cell says something"
    assert ("environment only" in row[3]) == setting.env_only


def test_no_setting_is_stale() -> None:
    known = {setting.variable for setting in settings_table().values()} | SHARED_KEYS
    assert set(rows(SETTINGS)) == known


# Command line


def commands() -> Iterator[tuple[str, Any]]:
    def walk(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
            yield from walk(command.get_command(None, name), f"{words} {name}")

    return walk(typer.main.get_command(app), "paracle")


@pytest.mark.parametrize(("words", "command"), [pytest.param(*c, id=c[0]) for c in commands()])
def test_command(words: str, command: Any) -> None:
    text = sections(CLI).get(words)
    assert text is not None, f"{CLI} has no section {words}"
    assert text.strip(), f"{words}: say what it does"
    documented = code_words(text)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = (parameter.metavar or parameter.name).strip("[]. ").upper()
            assert re.search(rf"\b{name}\b", text), f"{words}: the argument {name}"
        else:
            missing = {*parameter.opts, *parameter.secondary_opts} - documented
            assert not missing, f"{words}: {missing}"


def test_no_command_and_no_flag_is_stale() -> None:
    known = dict(commands())
    for title, text in sections(CLI).items():
        if not title.startswith("paracle"):
            continue
        assert title in known, f"there is no command {title!r}"
        flags = {o for p in known[title].params for o in (*p.opts, *p.secondary_opts)}
        named = {word for word in code_words(text) if re.match(r"--?[a-z]", word)}
        named = {word for word in named if " " not in word}
        assert named <= flags | HELP, f"{title}: {named - flags - HELP}"


# Errors


def error_classes() -> dict[str, type[Exception]]:
    return {n: v for n, v in vars(errors).items() if isinstance(v, type)}


@pytest.mark.parametrize("name", error_classes())
def test_error(name: str) -> None:
    text = sections(ERRORS).get(name)
    assert text is not None and text.strip(), f"{ERRORS} has no section {name}"
    tree = next(part for part in page(ERRORS).split("```") if part.lstrip().startswith("Sandbox"))
    assert re.search(rf"\b{name}\b", tree), f"{name} is not in the tree"
    # What its own constructor adds to those of its base.
    kind = error_classes()[name]
    own = constructor_parameters(kind) - constructor_parameters(kind.__mro__[1])
    missing = own - {"args", "kwargs"} - code_words(text)
    assert not missing, f"{name}: {missing}"


def constructor_parameters(kind: type) -> set[str]:
    """Those of a constructor of ours; Python does not tell those of its own errors."""
    if not issubclass(kind, errors.SandboxError):
        return set()
    return set(inspect.signature(kind).parameters)


def test_no_error_is_stale() -> None:
    named = set(re.findall(r"\b\w+Error\b", page(ERRORS) + page("docs/guide.md")))
    assert named - set(vars(builtins)) <= set(error_classes())


# Python


@pytest.mark.parametrize("name", paracle_sandbox.__all__)
def test_public_name(name: str) -> None:
    words = {word.partition("(")[0] for word in code_words(page(API))}
    assert name in words, f"{API} does not name {name}"


def public_members() -> Iterator[tuple[str, str]]:
    for owner in CLASSES:
        kind = getattr(paracle_sandbox, owner)
        yield from ((owner, name) for name in dir(kind) if not name.startswith("_"))


@pytest.mark.parametrize(("owner", "name"), list(public_members()))
def test_public_method(owner: str, name: str) -> None:
    titles = list(sections(API))
    start = titles.index(owner)
    # A class's own section, and the sections of its methods if they have some.
    texts = [sections(API)[owner]]
    for title in titles[start + 1 :]:
        if title not in dir(getattr(paracle_sandbox, owner)):
            break
        texts += [f"`{title}`", sections(API)[title]]
    spans = code_words("\n".join(texts))
    called = {span.removeprefix("await ").partition("(")[0] for span in spans}
    assert name in called, f"{API}, {owner}: {name} is not there"


@pytest.mark.parametrize("field", paracle_sandbox.SandboxConfig.__dataclass_fields__)
def test_config_field(field: str) -> None:
    assert f"\n| `{field}` | " in sections(API)["SandboxConfig"]


def test_presets_of_the_config() -> None:
    for name in ("untrusted", "standard", "high_performance"):
        assert f"SandboxConfig.{name}()" in code_words(sections(API)["SandboxConfig"])


@pytest.mark.parametrize(
    "name", ["ExecutionResult", "JobResult", "CommandResult", "Stats", "FileInfo"]
)
def test_result_keys(name: str) -> None:
    keys = getattr(paracle_sandbox, name).__annotations__
    assert set(keys) <= code_words(sections(API)["Results"])


# Links


PAGES = [
    str(path.relative_to(REPOSITORY))
    for path in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"))
]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / name).parent / path if path else REPOSITORY / name
        assert file.exists(), f"{name}: {target}"
        if anchor:
            titles = sections(str(file.resolve().relative_to(REPOSITORY)))
            anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
            assert anchor in anchors, f"{name}: {target}"
