"""Check a request for `exec` or `python`, and turn it into the exact bytes of a program start."""

import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

MAX_SOURCE_BYTES = 256 << 10


class Invalid(Exception):
    """The request is malformed; the text says where."""


class Size(NamedTuple):
    """The size of a terminal."""

    rows: int
    columns: int


class Launch(NamedTuple):
    """Everything that is needed to start one program."""

    argv: List[bytes]
    env: Dict[bytes, bytes]
    cwd: bytes
    stdin: bool
    terminal_size: Optional[Size]
    source: Optional[Tuple[bytes, bytes]] = None  # a path, and the text to write there first
    program: Optional[Dict[str, Any]] = None  # for become_program, instead of argv
    terminal: Optional[bytes] = None  # path of the slave side; the command fills it in
    merged: bool = False  # stderr goes where stdout goes
    simple_terminals: bool = False  # the kernel does less for terminals than Linux does


def parse_exec(request: Dict[str, Any], setup: Dict[str, Any]) -> Launch:
    """Parse a request to execute a command. Raises Invalid."""
    argv = _check_strings(request.get("argv"), "argv")
    if not argv:
        raise Invalid("argv is empty")
    launch = Launch([_encode(item, "argv") for item in argv], *_parse_surroundings(request, setup))
    return _set_options(launch, request, setup)


def _set_options(launch: Launch, request: Dict[str, Any], setup: Dict[str, Any]) -> Launch:
    return launch._replace(
        merged=bool(request.get("merge_stderr")),
        simple_terminals=bool(setup.get("simple_terminals")),
    )


def parse_python(request: Dict[str, Any], setup: Dict[str, Any]) -> Launch:
    """Parse a request to run a Python file. Raises Invalid.

    The program is a fork of this process, unless the request asks for a fresh interpreter.
    """
    given = _check_string(request.get("path"), "path")
    argv = _check_strings(request.get("argv") or [], "argv")
    path = os.path.join(_working_dir(setup), given)
    path0 = _check_string(request.get("path0") or os.path.dirname(path), "path0")
    python = str(setup.get("python") or "python3")
    command = [_encode(item, "argv") for item in [python, path, *argv]]
    launch = Launch(command, *_parse_surroundings(request, setup))
    launch = _set_options(launch, request, setup)
    if request.get("source") is not None:
        launch = launch._replace(source=(command[1], _encode_source(request["source"])))
    if request.get("fresh"):
        return launch
    if launch.cwd == _encode(_working_dir(setup), "cwd"):
        path = given  # tracebacks and sys.argv[0] show what the user wrote
    env = {os.fsdecode(key): os.fsdecode(value) for key, value in launch.env.items()}
    spec = {"path": path, "argv": argv, "path0": path0, "env": env, "python": python}
    return launch._replace(program=spec)


def parse_text(request: Dict[str, Any]) -> Optional[bytes]:
    """Return the path of a program text that is to be removed after the command, or None.

    Raises Invalid.
    """
    path = request.get("text")
    return None if path is None else _encode(_check_string(path, "text"), "text")


def parse_size(value: Any) -> Size:
    """Parse the rows and columns of a terminal. Raises Invalid."""
    if isinstance(value, dict):
        value = [value.get("rows", 24), value.get("columns", 80)]
    if not isinstance(value, list) or len(value) != 2:
        raise Invalid("a terminal size must be a list of rows and columns")
    for number in value:
        if type(number) is not int or not 0 < number < 1 << 16:
            raise Invalid("a terminal size must be two whole numbers from 1 to 65535")
    return Size(value[0], value[1])


def _parse_surroundings(
    request: Dict[str, Any], setup: Dict[str, Any]
) -> Tuple[Dict[bytes, bytes], bytes, bool, Optional[Size]]:
    cwd = os.path.join(_working_dir(setup), _check_string(request.get("cwd") or "", "cwd"))
    if not request.get("cwd"):
        cwd = _working_dir(setup)
    size = None if request.get("pty") is None else parse_size(request["pty"])
    return _merge_environment(request, setup), _encode(cwd, "cwd"), bool(request.get("stdin")), size


def _merge_environment(request: Dict[str, Any], setup: Dict[str, Any]) -> Dict[bytes, bytes]:
    merged: Dict[Any, Any] = {} if request.get("clear_env") else dict(setup.get("env") or {})
    given = request.get("env")
    if given is not None and not isinstance(given, dict):
        raise Invalid("env must be an object of names and values")
    merged.update(given or {})
    env = {}
    for name, value in merged.items():
        if not name or "=" in name:
            raise Invalid("env has a name that is empty or contains '='")
        env[_encode(name, "env")] = _encode(_check_string(value, "env"), "env")
    return env


def _working_dir(setup: Dict[str, Any]) -> str:
    return str(setup.get("working_dir") or "/")


def _encode_source(value: Any) -> bytes:
    if not isinstance(value, str):
        raise Invalid("source must be a string")
    try:
        source = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Invalid("source holds characters that UTF-8 cannot encode") from None
    if len(source) > MAX_SOURCE_BYTES:
        raise Invalid("source is longer than %d bytes; write a file first" % MAX_SOURCE_BYTES)
    return source


def _check_strings(value: Any, name: str) -> List[str]:
    if not isinstance(value, list):
        raise Invalid("%s must be a list" % name)
    return [_check_string(item, name) for item in value]


def _check_string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Invalid("%s must be a string" % name)
    return value


def _encode(value: str, name: str) -> bytes:
    if "\0" in value:
        raise Invalid("%s contains a null character" % name)
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Invalid("%s contains a character that UTF-8 cannot encode" % name) from None
