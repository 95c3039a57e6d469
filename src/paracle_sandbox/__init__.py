"""Run untrusted code for AI agents: one library over any isolation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.0.1"
