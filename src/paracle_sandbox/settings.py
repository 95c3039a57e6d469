"""Every knob that is not part of a sandbox's own configuration: one table, read in one place.

The table is the ``Settings`` class itself: a field is a row, its name is the key in the
``[sandbox]`` section of config.toml, and its metadata hold the environment variable, the allowed
values and the meaning. The environment wins over the file, the file over the default; an empty
variable counts as unset. The file is the first of ``$PARACLE_CONFIG``, ``./config.toml`` and
``~/.config/paracle/config.toml``; without one the defaults hold.

A config.toml may come with a checked-out project that has not been read, so a file may not choose
the interpreter or the directories we use, the service that programs are sent to, switch the
isolation off (``fake``), have another distribution make the sandboxes or inject failures. Nor does
another program's file stop us: keys in its ``[sandbox]`` section that we do not know are warned of,
and left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import SandboxError
from .host.backend_names import MODES, OLDER_NAMES, is_for_the_user_alone, is_known
from .host.platforms import user_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .config import NetworkMode, SandboxConfig

Environment = Mapping[str, str]

_DAY = 86_400.0
_SHOWN_KEYS = 5


# The kinds of rows, each with its parser and what it allows.

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
# What can be waived by name: limits by control groups for root, rules between containers.
LAYERS = ("cgroup", "firewall")
# What the native backend has for speed alone: all works without.
SPEED = ("warm-pool", "preforked", "fork-server", "keep-alive")
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

    def is_written(self, value: object) -> bool:
        """Say whether a file may write it so: the text of a number or of a list is not a text."""
        return isinstance(value, str if self.parse is str else str | int | float)


def home(env: Environment) -> Path:
    """The home directory, or a path that does not exist for a uid without a passwd entry."""
    return Path(env.get("HOME") or os.path.expanduser("~").replace("~", "/nonexistent"))


def own_runtime_dir(env: Environment) -> str | None:
    """XDG_RUNTIME_DIR, if it is this user's: after ``su`` it still names the other user's."""
    runtime = env.get("XDG_RUNTIME_DIR") or ""
    try:
        return runtime if os.stat(runtime).st_uid == user_id() else None
    except OSError:
        return None


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


def parse_flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return lowered in _TRUE


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def layers(text: str) -> tuple[str, ...]:
    """Names of layers that can be waived. Raises ValueError for any other."""
    found = names(text)
    if unknown := [name for name in found if name not in LAYERS]:
        raise ValueError(f"there is no layer {unknown[0]!r} to do without")
    return found


def speed(text: str) -> tuple[str, ...]:
    """Names of what is to be off; "off" is all of them. Raises ValueError for any other."""
    found = names(text)
    if unknown := [name for name in found if name not in (*SPEED, "off")]:
        raise ValueError(f"there is no {unknown[0]!r} to switch off")
    return SPEED if "off" in found else found


def row(setting: Setting, default: object = MISSING) -> Any:
    if setting.derive is not None:
        derive = setting.derive
        return field(default_factory=lambda: derive(os.environ), metadata={"setting": setting})
    # A secret must not show in a log line that prints the settings; an index may have a login.
    shown = not setting.variable.endswith(("_KEY", "_INDEX"))
    return field(default=cast(Any, default), repr=shown, metadata={"setting": setting})


def text(variable: str, default: str | None, meaning: str, *, env_only: bool = False) -> Any:
    return row(Setting(variable, meaning, str, "any text", env_only), default)


def choice(variable: str, default: str, allowed: tuple[str, ...], meaning: str) -> Any:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(text)
        return value

    return row(Setting(variable, meaning, parse, "one of " + ", ".join(allowed)), default)


def number(
    variable: str, default: float, meaning: str, low: float, high: float, *, mb: bool = False
) -> Any:
    kind: Callable[[str], float] = parse_memory_mb if mb else type(default)

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    what = "an amount of memory such as 512m," if mb else f"{type(default).__name__},"
    return row(Setting(variable, meaning, parse, f"{what} from {low:,} to {high:,}"), default)


def flag(variable: str, default: bool, meaning: str) -> Any:
    return row(Setting(variable, meaning, parse_flag, "true or false"), default)


def directory(variable: str, derive: Callable[[Environment], str], meaning: str) -> Any:
    def parse(text: str) -> str:
        if not text.startswith("/"):
            raise ValueError(text)
        return text

    return row(Setting(variable, meaning, parse, "an absolute path", True, derive))


# The table.

# Field of a configuration: the row that sets it for one kind of backend.
_CONTAINER_ROWS = {
    "base_image": "docker_image",
    "memory_mb": "docker_memory_mb",
    "cpu_cores": "docker_cpu_cores",
}
_INCUS_ROWS = {
    "base_image": "incus_image",
    "memory_mb": "incus_memory_mb",
    "cpu_cores": "incus_cpu_cores",
}
_CONFIG_ROWS = {
    "docker": _CONTAINER_ROWS,
    "gvisor": _CONTAINER_ROWS,
    "incus": _INCUS_ROWS,
    "incus-vm": _INCUS_ROWS,
}
_IDLE_ROWS = {
    "docker": "docker_idle_timeout",
    "gvisor": "docker_idle_timeout",
    "incus": "incus_idle_timeout",
    "incus-vm": "incus_idle_timeout",
}
# Rows of containers, and those of the service whose variables are named so alike that one is easily
# taken for the other: DOCKER_SANDBOX_IMAGE, SANDBOX_DOCKER_IMAGE. One that is set holds for both.
_LIKE_NAMED = {
    "docker_image": "service_image",
    "docker_idle_timeout": "service_idle_timeout",
    "docker_memory_mb": "service_memory_mb",
    "docker_cpu_cores": "service_cpu_cores",
}
# Files whose unknown keys were warned of.
_warned: set[str] = set()


def _state_dir(env: Environment) -> str:
    if user_id() == 0:
        return "/run/paracle-sandbox"
    runtime = own_runtime_dir(env)
    return f"{runtime}/paracle-sandbox" if runtime else f"/tmp/paracle-sandbox-{user_id()}"


def _data_dir(env: Environment) -> str:
    if user_id() == 0:
        return "/var/lib/paracle-sandbox"
    return str(home(env) / ".local/share/paracle-sandbox")


def _service_dir(env: Environment) -> str:
    return f"{env.get('PARACLE_DATA_DIR') or _data_dir(env)}/service"


def _index_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(text)
    return text


def _mode(text: str) -> str:
    name = text.strip().lower()
    if not is_known(name):
        raise ValueError(text)
    return OLDER_NAMES.get(name, name)


def _networks(text: str) -> tuple[str, ...]:
    import ipaddress

    return tuple(str(ipaddress.ip_network(name, strict=False)) for name in names(text))


def _agents_dir(env: Environment) -> str:
    return str(home(env) / ".config/paracle/agents")


@dataclass(frozen=True)
class Settings:
    """All of them, resolved. Build it with load_settings(), or directly in a test."""

    mode: str = row(
        Setting("SANDBOX_MODE", "which backend makes the sandboxes", _mode,
                f"one of {', '.join(MODES)}, or a backend that is installed"), "auto"
    )  # fmt: skip
    default_timeout_seconds: int = number(
        "PARACLE_SANDBOX_DEFAULT_TIMEOUT", 300, "limit of one execution", 10, 3600
    )
    default_memory_mb: int = number(
        "PARACLE_SANDBOX_DEFAULT_MEMORY_MB", 512, "memory of a sandbox", 128, 16384
    )
    default_cpu_cores: float = number(
        "PARACLE_SANDBOX_DEFAULT_CPU_CORES", 1.0, "CPU of a sandbox, in cores", 0.1, 16.0
    )
    network_mode: NetworkMode = choice(  # noqa: RUF009 (a string, like the others)
        "PARACLE_SANDBOX_NETWORK_MODE", "none", ("none", "bridge", "host"), "network of a sandbox"
    )
    read_only_filesystem: bool = flag(
        "PARACLE_SANDBOX_READ_ONLY_FS", True, "keep the root of a sandbox read-only"
    )
    drop_capabilities: bool = flag(
        "PARACLE_SANDBOX_DROP_CAPABILITIES", True, "drop every Linux capability inside"
    )
    allow_degraded: tuple[str, ...] = row(
        Setting("PARACLE_SANDBOX_ALLOW_DEGRADED", "layers that sandboxes may do without here",
                layers, f"any of {', '.join(LAYERS)}, with commas between", env_only=True), ()
    )  # fmt: skip
    log_level: str = choice(
        "PARACLE_SANDBOX_LOG_LEVEL", "warning", ("debug", "info", "warning", "error", "critical"),
        "how much the command line logs",
    )  # fmt: skip
    state_dir: str = directory(
        "PARACLE_STATE_DIR", _state_dir, "records of the live sandboxes; gone after a reboot"
    )
    data_dir: str = directory("PARACLE_DATA_DIR", _data_dir, "templates, and the workspace volume")
    stock: int = number(
        "PARACLE_STOCK", 4, "children the native backend keeps forked ahead of need", 0, 256
    )
    python: str | None = text(
        "PARACLE_PYTHON", None, "interpreter inside native sandboxes", env_only=True
    )
    template_build: bool = flag(
        "PARACLE_TEMPLATE_BUILD", True, "build a missing template on its first use"
    )
    uid_base: int = number(
        "PARACLE_UID_BASE", 1_900_000_000, "first of the host uids given to native sandboxes",
        100_000, 4_200_000_000,
    )  # fmt: skip
    failpoints: tuple[str, ...] = row(
        Setting("PARACLE_FAILPOINTS", "steps that fail on purpose, for tests", names,
                "names with commas between", env_only=True), ()
    )  # fmt: skip
    speed_off: tuple[str, ...] = row(
        Setting("PARACLE_SPEED", "what native sandboxes do without, for tests and benchmarks",
                speed, f"off, or any of {', '.join(SPEED)}, with commas between", env_only=True), ()
    )  # fmt: skip
    volumes: tuple[str, ...] = row(
        Setting("PARACLE_VOLUMES", "directories of the host that sandboxes may be given", names,
                "absolute paths with commas between", env_only=True), ()
    )  # fmt: skip
    docker_host: str | None = text(
        "DOCKER_HOST", None, "address of the Docker or Podman engine", env_only=True
    )
    docker_context: str | None = text(
        "DOCKER_CONTEXT", None, "Docker context to use", env_only=True
    )
    docker_config: str | None = text(
        "DOCKER_CONFIG", None, "folder of the Docker client's contexts", env_only=True
    )
    docker_runtime: str | None = text(
        "DOCKER_SANDBOX_RUNTIME", None, "OCI runtime of containers", env_only=True
    )
    docker_image: str = text("DOCKER_SANDBOX_IMAGE", "python:3.12-slim", "image for docker")
    docker_registry: str | None = text(
        "DOCKER_SANDBOX_REGISTRY", None, "registry that has paracle/* images", env_only=True
    )
    docker_warm: int = number(
        "DOCKER_SANDBOX_WARM", 0, "has no effect any more; is still accepted", 0, 64
    )
    docker_idle_timeout: float = number(
        "DOCKER_SANDBOX_TIMEOUT", 900.0, "seconds until an unused container is removed", 1.0, _DAY
    )
    docker_memory_mb: int = number(
        "DOCKER_SANDBOX_MEMORY", 512, "memory of a container", 128, 16384, mb=True
    )
    docker_cpu_cores: float = number("DOCKER_SANDBOX_CPU", 1.0, "CPU of a container", 0.1, 16.0)
    incus_socket: str | None = text(
        "INCUS_SOCKET", None, "socket of the local Incus server", env_only=True
    )
    incus_dir: str | None = text(
        "INCUS_DIR", None, "folder of the local Incus server", env_only=True
    )
    incus_conf: str | None = text(
        "INCUS_CONF", None, "folder of the Incus client, with its remotes", env_only=True
    )
    incus_warm: int = number(
        "INCUS_SANDBOX_WARM", 1, "stopped instances kept ready for each image", 0, 64
    )
    incus_image: str = text("INCUS_SANDBOX_IMAGE", "images:debian/12/cloud", "image for incus")
    incus_pool: str | None = text(
        "INCUS_SANDBOX_POOL", None, "storage pool for instances and their disks"
    )
    incus_type: str = choice(
        "INCUS_SANDBOX_TYPE", "container", ("container", "vm"), "kind of Incus instance"
    )
    incus_idle_timeout: float = number(
        "INCUS_SANDBOX_TIMEOUT", 900.0, "seconds until an unused instance is removed", 1.0, _DAY
    )
    incus_memory_mb: int = number(
        "INCUS_SANDBOX_MEMORY", 512, "memory of an instance", 128, 16384, mb=True
    )
    incus_cpu_cores: float = number("INCUS_SANDBOX_CPU", 1.0, "CPU of an instance", 0.1, 16.0)
    incus_remote: str = text("INCUS_REMOTE", "local", "Incus server to use")
    api_url: str | None = text(
        "SANDBOX_API_URL", None, "address of a remote sandbox service", env_only=True
    )
    api_key: str | None = text(
        "SANDBOX_API_KEY", None, "key for the remote sandbox service", env_only=True
    )
    api_user: str | None = text(
        "SANDBOX_API_USER", None, "user to act for, with a key for several", env_only=True
    )
    request_timeout: float = number(
        "SANDBOX_TIMEOUT", 60.0, "seconds a request to the remote service may take", 1.0, _DAY
    )
    api_host: str = text(
        "SANDBOX_API_HOST", "127.0.0.1", "where the service listens", env_only=True
    )
    api_port: int = number("SANDBOX_API_PORT", 8080, "port of the service; 0 takes any", 0, 65535)
    service_image: str = text("SANDBOX_DOCKER_IMAGE", "python:3.12-slim", "image of the service")
    service_idle_timeout: float = number(
        "SANDBOX_DOCKER_TIMEOUT", 900.0, "seconds until the service ends an unused sandbox", 1.0,
        _DAY,
    )  # fmt: skip
    service_memory_mb: int = number(
        "SANDBOX_DOCKER_MEMORY", 512, "memory of a user's sandbox", 128, 16384, mb=True
    )
    service_cpu_cores: float = number(
        "SANDBOX_DOCKER_CPU", 1.0, "CPU of a user's sandbox", 0.1, 16.0
    )
    service_disk_mb: int = number(
        "SANDBOX_DOCKER_DISK", 1024, "disk of a user's sandbox", 256, 10240, mb=True
    )
    max_containers: int = number(
        "SANDBOX_MAX_CONTAINERS", 10, "sandboxes the service has at most", 1, 100_000
    )
    save_timeout: float = number(
        "SANDBOX_SAVE_TIMEOUT", 30.0, "seconds that a sandbox may take for its files to be kept "
        "before it is removed", 1.0, _DAY,
    )  # fmt: skip
    service_dir: str = directory(
        "SANDBOX_DATA_DIR", _service_dir, "users' files, API keys and audit log of the service"
    )
    user_sandboxes: int = number("SANDBOX_USER_SANDBOXES", 5, "sandboxes of one user", 1, 100_000)
    user_cpu_cores: float = number(
        "SANDBOX_USER_CPU", 8.0, "CPU of all sandboxes of one user", 0.1, 100_000.0
    )
    user_memory_mb: int = number(
        "SANDBOX_USER_MEMORY", 4096, "memory of all sandboxes of one user", 128, 1 << 30, mb=True
    )
    user_disk_mb: int = number(
        "SANDBOX_USER_DISK", 10240, "disk of all sandboxes of one user", 256, 1 << 30, mb=True
    )
    user_rate: int = number(
        "SANDBOX_USER_RATE", 600, "executions of one user per minute", 1, 10_000_000
    )
    user_concurrent: int = number(
        "SANDBOX_USER_CONCURRENT", 16, "executions of one user at the same time", 1, 100_000
    )
    trusted_proxies: tuple[str, ...] = row(
        Setting("SANDBOX_TRUSTED_PROXIES", "proxies whose X-Forwarded-For names the client",
                _networks, "addresses or networks with commas between", env_only=True), ()
    )  # fmt: skip
    packages: bool = flag("SANDBOX_PACKAGES", True, "let sandboxes install packages")
    package_index: str | None = row(
        Setting("SANDBOX_PACKAGE_INDEX", "package index for sandboxes; unset, that of pip here",
                _index_url, "an http or https address", env_only=True), None
    )  # fmt: skip
    package_hosts: tuple[str, ...] = row(
        Setting("SANDBOX_PACKAGE_HOSTS", "other hosts of your own network with packages",
                names, "names or addresses with commas between, with a port where that matters",
                env_only=True), ()
    )  # fmt: skip
    audit_content: bool = flag(
        "SANDBOX_AUDIT_CONTENT", False, "keep commands and code in the audit log as well"
    )
    audit_file_mb: int = number(
        "SANDBOX_AUDIT_FILE", 64, "size at which the audit log begins a new file", 1, 1 << 20,
        mb=True,
    )  # fmt: skip
    agents_dir: str = directory("PARACLE_AGENTS_DIR", _agents_dir, "your own agents, a file each")
    google_key: str | None = text("GOOGLE_API_KEY", None, "key for Google's models", env_only=True)
    mistral_key: str | None = text(
        "MISTRAL_API_KEY", None, "key for Mistral's models", env_only=True
    )
    groq_key: str | None = text("GROQ_API_KEY", None, "key for models at Groq", env_only=True)
    daytona_key: str | None = text("DAYTONA_API_KEY", None, "key for Daytona", env_only=True)
    daytona_url: str = text(
        "DAYTONA_API_URL", "https://app.daytona.io/api", "address of Daytona", env_only=True
    )
    daytona_target: str | None = text(
        "DAYTONA_TARGET", None, "region of Daytona's sandboxes", env_only=True
    )
    daytona_image: str = text(
        "DAYTONA_SANDBOX_IMAGE", "python:3.12-slim", "image of Daytona's sandboxes"
    )
    mcp_key: str | None = text(
        "PARACLE_MCP_KEY", None, "key that clients of paracle mcp --http send", env_only=True
    )

    # Which rows the environment or the file has: no row itself.
    given: frozenset[str] = field(default=frozenset(), repr=False)
    # What the older keys of the file say of every sandbox: fields of its configuration.
    older: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    # The configuration file, for messages.
    file: str = field(default="config.toml", repr=False, compare=False)

    def waives(self, layer: str, config: SandboxConfig) -> bool:
        """Say whether a sandbox may do without a layer: the operator says so for all sandboxes, a
        caller for one."""
        return layer in self.allow_degraded or layer in config.allow_degraded

    def idle_timeout(self, backend: str) -> float | None:
        """Return the idle timeout of one kind of backend, set or by default; None for a kind that
        has none."""
        row = _IDLE_ROWS.get(backend)
        return float(getattr(self, row)) if row else None

    def for_service(self, backend: str) -> Settings:
        """Return the settings of a service. If its sandboxes are containers, what is set for
        containers holds where the service's own rows say nothing."""
        if _CONFIG_ROWS.get(backend) is not _CONTAINER_ROWS:
            return self
        wanted = {
            service: getattr(self, container)
            for container, service in _LIKE_NAMED.items()
            if container in self.given and service not in self.given
        }
        return replace(self, **wanted) if wanted else self

    @property
    def depends_on_backend(self) -> bool:
        """Say whether the default configuration is another one for some kind of backend."""
        rows = {*_CONTAINER_ROWS.values(), *_INCUS_ROWS.values()}
        return self.incus_type == "vm" or not self.given.isdisjoint(rows)

    def default_values(self, backend: str | None = None) -> dict[str, Any]:
        """Return the fields that are set for a sandbox without a configuration of its own. A field
        that was set for one kind of backend holds for that kind."""
        values = {
            "timeout_seconds": self.default_timeout_seconds,
            "memory_mb": self.default_memory_mb,
            "cpu_cores": self.default_cpu_cores,
            "network_mode": self.network_mode,
            "read_only_filesystem": self.read_only_filesystem,
            "drop_capabilities": self.drop_capabilities,
            **dict(self.older),
        }
        rows = _CONFIG_ROWS.get(backend or "", {})
        values.update({name: getattr(self, row) for name, row in rows.items() if row in self.given})
        if backend == "incus-vm":
            # Images of ours are for containers: no machine could be made of one.
            values["base_image"] = self.incus_image
        return values

    def default_config(self, backend: str | None = None) -> SandboxConfig:
        """Make the configuration of default_values(). Raises SandboxError."""
        from .config import SandboxConfig

        try:
            return SandboxConfig(**self.default_values(backend))
        except ValueError as error:
            raise SandboxError(f"{self.file}, section [sandbox]: {error}") from error


