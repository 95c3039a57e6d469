"""Python that remembers: an interpreter kept in a sandbox, cell after cell."""

from .cells import CellError, CellResult
from .session import PythonSession

__all__ = ["CellError", "CellResult", "PythonSession"]
