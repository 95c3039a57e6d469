"""``paracle image``: the container images that Docker and gVisor sandboxes start from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import endings, output
from .endings import UsageFault, ends_with_a_code
from .progress import progress

if TYPE_CHECKING:
    from ..images.builder import Image
    from ..images.recipe import Recipe

app = typer.Typer(
    help="Container images that Docker and gVisor sandboxes start from.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Variant = Annotated[str, typer.Argument(help="sandbox, dev, ml or api.", metavar="[VARIANT]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
IfMissing = Annotated[
    bool, typer.Option("--if-missing", help="Do nothing when it is there and not outdated.")
]


@app.command("list")
@ends_with_a_code
def list_images(as_json: Json = False) -> int:
    """Show the images, those made from them, and whether they are there."""
    from ..images.recipe import RECIPES

    found = {image.name: image for image in endings.run(_listed())}
    names = {recipe.image: recipe.variant for recipe in RECIPES.values()}
    rows = [_row(name, names.get(name, ""), found.get(name)) for name in {**names, **found}]
    if as_json:
        output.say_json(rows)
    else:
        output.table("", ("Image", "Variant", "Built", "Size", "Created", "State"), _cells(rows))
    return endings.SUCCESS


@app.command()
@ends_with_a_code
def build(
    variant: Variant = "sandbox", if_missing: IfMissing = False, as_json: Json = False
) -> int:
    """Build an image on the Docker engine, with this machine's pip configuration.

    \b
    Examples:
      paracle image build
      paracle image build ml --if-missing
    """
    recipe = _known(variant)
    image, built = endings.run(_built(recipe, if_missing, quiet=as_json))
    if as_json:
        output.say_json({**_row(image.name, variant, image), "built_now": built})
    else:
        what = "built" if built else "is there already"
        output.say(f"✅ Image {image.name} {what}: {image.id[7:19]}, {image.size_mb} MB")
    return endings.SUCCESS


async def _listed() -> list[Image]:
    from ..images.builder import Images
    from ..images.engine import connected

    async with connected() as client:
        return await Images(client).list_images()


async def _built(recipe: Recipe, if_missing: bool, quiet: bool) -> tuple[Image, bool]:
    from ..images.builder import Images
    from ..images.engine import connected

    async with connected() as client:
        images = Images(client)
        there = await images.find(recipe.image) if if_missing else None
        if there is not None and there.current is not False:
            return there, False
        with progress(f"Building {recipe.image}", quiet) as tell:
            return await images.build(recipe, tell), True


def _known(variant: str) -> Recipe:
    from ..images.recipe import RECIPES

    if variant not in RECIPES:
        raise UsageFault(f"There is no image variant {variant!r}; known are {', '.join(RECIPES)}")
    return RECIPES[variant]


def _row(name: str, variant: str, image: Image | None) -> dict[str, Any]:
    absent = dict.fromkeys(("id", "size_mb", "created", "current"))
    return {
        "name": name,
        "built": image is not None,
        **(asdict(image) if image is not None else {"variant": variant, **absent}),
    }


def _cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    states = {True: "current", False: "outdated", None: "-"}
    return [
        (
            row["name"],
            row["variant"],
            output.tick(row["built"]),
            f"{row['size_mb']} MB" if row["built"] else "-",
            row["created"] or "-",
            states[row["current"]],
        )
        for row in rows
    ]
