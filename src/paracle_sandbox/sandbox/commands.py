"""Run programs and Python in a sandbox."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Unpack

from ..errors import SandboxError
from ..results import CommandResult
from .command import Command, Terms
from .command_options import (
    MAX_ARGUMENT,
    MAX_SOURCE,
    AnyPath,
    CommandOptions,
    Request,
    check_options,
    checked_code,
    checked_timeout,
    consumers_of,
    exec_request,
    python_request,
    refuse_open_stdin,
    stdin_of,
)
from .files import Files, changes_request
from .life import Life
from .outcome import MIB

# A sandbox that may have no more processes needs each of them: the guest then has few of its own.
FEW_PROCESSES = 32


class Commands:
    """The part of a sandbox that runs programs. Its public methods are described at Sandbox.

    A str is a shell command, a list an argv; ``timeout`` is in seconds, by default the
    configuration's; the other options are those of CommandOptions.
    """

    def __init__(self, life: Life, files: Files) -> None:
        self._life = life
        self._files = files

    async def start_command(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        check_options(options)
        if not isinstance(command, str):
            request = exec_request(command, options)
            await self.wait_for_packages(" ".join(command))
            return self._launch(request, timeout, options)
        await self.wait_for_packages(command)
        if len(command) <= MAX_ARGUMENT // 4:
            return self._launch(exec_request(["sh", "-c", command], options), timeout, options)
        path = self._script_path("script.sh")
        request = exec_request(["sh", path], options)
        return await self._launch_text(request, timeout, options, path, command)

    async def start_code(
        self,
        code: str,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        check_options(options)
        checked_code(code)
        await self.wait_for_packages(code)
        return await self.start_without_packages(code, args, timeout=timeout, **options)

    async def start_without_packages(
        self,
        code: str,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        check_options(options)
        checked_code(code)
        path = self._script_path("code.py")
        request = python_request(path, args, options)
        request["path0"] = self._life.config.working_dir
        if len(code) > MAX_SOURCE // 4:
            return await self._launch_text(request, timeout, options, path, code)
        request["source"] = code
        return self._launch(request, timeout, options, path)

    async def start_file(
        self,
        path: AnyPath,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        check_options(options)
        request = python_request(self._files.checked(path), args, options)
        return self._launch(request, timeout, options)

    async def start_source(
        self,
        name: str,
        source: bytes,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start Python source as the file ``name`` of the working directory.

        The source travels in the request. The guest writes the file as the program starts, so that
        tracebacks can show its lines and the program can read itself. Packages are not waited for.
        """
        check_options(options)
        path = posixpath.join(self._life.config.working_dir, name)
        request = python_request(self._files.checked(path), args, options)
        if len(source) > MAX_SOURCE // 4:
            await self._files.write(self._files.request("write", path), source)
        else:
            request["source"] = source.decode("utf-8", "surrogateescape")
        return self._launch(request, timeout, options)

    async def run_source(
        self,
        name: str,
        source: bytes,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run Python source to its end, as start_source() starts it."""
        refuse_open_stdin(options)
        command = await self.start_source(name, source, args, timeout=timeout, **options)
        return await _outcome(command)

    async def wait_for_packages(self, source: str | bytes) -> None:
        await self._life.backend.wait_for_packages(self._life.sandbox_id, source)

    async def execute(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        refuse_open_stdin(options)
        return await _outcome(await self.start_command(command, timeout=timeout, **options))

    async def run_code(
        self,
        code: str,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        refuse_open_stdin(options)
        return await _outcome(await self.start_code(code, args, timeout=timeout, **options))

    async def run_file(
        self,
        path: AnyPath,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        refuse_open_stdin(options)
        return await _outcome(await self.start_file(path, args, timeout=timeout, **options))

    async def run_command(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> str:
        return text_of(await self.execute(command, timeout, **options))

    async def stream(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> AsyncIterator[tuple[str, bytes]]:
        refuse_open_stdin(options)
        async with await self.start_command(command, timeout=timeout, **options) as running:
            async for chunk in running.output():
                yield chunk
            await running.wait()

    def _launch(
        self,
        request: Request,
        timeout: float | None,
        options: CommandOptions,
        script: str | None = None,
    ) -> Command:
        if request["op"] == "python":
            if self._life.config.fresh_interpreter:
                request["fresh"] = True
            if self._life.config.max_processes < FEW_PROCESSES:
                request["few_processes"] = True
        seconds = self._life.config.timeout_seconds if timeout is None else timeout
        max_output = options.get("max_output")
        stdin = stdin_of(options)
        terms = Terms(
            timeout_seconds=checked_timeout(seconds),
            max_output=self._life.config.max_output_mb * MIB if max_output is None else max_output,
            before=self._life.seen,
            takes_input=stdin is None and ("pty" in request or request["stdin"]),
            consumers=consumers_of(options),
            on_end=lambda: self._life.touch(-1),
        )
        if self._life.config.env_vars and not request.get("clear_env"):
            request["env"] = {**self._life.config.env_vars, **request.get("env", {})}
        if script is not None:
            request["text"] = script  # which the guest removes when it is of no more use
        connection = self._life.live()
        stream = connection.open(request)
        self._life.touch(+1)
        command = Command(self._life, stream, terms)
        listed = options.get("then_listed", False)
        if listed is not False:
            # Asked for now, so that it comes with the result and not after another question.
            wanted: Request = {"op": "list", "path": ".", "recursive": True}
            if isinstance(listed, str):
                wanted = changes_request(listed)
            command.listing = connection.open(wanted, after=stream)
        if stdin is not None:
            command.feed(stdin)
        return command

    async def _launch_text(
        self,
        request: Request,
        timeout: float | None,
        options: CommandOptions,
        path: str,
        text: str,
    ) -> Command:
        """Start a program whose text is too long for the request, and is written first."""
        try:
            await self._files.write(self._files.request("write", path), text.encode())
            return self._launch(request, timeout, options, path)
        except BaseException:
            # It will not be run, and so the guest would not remove it either.
            with suppress(SandboxError):
                await asyncio.shield(self._files.remove(posixpath.dirname(path), recursive=True))
            raise

    def _script_path(self, name: str) -> str:
        """Name a file in a directory of its own for each run, so that concurrent ones do not
        clash."""
        return f"/tmp/.paracle-{os.urandom(6).hex()}/{name}"


async def _outcome(command: Command) -> CommandResult:
    command.only_text()
    try:
        return await command.wait()
    except asyncio.CancelledError:
        await command.kill()
        raise


def text_of(result: CommandResult) -> str:
    """Return what a program printed; its stderr as well when it failed."""
    return result["stdout"] + (result["stderr"] if result["exit_code"] else "")
