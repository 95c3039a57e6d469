"""Having the kernel choose programs first, and not the guest, when memory runs out."""

import os

from ..kernel import SET_DUMPABLE, prctl

_FIRST = b"1000"


class OomFirst:
    """While active, what this process starts inherits the highest score.

    The file is opened once: it is closed to a process that is not dumpable, and to be dumpable
    for a moment is only safe while nobody else is there to look. It is a preference, not a
    protection: where it cannot be had, nothing is said.
    """

    def __init__(self) -> None:
        self._before = b"0"
        self._fd = -1
        prctl(SET_DUMPABLE, 1)
        try:
            self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self._before = os.read(self._fd, 16)
        except OSError:
            pass
        finally:
            prctl(SET_DUMPABLE, 0)

    def __enter__(self) -> None:
        self._write(_FIRST)

    def __exit__(self, *_: object) -> None:
        self._write(self._before)

    def _write(self, score: bytes) -> None:
        try:
            os.pwrite(self._fd, score, 0)
        except OSError:
            pass


class _NoChange(OomFirst):
    """For a process that has the score already."""

    def __init__(self) -> None:
        self._fd = -1
        self._before = b""


NO_CHANGE = _NoChange()
