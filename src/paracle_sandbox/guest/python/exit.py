"""End a program as the interpreter does: report its exception, finalize, exit.

Finalization follows Py_FinalizeEx in everything that a program can see: threads are joined, atexit
callbacks run, streams are flushed, garbage is collected, the program's own modules are torn down so
that their `__del__` run, and streams are flushed again. Modules that the parent had imported are
left alone: tearing them down would take longer than many programs run.
"""

# ruff: noqa: BLE001, S110 - as in the interpreter, an exception of user code does not stop this
import _signal  # type: ignore[import-not-found]
import _thread
import atexit
import builtins
import ctypes
import functools
import gc
import io
import os
import sys
import weakref
from importlib.machinery import SourceFileLoader
from itertools import repeat, starmap
from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .interpreter_state import SETTABLE_SIGNALS
from .stack import Calls, Taken, flush_c_streams, make_struct

# The functions below use these copies, because a program may replace any of the originals.
__builtins__ = dict(vars(builtins))  # type: ignore[assignment]
_collect, _gc_is_enabled, _tracked = gc.collect, gc.isenabled, gc.get_objects
_kill, _getpid, _write, _dup, _close = os.kill, os.getpid, os.write, os.dup, os.close
_threads = _thread._count
_reference = weakref.ref
_exit_callbacks, _run_exit_callbacks = atexit._ncallbacks, atexit._run_exitfuncs

_FLUSH_FAILED = 120
_MISSING = object()
_is_finalizing = functools.partial(bool, 1)
# os._exit would not do: the loader resolves a function on its first call, and as no process returns
# from this call, each program would pay for that again.
_leave = ctypes.CDLL(None)._exit
_DROPPED_FROM_SYS = (
    "path", "argv", "ps1", "ps2", "last_type", "last_value", "last_traceback", "last_exc",
    "path_hooks", "path_importer_cache", "meta_path", "__interactivehook__",
)  # fmt: skip
# The interpreter or `site` adds these names when it has started. At its end they are gone.
_LATE_BUILTINS = ("open", "exit", "quit", "copyright", "credits", "license", "help", "_")
_BUILTINS = frozenset(vars(builtins)).difference(_LATE_BUILTINS)
# Objects of these types run no code when they end. `__main__` has a loader from the start.
_PLAIN = frozenset((str, int, float, bool, bytes, type(None), ModuleType, SourceFileLoader))
# The types of streams that hold unwritten data, each before the type that it writes to.
_WRITERS = (io.TextIOWrapper, io.BufferedRandom, io.BufferedWriter)