# Reading it.

# The older keys of the [sandbox] section, those of SandboxSettings.
SHARED_KEYS = frozenset(
    ["use_sandbox", "image", "work_dir", "memory_limit", "cpu_limit", "timeout", "network_enabled"]
)
# Those of them that say what a sandbox is like: the field of its configuration, the newer row that
# comes before, and how its text is read: a "false" in quotes is no yes, and half a second no zero.
_OLDER: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "image": ("base_image", "", str),
    "work_dir": ("working_dir", "", str),
    "memory_limit": ("memory_mb", "default_memory_mb", parse_memory_mb),
    "cpu_limit": ("cpu_cores", "default_cpu_cores", float),
    "timeout": ("timeout_seconds", "default_timeout_seconds", int),
    "network_enabled": (
        "network_mode", "network_mode", lambda text: "bridge" if parse_flag(text) else "none",
    ),
}  # fmt: skip


def settings_table() -> dict[str, Setting]:
    """The rows by field name, for documentation and its test."""
    rows = (row for row in fields(Settings) if "setting" in row.metadata)
    return {row.name: row.metadata["setting"] for row in rows}


def load_settings(env: Environment | None = None, path: str | Path | None = None) -> Settings:
    """Resolve all settings. Raises SandboxError that names the setting, its value and what is
    allowed. Keys of the file that are unknown are logged as a warning, once: it may be the file of
    another program, and a typo must not be silent."""
    env = os.environ if env is None else env
    file = _find_file(env, path)
    section = _section_of(file)
    name = "config.toml" if file is None else str(file)
    table = settings_table()
    _warn_of_unknown(sorted(set(section) - set(table) - SHARED_KEYS), file, table)
    values: dict[str, Any] = {}
    given = frozenset(key for key, row in table.items() if env.get(row.variable) or key in section)
    for key, setting in table.items():
        if env.get(setting.variable):
            values[key] = _parse(setting, setting.variable, env[setting.variable])
        elif key in section:
            values[key] = _from_file(setting, name, key, section[key])
        elif setting.derive is not None:
            values[key] = setting.derive(env)
    for container, service in _LIKE_NAMED.items():
        if service in given and container not in given:
            values[container] = values[service]
            given |= {container}
    older = tuple(_older_fields(section, given, name))
    return Settings(**values, given=given, older=older, file=name)


