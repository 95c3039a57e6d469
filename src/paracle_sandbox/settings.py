"""Every knob that is not part of a sandbox's own configuration: one table, read in one place.

The table is the ``Settings`` class itself: a field is a row, its name is the key in the
``[sandbox]`` section of config.toml, and its metadata hold the environment variable, the allowed
values and the meaning. The environment wins over the file, the file over the default; an empty
variable counts as unset. The file is the first of ``$PARACLE_CONFIG``, ``./config.toml`` and
``~/.config/paracle/config.toml``; without one the defaults hold.

A config.toml may come with a checked-out project that nobody has read, so a file may not choose
the interpreter or the directories we use, switch the isolation off (``fake``) or inject failures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import SandboxError

if TYPE_CHECKING:
    from .config import NetworkMode, SandboxConfig

Environment = Mapping[str, str]

MODES = (
    "auto", "native", "docker", "incus", "incus-vm", "gvisor", "remote", "daytona", "fake", "local"
)  # fmt: skip
# Keys of the same section that belong to SandboxSettings, the older shape of a configuration.
SHARED_KEYS = frozenset(
    ["use_sandbox", "image", "work_dir", "memory_limit", "cpu_limit", "timeout", "network_enabled"]
)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_DAY = 86_400.0
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Setting:
    """One row of the table: what may be set, where, to what, and what it does."""

    variable: str
    meaning: str
    parse: Callable[[str], object]
    allowed: str
    env_only: bool = False
    derive: Callable[[Environment], object] | None = None


def parse_memory_mb(text: str) -> int:
    """Megabytes in ``512m``, ``1g``, ``512MiB`` or a plain number of bytes, rounded up.

    Units are powers of 1024 throughout, as Docker reads them."""
    lowered = text.strip().lower()
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = lowered[len(number) :].strip()
    size = _UNITS.get(unit if len(unit) < 2 else unit.removesuffix("b").removesuffix("i"))
    if size is None or not number.replace(".", "", 1).isdecimal():
        raise ValueError(f"not an amount of memory: {text!r}; write it as 512m, 1g or 512MiB")
    return -(-int(float(number) * size) // (1 << 20))


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError(text)
    return lowered in _TRUE


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _state_dir(env: Environment) -> str:
    if os.geteuid() == 0:
        return "/run/paracle-sandbox"
    runtime = env.get("XDG_RUNTIME_DIR")
    return f"{runtime}/paracle-sandbox" if runtime else f"/tmp/paracle-sandbox-{os.geteuid()}"


def _data_dir(env: Environment) -> str:
    if os.geteuid() == 0:
        return "/var/lib/paracle-sandbox"
    return str(_home(env) / ".local/share/paracle-sandbox")


def _agents_dir(env: Environment) -> str:
    return str(_home(env) / ".config/paracle/agents")


def _home(env: Environment) -> Path:
    return Path(env["HOME"]) if env.get("HOME") else Path.home()


def _row(setting: Setting, default: object = MISSING) -> Any:
    if setting.derive is not None:
        derive = setting.derive
        return field(default_factory=lambda: derive(os.environ), metadata={"setting": setting})
    # A secret must not show in a log line that prints the settings.
    shown = not setting.variable.endswith("_KEY")
    return field(default=cast(Any, default), repr=shown, metadata={"setting": setting})


def _text(variable: str, default: str | None, meaning: str, *, env_only: bool = False) -> Any:
    return _row(Setting(variable, meaning, str, "any text", env_only), default)


def _choice(variable: str, default: str, allowed: tuple[str, ...], meaning: str) -> Any:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(text)
        return "docker" if value == "local" else value

    return _row(Setting(variable, meaning, parse, "one of " + ", ".join(allowed)), default)


def _number(
    variable: str, default: float, meaning: str, low: float, high: float, *, mb: bool = False
) -> Any:
    kind: Callable[[str], float] = parse_memory_mb if mb else type(default)

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    what = "an amount of memory such as 512m," if mb else f"{type(default).__name__},"
    return _row(Setting(variable, meaning, parse, f"{what} from {low:,} to {high:,}"), default)


def _flag(variable: str, default: bool, meaning: str) -> Any:
    return _row(Setting(variable, meaning, _boolean, "true or false"), default)


def _directory(variable: str, derive: Callable[[Environment], str], meaning: str) -> Any:
    def parse(text: str) -> str:
        if not text.startswith("/"):
            raise ValueError(text)
        return text

    return _row(Setting(variable, meaning, parse, "an absolute path", True, derive))


@dataclass(frozen=True)
class Settings:
    """All of them, resolved. Build it with load_settings(), or directly in a test."""

    mode: str = _choice("SANDBOX_MODE", "auto", MODES, "which backend makes the sandboxes")
    default_timeout_seconds: int = _number(
        "PARACLE_SANDBOX_DEFAULT_TIMEOUT", 300, "limit of one execution", 10, 3600
    )
    default_memory_mb: int = _number(
        "PARACLE_SANDBOX_DEFAULT_MEMORY_MB", 512, "memory of a sandbox", 128, 16384
    )
    default_cpu_cores: float = _number(
        "PARACLE_SANDBOX_DEFAULT_CPU_CORES", 1.0, "CPU of a sandbox, in cores", 0.1, 16.0
    )
    network_mode: NetworkMode = _choice(  # noqa: RUF009 (a string, like the others)
        "PARACLE_SANDBOX_NETWORK_MODE", "none", ("none", "bridge", "host"), "network of a sandbox"
    )
    read_only_filesystem: bool = _flag(
        "PARACLE_SANDBOX_READ_ONLY_FS", True, "keep the root of a sandbox read-only"
    )
    drop_capabilities: bool = _flag(
        "PARACLE_SANDBOX_DROP_CAPABILITIES", True, "drop every Linux capability inside"
    )
    log_level: str = _choice(
        "PARACLE_SANDBOX_LOG_LEVEL", "warning", ("debug", "info", "warning", "error", "critical"),
        "how much the command line logs",
    )  # fmt: skip
    state_dir: str = _directory(
        "PARACLE_STATE_DIR", _state_dir, "records of the live sandboxes; gone after a reboot"
    )
    data_dir: str = _directory("PARACLE_DATA_DIR", _data_dir, "templates, and the workspace volume")
    stock: int = _number(
        "PARACLE_STOCK", 4, "children the native backend keeps forked ahead of need", 0, 256
    )
    python: str | None = _text(
        "PARACLE_PYTHON", None, "interpreter inside native sandboxes", env_only=True
    )
    template_build: bool = _flag(
        "PARACLE_TEMPLATE_BUILD", True, "build a missing template on its first use"
    )
    uid_base: int = _number(
        "PARACLE_UID_BASE", 1_900_000_000, "first of the host uids given to native sandboxes",
        100_000, 4_200_000_000,
    )  # fmt: skip
    failpoints: tuple[str, ...] = _row(
        Setting("PARACLE_FAILPOINTS", "steps that fail on purpose, for tests", _names,
                "names with commas between", env_only=True), ()
    )  # fmt: skip
    docker_image: str = _text("DOCKER_SANDBOX_IMAGE", "python:3.12-slim", "image for docker")
    docker_idle_timeout: float = _number(
        "DOCKER_SANDBOX_TIMEOUT", 900.0, "seconds until an unused container is removed", 1.0, _DAY
    )
    docker_memory_mb: int = _number(
        "DOCKER_SANDBOX_MEMORY", 512, "memory of a container", 128, 16384, mb=True
    )
    docker_cpu_cores: float = _number("DOCKER_SANDBOX_CPU", 1.0, "CPU of a container", 0.1, 16.0)
    incus_image: str = _text("INCUS_SANDBOX_IMAGE", "images:debian/12/cloud", "image for incus")
    incus_type: str = _choice(
        "INCUS_SANDBOX_TYPE", "container", ("container", "vm"), "kind of Incus instance"
    )
    incus_idle_timeout: float = _number(
        "INCUS_SANDBOX_TIMEOUT", 900.0, "seconds until an unused instance is removed", 1.0, _DAY
    )
    incus_memory_mb: int = _number(
        "INCUS_SANDBOX_MEMORY", 512, "memory of an instance", 128, 16384, mb=True
    )
    incus_cpu_cores: float = _number("INCUS_SANDBOX_CPU", 1.0, "CPU of an instance", 0.1, 16.0)
    incus_remote: str = _text("INCUS_REMOTE", "local", "Incus server to use")
    api_url: str | None = _text("SANDBOX_API_URL", None, "address of a remote sandbox service")
    api_key: str | None = _text("SANDBOX_API_KEY", None, "key for the remote sandbox service")
    request_timeout: float = _number(
        "SANDBOX_TIMEOUT", 60.0, "seconds a request to the remote service may take", 1.0, _DAY
    )
    agents_dir: str = _directory("PARACLE_AGENTS_DIR", _agents_dir, "your own agents, a file each")
    google_key: str | None = _text("GOOGLE_API_KEY", None, "key for Google's models", env_only=True)
    mistral_key: str | None = _text(
        "MISTRAL_API_KEY", None, "key for Mistral's models", env_only=True
    )
    groq_key: str | None = _text("GROQ_API_KEY", None, "key for models at Groq", env_only=True)
    daytona_key: str | None = _text("DAYTONA_API_KEY", None, "key for Daytona", env_only=True)
    daytona_url: str = _text(
        "DAYTONA_API_URL", "https://app.daytona.io/api", "address of Daytona", env_only=True
    )
    daytona_target: str | None = _text(
        "DAYTONA_TARGET", None, "region of Daytona's sandboxes", env_only=True
    )
    daytona_image: str = _text(
        "DAYTONA_SANDBOX_IMAGE", "python:3.12-slim", "image of Daytona's sandboxes"
    )
    mcp_key: str | None = _text(
        "PARACLE_MCP_KEY", None, "key that clients of paracle mcp --http send", env_only=True
    )

    def default_config(self) -> SandboxConfig:
        """The configuration of a sandbox for which nobody gave one."""
        from .config import SandboxConfig

        return SandboxConfig(
            timeout_seconds=self.default_timeout_seconds,
            memory_mb=self.default_memory_mb,
            cpu_cores=self.default_cpu_cores,
            network_mode=self.network_mode,
            read_only_filesystem=self.read_only_filesystem,
            drop_capabilities=self.drop_capabilities,
        )


def settings_table() -> dict[str, Setting]:
    """The rows by field name, for documentation and its test."""
    return {row.name: row.metadata["setting"] for row in fields(Settings)}


def load_settings(env: Environment | None = None, path: str | Path | None = None) -> Settings:
    """Resolve all settings. Raises SandboxError that names the setting, its value and what is
    allowed; unknown keys in the file are an error too, because a typo would be silent."""
    env = os.environ if env is None else env
    section = read_section(env, path)
    table = settings_table()
    unknown = sorted(set(section) - set(table) - SHARED_KEYS)
    if unknown:
        raise SandboxError(
            f"config.toml: unknown key {unknown[0]!r} in [sandbox]; "
            f"known are {', '.join(sorted(set(table) | SHARED_KEYS))}"
        )
    values: dict[str, Any] = {}
    for key, setting in table.items():
        if env.get(setting.variable):
            values[key] = _parse(setting, setting.variable, env[setting.variable])
        elif key in section:
            values[key] = _from_file(setting, key, section[key])
        elif setting.derive is not None:
            values[key] = setting.derive(env)
    return Settings(**values)


def read_section(env: Environment | None = None, path: str | Path | None = None) -> dict[str, Any]:
    """The ``[sandbox]`` section of config.toml; empty when there is no file or no section."""
    file = _find_file(os.environ if env is None else env, path)
    if file is None:
        return {}
    import tomllib

    try:
        section = tomllib.loads(file.read_text(encoding="utf-8")).get("sandbox", {})
    except (OSError, ValueError) as error:
        raise SandboxError(f"Cannot read {file}: {error}") from error
    if not isinstance(section, dict):
        raise SandboxError(f"{file}: sandbox must be a section, [sandbox]")
    return section


def _find_file(env: Environment, path: str | Path | None) -> Path | None:
    named = path or env.get("PARACLE_CONFIG")
    if named:
        file = Path(named)
        if not file.is_file():
            raise SandboxError(f"There is no configuration file {file}")
        return file
    places = (Path("config.toml"), _home(env) / ".config/paracle/config.toml")
    return next((place for place in places if place.is_file()), None)


def _from_file(setting: Setting, key: str, value: object) -> object:
    name = f"config.toml: {key}"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if setting.env_only or (setting.variable == "SANDBOX_MODE" and text == "fake"):
        raise SandboxError(f"{name} = {text!r} is not taken from a file; set {setting.variable}")
    return _parse(setting, name, text)


def _parse(setting: Setting, name: str, text: str) -> object:
    try:
        return setting.parse(text)
    except (ValueError, OverflowError) as error:
        shown = "***" if setting.variable.endswith("_KEY") else repr(text[:200])
        raise SandboxError(f"{name} = {shown} is not allowed: {setting.allowed}") from error


def skip_pydantic_plugins() -> None:
    """Looking for plugins costs every short command some milliseconds, and none is of use here."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
