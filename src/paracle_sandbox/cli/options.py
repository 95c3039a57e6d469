"""Options that several commands share, and what they mean."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import InRange, OneOf, SandboxConfig
from ..errors import SandboxError
from ..host.backend_names import is_known, known_names
from ..settings import Settings, load_settings
from .exit_codes import UsageFault
from .log_lines import log_to_stderr
from .parser import Command

# The options that are fields of SandboxConfig. Its table has the ranges, defaults and texts.
CONFIG_FIELDS = {
    "--cpu": "cpu_cores", "--memory": "memory_mb", "--disk": "disk_mb",
    "--timeout": "timeout_seconds", "--network": "network_mode",
}  # fmt: skip
# A whole number that whatever it is given to checks.
ANY_COUNT = InRange(int, -math.inf, math.inf)


def add_config_options(
    command: Command, *flags: str, defaults: Mapping[str, Any] | None = None
) -> None:
    """Declare options that are fields of SandboxConfig, which checks their values. Those that are
    not given are None, unless ``defaults`` has another value."""
    table = SandboxConfig.__dataclass_fields__
    for flag in flags:
        name = CONFIG_FIELDS[flag]
        check, help = table[name].metadata["check"], table[name].metadata["help"]
        default = (defaults or {}).get(flag)
        # It is not the parser's default: the settings may have another.
        shown = "" if default is not None else f" [default: {table[name].default}]"
        choices: Sequence[str] = ()
        metavar = "NUMBER"
        if isinstance(check, OneOf):
            choices, metavar = check.choices, "|".join(check.choices)
        elif isinstance(check, InRange):
            help = f"{help} ({check.kind(check.low)}-{check.kind(check.high)})"
        command.option(
            flag, dest=name, metavar=metavar, help=f"{help}{shown}", default=default,
            choices=choices,
        )  # fmt: skip


def given_limits(given: Namespace) -> dict[str, Any]:
    """Return the fields of SandboxConfig; those that were not given are None."""
    return {name: getattr(given, name, None) for name in CONFIG_FIELDS.values()}


def add_json(command: Command, help: str = "Print one JSON document and nothing else.") -> None:
    command.switch("--json", dest="as_json", help=help)


def add_verbose(command: Command, help: str = "Tell more.") -> None:
    command.switch("--verbose", "-v", help=help)


def add_backend(command: Command) -> None:
    """Declare ``--backend`` of a command that makes sandboxes."""
    _add_backend(command, "auto, native, docker, ... [default: auto]")


def add_listed_backend(command: Command) -> None:
    """Declare ``--backend`` of a command that looks for sandboxes."""
    _add_backend(command, "Only this one's. [default: all here]")


def _add_backend(command: Command, help: str) -> None:
    command.option("--backend", metavar="NAME", help=help, complete=complete_backend)


def add_allow_degraded(command: Command) -> None:
    command.option(
        "--allow-degraded", metavar="LAYER", is_list=True,
        help="Do without this layer; cgroup or firewall.",
    )  # fmt: skip


def add_terminal(command: Command) -> None:
    command.switch("-i", dest="interactive", help="Pass stdin on, which is done anyway; for -it.")
    command.switch("-t", dest="tty", help="Give the program a terminal.")


def add_env(command: Command) -> None:
    command.option("--env", metavar="NAME=VALUE", is_list=True, help="Set a variable; repeatable.")


def settings_or_fault() -> Settings:
    """Load the settings. Raises UsageFault for a wrong one."""
    try:
        settings = load_settings()
    except SandboxError as error:
        raise UsageFault(str(error)) from None
    log_to_stderr(settings.log_level, with_level=settings.log_level in ("debug", "info"))
    return settings


def complete_backend(incomplete: str) -> list[str]:
    """Offer names of backends for the TAB key."""
    return [name for name in known_names() if name.startswith(incomplete)]


def complete_template(incomplete: str) -> list[str]:
    from ..backends.registry import template_names

    return [name for name in template_names() if name.startswith(incomplete)]


def check_backend(name: str | None) -> None:
    if name is not None and not is_known(name):
        raise UsageFault(f"--backend: there is no {name!r}; known are {', '.join(known_names())}")


def check_terminal(wanted: bool) -> None:
    """Refuse to lend the user's terminal to a program on Windows, which has not the mode for it."""
    if wanted and sys.platform == "win32":
        raise UsageFault("-t and shell need a terminal of Unix, and this is Windows: use WSL 2")


def waived_layers(names: Sequence[str]) -> frozenset[str]:
    """Read the layers that ``--allow-degraded`` names. Raises UsageFault."""
    from ..settings import LAYERS, layers

    try:
        return frozenset(layers(",".join(names)))
    except ValueError as error:
        raise UsageFault(f"--allow-degraded: {error}; known are {', '.join(LAYERS)}") from None
