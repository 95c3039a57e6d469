"""Become a Python program without starting Python.

`become` is called in a fresh fork of the guest, whose descriptors, directory, session and signal
mask are already the program's. It sets everything else as `python3 file.py` would, runs the file as
`__main__` on an empty stack (`stack`), and exits like the interpreter (`exit`). In some cases it
cannot do that faithfully, and executes a new interpreter instead: for files that do not compile,
are missing, or are directories or archives; for settings that only a starting interpreter can
honour; for packages that the user installed at home; and for a module beside the program that has
the name of one that is imported already.

These differences remain, and docs/guide.md tells users about them:

- Strings hash with the parent's seed.
- Modules that the parent imported are in `sys.modules` before the program imports them, hidden from
  the garbage collector (`gc.get_freeze_count()`), and not torn down in the end. If a program stores
  objects in them, their files are written, but `__del__` is not called.
- `/proc/self/cmdline` and `environ` are the parent's.
- An audit hook sees `sys.unraisablehook` when the program ends with an exception. A library that
  replaces `sys.unraisablehook` for good gets the exception that ends the program (with 1).
- Until 3.11, `sys.exit` of a tuple prints its items.
- On Python 3.8 the deepest recursion is one call less.
"""

import gc
import importlib.machinery
import io
import os
import sys
from types import CodeType, ModuleType
from typing import Any, Callable, Dict, List, NoReturn, Optional

from . import interpreter_state as state
from .exit import Ending
from .stack import SUPPORTED, run_on_empty_stack
from .streams import Text, open_streams, prepare_streams, settle_locale

