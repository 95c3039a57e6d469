"""Images: asked for by name, and pulled once when they are missing, by one puller at a time.

Callers of one process share one pull; processes of one machine wait for each other at a lock
file, and look again whether the image has come meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ...errors import SandboxCreationError
from ...images.recipe import RECIPES
from .engine import Engine, EngineRefused, Json

logger = logging.getLogger(__name__)

_OURS = "paracle/sandbox"
_LOCK_PAUSE_SECONDS = 0.2


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine, state_dir: str) -> None:
        self._engine = engine
        self._locks = Path(state_dir) / "pulls"
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
            if not await self._engine.has_image(image):
                logger.info("pulling the image %s, which is not here", image)
                await self._engine.pull(image, _Progress(image))

    @contextlib.asynccontextmanager
    async def _one_puller(self, image: str) -> AsyncIterator[None]:
        name = hashlib.sha256(image.encode()).hexdigest()[:16]
        try:
            self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield  # no place for a lock: two may pull, and the engine shares the work
            return
        try:
            while not _locked(lock):  # noqa: ASYNC110  the kernel tells nobody
                await asyncio.sleep(_LOCK_PAUSE_SECONDS)
            yield
        finally:
            os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    name, _, tag = image.removeprefix("localhost/").partition(":")  # so Podman calls its own
    recipes = {recipe.image: variant for variant, recipe in RECIPES.items()}
    variant = recipes.get(f"{name}:{tag or 'latest'}")
    if variant is not None:
        return f"Build it with: paracle image build {variant}"
    if name == _OURS:
        return f"There are {', '.join(recipes)}; build one with: paracle image build VARIANT"
    return f"Pull it with: docker pull {image}"
