"""The interface of a model, as an agent uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import SandboxError
from ..tools import Tool
from .conversation import Message, Reply

INSTALL = "pip install '.[agents]', in a checkout of Paracle Sandbox"
OnText = Callable[[str], None]


class ModelError(SandboxError):
    """There was no reply from the model. The message says why and what to do."""


class ModelBrokeOff(ModelError):
    """The model broke off in the middle of a reply. A second request may succeed."""


class Model(Protocol):
    """A model that replies to messages. Implement it to use a model of your own."""

    name: str

    async def reply(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText
    ) -> Reply:
        """Return the next turn. Its text goes to ``on_text`` as it comes. Raises ModelError."""

    async def close(self) -> None:
        """Release connections."""


def make_missing_sdk_error(error: ImportError) -> ModelError:
    """Return the error that says how to install a missing SDK."""
    return ModelError(f"Agents need a package that is not installed ({error.name}): {INSTALL}")
