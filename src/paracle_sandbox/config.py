"""The limits and views of a sandbox: one frozen value, checked once.

Each field stands here once, with its default and what it may be. This module imports little,
because every short command needs it.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from .errors import InvalidValueError

if TYPE_CHECKING:
    from typing import Self

DEFAULT_IMAGE = "paracle/sandbox:latest"

NetworkMode = Literal["none", "bridge", "host"]

_MAX_PATH = 1024
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# No empty name between slashes, nor one of dots: an engine's address has the image in its path.
_IMAGE = re.compile(
    r"(?!.{257})[a-z0-9][a-z0-9._:@-]*(/[a-z0-9_][a-z0-9._:@-]*)*(?<=[a-z0-9])\Z", re.IGNORECASE
)
# Places that belong to the system inside: a working directory there would hide it.
_SYSTEM_DIRS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run",
                "/sbin", "/sys", "/usr", "/var")  # fmt: skip
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "t": True, "y": True,
             "0": False, "false": False, "no": False, "off": False, "f": False,
             "n": False}  # fmt: skip

# Answers the value as it is kept. Raises ValueError, whose text says what it has to be.
Check = Callable[[Any], Any]


class InvalidConfigError(InvalidValueError):
    """Fields of a configuration that cannot be used, and why."""

    def __init__(self, faults: Mapping[str, str], given: Mapping[str, Any]) -> None:
        super().__init__("; ".join(f"{name}: {fault}" for name, fault in faults.items()))
        self._faults = dict(faults)
        self._given = dict(given)

    def errors(self) -> list[dict[str, Any]]:
        """One for each field: ``loc`` (its name, in a tuple), ``msg`` and ``input``."""
        return [
            {"loc": (name,), "msg": fault, "input": self._given.get(name)}
            for name, fault in self._faults.items()
        ]


def option(default: Any, check: Check, help: str = "") -> Any:
    """A field of a configuration. ``check`` sees each value but the default; ``help`` is what the
    command line says about the field."""
    metadata = {"check": check, "help": help}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class InRange:
    """Takes a number from ``low`` to ``high``, or the text of one."""

    def __init__(self, kind: type[int] | type[float], low: float, high: float) -> None:
        self.kind, self.low, self.high = kind, low, high

    def __call__(self, value: Any) -> Any:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            found = self.kind(value)
            if not math.isfinite(found) or (isinstance(value, float) and found != value):
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(f"it must be {_KINDS[self.kind]}{self.bounds}") from None
        if not self.low <= found <= self.high:
            raise ValueError(f"it must be{self.bounds.removeprefix(' of')}")
        return found

    @property
    def bounds(self) -> str:
        """In words, after a space; empty where there are none."""
        if self.high < math.inf:
            return f" from {self.low:g} to {self.high:g}"
        return f" of at least {self.low:g}" if self.low > -math.inf else ""


_KINDS = {int: "a whole number", float: "a number"}


def flag(value: Any) -> bool:
    """True or False, or a word for one of them. Raises ValueError."""
    found = value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())
    if found is None:
        raise ValueError("it must be true or false")
    return found


class OneOf:
    """Takes one of some words."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, value: Any) -> str:
        if value not in self.choices:
            raise ValueError(f"it must be one of {', '.join(self.choices)}")
        return str(value)


