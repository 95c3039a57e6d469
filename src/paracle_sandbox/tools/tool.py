"""The base classes of tools. A tool has a name, a schema, and a method that a call runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ..client import LocalSandboxClient
from ..errors import SandboxError
from ..sandbox.output import TextCallback
from ..sandbox.sandbox import Sandbox
from .arguments import ArgumentFault, Schema, fit_to_schema, parse_arguments, rename_arguments
from .error_messages import explain_error
from .result import ToolResult, make_failure


class Tool(ABC):
    """Something that a model may call. A subclass describes it and does the work in run().

    ``aliases`` maps other names of arguments to the schema's, ``action_aliases`` other values of
    the argument ``action``. ``streams`` says that run() takes ``on_output``."""

    name: str
    description: str
    parameters: Schema
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    action_aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    streams: bool = False

    @abstractmethod
    async def run(self, *args: Any, **arguments: Any) -> ToolResult:
        """Do the work, with arguments that fit the schema. Raises SandboxError or ArgumentFault."""

    async def call(
        self,
        arguments: str | Mapping[str, Any] | None = None,
        *,
        on_output: TextCallback | None = None,
    ) -> ToolResult:
        """Run the call of a model. Never raises SandboxError: the result says what went wrong
        and what to do about it. ``on_output`` gets what a program prints as it comes, if the
        tool runs programs."""
        more = {"on_output": on_output} if self.streams and on_output is not None else {}
        try:
            return await self.run(**self.checked(arguments), **more)
        except ArgumentFault as fault:
            return make_failure(str(fault), error_type="arguments")
        except SandboxError as error:
            return explain_error(error)

    def checked(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments under the names and types of the schema. Raises ArgumentFault."""
        given = rename_arguments(self.read(arguments), self.parameters, self.aliases)
        if self.action_aliases and isinstance(action := given.get("action"), str):
            action = action.strip().lower()
            given["action"] = self.action_aliases.get(action, action)
        return fit_to_schema(given, self.parameters)

    def read(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Parse the arguments as they came. Override it to rewrite what aliases cannot express."""
        return parse_arguments(arguments)

    async def close(self) -> None:  # noqa: B027  many tools hold nothing
        """Release what the tool holds. The sandbox stays."""

    def to_openai(self) -> dict[str, Any]:
        """Return the tool in the format of the chat API of OpenAI, which others use too."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def to_anthropic(self) -> dict[str, Any]:
        """Return the tool in the format of the messages API of Anthropic."""
        return {
            "name": self.name,
            "description": self.description,
            "input_schema": dict(self.parameters),
        }


class SandboxTool(Tool):
    """A tool that works in the sandbox of a client. Without a client it makes one of its own,
    which cleanup() closes."""

    default_timeout: ClassVar[float] = 300.0

    def __init__(self, client: LocalSandboxClient | None = None) -> None:
        self._owns_client = client is None
        self.client = client or LocalSandboxClient()

    async def sandbox(self) -> Sandbox:
        """Return the client's sandbox, which is made on first use."""
        return await self.client.sandbox()

    def seconds_for(self, sandbox: Sandbox, timeout: float | None) -> float:
        """Return the time limit of one call: ``timeout`` if it is given, otherwise the shorter of
        the tool's default and the limit in the sandbox's configuration."""
        if timeout is not None:
            return timeout
        return min(self.default_timeout, sandbox.config.timeout_seconds)

    async def cleanup(self) -> None:
        """Release everything, and remove the sandbox if only this tool uses it."""
        await self.close()
        if self._owns_client:
            await self.client.cleanup()
