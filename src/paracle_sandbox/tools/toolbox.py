"""Several tools over one sandbox, which a model calls by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..client import LocalSandboxClient
from ..sandbox.output import TextCallback
from .arguments import ArgumentFault, parse_arguments
from .files import SandboxFilesTool
from .packages import PackageInstallTool
from .python import PythonExecute
from .result import ToolResult, make_failure
from .shell import SandboxShellTool
from .tool import Tool
from .vision import SandboxVisionTool

# Names that models know from other systems: our tool for each, and the arguments it implies.
_OTHER_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "execute_python": ("python_execute", {}),
    "run_python": ("python_execute", {}),
    "python": ("python_execute", {}),
    "install_package": ("install_packages", {}),
    "pip_install": ("install_packages", {}),
    "run_shell": ("sandbox_shell", {}),
    "shell": ("sandbox_shell", {}),
    "bash": ("sandbox_shell", {}),
    "read_file": ("sandbox_files", {"action": "read_file"}),
    "write_file": ("sandbox_files", {"action": "full_file_rewrite"}),
    "list_files": ("sandbox_files", {"action": "list_files"}),
    "delete_file": ("sandbox_files", {"action": "delete_file"}),
    "unzip_file": ("sandbox_files", {"action": "extract_archive"}),
    "see_image": ("sandbox_vision", {}),
    "view_image": ("sandbox_vision", {}),
}


def sandbox_tools(client: LocalSandboxClient, *, stateful: bool = False) -> list[Tool]:
    """Return all tools that need nothing but a sandbox, over one client."""
    return [
        PythonExecute(client, stateful=stateful),
        SandboxShellTool(client),
        SandboxFilesTool(client),
        PackageInstallTool(client),
        SandboxVisionTool(client),
    ]


class Toolbox:
    """A set of tools. A model's call is passed to the one that it names."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def add(self, tool: Tool) -> None:
        self._tools[tool.name] = tool

    def remove(self, name: str) -> None:
        self._tools.pop(name, None)

    def find(self, name: str) -> tuple[Tool, dict[str, Any]] | None:
        """Return the tool for a name and the arguments that the name implies, or None."""
        if name in self._tools:
            return self._tools[name], {}
        other, implied = _OTHER_NAMES.get(name, ("", {}))
        return (self._tools[other], implied) if other in self._tools else None

    async def call(
        self,
        name: str,
        arguments: str | Mapping[str, Any] | None = None,
        *,
        on_output: TextCallback | None = None,
    ) -> ToolResult:
        """Run the call of a model. Never raises SandboxError."""
        found = self.find(name)
        if found is None:
            known = ", ".join(self._tools) or "none"
            return make_failure(
                f"There is no tool {name!r}; there are: {known}.", error_type="unknown_tool"
            )
        tool, implied = found
        try:
            given = {**implied, **parse_arguments(arguments)}
            return await tool.call(given, on_output=on_output)
        except ArgumentFault as fault:
            return make_failure(str(fault), error_type="arguments")

    def to_openai(self) -> list[dict[str, Any]]:
        return [tool.to_openai() for tool in self]

    def to_anthropic(self) -> list[dict[str, Any]]:
        return [tool.to_anthropic() for tool in self]

    async def close(self) -> None:
        for tool in self:
            await tool.close()
