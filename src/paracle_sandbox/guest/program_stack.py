"""Run code at the bottom of an empty Python stack, as the interpreter runs a script.

A program that walks its stack (`inspect.stack()`, `warnings.warn(stacklevel=2)`, a debugger,
faulthandler) must not find the guest below its `__main__`. Frames hang on CPython's thread state,
so the forked child makes a new thread state for its only thread, switches over and drops the old
one, all by the public C API. Two things make that possible from Python:

- The switch may not happen inside the evaluation loop, which remembers the state it started
  with. So a chain of `map` objects, consumed by `deque` in C, makes the calls one after the other;
  the frame that started the chain is never returned to, because the last call is `_exit`.
- An exception may not leave the chain for the same reason. Calls that can raise go through a
  ctypes callback, where C catches what they raise and hands it to `sys.unraisablehook`. That hook
  is ours while the program runs; it keeps what the program raised and passes on everything else.
"""

import ctypes
import os
import sys
from collections import deque
from itertools import chain
from types import CodeType, MemberDescriptorType
from typing import Any, Callable, Dict, Iterable, List, NoReturn, Optional, Tuple

Handler = Callable[[Optional[BaseException]], None]

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
_struct_new = _function("PyStructSequence_New", ctypes.py_object, ctypes.py_object)
_struct_set = _function(
    "PyStructSequence_SetItem", None, ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object
)
_keep_reference = _function("Py_IncRef", None, ctypes.py_object)
flush_c_streams = ctypes.CDLL(None).fflush

# Made here, in the parent: a callback needs executable memory, which a sandbox may refuse.
_exec = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.py_object)(exec)
_guarded = ctypes.PYFUNCTYPE(None, ctypes.py_object)(lambda call: call())


def supported() -> bool:
    """Whether this interpreter is one whose thread states behave as described above."""
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.implementation.name == "cpython" and (3, 8) <= sys.version_info < (3, 15) and gil


def run_on_empty_stack(
    code: CodeType, scope: Dict[str, Any], begin: Callable[[], None], end: Handler
) -> NoReturn:
    """Call begin(), run the code in the scope, call end(what it raised), and exit with 1.

    `end` is expected to exit by itself.
    """
    raised: List[Optional[BaseException]] = [None]
    codes, scopes = [code], [scope]
    states: List[int] = []

    def finish() -> None:
        codes.clear()
        scopes.clear()  # nothing of ours may keep the globals of the program alive
        exception, raised[0] = raised[0], None
        release()
        end(exception)

    release = _catch_into(raised)
    del code, scope
    deque(
        chain(
            map(_swap, _one(_next_state, states)),
            map(_swap, _one(_next_state, states)),
            map(_guarded, _one(_ready, states, begin)),
            map(_exec, codes, scopes),
            map(_guarded, [finish]),
            map(os._exit, [1]),
        ),
        maxlen=0,
    )
    raise AssertionError("unreachable")


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
        sys.__unraisablehook__ = original  # type: ignore[misc]
        if sys.unraisablehook is unraisablehook:
            sys.unraisablehook = original

    sys.unraisablehook = sys.__unraisablehook__ = unraisablehook  # type: ignore[misc]
    return release


def _is_ours(unraisable: Any) -> bool:
    if unraisable.object is None:  # since 3.13 the object is part of the message
        message = unraisable.err_msg or ""
        return message.endswith("ctypes callback function " + repr(exec))
    return unraisable.object is exec


def make_struct(kind: type, values: Dict[str, Any]) -> Any:
    """An instance of a structure type that Python code cannot call, such as `sys.flags`."""
    struct = _struct_new(kind)
    for index, name in enumerate(struct_fields(kind)):
        _keep_reference(values[name])  # the next call takes one over
        _struct_set(struct, index, values[name])
    return struct


def struct_fields(kind: type) -> Tuple[str, ...]:
    members = vars(kind).items()
    return tuple(name for name, member in members if isinstance(member, MemberDescriptorType))
