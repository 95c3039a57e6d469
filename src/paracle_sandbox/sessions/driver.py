"""The interpreter of a session: it runs inside the sandbox, one cell after the other.

The host starts this text as a program and never imports it. Requests come over stdin as a length
in a line of its own and that many bytes of JSON. What cells print goes straight to stdout and
stderr, as from any program; answers travel on the same streams, each behind a mark that the host
chose, so that text and answers keep their order and no thread is needed. A cell that forges an
answer deceives only the one who sent it.

While no cell runs, SIGINT is ignored; while one runs, it raises KeyboardInterrupt in it.
"""

import ast
import base64
import builtins
import importlib
import io
import json
import linecache
import os
import reprlib
import signal
import site
import sys
import traceback
import types
from typing import Any, Dict, Optional

MAX_TEXT = 20000
MAX_ITEMS = 1000
MAX_PNG = 8 << 20
MAX_JSON = 1 << 20
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE


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
    if type(value) in (str, bytes) and len(value) > MAX_TEXT:
        text = repr(value[:MAX_TEXT])
    elif count(value, MAX_ITEMS) > MAX_ITEMS:
        short = reprlib.Repr()
        short.maxlist = short.maxtuple = short.maxset = short.maxfrozenset = short.maxdict = 100
        short.maxstring = short.maxother = short.maxlong = 1000
        text = short.repr(value)
    else:
        text = repr(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "... (%d characters)" % len(text)


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
        self.scope.update(__builtins__=builtins, display=self.display)
        sys.modules["__main__"] = self.module
        self.loop: Any = None
        vars(builtins)["input"] = refuse_input

    def display(self, *values: Any) -> None:
        for value in values:
            self.wire.send({"type": "display", "data": described(value)})

    def cell(self, source: str) -> None:
        self.number += 1
        name = "<cell %d>" % self.number
        source = translated(source)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        if tree.body:
            self.execute(compile(tree, name, "exec", flags=AWAIT, dont_inherit=True))
        if not isinstance(last, ast.Expr):
            self.figures(None)
            return
        wrapped = ast.Expression(last.value)
        value = self.execute(compile(wrapped, name, "eval", flags=AWAIT, dont_inherit=True))
        if value is not None and not source.rstrip().endswith(";"):
            scope = self.scope
            scope["___"], scope["__"], scope["_"] = scope.get("__"), scope.get("_"), value
            self.wire.send({"type": "result", "data": described(value)})
        self.figures(value)

    def execute(self, code: types.CodeType) -> Any:
        if not code.co_flags & COROUTINE:
            return eval(code, self.scope)  # noqa: S307 - that is what it is for
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(eval(code, self.scope))  # noqa: S307
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def figures(self, shown: Any) -> None:
        """Open figures are part of what a cell shows, and then closed."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            if figure is not shown:
                self.display(figure)
        pyplot.close("all")


def refuse_input(prompt: object = "") -> str:
    raise EOFError("input() is not available here: nobody can answer. Write the value in the code.")


def translated(source: str) -> str:
    """Lines as notebooks know them: !command and %pip; other %magic is left out."""
    try:
        ast.parse(source)
        return source
    except SyntaxError:
        pass
    lines = source.split("\n")
    for number, line in enumerate(lines):
        bare = line.lstrip()
        indent = line[: len(line) - len(bare)]
        if bare.startswith(("!", "%pip ")):
            call = "__import__('subprocess').run(%r, shell=True)" % bare[1:]
            lines[number] = indent + "_exit_code = " + call + ".returncode"
        elif bare.startswith("%") and not bare.startswith("%%"):
            lines[number] = indent + "pass"
    return "\n".join(lines)


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
