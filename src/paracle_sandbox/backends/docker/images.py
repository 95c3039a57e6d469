"""Images: asked for by name, and pulled once when they are missing, by one puller at a time.

Callers of one process share one pull; processes of one machine wait for each other at a lock
file, and look again whether the image has come meanwhile.

The images that this project builds are pulled from a registry of the user's own, if one is set, and
from nowhere else: in a public registry anybody may have taken their names.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

from ...errors import SandboxCreationError
from ...host.own_directory import own_subdirectory
from ...host.platforms import lock_file
from ...images.recipe import RECIPES
from .engine import Engine, EngineRefused, Json

logger = logging.getLogger(__name__)

_OURS = "paracle/"
# What an engine calls what has no registry, and what Docker takes when none is named.
_NO_REGISTRY = ("localhost/", "docker.io/", "index.docker.io/")
_LOCK_PAUSE_SECONDS = 0.2


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine, state_dir: str, registry: str | None = None) -> None:
        self._engine = engine
        self._registry = registry
        self._state_dir = state_dir
        self._pulls: dict[str, asyncio.Task[None]] = {}

    async def known(self, image: str) -> Json:
        """What the engine knows of the image, which is fetched first when it is missing. Raises
        SandboxCreationError that names it and what to do."""
        found = await self._engine.image(image)
        if found is None:
            await self.fetch(image)
            found = await self._engine.image(image)
        if found is None:
            raise not_found(image, "it was pulled, but is not here")
        return found

    async def fetch(self, image: str) -> None:
        """Have the image. Raises SandboxCreationError that names it and what to do."""
        pull = self._pulls.get(image)
        if pull is None:
            pull = self._pulls[image] = asyncio.ensure_future(self._fetch_once(image))
            pull.add_done_callback(lambda _: self._pulls.pop(image, None))
        try:
            # Whoever is cancelled takes nothing from the others who wait for it.
            await asyncio.shield(pull)
        except EngineRefused as refused:
            raise not_found(image, refused.message) from refused

    async def _fetch_once(self, image: str) -> None:
        async with self._one_puller(image):
            if await self._engine.has_image(image):
                return
            source = self._source(image)
            logger.info("pulling the image %s, which is not here", source)
            await self._engine.pull(source, _Progress(source))
            if source != image:
                await self._engine.tag(source, image)

    def _source(self, image: str) -> str:
        """What to pull for an image. Raises SandboxCreationError for one that is nowhere."""
        name = _plain_name(image)
        if not name.startswith(_OURS):
            return image
        if self._registry is None:
            raise not_found(
                image, "the engine does not have it, and DOCKER_SANDBOX_REGISTRY names no registry"
            )
        return f"{self._registry.rstrip('/')}/{name}"

    @contextlib.asynccontextmanager
    async def _one_puller(self, image: str) -> AsyncIterator[None]:
        name = hashlib.sha256(image.encode()).hexdigest()[:16]
        try:
            lock = _open_lock(self._state_dir, name)
        except OSError:
            # No place for a lock, or one that others could hold for ever: two may pull, and the
            # engine shares the work.
            yield
            return
        try:
            while not _locked(lock):  # noqa: ASYNC110  the kernel tells nobody
                await asyncio.sleep(_LOCK_PAUSE_SECONDS)
            yield
        finally:
            os.close(lock)


def _open_lock(state_dir: str, name: str) -> int:
    with own_subdirectory(state_dir, "pulls", make=True) as locks:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=locks)


def _locked(lock: int) -> bool:
    try:
        lock_file(lock, wait=False)
    except BlockingIOError:
        return False
    return True


class _Progress:
    """Tells how far the pull is, each tenth once."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._layers: dict[str, tuple[int, int]] = {}
        self._told = 0

    def __call__(self, line: dict[str, Any]) -> None:
        detail = line.get("progressDetail") or {}
        if line.get("status") == "Downloading" and detail.get("total"):
            self._layers[str(line.get("id"))] = (int(detail["current"]), int(detail["total"]))
            done, total = map(sum, zip(*self._layers.values(), strict=True))
            tenth = 10 * done // total
            if tenth > self._told:
                self._told = tenth
                logger.info("pulling %s: %d %% of %d MB", self._image, 10 * tenth, total >> 20)


def not_found(image: str, reason: str) -> SandboxCreationError:
    """The image, why it could not be had, and the exact command that makes or fetches it."""
    return SandboxCreationError(
        f"Image not found: {image} ({reason.strip().rstrip('.')}). {_remedy(image)}. Or choose "
        "another base_image.",
        step="image",
    )


def _remedy(image: str) -> str:
    name, _, tag = _plain_name(image).partition(":")
    recipes = {recipe.image: variant for variant, recipe in RECIPES.items()}
    variant = recipes.get(f"{name}:{tag or 'latest'}")
    if variant is not None:
        return f"Build it with: paracle image build {variant}"
    if name.startswith(_OURS):
        return f"There are {', '.join(recipes)}; build one with: paracle image build VARIANT"
    return f"Pull it with: docker pull {image}"


def _plain_name(image: str) -> str:
    """Without the registry, where that is the one that every engine would ask."""
    return next((image.removeprefix(r) for r in _NO_REGISTRY if image.startswith(r)), image)
