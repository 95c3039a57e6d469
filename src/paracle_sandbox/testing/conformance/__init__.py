"""The contract of a backend, stated once as checks that any backend can be put to.

A backend passes when every check passes on it. What a machine cannot keep (a limit without a
cgroup, say) is a feature that the backend lacks there, and is named, never passed over in
silence. The checks need no test framework: a test module of ours turns them into tests, and
``paracle sandbox test`` runs the quick ones on a user's machine.
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
