"""Run code at the bottom of an empty Python stack, as the interpreter runs a script.

A program that walks its stack (`inspect.stack()`, `warnings.warn(stacklevel=2)`, a debugger,
faulthandler) must not find the guest below its `__main__`. CPython's thread state holds the frames.
So the forked child creates a new thread state for its only thread, switches to it and drops the old
one, by the C API. Two rules make that possible from Python:

- The switch may not happen inside the evaluation loop, which remembers the thread state that it
  started with. So a chain of `map` objects, consumed by `deque` in C, makes the calls one after the
  other. It never returns to the frame that started the chain, because the last call is `_exit`.
- For the same reason no exception may leave the chain. Calls that can raise go through a ctypes
  callback, where C catches the exception and passes it to `sys.unraisablehook`. That hook is ours
  while the program runs: it keeps the program's exception and passes on everything else.

The functions that are called at a program's end (its exception hook, exit callbacks, finalizers)
must not find us below them either. So each stage of the end returns the calls to be made, and has
returned when they are made. The program's trace function does not see a stage: it is removed
before, from C, and set again for the calls.
"""

import _thread
import builtins
import ctypes
import functools
import os
import struct
import sys
from collections import deque
from itertools import chain, starmap
from types import CodeType, MemberDescriptorType
from typing import Any, Callable, Dict, Iterable, List, NoReturn, Optional, Sequence, Tuple

# The functions below use this copy, because a program may replace any built-in name.
__builtins__ = dict(vars(builtins))  # type: ignore[assignment]

# An iterable that makes calls when it is consumed.
Calls = Iterable[Any]
# A stage gets the exception of the calls before it, and returns the calls to make next.
Stage = Callable[[Optional[BaseException]], Sequence[Calls]]

# This is a handle of our own: prototypes set on ctypes.pythonapi would be visible to the program.
_api = ctypes.PyDLL(None)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_api, name)
    function.restype = result
    function.argtypes = arguments
    return function


_interpreter = _function("PyInterpreterState_Main", ctypes.c_void_p)
_current = _function("PyThreadState_Get", ctypes.c_void_p)
_new = _function("PyThreadState_New", ctypes.c_void_p, ctypes.c_void_p)
_swap = _function("PyThreadState_Swap", ctypes.c_void_p, ctypes.c_void_p)
_clear = _function("PyThreadState_Clear", None, ctypes.c_void_p)
_delete = _function("PyThreadState_Delete", None, ctypes.c_void_p)
if sys.version_info >= (3, 9):
    _leave_recursion = _function("Py_LeaveRecursiveCall", None)
_struct_new = _function("PyStructSequence_New", ctypes.py_object, ctypes.py_object)
_struct_set = _function(
    "PyStructSequence_SetItem", None, ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object
)
_keep_reference = _function("Py_IncRef", None, ctypes.py_object)
flush_c_streams = ctypes.CDLL(None).fflush
# A program may replace these, too.
_gettrace, _settrace = sys.gettrace, sys.settrace
_getprofile, _setprofile = sys.getprofile, sys.setprofile

# Created here, in the parent: a callback needs executable memory, which a sandbox may refuse.
_consume: "functools.partial[Any]" = functools.partial(deque, maxlen=0)
_make = ctypes.PYFUNCTYPE(None, ctypes.py_object)(_consume)
_guarded = ctypes.PYFUNCTYPE(None, ctypes.py_object)(lambda call: call())


def _find_main_state() -> Optional[int]:
    """Find the pointer to the thread state that handles signals, which the runtime has since 3.13.

    No function of the API changes it. It follows the number of the main thread in memory, and the
    two together occur only once. Returns None if they do not.
    """
    runtime = ctypes.addressof(ctypes.c_char.in_dll(_api, "_PyRuntime"))
    pattern = struct.pack("@LP", _thread.get_ident(), _current())
    memory = ctypes.string_at(runtime, 4096)
    if memory.count(pattern) != 1:
        return None
    return runtime + memory.index(pattern) + struct.calcsize("@L")


_MAIN_STATE = _find_main_state() if sys.version_info >= (3, 13) else None


def _supported() -> bool:
    if sys.implementation.name != "cpython" or not (3, 8) <= sys.version_info < (3, 14):
        return False
    return sys.version_info < (3, 13) or (sys._is_gil_enabled() and _MAIN_STATE is not None)


# Whether all this is known to work on this interpreter.
SUPPORTED = _supported()


class Taken(Exception):
    """The program raised an exception that went to another `sys.unraisablehook` than ours."""


