"""The remote backend: sandboxes of a service elsewhere, as if they were here.

Places are made and removed by requests over pooled connections; the channel to a guest is a
WebSocket that resumes after a break. Everything above the channel is the library's own, so
streaming, long runs, files and typed errors work as on this machine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ...config import SandboxConfig
from ...errors import (
    BackendUnavailableError,
    SandboxCleanupError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxNotFoundError,
)
from ...ids import check_sandbox_id
from ...settings import Settings, load_settings
from ..base import Backend, Channel, Health, Layer, SandboxInfo, Usage
from ..machine.drafts import Drafts
from .answers import from_json
from .failures import remote_error
from .info import info_problem

if TYPE_CHECKING:
    import httpx2

_PATH = "/v1/sandboxes"
_INSTALL = "pip install '.[remote]', in a checkout of Paracle Sandbox"
_REMEDY = "see SANDBOX_API_URL, SANDBOX_API_KEY"
_MAX_ANSWER = 4 << 20
_FIGURES = {name: type(default) for name, default in vars(Usage()).items() if name != "incomplete"}
_NETWORK = ("network_rx_bytes", "network_tx_bytes")
_MOST_REASON = 200
_MOST_LAYERS = 100
_MOST_NAME = 100


class RemoteBackend(Backend):
    """A service at SANDBOX_API_URL, with the key of SANDBOX_API_KEY."""

    name = "remote"

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or load_settings()
        self.drafts = Drafts(self._settings.state_dir)
        # One for each event loop that used it: connections belong to the loop they were made in.
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    # The seam

    async def health(self) -> Health:
        try:
            info = await self._ask("GET", "/info")
        except SandboxError as error:
            return Health(self.name, False, error.message, _REMEDY)
        problem = info_problem(info)
        if problem is not None:
            return Health(self.name, False, f"{self._url}: {problem}", _REMEDY)
        backend = str(info["backend"])[:_MOST_NAME]
        return Health(
            self.name,
            True,
            f"{self._url} with the {backend} backend",
            layers=_layers(info.get("layers")),
        )

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        check_sandbox_id(sandbox_id)
        await self.sweep_once()
        body = {
            "sandbox_id": sandbox_id,
            "config": config.model_dump(mode="json"),
            "labels": dict(labels),
        }
        # With a key of its own a request that got lost can be sent again without harm.
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            await self._ask("POST", _PATH, sandbox_id, json=body, headers=headers)
        except SandboxExecutionError as error:
            await self._undo_create(sandbox_id)
            raise SandboxCreationError(error.message, sandbox_id, step="remote") from error

    async def connect(self, sandbox_id: str) -> Channel:
        try:
            from .channel import RemoteChannel
        except ModuleNotFoundError as error:
            raise _not_installed(error) from None
        scheme, rest = self._url.split("://", 1)
        address = f"{'wss' if scheme == 'https' else 'ws'}://{rest}{_at(sandbox_id)}/channel"
        return await RemoteChannel.open(address, self._headers(), sandbox_id)

    async def usage(self, sandbox_id: str) -> Usage:
        answer = await self._ask("GET", f"{_at(sandbox_id)}/usage", sandbox_id)
        figures = {n: kind(answer[n]) for n, kind in _FIGURES.items() if _is_number(answer.get(n))}
        # Not known, as with the host's network; one that is missing is of an older service.
        unknown = {n: None for n in _NETWORK if n in answer and answer[n] is None}
        return Usage(
            **{**figures, **unknown}, incomplete=str(answer.get("incomplete") or "")[:_MOST_REASON]
        )

    async def destroy(self, sandbox_id: str) -> None:
        try:
            await self._ask("DELETE", _at(sandbox_id), sandbox_id)
        except SandboxNotFoundError:
            return
        except SandboxExecutionError as error:
            raise SandboxCleanupError(error.message, sandbox_id) from error

    async def list_sandboxes(self) -> list[SandboxInfo]:
        answer = await self._ask("GET", _PATH)
        try:
            return [self._info(one) for one in answer["sandboxes"]]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise _odd_answer(self._url, None) from error

    def _info(self, told: Any) -> SandboxInfo:
        """Raises LookupError, TypeError, ValueError or OverflowError for what is none."""
        return SandboxInfo(
            sandbox_id=str(told["sandbox_id"]),
            backend=self.name,
            state=str(told["state"]),
            owner_pid=0,
            owner_alive=True,
            created_at=float(told["created_at"]),
            config=dict(told["config"]),
            labels={str(name): str(text) for name, text in dict(told["labels"]).items()},
        )

    async def close(self) -> None:
        await self._let_go_of_clients(here=True)

    # Requests

    async def _undo_create(self, sandbox_id: str) -> None:
        """Nobody knows whether it was made; it must not be."""
        try:
            await self.destroy(sandbox_id)
        except SandboxError:
            return  # the service removes what nobody connects to

    async def _ask(
        self, method: str, path: str, sandbox_id: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """The answer. Raises the error that the service names; SandboxExecutionError when it
        does not answer, BackendUnavailableError when it cannot be reached."""
        http = await self._client()
        import httpx2

        try:
            status, content = await self._answer(http, method, path, options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise BackendUnavailableError(
                f"Failed to connect to sandbox service at {self._url}: {error}. "
                "Is it running, and is SANDBOX_API_URL right?"
            ) from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise SandboxExecutionError(
                f"Request timed out after {self._settings.request_timeout:g} seconds "
                "(SANDBOX_TIMEOUT)",
                sandbox_id,
            ) from error
        except httpx2.HTTPError as error:
            raise SandboxExecutionError(
                f"The sandbox service broke off: {error}", sandbox_id
            ) from error
        try:
            body = from_json(content or b"{}")
        except ValueError as error:
            if status < 300:
                raise _odd_answer(self._url, sandbox_id) from error
            body = {}
        if status >= 300:
            raise remote_error(status, body, sandbox_id)
        if not isinstance(body, dict):
            raise _odd_answer(self._url, sandbox_id)
        return body

    async def _answer(
        self, http: httpx2.AsyncClient, method: str, path: str, options: dict[str, Any]
    ) -> tuple[int, bytes]:
        """Status and body of an answer, whatever the service sends: so many bytes, in so much
        time. What is compressed is not unpacked."""
        content = bytearray()
        seconds = 2 * self._settings.request_timeout  # to begin, and to end
        async with asyncio.timeout(seconds), http.stream(method, path, **options) as answer:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise _odd_answer(self._url, None)
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > _MAX_ANSWER:
                    raise _odd_answer(self._url, None)
            return answer.status_code, bytes(content)

    async def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop in self._clients:
            return self._clients[loop]
        try:
            import httpx2
        except ModuleNotFoundError as error:
            raise _not_installed(error) from None
        seconds = self._settings.request_timeout
        client = self._clients[loop] = httpx2.AsyncClient(
            base_url=self._url,
            headers={"Accept-Encoding": "identity", **self._headers()},
            timeout=httpx2.Timeout(seconds, connect=min(seconds, 10.0)),
            limits=httpx2.Limits(max_connections=100, max_keepalive_connections=20),
        )
        await self._let_go_of_clients(here=False)
        return client

    async def _let_go_of_clients(self, *, here: bool) -> None:
        """Those of event loops that have ended, and that of this one if it is asked for. What
        belongs to a loop that runs elsewhere may not be touched from here."""
        this = asyncio.get_running_loop()
        for loop in [one for one in self._clients if one.is_closed() or (here and one is this)]:
            with suppress(RuntimeError):  # what a connection wants of a loop that has ended
                await self._clients.pop(loop).aclose()

    @property
    def _url(self) -> str:
        url = (self._settings.api_url or "").rstrip("/")
        if urlsplit(url).scheme not in ("http", "https"):
            raise BackendUnavailableError(
                "The remote backend needs the address of a service: "
                "SANDBOX_API_URL=https://sandbox.example.com"
            )
        return url

    def _headers(self) -> dict[str, str]:
        # Encoded, so that any text is a user: headers carry little more than ASCII.
        user = quote(self._settings.api_user or "", safe="")
        named = {"X-API-Key": self._settings.api_key, "X-Sandbox-User": user}
        return {name: value for name, value in named.items() if value}


def _not_installed(error: ModuleNotFoundError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"The remote backend needs {error.name}. Install it with: {_INSTALL}"
    )


def _at(sandbox_id: str) -> str:
    return f"{_PATH}/{quote(sandbox_id, safe='')}"


def _odd_answer(url: str, sandbox_id: str | None) -> SandboxExecutionError:
    return SandboxExecutionError(
        f"What answers at {url} is not a sandbox service, or breaks off its answers: is "
        "SANDBOX_API_URL right, and nothing in between that changes them?",
        sandbox_id,
    )


def _layers(told: object) -> tuple[Layer, ...]:
    found = told.items() if isinstance(told, dict) else ()
    return tuple(Layer(name[:_MOST_NAME], bool(on)) for name, on in islice(found, _MOST_LAYERS))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1 << 63  # NaN is not
