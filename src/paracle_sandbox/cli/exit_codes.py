"""How a command ends: exit codes, signals, and errors turned into one plain line.

0 success                       3 the sandbox failed, or stopped the program at a limit
1 the program failed, or "no"   124 the program was stopped at its deadline
2 wrong usage                   128 + N  signal N ended the command
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, ParamSpec, TypeVar

from ..errors import SandboxError, SandboxTimeoutError
from ..host.platforms import SIGPIPE
from .output import complain, note

SUCCESS, FAILURE, USAGE, SANDBOX, TIMEOUT = 0, 1, 2, 3, 124
# As docker, env and chroot end when it was not the program that failed.
NOT_THE_PROGRAM = 125
_DEBUG = 10
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)

# What has to be undone whichever way the process ends, such as the mode of the user's terminal.
before_leaving: list[Callable[[], None]] = []
# The signal that ends the command, once there is one.
ended_by: list[int] = []

P = ParamSpec("P")
T = TypeVar("T")


class UsageFault(Exception):
    """The user asked for something that cannot be; the message says what can."""


class Ended(Exception):
    """A signal ended the command, and everything it had made is gone."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.number = number


def ends_with_a_code(command: Callable[P, int]) -> Callable[P, None]:
    """A command that returns its exit code, and whose errors become a line and a code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        sys.exit(code_of(functools.partial(command, *args, **kwargs)))

    return run


def code_of(command: Callable[[], int]) -> int:
    """Run a command; its errors become a line and a code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # From here on there may be something to clean up.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return command()
    except UsageFault as error:
        complain(str(error))
        return USAGE
    except SandboxError as error:
        complain(str(error))
        return code_for(error)
    except Ended as error:
        return 128 + error.number
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + SIGPIPE
    except OSError as error:
        complain(str(error))
        return SANDBOX
    except Exception as error:  # noqa: BLE001  the user is told in a line, whatever it is
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """A mistake of ours. Its traceback is for whoever mends it, and shown when asked for."""
    complain(
        f"Unexpected {type(error).__name__}: {error}. This is a mistake in paracle; "
        "PARACLE_SANDBOX_LOG_LEVEL=debug shows where."
    )
    if "logging" in sys.modules and sys.modules["logging"].getLogger().isEnabledFor(_DEBUG):
        import traceback

        note("".join(traceback.format_exception(error)))
    return SANDBOX


def code_for(error: SandboxError) -> int:
    return TIMEOUT if isinstance(error, SandboxTimeoutError) else SANDBOX


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end. The first signal has it clean up and raises Ended; a second one does
    not wait for that: what is left then ends by itself, because its owner has."""
    import asyncio
    import gc

    # main() switched it off for the imports; those are never looked through again.
    gc.freeze()
    gc.enable()
    received: list[int] = []

    def on_signal(number: int, task: asyncio.Task[T]) -> None:
        if received:
            leave(128 + number)
        received.append(number)
        ended_by[:] = [number]
        task.cancel()

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        for number in _SIGNALS:
            # One that the caller ignores (nohup, a background job) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(NotImplementedError):  # Windows has Ctrl-C alone
                    loop.add_signal_handler(number, on_signal, number, task)
        return await task

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Ended(received[0] if received else signal.SIGINT) from None


def leave_for_signal() -> None:
    """End the process as the signal has it that was received; no-op without one."""
    if ended_by:
        leave(128 + ended_by[0])


def leave(code: int) -> NoReturn:
    """End the process without taking the interpreter apart, which would take longer than most
    commands; nothing of ours waits for that."""
    for undo in [*before_leaving]:
        undo()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = code or 128 + SIGPIPE
    except (OSError, ValueError) as error:
        # A disk that is full, for example: what was printed is not all there.
        complain(f"The output cannot be written: {getattr(error, 'strerror', None) or error}")
        code = code or SANDBOX
    os._exit(code)
