"""Daytona sandboxes with a desktop: a screen to look at (VNC), pages to preview, kept for long.

The caller deletes them. Nothing of them is public: links are signed, and expire.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from ...errors import BackendUnavailableError, SandboxError, SandboxNotFoundError
from ...settings import Settings, load_settings
from .backend import CREATE_SECONDS, daytona_client

VNC_PORT, WEBSITE_PORT = 6080, 8080
LINK_SECONDS = 3600
SESSION = "supervisord-session"
SUPERVISORD = "exec /usr/bin/supervisord -n -c /etc/supervisor/conf.d/supervisord.conf"
_STOPPED = ("stopped", "archived")


class DaytonaWorkspaces:
    """Sandboxes with a desktop. ``image`` must have supervisord with the services to run; without
    one, the image of the settings is used. ``command`` starts it. The password of the screen is
    random unless one is given; ``passwords`` holds it by sandbox id."""

    def __init__(
        self,
        image: str | None = None,
        settings: Settings | None = None,
        *,
        command: str = SUPERVISORD,
    ) -> None:
        known = settings or load_settings()
        self._image = image or known.daytona_image
        self._command = command
        self._client = daytona_client(known)
        self.passwords: dict[str, str] = {}

    async def create_sandbox(
        self, password: str | None = None, project_id: str | None = None
    ) -> Any:
        """Create a sandbox and start its services. Raises SandboxError."""
        import daytona

        chosen = password or secrets.token_urlsafe(12)
        parameters = daytona.CreateSandboxFromImageParams(
            image=self._image,
            public=False,
            labels={"id": project_id} if project_id else {},
            env_vars=desktop_env(chosen),
            resources=daytona.Resources(cpu=2, memory=4, disk=5),
            auto_stop_interval=15,
            auto_archive_interval=24 * 60,
        )
        try:
            sandbox = await self._client.create(parameters, timeout=CREATE_SECONDS)
        except daytona.DaytonaError as error:
            raise BackendUnavailableError(f"Daytona: {error}") from error
        self.passwords[sandbox.id] = chosen
        try:
            await self.start_supervisord_session(sandbox)
        except BaseException:
            with suppress(SandboxError):
                await self.delete_sandbox(sandbox.id)
            raise
        return sandbox

    async def get_or_start_sandbox(self, sandbox_id: str) -> Any:
        """Return the sandbox; if it was stopped or archived, start it and its services first."""
        import daytona

        try:
            sandbox = await self._client.get(sandbox_id)
            if str(getattr(sandbox.state, "value", sandbox.state)).lower() in _STOPPED:
                await sandbox.start(CREATE_SECONDS)
                await self.start_supervisord_session(sandbox)
        except daytona.DaytonaNotFoundError as error:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id) from error
        except daytona.DaytonaError as error:
            raise BackendUnavailableError(f"Daytona: {error}", sandbox_id) from error
        return sandbox

    async def start_supervisord_session(self, sandbox: Any) -> None:
        import daytona

        try:
            await sandbox.process.create_session(SESSION)
            request = daytona.SessionExecuteRequest(command=self._command, run_async=True)
            await sandbox.process.execute_session_command(SESSION, request)
        except daytona.DaytonaError as error:
            raise BackendUnavailableError(f"Daytona: {error}", sandbox.id) from error

    async def preview_links(self, sandbox: Any) -> dict[str, str]:
        """Return the signed addresses ``vnc`` and ``website``, which expire after an hour."""
        import daytona

        try:
            vnc = await sandbox.create_signed_preview_url(VNC_PORT, LINK_SECONDS)
            website = await sandbox.create_signed_preview_url(WEBSITE_PORT, LINK_SECONDS)
        except daytona.DaytonaError as error:
            raise BackendUnavailableError(f"Daytona: {error}", sandbox.id) from error
        return {"vnc": vnc.url, "website": website.url}

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Delete the sandbox. A sandbox that is gone is a success."""
        import daytona

        self.passwords.pop(sandbox_id, None)
        try:
            sandbox = await self._client.get(sandbox_id)
            await sandbox.delete(wait=True)
        except daytona.DaytonaNotFoundError:
            return
        except daytona.DaytonaError as error:
            raise BackendUnavailableError(f"Daytona: {error}", sandbox_id) from error

    async def close(self) -> None:
        await self._client.close()


def desktop_env(password: str) -> dict[str, str]:
    """Return the environment variables that the services of a desktop image read."""
    return {
        "VNC_PASSWORD": password,
        "RESOLUTION": "1024x768x24",
        "RESOLUTION_WIDTH": "1024",
        "RESOLUTION_HEIGHT": "768",
        "CHROME_PERSISTENT_SESSION": "true",
        "ANONYMIZED_TELEMETRY": "false",
    }
