"""Makes diffs in bounded time, also of files that were written to make a comparison endless.

difflib takes quadratic time, and more, where the same few lines occur again and again. The number
of comparisons of a step is known before the step: they are counted, and the diff is given up when
there are too many.
"""

from __future__ import annotations

import difflib
from itertools import accumulate

_MOST_BYTES = 1 << 20
# It takes about a second. Ten thousand lines with hundreds of changes take a tenth of that.
_MOST_LOOKS = 5_000_000


class _TooCostly(Exception):
    """The comparison would take too long."""


def make_diff(old: bytes, new: bytes, old_name: str, new_name: str) -> str | None:
    """Return a diff that ``patch`` and ``git apply`` take, or None for binary or large files."""
    if b"\0" in old + new or len(old) + len(new) > _MOST_BYTES:
        return None
    before, after = _split_lines(old), _split_lines(new)
    try:
        _CountingMatcher(before, after).get_matching_blocks()
    except _TooCostly:
        return None
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(before, after, old_name, new_name)
    )


class _CountingMatcher(difflib.SequenceMatcher[str]):
    """Compares lines, and raises _TooCostly before it makes too many comparisons."""

    def __init__(self, before: list[str], after: list[str]) -> None:
        super().__init__(None, before, after)
        # Each line is compared with all equal lines of the other file.
        equal: dict[str, list[int]] = self.b2j  # type: ignore[attr-defined]
        looks = (1 + len(equal.get(line, ())) for line in before)
        self._looks_until = list(accumulate(looks, initial=0))
        self._left = _MOST_LOOKS

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        end = len(self._looks_until) - 1 if ahi is None else ahi
        self._left -= self._looks_until[end] - self._looks_until[alo]
        if self._left < 0:
            raise _TooCostly
        return super().find_longest_match(alo, ahi, blo, bhi)


def _split_lines(content: bytes) -> list[str]:
    """Split at line feeds only, as programs that read diffs do."""
    *whole, rest = content.decode("utf-8", "replace").split("\n")
    return [f"{line}\n" for line in whole] + ([rest] if rest else [])
