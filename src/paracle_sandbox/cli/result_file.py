"""The file of ``--output``: the result as JSON, whole or not at all."""

from __future__ import annotations

import os
import stat

from ..errors import SandboxError
from . import output
from .exit_codes import UsageFault


def check_output(file: str | None) -> None:
    """Refuse an ``--output`` that cannot be written before the program runs, so that its result is
    not lost. Until there is a result, nothing is left: neither a new file, nor a pipe whose reader
    has been told that this is all."""
    if file is None:
        return
    try:
        is_new = not os.path.lexists(file)
        if is_new or not stat.S_ISFIFO(os.stat(file).st_mode):
            with open(file, "ab"):
                pass
        if is_new:
            os.unlink(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageFault(f"--output: cannot write {file}: {reason}") from None


def save_document(file: str, document: object) -> None:
    """Save a document as JSON, whole or not at all. Raises SandboxError that names the file."""
    try:
        _write_whole(file, output.as_json(document) + "\n")
    except OSError as error:
        raise SandboxError(
            f"--output: {file} cannot be written: {error.strerror or error}. Nothing was saved."
        ) from error


def _write_whole(file: str, text: str) -> None:
    """Replace a file by a new one; a disk that is full leaves the old one, and no half."""
    target = os.path.realpath(file)
    try:
        is_regular = stat.S_ISREG(os.stat(target).st_mode)
    except FileNotFoundError:
        is_regular = True
    if not is_regular:
        with open(target, "w", encoding="utf-8") as opened:
            opened.write(text)
        return
    draft = f"{target}.{os.urandom(6).hex()}"
    try:
        opened = open(draft, "x", encoding="utf-8")  # noqa: SIM115
    except PermissionError:  # of the folder; the file itself may be ours to write
        opened = open(target, "w", encoding="utf-8")  # noqa: SIM115
        draft = target
    try:
        with opened:
            opened.write(text)
        if draft == target:
            return
        if os.path.exists(target):
            os.chmod(draft, os.stat(target).st_mode & 0o777)
        os.replace(draft, target)
    except OSError:
        if draft != target and os.path.lexists(draft):
            os.unlink(draft)
        raise
