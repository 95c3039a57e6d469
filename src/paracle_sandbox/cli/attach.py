"""``paracle sandbox exec``, ``shell``, ``cp``, ``logs`` and ``rm``: sandboxes of other processes.

A sandbox's guest listens to the process that made it, and to no other. Into a container a further
guest can be sent; where that cannot be done, the user is told why and what can be done instead.
"""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..errors import SandboxError
from . import exit_codes, output
from .exit_codes import UsageFault
from .options import check_backend, check_terminal, settings_or_fault

if TYPE_CHECKING:
    from ..backends.base import Backend, SandboxInfo
    from ..results import CommandResult
    from ..sandbox.sandbox import Sandbox
    from ..settings import Settings

T = TypeVar("T")

_LONGEST_SECONDS = 3600
_WORKING_DIR = "/workspace"
_SHELL = "if command -v bash >/dev/null; then exec bash; else exec sh; fi"


@dataclass(frozen=True)
class Order:
    """A command for a sandbox that is there already."""

    sandbox: str
    command: Sequence[str]
    env: Sequence[str] = ()
    tty: bool = False
    timeout: int = _LONGEST_SECONDS
    backend: str | None = None


def execute(order: Order) -> int:
    """The program's own exit code; 125 when it was not the program that failed."""
    if not order.command:
        raise UsageFault("Say what to run: paracle sandbox exec ID -- COMMAND")
    if not 0 < order.timeout <= _LONGEST_SECONDS:
        raise UsageFault(f"--timeout: from 1 to {_LONGEST_SECONDS} seconds")
    check_terminal(order.tty)
    try:
        result = exit_codes.run(_used(order.sandbox, order.backend, lambda one: _run(one, order)))
    except SandboxError as error:
        output.complain(str(error))
        code = exit_codes.code_for(error)
        return exit_codes.NOT_THE_PROGRAM if code == exit_codes.SANDBOX else code
    code = result["exit_code"]
    return code if code >= 0 else 128 - code


def shell(sandbox: str, backend: str | None) -> int:
    if not sys.stdin.isatty():
        raise UsageFault("A shell needs a terminal; for a script: paracle sandbox exec ID -- sh")
    return execute(Order(sandbox, [_SHELL], tty=True, backend=backend))


async def _run(sandbox: Sandbox, order: Order) -> CommandResult:
    from . import program, stdio
    from .execute import assignments, outlets

    words = list(order.command)
    job = program.Program(
        command=words[0] if len(words) == 1 else words,
        env=assignments(order.env),
        cwd=sandbox.config.working_dir,
        stdin=stdio.own_stdin(),
        on_output=outlets(order.tty),
        timeout=order.timeout,
    )
    if not order.tty:
        return await program.run_command(sandbox, job)
    from .tty import OwnTerminal

    terminal = OwnTerminal(job.stdin)
    kind = {"TERM": terminal.kind() or "dumb"}
    with terminal:
        return await program.run_command(
            sandbox, replace(job, terminal=terminal, env={**kind, **(job.env or {})})
        )


def copy(source: str, target: str, backend: str | None) -> int:
    there, here = _split(source), _split(target)
    if (there is None) == (here is None):
        raise UsageFault("One of the two is of a sandbox: ID:PATH. The other is a path here.")
    if here is not None:
        sandbox, path = here
        if not os.path.exists(source):
            raise UsageFault(f"There is no {source}")
        inside = path if path and path != "." else "./"
        work = lambda one: one.copy_to(source, _absolute(inside))  # noqa: E731
    else:
        assert there is not None
        sandbox, path = there
        if os.path.isdir(target):
            target = os.path.join(target, posixpath.basename(_absolute(path).rstrip("/")))
        work = lambda one: one.copy_from(_absolute(path), target)  # noqa: E731
    exit_codes.run(_used(sandbox, backend, work))
    return exit_codes.SUCCESS


