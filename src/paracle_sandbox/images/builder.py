"""Builds the images on a container engine, and lists those that are there.

It uses the engine's classic builder, which every Docker and Podman has. A build uses the network of
the machine, so that it reaches an index or a proxy on localhost as pip does here. The stage with
the machine's pip configuration is removed afterwards, also if the build fails or is cancelled,
because the address of an index may contain a password.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

from .. import __version__
from ..errors import SandboxError
from .package_index import read_machine_files
from .recipe import RECIPES, Recipe, pack

if TYPE_CHECKING:
    from aiodocker import Docker

VARIANT_LABEL = "paracle.image.variant"
RECIPE_LABEL = "paracle.image.recipe"
STAGE_LABEL = "paracle.image.stage"
_CANNOT_CONNECT = 900  # the number that aiodocker gives to a connection that failed

log = logging.getLogger("paracle_sandbox.images")

_REMOVE_TRIES = 50
_REMOVE_PAUSE_SECONDS = 0.2
_PODMANS_OWN = "localhost/"  # Podman puts it before names without a registry
# Lines of the builder about its own layers and containers.
_NOISE = ("--->", "Removing intermediate container")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Image:
    """An image on the engine. ``current`` says whether it is up to date; it is None if we did not
    build it."""

    name: str
    variant: str
    id: str
    size_mb: int
    created: str
    current: bool | None


class Images:
    """The images on one engine."""

    def __init__(self, client: Docker) -> None:
        self._client = client

    async def list_images(self) -> list[Image]:
        """Return every tagged image of ours, and the images that were made from one."""
        params = {"filters": json.dumps({"label": [VARIANT_LABEL], "dangling": ["false"]})}
        answer = await self._client._query_json("images/json", params=params)
        found = {_to_image(name, entry) for entry in answer for name in entry["RepoTags"] or ()}
        return sorted(found, key=lambda image: image.name)

    async def find(self, name: str) -> Image | None:
        """Return the image of that name, or None."""
        return next((i for i in await self.list_images() if i.name == name), None)

    async def build(self, recipe: Recipe, progress: Progress) -> Image:
        """Build an image, and before it the image that it starts from, unless that is up to date.

        Raises SandboxError when a step of the build fails."""
        if recipe.base is not None:
            base = RECIPES[recipe.base]
            there = await self.find(base.image)
            if there is None or there.current is False:
                await self.build(base, progress)
        build_id = secrets.token_hex(8)
        try:
            async for line in self._stream_build(recipe, build_id):
                progress(line)
        finally:
            await self._remove_stage(build_id)
        built = await self.find(recipe.image)
        if built is None:
            raise SandboxError(
                f"The engine has built {recipe.image}, but does not list it. "
                f"Try again with: paracle image build {recipe.variant}"
            )
        return built

    async def _stream_build(self, recipe: Recipe, build_id: str) -> AsyncIterator[str]:
        from aiodocker import DockerError

        # This runs pip, which takes as long as Python takes to start.
        machine_files = await asyncio.to_thread(read_machine_files)
        context = pack({**recipe.files(), **machine_files})
        headers = {"Content-Type": "application/x-tar"}
        last = ""
        try:
            async with self._client._query(
                "build", "POST", params=_make_parameters(recipe, build_id), data=context,
                headers=headers, timeout=None,
            ) as response:  # fmt: skip
                # Closing the connection cancels the build.
                with closing(response):
                    async for line in response.content:
                        if text := _read_message(recipe, json.loads(line), last):
                            last = text
                            yield text
        except DockerError as error:
            if error.status == _CANNOT_CONNECT:
                raise
            raise _make_build_error(recipe, str(error.message), last) from error

    async def _remove_stage(self, build_id: str) -> None:
        """Remove the stage of a build. A cancelled build holds it until the engine notices."""
        label = f"{STAGE_LABEL}={build_id}"
        prune = {"filters": json.dumps({"dangling": ["true"], "label": [label]})}
        look = {"all": "1", "filters": json.dumps({"label": [label]})}
        for _ in range(_REMOVE_TRIES):
            await self._client._query_json("images/prune", "POST", params=prune)
            if not await self._client._query_json("images/json", params=look):
                return
            await asyncio.sleep(_REMOVE_PAUSE_SECONDS)
        log.warning("The engine keeps the stage of a build. To remove it: docker image prune")


def _make_parameters(recipe: Recipe, build_id: str) -> dict[str, str]:
    labels = {
        RECIPE_LABEL: recipe.digest(),
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    # The engine keeps these three variables out of the history of an image.
    proxies = {
        f"{kind.upper()}_PROXY": address
        for kind, address in getproxies().items()
        if kind in ("http", "https", "no")
    }
    return {
        "t": recipe.image,
        "dockerfile": recipe.dockerfile,
        "networkmode": "host",
        "rm": "1",
        "forcerm": "1",
        "labels": json.dumps(labels),
        "buildargs": json.dumps({"BUILD_ID": build_id, **proxies}),
    }


def _read_message(recipe: Recipe, event: dict[str, Any], last: str) -> str:
    """Return the text of one message of the builder. Raises SandboxError if the build failed."""
    if "error" in event:
        raise _make_build_error(recipe, str(event["error"]), last)
    text = str(event.get("stream") or event.get("status") or "").strip()
    return "" if text.startswith(_NOISE) else text


def _make_build_error(recipe: Recipe, error: str, last: str) -> SandboxError:
    output = f" ({last[:200]})" if last else ""
    return SandboxError(
        f"The image {recipe.image} could not be built: {error[:300]}{output}. "
        f"Try again with: paracle image build {recipe.variant}"
    )


def _to_image(name: str, entry: dict[str, Any]) -> Image:
    labels = entry["Labels"] or {}
    variant = str(labels.get(VARIANT_LABEL, ""))
    name = name.removeprefix(_PODMANS_OWN)
    return Image(
        name,
        variant,
        str(entry["Id"]),
        round(entry["Size"] / 1_000_000),
        datetime.fromtimestamp(entry["Created"], UTC).isoformat(),
        _is_current(name, variant, labels.get(RECIPE_LABEL)),
    )


def _is_current(name: str, variant: str, digest: str | None) -> bool | None:
    recipe = RECIPES.get(variant)
    # An image that was made from ours has inherited the label; whether it is current is unknown.
    if digest is None or recipe is None or name != recipe.image:
        return None
    return digest == recipe.digest()
