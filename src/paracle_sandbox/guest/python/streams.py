"""Create the standard streams and the locale of a program as the interpreter creates them."""

import _locale
import codecs
import io
import os
import stat
import sys
from typing import Any, Dict, NamedTuple, Optional, Tuple, Type

# With one of these as the locale for characters, the standard streams let undecodable bytes
# through. A program gets them if no locale was chosen for it.
_LENIENT_LOCALES = ("C", "POSIX", "C.UTF-8", "C.utf8", "UTF-8")
_COERCED = "C.UTF-8"
_NAMES = ("<stdin>", "<stdout>", "<stderr>")
_NULL_DEVICE = os.makedev(1, 3)
_LocaleError: Type[Exception] = _locale.Error  # type: ignore[attr-defined]


class Text(NamedTuple):
    """How the standard streams encode text."""

    encoding: str
    errors: str
    utf8_mode: bool


def settle_locale(env: Dict[str, str]) -> Optional[Text]:
    """Set the locale that os.environ asks for. Returns None if only a new interpreter can do it.

    This follows PEP 538 and 540: without a usable locale, C.UTF-8 is put into the environment.
    """
    try:
        name = _locale.setlocale(_locale.LC_CTYPE, "")
    except _LocaleError:
        name = "C"
    utf8_mode = name in ("C", "POSIX")
    if utf8_mode:
        if env.get("LC_ALL"):
            return None
        try:
            name = _locale.setlocale(_locale.LC_CTYPE, _COERCED)
        except _LocaleError:
            return None
        os.environ["LC_CTYPE"] = _COERCED
    if _locale.nl_langinfo(_locale.CODESET).upper() != "UTF-8":
        return None
    errors = "surrogateescape" if name in _LENIENT_LOCALES else "strict"
    return _chosen(env.get("PYTHONIOENCODING", ""), Text("utf-8", errors, utf8_mode))


def _chosen(setting: str, text: Text) -> Optional[Text]:
    encoding, _, errors = setting.partition(":")
    if encoding:
        try:
            text = text._replace(encoding=codecs.lookup(encoding).name, errors="strict")
        except LookupError:
            return None
    return text._replace(errors=errors) if errors else text


def prepare_streams(text: Text, unbuffered: bool) -> None:
    """Create the streams that most programs have: no input, and pipes for output.

    Forks share them.
    """
    _prepared.clear()
    ends = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, usual in ((0, null), (1, ends[1]), (2, ends[1])):
        before, inheritable = os.dup(fd), os.get_inheritable(fd)
        os.dup2(usual, fd)
        _prepared[fd, text, unbuffered] = _open(fd, text, unbuffered)
        os.dup2(before, fd, inheritable)
        os.close(before)
    for end in (*ends, null):
        os.close(end)


_prepared: Dict[Tuple[int, Text, bool], Optional[io.TextIOWrapper]] = {}


def open_streams(text: Text, unbuffered: bool, rehearsal: bool = False) -> None:
    """Replace sys.stdin, stdout and stderr."""
    stdin = _stream(0, text, unbuffered, rehearsal)
    stdout = _stream(1, text, unbuffered, rehearsal)
    stderr = _stream(2, text, unbuffered, rehearsal)
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stderr  # type: ignore[misc]


def _stream(fd: int, text: Text, unbuffered: bool, rehearsal: bool) -> Optional[io.TextIOWrapper]:
    prepared = _prepared.get((fd, text, unbuffered)) if _is_usual(fd) or rehearsal else None
    return prepared or _open(fd, text, unbuffered)


def _is_usual(fd: int) -> bool:
    """Return whether a descriptor is of the kind that `prepare_streams` assumed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) if fd else found.st_rdev == _NULL_DEVICE


def _open(fd: int, text: Text, unbuffered: bool) -> Optional[io.TextIOWrapper]:
    writes = fd != 0
    name = _NAMES[fd]
    if fd == 2:
        text = text._replace(errors="backslashreplace")
    try:
        binary: Any = io.open(  # noqa: SIM115 - it stays open
            fd, "wb" if writes else "rb", 0 if writes and unbuffered else -1, closefd=False
        )
    except OSError:
        return None  # a closed descriptor is None in sys
    raw = getattr(binary, "raw", binary)
    raw.name = name
    eager = fd == 2 and sys.version_info >= (3, 9)
    stream: Any = io.TextIOWrapper(
        binary,
        encoding=text.encoding,
        errors=text.errors,
        newline="\n",
        line_buffering=not unbuffered and (eager or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = "w" if writes else "r"
    return stream  # type: ignore[no-any-return]
