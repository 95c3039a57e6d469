"""``paracle sandbox execute``: read what the user gave, run it, show what it did."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..backends.ahead import end_ahead, prepare_ahead
from ..errors import SandboxError
from ..quick_config import quick_config
from ..settings import Settings
from . import endings, output
from .endings import UsageFault
from .options import check_backend, settings_or_fault

if TYPE_CHECKING:
    from ..config import SandboxConfig
    from ..results import ExecutionResult, Stats
    from . import program

_FLAGS = {
    "cpu_cores": "--cpu", "memory_mb": "--memory", "disk_mb": "--disk",
    "timeout_seconds": "--timeout", "network_mode": "--network", "base_image": "--template",
    "env_vars": "--env",
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What the user asked for, flag by flag; ``limits`` are fields of SandboxConfig."""

    file: str
    args: Sequence[str] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    env: Sequence[str] = ()
    inputs: str | None = None
    output: str | None = None
    monitor: bool = True
    as_json: bool = False
    raw: bool = False
    verbose: bool = False
    backend: str | None = None


def execute(order: Order) -> int:
    # Everything that can be wrong with the order is found before anything is made for it.
    settings = settings_or_fault()
    check_backend(order.backend)
    config = make_config(order, settings, quick=True)
    source, inputs = _read_source(order.file), _read_inputs(order.inputs)
    check_output(order.output)
    if order.verbose:
        _show_config(config)
    # One sandbox needs no stock of children for the next.
    settings = replace(settings, stock=0)
    try:
        if order.backend is None and prepare_ahead(settings, config):
            _import_asyncio_alone()
        return _execute(order, source, inputs, config, settings)
    finally:
        end_ahead()


def _import_asyncio_alone() -> None:
    """Without TLS, which it can be without, and which is a tenth of all imports here: a sandbox of
    this machine has no use for it."""
    if "asyncio" in sys.modules or "ssl" in sys.modules:
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]
    try:
        import asyncio  # noqa: F401
    finally:
        del sys.modules["ssl"]


def _execute(
    order: Order, source: bytes, inputs: bytes | None, config: SandboxConfig, settings: Settings
) -> int:
    """What it imports takes as long as a sandbox does, which is being made meanwhile."""
    from . import program, streams

    job = program.Program(
        source=source,
        inputs=inputs,
        args=tuple(order.args),
        stdin=None if order.file == "-" else streams.piped_stdin(),
        monitor=order.monitor,
    )
    outlets = _Outlets(order.raw)
    if not order.as_json:
        job = replace(job, on_output=outlets)
    try:
        outcome = endings.run(_run(order, job, config, settings))
    except SandboxError as error:  # there was no sandbox: a result all the same
        _save_failure(order, error)
        raise
    _save(order.output, outcome.result)
    if order.as_json:
        output.say_json(outcome.result)
    else:
        outlets.end_line()
    if order.verbose or not order.as_json:
        _show_end(outcome, order.verbose)
    if outcome.error is not None:
        return endings.code_for(outcome.error)
    return endings.SUCCESS if outcome.result["success"] else endings.FAILURE


async def _run(
    order: Order, job: program.Program, config: SandboxConfig, settings: Settings
) -> program.Outcome:
    from ..backends.catalog import opened
    from . import program

    async with opened(order.backend, settings) as backend:
        return await program.run_program(job, config, backend)


class _Outlets:
    """Our stdout and stderr, as the program's."""

    def __init__(self, raw: bool) -> None:
        from . import streams

        self._outlets = {
            name: streams.Outlet(stream.fileno(), raw)
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))
        }

    def __call__(self, name: str, data: bytes) -> Awaitable[None] | None:
        return self._outlets[name].write(data)

    def end_line(self) -> None:
        for outlet in self._outlets.values():
            outlet.end_line()


# Reading the order


def make_config(order: Order, settings: Settings, *, quick: bool = False) -> SandboxConfig:
    """The settings' defaults, then the flags. Raises UsageFault that names the flag. ``quick``: if
    it can be, without the import of pydantic."""
    mode = order.backend or settings.mode
    values = settings.default_values(mode)
    values.update({name: value for name, value in order.limits.items() if value is not None})
    values["env_vars"] = dict(map(_assignment, order.env))
    if order.template is not None:
        values["base_image"] = _image_of(order.template)
    try:
        return quick_config(**values) if quick else _checked(values)
    except ValueError as error:
        from pydantic import ValidationError

        settings.default_config(mode)  # it may be the file's fault, and says so then
        assert isinstance(error, ValidationError)
        first = error.errors()[0]
        flag = _FLAGS.get(str(first["loc"][0]), str(first["loc"][0]))
        message = first["msg"].removeprefix("Value error, ")
        shown = "" if flag == "--env" else f" (got {first['input']!r})"
        raise UsageFault(f"{flag}: {message}{shown}") from None


