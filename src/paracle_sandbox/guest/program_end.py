"""End a program as the interpreter does: report what it raised, finalize, exit.

Finalization follows Py_FinalizeEx in what a program can see of it: threads joined, atexit
callbacks, streams flushed, garbage collected, the program's own modules torn down so that their
`__del__` run, streams flushed again. What the parent had imported is left alone: taking that apart
would take longer than many programs run.
"""

# ruff: noqa: BLE001, S110 - as in the interpreter, whatever user code raises here is not the end
import _signal  # type: ignore[import-not-found]
import ctypes
import functools
import gc
import os
import sys
import weakref
from types import ModuleType
from typing import Any, Dict, List, Optional, Tuple

from .ends import tell_end
from .program_stack import flush_c_streams, make_struct
from .program_state import SETTABLE_SIGNALS

_FLUSH_FAILED = 120
_is_finalizing = functools.partial(bool, 1)
# Not that of `os`: the loader finds a function when it is first called, and none is left to find it
# for the next program.
_leave = ctypes.CDLL(None)._exit
_DROPPED_FROM_SYS = (
    "path", "argv", "ps1", "ps2", "last_type", "last_value", "last_traceback", "last_exc",
    "path_hooks", "path_importer_cache", "meta_path", "__interactivehook__",
)  # fmt: skip


class Ending:
    """How one program ends."""

    def __init__(self) -> None:
        self._status = 0
        self._interrupted = False

    def report(self, exception: Optional[BaseException]) -> None:
        """Show what the program raised and wait for its threads; atexit callbacks come next."""
        _flush_quietly("stderr")
        _flush_quietly("stdout")
        if exception is not None:
            self._status = _report(exception)
            self._interrupted = type(exception) is KeyboardInterrupt
        del exception
        _forget_file()
        _join_threads()

    def exit(self) -> None:
        """Does not return."""
        flushed = _flush_streams()
        _restore_signals()
        if gc.isenabled():
            gc.collect()
        _clear_modules()
        # What `__del__` printed is written if possible; failing to changes nothing any more.
        _flush_quietly("stdout")
        _flush_quietly("stderr")
        flush_c_streams(None)
        if self._interrupted:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            os.kill(os.getpid(), _signal.SIGINT)
        status = self._status & 0xFF if flushed else _FLUSH_FAILED
        tell_end(status)
        _leave(status)


def _report(exception: BaseException) -> int:
    """Show an exception through sys.excepthook, as the user may have set it; the exit status."""
    if isinstance(exception, SystemExit):
        return _exit_status(exception)
    traceback = exception.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(exception), exception, traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = exception
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _write_error("sys.excepthook is missing\n")
        _display(exception)
        return 1
    try:
        hook(type(exception), exception, traceback)
    except SystemExit as exit_from_hook:
        return _exit_status(exit_from_hook)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        if error.__context__ is exception:
            error.__context__ = None  # the interpreter calls the hook outside of any handler
        _write_error("Error in sys.excepthook:\n")
        _display(error)
        _write_error("\nOriginal exception was:\n")
        _display(exception)
    return 1


def _display(exception: BaseException) -> None:
    sys.__excepthook__(type(exception), exception, exception.__traceback__)


def _exit_status(request: SystemExit) -> int:
    code = getattr(request, "code", request)
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) if -(1 << 63) <= code < 1 << 63 else -1
    try:
        _write_error(str(code))
    except Exception:  # whatever a strange object's __str__ raises, the program ends with 1
        pass
    _write_error("\n")
    return 1


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


def _forget_file() -> None:
    scope = vars(sys.modules.get("__main__", ModuleType("")))
    scope.pop("__file__", None)
    scope.pop("__cached__", None)


def _join_threads() -> None:
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return
    try:
        threading._shutdown()
    except BaseException as error:
        traceback = error.__traceback__ and error.__traceback__.tb_next
        _ignore(error, threading, traceback, "on threading shutdown")


def _flush_quietly(name: str) -> None:
    try:
        getattr(sys, name).flush()
    except BaseException:
        pass  # it may be any object; the last flush reports what still fails


def _flush_streams() -> bool:
    """Whether stdout could be flushed; says why not on stderr."""
    flushed = True
    stdout = sys.stdout
    if stdout is not None and not _closed(stdout):
        try:
            stdout.flush()
        except BaseException as error:
            _ignore(error, stdout, None, "on flushing sys.stdout")
            flushed = False
    stderr = sys.stderr
    if stderr is not None and not _closed(stderr):
        try:
            stderr.flush()
        except BaseException:
            flushed = False
    return flushed


def _closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except Exception:  # replaced by any object: what has no such attribute counts as open
        return False


def _ignore(error: BaseException, source: Any, traceback: Any, message: str) -> None:
    """Tell the unraisable hook; since 3.13 a message says what failed, before that the object."""
    worded = sys.version_info >= (3, 13)
    values = {
        "exc_type": type(error),
        "exc_value": error,
        "exc_traceback": traceback,
        "err_msg": "Exception ignored " + message if worded else None,
        "object": None if worded else source,
    }
    try:
        sys.unraisablehook(make_struct(_UNRAISABLE, values))
    except Exception:  # the user's hook; there is nobody left to tell
        pass


def _restore_signals() -> None:
    for number in SETTABLE_SIGNALS:
        if callable(_signal.getsignal(number)):
            _signal.signal(number, _signal.SIG_DFL)


def _clear_modules() -> None:
    scope = vars(sys)
    for name in _DROPPED_FROM_SYS:
        if name in scope:
            scope[name] = None
    for name in ("stdin", "stdout", "stderr"):
        scope[name] = scope.get("__%s__" % name)
    scope["is_finalizing"] = _is_finalizing
    threading = sys.modules.get("threading")
    if threading is not None:
        # The interpreter stops daemon threads here. Ours run on for a moment, into a world
        # without modules: nobody shall hear of it.
        vars(threading)["excepthook"] = lambda _: None
    # Without modules the interpreter cannot read the source for tracebacks any more.
    kept = sys.modules.pop("io", None)
    remaining = _drop_modules()
    gc.collect()
    for reference in reversed(remaining):
        module = reference()
        if module is not None:
            _empty(vars(module))
    del kept


def _drop_modules() -> List["weakref.ref[ModuleType]"]:
    """Take `__main__` and what was imported after it out of sys.modules."""
    names: List[str] = []
    if "__main__" in sys.modules:
        for name in reversed(sys.modules):
            names.insert(0, name)
            if name == "__main__":
                break
    references: List["weakref.ref[ModuleType]"] = []
    for name in names:
        module = sys.modules.pop(name, None)  # what ends with one may have taken out another
        if isinstance(module, ModuleType):
            references.append(weakref.ref(module))
        del module
    return references


def _empty(scope: Dict[str, Any]) -> None:
    """Set names to None, private ones first: the order of CPython."""
    for private in (True, False):
        for name in list(scope):
            if name != "__builtins__" and private == (name[:1] == "_" and name[1:2] != "_"):
                scope[name] = None


def _unraisable_type() -> type:
    """The type of what unraisable hooks get has no name to find it by: provoke one."""
    found: List[Tuple[type, ...]] = []

    class Provocation:
        def __del__(self) -> None:
            raise ValueError

    original, sys.unraisablehook = sys.unraisablehook, lambda args: found.append((type(args),))
    try:
        Provocation()
    finally:
        sys.unraisablehook = original
    return found[0][0]


_UNRAISABLE = _unraisable_type()
