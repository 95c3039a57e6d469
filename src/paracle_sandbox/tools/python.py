"""PythonExecute runs Python code in a sandbox, with variables that stay or without."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NotRequired, TypedDict, get_args

from ..client import LocalSandboxClient
from ..results import CommandResult
from ..sandbox.output import TextCallback
from ..sessions import CellResult, PythonSession
from .arguments import ArgumentFault, extract_code
from .packages import install
from .result import Image, ToolResult, shorten
from .schema import boolean, schema, seconds, text, texts
from .tool import SandboxTool

CodeType = Literal["process", "report", "others"]


class PythonResult(TypedDict):
    """The result of a run. ``observation`` is what a model should see: what was printed, and the
    error if it failed."""

    observation: str
    success: bool
    exit_code: int
    stdout: str
    stderr: str
    shown: NotRequired[list[dict[str, str]]]
    code_type: NotRequired[CodeType]


class PythonExecute(SandboxTool):
    """Runs code in the client's sandbox, which is made on first use and kept.

    With ``stateful``, variables, imports and functions stay from one call to the next.
    """

    name = "python_execute"
    streams = True
    description = (
        "Run Python code in an isolated sandbox and get what it prints. Only printed output is "
        "returned: use print(). Files in the working directory stay between calls."
    )
    parameters = schema(
        ["code"],
        code=text("The Python code to run."),
        timeout=seconds("Seconds it may take; 300 if left out."),
    )
    aliases: ClassVar = {
        "python_code": "code", "script": "code", "source": "code", "python": "code",
        "input": "code", "command": "code", "timeout_seconds": "timeout",
    }  # fmt: skip
    stateful_parameters = schema(
        ["code"],
        code=text("The Python code to run. The value of a last expression is shown."),
        timeout=seconds("Seconds it may take; 300 if left out."),
        reset=boolean("Forget all variables first."),
    )

    def __init__(self, client: LocalSandboxClient | None = None, *, stateful: bool = False) -> None:
        super().__init__(client)
        self.stateful = stateful
        self._session: PythonSession | None = None
        if stateful:
            self.parameters = self.stateful_parameters
            self.description = (
                "Run Python code in an interpreter that keeps its variables between calls, in an "
                "isolated sandbox. What it prints, the value of the last expression, tables and "
                "matplotlib figures are returned."
            )

    async def execute(
        self,
        code: str,
        timeout: float | None = None,
        *,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> PythonResult:
        """Run the code. Code that fails is a result without success. Raises SandboxTimeoutError,
        ResourceLimitError or SandboxExecutionError when it was stopped."""
        source = extract_code(code)
        sandbox = await self.sandbox()
        limit = self.seconds_for(sandbox, timeout)
        if not self.stateful:
            return _from_program(
                await sandbox.run_code(
                    source, timeout=limit, on_stdout=on_stdout, on_stderr=on_stderr
                )
            )
        session = await self.session()
        result = await session.run(source, limit, on_stdout=on_stdout, on_stderr=on_stderr)
        return _from_cell(result)

    async def run(
        self,
        code: str,
        timeout: float | None = None,
        reset: bool = False,
        on_output: TextCallback | None = None,
    ) -> ToolResult:
        if reset:
            await self.reset()
        return to_tool_result(
            await self.execute(code, timeout, on_stdout=on_output, on_stderr=on_output)
        )

    async def session(self) -> PythonSession:
        """Return the interpreter that keeps variables, or a new one if its sandbox is gone."""
        sandbox = await self.sandbox()
        if self._session is None or self._session.sandbox is not sandbox:
            self._session = PythonSession(sandbox)
        return self._session

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the code that runs now, if any."""
        if self._session is not None:
            await self._session.interrupt()

    async def reset(self) -> None:
        """Forget all variables. The next call starts a new interpreter."""
        if self._session is not None:
            await self._session.reset()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.sandbox.is_running:
            await session.close()


