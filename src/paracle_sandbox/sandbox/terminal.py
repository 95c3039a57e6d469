"""A terminal: commands that follow one another and share directory, variables and functions.

Each command is a fresh shell that restores the state its predecessor saved, runs the command,
and saves the state again on its way out, whichever way that is. So the output is exactly the
command's, the exit code is the shell's own, and a command that is killed leaves the terminal
usable, with the state from before it. The command's text travels as an argument or a file and
is never part of the script. bash keeps everything; another sh cannot print its functions and
aliases, and so keeps all but those.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..errors import SandboxError, SandboxExecutionError
from ..results import CommandResult
from .command_options import MAX_ARGUMENT, CommandOptions
from .commands import text_of
from .output import TextCallback
from .sandbox import Sandbox

# What the shell is started with: $1 is the directory of the state, $2 the command (or empty
# when it is in the file "command"), $3 the prelude below. One line and one group, so that the
# shell counts the command's lines from 1 and has parsed the rest before it meets its errors.
_START = (
    'eval "$3"; set --; { _paracle_last; eval "$_paracle_command"; '
    "{ _paracle_save $?; } 2>/dev/null; }"
)

# Restores the state, and prepares to save it. It is replaced by renaming: a shell that dies
# while saving leaves the old one whole. Saving first switches off every option that could
# print, stop or refuse in the middle of it. The command begins with the exit status of the last
# one in $?, unless that would end it at once.
_PRELUDE = """
_paracle_dir=$1 _paracle_command=$2
[ -n "$2" ] || _paracle_command=$(cat "$1/command")
if [ -f "$1/state" ]; then
    . "$1/state" 2>/dev/null
    _paracle_old=${OLDPWD-}
    cd -- "$PWD" 2>/dev/null || cd -P . 2>/dev/null
    OLDPWD=$_paracle_old
    [ -n "$OLDPWD" ] || unset OLDPWD
    unset _paracle_old
fi
_paracle_last() {
    case $- in
        *e*) return 0 ;;
    esac
    return "${_paracle_status:-0}"
}
_paracle_save() {
    _paracle_status=${1:-$?}
    _paracle_flags=$-
    set +aefuxC
    [ -z "${_paracle_saved-}" ] || return "${1:-0}"
    unset _paracle_command
    {
        _paracle_print
        printf 'umask '
        umask
    } >|"$_paracle_dir/new" && command mv -f "$_paracle_dir/new" "$_paracle_dir/state"
    _paracle_saved=yes
    return "${1:-0}"
}
trap '{ _paracle_save; } 2>/dev/null' EXIT
for _paracle_flag in a C e f u; do
    case ${_paracle_flags-} in
        *$_paracle_flag*) set -$_paracle_flag ;;
    esac
done
case ${_paracle_flags-} in
    *x*) _paracle_command="set -x; $_paracle_command" ;;
esac
"""

_BASH = """
shopt -s expand_aliases
_paracle_print() {
    shopt -p
    builtin declare -p
    builtin declare -f
    builtin declare -Fx
    builtin alias -p
    shopt -po pipefail
}
"""

_SH = """
_paracle_print() {
    set
    export -p
    readonly -p
}
"""


class Terminal:
    """One command at a time; further ones wait their turn. Closed, its state is gone.

    ``shell`` is bash where the sandbox has it, else sh, unless given.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        working_dir: str | None = None,
        env_vars: Mapping[str, str] | None = None,
        default_timeout: float = 60,
        shell: str | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._working_dir = working_dir
        self._env_vars = dict(env_vars or {})
        self._default_timeout = default_timeout
        self.directory = f"/tmp/.paracle-term-{secrets.token_hex(6)}"
        self._wanted = ["bash", "sh"] if shell is None else [shell]
        self._shell = ""
        self._turn = asyncio.Lock()

    async def init(self) -> None:
        """Find the shell and make room for the state. A second call is a no-op."""
        if self._shell:
            return
        script = 'for shell; do command -v "$shell" && exit; done'
        found = await self._sandbox.execute(["sh", "-c", script, "sh", *self._wanted])
        shell = found["stdout"].strip()
        if not shell.startswith("/"):
            raise SandboxExecutionError(
                f"The sandbox has no shell: looked for {', '.join(self._wanted)}",
                self._sandbox.sandbox_id,
            )
        await self._sandbox.mkdir(self.directory)
        self._shell = shell

    async def run(
        self,
        command: str,
        timeout: float | None = None,
        *,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> CommandResult:
        """Run a command where the last one left off. Raises as Sandbox.execute does; the
        terminal stays usable. The callbacks see output as it comes."""
        async with self._turn:
            if not self._shell:  # it may have been closed while this one waited
                raise SandboxExecutionError("Terminal not initialised", self._sandbox.sandbox_id)
            if not isinstance(command, str):
                raise TypeError(f"a command must be a str, not {type(command).__name__}")
            text = command
            if not command or len(command) > MAX_ARGUMENT // 4:
                text = ""
                await self._sandbox.write_file(f"{self.directory}/command", command)
            is_bash = self._shell.endswith("bash")
            prelude, name = (_BASH, "bash") if is_bash else (_SH, "sh")
            arguments = [name, self.directory, text, prelude + _PRELUDE]
            argv = [self._shell, "-c", _START, *arguments]
            seconds = self._default_timeout if timeout is None else timeout
            options = await self._surroundings()
            options["on_stdout"], options["on_stderr"] = on_stdout, on_stderr
            return await self._sandbox.execute(argv, seconds, **options)

    async def run_command(self, command: str, timeout: float | None = None) -> str:
        """Run a command; what it printed, and its stderr as well when it failed."""
        return text_of(await self.run(command, timeout))

    async def _surroundings(self) -> CommandOptions:
        """The first command gets the environment; later ones have it, and what was unset of
        it stays so, in their state."""
        options: CommandOptions = {"cwd": self._working_dir}
        if await self._sandbox.exists(f"{self.directory}/state"):
            options["clear_env"] = True
        else:
            options["env"] = self._env_vars
        return options

    async def close(self) -> None:
        """Idempotent."""
        if not self._shell:
            return
        self._shell = ""
        if self._sandbox.is_running:
            with suppress(SandboxError):  # else it goes with the sandbox
                await self._sandbox.remove(self.directory, recursive=True)

    async def __aenter__(self) -> Self:
        await self.init()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
