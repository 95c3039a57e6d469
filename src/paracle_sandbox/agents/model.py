"""What a model is to an agent: something that is asked, and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import SandboxError
from ..tools import Tool
from .conversation import Message, Reply

INSTALL = "pip install '.[agents]', in a checkout of Paracle Sandbox"
OnText = Callable[[str], None]


class ModelError(SandboxError):
    """The model could not be asked; the message says why and what to do."""


class ModelBrokeOff(ModelError):
    """It had begun to answer; asked again, it may answer to the end."""


class Model(Protocol):
    """Something that answers. Implement it to use a model that no SDK here speaks to."""

    name: str

    async def reply(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText
    ) -> Reply:
        """The next turn; text goes to ``on_text`` as it comes. Raises ModelError."""

    async def close(self) -> None: ...


def make_missing_sdk_error(error: ImportError) -> ModelError:
    return ModelError(f"Agents need a package that is not installed ({error.name}): {INSTALL}")
