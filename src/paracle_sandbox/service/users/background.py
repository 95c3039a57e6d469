"""Users' commands that run in the background, and their output until somebody removes them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ...errors import SandboxError
from ..errors import NotFound, TooMany
from .executions import MAX_OUTPUT, Program, Run, Runner
from .user_sandboxes import UserSandboxes

logger = logging.getLogger(__name__)

MAX_COMMANDS = 100
# For the commands of one user that have ended.
MAX_KEPT_OUTPUT = 16 << 20


class BackgroundCommands:
    """Starts commands that outlive their request, and remembers them with their sandbox."""

    def __init__(self, runner: Runner, sandboxes: UserSandboxes) -> None:
        self._runner = runner
        self._sandboxes = sandboxes
        self._runs: dict[str, dict[str, Run]] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        sandboxes.when_removed(self.forget)

    async def start(self, user_id: str, program: Program) -> Run:
        """Start it and return; it stays in the list until it is removed."""
        known = self._runs.get(user_id, {})
        self._forget_old(known)
        if len(known) >= MAX_COMMANDS:
            raise TooMany(f"{MAX_COMMANDS} background commands run; remove one first", 1)
        begun: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
        watcher = asyncio.create_task(self._watch(user_id, program, begun))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        run = await begun
        self._runs.setdefault(user_id, {})[run.command_id] = run
        return run

    async def _watch(self, user_id: str, program: Program, begun: asyncio.Future[Run]) -> None:
        # With a consumer, output beyond what is kept is dropped and does not end the command.
        quiet: dict[str, Any] = {
            "max_output": MAX_OUTPUT,
            "on_output_bytes": lambda name, data: None,
        }
        try:
            async with self._runner.running(user_id, program, **quiet) as run:
                begun.set_result(run)
                await run.command.wait()
        except Exception as error:
            if not begun.done():
                begun.set_exception(error)
            elif not isinstance(error, SandboxError):
                logger.exception("A background command broke")

    def _forget_old(self, known: dict[str, Run]) -> None:
        """Forget the oldest that have ended, when they are many or their output is much."""
        ended = [run for run in known.values() if run.command.poll() is not None]
        kept = sum(run.kept_bytes for run in ended)
        for run in ended:
            if len(known) < MAX_COMMANDS and kept <= MAX_KEPT_OUTPUT:
                return
            kept -= run.kept_bytes
            del known[run.command_id]

    @property
    def user_count(self) -> int:
        """How many users have commands here."""
        return len(self._runs)

    def all(self, user_id: str) -> list[Run]:
        self._sandboxes.find(user_id)  # so that the answer reports a loss
        return list(self._runs.get(user_id, {}).values())

    def get(self, user_id: str, command_id: str) -> Run:
        self._sandboxes.find(user_id)
        try:
            return self._runs[user_id][command_id]
        except KeyError:
            raise NotFound("There is no such command") from None

    async def remove(self, user_id: str, command_id: str) -> Run:
        run = self.get(user_id, command_id)
        await run.command.kill()
        known = self._runs.get(user_id, {})
        known.pop(command_id, None)
        if not known:
            self._runs.pop(user_id, None)
        return run

    def forget(self, user_id: str) -> None:
        """Forget a user's commands, whose sandbox is gone."""
        self._runs.pop(user_id, None)

    async def close(self) -> None:
        for watcher in list(self._watchers):
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
