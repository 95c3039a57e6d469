"""Breaks lines as IPython does. This file is a part of the program that driver.py belongs to.

Text is written up to a point where the line may break; the text behind it waits. When the waiting
text does not fit into the line, the outermost group with such points is broken at all of them, and
at those that it gets later. The output is bounded, in items of a container and in characters.
"""

import collections
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Deque, Iterable, Iterator, List, Optional

if TYPE_CHECKING:
    from .printers import find_printer

WIDTH = 79
MAX_IN_ONE = 1000
MAX_IN_ALL = 20000


class Enough(Exception):
    """The text has reached its limit."""


class Group:
    """Values that break together, such as the items of a list."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.break_points: Deque["Waiting"] = collections.deque()
        self.broken = False


class Waiting:
    """Text that waits, or a point where the line may break, which has a group."""

    def __init__(self, text: str, group: Optional[Group] = None, indentation: int = 0) -> None:
        self.text = text
        self.group = group
        self.indentation = indentation


class Layout:
    """Writes a value. ``_repr_pretty_`` of a value may use the methods without underscore."""

    def __init__(self, limit: int) -> None:
        self.indentation = 0
        self._limit = limit
        self._written: List[str] = []
        self._length = 0
        self._column = 0
        self._waiting: Deque[Waiting] = collections.deque()
        self._waiting_width = 0
        self._stack = [Group(0)]
        self._unbroken: List[List[Group]] = [[self._stack[0]]]
        self._inside: List[int] = []
        self._items = 0

    def finish(self) -> str:
        self._flush()
        return "".join(self._written)

    # Text and break points

    def text(self, text: str) -> None:
        if not self._waiting:
            self._write(text)
            self._column += len(text)
            return
        if self._waiting[-1].group is not None:
            self._waiting.append(Waiting(""))
        self._waiting[-1].text += text
        self._waiting_width += len(text)
        self._make_fit()

    def breakable(self, separator: str = " ") -> None:
        group = self._stack[-1]
        if group.broken:
            self._flush()
            self._new_line(self.indentation)
            return
        point = Waiting(separator, group, self.indentation)
        group.break_points.append(point)
        self._waiting.append(point)
        self._waiting_width += len(separator)
        self._make_fit()

    def break_(self) -> None:
        group = self._take_outermost()
        if group is not None:
            self._break(group)
        self._flush()
        self._new_line(self.indentation)

    def begin_group(self, indent: int = 0, text: str = "") -> None:
        if text:
            self.text(text)
        group = Group(self._stack[-1].depth + 1)
        self._stack.append(group)
        while len(self._unbroken) <= group.depth:
            self._unbroken.append([])
        self._unbroken[group.depth].append(group)
        self.indentation += indent

    def end_group(self, dedent: int = 0, text: str = "") -> None:
        self.indentation -= dedent
        group = self._stack.pop()
        if not group.break_points and group in self._unbroken[group.depth]:
            self._unbroken[group.depth].remove(group)
        if text:
            self.text(text)

    @contextmanager
    def group(self, indent: int = 0, begin: str = "", end: str = "") -> Iterator[None]:
        self.begin_group(indent, begin)
        try:
            yield
        finally:
            self.end_group(indent, end)

    # Lines

    def _make_fit(self) -> None:
        while self._column + self._waiting_width > WIDTH:
            group = self._take_outermost()
            if group is None:
                return
            self._break(group)

    def _take_outermost(self) -> Optional[Group]:
        """Take the outermost group that has break points. Groups above it break at later ones."""
        for groups in self._unbroken:
            for number, group in enumerate(reversed(groups)):
                if group.break_points:
                    del groups[number]
                    group.broken = True
                    return group
            for group in groups:
                group.broken = True
            del groups[:]
        return None

    def _break(self, group: Group) -> None:
        while group.break_points:
            self._release(self._waiting.popleft())
        while self._waiting and self._waiting[0].group is None:
            self._release(self._waiting.popleft())

    def _release(self, waiting: Waiting) -> None:
        self._waiting_width -= len(waiting.text)
        group = waiting.group
        if group is not None:
            group.break_points.popleft()
            if group.broken:
                self._flush_column(waiting.indentation)
                return
            if not group.break_points and group in self._unbroken[group.depth]:
                self._unbroken[group.depth].remove(group)
        self._write(waiting.text)
        self._column += len(waiting.text)

    def _flush(self) -> None:
        while self._waiting:
            self._release(self._waiting.popleft())

    def _new_line(self, indentation: int) -> None:
        self._flush_column(indentation)
        self._waiting_width = 0

    def _flush_column(self, indentation: int) -> None:
        self._write("\n" + " " * indentation)
        self._column = indentation

    def _write(self, text: str) -> None:
        self._length += len(text)
        self._written.append(text)
        if self._length > self._limit:
            raise Enough

    # Values

    def pretty(self, value: Any) -> None:
        cycle = id(value) in self._inside
        self._inside.append(id(value))
        self.begin_group()
        try:
            find_printer(value)(value, self, cycle)
        finally:
            self.end_group()
            self._inside.pop()

    def items(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a container, with commas between them, and dots after the limit."""
        for number, value in enumerate(values):
            if number:
                self.text(",")
                self.breakable()
            if number == MAX_IN_ONE or self._items >= MAX_IN_ALL:
                self.text("...")
                return
            self._items += 1
            yield value

    def call(self, name: str, *values: Any, **named: Any) -> None:
        """Print ``name(value, name=value)``."""
        with self.group(len(name) + 1, name + "(", ")"):
            for number, (key, value) in enumerate([*((None, v) for v in values), *named.items()]):
                if number:
                    self.text(",")
                    self.breakable()
                if key is None:
                    self.pretty(value)
                else:
                    with self.group(len(key) + 1, key + "="):
                        self.pretty(value)
