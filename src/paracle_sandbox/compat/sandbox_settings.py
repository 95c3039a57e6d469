"""SandboxSettings: the older shape of a configuration, as the ``[sandbox]`` section spells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import InvalidConfigError, Options, SandboxConfig, flag, number, option, text
from ..errors import SandboxError
from ..settings import SHARED_KEYS, Environment, parse_memory_mb, read_section


@dataclass(frozen=True, kw_only=True)
class SandboxSettings(Options):
    """Limits of one sandbox, with sizes as text. Convert it with to_config()."""

    use_sandbox: bool = option(False, flag)
    image: str = option("python:3.12-slim", text)
    work_dir: str = option("/workspace", text)
    memory_limit: str = option("512m", text)
    cpu_limit: float = option(1.0, number(float, 0.0, 1e6))
    timeout: int = option(300, number(int, 0, 1 << 31))
    network_enabled: bool = option(False, flag)

    def to_config(self) -> SandboxConfig:
        """The same limits as a SandboxConfig. Raises ValueError when they are out of range."""
        return SandboxConfig(
            base_image=self.image,
            working_dir=self.work_dir,
            memory_mb=parse_memory_mb(self.memory_limit),
            cpu_cores=self.cpu_limit,
            timeout_seconds=self.timeout,
            network_mode="bridge" if self.network_enabled else "none",
        )

    @classmethod
    def load(
        cls, env: Environment | None = None, path: str | Path | None = None
    ) -> SandboxSettings:
        """Read what config.toml says; the defaults hold where it says nothing."""
        section: dict[str, Any] = read_section(env, path)
        own = {key: value for key, value in section.items() if key in SHARED_KEYS}
        try:
            return cls(**own)
        except InvalidConfigError as error:
            raise SandboxError(f"config.toml, section [sandbox]: {error}") from error


ConfigLike = SandboxConfig | SandboxSettings | Mapping[str, Any]


def full_config(config: ConfigLike) -> SandboxConfig:
    """Convert a configuration of any shape, a dict of its fields included. Raises ValueError when
    they are out of range, TypeError for anything else."""
    if isinstance(config, SandboxConfig):
        return config
    if isinstance(config, SandboxSettings):
        return config.to_config()
    if isinstance(config, Mapping):
        return SandboxConfig(**config)
    raise TypeError(
        f"config must be a SandboxConfig or a dict of its fields, not {type(config).__name__}"
    )


def with_volumes(config: SandboxConfig, bindings: Mapping[str, str] | None) -> SandboxConfig:
    """Add volumes to a configuration. Raises ValueError when a binding is not two paths."""
    if not bindings:
        return config
    volumes = {**config.volumes, **bindings}
    return SandboxConfig(**{**config.model_dump(), "volumes": volumes})
