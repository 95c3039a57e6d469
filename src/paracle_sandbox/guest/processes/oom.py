"""Make the kernel kill programs before the guest when memory runs out."""

import os

from ..kernel import SET_DUMPABLE, prctl

_FIRST = b"1000"


class OomFirst:
    """While active, processes that this one starts inherit the highest OOM score.

    The file of the score is opened once. A process that is not dumpable cannot open it, and to be
    dumpable for a moment is safe only before other processes run. The score is a preference and not
    a protection: if it cannot be set, no error is raised.
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
    """Change nothing, for a process that has the score already."""

    def __init__(self) -> None:
        self._fd = -1
        self._before = b""


NO_CHANGE = _NoChange()
