"""The interpreter of a session: it runs inside the sandbox, one cell after the other.

The host starts this text, behind those of notebook.py and values.py, as a program and never imports
it. Requests come over stdin as a length in a line of its own and that many bytes of JSON. What
cells print goes straight to stdout and stderr, as from any program; answers travel on the same
streams, each behind a mark that the host chose, so that text and answers keep their order and no
thread is needed. A cell that forges an answer deceives only the one who sent it.

While no cell runs, SIGINT is ignored; while one runs, it raises KeyboardInterrupt in it.
"""

import __future__

import ast
import builtins
import importlib
import json
import linecache
import os
import signal
import site
import sys
import types
from typing import TYPE_CHECKING, Any, Dict, List, Optional

if TYPE_CHECKING:
    # Their texts are put before this one: together they are the program.
    from .notebook import TOOL, Notebook, is_quiet, translate_cell
    from .values import describe, describe_error, encode_bundle

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
        # As it is, without escapes: the host takes about as many bytes as may be shown.
        payload = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self.write(self.out, self.mark + b"%d\n" % len(payload) + payload)

    def end_stderr(self) -> None:
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


class Displayed:
    """The answer of display(display_id=...). What was shown stays; an update is shown below it."""

    def __init__(self, display: Any, display_id: Any) -> None:
        self.display = self.update = display
        self.display_id = "%x" % id(self) if display_id is True else str(display_id)


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
        vars(builtins).update(input=refuse_input, exit=raise_exit, quit=raise_exit)
        sys.breakpointhook = refuse_breakpoint

    def display(
        self, *values: Any, raw: bool = False, display_id: Any = None, **_: Any
    ) -> Optional["Displayed"]:
        """What notebooks can do with more keywords, they do not do here: it is shown."""
        for value in values:
            data = encode_bundle(value) if raw and isinstance(value, dict) else describe(value)
            self.wire.send({"type": "display", "data": data})
        return None if display_id is None else Displayed(self.display, display_id)

    def run_cell(self, source: str) -> None:
        if not source.strip():
            return
        self.number += 1
        self.remember_source(source)
        try:
            self.run_text(source)
        finally:
            self.notebook.end_clock()
            self.show_figures()

    def remember_source(self, source: str) -> None:
        self.sources.append(source)
        recent = [*self.sources[-2::-1], "", "", ""]
        self.scope.update(_i=recent[0], _ii=recent[1], _iii=recent[2])
        self.scope["_i%d" % self.number] = source

    def run_text(self, source: str) -> None:
        """The text of a cell, and the value of its last expression."""
        name = "<cell %d>" % self.number
        text = translate_cell(source)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        tree = ast.parse(text, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        codes = [self.compile(tree, name, "exec")] if tree.body else []
        if isinstance(last, ast.Expr):
            codes.append(self.compile(ast.Expression(last.value), name, "eval"))
        value = self.execute(codes)
        if isinstance(last, ast.Expr) and value is not None and not is_quiet(text):
            self.remember_value(value)
            self.wire.send({"type": "result", "data": describe(value)})

    def compile(self, tree: Any, name: str, mode: str) -> types.CodeType:
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

    def show_figures(self) -> None:
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


def raise_exit(code: Any = None) -> None:
    """exit(), without closing stdin as the one of the interpreter does: the session goes on."""
    raise SystemExit(code)


def run_cell(session: Session, source: str) -> Optional[Dict[str, str]]:
    """One cell to its end, whatever that is. The interrupt is armed for as long as it runs."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            session.run_cell(source)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # noqa: BLE001 - the cell's, not ours
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return describe_error(error)
    return None


def add_new_packages() -> None:
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
        add_new_packages()
        error = run_cell(session, request["code"])
        wire.send({"type": "end", "error": error, "number": session.number})
        wire.end_stderr()


main()
