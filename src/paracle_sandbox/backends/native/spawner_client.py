"""The owner's handle on a spawner process: start it, ask it, notice its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections import deque
from typing import Any

from ...channel.frames import to_json
from ...errors import BackendUnavailableError, SandboxExecutionError
from .descriptors import is_shortage, no_descriptor
from .obstacles import explain
from .spawner_process import END_SECONDS, Process, launch, withdraw

_MAX_MESSAGE = 1 << 16
_START_SECONDS = 60.0


class Spawner:
    """One spawner process and the requests under way to it."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._unsent: deque[bytes] = deque()
        self._waits_for_room = False
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self.posture: dict[str, Any] = {}
        self.closed = False

    @classmethod
    async def start(cls, python: str, options: dict[str, Any]) -> Spawner:
        """Raises BackendUnavailableError when it cannot come up; the message names the step."""
        told = json.dumps(options).encode()
        if stale := withdraw(python, told):
            await asyncio.to_thread(stale.end)
        try:
            launched = launch(python)
            try:
                launched.tell(told)
            except OSError:
                await asyncio.to_thread(launched.end)
                raise
        except OSError as error:
            if is_shortage(error):
                raise no_descriptor() from error
            raise BackendUnavailableError(
                f"The native spawner could not be started with {python}: {error.strerror}. Set "
                "PARACLE_PYTHON to a Python that this user can execute.",
                step="start",
            ) from error
        spawner = cls(launched.process, launched.control)
        try:
            spawner._attach()
            spawner._ready = asyncio.get_running_loop().create_future()
            spawner.posture = await asyncio.wait_for(spawner._ready, _START_SECONDS)
        except TimeoutError:
            await spawner.close()
            raise BackendUnavailableError("The native spawner did not start in time.") from None
        except _StartFailed as failed:
            await spawner.close()
            raise await asyncio.to_thread(explain, python, failed.step, failed.message) from None
        except BaseException:
            await spawner.close()
            raise
        return spawner

    def _attach(self) -> None:
        """Listen on the event loop that runs now; a backend may outlive one asyncio.run()."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._detach()
        self._loop = loop
        loop.add_reader(self._control, self._on_packet)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
        self._waits_for_room = False

    async def request(self, op: str, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """The answer and the descriptors that came with it."""
        asked = self.ask(op, **arguments)
        try:
            return await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                _close(asked.result()[1])  # it came in the same moment
            raise

    def ask(self, op: str, **arguments: Any) -> asyncio.Future[tuple[dict[str, Any], list[int]]]:
        """Send a request, and return a future of the answer. An answer that is not waited for any
        more is dropped when it comes."""
        self._attach()
        if self.closed:
            raise _gone()
        number = next(self._numbers)
        future: asyncio.Future[tuple[dict[str, Any], list[int]]]
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._unsent.append(to_json({"op": op, "request": number, **arguments}))
        self._send()
        return future

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for an answer."""
        return not any(not future.done() for future in self._answers.values())

    def _send(self) -> None:
        """Send what can be sent now, and the rest when there is room. Packets keep their order."""
        assert self._loop is not None
        while self._unsent and not self.closed:
            try:
                self._control.send(self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._control, self._send)
                self._waits_for_room = True
                return
            except OSError:
                self._on_end()
                return
            self._unsent.popleft()
        if self._waits_for_room and not self.closed:
            self._waits_for_room = False
            self._loop.remove_writer(self._control)

    def _on_packet(self) -> None:
        while not self.closed:
            try:
                packet, fds, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._on_end()
                return
            self._dispatch(json.loads(packet), fds)

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> None:
        event = message.get("event")
        if event == "ready" and self._ready is not None:
            self._ready.set_result(message)
        elif event == "failed" and self._ready is not None:
            # Later than that, the end of the connection says it all.
            if not self._ready.done():
                self._ready.set_exception(_StartFailed(message))
        elif event == "die":  # only with a failpoint: see jail/spawner.py
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            future = self._answers.pop(message.get("request", 0), None)
            if future is not None and not future.done():
                future.set_result((message, fds))
                return
        # The request was cancelled: what came with the answer must not leak.
        _close(fds)

    def _on_end(self) -> None:
        if self.closed:
            return
        self._hang_up()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                BackendUnavailableError(f"The native spawner failed to start: {self._last_words()}")
            )

    def _hang_up(self) -> None:
        self.closed = True
        self._detach()
        self._control.close()
        for future in self._answers.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(_gone())

    def _last_words(self) -> str:
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(OSError):
            return (self._process.stderr.read() or b"").decode(errors="replace").strip()[-2000:]
        return ""

    async def close(self) -> None:
        """Hang up; the spawner removes everything and ends. Waits until it has."""
        if not self.closed:
            self._hang_up()
        try:
            await self._ended()
        except BaseException:
            # Cancelled: somebody has to wait for it all the same.
            asyncio.get_running_loop().run_in_executor(None, self._process.finish)
            raise
        if self._process.poll() is None:
            # It has not ended in time: its end by force takes as long as that of all it has made.
            await asyncio.to_thread(self._process.finish, 0.0)
        else:
            self._process.finish(0.0)

    async def _ended(self) -> None:
        """Wait on the event loop: a thread for it would be the only one of a short command."""
        try:
            watched = self._process.watch()
        except OSError:  # no descriptor is left
            await asyncio.to_thread(self._process.finish)
            return
        if watched is None:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(watched, ended.set)
        try:
            async with asyncio.timeout(END_SECONDS):
                await ended.wait()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(watched)
            os.close(watched)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _gone() -> SandboxExecutionError:
    return SandboxExecutionError("The native spawner has ended; its sandboxes are gone.")


class _StartFailed(Exception):
    """A step of the start failed, before anybody has looked for the cause."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__(message)
        self.step = str(message.get("step"))
        self.message = str(message.get("message"))
