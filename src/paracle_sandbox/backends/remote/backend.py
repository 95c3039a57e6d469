"""The remote backend: sandboxes of a service elsewhere, as if they were here.

Places are made and removed by requests over pooled connections; the channel to a guest is a
WebSocket that resumes after a break. Everything above the channel is the library's own, so
streaming, long runs, files and typed errors work as on this machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ...channel.drafts import Drafts
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
from .failures import remote_error
from .info import info_problem

if TYPE_CHECKING:
    import httpx2

_PATH = "/v1/sandboxes"
_INSTALL = "pip install 'paracle-sandbox[remote]'"
_REMEDY = "see SANDBOX_API_URL, SANDBOX_API_KEY"
_FIGURES = {name: type(default) for name, default in vars(Usage()).items()}


class RemoteBackend(Backend):
    """A service at SANDBOX_API_URL, with the key of SANDBOX_API_KEY."""

    name = "remote"

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or load_settings()
        self.drafts = Drafts(self._settings.state_dir)
        self._http: httpx2.AsyncClient | None = None

    # The seam

    async def health(self) -> Health:
        try:
            info = await self._ask("GET", "/info")
        except SandboxError as error:
            return Health(self.name, False, error.message, _REMEDY)
        problem = info_problem(info)
        if problem is not None:
            return Health(self.name, False, f"{self._url}: {problem}", _REMEDY)
        layers = info.get("layers")
        return Health(
            self.name,
            True,
            f"{self._url} with the {info.get('backend')} backend",
            layers=tuple(Layer(str(name), bool(on)) for name, on in layers.items())
            if isinstance(layers, dict)
            else (),
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
        return Usage(**figures)

    async def destroy(self, sandbox_id: str) -> None:
        try:
            await self._ask("DELETE", _at(sandbox_id), sandbox_id)
        except SandboxNotFoundError:
            return
        except SandboxExecutionError as error:
            raise SandboxCleanupError(error.message, sandbox_id) from error

    async def list_sandboxes(self) -> list[SandboxInfo]:
        answer = await self._ask("GET", _PATH)
        return [
            SandboxInfo(
                sandbox_id=str(one["sandbox_id"]),
                backend=self.name,
                state=str(one["state"]),
                owner_pid=0,
                owner_alive=True,
                created_at=float(one["created_at"]),
                config=one["config"],
                labels=one["labels"],
            )
            for one in answer["sandboxes"]
        ]

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

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
        http = self._client()
        import httpx2

        try:
            answer = await http.request(method, path, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise BackendUnavailableError(
                f"Failed to connect to sandbox service at {self._url}: {error}. "
                "Is it running, and is SANDBOX_API_URL right?"
            ) from error
        except httpx2.TimeoutException as error:
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
            body = answer.json()
        except ValueError:
            body = {}
        if answer.status_code >= 400:
            raise remote_error(answer.status_code, body, sandbox_id)
        return body if isinstance(body, dict) else {}

    def _client(self) -> httpx2.AsyncClient:
        if self._http is None:
            try:
                import httpx2
            except ModuleNotFoundError as error:
                raise _not_installed(error) from None
            seconds = self._settings.request_timeout
            self._http = httpx2.AsyncClient(
                base_url=self._url,
                headers=self._headers(),
                timeout=httpx2.Timeout(seconds, connect=min(seconds, 10.0)),
                limits=httpx2.Limits(max_connections=100, max_keepalive_connections=20),
            )
        return self._http

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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
