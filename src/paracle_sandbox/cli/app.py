"""The command ``paracle``: what happens before a command is known, and how it is run.

This module imports next to nothing itself, so that Ctrl-C works from the start.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> None:
    """Run the command line of this process, and end the process."""
    # Part of the interpreter: ``signal`` itself takes long enough to be interrupted.
    import _signal  # type: ignore[import-not-found]
    import os

    # Until a command begins there is nothing to clean up. One that is ignored stays ignored.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda number, frame: os._exit(128 + number))
    import gc

    # Most of a short command is imports, and they leave no garbage worth looking for.
    gc.disable()
    _open_closed_streams()
    from .exit_codes import leave

    leave(run())


def run(words: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process. Answers its exit code."""
    import sys

    from .environment import completion_request
    from .exit_codes import code_of
    from .output import never_fail_on_a_letter

    never_fail_on_a_letter()
    given = list(sys.argv[1:] if words is None else words)
    request = completion_request()
    if request is not None:
        from .completion import complete

        return code_of(lambda: complete(request))
    return code_of(lambda: _run(given))


def _run(words: list[str]) -> int:
    from .commands import ROOT
    from .parser import HELP, Entry, find

    name, node, rest = find(ROOT, words)
    is_entry = isinstance(node, Entry)
    if isinstance(node, Entry) and node.starts_early and not _asks_for_another(rest, HELP):
        from ..backends.native.prestart import start_early

        # It will need a sandbox, which starts while the rest is imported.
        start_early()
    command = node.build(name)
    if rest or is_entry:
        given = command.read(rest)
        if not given.help:
            return command.action(given)
    import sys

    from .exit_codes import SUCCESS, USAGE
    from .help import show_help

    group = None if isinstance(node, Entry) else node
    show_help(command, group, sys.stdout if rest else sys.stderr)
    return SUCCESS if rest else USAGE


def _asks_for_another(words: Sequence[str], help_flags: Sequence[str]) -> bool:
    """Whether a backend is named, or only help is wanted. A wrong guess costs a process that ends
    by itself."""
    return any(word.startswith("--backend") or word in help_flags for word in words)


def _open_closed_streams() -> None:
    """Open the null device for each stream that the caller closed. What is opened next would be
    taken for it, and what is meant for stderr would be printed."""
    import os
    import sys

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free: its own.
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115  for good
