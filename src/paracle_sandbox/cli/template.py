"""``paracle template``: the sets of packages that native sandboxes start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SandboxError
from . import exit_codes, output
from .exit_codes import UsageFault, ends_with_a_code
from .options import complete_template, settings_or_fault
from .progress import progress

if TYPE_CHECKING:
    from ..backends.registry import Template, Templates

app = typer.Typer(
    help="Sets of packages that native sandboxes start with.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Name = Annotated[
    str,
    typer.Argument(
        help="default, dev, ml or api.", metavar="NAME", autocompletion=complete_template
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
IfMissing = Annotated[
    bool,
    typer.Option(
        "--if-missing",
        help="Do nothing when it is there; only warn when it cannot be built.",
    ),
]


@app.command("list")
@ends_with_a_code
def list_templates(as_json: Json = False) -> int:
    """Show the templates and whether they are built."""
    templates = _templates()
    found = [templates.get(name) for name in templates.names()]
    if as_json:
        output.say_json([{"name": t.name, "built": t.is_built, "path": _shown(t)} for t in found])
    else:
        rows = [(t.name, output.tick(t.is_built), _shown(t) or "-") for t in found]
        output.table("", ("Template", "Built", "Directory"), rows)
    return exit_codes.SUCCESS


@app.command()
@ends_with_a_code
def build(name: Name, if_missing: IfMissing = False, as_json: Json = False) -> int:
    """Install the packages of a template, once for all sandboxes.

    \b
    Examples:
      paracle template build default
      paracle template build ml --if-missing
    """
    templates = _templates()
    built = False
    if not _known(templates, name).is_built or not if_missing:
        try:
            with progress(f"Building the {name} template", quiet=as_json) as tell:
                built = exit_codes.run(templates.build(name, tell, if_missing=if_missing))
        except SandboxError as error:
            output.note("\n".join(getattr(error, "__notes__", ())))
            if not if_missing:
                raise
            output.note(f"Warning: {error}")
            output.note("Until then sandboxes run with the standard library alone.")
    template = templates.get(name)
    if as_json:
        output.say_json({"name": name, "built": template.is_built, "path": _shown(template)})
    elif template.is_built:
        output.say(
            f"✅ Template {name} {'built' if built else 'is there already'}: {template.path}"
        )
    return exit_codes.SUCCESS


@app.command()
@ends_with_a_code
def remove(name: Name, as_json: Json = False) -> int:
    """Delete a template; sandboxes that use it now keep running."""
    templates = _templates()
    _known(templates, name)
    removed = templates.remove(name)
    if as_json:
        output.say_json({"name": name, "removed": removed})
    else:
        output.say(f"✅ Template {name} removed" if removed else f"Template {name} is not built.")
    return exit_codes.SUCCESS


def _templates() -> Templates:
    from ..backends.registry import templates

    return templates(settings_or_fault())


def _known(templates: Templates, name: str) -> Template:
    if name not in templates.names():
        raise UsageFault(f"There is no template {name!r}; known are {', '.join(templates.names())}")
    return templates.get(name)


def _shown(template: Template) -> str | None:
    return str(template.path) if template.is_built else None
