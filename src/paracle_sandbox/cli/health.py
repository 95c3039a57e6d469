"""``paracle sandbox health`` and ``test``: whether sandboxes work here, shown by using one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from .. import audit
from ..errors import SandboxError
from . import endings, output
from .execute import Order, make_config
from .options import check_backend, settings_or_fault

if TYPE_CHECKING:
    from ..backends.base import Backend, Health
    from ..config import SandboxConfig
    from ..settings import Settings

_SUITE = "paracle_sandbox.testing.conformance"
_TEST_SECONDS = 30


def health(backend: str | None, verbose: bool, as_json: bool) -> int:
    from ..backends.catalog import examine, taken

    settings = settings_or_fault()
    check_backend(backend)
    found = endings.run(examine(backend, settings))
    name = taken(backend, settings)
    available = any(one.available for one in found if one.backend == name)
    if as_json:
        output.say_json({"available": available, "backends": [asdict(one) for one in found]})
    else:
        _show(found, verbose)
        output.say("✅ Sandbox Available" if available else "❌ Sandbox Not Available")
        if not available:
            _explain(found)
    return endings.SUCCESS if available else endings.FAILURE


def _show(found: Sequence[Health], verbose: bool) -> None:
    output.say("🔍 Sandbox Health Check")
    rows = [(one.backend, output.tick(one.available), one.detail, _remedy(one)) for one in found]
    output.table("", ("Backend", "Works", "Detail", "Remedy"), rows)
    for one in found:
        layers = [
            (layer.name, output.tick(layer.in_force), layer.detail, layer.remedy)
            for layer in one.layers
        ]
        if layers:
            output.say()
            output.table(
                f"Isolation of {one.backend}", ("Layer", "In force", "Detail", "Remedy"), layers
            )
    output.say()
    if verbose:
        output.say_json([asdict(one) for one in found])


def _explain(found: Sequence[Health]) -> None:
    for one in found:
        output.say(f"Error: {one.backend}: {one.detail}")
        if _remedy(one):
            output.say(f"  {one.remedy}")


def _remedy(one: Health) -> str:
    """What to do, unless the detail says it already."""
    return "" if one.remedy in one.detail else one.remedy


def test(backend: str | None, cpu: float, memory: int, as_json: bool) -> int:
    settings = settings_or_fault()
    check_backend(backend)
    limits = {"cpu_cores": cpu, "memory_mb": memory, "timeout_seconds": _TEST_SECONDS}
    config = make_config(Order("-", limits=limits), settings)
    # The checks provoke security events on purpose; those of a real program are still logged.
    audit.LOGGER.disabled = True
    report = _Report(quiet=as_json)
    try:
        passed = endings.run(_test(backend, settings, config, report))
    except SandboxError as error:
        report("sandbox", False, str(error))
        passed = False
    if as_json:
        output.say_json({"passed": passed, "checks": report.checks})
    else:
        output.say("✅ Test Passed" if passed else "❌ Test Failed")
    return endings.SUCCESS if passed else endings.FAILURE


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
    from ..backends.catalog import opened

    async with opened(name, replace(settings, stock=0)) as backend:
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
