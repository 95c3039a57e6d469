"""Translates an engine's refusals into errors for callers who asked for a sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...config import SandboxConfig
from ...errors import BackendUnavailableError, SandboxConflictError, SandboxCreationError
from .engine import EngineRefused
from .images import not_found


@contextmanager
def translating_refusals(sandbox_id: str, config: SandboxConfig) -> Iterator[None]:
    """Raise an engine's refusal as the error that a caller who asked for a sandbox understands."""
    try:
        yield
    except EngineRefused as refused:
        raise creation_error(refused, sandbox_id, config) from refused


def is_name_taken(refused: EngineRefused) -> bool:
    """Whether the name is in use. Podman has no status code of its own for that."""
    text = refused.message.lower()
    return "name" in text and (refused.status == 409 or "already in use" in text)


def creation_error(
    refused: EngineRefused, sandbox_id: str, config: SandboxConfig
) -> SandboxCreationError:
    text = refused.message
    lowered = text.lower()
    if is_name_taken(refused):
        return SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)
    if refused.status == 404 and "image" in lowered:
        return not_found(config.base_image, text)
    if "python3" in text and "not found" in lowered:
        return SandboxCreationError(
            f"The image {config.base_image} has no python3, which the guest needs. Add it to the "
            "image, or choose another base_image.",
            sandbox_id,
            step="image",  # it stays so; what fails at the step "guest" may pass
        )
    if "unknown or invalid runtime" in lowered or "unknown runtime" in lowered:
        return BackendUnavailableError(
            f"The engine does not know the runtime: {text}. Register it (runtimes in its "
            "daemon.json), and restart it.",
            sandbox_id,
            step="runtime",
        )
    if "network enabled in root network namespace" in lowered:
        # Some builds take every namespace of a new kernel for the root one, even an empty one.
        return BackendUnavailableError(
            f"This build of gVisor cannot use the network namespace of its container: {text}. "
            'Register runsc with "--network=host" in its runtimeArgs, which means the network of '
            "the container and not of the machine, or take a newer build; then restart the engine.",
            sandbox_id,
            step="runtime",
        )
    return SandboxCreationError(
        f"The engine did not make the sandbox: {text}", sandbox_id, step="container"
    )
