"""A channel over a WebSocket that comes back after a break, without losing or doubling a byte.

receive() does all the reading: data for its caller, acknowledgements for the outbox. When the
connection breaks, receive() makes a new one, says how much it has, and sends again what the service
does not have. send() meanwhile only fills the outbox.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from websockets.asyncio.client import connect as any_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ...channel.resumable import (
    MAX_MESSAGE,
    Inbox,
    Outbox,
    OutOfStep,
    count_of,
    data_message,
    parse,
)
from ...errors import BackendUnavailableError, SandboxError
from ..base import Channel
from .answers import from_json
from .failures import remote_error

logger = logging.getLogger(__name__)

RESUME_SECONDS = 25.0
_PAUSE_SECONDS = 0.2
_OPEN_SECONDS = 10.0
# The service is there, and the sandbox is not, or not ours. Any other refusal may be a proxy's, or
# that of a service which is just starting.
_FOR_GOOD = (401, 403, 404, 409)


class connect(any_connect):
    """Connect, and follow no redirect: the key would go with it to wherever the answer says."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class RemoteChannel(Channel):
    """A channel that resumes. Open it with open()."""

    def __init__(self, address: str, headers: dict[str, str]) -> None:
        self._address = address
        self._headers = headers
        self._socket: Any = None
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._sending = asyncio.Lock()
        self._over = False
        self._abandoned = False

    @classmethod
    async def open(cls, address: str, headers: dict[str, str], sandbox_id: str) -> RemoteChannel:
        """Open the connection. Raises the error that the service names, as a request would;
        SandboxNotFoundError and BackendUnavailableError are among them."""
        channel = cls(address, headers)
        try:
            await channel._dial()
        except InvalidStatus as error:
            raise _refusal(error, sandbox_id) from error
        except (OSError, TimeoutError, WebSocketException, OutOfStep) as error:
            raise BackendUnavailableError(f"No channel to the sandbox: {error}") from error
        return channel

    async def receive(self) -> bytes:
        while not self._over:
            try:
                kind, payload = parse(await self._socket.recv(decode=False))
                if kind == "d":
                    await self._acknowledge(len(payload))
                    return payload
                if kind == "e":
                    self._over = True
                else:
                    self._outbox.acknowledge(count_of(payload))
            except ConnectionClosed:
                await self._resume()
            except OutOfStep as error:
                logger.warning("The channel to a remote sandbox is lost: %s", error)
                self._over = True
        self._outbox.release()
        return b""

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_MESSAGE):
            await self._outbox.wait_for_room()
            if self._over:
                raise ConnectionError("the sandbox is gone")
            piece = data[start : start + MAX_MESSAGE]
            async with self._sending:
                self._outbox.put(piece)
                await self._try_to_send(data_message(piece))

    async def close(self) -> None:
        self._over = True
        self._outbox.release()
        if self._socket is not None and not self._abandoned:
            await self._socket.close()

    def abandon(self) -> None:
        self._over = self._abandoned = True
        if self._socket is not None:
            self._socket.transport.abort()

    async def _acknowledge(self, size: int) -> None:
        told = self._inbox.take(size)
        if told is not None:
            async with self._sending:
                await self._try_to_send(told)

    async def _try_to_send(self, message: bytes) -> None:
        try:
            await self._socket.send(message)
        except ConnectionClosed:
            return  # receive() notices, and sends the outbox again

    async def _resume(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + RESUME_SECONDS
        while not self._over and clock() < deadline:
            try:
                await self._dial()
            except OutOfStep:
                break  # it is another sandbox
            except (OSError, TimeoutError, WebSocketException) as error:
                if isinstance(error, InvalidStatus) and error.response.status_code in _FOR_GOOD:
                    break
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                logger.info("The channel to a remote sandbox is back")
                return
        self._over = True

    async def _dial(self) -> None:
        async with self._sending:
            socket = await connect(
                f"{self._address}?received={self._inbox.received}",
                additional_headers=self._headers,
                max_size=MAX_MESSAGE + 1,
                compression=None,
                open_timeout=_OPEN_SECONDS,
                max_queue=64,
            )
            try:
                async with asyncio.timeout(_OPEN_SECONDS):
                    kind, payload = parse(await socket.recv(decode=False))
                if kind != "a":
                    raise OutOfStep("the service did not say how much it has")
                self._outbox.acknowledge(count_of(payload))
            except BaseException:
                await socket.close()
                raise
            self._socket = socket
            for piece in self._outbox.pending():
                await self._try_to_send(data_message(piece))


def _refusal(error: InvalidStatus, sandbox_id: str) -> SandboxError:
    try:
        body = from_json(bytes(error.response.body or b""))
    except ValueError:
        body = None
    return remote_error(error.response.status_code, body, sandbox_id)
