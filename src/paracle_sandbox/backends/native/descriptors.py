"""Handle that this process has no descriptor left: a typed error, and room to clean up."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ...errors import SandboxCreationError

_SPARE = 4  # the state directory, a record, and what those need on the way


def is_shortage(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE)


def no_descriptor(sandbox_id: str | None = None) -> SandboxCreationError:
    return SandboxCreationError(
        "The sandbox could not be made: this process has too many open files. Nothing was started. "
        "Close some, or raise the limit: ulimit -n 65536, or LimitNOFILE= of its service.",
        sandbox_id,
        step="descriptors",
    )


class SpareDescriptors:
    """Some that are kept, to be given up where a sandbox has to be removed and there is no other.

    Another thread may be quicker to take them; then the next attempt to remove it has to do."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._kept) < _SPARE:
                self._kept.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def give_up(self) -> None:
        while self._kept:
            os.close(self._kept.pop())

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        self.give_up()
        try:
            yield
        finally:
            self.keep()
