"""What a sandbox may use and see: one frozen value, checked once."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

DEFAULT_IMAGE = "paracle/sandbox:latest"

NetworkMode = Literal["none", "bridge", "host"]

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_IMAGE = re.compile(r"[a-z0-9]([a-z0-9._/:@-]{0,254}[a-z0-9])?\Z", re.IGNORECASE)
# Places that belong to the system inside: a working directory there would hide it.
_SYSTEM_DIRS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run",
                "/sbin", "/sys", "/usr", "/var")  # fmt: skip


class SandboxConfig(BaseModel):
    """Limits and shape of one sandbox. The defaults are safe: no network, nothing of the host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_image: Annotated[str, Field(description="image, or the native template it stands for")] = (
        DEFAULT_IMAGE
    )
    cpu_cores: Annotated[float, Field(ge=0.1, le=16.0, allow_inf_nan=False)] = 1.0
    memory_mb: Annotated[int, Field(ge=128, le=16384)] = 512
    disk_mb: Annotated[int, Field(ge=256, le=10240)] = 1024
    timeout_seconds: Annotated[int, Field(ge=10, le=3600)] = 300
    network_mode: NetworkMode = "none"
    read_only_filesystem: bool = True
    drop_capabilities: bool = True
    working_dir: str = "/workspace"
    env_vars: dict[str, str] = Field(default_factory=dict)
    volumes: Annotated[
        dict[str, str],
        Field(description='path of the host: path inside, read-only unless it ends in ":rw"'),
    ] = Field(default_factory=dict)
    cleanup_timeout: Annotated[int, Field(ge=5, le=300)] = 30
    max_processes: Annotated[int, Field(ge=8, le=4096)] = 256
    max_output_mb: Annotated[int, Field(ge=1, le=1024)] = 16
    fresh_interpreter: bool = False
    allow_degraded: frozenset[str] = Field(default_factory=frozenset)

    @field_validator("base_image")
    @classmethod
    def _image_is_a_name(cls, value: str) -> str:
        if not _IMAGE.match(value):
            raise ValueError(f"not an image name: {value[:80]!r}")
        return value

    @field_validator("working_dir")
    @classmethod
    def _working_dir_is_free(cls, value: str) -> str:
        value = value.rstrip("/") or value[:1]
        plain = value.startswith("/") and not value.startswith("//") and "\0" not in value
        if not plain or posixpath.normpath(value) != value:
            raise ValueError(f"working_dir must be a plain absolute path, not {value!r}")
        if _is_of_the_system(value):
            raise ValueError(f"working_dir may not be a system directory: {value!r}")
        if value.startswith("/."):
            raise ValueError(f"working_dir may not be a hidden directory of the root: {value!r}")
        if value == "/tmp" or value.startswith("/tmp/"):
            raise ValueError("working_dir may not be inside /tmp, which is there already")
        return value

    @field_validator("env_vars")
    @classmethod
    def _env_is_passable(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _ENV_NAME.match(name):
                raise ValueError(f"not an environment variable name: {name!r}")
            if "\0" in text:
                raise ValueError(f"the value of {name} contains a NUL byte")
        return value

    @field_validator("volumes")
    @classmethod
    def _volumes_are_paths(cls, value: dict[str, str]) -> dict[str, str]:
        for source, target in value.items():
            inside = target.removesuffix(":rw").removesuffix(":ro")
            for path in (source, inside):
                if "\0" in path or path[:1] != "/" or posixpath.normpath(path) != path:
                    raise ValueError(f"not a plain absolute path: {path!r}")
            if ":" in inside or inside[:2] == "//" or _is_of_the_system(inside):
                raise ValueError(f"nothing of the host may be put at {inside!r}")
        return value

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


def _is_of_the_system(path: str) -> bool:
    return path == "/" or any(path == d or path.startswith(d + "/") for d in _SYSTEM_DIRS)
