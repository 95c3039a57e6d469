"""The templates there are: which image means which, where it is, and what it is made of.

Looking one up imports next to nothing, because a command that makes one sandbox waits for it.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import SandboxCreationError, SandboxError
from ...settings import Settings
from .interpreter import version_of
from .launcher import default_python

_BASE = ("requests", "pydantic", "click", "rich", "jinja2", "pyyaml", "pip")
PACKAGES = {
    "default": _BASE,
    "dev": (*_BASE, "ipython", "ipdb", "pytest", "black", "ruff"),
    "ml": (*_BASE, "numpy", "pandas", "scikit-learn", "matplotlib", "seaborn"),
    "api": (*_BASE, "httpx", "aiohttp", "fastapi", "websockets"),
}
# Imported before the first sandbox: these are what the template is for.
_MODULES = {"ml": ("numpy", "pandas")}
# Imported in idle time: what most programs import. Not more: what is in memory here is mapped and
# unmapped with every process of every sandbox.
_IDLE_MODULES = ("json", "re", "math", "datetime", "collections", "itertools", "functools",
                 "pathlib", "typing", "enum", "string", "contextlib", "operator")  # fmt: skip
_IMAGE = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?P<name>python|paracle/sandbox)(?::(?P<tag>.+))?\Z"
)


@dataclass(frozen=True)
class Template:
    """One template; ``path`` is None when its packages are not there (standard library only)."""

    name: str
    path: Path | None
    modules: tuple[str, ...] = ()
    idle_modules: tuple[str, ...] = ()
    note: str = ""


def template_name(image: str) -> str:
    """The template that an image name stands for; an error for any other image."""
    match = _IMAGE.match(image)
    if match is None:
        raise SandboxCreationError(
            f"Image not found: {image}. Native sandboxes know the images paracle/sandbox:* and "
            "python:*. For any other use Docker: --backend docker, or SANDBOX_MODE=docker."
        )
    if match["name"] == "python":
        return "default"
    tag = match["tag"] or "latest"
    name = "default" if tag == "latest" else tag
    if name not in PACKAGES:
        known = ", ".join(f"paracle/sandbox:{tag}" for tag in ("latest", "dev", "ml", "api"))
        raise SandboxCreationError(f"Image not found: {image}. There are {known}.")
    return name


def find_template(name: str, settings: Settings) -> Template:
    """As far as it is there."""
    return template_at(template_path(name, settings), name)


def template_at(path: Path, name: str) -> Template:
    there = os.path.isdir(path)
    return Template(
        name,
        path if there else None,
        _MODULES.get(name, ()) if there else (),
        _IDLE_MODULES,
    )


def template_path(name: str, settings: Settings) -> Path:
    """Packages fit one interpreter: its version is part of the directory's name."""
    if name not in PACKAGES:
        raise SandboxError(f"No template {name!r}. There are: {', '.join(PACKAGES)}.")
    return templates_dir(settings) / f"{name}-{_tag_of(settings.python or default_python())}"


def templates_dir(settings: Settings) -> Path:
    return Path(settings.data_dir) / "templates"


@functools.cache
def _tag_of(python: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", version_of(python))
