"""Python sessions: an interpreter in a sandbox that keeps variables from cell to cell."""

from .cells import CellError, CellResult
from .session import PythonSession

__all__ = ["CellError", "CellResult", "PythonSession"]
