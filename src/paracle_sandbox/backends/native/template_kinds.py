"""The templates there are: which image means which, where it is, and what it is made of.

Looking one up imports next to nothing, because a command that makes one sandbox waits for it. What
is in a template is code that runs with this user's rights, so nobody else may be able to write to
it or to the directory that it is in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import BackendUnavailableError, SandboxCreationError, SandboxError
from ...host.own_directory import (
    ForeignDirectoryError,
    open_trusted_directory,
    refuse_foreign_parents,
)
from ...settings import Settings
from .descriptors import is_shortage, no_descriptor
from .interpreter import version_of
from .spawner_process import default_python

# Its file in a template; a directory without it is not complete.
MANIFEST = "paracle-template.json"

_BASE = ("requests", "pydantic", "click", "rich", "jinja2", "pyyaml", "pip")
PACKAGES = {
    "default": _BASE,
    "dev": (*_BASE, "ipython", "ipdb", "pytest", "black", "ruff"),
    "ml": (*_BASE, "numpy", "pandas", "scikit-learn", "matplotlib", "seaborn"),
    "api": (*_BASE, "httpx", "aiohttp", "fastapi", "websockets"),
}
# What programs write to import them, with what they bring along.
MODULES_OF = {
    "requests": ("requests", "urllib3", "certifi", "idna", "charset_normalizer"),
    "pydantic": ("pydantic", "pydantic_core", "annotated_types", "typing_extensions"),
    "click": ("click",), "rich": ("rich", "pygments", "markdown_it"),
    "jinja2": ("jinja2", "markupsafe"), "pyyaml": ("yaml",), "pip": ("pip",),
}  # fmt: skip
# Imported before the first sandbox: these are what the template is for.
_MODULES = {"ml": ("numpy", "pandas")}
# Imported in idle time: what most programs import. Not more: what is in memory here is mapped and
# unmapped with every process of every sandbox.
_IDLE_MODULES = ("json", "re", "math", "datetime", "collections", "itertools", "functools",
                 "pathlib", "typing", "enum", "string", "contextlib", "operator")  # fmt: skip
_IMAGE = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?P<name>python|paracle/sandbox)(?::(?P<tag>.+))?\Z"
)
_VERSION = re.compile(r"\d+(?:\.\d+)*")
# What the defaults of older settings and their documents name. Here they stand for the default
# template whatever the Python of this machine is, or programs that name no image would fail.
_ANY_PYTHON = ("3.10-slim", "3.12-slim")


@dataclass(frozen=True)
class Template:
    """One template; ``path`` is the directory that sandboxes see, if there is one. Unless
    ``is_built`` it is empty, and there is the standard library alone."""

    name: str
    path: Path | None
    is_built: bool
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


def refuse_other_python(image: str, settings: Settings) -> str | None:
    """Native sandboxes run one Python, whatever version an image is named after. Raises
    SandboxCreationError for another one; returns what to tell about one that is let pass."""
    match = _IMAGE.match(image)
    wanted = _VERSION.match(match["tag"] or "") if match and match["name"] == "python" else None
    if match is None or wanted is None:
        return None
    ours = version_of(settings.python or default_python()).rpartition("-")[2]
    if f"{ours}.".startswith(f"{wanted[0]}."):
        return None
    if match["tag"] in _ANY_PYTHON:
        return f"{image} stands for the default template: native sandboxes run Python {ours}."
    raise SandboxCreationError(
        f"Native sandboxes run Python {ours}, and {image} names another. Use "
        "paracle/sandbox:latest, :dev, :ml or :api, name an interpreter of that version in "
        "PARACLE_PYTHON, or use Docker: --backend docker, or SANDBOX_MODE=docker."
    )


def find_template(name: str, settings: Settings) -> Template:
    """As the first sandbox will have it, as far as one knows now. Raises SandboxError for one that
    others can write to."""
    require_trusted_templates(str(templates_dir(settings)))
    template = template_at(template_path(name, settings), name, make=settings.template_build)
    if template.path is not None:
        require_trusted_template(str(template.path))
    return template


def template_at(path: Path, name: str, *, make: bool = False) -> Template:
    """As far as it is there. ``make`` an empty directory where there is none, so that sandboxes
    which are made now see the packages as soon as they are there. Raises BackendUnavailableError
    where others can write to the directory that it is to be made in."""
    is_built = os.path.exists(f"{path}/{MANIFEST}")
    there = is_built or os.path.isdir(path)
    if make and not there:
        with contextlib.suppress(OSError):
            _make(path)
        there = os.path.isdir(path)
    modules = _MODULES.get(name, ()) if is_built else ()
    return Template(name, path if there else None, is_built, modules, _IDLE_MODULES)


def _make(path: Path) -> None:
    with open_templates(str(path.parent), make=True) as directory:
        os.mkdir(path.name, 0o755, dir_fd=directory)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(path.name, flags, dir_fd=directory)
        try:
            os.fchmod(made, 0o755)
        finally:
            os.close(made)


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


def require_trusted_template(path: str) -> None:
    """Refuse a template that others can write to: the spawner imports its modules. Raises
    BackendUnavailableError."""
    try:
        os.close(open_trusted_directory(path))
    except FileNotFoundError:  # it was replaced just now
        return
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor() from error
        raise _untrusted("template", path, error) from error


def require_trusted_templates(path: str) -> None:
    """Before anything in the directory of templates is looked at. Raises BackendUnavailableError
    for one that others can write to. One that is not there, or that cannot be opened, is met again
    by whoever wants something of it."""
    try:
        with open_templates(path):
            pass
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor() from error


@contextlib.contextmanager
def open_templates(path: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory of templates. Raises BackendUnavailableError for one that
    others can write to, FileNotFoundError when it is not there and not to be made, and OSError for
    whatever else is in the way."""
    try:
        if make:
            refuse_foreign_parents(path)
            os.makedirs(path, 0o755, exist_ok=True)
        elif not os.path.lexists(path):  # then it does not matter who could make it
            raise FileNotFoundError(path)
        directory = open_trusted_directory(path)
    except ForeignDirectoryError as error:
        raise _untrusted("directory of templates", path, error) from error
    try:
        yield directory
    finally:
        os.close(directory)


def _untrusted(what: str, path: str, error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"The {what} {path} is not used: {error.strerror or error}. Its code would run with "
        "this user's rights. Remove it, or set PARACLE_DATA_DIR to a directory of this user.",
        step="template",
    )
