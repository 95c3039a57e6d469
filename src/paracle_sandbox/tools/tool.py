"""A tool: a name, a schema, and what happens when a model calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ..client import LocalSandboxClient
from ..errors import SandboxError
from ..sandbox.consumers import TextCallback
from ..sandbox.sandbox import Sandbox
from .arguments import ArgumentFault, Schema, fit_to_schema, parse_arguments, rename_arguments
from .error_messages import explain_error
from .result import ToolResult, make_failure


class Tool(ABC):
    """What a model may call. Subclasses say what it is and do it in run(). ``aliases`` are other
    names of arguments, ``action_aliases`` other values of the one called action."""

    name: str
    description: str
    parameters: Schema
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    action_aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    streams: bool = False

    @abstractmethod
    async def run(self, *args: Any, **arguments: Any) -> ToolResult:
        """Do it, with arguments that fit the schema. May raise SandboxError or ArgumentFault."""

    async def call(
        self,
        arguments: str | Mapping[str, Any] | None = None,
        *,
        on_output: TextCallback | None = None,
    ) -> ToolResult:
        """Do what a model asked for. Never raises SandboxError: the answer says what went wrong
        and what can be done about it. ``on_output`` sees what is printed as it comes, where the
        tool runs something that prints."""
        more = {"on_output": on_output} if self.streams and on_output is not None else {}
        try:
            return await self.run(**self.checked(arguments), **more)
        except ArgumentFault as fault:
            return make_failure(str(fault), error_type="arguments")
        except SandboxError as error:
            return explain_error(error)

    def checked(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments under their proper names. Raises ArgumentFault."""
        given = rename_arguments(self.read(arguments), self.parameters, self.aliases)
        if self.action_aliases and isinstance(asked := given.get("action"), str):
            asked = asked.strip().lower()
            given["action"] = self.action_aliases.get(asked, asked)
        return fit_to_schema(given, self.parameters)

    def read(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments as they came, for those who know more than other names for them."""
        return parse_arguments(arguments)

    async def close(self) -> None:  # noqa: B027  many hold nothing
        """Let go of what it holds; the sandbox stays."""

    def to_openai(self) -> dict[str, Any]:
        """The tool as the chat API of OpenAI, and of those who copy it, takes it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def to_anthropic(self) -> dict[str, Any]:
        """The tool as the messages API of Anthropic takes it."""
        return {
            "name": self.name,
            "description": self.description,
            "input_schema": dict(self.parameters),
        }


class SandboxTool(Tool):
    """A tool that works in the sandbox of a client. Without a client it has one of its own, which
    cleanup() ends."""

    default_timeout: ClassVar[float] = 300.0

    def __init__(self, client: LocalSandboxClient | None = None) -> None:
        self._owns_client = client is None
        self.client = client or LocalSandboxClient()

    async def sandbox(self) -> Sandbox:
        return await self.client.sandbox()

    def seconds_for(self, sandbox: Sandbox, timeout: float | None) -> float:
        """The limit of one call: the one that was given, else the tool's own default, or that of
        the sandbox's configuration where it is shorter."""
        if timeout is not None:
            return timeout
        return min(self.default_timeout, sandbox.config.timeout_seconds)

    async def cleanup(self) -> None:
        """Let go of everything; a sandbox that is only this tool's is removed."""
        await self.close()
        if self._owns_client:
            await self.client.cleanup()


def schema(required: list[str], **properties: dict[str, Any]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def text(description: str, *, enum: list[str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string", "description": description}
    return {**found, "enum": enum} if enum else found


def boolean(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}


def seconds(description: str) -> dict[str, Any]:
    return number(description, least=0.1, most=3600)


def number(description: str, *, least: float = 1, most: float = 10_000_000) -> dict[str, Any]:
    return {"type": "number", "description": description, "minimum": least, "maximum": most}


def texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}
