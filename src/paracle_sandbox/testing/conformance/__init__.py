"""The contract of a backend, as checks that run on any backend.

A backend passes when every check passes on it. A feature that a machine does not allow, such as a
limit without cgroups, is reported as missing and never skipped silently. The checks need no test
framework: our test modules make tests of them, and ``paracle sandbox test`` runs the quick ones on
a user's machine.
"""

from __future__ import annotations

from .case import Case
from .expect import CheckFailed
from .registry import FEATURES, Check, check
from .runner import all_checks, features_of, run_check, run_quick

__all__ = [
    "FEATURES",
    "Case",
    "Check",
    "CheckFailed",
    "all_checks",
    "check",
    "features_of",
    "run_check",
    "run_quick",
]
