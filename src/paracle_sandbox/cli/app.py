"""The root of the command line. A noun's module is imported when the noun is named."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .output import never_fail_on_a_letter

_NOUNS = {
    name: f"paracle_sandbox.cli.{name}"
    for name in ("sandbox", "template", "image", "serve", "keys", "audit", "agents", "mcp")
} | {"agents": "paracle_sandbox.cli.agents.commands"}


class _Nouns(TyperGroup):
    """Finds a noun's commands by importing its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_NOUNS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _NOUNS:
            return None
        command = typer.main.get_command(importlib.import_module(_NOUNS[cmd_name]).app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Nouns,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"paracle {__version__}")
        raise typer.Exit


@app.callback()
def paracle(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Run untrusted code in sandboxes.

    \b
    Examples:
      paracle sandbox health
      paracle sandbox execute agent.py --memory 256 --timeout 60
      paracle sandbox list
      paracle template build ml
      paracle image build
      paracle serve
    """


def run(arguments: list[str] | None = None) -> int:
    """Run the command line, and answer its exit code."""
    never_fail_on_a_letter()
    try:
        typer.main.get_command(app)(arguments, prog_name="paracle")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
