"""The interpreter of a session: it runs inside the sandbox, one cell after the other.

The host starts this text, behind that of notebook.py, as a program and never imports it. Requests
come over stdin as a length in a line of its own and that many bytes of JSON. What cells print goes
straight to stdout and stderr, as from any program; answers travel on the same streams, each behind
a mark that the host chose, so that text and answers keep their order and no thread is needed. A
cell that forges an answer deceives only the one who sent it.

While no cell runs, SIGINT is ignored; while one runs, it raises KeyboardInterrupt in it.
"""

import __future__

import ast
import base64
import builtins
import importlib
import io
import json
import linecache
import os
import signal
import site
import sys
import traceback
import types
from typing import TYPE_CHECKING, Any, Dict, List, Optional

if TYPE_CHECKING:
    # The text of it is put before this one: together they are the program.
    from .notebook import TOOL, Notebook, is_quiet, translated

    # And the texts of layout.py and printers.py, which only some values need.
    LAYOUT = ""

MAX_TEXT = 20000
MAX_ITEMS = 1000
MAX_PNG = 8 << 20
MAX_JSON = 1 << 20
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE
FEATURES = 0
for feature in __future__.all_feature_names:
    FEATURES |= getattr(__future__, feature).compiler_flag


class Wire:
    """Our ends of stdin, stdout and stderr, out of reach of what a cell does to its own."""

    def __init__(self, mark: str) -> None:
        self.mark = b"\x1e" + mark.encode()
        self.requests = os.fdopen(os.dup(0), "rb")
        self.out, self.err = os.dup(1), os.dup(2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def receive(self) -> Optional[Dict[str, Any]]:
        line = self.requests.readline()
        if not line:
            return None
        request: Dict[str, Any] = json.loads(self.requests.read(int(line)))
        return request

    def send(self, answer: Dict[str, Any]) -> None:
        flush()
        payload = json.dumps(answer).encode()
        self.write(self.out, self.mark + b"%d\n" % len(payload) + payload)

    def end(self) -> None:
        """So much for stderr, which has a stream of its own."""
        flush()
        self.write(self.err, self.mark + b"0\n")

    def write(self, descriptor: int, data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            pass  # a cell may put anything in their place


# Values as a reader wants them

SHOWING: Dict[str, Any] = {}


def count(value: Any, room: int) -> int:
    """How many items a container holds, itself included; more than ``room`` is not counted."""
    found = 1
    if type(value) in (list, tuple, dict, set, frozenset):
        found += len(value)
        for item in value.values() if type(value) is dict else value:
            if found > room:
                break
            found += count(item, room - found) - 1
    return found


def plain(value: Any) -> str:
    if type(value) in (str, bytes, bytearray) and len(value) > MAX_TEXT:
        return repr(value[:MAX_TEXT]) + "... (%d in all)" % len(value)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if not SHOWING:
        exec(compile(LAYOUT, "<layout>", "exec"), SHOWING)  # noqa: S102 - our own text
    return str(SHOWING["laid_out"](value, MAX_TEXT))


def described(value: Any) -> Dict[str, str]:
    """A value by media type. Text always; the rest where the value or its kind offers it."""
    found = {"text/plain": plain(value)}
    for kind, method in (
        ("text/html", "_repr_html_"),
        ("text/markdown", "_repr_markdown_"),
        ("image/svg+xml", "_repr_svg_"),
        ("image/png", "_repr_png_"),
    ):
        offer = None if isinstance(value, type) else getattr(value, method, None)
        shown = offer() if callable(offer) else None
        if isinstance(shown, bytes) and len(shown) <= MAX_PNG:
            found[kind] = base64.b64encode(shown).decode()
        elif isinstance(shown, str) and len(shown) <= MAX_PNG:
            found[kind] = shown
    if is_figure(value):
        found["image/png"] = png(value)
    if type(value) in (dict, list):
        try:
            text = json.dumps(value) if count(value, MAX_ITEMS) <= MAX_ITEMS else ""
        except (TypeError, ValueError):
            text = ""
        if 0 < len(text) <= MAX_JSON:
            found["application/json"] = text
    return found


def is_figure(value: Any) -> bool:
    return hasattr(value, "savefig") and type(value).__module__.startswith("matplotlib.")


def png(figure: Any) -> str:
    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight")
    return base64.b64encode(target.getvalue()[:MAX_PNG]).decode()


# Cells


class Session:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.number = 0
        self.module = types.ModuleType("__main__")
        self.scope = vars(self.module)
        self.sources: List[str] = [""]
        self.values: Dict[int, Any] = {}
        self.last: List[Any] = ["", "", ""]
        self.notebook = Notebook(self.run_text, self.scope)
        self.scope.update({
            "__builtins__": builtins, "display": self.display, TOOL: self.notebook,
            "In": self.sources, "Out": self.values, "_ih": self.sources, "_oh": self.values,
            "_": "", "__": "", "___": "", "_i": "", "_ii": "", "_iii": "",
        })  # fmt: skip
        sys.modules["__main__"] = self.module
        self.loop: Any = None
        self.features = 0
        vars(builtins).update(input=refuse_input, exit=leave, quit=leave)
        sys.breakpointhook = refuse_breakpoint

    def display(self, *values: Any) -> None:
        for value in values:
            self.wire.send({"type": "display", "data": described(value)})

    def cell(self, source: str) -> None:
        if not source.strip():
            return
        self.number += 1
        self.remember_source(source)
        try:
            self.run_text(source)
        finally:
            self.notebook.end_clock()
            self.figures()

    def remember_source(self, source: str) -> None:
        self.sources.append(source)
        recent = [*self.sources[-2::-1], "", "", ""]
        self.scope.update(_i=recent[0], _ii=recent[1], _iii=recent[2])
        self.scope["_i%d" % self.number] = source

    def run_text(self, source: str) -> None:
        """The text of a cell, and the value of its last expression."""
        name = "<cell %d>" % self.number
        text = translated(source)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        tree = ast.parse(text, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        codes = [self.compiled(tree, name, "exec")] if tree.body else []
        if isinstance(last, ast.Expr):
            codes.append(self.compiled(ast.Expression(last.value), name, "eval"))
        value = self.execute(codes)
        if isinstance(last, ast.Expr) and value is not None and not is_quiet(text):
            self.remember_value(value)
            self.wire.send({"type": "result", "data": described(value)})

    def compiled(self, tree: Any, name: str, mode: str) -> types.CodeType:
        """``from __future__`` holds for the cells that follow, too."""
        flags = AWAIT | self.features
        code: types.CodeType = compile(tree, name, mode, flags=flags, dont_inherit=True)
        self.features |= code.co_flags & FEATURES
        return code

    def remember_value(self, value: Any) -> None:
        """As _, _1 and Out[1]; a _ that cells use for something else is theirs."""
        names = ("_", "__", "___")
        if all(self.scope.get(name) is kept for name, kept in zip(names, self.last)):
            self.last = [value, *self.last[:2]]
            self.scope.update(zip(names, self.last))
        if value is not self.values:
            self.values[self.number] = self.scope["_%d" % self.number] = value

    def execute(self, codes: List[types.CodeType]) -> Any:
        """One after the other; the value of the last. If one awaits, all run in the loop."""
        value = None
        if not any(code.co_flags & COROUTINE for code in codes):
            for code in codes:
                value = eval(code, self.scope)  # noqa: S307 - that is what it is for
            return value
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(self.execute_in_loop(codes))
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    async def execute_in_loop(self, codes: List[types.CodeType]) -> Any:
        value = None
        for code in codes:
            value = eval(code, self.scope)  # noqa: S307
            if code.co_flags & COROUTINE:
                value = await value
        return value

    def figures(self) -> None:
        """Open figures are part of what a cell shows, and then closed."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            if figure is not self.last[0]:
                self.display(figure)
        pyplot.close("all")


def refuse_input(prompt: object = "") -> str:
    raise EOFError("input() is not available here: nobody can answer. Write the value in the code.")


def refuse_breakpoint(*_: Any, **__: Any) -> None:
    raise EOFError("breakpoint() is not available here: nobody can answer. Print what you want.")


def leave(code: Any = None) -> None:
    """exit(), without closing stdin as the one of the interpreter does: the session goes on."""
    raise SystemExit(code)


def failure(error: BaseException) -> Dict[str, str]:
    frames = traceback.TracebackException(type(error), error, error.__traceback__)
    # From the cell on; an error that the cell's own text makes has no frame of it.
    while frames.stack and not frames.stack[0].filename.startswith("<cell "):
        del frames.stack[0]
    try:
        text, value = "".join(frames.format()), str(error)
    except Exception as second:  # noqa: BLE001 - a cell's own class may do anything
        text = value = "%s (which cannot be shown: %s)" % (type(error).__name__, second)
    return {"name": type(error).__name__, "value": value[:MAX_TEXT], "traceback": text[-MAX_TEXT:]}


def run(session: Session, source: str) -> Optional[Dict[str, str]]:
    """One cell to its end, whatever that is. The interrupt is armed for as long as it runs."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            session.cell(source)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # noqa: BLE001 - the cell's, not ours
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return failure(error)
    return None


def see_new_packages() -> None:
    """What was installed since the last cell."""
    folder = site.getusersitepackages()
    if os.path.isdir(folder):
        if folder not in sys.path:
            sys.path.append(folder)
        importlib.invalidate_caches()


def main() -> None:
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown.*")
    wire = Wire(sys.argv[1])
    sys.argv[:] = [""]
    session = Session(wire)
    wire.send({"type": "ready"})
    while True:
        request = wire.receive()
        if request is None:
            break
        see_new_packages()
        error = run(session, request["code"])
        wire.send({"type": "end", "error": error, "number": session.number})
        wire.end()


main()
