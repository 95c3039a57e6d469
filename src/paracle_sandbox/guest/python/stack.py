"""Run code at the bottom of an empty Python stack, as the interpreter runs a script.

A program that walks its stack (`inspect.stack()`, `warnings.warn(stacklevel=2)`, a debugger,
faulthandler) must not find the guest below its `__main__`. Frames hang on CPython's thread state,
so the forked child makes a new thread state for its only thread, switches over and drops the old
one, by the C API. Two things make that possible from Python:

- The switch may not happen inside the evaluation loop, which remembers the state it started
  with. So a chain of `map` objects, consumed by `deque` in C, makes the calls one after the other;
  the frame that started the chain is never returned to, because the last call is `_exit`.
- An exception may not leave the chain for the same reason. Calls that can raise go through a
  ctypes callback, where C catches what they raise and hands it to `sys.unraisablehook`. That hook
  is ours while the program runs; it keeps what the program raised and passes on everything else.

What a program has left to be called at its end (its hook for exceptions, exit callbacks,
finalizers) must not find us below it either. So a stage of the end says what is to be called, and
has returned when that happens. Nor does the program's trace function see a stage: it is taken off
before, from C, and put back for the calls.
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

# Our own, for what is defined below: a program may put something else in the place of any.
__builtins__ = dict(vars(builtins))  # type: ignore[assignment]

# What makes calls, when it is consumed.
Calls = Iterable[Any]
# Is told what the calls before it raised, and says which come next.
Stage = Callable[[Optional[BaseException]], Sequence[Calls]]

# Our own handle: prototypes set on ctypes.pythonapi would be visible to the program.
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
# A program may put something else in the place of these, too.
_gettrace, _settrace = sys.gettrace, sys.settrace
_getprofile, _setprofile = sys.getprofile, sys.setprofile

# Made here, in the parent: a callback needs executable memory, which a sandbox may refuse.
_consume: "functools.partial[Any]" = functools.partial(deque, maxlen=0)
_make = ctypes.PYFUNCTYPE(None, ctypes.py_object)(_consume)
_guarded = ctypes.PYFUNCTYPE(None, ctypes.py_object)(lambda call: call())


def _find_main_state() -> Optional[int]:
    """Since 3.13 signals are announced to one thread state, by a pointer in the runtime.

    Nothing in the API moves it. It follows the number of the main thread, and the two together
    are found at one place only.
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


# Whether this is an interpreter on which all this is known to work.
SUPPORTED = _supported()


class Taken(Exception):
    """The program raised something, and whoever has `sys.unraisablehook` by now took it."""


def run_on_empty_stack(
    codes: List[CodeType],
    scopes: List[Dict[str, Any]],
    begin: Callable[[], None],
    stages: Sequence[Stage],
    last_stages: Sequence[Stage],
    leave: Callable[[], None],
) -> NoReturn:
    """begin(), the code in the scope, then each stage and its calls, leave(), _exit(1).

    The code and scope come in lists of one, which are emptied: the frames of whoever calls are
    never left, so a plain argument would keep the globals of the program alive. What is raised in
    the ``last_stages`` is not caught any more. ``leave`` is expected to exit by itself.
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
    """first(), and each stage with its calls after it.

    Few objects, because they are made for each program: what is for tracers is made if there is
    one, or may be when the calls have been made."""
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
    """Keeping one returns None, which is what is to be set. What cannot be called is a profiler
    in C, which could not be put back."""
    return chain(
        map(_settrace, map(traces.append, filter(callable, starmap(_gettrace, [()])))),
        map(_setprofile, map(profiles.append, filter(callable, starmap(_getprofile, [()])))),
    )


def _put_back(traces: List[Any], profiles: List[Any]) -> Calls:
    """And forget them: they may take themselves off."""
    put = chain(map(_settrace, traces[:]), map(_setprofile, profiles[:]))
    traces.clear()
    profiles.clear()
    return put


def _program(codes: List[CodeType], scopes: List[Dict[str, Any]], ended: List[None]) -> Calls:
    arguments = zip(codes, scopes)  # noqa: B905 - Python 3.8 does not know strict
    return chain(starmap(exec, arguments), map(ended.append, [None]))


def _one(function: Callable[..., Any], *arguments: Any) -> Iterable[Any]:
    """The result of one call, made when it is asked for and not before."""
    return map(function, *[[argument] for argument in arguments])


def _next_state(states: List[int]) -> int:
    # Up to 3.11 only a state that is created when the thread has none becomes the one that
    # PyGILState_Ensure finds, hence two switches: the first only to be rid of the old one.
    _drop(states)
    states.append(_current())
    state: int = _new(_interpreter())
    return state


def _ready(states: List[int], begin: Callable[[], None]) -> Callable[[], None]:
    _drop(states)
    if _MAIN_STATE is not None:
        ctypes.c_void_p.from_address(_MAIN_STATE).value = _current()
    if (3, 9) <= sys.version_info < (3, 12):
        # There calls in C count as recursion: make up for those that lead to the program.
        for _ in range(4):
            _leave_recursion()
    return begin


def _drop(states: List[int]) -> None:
    while states:
        state = states.pop()
        _clear(state)
        _delete(state)


def _catch_into(raised: List[Optional[BaseException]]) -> Callable[[], None]:
    """Take the unraisable hook; returns the function that gives it back."""
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
    """Whether it comes from the calls that we make."""
    if unraisable.object is None:  # since 3.13 the object is part of the message
        message = unraisable.err_msg or ""
        return bool(message.endswith("ctypes callback function " + repr(_consume)))
    return unraisable.object is _consume


def make_struct(kind: type, values: Dict[str, Any]) -> Any:
    """An instance of a structure type that Python code cannot call, such as `sys.flags`."""
    made = _struct_new(kind)
    for index, name in enumerate(struct_fields(kind)):
        _keep_reference(values[name])  # the next call takes one over
        _struct_set(made, index, values[name])
    return made


def struct_fields(kind: type) -> Tuple[str, ...]:
    members = vars(kind).items()
    return tuple(name for name, member in members if isinstance(member, MemberDescriptorType))
