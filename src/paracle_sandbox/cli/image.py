"""``paracle image``: the images that Docker, gVisor and Incus sandboxes start from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import exit_codes, output
from .exit_codes import UsageFault, ends_with_a_code
from .progress import progress

if TYPE_CHECKING:
    from ..backends.registry import Built
    from ..images.builder import Image
    from ..images.recipe import Recipe

app = typer.Typer(
    help="Images that Docker, gVisor and Incus sandboxes start from.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Variant = Annotated[
    str, typer.Argument(help="sandbox, dev, ml, api or browser.", metavar="[VARIANT]")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
IfMissing = Annotated[
    bool, typer.Option("--if-missing", help="Do nothing when it is there and not outdated.")
]
Incus = Annotated[bool, typer.Option("--incus", help="Build on the Incus server.")]
Base = Annotated[
    str | None,
    typer.Option("--from", help="Incus image to start from; INCUS_SANDBOX_IMAGE if not given."),
]


@app.command("list")
@ends_with_a_code
def list_images(as_json: Json = False) -> int:
    """Show the images, those made from them, and whether they are there."""
    from ..images.recipe import RECIPES

    found = {image.name: image for image in exit_codes.run(_listed())}
    names = {recipe.image: recipe.variant for recipe in RECIPES.values()}
    rows = [_row(name, names.get(name, ""), found.get(name)) for name in {**names, **found}]
    if as_json:
        output.say_json(rows)
    else:
        output.table("", ("Image", "Variant", "Built", "Size", "Created", "State"), _cells(rows))
    return exit_codes.SUCCESS


@app.command()
@ends_with_a_code
def build(
    variant: Variant = "sandbox",
    if_missing: IfMissing = False,
    incus: Incus = False,
    base: Base = None,
    as_json: Json = False,
) -> int:
    """Build an image on the Docker engine or Incus server, with this machine's pip configuration.

    \b
    Examples:
      paracle image build
      paracle image build ml --if-missing
      paracle image build --incus --from images:debian/12/cloud
    """
    recipe = _known(variant)
    if incus and not recipe.has_packages:
        raise UsageFault(
            f"The variant {variant} is for Docker. On Incus, install Debian's package "
            "chromium-headless-shell in an image of your own, as "
            "docs/reference/incus.md in the source of Paracle Sandbox says"
        )
    if base is not None and not incus:
        raise UsageFault("--from is for --incus; a Dockerfile says what it starts from")
    if incus:
        return _say_built(
            *exit_codes.run(_built_on_incus(recipe, base, if_missing, as_json)), as_json
        )
    image, built = exit_codes.run(_built(recipe, if_missing, quiet=as_json))
    if as_json:
        output.say_json({**_row(image.name, variant, image), "built_now": built})
    else:
        what = "built" if built else "is there already"
        output.say(f"✅ Image {image.name} {what}: {image.id[7:19]}, {image.size_mb} MB")
    return exit_codes.SUCCESS


def _say_built(image: Built, built: bool, as_json: bool) -> int:
    if as_json:
        output.say_json({**asdict(image), "built_now": built})
    else:
        what = "built" if built else "is there already"
        output.say(f"✅ Image {image.alias} {what}: {image.fingerprint[:12]}, {image.size_mb} MB")
    return exit_codes.SUCCESS


async def _built_on_incus(
    recipe: Recipe, base: str | None, if_missing: bool, quiet: bool
) -> tuple[Built, bool]:
    from ..backends.registry import incus_images
    from ..settings import load_settings

    settings = load_settings()
    async with incus_images(settings) as images:
        there = await images.find(recipe) if if_missing else None
        if there is not None and there.current:
            return there, False
        with progress(f"Building {recipe.image} on Incus", quiet) as tell:
            return await images.build(recipe, base or settings.incus_image, tell), True


async def _listed() -> list[Image]:
    from ..backends.registry import engine_client
    from ..images.builder import Images
    from ..settings import load_settings

    async with engine_client(load_settings()) as client:
        return await Images(client).list_images()


async def _built(recipe: Recipe, if_missing: bool, quiet: bool) -> tuple[Image, bool]:
    from ..backends.registry import engine_client
    from ..images.builder import Images
    from ..settings import load_settings

    async with engine_client(load_settings()) as client:
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
