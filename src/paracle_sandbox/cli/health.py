"""``paracle sandbox health`` and ``test``: whether sandboxes work here, shown by using one."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ..audit import security_events
from ..errors import SandboxError
from . import exit_codes, output
from .execute import Order, make_config
from .options import check_backend, settings_or_fault

if TYPE_CHECKING:
    from ..backends.base import Backend, Health
    from ..config import SandboxConfig
    from ..settings import Settings

_SUITE = "paracle_sandbox.testing.conformance"
_TEST_SECONDS = 30
_PACKAGE, _COMMAND = "paracle_sandbox", "paracle"
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z`])")


def health(backend: str | None, verbose: bool, as_json: bool) -> int:
    from ..backends.registry import examine, resolve_name

    settings = settings_or_fault()
    check_backend(backend)
    found = exit_codes.run(examine(backend, settings))
    name = resolve_name(backend, settings, quiet=True)
    available = any(one.available for one in found if one.backend == name)
    for shadow in find_shadows():
        output.note(f"⚠️  {shadow}")
    if as_json:
        output.say_json({"available": available, "backends": [asdict(one) for one in found]})
    else:
        _show(found, name, available, verbose)
    return exit_codes.SUCCESS if available else exit_codes.FAILURE


def find_shadows() -> list[str]:
    """Other installed distributions that bring our package or our command: which of the two runs
    is then a matter of what was installed last."""
    from importlib.metadata import entry_points, packages_distributions

    others = {
        name: f"the package {_PACKAGE}"
        for name in packages_distributions().get(_PACKAGE, [])
        if not _is_ours(name)
    }
    for script in entry_points(group="console_scripts", name=_COMMAND):
        if script.dist is not None and not _is_ours(script.dist.name):
            both = f"{others[script.dist.name]} and " if script.dist.name in others else ""
            others[script.dist.name] = f"{both}the command {_COMMAND}"
    return [
        f"Another distribution, {name}, brings {what} as well, and may run in the place of ours: "
        f"pip uninstall {name}, then install Paracle Sandbox again."
        for name, what in sorted(others.items())
    ]


def _is_ours(distribution: str) -> bool:
    return re.sub(r"[-_.]+", "-", distribution).lower() == "paracle-sandbox"


def _show(found: Sequence[Health], name: str, available: bool, verbose: bool) -> None:
    """The verdict, what holds, what is missing; then what to do about it, in full."""
    output.say("🔍 Sandbox Health Check")
    if available:
        output.say_in("bold green", f"✅ Sandbox Available: {name}")
    else:
        output.say_in("bold red", "❌ Sandbox Not Available")
    works = [one for one in found if one.available]
    others = [one for one in found if not one.available]
    told: set[str] = set()
    for one in works:
        _show_working(one, told)
    if others and available and not verbose:
        names = ", ".join(one.backend for one in others)
        output.say(f"Not available here: {names} (--verbose tells why)")
    else:
        for one in others:
            _tell(f"✗ {one.backend}: {_text(one.detail)}", one.remedy, told)
    if verbose:
        output.say_json([asdict(one) for one in found])


def _show_working(one: Health, told: set[str]) -> None:
    detail = f": {_text(one.detail)}" if one.detail else ""
    output.say_in("green", f"✓ {one.backend}{detail}")
    in_force = [layer.name for layer in one.layers if layer.in_force]
    if in_force:
        output.say(f"  in force: {', '.join(in_force)}")
    for layer in one.layers:
        if not layer.in_force:
            _tell(f"  ✗ {layer.name}: {_text(layer.detail)}", layer.remedy, told)


def _tell(text: str, remedy: str, told: set[str]) -> None:
    """What is missing and what to do about it, unless that was said already."""
    output.say_in("yellow", text.rstrip(": "))
    remedy = _text(remedy)
    if remedy and remedy not in text and remedy not in told:
        told.add(remedy)
        for line in remedy.split("\n"):
            output.say(f"      {line}")


def _text(said: str) -> str:
    """Without the advice to run this very command, which errors of creating a sandbox give."""
    kept = (one for one in _SENTENCE.split(said) if "paracle sandbox health" not in one)
    return " ".join(kept).strip()


def test(
    backend: str | None, cpu: float, memory: int, as_json: bool, allow_degraded: Sequence[str] = ()
) -> int:
    settings = settings_or_fault()
    check_backend(backend)
    limits = {"cpu_cores": cpu, "memory_mb": memory, "timeout_seconds": _TEST_SECONDS}
    order = Order("-", limits=limits, backend=backend, allow_degraded=allow_degraded)
    config = make_config(order, settings)
    # The checks provoke security events on purpose; those of a real program are still logged.
    security_events.LOGGER.disabled = True
    report = _Report(quiet=as_json)
    try:
        passed = exit_codes.run(_test(backend, settings, config, report))
    except SandboxError as error:
        report("sandbox", False, str(error))
        passed = False
    if as_json:
        output.say_json({"passed": passed, "checks": report.checks})
    else:
        output.say("✅ Test Passed" if passed else "❌ Test Failed")
    return exit_codes.SUCCESS if passed else exit_codes.FAILURE


class _Report:
    """Shows each check as it is done, and remembers it."""

    def __init__(self, quiet: bool) -> None:
        self.checks: list[dict[str, object]] = []
        self._quiet = quiet

    def __call__(self, name: str, passed: bool, detail: str = "") -> None:
        self.checks.append({"name": name, "passed": passed, "detail": detail})
        if not self._quiet:
            output.say(f"{output.tick(passed)} {name}{': ' if detail else ''}{detail}")


async def _test(
    name: str | None, settings: Settings, config: SandboxConfig, report: _Report
) -> bool:
    from ..backends.registry import open_backend

    async with open_backend(name, replace(settings, stock=0)) as backend:
        if importlib.util.find_spec(_SUITE) is not None:
            suite = importlib.import_module(_SUITE)
            return bool(await suite.run_quick(backend, report, config))
        return await _hello(backend, config, report)


async def _hello(backend: Backend, config: SandboxConfig, report: _Report) -> bool:
    from .program import Program, run_program

    outcome = await run_program(Program(b"print('Sandbox test OK')\n"), config, backend)
    command = outcome.result.get("result")
    passed = outcome.result["success"] and command is not None
    passed = passed and command is not None and command["stdout"] == "Sandbox test OK\n"
    report("runs a program", passed, "" if passed else outcome.result.get("error", "no output"))
    return passed
