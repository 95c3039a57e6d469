"""Give a fork of the guest the state of an interpreter that has just started.

The modules that the parent imported stay imported, which makes a fork fast. Their state (random
numbers, thread and process tables, caches of the directory) is reset. Differences that remain are
listed in `program`.
"""

import _signal  # type: ignore[import-not-found]
import builtins
import ctypes
import faulthandler
import gc
import importlib.machinery
import itertools
import os
import site
import sys
import time
from types import ModuleType
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

from .stack import make_struct, struct_fields

_GC_THRESHOLD = gc.get_threshold()
_PACKAGE = __name__.partition(".")[0]
_SPECIAL_SIGNALS = {
    _signal.SIGPIPE: _signal.SIG_IGN,
    _signal.SIGXFSZ: _signal.SIG_IGN,
    _signal.SIGINT: _signal.default_int_handler,
}
SETTABLE_SIGNALS = tuple(_signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP})
_MODULE_ENDINGS = tuple(importlib.machinery.all_suffixes())
_ALWAYS_FOUND_FIRST = frozenset(sys.builtin_module_names)
# Listing a folder that is larger takes longer than looking for each name.
_LARGE_FOLDER_BYTES = 16 << 10
_imported: Dict[str, Any] = {}
# The lines of .pth files that are to be executed, each with the folder of its file.
_site_lines: List[Tuple[str, str]] = []
_OPENSSL_SEED_BYTES = 48
_HIDDEN_IF_LOADED = ("last_type", "last_value", "last_traceback", "last_exc", "tracebacklimit")


def add_packages(folders: List[str]) -> None:
    """Add folders of packages to sys.path as `site` does, without executing lines of .pth files.

    Those lines are code of the packages' authors. They are executed in programs (`run_site_lines`).
    """
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        if folder not in sys.path:
            sys.path.append(folder)
        for name in sorted(os.listdir(folder)):
            if name.endswith(".pth") and not name.startswith("."):
                _add_pth(folder, os.path.join(folder, name))


def _add_pth(folder: str, path: str) -> None:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith(("import ", "import\t")):
            _site_lines.append((folder, line))
        elif line.strip() and not line.startswith("#"):
            place = os.path.join(folder, line.rstrip())
            if place not in sys.path and os.path.exists(place):
                sys.path.append(place)


def run_site_lines() -> None:
    """Execute the lines of .pth files. An error in one is shown, and the next one is executed."""
    for folder, line in _site_lines:
        try:
            _run_site_line(folder, line)
        except Exception:  # noqa: BLE001  as `site` does
            sys.excepthook(*sys.exc_info())


def _run_site_line(sitedir: str, line: str) -> None:
    exec(line)  # noqa: S102  some lines look for ``sitedir`` in this frame


