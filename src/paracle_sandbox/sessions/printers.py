"""Prints each kind of value as IPython does.

This file is a part of the program that driver.py belongs to.
"""

import collections
import inspect
import os
import re
import types
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

if TYPE_CHECKING:
    from .layout import MAX_IN_ONE, Enough, Layout

BUILTIN_MODULES = (None, "builtins", "exceptions")
Printer = Callable[[Any, "Layout", bool], None]


def lay_out(value: Any, limit: int) -> str:
    """Return the text of a value, cut off after ``limit`` characters."""
    layout = Layout(limit)
    try:
        layout.pretty(value)
        return layout.finish()
    except Enough:
        return "".join(layout._written)[:limit] + "... (cut off)"


def find_printer(value: Any) -> Printer:
    """Return the function that prints a value, by the first of its classes that has one."""
    kind = getattr(value, "__class__", None) or type(value)
    for base in type.__dict__["__mro__"].__get__(kind):
        if base in PRINTERS:
            return PRINTERS[base]
        if callable(vars(base).get("_repr_pretty_")):
            return lambda value, layout, cycle: base._repr_pretty_(value, layout, cycle)
        if base is not object and "__repr__" in vars(base):
            return print_repr
    return print_object


def print_repr(value: Any, layout: Layout, cycle: bool) -> None:
    with layout.group():
        for number, line in enumerate(repr(value).splitlines()):
            if number:
                layout.break_()
            layout.text(line)


def print_object(value: Any, layout: Layout, cycle: bool) -> None:
    with layout.group(1, "<", ">"):
        layout.pretty(type(value))
        layout.text(" at 0x%x%s" % (id(value), " ..." if cycle else ""))


def make_sequence_printer(begin: str, end: str) -> Printer:
    def show(value: Any, layout: Layout, cycle: bool) -> None:
        if cycle:
            layout.text(begin + "..." + end)
            return
        layout.begin_group(len(begin), begin)
        for item in layout.items(value):
            layout.pretty(item)
        if isinstance(value, tuple) and len(value) == 1:
            layout.text(",")
        layout.end_group(len(begin), end)

    return show


def make_set_printer(begin: str, end: str) -> Printer:
    def show(value: Any, layout: Layout, cycle: bool) -> None:
        if not value and not cycle:
            layout.text(type(value).__name__ + "()")
        else:
            make_sequence_printer(begin, end)(sort_items(value), layout, cycle)

    return show


def sort_items(values: Any) -> List[Any]:
    found = list(values)
    if len(found) >= MAX_IN_ONE:
        return found
    for key in (None, str):
        try:
            return sorted(found, key=key)
        except Exception:  # noqa: BLE001, S112 - the cell's own classes compare them
            continue
    return found


def make_dict_printer(begin: str, end: str) -> Printer:
    def show(value: Any, layout: Layout, cycle: bool) -> None:
        if cycle:
            layout.text("{...}")
            return
        layout.begin_group(len(begin), begin)
        for key in layout.items(value.keys()):
            layout.pretty(key)
            layout.text(": ")
            layout.pretty(value[key])
        layout.end_group(len(begin), end)

    return show


def print_mappingproxy(value: Any, layout: Layout, cycle: bool) -> None:
    make_dict_printer("mappingproxy({", "})")(value, layout, cycle)


def print_class(value: Any, layout: Layout, cycle: bool) -> None:
    if next(base for base in type(value).__mro__ if "__repr__" in vars(base)) is not type:
        print_repr(value, layout, cycle)
    else:
        layout.text(make_full_name(value, getattr(value, "__module__", None)))


def print_function(value: Any, layout: Layout, cycle: bool) -> None:
    name = make_full_name(value, value.__module__)
    try:
        name += str(inspect.signature(value))
    except ValueError:
        pass
    layout.text("<function %s>" % name)


def make_full_name(value: Any, module: Optional[str]) -> str:
    name = getattr(value, "__qualname__", value.__name__)
    return name if module in BUILTIN_MODULES else "%s.%s" % (module, name)


def print_exception(value: Any, layout: Layout, cycle: bool) -> None:
    layout.call(make_full_name(type(value), type(value).__module__), *value.args)


FLAGS = ("IGNORECASE", "LOCALE", "MULTILINE", "DOTALL", "UNICODE", "VERBOSE", "DEBUG")


def print_pattern(value: Any, layout: Layout, cycle: bool) -> None:
    layout.text("re.compile(r" + repr(value.pattern).replace("\\\\", "\\"))
    flags = ["re." + name for name in FLAGS if value.flags & getattr(re, name)]
    if flags:
        layout.text(",")
        layout.breakable()
        layout.text("|".join(flags))
    layout.text(")")


def print_super(value: Any, layout: Layout, cycle: bool) -> None:
    with layout.group(8, "<super: ", ">"):
        layout.pretty(value.__thisclass__)
        layout.text(",")
        layout.breakable()
        layout.pretty(value.__self__)


def make_call_printer(arguments: Callable[[Any], List[Any]]) -> Printer:
    """Make a printer that prints ``Name(argument, argument)``."""

    def show(value: Any, layout: Layout, cycle: bool) -> None:
        name = type(value).__name__
        if cycle:
            layout.text(name + "(...)")
        else:
            layout.call(name, *arguments(value))

    return show


def print_deque(value: Any, layout: Layout, cycle: bool) -> None:
    name = type(value).__name__
    more: Dict[str, Any] = {} if value.maxlen is None else {"maxlen": value.maxlen}
    if cycle:
        layout.text(name + "(...)")
    else:
        layout.call(name, list(value), **more)


def print_namespace(value: Any, layout: Layout, cycle: bool) -> None:
    kind = type(value)
    name = "namespace" if kind is types.SimpleNamespace else kind.__name__
    if cycle:
        layout.text(name + "(...)")
    else:
        layout.call(name, **vars(value))


PRINTERS: Dict[type, Printer] = {
    tuple: make_sequence_printer("(", ")"),
    list: make_sequence_printer("[", "]"),
    dict: make_dict_printer("{", "}"),
    set: make_set_printer("{", "}"),
    frozenset: make_set_printer("frozenset({", "})"),
    type: print_class,
    os._Environ: make_dict_printer("environ{", "}"),
    types.MappingProxyType: print_mappingproxy,
    types.FunctionType: print_function,
    types.BuiltinFunctionType: print_function,
    types.SimpleNamespace: print_namespace,
    BaseException: print_exception,
    re.Pattern: print_pattern,
    super: print_super,
    collections.OrderedDict: make_call_printer(
        lambda value: [list(value.items())] if value else []
    ),
    collections.defaultdict: make_call_printer(lambda value: [value.default_factory, dict(value)]),
    collections.deque: print_deque,
    collections.Counter: make_call_printer(
        lambda value: [dict(value.most_common())] if value else []
    ),
    collections.UserList: make_call_printer(lambda value: [value.data]),
}
PRINTERS.update(dict.fromkeys((int, float, str, bytes, range, slice), print_repr))
