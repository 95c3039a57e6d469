"""The Incus REST API, as much of it as we use: requests, operations, and one exec stream.

Most changes are operations: the server answers at once with a name, and whoever wants to know how
it went waits for that. An answer that says no is a Refused; a server that does not answer is a
BackendUnavailableError that says what to do about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...errors import BackendUnavailableError, SandboxError
from ...host.platforms import without_engine
from .exec_channel import ExecChannel
from .remotes import Remote

if TYPE_CHECKING:
    import aiohttp

INSTALL = "pip install '.[incus]', in a checkout of Paracle Sandbox"
if sys.platform == "linux":
    _START = (
        "Install and start it (apt install incus; incus admin init --minimal), or say where it is "
        "with INCUS_SOCKET or INCUS_REMOTE"
    )
else:
    _START = "Say with INCUS_REMOTE which server on Linux to use (incus remote add)"
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
_OPERATION_SECONDS = 600
_LAST_SECONDS = 5
_FAILURE = 400
_MAX_MESSAGE = 16 << 20
_LATE = "waiting for websockets"
_TAKEN = ("already exists", "already in use", "unique constraint failed", "is busy running")


class Refused(Exception):
    """The server has understood, and does not do it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def is_absence(self) -> bool:
        return self.status == 404 or "not found" in self.message.lower()

    @property
    def is_taken(self) -> bool:
        """There is one of that name, or just under way; told by whichever check came first."""
        text = self.message.lower()
        return self.status == 409 or any(words in text for words in _TAKEN)


class LateStreams(Refused):
    """The server waits five seconds for the streams of a command, and has not started it."""


class Server:
    """One server, by one connection pool that is opened when it is first needed."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        # One for each event loop that used it: connections belong to the loop they were made in.
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def get(self, path: str) -> Any:
        return (await self._ask("GET", path))["metadata"]

    async def change(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Done when this returns. What the operation, if it was one, says about itself."""
        answer = await self._ask(method, path, body)
        if answer.get("type") != "async":
            return dict(answer.get("metadata") or {})
        return await self.finished(str(answer["operation"]))

    async def finished(self, operation: str, seconds: int = _OPERATION_SECONDS) -> dict[str, Any]:
        """Wait for an operation. Raises Refused when it has failed."""
        path = f"{operation}/wait?timeout={seconds}"
        result = (await self._ask("GET", path, seconds=seconds + 10))["metadata"]
        code = int(result.get("status_code") or 0)
        if code >= _FAILURE or result.get("err"):
            raise Refused(code, str(result.get("err") or "the operation failed"))
        return dict(result)

    async def upload(self, path: str, content: bytes, headers: Mapping[str, str]) -> None:
        await self._ask("POST", path, content=content, headers=headers)

    async def execute(self, instance: str, body: Mapping[str, Any]) -> ExecChannel:
        """Start a command and be its stdin and stdout. Raises Refused."""
        answer = await self._ask("POST", f"/1.0/instances/{quote(instance)}/exec", body)
        operation = str(answer["operation"])
        secrets = answer["metadata"]["metadata"]["fds"]
        # The command starts when all have been fetched, the control one among them.
        opened = [
            asyncio.ensure_future(self._websocket(f"{operation}/websocket?secret={secrets[name]}"))
            for name in ("control", "0", "1", "2")
        ]
        try:
            control, stdin, stdout, stderr = await asyncio.gather(*opened)
        except BaseException:
            for one in await asyncio.gather(*opened, return_exceptions=True):
                if not isinstance(one, BaseException):
                    await one.close()
            raise
        return ExecChannel(stdin, stdout, stderr, control, operation)

    async def why_ended(self, operation: str) -> str:
        """Of a command that said nothing. Raises LateStreams when it was never started."""
        try:
            ended = await self.finished(operation, _LAST_SECONDS)
        except Refused as refused:
            if _LATE in refused.message.lower():
                raise LateStreams(refused.status, refused.message) from refused
            return refused.message
        return f"it said nothing, and ended with {(ended.get('metadata') or {}).get('return')}"

    async def close(self) -> None:
        await self._let_go(here=True)

    async def _let_go(self, *, here: bool) -> None:
        """The connections of event loops that have ended, and of this one if it is asked for. What
        belongs to a loop that runs elsewhere may not be touched from here."""
        this = asyncio.get_running_loop()
        for loop in [one for one in self._sessions if one.is_closed() or (here and one is this)]:
            with contextlib.suppress(RuntimeError):  # what it wants of a loop that has ended
                await self._sessions.pop(loop).close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> dict[str, Any]:
        session = await self._open()
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        data: dict[str, Any] = {"data": content} if content is not None else {"json": body}
        try:
            async with session.request(
                method, self._url(path), timeout=timeout, headers=headers, **data
            ) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._unavailable(error) from error
        if not isinstance(answer, dict):
            raise Refused(response.status, "the server's answer is no object")
        if response.status >= _FAILURE or answer.get("type") == "error":
            status = int(answer.get("error_code") or response.status)
            raise self._forbidden() if status == 403 else Refused(status, str(answer.get("error")))
        return answer

    async def _websocket(self, path: str) -> aiohttp.ClientWebSocketResponse:
        import aiohttp

        try:
            session = await self._open()
            return await session.ws_connect(
                self._url(path), max_msg_size=_MAX_MESSAGE, compress=0, autoping=True
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LateStreams(0, f"no stream: {error}") from error

    def _url(self, path: str) -> str:
        if not self.remote.project:
            return self.remote.address + path
        mark = "&" if "?" in path else "?"
        return f"{self.remote.address}{path}{mark}project={quote(self.remote.project)}"

    async def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop in self._sessions:
            return self._sessions[loop]
        try:
            import aiohttp
        except ImportError as error:
            raise BackendUnavailableError(
                f"Incus not available: the aiohttp package is missing. {INSTALL}"
            ) from error
        connector: aiohttp.BaseConnector
        if self.remote.socket_path is not None:
            if not hasattr(socket, "AF_UNIX"):
                raise self._unavailable(OSError("this system has no sockets that are files"))
            connector = aiohttp.UnixConnector(self.remote.socket_path, limit=0)
        else:
            connector = aiohttp.TCPConnector(ssl=self.remote.certificates(), limit=0)
        session = self._sessions[loop] = aiohttp.ClientSession(connector=connector, trust_env=False)
        await self._let_go(here=False)
        return session

    def _unavailable(self, error: Exception) -> SandboxError:
        name, where = self.remote.name, self.remote.socket_path or self.remote.address
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, PermissionError):
                return self._forbidden()
            if isinstance(cause, ssl.SSLCertVerificationError):
                return BackendUnavailableError(
                    f"The Incus server at {where} shows another certificate than the one that is "
                    f"stored for {name}. If it has a new one: "
                    f"incus remote remove {name}; incus remote add {name} {where}",
                    step="certificate",
                )
            cause = getattr(cause, "os_error", None) or cause.__cause__
        return BackendUnavailableError(
            f"Incus not available: no server answers at {where} ({error or type(error).__name__}). "
            f"{_START}; or {without_engine()}.",
            step="server",
        )

    def _forbidden(self) -> SandboxError:
        where = self.remote.socket_path or self.remote.address
        remedy = (
            "Join its group with `sudo adduser $USER incus-admin` and log in anew (or "
            "`newgrp incus-admin`)."
            if self.remote.socket_path
            else "Have its administrator run `incus config trust add NAME`, and give the token to: "
            f"incus remote add {self.remote.name} {where}"
        )
        return BackendUnavailableError(
            f"Permission denied: you may not use the Incus server at {where}. {remedy}",
            step="permission",
        )