def run_on_empty_stack(
    codes: List[CodeType],
    scopes: List[Dict[str, Any]],
    begin: Callable[[], None],
    stages: Sequence[Stage],
    last_stages: Sequence[Stage],
    leave: Callable[[], None],
) -> NoReturn:
    """Call begin(), the code in its scope, each stage with its calls, leave(), and _exit(1).

    The code and its scope come in lists of one, which are emptied: the calling frames never return,
    so plain arguments would keep the globals of the program alive. Exceptions in the
    ``last_stages`` are not caught. ``leave`` is expected to exit by itself.
    """
    raised: List[Optional[BaseException]] = [None]
    ended: List[None] = []
    states: List[int] = []
    traces: List[Any] = []
    profiles: List[Any] = []

    def settle() -> None:
        codes.clear()
        scopes.clear()
        if not ended and raised[0] is None:
            raised[0] = Taken()

    release = _catch_into(raised)
    deque(
        chain(
            map(_swap, _one(_next_state, states)),
            map(_swap, _one(_next_state, states)),
            map(_guarded, _one(_ready, states, begin)),
            map(_make, _one(_program, codes, scopes, ended)),
            _take_off(traces, profiles),
            *_performed(stages, raised, settle, traces, profiles),
            *_performed(last_stages, raised, release, traces, profiles),
            map(_guarded, [leave]),
            map(os._exit, [1]),
        ),
        maxlen=0,
    )
    raise AssertionError("unreachable")


def _performed(
    stages: Sequence[Stage],
    raised: List[Optional[BaseException]],
    first: Callable[[], None],
    traces: List[Any],
    profiles: List[Any],
) -> Iterable[Calls]:
    """Call first(), and then each stage, followed by its calls.

    Few objects are created, because each program pays for them: those for tracers are created only
    if there is a tracer, or if the calls may have set one."""
    calls: List[Calls] = []

    def perform(stage: Stage) -> None:
        calls.clear()
        exception, raised[0] = raised[0], None
        if traces or profiles:
            calls.append(_put_back(traces, profiles))
        calls.extend(stage(exception))
        if calls:
            calls.append(_take_off(traces, profiles))

    yield map(_guarded, [first])
    for stage in stages:
        yield map(_guarded, [functools.partial(perform, stage)])
        yield map(_make, calls)


def _take_off(traces: List[Any], profiles: List[Any]) -> Calls:
    """Remove the trace and profile functions and keep them.

    ``append`` returns None, which is the value to set. A function that is not callable is a
    profiler in C; it stays, because it could not be set again.
    """
    return chain(
        map(_settrace, map(traces.append, filter(callable, starmap(_gettrace, [()])))),
        map(_setprofile, map(profiles.append, filter(callable, starmap(_getprofile, [()])))),
    )


def _put_back(traces: List[Any], profiles: List[Any]) -> Calls:
    """Set the trace and profile functions again, and forget them: they may remove themselves."""
    put = chain(map(_settrace, traces[:]), map(_setprofile, profiles[:]))
    traces.clear()
    profiles.clear()
    return put


def _program(codes: List[CodeType], scopes: List[Dict[str, Any]], ended: List[None]) -> Calls:
    arguments = zip(codes, scopes)  # noqa: B905 - Python 3.8 does not know strict
    return chain(starmap(exec, arguments), map(ended.append, [None]))


def _one(function: Callable[..., Any], *arguments: Any) -> Iterable[Any]:
    """Return an iterable of one value: the result of a call that is made when it is consumed."""
    return map(function, *[[argument] for argument in arguments])


def _next_state(states: List[int]) -> int:
    # Up to 3.11 PyGILState_Ensure finds only a state that was created when the thread had none.
    # So there are two switches, and the first one only removes the old state.
    _drop(states)
    states.append(_current())
    state: int = _new(_interpreter())
    return state


def _ready(states: List[int], begin: Callable[[], None]) -> Callable[[], None]:
    _drop(states)
    if _MAIN_STATE is not None:
        ctypes.c_void_p.from_address(_MAIN_STATE).value = _current()
    if (3, 9) <= sys.version_info < (3, 12):
        # In these versions calls in C count as recursion: undo the count of those made here.
        for _ in range(4):
            _leave_recursion()
    return begin


def _drop(states: List[int]) -> None:
    while states:
        state = states.pop()
        _clear(state)
        _delete(state)


def _catch_into(raised: List[Optional[BaseException]]) -> Callable[[], None]:
    """Set our unraisable hook. Returns the function that restores the old one."""
    original = sys.unraisablehook

    def unraisablehook(unraisable: Any, /) -> None:
        if _is_ours(unraisable):
            raised[0] = unraisable.exc_value
        else:
            original(unraisable)

    def release() -> None:
        sys.__unraisablehook__ = original
        if sys.unraisablehook is unraisablehook:
            sys.unraisablehook = original

    sys.unraisablehook = sys.__unraisablehook__ = unraisablehook
    return release


def _is_ours(unraisable: Any) -> bool:
    """Return whether an unraisable exception comes from the calls that we make."""
    if unraisable.object is None:  # since 3.13 the object is part of the message
        message = unraisable.err_msg or ""
        return bool(message.endswith("ctypes callback function " + repr(_consume)))
    return unraisable.object is _consume


def make_struct(kind: type, values: Dict[str, Any]) -> Any:
    """Create an instance of a structure type that Python code cannot call, such as `sys.flags`."""
    made = _struct_new(kind)
    for index, name in enumerate(struct_fields(kind)):
        _keep_reference(values[name])  # the next call takes over one reference
        _struct_set(made, index, values[name])
    return made


def struct_fields(kind: type) -> Tuple[str, ...]:
    """Return the names of the fields of a structure type, in order."""
    members = vars(kind).items()
    return tuple(name for name, member in members if isinstance(member, MemberDescriptorType))
