"""Print what ``execute`` tells a person on stderr, before the program and after it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import output

if TYPE_CHECKING:
    from ..config import SandboxConfig
    from ..results import Stats
    from .program import Outcome


def show_config(config: SandboxConfig, flags: Mapping[str, str]) -> None:
    """Show the values that hold; ``flags`` are fields of the configuration, with their options."""
    rows = [(flag, str(getattr(config, name))) for name, flag in flags.items()]
    # What a variable holds may be a secret; its name is enough.
    rows[-1] = ("--env", ", ".join(config.env_vars))
    output.table("Configuration", ("Flag", "Value"), rows, sys.stderr)


def show_end(outcome: Outcome, verbose: bool) -> None:
    """Say how the program ended, and what it used."""
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
    received, sent = stats["network_rx_bytes"], stats["network_tx_bytes"]
    unknown = received is None or sent is None
    rows.append(("network", "not known (the host's)" if unknown else f"{received} in, {sent} out"))
    if "monitoring" in stats:
        monitoring = stats["monitoring"]
        for name, seen in (("averages", monitoring["averages"]), ("peaks", monitoring["peaks"])):
            rows.append(
                (name, f"{seen['cpu_percent']:.1f} % CPU, {seen['memory_mb']:.1f} MB memory")
            )
        rows.append(("samples", str(monitoring["history_samples"])))
    output.table("Used", ("", ""), rows, sys.stderr)
