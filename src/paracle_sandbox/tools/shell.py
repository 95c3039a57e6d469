"""SandboxShellTool runs commands in a sandbox: in the foreground, the background or a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from ..audit import security_events
from ..client import LocalSandboxClient
from ..errors import SandboxError, StoppedError
from ..results import CommandResult
from ..sandbox.command import Command
from ..sandbox.output import TextCallback
from ..sandbox.sandbox import Sandbox
from .arguments import ArgumentFault, normalize_name, to_boolean
from .error_messages import explain_error
from .python import join_lines
from .result import ToolResult, make_failure, shorten, to_observation
from .schema import boolean, schema, seconds, text
from .terminals import Terminals
from .tool import SandboxTool

MAX_BACKGROUND = 20
_ACTIONS = ["execute_command", "check_command_output", "terminate_command", "list_commands"]
_ACTION_ALIASES = {
    "run": "execute_command", "execute": "execute_command", "exec": "execute_command",
    "check": "check_command_output", "poll": "check_command_output",
    "output": "check_command_output", "kill": "terminate_command", "stop": "terminate_command",
    "terminate": "terminate_command", "list": "list_commands",
}  # fmt: skip

# Other names, as normalize_name() returns them: of the command, and of the opposite of blocking.
_COMMAND = ("command", "cmd", "shellcommand")
_BACKGROUND = ("background", "isbackground", "runinbackground")


@dataclass
class Background:
    """A command in the background, and how much of its output the model has seen."""

    text: str
    command: Command
    seen_out: int = 0
    seen_err: int = 0

    def read_new_output(self) -> str:
        """Return what was printed since the last call, with stderr after stdout."""
        out, err = self.command.stdout_bytes, self.command.stderr_bytes
        new_out, new_err = out[self.seen_out :], err[self.seen_err :]
        self.seen_out, self.seen_err = len(out), len(err)
        marked = b"[stderr]: " + new_err if new_err else b""
        return join_lines(new_out.decode("utf-8", "replace"), marked.decode("utf-8", "replace"))

    @property
    def is_spent(self) -> bool:
        """Whether it has ended and the model has seen all of its output."""
        command = self.command
        seen = (len(command.stdout_bytes), len(command.stderr_bytes))
        return command.poll() is not None and seen == (self.seen_out, self.seen_err)


class SandboxShellTool(SandboxTool):
    """Runs shell commands.

    A command in the foreground returns its output. One in the background has a name, by which a
    model reads its output and ends it. A terminal keeps directory and variables between commands.

    A command is run as the model wrote it, because the sandbox is what protects the machine. A
    caller who wants more passes ``policy``, which returns why a command may not be run, or None."""

    name = "sandbox_shell"
    streams = True
    description = (
        "Run shell commands in an isolated sandbox. A command is waited for unless blocking is "
        "false: then it goes on in the background, and check_command_output, terminate_command "
        "and list_commands deal with it by its session_name. With session_name, commands that are "
        "waited for share one terminal: directory and variables stay until terminate_command."
    )
    parameters = schema(
        [],
        action=text("What to do; execute_command if left out.", enum=_ACTIONS),
        command=text("The shell command."),
        folder=text("Directory to run it in, relative to the working directory."),
        session_name=text("Name of a terminal or of a background command."),
        blocking=boolean("Wait for the end; true if left out."),
        timeout=seconds("Seconds it may take; 60 if left out."),
        kill_session=boolean("End it afterwards: what was looked at, or the terminal."),
    )
    aliases: ClassVar = {
        "cmd": "command", "shell_command": "command", "script": "command", "cwd": "folder",
        "directory": "folder", "dir": "folder", "workdir": "folder", "working_dir": "folder",
        "working_directory": "folder", "session": "session_name",
        "name": "session_name", "timeout_seconds": "timeout", "wait": "blocking",
    }  # fmt: skip
    action_aliases = _ACTION_ALIASES
    default_timeout = 60.0
    background_timeout = 3600.0

    def __init__(
        self,
        client: LocalSandboxClient | None = None,
        *,
        policy: Callable[[str], str | None] | None = None,
    ) -> None:
        super().__init__(client)
        self._policy = policy
        self._terminals = Terminals()
        self._background: dict[str, Background] = {}

    def read(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Parse the arguments. A list is one command with its arguments, and ``background`` is the
        opposite of ``blocking``."""
        given = super().read(arguments)
        found = {name: _to_command(name, value) for name, value in given.items()}
        for name in [name for name in found if normalize_name(name) in _BACKGROUND]:
            value = found.pop(name)
            if value is not None:
                found.setdefault("blocking", not to_boolean(name, value))
        return found

    async def run(
        self, action: str = "execute_command", session_name: str = "", **rest: Any
    ) -> ToolResult:
        if action == "list_commands":
            return self._list_commands()
        if action == "check_command_output":
            return await self._check(session_name, rest.get("kill_session", False))
        if action == "terminate_command":
            return await self._terminate(session_name)
        return await self._execute(session_name, **rest)

    @overload
    async def execute(
        self, command: str | Sequence[str], timeout: float | None = None
    ) -> CommandResult: ...
    @overload
    async def execute(
        self,
        command: str | Sequence[str] = "",
        timeout: float | None = None,
        *,
        action: str,
        **arguments: Any,
    ) -> dict[str, Any]: ...

    async def execute(
        self,
        command: str | Sequence[str] = "",
        timeout: float | None = None,
        *,
        action: str | None = None,
        **arguments: Any,
    ) -> CommandResult | dict[str, Any]:
        """Run a command to its end. With an ``action``, do that as call() does, and return
        ``observation``, ``success`` and, if it waited for a command, that command's result. Raises
        the errors of Sandbox.execute, SandboxError for a command that the policy refuses, and
        ValueError for arguments that cannot be used."""
        line = command if isinstance(command, str) else shlex.join(command)
        if action is None and not arguments:
            self._raise_if_refused(line)
            sandbox = await self.sandbox()
            return await sandbox.execute(command, self.seconds_for(sandbox, timeout))
        named = {"action": action, "command": line or None, "timeout": timeout}
        stated = {name: value for name, value in named.items() if value is not None}
        given = self.checked({**stated, **arguments})
        self._raise_if_refused(given.get("command", ""))
        return to_observation(await self.run(**given))

    def _raise_if_refused(self, command: str) -> None:
        if reason := self._find_objection(command):
            raise SandboxError(_refusal(reason), self.client.sandbox_id)

    async def close(self) -> None:
        for background in self._background.values():
            await background.command.kill()
        self._background.clear()
        await self._terminals.close_all()

    # Actions

    async def _execute(
        self,
        session_name: str,
        command: str = "",
        folder: str | None = None,
        blocking: bool = True,
        timeout: float | None = None,
        kill_session: bool = False,
        on_output: TextCallback | None = None,
    ) -> ToolResult:
        if not command.strip():
            raise ArgumentFault("The argument 'command' is missing.")
        if reason := self._find_objection(command):
            return make_failure(_refusal(reason), error_type="blocked", kind="blocked")
        sandbox = await self.sandbox()
        if not blocking:
            return await self._start(sandbox, session_name, command, folder, timeout)
        limit = self.seconds_for(sandbox, timeout)
        if session_name:
            try:
                terminal = await self._terminals.get(sandbox, session_name, folder)
                return _from_command_result(
                    await terminal.run(command, limit, on_stdout=on_output, on_stderr=on_output)
                )
            finally:
                if kill_session:
                    await self._terminals.close(session_name)
        return _from_command_result(
            await sandbox.execute(
                command, limit, cwd=folder, on_stdout=on_output, on_stderr=on_output
            )
        )

    async def _start(
        self, sandbox: Sandbox, name: str, command: str, folder: str | None, timeout: float | None
    ) -> ToolResult:
        self._forget_ended()
        name = name or self._choose_name()
        if name in self._background and self._background[name].command.poll() is None:
            raise ArgumentFault(f"{name!r} still runs; end it first, or choose another name.")
        if len(self._background) >= MAX_BACKGROUND:
            raise ArgumentFault(f"{MAX_BACKGROUND} commands run already; end some first.")
        limit = self.background_timeout if timeout is None else timeout
        started = await sandbox.start_command(command, timeout=limit, cwd=folder)
        self._background[name] = Background(command, started)
        return ToolResult(
            f"Started in the background as {name!r}. Look at it with check_command_output.",
            data={"session_name": name},
        )

    async def _check(self, name: str, kill: bool) -> ToolResult:
        name, background = self._find_background(name)
        command = background.command
        code = command.poll()
        output = background.read_new_output()
        if code is None:
            state = "It still runs."
        else:
            state = f"It has ended with exit code {code}."
            try:
                await command.wait()
            except StoppedError as error:
                state = explain_error(error).text
            except SandboxError as error:
                state = error.message
        if kill:
            await self._terminate(name)
            state += " It is ended now."
        return ToolResult(
            join_lines(shorten(output), state), data={"exit_code": code, "output": output}
        )

    async def _terminate(self, name: str) -> ToolResult:
        if name in self._terminals and name not in self._background:
            await self._terminals.close(name)
            return ToolResult(f"{name!r} is ended; its directory and variables are forgotten.")
        name, background = self._find_background(name)
        await background.command.kill()
        del self._background[name]
        return ToolResult(f"{name!r} is ended, with everything it had started.")

    def _list_commands(self) -> ToolResult:
        lines = [
            f"{name}: {'runs' if entry.command.poll() is None else 'has ended'}: {entry.text[:200]}"
            for name, entry in self._background.items()
        ]
        lines += [f"{name}: terminal" for name in self._terminals]
        return ToolResult("\n".join(lines) or "Nothing runs in the background.")

    def _find_background(self, name: str) -> tuple[str, Background]:
        """Return a background command and its name. If there is only one, the name may be left out.
        Raises ArgumentFault."""
        if not name and len(self._background) == 1:
            name = next(iter(self._background))
        if name not in self._background:
            known = ", ".join(self._background) or "none"
            raise ArgumentFault(f"No background command is called {name!r}; there are: {known}.")
        return name, self._background[name]

    def _find_objection(self, command: str) -> str | None:
        """Ask the policy, and record what it refuses."""
        reason = self._policy(command) if self._policy is not None else None
        if reason:
            security_events.security_event(
                "command_blocked", sandbox_id=self.client.sandbox_id, command=command, reason=reason
            )
        return reason

    def _choose_name(self) -> str:
        number = 1
        while f"command-{number}" in self._background:
            number += 1
        return f"command-{number}"

    def _forget_ended(self) -> None:
        """Make room: forget the commands that have ended and whose output was seen."""
        for name, entry in list(self._background.items()):
            if entry.is_spent:
                del self._background[name]


def _to_command(name: str, value: Any) -> Any:
    is_argv = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return shlex.join(value) if is_argv and normalize_name(name) in _COMMAND else value


def _refusal(reason: str) -> str:
    return f"Refused, nothing was run: {reason}."


def _from_command_result(result: CommandResult) -> ToolResult:
    code = result["exit_code"]
    parts = [shorten(result["stdout"])]
    if result["stderr"]:
        parts.append(f"[stderr]: {shorten(result['stderr'])}")
    if code:
        parts.append(f"(exit code {code})")
    return ToolResult(join_lines(*parts) or "(no output)", is_error=code != 0, data=dict(result))