def replace_environment(env: Dict[str, str]) -> None:
    """Replace the whole environment, and apply its time zone."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()


def reset_signals() -> None:
    """Set the signal handlers of a starting interpreter: three special ones, else the default."""
    _signal.set_wakeup_fd(-1)
    faulthandler.disable()
    for number in SETTABLE_SIGNALS:
        wanted = _SPECIAL_SIGNALS.get(number, _signal.SIG_DFL)
        if _signal.getsignal(number) != wanted:
            _signal.signal(number, wanted)


def reset_sys(env: Dict[str, str], python: str, utf8_mode: bool) -> None:
    """Reset the part of `sys` that depends only on the environment and the interpreter."""
    sys.executable = python
    _reset_prefix(python)
    sys.pycache_prefix = env.get("PYTHONPYCACHEPREFIX") or None
    sys.flags = _flags(env, utf8_mode)
    _heed_environment()
    reset_hooks()


def _heed_environment() -> None:
    """Undo -E for variables that C code reads while a program runs, such as PYTHONBREAKPOINT."""
    try:
        ctypes.c_int.in_dll(ctypes.PyDLL(None), "Py_IgnoreEnvironmentFlag").value = 0
    except ValueError:
        pass  # this interpreter does not have it


def reset_program(spec: Dict[str, Any], env: Dict[str, str]) -> None:
    """Reset the part of `sys` and `gc` that depends on the program."""
    sys.argv = [spec["path"], *spec["argv"]]
    if sys.version_info >= (3, 10):
        sys.orig_argv = [spec["python"], *sys.argv]
    sys.path[:] = _search_path(spec, env)
    sys.path_importer_cache.pop(sys.path[0], None)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    gc.enable()
    gc.set_threshold(*_GC_THRESHOLD)
    # Collections then skip the parent's objects, and do not copy their pages.
    gc.freeze()


def _reset_prefix(python: str) -> None:
    home = os.path.dirname(os.path.dirname(python))
    inside = os.path.exists(os.path.join(home, "pyvenv.cfg"))
    sys.prefix = home if inside else sys.base_prefix
    sys.exec_prefix = home if inside else sys.base_exec_prefix


def _search_path(spec: Dict[str, Any], env: Dict[str, str]) -> List[str]:
    first = first_folder(spec)
    rest = list(spec.get("sys_path") or sys.path)
    extra = env.get("PYTHONPATH")
    if extra:
        added = [os.path.abspath(entry) for entry in extra.split(os.pathsep)]
        rest = list(dict.fromkeys(added + rest))
    return [first, *rest]


def first_folder(spec: Dict[str, Any]) -> str:
    """Return the first folder of sys.path for a program."""
    first: Optional[str] = spec.get("path0")
    return os.path.dirname(os.path.realpath(spec["path"])) if first is None else first


def is_shadowed(folders: List[str]) -> bool:
    """Return whether one of the folders has a module with the name of one that is imported already.

    A program would import that module instead.
    """
    names = imported_names()
    return any(_is_module(f, name) for f in folders for name in _entries(f, names))


def imported_names() -> FrozenSet[str]:
    """Return the names of the imported modules that a file could hide.

    The parent calls this after its imports, to save time in each fork.
    """
    if _imported.get("count") != len(sys.modules):
        names = frozenset(name.partition(".")[0] for name in sys.modules)
        _imported.update(count=len(sys.modules), names=names - _ALWAYS_FOUND_FIRST)
    found: FrozenSet[str] = _imported["names"]
    return found


def _entries(folder: str, names: FrozenSet[str]) -> List[str]:
    """Return the entries of the folder that may be modules with one of the names."""
    try:
        if os.stat(folder).st_size > _LARGE_FOLDER_BYTES:
            files = [name + ending for name in names for ending in ("", *_MODULE_ENDINGS)]
            return [name for name in files if os.path.lexists(os.path.join(folder, name))]
        return [name for name in os.listdir(folder) if name.partition(".")[0] in names]
    except OSError:
        return []


def _is_module(folder: str, name: str) -> bool:
    stem = name.partition(".")[0]
    if name == stem:
        return os.path.exists(os.path.join(folder, name, "__init__.py"))
    return name[len(stem) :] in _MODULE_ENDINGS


def _flags(env: Dict[str, str], utf8_mode: bool) -> Any:
    no_user_site = bool(env.get("PYTHONNOUSERSITE"))
    changed = (no_user_site, utf8_mode, bool(env.get("PYTHONDONTWRITEBYTECODE")))
    return _make_flags(*changed) if any(changed) else _USUAL_FLAGS


def _make_flags(no_user_site: bool, utf8_mode: bool, dont_write_bytecode: bool) -> Any:
    kind = type(sys.flags)
    values = {name: getattr(sys.flags, name) for name in struct_fields(kind)}
    values.update(isolated=0, ignore_environment=0, no_site=0, safe_path=False)
    values.update(no_user_site=int(no_user_site), utf8_mode=int(utf8_mode))
    values.update(dont_write_bytecode=int(dont_write_bytecode))
    return make_struct(kind, values)


_USUAL_FLAGS = _make_flags(False, False, False)


def reset_hooks() -> None:
    """Reset the hooks and limits of `sys`, which modules may have changed when they were
    imported."""
    sys.excepthook = sys.__excepthook__
    sys.displayhook = sys.__displayhook__
    sys.unraisablehook = sys.__unraisablehook__
    sys.breakpointhook = sys.__breakpointhook__
    sys.setrecursionlimit(1000)
    sys.setswitchinterval(0.005)
    for name in _HIDDEN_IF_LOADED:
        vars(sys).pop(name, None)


def reset_site(env: Dict[str, str]) -> None:
    """Do what `site` does in an interpreter that was not started with -S."""
    if not hasattr(builtins, "exit"):
        site.setquit()
        site.setcopyright()
        site.sethelper()
    vars(builtins).pop("_", None)
    site.ENABLE_USER_SITE = not env.get("PYTHONNOUSERSITE")
    site.USER_BASE = site.USER_SITE = None
    site.getusersitepackages()  # sets both
    site.enablerlcompleter()


def reset_modules() -> None:
    """Reset the state of modules that are already imported."""
    _call_if_loaded("linecache", "clearcache")
    _call_if_loaded("random", "seed")
    _call_if_loaded("numpy.random", "seed")
    # OpenSSL seeds itself anew when the pid changes, but another namespace may have the same pid.
    if "_ssl" in sys.modules:
        sys.modules["_ssl"].RAND_add(os.urandom(_OPENSSL_SEED_BYTES), _OPENSSL_SEED_BYTES)
    _set_if_loaded("tempfile", tempdir=None, _name_sequence=None)
    _set_if_loaded("asyncio.events", _event_loop_policy=None)
    _set_if_loaded("uuid", _node=None, _last_timestamp=None)
    _reset_logging(sys.modules.get("logging"))


def _call_if_loaded(module: str, function: str) -> None:
    if module in sys.modules:
        getattr(sys.modules[module], function)()


def _set_if_loaded(module: str, **values: Any) -> None:
    if module in sys.modules:
        vars(sys.modules[module]).update(values)


def _reset_logging(logging: Any) -> None:
    if logging is None:
        return
    if logging.root.handlers or logging.root.level != logging.WARNING:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)  # costly: it empties the caches of all loggers
    nanoseconds = isinstance(logging._startTime, int)
    logging._startTime = time.time_ns() if nanoseconds else time.time()


def reset_threading() -> None:
    """Reset the table of threads.

    Runs on the program's thread state, which is the main thread's.
    """
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return
    getattr(threading, "_shutdown_locks", set()).clear()
    threading._active.clear()
    threading._main_thread = threading._MainThread()


def reset_multiprocessing(python: str) -> None:
    """Reset the table of processes, and give the program an authentication key of its own."""
    process: Any = sys.modules.get("multiprocessing.process")
    if process is None:
        return
    main = type(process._current_process)  # its name is deleted from the module
    process._current_process = main()  # with an authentication key of its own
    process._process_counter = itertools.count(1)
    process._children.clear()
    process.ORIGINAL_DIR = os.path.abspath(os.getcwd())
    context: Any = sys.modules.get("multiprocessing.context")
    if context is not None:
        context._default_context._actual_context = None
    spawn: Any = sys.modules.get("multiprocessing.spawn")
    if spawn is not None:
        spawn.set_executable(python)


def apply_warning_options(env: Dict[str, str]) -> None:
    """Apply PYTHONWARNINGS."""
    # Other filters are left alone: -I and -E do not change the defaults, and filters that an
    # imported module added would also be there after the program's own import.
    sys.warnoptions.clear()
    if env.get("PYTHONWARNINGS"):
        import warnings

        options = [option for option in env["PYTHONWARNINGS"].split(",") if option]
        sys.warnoptions.extend(options)

        warnings._processoptions(options)  # type: ignore[attr-defined]


def hide_guest(main: ModuleType) -> None:
    """Hide our modules from the program, and make the given one `__main__`."""
    forget_guest()
    # As the last entry, it separates the parent's imports from the program's.
    sys.modules.pop("__main__", None)
    sys.modules["__main__"] = main


def forget_guest() -> None:
    """Make our modules impossible to import. Modules that are imported already go on to work.

    The parent may call this after its last import, to save time in each fork.
    """
    if _forgotten:
        return
    _forgotten.append(True)
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    for finder in [finder for finder in sys.meta_path if _is_ours(finder)]:
        sys.meta_path.remove(finder)
    for folder in [folder for folder in sys.path_importer_cache if _PACKAGE in folder]:
        del sys.path_importer_cache[folder]


_forgotten: List[bool] = []


def _is_ours(finder: Any) -> bool:
    module: Optional[str] = getattr(finder, "__module__", None)
    return (module or "").partition(".")[0] in (_PACKAGE, "__main__")


def enable_faulthandler(env: Dict[str, str]) -> None:
    """Enable faulthandler if PYTHONFAULTHANDLER asks for it."""
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
