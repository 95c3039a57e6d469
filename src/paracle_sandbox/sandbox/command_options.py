"""Check the options of a command, and turn them into requests to the guest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ..errors import InvalidValueError
from .output import BytesCallback, Consumers, TextCallback

# The kernel takes no longer argument; a longer script travels as a file.
MAX_ARGUMENT = 100 << 10
# As JSON escapes it may be six times as long, and has to fit into a frame.
MAX_SOURCE = 128 << 10
_TERMINAL_SIZE = (24, 80)

AnyPath = str | os.PathLike[str]
Request = dict[str, Any]
Stdin = str | bytes | bytearray | memoryview | None


class CommandOptions(TypedDict, total=False):
    """Say how to run a command. All may be left out.

    ``env`` is added to the sandbox's environment, or replaces it with ``clear_env``; ``stdin``
    is what it reads, or True to keep it open for ``write_stdin``; ``pty`` gives it a terminal,
    of (rows, columns) if that matters. The callbacks, plain or async, see output as it comes:
    ``on_stdout`` and ``on_stderr`` text, ``on_output_bytes`` the stream's name and bytes.
    ``merge_stderr`` has stderr arrive as stdout, in the order in which both were written.
    ``max_output`` is how many bytes are collected. ``then_listed`` has the files listed as soon
    as it has ended, for ``listed_after``; a str, the token of ``list_changes`` or "", has the
    changes since then listed, for ``list_changes``.
    """

    env: Mapping[str, str] | None
    clear_env: bool
    cwd: AnyPath | None
    stdin: Stdin | bool
    pty: bool | tuple[int, int] | None
    on_stdout: TextCallback | None
    on_stderr: TextCallback | None
    on_output_bytes: BytesCallback | None
    merge_stderr: bool
    max_output: int | None
    then_listed: bool | str


_NAMES = CommandOptions.__optional_keys__
_MAX_SIZE = 0xFFFF


def check_options(options: CommandOptions) -> None:
    """Raises TypeError for a misspelt option, as any call would, and for what could not be meant:
    here, where nothing has been started that would have to be ended."""
    if unknown := set(options) - _NAMES:
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; there are {sorted(_NAMES)}")
    check_stdin(options.get("stdin"))
    _check_max_output(options.get("max_output"))
    for name in ("on_stdout", "on_stderr", "on_output_bytes"):
        callback = options.get(name)
        if callback is not None and not callable(callback):
            raise TypeError(f"{name} must be a function, not {type(callback).__name__}")


def refuse_open_stdin(options: CommandOptions) -> None:
    """Refuse an open stdin for a command that is only waited for: it could not be written to, nor
    closed."""
    if options.get("stdin") is True:
        raise InvalidValueError(
            "stdin=True keeps the input open for write_stdin(): use start_command() or "
            "start_code(), or give the input itself"
        )


def check_stdin(stdin: Stdin | bool) -> None:
    """Refuse what is neither text nor bytes: it would never be written, and the program wait for
    it."""
    if not isinstance(stdin, Stdin | bool):
        raise TypeError(f"stdin must be a str, bytes or True, not {type(stdin).__name__}")


def checked_code(code: str) -> str:
    if not isinstance(code, str):
        raise TypeError(f"code must be a str, not {type(code).__name__}; a file has run_file()")
    return code


def checked_size(rows: int, columns: int) -> tuple[int, int]:
    if not all(isinstance(n, int) and 0 < n <= _MAX_SIZE for n in (rows, columns)):
        raise InvalidValueError(f"a terminal size is two numbers from 1 to {_MAX_SIZE}")
    return rows, columns


def _check_max_output(size: int | None) -> None:
    if not isinstance(size, int | None):
        raise TypeError(f"max_output must be a number of bytes, not {type(size).__name__}")
    if size is not None and size < 0:
        raise InvalidValueError(f"max_output must be a number of bytes, not {size}")


def exec_request(argv: Sequence[str], options: CommandOptions) -> Request:
    """Raises ValueError for what no program can be started with."""
    arguments = _arguments(argv, "a command must be a str or")
    if not arguments:
        raise InvalidValueError("the command is empty")
    return {"op": "exec", "argv": arguments, **_surroundings(options)}


def python_request(path: str, args: Sequence[str], options: CommandOptions) -> Request:
    arguments = _arguments(args, "args must be")
    return {"op": "python", "path": path, "argv": arguments, **_surroundings(options)}


def consumers_of(options: CommandOptions) -> Consumers:
    return Consumers(
        options.get("on_stdout"), options.get("on_stderr"), options.get("on_output_bytes")
    )


def stdin_of(options: CommandOptions) -> bytes | None:
    """Return what to write to its stdin, if anything."""
    stdin = options.get("stdin")
    if isinstance(stdin, str):
        return stdin.encode()
    return None if stdin is None or isinstance(stdin, bool) else bytes(stdin)


def checked_seconds(name: str, value: float) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:
        raise InvalidValueError(f"{name} must be a number of seconds, not {value}")
    return value


def checked_timeout(timeout: float) -> float:
    """Return the timeout as a float; infinity is no limit. Raises InvalidValueError."""
    if not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout > 0:
        raise InvalidValueError(
            f"timeout must be a positive number of seconds, not {timeout!r}; math.inf is no limit, "
            "and None what the configuration says"
        )
    return float(timeout)


def _surroundings(options: CommandOptions) -> Request:
    request: Request = {"stdin": options.get("stdin") not in (None, False)}
    if (env := options.get("env")) is not None:
        if not isinstance(env, Mapping):
            raise TypeError(f"env must be a dict of strings, not {type(env).__name__}")
        request["env"] = {_name(name): _text(value, name) for name, value in env.items()}
    if options.get("clear_env"):
        request["clear_env"] = True
    if options.get("merge_stderr"):
        request["merge_stderr"] = True
    if (cwd := options.get("cwd")) is not None:
        request["cwd"] = _text(os.fspath(cwd) if isinstance(cwd, os.PathLike) else cwd, "cwd")
    if (pty := options.get("pty")) not in (None, False):
        rows, columns = _terminal_size(pty)
        request["pty"] = {"rows": rows, "columns": columns}
    return request


def _terminal_size(pty: Any) -> tuple[int, int]:
    match pty:
        case True:
            return _TERMINAL_SIZE
        case (rows, columns):
            return checked_size(rows, columns)
    raise TypeError(f"pty must be True or (rows, columns), not {pty!r}")


def _arguments(items: Iterable[str], what: str) -> list[str]:
    """One text is a sequence of texts too, and so never what was meant."""
    if isinstance(items, str | bytes | bytearray) or not isinstance(items, Iterable):
        raise TypeError(f"{what} a list of strings, not {type(items).__name__}")
    return [_text(item, "argument") for item in items]


def _name(name: str) -> str:
    if not _text(name, "environment variable") or "=" in name:
        raise InvalidValueError(f"not the name of an environment variable: {name!r}")
    return name


def _text(value: str, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise InvalidValueError(f"{what} contains a NUL byte")
    return value
