"""The tools that a model may call: Python, shell, files, packages, images and a browser.

from paracle_sandbox.tools import PythonExecute
tool = PythonExecute()
print((await tool.execute("print(42)"))["observation"])
await tool.cleanup()
"""

from .browser import SandboxBrowserTool
from .files import SandboxFilesTool
from .packages import PackageInstallTool
from .python import NormalPythonExecute, PythonExecute
from .result import Image, ToolResult
from .shell import SandboxShellTool
from .tool import Tool
from .toolbox import Toolbox, sandbox_tools
from .vision import SandboxVisionTool

__all__ = [
    "Image",
    "NormalPythonExecute",
    "PackageInstallTool",
    "PythonExecute",
    "SandboxBrowserTool",
    "SandboxFilesTool",
    "SandboxShellTool",
    "SandboxVisionTool",
    "Tool",
    "ToolResult",
    "Toolbox",
    "sandbox_tools",
]