def _split(text: str) -> tuple[str, str] | None:
    """ID and PATH; None for a path of this machine, which may hold a colon behind a slash."""
    sandbox, colon, path = text.partition(":")
    if not colon or not sandbox or "/" in sandbox or sandbox.startswith("."):
        return None
    return sandbox, path


def _absolute(path: str) -> str:
    """A slash at the end says that it goes into that directory, and stays."""
    full = posixpath.normpath(posixpath.join(_WORKING_DIR, path))
    return f"{full}/" if path.endswith("/") else full


def logs(sandbox: str, backend: str | None) -> int:
    info = exit_codes.run(_with(sandbox, backend, _info))
    raise SandboxError(
        f"No output of sandbox {info.sandbox_id} is kept: what a program prints goes to the "
        f"process that started it{_owner(info)}. Save it from there: paracle sandbox execute "
        "--output FILE, or the result's stdout and stderr in Python.",
        info.sandbox_id,
    )


def remove(sandboxes: Sequence[str], backend: str | None, force: bool, as_json: bool) -> int:
    if not sandboxes:
        raise UsageFault("Name the sandboxes, as paracle sandbox list shows them")
    removed = []
    for sandbox in sandboxes:
        removed.append(exit_codes.run(_with(sandbox, backend, lambda b, i: _destroy(b, i, force))))
        if not as_json:
            output.say(f"✅ Removed {removed[-1]}")
    if as_json:
        output.say_json({"removed": removed})
    return exit_codes.SUCCESS


async def _destroy(backend: Backend, info: SandboxInfo, force: bool) -> str:
    if info.owner_alive and not force:
        raise UsageFault(
            f"Sandbox {info.sandbox_id} is in use{_owner(info)}; to remove it all the same: --force"
        )
    await backend.destroy(info.sandbox_id)
    return info.sandbox_id


async def _info(backend: Backend, info: SandboxInfo) -> SandboxInfo:
    return info


def _owner(info: SandboxInfo) -> str:
    return f" by process {info.owner_pid}" if info.owner_pid else " by a client of the service"


async def _with(
    sandbox: str, backend: str | None, work: Callable[[Backend, SandboxInfo], Awaitable[T]]
) -> T:
    """Do something with the one sandbox whose id begins like this. Raises UsageFault when there
    is none, or several."""
    from ..backends.registry import find_sandboxes

    check_backend(backend)
    async with AsyncExitStack() as stack:
        found = await find_sandboxes(settings_or_fault(), stack, backend)
        return await work(*_chosen(found, sandbox))


def _chosen(
    found: Sequence[tuple[Backend, SandboxInfo]], sandbox: str
) -> tuple[Backend, SandboxInfo]:
    exact = [one for one in found if one[1].sandbox_id == sandbox]
    fitting = exact or [one for one in found if sandbox and one[1].sandbox_id.startswith(sandbox)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UsageFault(
            f"There is no sandbox {sandbox!r}; see: paracle sandbox list. "
            "Those of a service are found with --backend remote."
        )
    ids = ", ".join(sorted(info.sandbox_id for _, info in fitting))
    raise UsageFault(f"Several sandboxes begin with {sandbox!r}: {ids}")


async def _used(sandbox: str, backend: str | None, work: Callable[[Sandbox], Awaitable[T]]) -> T:
    """Do something inside. Raises SandboxError that says why it cannot be entered."""
    settings = settings_or_fault()

    async def enter(backend: Backend, info: SandboxInfo) -> T:
        return await _inside(info, settings, work)

    return await _with(sandbox, backend, enter)


async def _inside(
    info: SandboxInfo, settings: Settings, work: Callable[[Sandbox], Awaitable[T]]
) -> T:
    from ..backends.registry import entrance
    from ..config import SandboxConfig
    from ..ids import new_sandbox_id
    from ..sandbox.sandbox import Sandbox

    config = SandboxConfig(timeout_seconds=_LONGEST_SECONDS, working_dir=_WORKING_DIR)
    async with Sandbox(entrance(info, settings), new_sandbox_id(), config) as guest:
        return await work(guest)
