"""Tools for agents: Python, shell, files and packages of a sandbox, as functions of a model.

from paracle_sandbox.tools import PythonExecute
tool = PythonExecute()
print((await tool.execute("print(42)"))["observation"])
await tool.cleanup()
"""

from .files import SandboxFilesTool
from .packages import PackageInstallTool
from .python import NormalPythonExecute, PythonExecute
from .result import Image, ToolResult
from .shell import SandboxShellTool
from .tool import Tool
from .toolbox import Toolbox, sandbox_tools

__all__ = [
    "Image",
    "NormalPythonExecute",
    "PackageInstallTool",
    "PythonExecute",
    "SandboxFilesTool",
    "SandboxShellTool",
    "Tool",
    "ToolResult",
    "Toolbox",
    "sandbox_tools",
]