# These variables are read by an interpreter while it starts, or by the loader and the C library.
_FOR_PYTHON = """
    HOME HASHSEED OPTIMIZE DEVMODE MALLOC MALLOCSTATS TRACEMALLOC INSPECT PROFILEIMPORTTIME DEBUG
    VERBOSE UTF8 COERCECLOCALE SAFEPATH NODEBUGRANGES PLATLIBDIR INTMAXSTRDIGITS PERFSUPPORT
    WARNDEFAULTENCODING THREADDEBUG DUMPREFS _FROZEN_MODULES _GIL _CPU_COUNT _PERF_JIT_SUPPORT
"""
_FOR_LOADER = {"LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "GLIBC_TUNABLES"}
_NEEDS_NEW_INTERPRETER = _FOR_LOADER.union("PYTHON" + name for name in _FOR_PYTHON.split())
_BELOW_USER_BASE = "/lib/python%d.%d/site-packages" % sys.version_info[:2]
_FIRST_READ_BYTES = 4 << 10
_READ_BYTES = 256 << 10
_NO_PROGRAM = 70
_CUSTOMIZED = ("sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize")


def become_program(spec: Dict[str, Any]) -> NoReturn:
    """Run the program in this process, and end the process with it."""
    become(lambda: spec)


def become(receive: Callable[[], Dict[str, Any]]) -> NoReturn:
    """Prepare for a program, receive it, run it, and end the process with it.

    ``receive`` returns the "path" of the file, "argv" after it, the full "env", "python" (for
    sys.executable and exec), and optionally "path0" (sys.path[0] instead of the file's directory),
    "sys_path" (the rest of sys.path instead of this process's own) and "shadowed" (the result of
    that function, if it is known).
    """
    # This frame never ends, so these are never collected: a collected stream writes its buffer.
    _streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__
    codes: List[CodeType] = []
    scopes: List[Dict[str, Any]] = []

    def begin() -> None:
        try:
            _begin(receive(), codes, scopes)
        except BaseException:  # noqa: BLE001 - there is no program, and nothing to return to
            os._exit(_NO_PROGRAM)

    ending = Ending()
    run_on_empty_stack(codes, scopes, begin, ending.stages, ending.last_stages, ending.leave)


def _begin(spec: Dict[str, Any], codes: List[CodeType], scopes: List[Dict[str, Any]]) -> None:
    """Fill in the program's code and globals. Runs on the thread state of the program."""
    code = _prepare(spec)
    if code is None:
        _start_interpreter(spec)
    module = main_module(_absolute(spec["path"]))
    state.hide_guest(module)
    state.reset_threading()
    codes.append(code)
    scopes.append(vars(module))


def make_ready(env: Dict[str, str], python: str) -> None:
    """Prepare this process for programs with this environment and interpreter.

    It may be called in the parent, to save time in each fork: forks share the memory that it
    writes. It creates nothing that a program must not share with another one.
    """
    if is_ready(env, python):
        return
    text = _surround(env, python) if _can_be_honoured(env) else None
    if text is not None:
        _ready.update(env=env, python=python, text=text)
        prepare_streams(text, bool(env.get("PYTHONUNBUFFERED")))


# The state that make_ready prepared: "env", "python" and "text". Empty if it was not called.
_ready: Dict[str, Any] = {}


def ready_for() -> Dict[str, Any]:
    """Return the "env" and "python" that this process and its forks are ready for, if any."""
    return {name: _ready[name] for name in ("env", "python") if name in _ready}


def is_ready(env: Dict[str, str], python: str) -> bool:
    """Return whether this process is ready for programs with this environment and interpreter."""
    # A comparison writes to the reference count of every value, so identity is tried first.
    known = _ready.get("env")
    return (known is env or known == env) and _ready.get("python") == python


def rehearse(spec: Dict[str, Any]) -> None:
    """Prepare for a program that is not there, while nobody waits for the one that will come.

    We are a fork: the first write to each page copies it, which is most of what preparing costs.
    """
    path = sys.path[:]
    _prepare(
        {**spec, "path": os.devnull, "argv": [], "path0": "/", "shadowed": False, "rehearsal": True}
    )
    sys.path[:] = path
    state.forget_guest()
    gc.collect()


def _prepare(spec: Dict[str, Any]) -> Optional[CodeType]:
    """Reset the interpreter and compile the file. Returns None if a new interpreter is needed."""
    env, python = spec["env"], spec["python"]
    ready = is_ready(env, python)
    if not SUPPORTED or not (ready or _can_be_honoured(env)) or customized(env):
        return None
    if spec["shadowed"] if "shadowed" in spec else shadowed(spec):
        return None
    source = _read(spec["path"])
    if source is None or b"unraisablehook" in source:  # we catch exceptions by that hook
        return None
    text = _ready["text"] if ready else _surround(env, python)
    if text is None:
        return None
    state.reset_signals()
    open_streams(text, bool(env.get("PYTHONUNBUFFERED")), "rehearsal" in spec)
    state.reset_program(spec, env)
    state.reset_modules()
    state.reset_multiprocessing(python)
    state.apply_warning_options(env)
    state.enable_faulthandler(env)
    if "rehearsal" not in spec:
        state.run_site_lines()
    return _compile(source, _absolute(spec["path"]))


def _surround(env: Dict[str, str], python: str) -> Optional[Text]:
    """Set the environment, the locale, and what `site` and `sys` derive from them.

    Returns None if only a new interpreter can do it.
    """
    _ready.clear()
    state.replace_environment(env)
    text = settle_locale(env)
    if text is not None:
        state.reset_site(env)
        state.reset_sys(env, python, text.utf8_mode)
    return text


def _can_be_honoured(env: Dict[str, str]) -> bool:
    return not any(env.get(name) for name in _NEEDS_NEW_INTERPRETER.intersection(env))


def customized(env: Dict[str, str]) -> bool:
    """Return whether there are packages at home, or code that an interpreter runs when it
    starts."""
    if not env.get("PYTHONNOUSERSITE") and os.access(_user_site(env), os.F_OK):
        return True
    if not env.get("PYTHONPATH"):
        return False
    folders = env["PYTHONPATH"].split(os.pathsep)
    return any(os.path.exists(os.path.join(f, name)) for f in folders if f for name in _CUSTOMIZED)


def shadowed(spec: Dict[str, Any]) -> bool:
    """Return whether a module of the program hides one that is imported already.

    Imports look into the program's folder and PYTHONPATH before the standard library. Call this in
    the directory of the program.
    """
    extra = spec["env"].get("PYTHONPATH")
    folders = [folder for folder in extra.split(os.pathsep) if folder] if extra else []
    return state.is_shadowed([state.first_folder(spec), *folders])


def _user_site(env: Dict[str, str]) -> str:
    base = env.get("PYTHONUSERBASE") or (env.get("HOME") or "") + "/.local"
    return base + _BELOW_USER_BASE


def _read(path: str) -> Optional[bytes]:
    parts: List[bytes] = []
    size = _FIRST_READ_BYTES
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while not parts or parts[-1]:
                parts.append(os.read(fd, size))
                if len(parts[-1]) == size:  # otherwise the next read most likely finds the end
                    size = _READ_BYTES
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    return b"".join(parts)


def _compile(source: bytes, filename: str) -> Optional[CodeType]:
    # Warnings are held back until the file has compiled. If it does not, a new interpreter reports
    # the error (it parses files a little differently), and repeats the warnings.
    real, sys.stderr = sys.stderr, io.StringIO()
    try:
        if not source.isascii():
            source.decode()  # compile() does not check comments; other encodings are rare
        code: CodeType = compile(source, filename, "exec", dont_inherit=True)
        warnings = sys.stderr.getvalue()
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return None
    finally:
        sys.stderr = real
    if warnings and real is not None:
        real.write(warnings)
    return code


def _absolute(path: str) -> str:
    """Return the file name that a program's frames and `__file__` have."""
    if os.path.isabs(path) or sys.version_info < (3, 9):
        return path
    return os.path.join(os.getcwd(), path)


def main_module(filename: str) -> ModuleType:
    """Create the `__main__` module of a program."""
    module = ModuleType("__main__")
    scope = vars(module)
    scope["__loader__"] = importlib.machinery.SourceFileLoader("__main__", filename)
    if sys.version_info < (3, 14):
        scope["__annotations__"] = {}
    scope["__builtins__"] = sys.modules["builtins"]
    scope["__file__"] = filename
    scope["__cached__"] = None
    return module


def _start_interpreter(spec: Dict[str, Any]) -> NoReturn:
    command: List[str] = [spec["python"], spec["path"], *spec["argv"]]
    try:
        os.execvpe(spec["python"], command, spec["env"])  # noqa: S606 - no shell wanted
    except OSError as error:
        os.write(2, ("paracle: %s: %s\n" % (spec["python"], error.strerror)).encode())
        os._exit(126)
