"""The interpreter of a session. It runs inside the sandbox, and runs one cell after the other.

The host joins notebook.py, values.py and this file into one program, and never imports them. A
request comes over stdin, as a line with its length and that many bytes of JSON. Cells print to
stdout and stderr, as any program does. Answers use the same streams, each behind a mark that the
host chose: text and answers keep their order, and no thread is needed. A cell that forges an answer
deceives only the caller that sent it.

SIGINT is ignored while no cell runs, and raises KeyboardInterrupt in a cell that runs.
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
    # Their texts come before this one in the program.
    from .notebook import TOOL, Notebook, is_quiet, translate_cell
    from .values import describe, describe_error, encode_bundle

AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE
FEATURES = 0
for feature in __future__.all_feature_names:
    FEATURES |= getattr(__future__, feature).compiler_flag


class Wire:
    """Copies of stdin, stdout and stderr that stay when a cell closes or replaces its own."""

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
        # No escapes: the host limits an answer to little more than may be shown.
        payload = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self.write(self.out, self.mark + b"%d\n" % len(payload) + payload)

    def end_stderr(self) -> None:
        """Mark the end of a cell on stderr, which is a stream of its own."""
        flush()
        self.write(self.err, self.mark + b"0\n")

    def write(self, descriptor: int, data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]


def flush() -> None:
    """Flush what the cell has printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            pass  # a cell may have replaced them by anything


class Displayed:
    """The handle that display(display_id=...) returns. An update is shown below the old value."""

    def __init__(self, display: Any, display_id: Any) -> None:
        self.display = self.update = display
        self.display_id = "%x" % id(self) if display_id is True else str(display_id)


class Session:
    """The state of the interpreter: its variables, and the values and sources of earlier cells."""

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
        """Show values. Other keywords of IPython's display() are ignored."""
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
        """Run the text of a cell, and show the value of its last expression."""
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
        """Compile a part of a cell. ``from __future__`` is valid in later cells too."""
        flags = AWAIT | self.features
        code: types.CodeType = compile(tree, name, mode, flags=flags, dont_inherit=True)
        self.features |= code.co_flags & FEATURES
        return code

    def remember_value(self, value: Any) -> None:
        """Keep a value as _, _1 and Out[1]. A _ that a cell has assigned is not overwritten."""
        names = ("_", "__", "___")
        if all(self.scope.get(name) is kept for name, kept in zip(names, self.last)):
            self.last = [value, *self.last[:2]]
            self.scope.update(zip(names, self.last))
        if value is not self.values:
            self.values[self.number] = self.scope["_%d" % self.number] = value

    def execute(self, codes: List[types.CodeType]) -> Any:
        """Run the parts in order and return the value of the last. If one awaits, all run in the
        event loop."""
        value = None
        if not any(code.co_flags & COROUTINE for code in codes):
            for code in codes:
                value = eval(code, self.scope)  # noqa: S307 - the cell's own code
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
        """Show the open figures of matplotlib, and close them."""
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
    """Replace exit(), which closes stdin: the session has to go on."""
    raise SystemExit(code)


def run_cell(session: Session, source: str) -> Optional[Dict[str, str]]:
    """Run a cell and return its error, if any. SIGINT interrupts it while it runs."""
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
    """Make packages importable that were installed since the last cell."""
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
