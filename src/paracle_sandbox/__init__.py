"""Run untrusted code for AI agents: one library over any isolation.

    from paracle_sandbox import run
    print(run("print('hello')")["result"]["stdout"])

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib

# Not from typing, which would cost more than all the rest; type checkers know the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from .agents import SandboxAgent, SandboxManus
    from .backends.base import Backend
    from .backends.registry import get_backend
    from .client import (
        BaseSandboxClient,
        LocalSandboxClient,
        SandboxFileOperations,
        create_sandbox_client,
    )
    from .compat.docker_sandbox import DockerSandbox
    from .compat.dockerized_terminal import AsyncDockerizedTerminal
    from .compat.sandbox_settings import SandboxSettings
    from .config import SandboxConfig
    from .errors import (
        BackendUnavailableError,
        DockerConnectionError,
        InvalidValueError,
        ResourceLimitError,
        SandboxCleanupError,
        SandboxConflictError,
        SandboxCreationError,
        SandboxError,
        SandboxExecutionError,
        SandboxFileDecodeError,
        SandboxFileError,
        SandboxFileExistsError,
        SandboxFileNotFoundError,
        SandboxIsADirectoryError,
        SandboxLimitError,
        SandboxNotADirectoryError,
        SandboxNotFoundError,
        SandboxPathError,
        SandboxPermissionError,
        SandboxTimeoutError,
        StoppedError,
    )
    from .executor import SandboxExecutor, run, run_async
    from .manager import SandboxManager
    from .results import CommandResult, ExecutionResult, FileInfo, JobResult, Stats
    from .sandbox.command import Command
    from .sandbox.monitor import SandboxMonitor
    from .sandbox.sandbox import Sandbox
    from .sandbox.terminal import Terminal
    from .sessions import PythonSession
    from .settings import Settings, load_settings
    from .tools import (
        NormalPythonExecute,
        PackageInstallTool,
        PythonExecute,
        SandboxBrowserTool,
        SandboxFilesTool,
        SandboxShellTool,
        SandboxVisionTool,
        Toolbox,
        sandbox_tools,
    )

__version__ = "1.0.1"

__all__ = [
    "AsyncDockerizedTerminal",
    "Backend",
    "BackendUnavailableError",
    "BaseSandboxClient",
    "Command",
    "CommandResult",
    "DockerConnectionError",
    "DockerSandbox",
    "ExecutionResult",
    "FileInfo",
    "InvalidValueError",
    "JobResult",
    "LocalSandboxClient",
    "NormalPythonExecute",
    "PackageInstallTool",
    "PythonExecute",
    "PythonSession",
    "ResourceLimitError",
    "Sandbox",
    "SandboxAgent",
    "SandboxBrowserTool",
    "SandboxCleanupError",
    "SandboxConfig",
    "SandboxConflictError",
    "SandboxCreationError",
    "SandboxError",
    "SandboxExecutionError",
    "SandboxExecutor",
    "SandboxFileDecodeError",
    "SandboxFileError",
    "SandboxFileExistsError",
    "SandboxFileNotFoundError",
    "SandboxFileOperations",
    "SandboxFilesTool",
    "SandboxIsADirectoryError",
    "SandboxLimitError",
    "SandboxManager",
    "SandboxManus",
    "SandboxMonitor",
    "SandboxNotADirectoryError",
    "SandboxNotFoundError",
    "SandboxPathError",
    "SandboxPermissionError",
    "SandboxSettings",
    "SandboxShellTool",
    "SandboxTimeoutError",
    "SandboxVisionTool",
    "Settings",
    "Stats",
    "StoppedError",
    "Terminal",
    "Toolbox",
    "__version__",
    "create_sandbox_client",
    "get_backend",
    "load_settings",
    "run",
    "run_async",
    "sandbox_tools",
]

# Where a name lives, if not in errors.
_HOME = {
    "AsyncDockerizedTerminal": "compat.dockerized_terminal",
    "Backend": "backends.base",
    "BaseSandboxClient": "client",
    "Command": "sandbox.command",
    "CommandResult": "results",
    "DockerSandbox": "compat.docker_sandbox",
    "ExecutionResult": "results",
    "FileInfo": "results",
    "JobResult": "results",
    "LocalSandboxClient": "client",
    "NormalPythonExecute": "tools",
    "PackageInstallTool": "tools",
    "PythonExecute": "tools",
    "PythonSession": "sessions",
    "Sandbox": "sandbox.sandbox",
    "SandboxAgent": "agents",
    "SandboxBrowserTool": "tools",
    "SandboxConfig": "config",
    "SandboxExecutor": "executor",
    "SandboxFileOperations": "client",
    "SandboxFilesTool": "tools",
    "SandboxManager": "manager",
    "SandboxManus": "agents",
    "SandboxMonitor": "sandbox.monitor",
    "SandboxSettings": "compat.sandbox_settings",
    "SandboxShellTool": "tools",
    "SandboxVisionTool": "tools",
    "Settings": "settings",
    "Stats": "results",
    "Terminal": "sandbox.terminal",
    "Toolbox": "tools",
    "create_sandbox_client": "client",
    "get_backend": "backends.registry",
    "load_settings": "settings",
    "run": "executor",
    "run_async": "executor",
    "sandbox_tools": "tools",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
