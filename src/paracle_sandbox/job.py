"""One piece of code to run, complete before a sandbox is made for it.

Everything that can be wrong with the request itself (no such file, inputs that are not JSON, a
misspelt key) is found here, where it costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compat.sandbox_settings import full_config
from .config import SandboxConfig
from .errors import SandboxError
from .sandbox.command_options import Stdin, check_stdin, checked_timeout
from .sandbox.output import TextCallback

Inputs = Mapping[str, Any]

CODE_FILE = "agent_code.py"
INPUTS_FILE = "inputs.json"

_KEYS = frozenset(
    ["config", "inputs", "monitor", "rollback_on_error", "args", "stdin", "env", "timeout",
     "on_stdout", "on_stderr"]
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What to run, with what, and what to do with the sandbox of a failure."""

    source: bytes
    inputs: bytes | None = None
    monitor: bool = True
    rollback_on_error: bool = True
    args: tuple[str, ...] = ()
    stdin: Stdin = None
    env: Mapping[str, str] | None = None
    timeout: float | None = None
    on_stdout: TextCallback | None = None
    on_stderr: TextCallback | None = None

    @classmethod
    def prepare(
        cls,
        agent_code: str | Path,
        inputs: Inputs | None = None,
        *,
        args: Sequence[str] = (),
        stdin: Stdin = None,
        timeout: float | None = None,
        **rest: Any,
    ) -> Job:
        """Read and check the parts. Raises SandboxError that says which one is wrong, TypeError
        for what could not be meant."""
        check_stdin(stdin)
        if timeout is not None:
            timeout = _seconds(timeout)
        if isinstance(args, str):
            raise SandboxError("args must be a list of strings, not one string")
        source = read_source(agent_code)
        return cls(
            source, dump_inputs(inputs), args=tuple(args), stdin=stdin, timeout=timeout, **rest
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> tuple[Job, SandboxConfig | None]:
        """A job of a batch, and its own configuration if it has one."""
        if not isinstance(fields, Mapping) or "agent_code" not in fields:
            raise SandboxError("A job must be a dict with the key 'agent_code'")
        rest = {key: value for key, value in fields.items() if key != "agent_code"}
        unknown = sorted(map(str, set(rest) - _KEYS))
        if unknown:
            known = ", ".join(sorted(_KEYS))
            raise SandboxError(f"A job has no key {unknown[0]!r}; known are agent_code, {known}")
        config = rest.pop("config", None)
        own = None if config is None else full_config(config)
        return cls.prepare(fields["agent_code"], **rest), own


def _seconds(timeout: float) -> float:
    try:
        return checked_timeout(timeout)
    except ValueError as error:
        raise SandboxError(f"timeout must be positive, not {timeout}") from error


def read_source(agent_code: str | Path) -> bytes:
    """A Path is a file of the host, a str is always the code itself: code is often written by a
    model, and a line of it must never choose a file of the host."""
    if isinstance(agent_code, str):
        try:
            return agent_code.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"agent_code is not valid text: {error}") from error
    if not isinstance(agent_code, Path):
        raise SandboxError(f"agent_code must be a str or a Path, not {type(agent_code).__name__}")
    if not agent_code.is_file():
        raise SandboxError(f"Agent code file not found: {agent_code}")
    try:
        return agent_code.read_bytes()
    except OSError as error:
        raise SandboxError(f"Agent code file cannot be read: {error}") from error


def dump_inputs(inputs: Inputs | None) -> bytes | None:
    """The content of inputs.json; None when there is nothing to write."""
    if inputs is None:
        return None
    try:
        # NaN and the infinities are no JSON, although Python would write them.
        return json.dumps(inputs, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SandboxError(f"inputs cannot be written as JSON: {error}") from error
