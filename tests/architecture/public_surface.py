"""The public surface as lines of text: names, parameters, fields, settings, routes, options, codes.

To record a change that is meant:
``.venv/bin/python tests/architecture/public_surface.py > tests/golden/public_surface.txt``
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Iterator
from typing import Any

from paracle_sandbox import results, settings
from paracle_sandbox.cli import exit_codes
from paracle_sandbox.cli.commands import ROOT
from paracle_sandbox.cli.parser import walk
from paracle_sandbox.service import app, schemas

# Modules that the docs or the specified systems name.
MODULES = (
    "paracle_sandbox",
    "paracle_sandbox.agents",
    "paracle_sandbox.backends.base",
    "paracle_sandbox.backends.daytona",
    "paracle_sandbox.errors",
    "paracle_sandbox.exceptions",
    "paracle_sandbox.sessions",
    "paracle_sandbox.testing.conformance",
    "paracle_sandbox.tools",
)


def surface() -> list[str]:
    lines = {*_names(), *_results(), *_settings(), *_routes(), *_commands(), *_codes()}
    return sorted(lines)


def _names() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None)
        if public is None:
            public = [
                name for name, value in vars(module).items()
                if inspect.isclass(value) and value.__module__ == module_name and name[0] != "_"
            ]  # fmt: skip
        for name in public:
            value = getattr(module, name)
            yield f"name {module_name}.{name}"
            if inspect.isclass(value):
                yield from _members(name, value)
            elif callable(value):
                yield from (f"parameter {name} {one}" for one in _parameters(value))


def _members(name: str, kind: type[Any]) -> Iterator[str]:
    ours = [one for one in kind.__mro__ if one.__module__.startswith("paracle_sandbox")]
    for one in ours:
        fields = [field for field in vars(one).get("__annotations__", {}) if field[0] != "_"]
        yield from (f"member {name}.{field}" for field in fields)
        for member, value in vars(one).items():
            if member.startswith("_") and member != "__init__":
                continue
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(value, property) or not callable(function):
                yield f"member {name}.{member}"
            elif inspect.isfunction(function):
                yield f"member {name}.{member}"
                yield from (f"parameter {name}.{member} {p}" for p in _parameters(function))


def _parameters(function: Any) -> list[str]:
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [kinds.get(one.kind, "") + one.name for one in found if one.name not in ("self", "cls")]


def _results() -> Iterator[str]:
    for module in (results, schemas):
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for field in typing.get_type_hints(value):
                    if not field.startswith(("_", "model_")):
                        yield f"field {name}.{field}"


def _settings() -> Iterator[str]:
    for name, one in settings.Settings.__dataclass_fields__.items():
        yield f"setting {name}"
        for value in one.metadata.values():
            yield f"variable {value.variable}"


def _routes() -> Iterator[str]:
    for part in app._PARTS:
        for route in part.router.routes:
            for method in getattr(route, "methods", None) or ("WEBSOCKET",):
                yield f"route {method} {route.path}"


def _commands() -> Iterator[str]:
    for words, command in walk(ROOT):
        if words != "paracle":
            yield f"command {words}"
        # -h is the short form of an option that every command has.
        yield from (f"option {words} {flag}" for flag in command.flags if flag != "-h")
        yield from (f"argument {words} {argument.name}" for argument in command.arguments)


def _codes() -> Iterator[str]:
    for name in ("SUCCESS", "FAILURE", "USAGE", "SANDBOX", "TIMEOUT", "NOT_THE_PROGRAM"):
        yield f"exit code {getattr(exit_codes, name)}"


if __name__ == "__main__":
    print("\n".join(surface()))
