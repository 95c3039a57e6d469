"""Keeps the terminals of a shell tool by name."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator

from ..sandbox.sandbox import Sandbox
from ..sandbox.terminal import Terminal
from .arguments import ArgumentFault

MAX_TERMINALS = 20


class Terminals:
    """Open terminals by name. They are forgotten when the client has another sandbox."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Sandbox, Terminal]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    async def get(self, sandbox: Sandbox, name: str, folder: str | None) -> Terminal:
        """Return the terminal of that name, which is made if there is none, in ``folder`` if it
        is given. Raises ArgumentFault when there are too many, or there is no such folder."""
        self._open = {key: entry for key, entry in self._open.items() if entry[0] is sandbox}
        if name not in self._open:
            if len(self._open) >= MAX_TERMINALS:
                raise ArgumentFault(f"{MAX_TERMINALS} terminals are open already; end some first.")
            self._open[name] = (sandbox, Terminal(sandbox))
        _, terminal = self._open[name]
        await terminal.init()
        if folder:
            await _change_directory(terminal, folder, sandbox.config.working_dir)
        return terminal

    async def close(self, name: str) -> None:
        """Close a terminal. It is no error if there is none of that name."""
        _, terminal = self._open.pop(name, (None, None))
        if terminal is not None:
            await terminal.close()

    async def close_all(self) -> None:
        for name in list(self._open):
            await self.close(name)


async def _change_directory(terminal: Terminal, folder: str, working_dir: str) -> None:
    """Change to a folder below the working directory. Raises ArgumentFault when that fails: the
    command is meant for that folder, and may do harm in another."""
    path = posixpath.join(working_dir, folder)
    moved = await terminal.run(f"command cd -- {shlex.quote(path)}")
    if moved["exit_code"]:
        raise ArgumentFault(
            f"Nothing was run: the terminal cannot go to {path}. {moved['stderr'].strip()}"
        )