class Ending:
    """The end of one program, in stages (see `stack`)."""

    def __init__(self) -> None:
        self._status = 0
        self._interrupted = False
        self._exits = False
        self._flushed = True
        self._exception: Optional[BaseException] = None
        self._plain = False
        self._modules: List["weakref.ref[ModuleType]"] = []
        self._kept: List[Any] = []
        self.stages = (self._report, self._hooked, self._joined)
        self.last_stages = (self._flush, self._clear, self._empty)

    def _report(self, exception: Optional[BaseException]) -> Sequence[Calls]:
        """Report the program's exception through sys.excepthook, which the program may have set."""
        _flush_quietly("stderr")
        _flush_quietly("stdout")
        if exception is None:
            return ()
        self._status = 1
        if isinstance(exception, Taken):
            return ()
        if isinstance(exception, SystemExit):
            self._exit_with(exception)
            return ()
        self._interrupted = type(exception) is KeyboardInterrupt
        traceback = exception.__traceback__
        sys.last_type, sys.last_value, sys.last_traceback = type(exception), exception, traceback
        if sys.version_info >= (3, 12):
            sys.last_exc = exception
        hook = vars(sys).get("excepthook", _MISSING)
        if hook is _MISSING:
            _write_error("sys.excepthook is missing\n")
            _display(exception)
            return ()
        self._exception = exception
        return (starmap(hook, [(type(exception), exception, traceback)]),)

    def _hooked(self, error: Optional[BaseException]) -> Sequence[Calls]:
        """Report an exception of that hook, and wait for the program's threads."""
        exception, self._exception = self._exception, None
        if isinstance(error, SystemExit):
            self._exit_with(error)
        elif error is not None and exception is not None:
            _write_error("Error in sys.excepthook:\n")
            _display(error)
            _write_error("\nOriginal exception was:\n")
            _display(exception)
        if not self._exits:
            _forget_file()
        threading: Any = sys.modules.get("threading")
        return () if threading is None else (starmap(threading._shutdown, [()]),)

    def _joined(self, error: Optional[BaseException]) -> Sequence[Calls]:
        if error is not None:
            threading = sys.modules.get("threading")
            _ignore(error, threading, error.__traceback__, "on threading shutdown")
        return (starmap(_run_exit_callbacks, [()]),) if _exit_callbacks() else ()

    def _flush(self, _: Optional[BaseException]) -> Sequence[Calls]:
        # Until 3.9 the last error of an exit callback is raised again after it was shown.
        self._flushed = _flush_streams()
        _restore_signals()
        return (starmap(_collect, [()]),) if _gc_is_enabled() else ()

    def _clear(self, _: Optional[BaseException]) -> Sequence[Calls]:
        """Remove `__main__` and the modules that were imported after it from sys.modules."""
        _close_sys()
        gc.callbacks.clear()  # the program must not see the collections from here on
        # Without its modules, the interpreter cannot read the source for tracebacks any more.
        self._kept.append(sys.modules.pop("io", None))
        names = _own_modules()
        for name in names:
            if isinstance(sys.modules[name], ModuleType):
                self._modules.append(_reference(sys.modules[name]))
        # Code that runs when a module ends may have removed another one.
        drop = map(sys.modules.pop, names, repeat(None))
        self._plain = names == ["__main__"] and _is_plain(vars(sys.modules["__main__"]))
        late = () if self._plain else _without(_LATE_BUILTINS)
        return (*late, drop, starmap(_collect, [()]))

    def _empty(self, _: Optional[BaseException]) -> Sequence[Calls]:
        """Clear the modules that are still referenced, and remove the names that they added."""
        modules = [reference() for reference in reversed(self._modules)]
        calls = [_emptied(vars(module)) for module in modules if module is not None]
        return tuple(calls) if self._plain else (*calls, *_without(_added_builtins()))

    def leave(self) -> None:
        """Exit the process. This does not return."""
        _flush_leftovers()
        # The output of `__del__` is written if possible; a failure changes nothing any more.
        _flush_quietly("stdout")
        _flush_quietly("stderr")
        flush_c_streams(None)
        if self._interrupted:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            _kill(_getpid(), _signal.SIGINT)
        _leave(self._status & 0xFF if self._flushed else _FLUSH_FAILED)

    def _exit_with(self, request: SystemExit) -> None:
        self._exits = True
        self._status = _exit_status(request)


def _display(exception: BaseException) -> None:
    sys.__excepthook__(type(exception), exception, exception.__traceback__)


def _exit_status(request: SystemExit) -> int:
    try:
        code: Any = request.code
    except BaseException:  # a property may raise anything; then the exception itself is shown
        code = request
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) if -(1 << 63) <= code < 1 << 63 else -1
    try:
        stderr = vars(sys).get("stderr")
        text = str(code)
        if stderr is None:
            _write_plainly(text)
        else:
            stderr.write(text)
    except BaseException:  # from the object's __str__, or from a closed stream
        pass
    _write_error("\n")
    return 1


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text)
    except BaseException:  # stderr may be any object
        _write_plainly(text)


def _write_plainly(text: str) -> None:
    try:
        _write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def _forget_file() -> None:
    scope = vars(sys.modules.get("__main__", ModuleType("")))
    scope.pop("__file__", None)
    scope.pop("__cached__", None)


def _flush_quietly(name: str) -> None:
    try:
        getattr(sys, name).flush()
    except BaseException:
        pass  # it may be any object; the last flush reports what still fails