def read_section(env: Environment | None = None, path: str | Path | None = None) -> dict[str, Any]:
    """The ``[sandbox]`` section of config.toml; empty when there is no file or no section."""
    return _section_of(_find_file(os.environ if env is None else env, path))


def _section_of(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    import tomllib

    try:
        section = tomllib.loads(file.read_text(encoding="utf-8")).get("sandbox", {})
    except (OSError, ValueError) as error:
        raise SandboxError(f"Cannot read {file}: {error}{_way_out(str(file))}") from error
    if not isinstance(section, dict):
        raise SandboxError(f"{file}: sandbox must be a section, [sandbox]{_way_out(str(file))}")
    return section


def _way_out(file: str) -> str:
    """Advise what to do about a file of the working directory that may be another program's."""
    if file != "config.toml":
        return ""
    return (
        f". If {file} is another program's, name a file of your own: "
        f"PARACLE_CONFIG=FILE (PARACLE_CONFIG={os.devnull} for none)"
    )


def _warn_of_unknown(unknown: Sequence[str], file: Path | None, table: Iterable[str]) -> None:
    """Log a warning of unknown keys, once for each file."""
    if not unknown or file is None:
        return
    place = os.path.realpath(file)
    if place in _warned:
        return
    _warned.add(place)
    import difflib
    import logging

    shown = []
    for key in unknown[:_SHOWN_KEYS]:
        alike = difflib.get_close_matches(key, [*table, *SHARED_KEYS], 1, 0.8)
        shown.append(f"{key[:80]!r}" + (f" (is {alike[0]!r} meant?)" if alike else ""))
    if len(unknown) > _SHOWN_KEYS:
        shown.append(f"{len(unknown) - _SHOWN_KEYS} more")
    logging.getLogger(__name__).warning(
        "%s: nothing here reads these keys of [sandbox]: %s%s",
        file, ", ".join(shown), _way_out(str(file)),
    )  # fmt: skip


def _find_file(env: Environment, path: str | Path | None) -> Path | None:
    named = path or env.get("PARACLE_CONFIG")
    if named:
        file = Path(named)
        if not file.exists() or file.is_dir():
            raise SandboxError(f"There is no configuration file {file}")
        return file
    places = (Path("config.toml"), home(env) / ".config/paracle/config.toml")
    return next((place for place in places if os.path.isfile(place)), None)


def _from_file(setting: Setting, file: str, key: str, value: object) -> object:
    name = f"{file}: {key}"
    text = str(value)
    is_mode = setting.variable == "SANDBOX_MODE"
    if setting.env_only or (is_mode and is_for_the_user_alone(text.strip().lower())):
        raise SandboxError(
            f"{name} = {text!r} is not taken from a file; set {setting.variable}{_way_out(file)}"
        )
    if not setting.is_written(value):
        raise SandboxError(f"{name} = {text!r} is not allowed: {setting.allowed}{_way_out(file)}")
    return _parse(setting, name, text, _way_out(file))


def _parse(setting: Setting, name: str, text: str, advice: str = "") -> object:
    try:
        return setting.parse(text)
    except (ValueError, OverflowError) as error:
        shown = "***" if setting.variable.endswith("_KEY") else repr(text[:200])
        raise SandboxError(f"{name} = {shown} is not allowed: {setting.allowed}{advice}") from error


def _older_fields(
    section: Mapping[str, Any], given: frozenset[str], file: str = "config.toml"
) -> Iterator[tuple[str, Any]]:
    """Yield what the older keys of the section say, where the newer ones say nothing. Raises
    SandboxError."""
    for key, (name, newer, parse) in _OLDER.items():
        if key in section and newer not in given:
            try:
                yield name, parse(str(section[key]))
            except (ValueError, OverflowError) as error:
                raise SandboxError(
                    f"{file}: {key} = {section[key]!r} is not allowed: {error}"
                ) from error
