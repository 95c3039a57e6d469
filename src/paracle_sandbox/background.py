"""Keep an event loop in a thread, and the backends that live in it, for run().

A process has one such worker. It starts with the first call of run(), serves all threads, and ends
with the process; a child that was forked makes its own. The caller's thread waits, calls the
callbacks meanwhile, and passes an interrupt on.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from .backends.base import Backend
from .backends.registry import get_backend
from .errors import BackendUnavailableError, SandboxError
from .manager import SandboxManager
from .results import ExecutionResult
from .sandbox.output import TextCallback
from .settings import Settings, load_settings

_LOOK_SECONDS = 0.1
_CLOSE_SECONDS = 30.0

Work = Callable[[], Coroutine[Any, Any, ExecutionResult]]


class Call:
    """Waits for one run() on the side of the caller, and calls the callbacks meanwhile."""

    def __init__(self) -> None:
        # Callbacks to call; None once the result is there.
        self._wanted: SimpleQueue[tuple[TextCallback, str, Future[object]] | None] = SimpleQueue()

    def in_caller(self, callback: TextCallback | None) -> TextCallback | None:
        """Make a callback for the worker, which has the caller call the given one."""
        if callback is None:
            return None

        async def called(text: str) -> None:
            answer: Future[object] = Future()
            self._wanted.put((callback, text, answer))
            result = await asyncio.wrap_future(answer)
            if inspect.isawaitable(result):
                await result

        return called

    def wait_for(self, running: _Running) -> ExecutionResult:
        """Wait for the result. An interrupt cancels the work, waits until nothing of it is left,
        and is raised then: it reaches only this thread."""
        running.outcome.add_done_callback(lambda _: self._wanted.put(None))
        try:
            self._serve(running.outcome)
        except BaseException:
            running.cancel()
            with suppress(Exception, asyncio.CancelledError):
                running.outcome.exception()  # which waits for it
            raise
        return running.outcome.result()

    def _serve(self, outcome: Future[ExecutionResult]) -> None:
        """Call callbacks until there is an outcome. In a notebook an interrupt is raised here;
        under asyncio.run() it cancels the task that called us, which has to be looked for."""
        caller = _current_task()
        before = caller.cancelling() if caller else 0
        while not outcome.done():
            try:
                wanted = self._wanted.get(timeout=_LOOK_SECONDS if caller else None)
            except Empty:
                wanted = None
            if caller and caller.cancelling() > before:
                raise asyncio.CancelledError
            if wanted is not None:
                callback, text, answer = wanted
                try:
                    answer.set_result(callback(text))
                except Exception as error:  # noqa: BLE001  it is the callback's, and told as such
                    answer.set_exception(error)


@dataclass
class _Running:
    """Work in the worker's loop."""

    outcome: Future[ExecutionResult]
    cancel: Callable[[], object]


@dataclass
class _Kept:
    """A backend that was opened for these settings, and how many calls use it now."""

    name: str | None
    settings: Settings
    backend: Backend
    users: int = 0


class _Worker:
    """An event loop in a thread of its own, and the backends that live in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._kept: list[_Kept] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.name = "paracle-run"
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Work) -> _Running:
        """Have the loop do the work, in the context of the caller."""
        outcome: Future[ExecutionResult] = Future()
        tasks: list[asyncio.Task[ExecutionResult]] = []

        def end(task: asyncio.Task[ExecutionResult]) -> None:
            if task.cancelled():
                outcome.set_exception(asyncio.CancelledError())
            elif error := task.exception():
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def begin() -> None:
            tasks.append(self._loop.create_task(work()))
            tasks[0].add_done_callback(end)

        def cancel() -> None:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        self._loop.call_soon_threadsafe(begin, context=contextvars.copy_context())
        return _Running(outcome, cancel)

    def manager(self, backend: Backend | str | None) -> _Use:
        return _Use(self._kept, backend)

    def close(self) -> None:
        """Close the backends and end the loop. A backend that is not closed in time ends by itself,
        because its owner has ended."""
        closing = asyncio.run_coroutine_threadsafe(_close_all(self._kept), self._loop)
        with suppress(Exception):
            closing.result(_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class _Use:
    """A manager for one call, over a backend that is kept; ``async with`` it."""

    def __init__(self, kept: list[_Kept], backend: Backend | str | None) -> None:
        self._all = kept
        self._backend = backend
        self._kept: _Kept | None = None

    async def __aenter__(self) -> SandboxManager:
        settings = load_settings()
        backend = self._backend
        if not isinstance(backend, Backend):
            self._kept = await self._take(backend, settings)
            self._kept.users += 1
            backend = self._kept.backend
        self._manager = SandboxManager(backend=backend, settings=settings)
        return self._manager

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self._manager.close()
        finally:
            if self._kept is not None:
                self._kept.users -= 1
                if isinstance(error, BackendUnavailableError):
                    await self._drop(self._kept)  # the next call begins anew

    async def _take(self, name: str | None, settings: Settings) -> _Kept:
        """Return the backend that is kept for these settings, opened if need be. One that is kept
        for other settings and not in use is closed: the settings have changed."""
        for kept in [one for one in self._all if not one.users and one.settings != settings]:
            await self._drop(kept)
        for kept in self._all:
            if (kept.name, kept.settings) == (name, settings):
                return kept
        kept = _Kept(name, settings, get_backend(name, settings))
        self._all.append(kept)
        return kept

    async def _drop(self, kept: _Kept) -> None:
        if kept in self._all:
            self._all.remove(kept)
        if not kept.users:
            with suppress(SandboxError, OSError):
                await kept.backend.close()


async def _close_all(kept: list[_Kept]) -> None:
    while kept:
        with suppress(Exception):  # the process ends: a failure could not be handled
            await kept.pop().backend.close()


_workers: list[_Worker] = []
_workers_lock = threading.Lock()


def worker() -> _Worker:
    """Return the worker of this process; the first call starts it."""
    with _workers_lock:
        if not _workers:
            _workers.append(_Worker())
        return _workers[0]


# Workers of the process that this one was forked from. They are referred to for ever: to close them
# would disturb the parent, with which they are shared.
_inherited: list[_Worker] = []


def _forget_after_fork() -> None:
    global _workers_lock
    _workers_lock = threading.Lock()
    for worker in _workers:
        atexit.unregister(worker.close)
    _inherited.extend(_workers)
    _workers.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_after_fork)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