class NormalPythonExecute(PythonExecute):
    """Runs code for data analysis. It can install packages first."""

    description = (
        "Run Python code for data analysis in an isolated sandbox and get what it prints. Only "
        "printed output is returned: use print(). Packages that it needs can be named."
    )
    parameters = schema(
        ["code"],
        code=text("The Python code to run."),
        code_type=text(
            "What it is for: process data, write a report, or something else.",
            enum=list(get_args(CodeType)),
        ),
        packages=texts("Packages to install first, such as numpy or pandas."),
        timeout=seconds("Seconds it may take; 300 if left out."),
    )
    aliases: ClassVar = {**PythonExecute.aliases, "requirements": "packages", "type": "code_type"}
    stateful_parameters = schema(
        ["code"], **parameters["properties"], reset=boolean("Forget all variables first.")
    )

    async def execute(
        self,
        code: str,
        timeout: float | None = None,
        code_type: CodeType | None = None,
        packages: Sequence[str] = (),
        *,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> PythonResult:
        """Install the packages and run the code, as PythonExecute does. If the installation fails,
        that is the result and the code is not run. Raises ValueError for an invalid package."""
        if code_type not in (None, *get_args(CodeType)):
            raise ArgumentFault(f"code_type must be one of {get_args(CodeType)}.")
        installed = await install(await self.sandbox(), packages) if packages else None
        if installed is not None and installed.is_error:
            result = _from_failed_installation(installed)
        else:
            result = await super().execute(code, timeout, on_stdout=on_stdout, on_stderr=on_stderr)
        return {**result, "code_type": code_type or "process"}

    async def run(  # type: ignore[override]  # fewer arguments would not fit its schema
        self,
        code: str,
        timeout: float | None = None,
        code_type: CodeType | None = None,
        packages: Sequence[str] = (),
        reset: bool = False,
        on_output: TextCallback | None = None,
    ) -> ToolResult:
        if reset:
            await self.reset()
        return to_tool_result(
            await self.execute(
                code, timeout, code_type, packages, on_stdout=on_output, on_stderr=on_output
            )
        )


def to_tool_result(result: PythonResult) -> ToolResult:
    """Return the result as a model gets it, with the images that code has shown."""
    images = tuple(image for shown in result.get("shown", []) for image in _to_images(shown))
    return ToolResult(
        shorten(result["observation"]) or "(no output)",
        is_error=not result["success"],
        images=images,
        data=dict(result),
    )


def _from_failed_installation(failure: ToolResult) -> PythonResult:
    return {
        "observation": failure.text,
        "success": False,
        "exit_code": failure.data["exit_code"],
        "stdout": failure.data["stdout"],
        "stderr": failure.data["stderr"],
    }


def _to_images(shown: Mapping[str, str]) -> list[Image]:
    """Return the image of a value: the first form is enough if it has several."""
    types = [name for name in ("image/png", "image/jpeg") if name in shown]
    return [Image(base64.b64decode(shown[name]), name) for name in types[:1]]


def _from_program(result: CommandResult) -> PythonResult:
    success = result["exit_code"] == 0
    observation = result["stdout"]
    if not success:
        observation = join_lines(observation, result["stderr"])
    return {
        "observation": observation,
        "success": success,
        "exit_code": result["exit_code"],
        "stdout": result["stdout"],
        "stderr": result["stderr"],
    }


def _from_cell(result: CellResult) -> PythonResult:
    parts = [result["stdout"], result["stderr"] and f"[stderr]: {result['stderr']}"]
    parts += [_describe_shown(shown) for shown in result["shown"]]
    if result["error"] is not None:
        parts.append(result["error"]["traceback"])
    return {
        "observation": join_lines(*parts),
        "success": result["success"],
        "exit_code": 0 if result["success"] else 1,
        "stdout": result["stdout"],
        "stderr": result["stderr"],
        "shown": result["shown"],
    }


def _describe_shown(shown: Mapping[str, str]) -> str:
    return shown.get("text/plain") or ", ".join(f"({kind})" for kind in shown)


def join_lines(*parts: str) -> str:
    """Join parts so that each begins on a line of its own. Empty parts are left out."""
    whole = ""
    for part in filter(None, parts):
        whole += ("\n" if whole and not whole.endswith("\n") else "") + part
    return whole
