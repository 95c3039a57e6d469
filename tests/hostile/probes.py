"""Run probes: Python programs whose last line of output is JSON."""

from __future__ import annotations

import json
from typing import Any

from paracle_sandbox.sandbox.sandbox import Sandbox


async def report(sandbox: Sandbox, code: str, **options: Any) -> Any:
    """Run a probe inside and return its report."""
    result = await sandbox.run_code(code, **options)
    assert result["exit_code"] == 0, result
    return json.loads(result["stdout"].splitlines()[-1])