def text(value: Any) -> str:
    """Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("it must be a text")
    return value


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("it must be a mapping of texts to texts")
    return {text(name): text(content) for name, content in value.items()}


def _names(value: Any) -> frozenset[str]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ValueError("it must be a set of names")
    return frozenset(map(text, value))


def _image_name(value: Any) -> str:
    if not _IMAGE.match(text(value)):
        raise ValueError(f"not an image name: {value[:80]!r}")
    return str(value)


def _free_directory(value: Any) -> str:
    path = text(value).rstrip("/") or value[:1]
    plain = path.startswith("/") and not path.startswith("//") and "\0" not in path
    if not plain or posixpath.normpath(path) != path:
        raise ValueError(f"working_dir must be a plain absolute path, not {path!r}")
    if len(path) > _MAX_PATH or any(len(step.encode()) > 255 for step in path.split("/")):
        raise ValueError(
            f"working_dir is too long: {_MAX_PATH} characters in all, 255 bytes for each name"
        )
    if _is_of_the_system(path):
        raise ValueError(f"working_dir may not be a system directory: {path!r}")
    if path.startswith("/."):
        raise ValueError(f"working_dir may not be a hidden directory of the root: {path!r}")
    if path == "/tmp" or path.startswith("/tmp/"):
        raise ValueError("working_dir may not be inside /tmp, which is there already")
    return path


def _environment(value: Any) -> dict[str, str]:
    variables = _texts(value)
    for name, content in variables.items():
        if not _ENV_NAME.match(name):
            raise ValueError(f"not an environment variable name: {name!r}")
        if "\0" in content:
            raise ValueError(f"the value of {name} contains a NUL byte")
    return variables


def _bindings(value: Any) -> dict[str, str]:
    bindings = _texts(value)
    for source, target in bindings.items():
        inside = target.removesuffix(":rw").removesuffix(":ro")
        for path in (source, inside):
            if "\0" in path or path[:1] != "/" or posixpath.normpath(path) != path:
                raise ValueError(f"not a plain absolute path: {path!r}")
        if ":" in inside or inside[:2] == "//" or _is_of_the_system(inside):
            raise ValueError(f"nothing of the host may be put at {inside!r}")
    return bindings


def _is_of_the_system(path: str) -> bool:
    return path == "/" or any(path == d or path.startswith(d + "/") for d in _SYSTEM_DIRS)


class Options:
    """The base of a frozen dataclass whose fields are made by ``option``: they are checked when it
    is made, and InvalidConfigError names each one that is wrong."""

    if not TYPE_CHECKING:  # for it, the fields are the signature

        def __new__(cls, **values: Any) -> Self:
            unknown = [name for name in values if name not in cls.__dataclass_fields__]
            if unknown:
                raise InvalidConfigError(dict.fromkeys(unknown, "there is no such field"), values)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        faults: dict[str, str] = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value is one.default:
                continue
            try:
                object.__setattr__(self, one.name, one.metadata["check"](value))
            except ValueError as error:
                faults[one.name] = str(error)
        if faults:
            raise InvalidConfigError(faults, vars(self))

    # By the names of pydantic, for programs that know them.

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """The fields as a dict; ``mode="json"`` has lists for sets."""
        chosen = vars(self).keys() if include is None else set(include)
        chosen = chosen - set(exclude or ())
        return {
            name: _plain(value, mode == "json")
            for name, value in vars(self).items()
            if name in chosen
        }

    def model_dump_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"))

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with other values, which are not checked."""
        copy = type(self)()
        for name, value in {**vars(self), **(update or {})}.items():
            object.__setattr__(copy, name, value)
        return copy

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """Make one from a mapping of its fields. Raises InvalidConfigError."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise InvalidConfigError({cls.__name__: "it must be a mapping of its fields"}, {})
        return cls(**values)


def _plain(value: Any, is_json: bool) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return sorted(value) if is_json and isinstance(value, frozenset) else value


@dataclass(frozen=True, kw_only=True)
class SandboxConfig(Options):
    """Limits and shape of one sandbox. The defaults are safe: no network, nothing of the host."""

    # The image, or the native template that it stands for.
    base_image: str = option(DEFAULT_IMAGE, _image_name)
    cpu_cores: float = option(1.0, InRange(float, 0.1, 16.0), "CPU cores")
    memory_mb: int = option(512, InRange(int, 128, 16384), "Memory in MB")
    disk_mb: int = option(1024, InRange(int, 256, 10240), "Disk in MB")
    timeout_seconds: int = option(300, InRange(int, 10, 3600), "Timeout in seconds")
    network_mode: NetworkMode = option(  # noqa: RUF009
        "none", OneOf("none", "bridge", "host"), "Network mode"
    )
    read_only_filesystem: bool = option(True, flag)
    drop_capabilities: bool = option(True, flag)
    working_dir: str = option("/workspace", _free_directory)
    env_vars: dict[str, str] = option({}, _environment)  # noqa: RUF009
    # A path of the host: a path inside, read-only unless it ends in ":rw".
    volumes: dict[str, str] = option({}, _bindings)  # noqa: RUF009
    cleanup_timeout: int = option(30, InRange(int, 5, 300))
    max_processes: int = option(256, InRange(int, 8, 4096))
    max_output_mb: int = option(16, InRange(int, 1, 1024))
    fresh_interpreter: bool = option(False, flag)
    allow_degraded: frozenset[str] = option(frozenset(), _names)

    # The names of SandboxSettings, for programs that read a configuration by those.

    @property
    def image(self) -> str:
        return self.base_image

    @property
    def work_dir(self) -> str:
        return self.working_dir

    @property
    def memory_limit(self) -> str:
        return f"{self.memory_mb}m"

    @property
    def cpu_limit(self) -> float:
        return self.cpu_cores

    @property
    def timeout(self) -> int:
        return self.timeout_seconds

    @property
    def network_enabled(self) -> bool:
        return self.network_mode != "none"

    @classmethod
    def untrusted(cls) -> SandboxConfig:
        """Tight limits, no network: for code that nobody has looked at."""
        return cls(cpu_cores=0.5, memory_mb=256, timeout_seconds=60)

    @classmethod
    def standard(cls) -> SandboxConfig:
        """The defaults, by name."""
        return cls()

    @classmethod
    def high_performance(cls) -> SandboxConfig:
        """Room for data work, with a network."""
        return cls(
            cpu_cores=4.0,
            memory_mb=2048,
            disk_mb=4096,
            network_mode="bridge",
            timeout_seconds=600,
        )