def _checked(values: dict[str, Any]) -> SandboxConfig:
    from ..config import SandboxConfig

    return SandboxConfig(**values)


def _image_of(template: str) -> str:
    from ..backends.catalog import template_names

    names = template_names()
    if template not in names:
        raise UsageFault(f"--template: there is no {template!r}; known are {', '.join(names)}")
    return f"paracle/sandbox:{'latest' if template == 'default' else template}"


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageFault(f"--env: write NAME=VALUE, not {text!r}")
    return name, value


def _read_source(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    return _read(file, "File")


def _read_inputs(file: str | None) -> bytes | None:
    if file is None:
        return None
    try:
        inputs = json.loads(_read(file, "--inputs: file"))
    except (ValueError, RecursionError) as error:
        raise UsageFault(f"--inputs: {file} is not JSON: {error}") from None
    if not isinstance(inputs, dict):
        raise UsageFault(f"--inputs: {file} must hold a JSON object, {{...}}")
    return json.dumps(inputs).encode()


def _read(file: str, what: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except FileNotFoundError:
        raise UsageFault(f"{what} not found: {file}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageFault(f"{what} cannot be read: {file}: {reason}") from None


def check_output(file: str | None) -> None:
    """Before the program runs, so that its result is not lost. Until there is one, nothing is left:
    neither a new file, nor a pipe whose reader has been told that this is all."""
    if file is None:
        return
    try:
        is_new = not os.path.lexists(file)
        if is_new or not stat.S_ISFIFO(os.stat(file).st_mode):
            with open(file, "ab"):
                pass
        if is_new:
            os.unlink(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageFault(f"--output: cannot write {file}: {reason}") from None


# Showing the outcome


def _save(file: str | None, result: ExecutionResult) -> None:
    if file is not None:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(output.as_json(result) + "\n")


def _save_failure(order: Order, error: SandboxError) -> None:
    from ..executor import error_result

    result = error_result(error)
    _save(order.output, result)
    if order.as_json:
        output.say_json(result)


def _show_config(config: SandboxConfig) -> None:
    rows = [(flag, str(getattr(config, name))) for name, flag in _FLAGS.items()]
    # What a variable holds may be a secret; its name is enough.
    rows[-1] = ("--env", ", ".join(config.env_vars))
    output.table("Configuration", ("Flag", "Value"), rows, sys.stderr)


def _show_end(outcome: program.Outcome, verbose: bool) -> None:
    result = outcome.result
    if result["success"]:
        output.note("✅ Execution Successful")
    else:
        output.note("❌ Execution Failed")
        # What the program said itself has been shown already.
        code = result["result"]["exit_code"] if "result" in result else None
        reason = f"exit code {code}" if outcome.error is None else str(outcome.error)
        output.complain(reason)
    if "stats" in result:
        stats = result["stats"]
        if verbose:
            _show_stats(stats, result["sandbox_id"])
        else:
            output.notes([*zip(*_figures(stats), strict=True)])
    missing = result["posture"]["missing"] if "posture" in result else []
    if missing:
        output.note(f"Without: {', '.join(missing)} (see paracle sandbox health)")


def _figures(stats: Stats) -> list[tuple[str, str]]:
    return [
        ("time", f"{stats['duration_seconds']:.3f} s"),
        ("cpu", f"{stats['cpu_seconds']:.3f} s"),
        ("memory peak", f"{stats['memory_peak_mb']:.1f} of {stats['memory_limit_mb']} MB"),
        ("disk", f"{stats['disk_mb']:.1f} of {stats['disk_limit_mb']} MB"),
    ]


def _show_stats(stats: Stats, sandbox_id: str | None) -> None:
    rows = [("sandbox", str(sandbox_id)), *_figures(stats)]
    rows.append(("network", f"{stats['network_rx_bytes']} in, {stats['network_tx_bytes']} out"))
    if "monitoring" in stats:
        monitoring = stats["monitoring"]
        for name, seen in (("averages", monitoring["averages"]), ("peaks", monitoring["peaks"])):
            rows.append(
                (name, f"{seen['cpu_percent']:.1f} % CPU, {seen['memory_mb']:.1f} MB memory")
            )
        rows.append(("samples", str(monitoring["history_samples"])))
    output.table("Used", ("", ""), rows, sys.stderr)