def _flush_streams() -> bool:
    """Flush stdout and stderr. Returns whether that worked; says on stderr why stdout failed."""
    flushed = True
    stdout = vars(sys).get("stdout")
    if stdout is not None and not _closed(stdout):
        try:
            stdout.flush()
        except BaseException as error:
            traceback = error.__traceback__ and error.__traceback__.tb_next
            _ignore(error, stdout, traceback, "on flushing sys.stdout")
            flushed = False
    stderr = vars(sys).get("stderr")
    if stderr is not None and not _closed(stderr):
        try:
            stderr.flush()
        except BaseException:
            flushed = False
    return flushed


def _closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except Exception:  # the stream may be any object; without that attribute it counts as open
        return False


def _ignore(error: BaseException, source: Any, traceback: Any, message: str) -> None:
    """Call the unraisable hook. Since 3.13 a message says what failed, before that the object."""
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
    except Exception:  # it is the program's hook, and there is no other to report to
        pass


def _restore_signals() -> None:
    for number in SETTABLE_SIGNALS:
        if callable(_signal.getsignal(number)):
            _signal.signal(number, _signal.SIG_DFL)


def _close_sys() -> None:
    scope = vars(sys)
    for name in _DROPPED_FROM_SYS:
        if name in scope:
            scope[name] = None
    for name in ("stdin", "stdout", "stderr"):
        scope[name] = scope.get("__%s__" % name)
    scope["is_finalizing"] = _is_finalizing
    threading = sys.modules.get("threading")
    if threading is not None:
        # The interpreter stops daemon threads here. Ours run on for a moment, without modules: the
        # errors of that are not shown.
        vars(threading)["excepthook"] = lambda _: None


def _own_modules() -> List[str]:
    """Return the names of `__main__` and of the modules that were imported after it."""
    names: List[str] = []
    if "__main__" in sys.modules:
        for name in reversed(sys.modules):
            names.insert(0, name)
            if name == "__main__":
                break
    return names


def _is_plain(scope: Dict[str, Any]) -> bool:
    """Return whether the globals of a program hold no object whose end could run its code.

    Classes, functions, generators and containers could. Their code might miss a built-in name.
    """
    return all(type(value) in _PLAIN or _is_empty(value) for value in scope.values())


def _is_empty(value: Any) -> bool:
    return type(value) is dict and not value


def _added_builtins() -> List[str]:
    scope = vars(builtins)
    if len(scope) <= len(_BUILTINS):  # comparing each name would write to its reference count
        return []
    return [name for name in scope if name not in _BUILTINS]


def _without(names: Sequence[str]) -> Sequence[Calls]:
    """Return the calls that remove these names from the built-in names."""
    return (map(vars(builtins).pop, names, repeat(None)),)


def _emptied(scope: Dict[str, Any]) -> Calls:
    """Return the calls that set all names of a module to None, private names first, as CPython
    does."""
    names = [name for name in scope if name != "__builtins__"]
    names.sort(key=lambda name: not (name[:1] == "_" and name[1:2] != "_"))
    return map(dict.__setitem__, repeat(scope), names, repeat(None))


def _flush_leftovers() -> None:
    """Flush the files that the program stored in modules which are not torn down.

    Few programs have such files, or any open descriptor. If threads run on, their files are left
    alone.
    """
    if _threads() or not _has_descriptors():
        return
    found = [item for item in _tracked() if type(item) in _WRITERS]
    for item in sorted(found, key=lambda item: _WRITERS.index(type(item))):
        try:
            item.flush()
        except BaseException:
            pass  # the stream, or the one that it writes to, may be closed


def _has_descriptors() -> bool:
    """Return whether a descriptor above 2 is open. Only the lowest free one is looked at."""
    try:
        lowest = _dup(1)
    except OSError:
        return True
    _close(lowest)
    return lowest != 3


def _unraisable_type() -> type:
    """Find the type of the argument of unraisable hooks. It has no name, so one is provoked."""
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
