"""The daytona backend: the six methods over the vendor's SDK, imported when first used."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from ...channel.bootstrap import boot_message
from ...config import SandboxConfig
from ...errors import (
    BackendUnavailableError,
    SandboxCleanupError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxNotFoundError,
)
from ...settings import Settings
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..machine.drafts import Drafts
from . import requests
from .channel import PtyChannel

INSTALL = "pip install '.[daytona]', in a checkout of Paracle Sandbox"
CREATE_SECONDS = 300.0


def daytona_client(settings: Settings) -> Any:
    """The SDK's client. Raises BackendUnavailableError without SDK or key."""
    try:
        import daytona
    except ImportError as error:
        raise BackendUnavailableError(
            f"Daytona needs a package that is not installed ({error.name}): {INSTALL}"
        ) from None
    if not settings.daytona_key:
        raise BackendUnavailableError("Daytona needs a key: set DAYTONA_API_KEY.")
    return daytona.AsyncDaytona(
        daytona.DaytonaConfig(
            api_key=settings.daytona_key,
            api_url=settings.daytona_url,
            target=settings.daytona_target,
        )
    )


class DaytonaBackend(Backend):
    name = "daytona"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.drafts = Drafts(settings.state_dir)
        self._client: Any = None
        # What connect() needs to know of those made here.
        self._configs: dict[str, SandboxConfig] = {}

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = daytona_client(self._settings)
        return self._client

    async def health(self) -> Health:
        try:
            await self._page(limit=1)
        except SandboxError as error:
            return Health(self.name, False, error.message, "set DAYTONA_API_KEY")
        return Health(self.name, True, f"answers at {self._settings.daytona_url}")

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        client = self.client
        await self.sweep_once()
        import daytona

        image = requests.image_of(config, self._settings.daytona_image)
        parameters = daytona.CreateSandboxFromImageParams(
            **requests.create_parameters(sandbox_id, config, labels, image),
            resources=daytona.Resources(*requests.resources(config)),
        )
        try:
            await client.create(parameters, timeout=CREATE_SECONDS)
        except daytona.DaytonaConflictError as error:
            raise SandboxConflictError(
                f"Sandbox {sandbox_id} exists already", sandbox_id
            ) from error
        except daytona.DaytonaError as error:
            await self._remove_failed(sandbox_id)
            raise SandboxCreationError(str(error), sandbox_id, step="create") from error
        except BaseException:
            await self._remove_failed(sandbox_id)
            raise
        self._configs[sandbox_id] = config

    async def _remove_failed(self, sandbox_id: str) -> None:
        with suppress(SandboxError):  # else it stops by itself, and is deleted then
            await self.destroy(sandbox_id)

    async def connect(self, sandbox_id: str) -> Channel:
        config = self._configs.get(sandbox_id) or SandboxConfig()
        with self._told(sandbox_id):
            sandbox = await self.client.get(sandbox_id)
            channel = PtyChannel()
            name = f"paracle-{secrets.token_hex(6)}"
            handle = await sandbox.process.create_pty_session(name, channel.receive_data)
            try:
                await channel.begin(handle, requests.start_line(config), sandbox_id)
                await channel.send(boot_message(requests.guest_setup(config)))
            except BaseException:
                await channel.close()
                raise
        return channel

    async def usage(self, sandbox_id: str) -> Usage:
        with self._told(sandbox_id):
            sandbox = await self.client.get(sandbox_id)
            answer = await sandbox.process.exec(requests.USAGE_SCRIPT, timeout=10)
        figures = requests.parse_usage(str(answer.result))
        return Usage(
            cpu_seconds=figures.get("usage_usec", 0) / 1e6,
            memory_bytes=figures.get("memory", 0),
            memory_peak_bytes=figures.get("peak", 0),
            processes=figures.get("processes", 0),
            oom_kills=figures.get("oom_kill", 0),
        )

    async def destroy(self, sandbox_id: str) -> None:
        import daytona

        self._configs.pop(sandbox_id, None)
        try:
            sandbox = await self.client.get(sandbox_id)
            await sandbox.delete(wait=True)
        except daytona.DaytonaNotFoundError:
            return
        except daytona.DaytonaError as error:
            raise SandboxCleanupError(str(error), sandbox_id) from error

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return [_info(sandbox) for sandbox in await self._page()]

    async def _page(self, limit: int | None = None) -> list[Any]:
        with self._told():
            client = self.client
            import daytona

            found = []
            async for sandbox in client.list(daytona.ListSandboxesQuery(limit=limit)):
                found.append(sandbox)
                if limit is not None and len(found) >= limit:
                    break
            return [sandbox for sandbox in found if requests.LABEL in sandbox.labels]

    async def close(self) -> None:
        if self._client is None:
            return
        for sandbox_id in list(self._configs):
            await self._remove_failed(sandbox_id)
        client, self._client = self._client, None
        await client.close()

    @contextmanager
    def _told(self, sandbox_id: str | None = None) -> Iterator[None]:
        """The SDK's errors as ours."""
        client = self.client
        assert client is not None
        import daytona

        try:
            yield
        except daytona.DaytonaNotFoundError as error:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id) from error
        except daytona.DaytonaError as error:
            raise BackendUnavailableError(f"Daytona: {error}", sandbox_id) from error


def _info(sandbox: Any) -> SandboxInfo:
    owner = sandbox.labels.get(requests.OWNER, "0")
    return SandboxInfo(
        sandbox_id=sandbox.labels[requests.LABEL],
        backend="daytona",
        state=str(getattr(sandbox.state, "value", sandbox.state)),
        owner_pid=int(owner) if owner.isdigit() else 0,
        owner_alive=True,
        created_at=_time(sandbox.created_at),
        labels=dict(sandbox.labels),
    )


def _time(text: str | None) -> float:
    try:
        return datetime.fromisoformat((text or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
