"""Small programs that must behave the same under `python3 file.py` and under the guest.

Each is written to a directory of its own as `program.py` and run there. What they print may not
depend on where that is, on process ids or on time; addresses are masked by whoever compares.
"""

# ruff: noqa: E501 - the lines of the programs are what they are
import textwrap
from dataclasses import dataclass, field

FILE = "program.py"


@dataclass(frozen=True)
class Program:
    name: str
    source: bytes
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[int, int] = (3, 8)


def _program(name: str, source: str, **options: object) -> Program:
    return Program(name, textwrap.dedent(source).lstrip("\n").encode(), **options)  # type: ignore


PROGRAMS: list[Program] = [
    _program("hello", "print('hello')"),
    _program("empty", ""),
    _program(
        "no_final_newline",
        """
        print(1)
        if 1:
            print(2)
        """,
    ),
    # -- what a program sees of itself
    _program("argv", "import sys; print(sys.argv[1:], len(sys.argv))", argv=("a", "b c", "é", "")),
    _program("globals_order", "print([(k, type(v).__name__) for k, v in globals().items()])"),
    _program(
        "main_module",
        """
        '''Docs.'''
        import os, sys
        m = sys.modules['__main__']
        print(m.__name__, m.__doc__, m.__spec__, m.__package__, m.__annotations__, m.__cached__)
        print(os.path.basename(m.__file__), m.__loader__.name, vars(m) is globals())
        print(type(m.__loader__), m.__loader__.get_source('__main__') == open(__file__).read())
        print(os.path.isabs(__file__), sys.argv[0] == __file__, m.__builtins__ is __import__('builtins'))
        x: int = 1
        print(__annotations__)
        """,
    ),
    _program(
        "main_guard",
        """
        if __name__ == '__main__':
            print('main')
        else:
            print('not')
        """,
    ),
    _program(
        "flags_and_sys",
        """
        import os, sys
        print(sys.flags)
        print(sys.warnoptions, sys.dont_write_bytecode, sys.pycache_prefix, sys._xoptions)
        print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile())
        print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
        print(sys.unraisablehook is sys.__unraisablehook__, hasattr(sys, 'last_value'))
        print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__)
        print(sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix)
        print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path[1:])
        print([getattr(f, '__name__', f) for f in sys.meta_path[-3:]], sys.is_finalizing())
        print(sys.getfilesystemencoding(), sys.getdefaultencoding(), getattr(sys, 'orig_argv', [0])[1:])
        """,
    ),
    _program(
        "no_guest_modules",
        """
        import sys, gc
        print([n for n in sys.modules if 'paracle' in n or 'guest' in n or 'launcher' in n])
        print(gc.isenabled(), gc.get_threshold())
        """,
    ),
    _program(
        "empty_stack",
        """
        import inspect, sys, traceback
        print(sys._getframe().f_back, len(inspect.stack()))
        traceback.print_stack()
        def f():
            return [frame.function for frame in inspect.stack()]
        print(f(), list(sys._current_frames().values()) == [sys._getframe()])
        try:
            sys._getframe(1)
        except ValueError as e:
            print(e)
        """,
    ),
    _program(
        "site_builtins",
        """
        print(exit, quit, copyright.__class__, credits.__class__, license, help)
        """,
    ),
    _program(
        "environment",
        """
        import os, subprocess, sys
        print(sorted(k for k in os.environ if k.startswith(('FAITHFUL', 'LC_', 'LANG'))))
        print(os.environ['FAITHFUL'], os.environb[b'FAITHFUL'], os.getenv('NOPE'))
        os.environ['FAITHFUL_CHILD'] = 'x'
        sys.stdout.flush()
        subprocess.run(['sh', '-c', 'echo $FAITHFUL $FAITHFUL_CHILD'], check=True)
        """,
        env={"FAITHFUL": "yes é"},
    ),
    _program(
        "no_locale",
        """
        import locale, os, sys
        print(os.environ.get('LC_CTYPE'), sys.flags.utf8_mode, locale.setlocale(locale.LC_CTYPE))
        print(sys.stdout.encoding, sys.stdout.errors, locale.setlocale(locale.LC_TIME))
        print('é')
        """,
        env={"LANG": "", "LC_ALL": ""},
    ),
    _program(
        "locale",
        """
        import locale, time
        print(locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False).lower())
        print(locale.setlocale(locale.LC_ALL, ''), locale.str(1.5), locale.localeconv()['decimal_point'])
        """,
    ),
    _program("posix_locale", "import sys; print(sys.flags.utf8_mode, 'é')", env={"LC_ALL": "C"}),
    _program(
        "time_zone",
        "import time; print(time.tzname, time.timezone, time.strftime('%H %Z', time.localtime(0)))",
        env={"TZ": "EST5EDT"},
    ),
    _program(
        "time_runs",
        """
        import time
        a = time.monotonic(); time.sleep(0.01); b = time.monotonic()
        print(0.005 < b - a < 5, time.perf_counter() > 0, time.process_time() < 5)
        """,
    ),
    # -- exceptions
    _program(
        "exception",
        """
        def f(x):
            return 1 / x

        print('before')
        f(0)
        """,
    ),
    _program("raise_at_top", "raise ValueError('bad ' + 'thing')"),
    _program(
        "chained",
        """
        def load():
            try:
                {}['missing']
            except KeyError as e:
                raise RuntimeError('no config') from e
        try:
            load()
        except RuntimeError:
            raise TypeError('while handling')
        """,
    ),
    _program(
        "suppressed_context",
        """
        try:
            1/0
        except ZeroDivisionError:
            raise OSError(2, 'x') from None
        """,
    ),
    _program("assertion", "x = 3\nassert x == 4, f'{x} is not 4'"),
    _program("name_suggestion", "import math\nprint(math.pie)\n"),
    _program(
        "multi_line_error",
        """
        data = {'a': [1, 2, 3]}
        value = (data['a'][0]
                 + data['a'][1]
                 + data['b']['c'][2])
        """,
    ),
    _program("error_not_utf8_message", "raise ValueError('caf\\xe9 \\udc80 \\u2603')"),
    _program(
        "exception_group",
        """
        def f():
            raise ExceptionGroup('several', [ValueError(1), ExceptionGroup('in', [KeyError('k')])])
        try:
            f()
        except* KeyError as e:
            e.add_note('a note')
            raise
        """,
        needs=(3, 11),
    ),
    _program(
        "exception_in_import",
        "import broken\n",
        files={"broken.py": b"import json\njson.loads('{')\n"},
    ),
    _program("missing_module", "import json.nothing"),
    _program("missing_module_plain", "import nothing_like_this"),
    _program(
        "syntax_error",
        """
        print('never')
        def f(:
            pass
        """,
    ),
    _program(
        "indentation_error",
        """
        def f():
            x = 1
          y = 2
        """,
    ),
    _program("unterminated_string", "print('never')\nx = '''abc\n\n"),
    _program("syntax_error_in_import", "import broken\n", files={"broken.py": b"x = = 2\n"}),
    _program("syntax_warning", "x = 1\nprint(x is 1)\n"),
    _program(
        "syntax_warning_then_error",
        """
        x = 1
        print(x is 1)
        x = = 1
        """,
    ),
    _program("return_outside", "print('never')\nreturn 3\n"),
    Program("null_byte", b"print(1)\nx = '\x00'\n"),
    Program("not_utf8", b"print('never')\nx = 'caf\xe9'\n"),
    Program(
        "latin1_cookie", b"# -*- coding: latin-1 -*-\nx = 'caf\xe9'\nprint(x, len(x))\n1/0 # \xe9\n"
    ),
    Program("bom", b"\xef\xbb\xbfprint('bom \xc3\xa9')\n"),
    Program("crlf", b"x = '''a\r\nb'''\r\nprint(repr(x))\r\n1/0\r\n"),
    _program(
        "future_annotations",
        """
        from __future__ import annotations
        def f(x: Nope): ...
        print(f.__annotations__)
        """,
    ),
    _program(
        "no_inherited_future",
        """
        import typing
        def f(x: int): ...
        print(f.__annotations__)
        """,
    ),
    _program(
        "custom_excepthook",
        """
        import sys
        sys.excepthook = lambda t, v, tb: print('hook', t.__name__, v, tb.tb_lineno)
        raise KeyError('k')
        """,
    ),
    _program(
        "broken_excepthook",
        """
        import sys
        def hook(t, v, tb):
            raise RuntimeError('hook failed')
        sys.excepthook = hook
        raise KeyError('k')
        """,
    ),
    _program(
        "excepthook_exits",
        """
        import sys
        sys.excepthook = lambda *a: sys.exit(7)
        1/0
        """,
    ),
    _program(
        "deleted_excepthook",
        """
        import sys
        del sys.excepthook
        1/0
        """,
    ),
    _program(
        "print_exc",
        """
        import traceback, sys
        def g(): raise ValueError('v')
        try:
            g()
        except ValueError:
            traceback.print_exc()
            print(traceback.format_exc())
            print(sys.exc_info()[0])
        print(sys.exc_info())
        """,
    ),
    _program(
        "recursion_error",
        """
        def f(n):
            return f(n + 1)
        try:
            f(0)
        except RecursionError as e:
            print(type(e).__name__, e)
        f(0)
        """,
        needs=(3, 9),
    ),
    _program(
        "deep_recursion",
        """
        import sys
        sys.setrecursionlimit(20000)
        def f(n):
            return 0 if n == 0 else 1 + f(n - 1)
        print(f(9000))
        """,
    ),
    _program("memory_error", "x = bytearray(1 << 60)\n"),
    _program(
        "tracebacklimit",
        """
        import sys
        sys.tracebacklimit = 1
        def f(): 1/0
        f()
        """,
    ),
    # -- ways to end
    _program("exit_number", "import sys; print('x'); sys.exit(3)"),
    _program("exit_text", "import sys; sys.exit('went wrong é')"),
    _program("exit_none", "import sys; sys.exit()"),
    _program("exit_true", "import sys; sys.exit(True)"),
    _program("exit_large", "import sys; sys.exit(256 + 5)"),
    _program("exit_negative", "import sys; sys.exit(-1)"),
    _program("exit_tuple", "raise SystemExit((1, 'two'))"),
    _program("exit_two_arguments", "raise SystemExit(1, 2)"),
    _program("exit_builtin", "exit(4)"),
    _program("quit_builtin", "quit()"),
    _program(
        "exit_in_finally",
        """
        import sys
        try:
            sys.exit(2)
        finally:
            print('finally')
        """,
    ),
    _program("exit_subclass", "class E(SystemExit): pass\nraise E(9)"),
    _program("os_exit", "import os; print('lost', end=''); os._exit(5)"),
    _program("abort", "import os; print('x', flush=True); os.abort()"),
    _program("kill_self", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    _program("alarm", "import signal; signal.alarm(1)\nwhile True: signal.pause()"),
    _program(
        "term_self",
        """
        import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)
        """,
    ),
    _program(
        "keyboard_interrupt",
        """
        import atexit
        atexit.register(print, 'bye')
        def f(): raise KeyboardInterrupt
        f()
        """,
    ),
    _program(
        "sigint",
        """
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)
        for i in range(10**6): pass
        """,
    ),
    _program("segfault", "import ctypes; print('x', flush=True); ctypes.string_at(0)"),
    _program(
        "segfault_shown",
        "import ctypes, faulthandler\nfaulthandler.enable(all_threads=False)\ndef f(): ctypes.string_at(1)\nf()\n",
    ),
    _program(
        "faulthandler_env",
        "import faulthandler\nprint(faulthandler.is_enabled())\n",
        env={"PYTHONFAULTHANDLER": "1"},
    ),
    _program(
        "faulthandler_dump",
        """
        import faulthandler
        def f(): faulthandler.dump_traceback()
        f()
        """,
    ),
    _program(
        "atexit_order",
        """
        import atexit
        atexit.register(print, 'first')
        @atexit.register
        def last(): print('last', __name__, '__file__' in globals())
        print('running')
        """,
    ),
    _program(
        "atexit_after_error",
        """
        import atexit
        atexit.register(print, 'bye')
        1/0
        """,
    ),
    _program(
        "atexit_raises",
        """
        import atexit
        def f(): 1/0
        atexit.register(print, 'next')
        atexit.register(f)
        """,
    ),
    _program(
        "atexit_exits",
        """
        import atexit, sys
        atexit.register(sys.exit, 3)
        print('x')
        """,
    ),
    _program(
        "del_at_exit",
        """
        class Noisy:
            def __init__(self, name): self.name = name
            def __del__(self): print('del', self.name, print is not None)
        a = Noisy('a'); b = Noisy('b'); _c = Noisy('c')
        print('end')
        """,
    ),
    _program(
        "del_of_cycle",
        """
        import gc
        class Node:
            def __del__(self): print('del node')
        n = Node(); n.self = n
        del n
        print('collected', gc.collect() > 0)
        m = Node(); m.self = m
        """,
    ),
    _program(
        "del_in_module",
        "import held\nprint('end')\n",
        files={"held.py": b"class N:\n    def __del__(self): print('del in module')\nn = N()\n"},
    ),
    _program(
        "modules_that_go_with_another",
        "import leaving, colorsys\na = leaving.A()\n",
        files={
            "leaving.py": b"import sys\nclass A:\n    def __del__(self):\n        print('gone', sys.modules.pop('colorsys', None) is None)\n"
        },
    ),
    _program(
        "thread_pool",
        """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            print(list(pool.map(str, range(3))))
        print(asyncio.run(asyncio.to_thread(lambda: 'in a thread')))
        """,
        needs=(3, 9),
    ),
    _program(
        "del_raises",
        """
        class N:
            def __del__(self): raise ValueError('in del')
        n = N()
        del n
        print('on')
        """,
    ),
    _program(
        "del_raises_at_exit",
        """
        class N:
            def __del__(self): 1/0
        n = N()
        print('on')
        """,
    ),
    _program(
        "finalizing",
        """
        import sys
        class N:
            def __del__(self): print(sys.is_finalizing(), sys.meta_path, sys.stdout is sys.__stdout__)
        n = N()
        """,
    ),
    _program(
        "weakref_finalize",
        """
        import weakref
        class C: pass
        c = C()
        weakref.finalize(c, print, 'finalized')
        """,
    ),
    _program(
        "generator_closed_at_exit",
        """
        def g():
            try:
                yield 1
            finally:
                print('closed')
        x = g(); print(next(x))
        """,
    ),
    # -- streams
    _program(
        "positions_of_streams",
        """
        import io, sys
        for s in (sys.stdin, sys.stdout, sys.stderr):
            print(s.seekable(), s.buffer.seekable(), s.readable(), s.writable(), s._CHUNK_SIZE)
            try:
                print(s.tell())
            except (OSError, io.UnsupportedOperation) as e:
                print(type(e).__name__, e)
        """,
    ),
    _program(
        "who_the_main_thread_is",
        """
        import logging, os, random, signal, threading
        main = threading.main_thread()
        print(main.native_id == threading.get_native_id() == os.getpid(), main.ident == threading.get_ident())
        print(signal.getsignal(signal.SIGCHLD), random.random() != random.Random(0).random())
        logging.getLogger().warning("locks are free")
        if os.fork() == 0:
            os._exit(7 if threading.main_thread().native_id == os.getpid() else 8)
        print(os.WEXITSTATUS(os.wait()[1]))
        """,
    ),
    _program(
        "streams",
        """
        import sys
        for s in (sys.stdin, sys.stdout, sys.stderr):
            print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines)
            print(type(s.buffer).__name__, s.fileno(), s.isatty(), s.closed, s.buffer.mode, s.buffer.name)
        print(sys.stdout)
        """,
    ),
    _program(
        "streams_unbuffered",
        """
        import sys
        for s in (sys.stdin, sys.stdout, sys.stderr):
            print(s.name, s.line_buffering, s.write_through, type(s.buffer).__name__, repr(s))
        """,
        env={"PYTHONUNBUFFERED": "1"},
    ),
    _program(
        "unbuffered_then_exit",
        """
        import os
        print('kept', end='')
        os._exit(0)
        """,
        env={"PYTHONUNBUFFERED": "1"},
    ),
    _program(
        "progress",
        r"""
        import sys, time
        for i in range(5):
            print(f'\r{i}', end='', flush=True)
            time.sleep(.001)
        print(file=sys.stderr)
        """,
    ),
    _program(
        "io_encoding",
        r"""
        import sys; print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors); print('\u2603')
        """,
        env={"PYTHONIOENCODING": "ascii:replace"},
    ),
    _program(
        "io_encoding_plain",
        """
        import sys; print(sys.stdin.encoding, sys.stdout.errors); print('é')
        """,
        env={"PYTHONIOENCODING": "latin1"},
    ),
    _program(
        "stdin_read",
        """
        import sys; print(repr(sys.stdin.read()))
        """,
        stdin=b"one\r\ntwo\rthree\n\xff\xc3\xa9",
    ),
    _program(
        "stdin_lines",
        """
        import sys
        for line in sys.stdin: print(line.strip()[::-1])
        """,
        stdin=b"abc\ndef\n",
    ),
    _program("stdin_binary", "import sys; print(sys.stdin.buffer.read())", stdin=bytes(range(256))),
    _program(
        "input",
        """
        print(input('name? ') + '!')
        print(input())
        input()
        """,
        stdin=b"Ann\nBob\n",
    ),
    _program("big_output", "import sys\nfor i in range(60000): sys.stdout.write('line %d\\n' % i)"),
    _program(
        "binary_output",
        r"""
        import sys; sys.stdout.buffer.write(bytes(range(256)) * 300); sys.stderr.buffer.write(b'\xff')
        """,
    ),
    _program(
        "interleaved_layers",
        r"""
        import sys, os
        print('a', flush=True); sys.stdout.buffer.write(b'b\n'); sys.stdout.flush(); os.write(1, b'c\n'); print('d')
        """,
    ),
    _program(
        "surrogates",
        r"""
        print('caf\u00e9 \N{SNOWMAN} \U0001f40d'); print('\udcff'); print('\ud800')
        """,
    ),
    _program(
        "stderr_text",
        r"""
        import sys; print('warn \ud800 é', file=sys.stderr); sys.stderr.write('no newline')
        """,
    ),
    _program(
        "stdout_replaced",
        """
        import io, sys
        sys.stdout = io.StringIO()
        print('hidden')
        sys.__stdout__.write(sys.stdout.getvalue().upper())
        """,
    ),
    _program(
        "stdout_replaced_by_junk",
        """
        import sys
        print('shown')
        sys.stdout = object()
        """,
    ),
    _program(
        "redirect",
        """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as f: print('x')
        print(repr(f.getvalue()))
        """,
    ),
    _program("stdout_closed", "import sys; print('x'); sys.stdout.close()"),
    _program("stdout_none", "import sys; sys.stdout = None; print('x')"),
    _program("stdout_fd_closed", "import os; print('x'); os.close(1)"),
    _program(
        "broken_pipe_at_exit",
        """
        import os
        r, w = os.pipe()
        os.close(r)
        os.dup2(w, 1)
        print('x')
        """,
    ),
    _program(
        "broken_pipe",
        """
        import os
        r, w = os.pipe()
        os.close(r)
        os.dup2(w, 1)
        for i in range(10000): print('some text')
        """,
    ),
    _program(
        "full_device",
        """
        import os
        os.dup2(os.open('/dev/full', os.O_WRONLY), 1)
        print('x')
        """,
    ),
    _program("c_printf", "import ctypes; ctypes.CDLL(None).printf(b'from c\\n')"),
    # -- files and modules beside the program
    _program(
        "sibling",
        """
        import sibling
        print(sibling.VALUE, sibling.__name__)
        """,
        files={"sibling.py": b"VALUE = 42\n"},
    ),
    _program(
        "sibling_package",
        """
        from pkg.inner import f
        f()
        """,
        files={
            "pkg/__init__.py": b"",
            "pkg/inner.py": b"from . import x\ndef f(): return x.boom()\n",
            "pkg/x.py": b"def boom(): raise LookupError('deep')\n",
        },
    ),
    _program(
        "shadows_stdlib",
        """
        import colorsys; print(colorsys.__doc__)
        """,
        files={"colorsys.py": b"'''mine'''\n"},
    ),
    _program(
        "python_path",
        """
        import sys, os, extra
        print(extra.X, [os.path.basename(p) for p in sys.path[:2]][1])
        """,
        files={"lib/extra.py": b"X = 5\n"},
        env={"PYTHONPATH": "lib"},
    ),
    _program(
        "main_imported_again",
        """
        import program, sys
        print(__name__, sys.modules['program'] is sys.modules['__main__'])
        """,
    ),
    _program(
        "relative_open",
        """
        print(open('data.txt').read())
        open('missing.txt')
        """,
        files={"data.txt": b"data\n"},
    ),
    _program(
        "import_lib",
        """
        import importlib, runpy
        print(runpy.run_path('other.py')['V'], importlib.import_module('other').V)
        """,
        files={"other.py": b"V = __name__\n"},
    ),
    _program(
        "tempfile",
        """
        import tempfile, os
        with tempfile.TemporaryDirectory() as d:
            open(os.path.join(d, 'x'), 'w').close(); print(os.listdir(d))
        print(os.path.exists(d))
        """,
    ),
    _program(
        "default_encoding",
        """
        open('x.txt', 'w').write('é')
        print(open('x.txt', 'rb').read(), open('x.txt').encoding.lower())
        """,
    ),
    _program("resource_warning_silent", "open('/dev/null')\nprint('ok')"),
    # -- introspection
    _program(
        "get_source",
        """
        import inspect
        def f(a, b=2):
            'doc'
            return a
        print(inspect.getsource(f), inspect.signature(f), inspect.getmodule(f).__name__)
        """,
    ),
    _program(
        "pickle_main_class",
        """
        import pickle
        class P:
            def __init__(self, x): self.x = x
        print(pickle.loads(pickle.dumps(P(3))).x, P.__module__)
        """,
    ),
    _program(
        "dataclass",
        """
        from dataclasses import dataclass, field
        @dataclass(order=True)
        class A:
            x: int
            y: list = field(default_factory=list)
        print(A(1), A(1) < A(2))
        """,
    ),
    _program(
        "type_hints",
        """
        import typing
        class A:
            x: 'typing.List[A]'
        print(typing.get_type_hints(A))
        """,
    ),
    _program(
        "decorators",
        """
        import functools
        def d(f):
            @functools.wraps(f)
            def w(*a): print('call', f.__qualname__); return f(*a)
            return w
        @d
        def g(x): return x * 2
        print(g(4), g)
        """,
    ),
    _program(
        "generators",
        """
        def g():
            x = yield 1
            yield x
        it = g(); print(next(it), it.send(5)); it.throw(ValueError('thrown'))
        """,
    ),
    _program(
        "context_manager",
        """
        class C:
            def __enter__(self): print('in'); return self
            def __exit__(self, *e): print('out', e[0]); return False
        with C():
            1/0
        """,
    ),
    _program(
        "enum_and_namedtuple",
        """
        import enum, collections, pickle
        E = enum.Enum('E', 'A B')
        P = collections.namedtuple('P', 'x y')
        print(E.A, E.__module__, P(1, 2), pickle.loads(pickle.dumps(P(1, 2))), pickle.loads(pickle.dumps(E.B)))
        """,
    ),
    _program(
        "doctest",
        """
        '''
        >>> 1 + 1
        3
        '''
        import doctest
        print(doctest.testmod())
        """,
    ),
    _program(
        "unittest",
        """
        import unittest, sys
        class T(unittest.TestCase):
            def test_a(self): self.assertEqual(1, 1)
        unittest.main(argv=['t', '-q'], exit=False, testRunner=unittest.TextTestRunner(open('/dev/null', 'w')))
        print('done')
        """,
    ),
    _program(
        "trace",
        """
        import sys
        lines = []
        def t(f, e, a):
            lines.append((f.f_code.co_name, e, f.f_lineno)); return t
        def g():
            x = 1
            return x
        sys.settrace(t); g(); sys.settrace(None); print(lines)
        """,
    ),
    _program(
        "pdb",
        """
        import pdb
        x = 5
        pdb.set_trace()
        print('after')
        """,
        stdin=b"p x\nwhere\nc\n",
    ),
    _program(
        "compile_flags",
        """
        print(eval(compile('1 + 1', 's', 'eval')), __debug__)
        exec('def f(x: int): ...'); print(f.__annotations__)
        """,
    ),
    # -- warnings and logging
    _program(
        "warnings",
        """
        import warnings
        warnings.warn('user')
        warnings.warn('dep', DeprecationWarning)
        warnings.warn('above', stacklevel=2)
        warnings.warn('far', stacklevel=9)
        def f(): warnings.warn('in f', stacklevel=2)
        f()
        """,
    ),
    _program("warning_filters", "import warnings\nfor f in warnings.filters: print(f)"),
    _program(
        "python_warnings",
        """
        import sys, warnings
        print(sys.warnoptions)
        warnings.warn('x')
        """,
        env={"PYTHONWARNINGS": "error::UserWarning,ignore::ImportWarning"},
    ),
    _program(
        "python_warnings_all",
        """
        open('/dev/null')
        print('ok')
        """,
        env={"PYTHONWARNINGS": "always"},
    ),
    _program(
        "deprecation_in_main",
        r"""
        import warnings
        x = '\d'
        warnings.warn('old', DeprecationWarning)
        """,
    ),
    _program(
        "logging",
        """
        import logging
        print(logging.root.handlers, logging.root.level)
        logging.warning('w %d', 1)
        logging.info('hidden')
        logging.getLogger('a.b').error('e', stack_info=True)
        logging.basicConfig(format='%(name)s %(filename)s:%(lineno)d %(threadName)s %(processName)s %(message)s', force=True)
        logging.critical('c')
        try: 1/0
        except ZeroDivisionError: logging.exception('oops')
        """,
    ),
    _program("logging_last_resort", "import logging\nlogging.getLogger('x').warning('plain')"),
    _program(
        "argparse_error",
        """
        import argparse
        p = argparse.ArgumentParser()
        p.add_argument('n', type=int)
        p.parse_args()
        """,
        argv=("x",),
    ),
    _program(
        "argparse_help",
        """
        import argparse
        p = argparse.ArgumentParser(description='d')
        p.add_argument('n', type=int, help='number')
        p.parse_args()
        """,
        argv=("-h",),
    ),
    # -- threads
    _program(
        "threads",
        """
        import threading
        out = []
        ts = [threading.Thread(target=out.append, args=(i,)) for i in range(5)]
        [t.start() for t in ts]; [t.join() for t in ts]
        print(sorted(out), threading.current_thread().name, ts[0].name, threading.main_thread() is threading.current_thread(), threading.active_count(), threading.enumerate() == [threading.main_thread()])
        """,
    ),
    _program(
        "thread_outlives_main",
        """
        import threading, time
        def f():
            time.sleep(.05); print('late')
        threading.Thread(target=f).start()
        print('main done')
        """,
    ),
    _program(
        "daemon_thread",
        """
        import threading, time
        def f():
            time.sleep(30); print('never')
        threading.Thread(target=f, daemon=True).start()
        print('main done')
        """,
    ),
    _program(
        "busy_daemon",
        """
        import threading
        def f():
            while True: pass
        threading.Thread(target=f, daemon=True).start()
        print('main done')
        """,
    ),
    _program(
        "thread_exception",
        """
        import threading
        def f(): raise ValueError('in thread')
        t = threading.Thread(target=f); t.start(); t.join(); print('on')
        """,
    ),
    _program(
        "thread_exit",
        """
        import threading, sys
        t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); print('on')
        """,
    ),
    _program(
        "thread_after_error",
        """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()
        1/0
        """,
    ),
    _program(
        "thread_pool",
        """
        from concurrent.futures import ThreadPoolExecutor
        import threading
        with ThreadPoolExecutor(3) as p: print(list(p.map(lambda x: x * x, range(5))))
        p = ThreadPoolExecutor(1); f = p.submit(lambda: threading.current_thread().name); print(f.result())
        """,
    ),
    _program(
        "thread_local",
        """
        import threading
        l = threading.local(); l.x = 1
        t = threading.Thread(target=lambda: print(hasattr(l, 'x'))); t.start(); t.join(); print(l.x)
        """,
    ),
    _program(
        "interrupt_main",
        """
        import _thread, threading, time
        threading.Timer(.05, _thread.interrupt_main).start()
        try:
            time.sleep(1)
        except KeyboardInterrupt: print('interrupted')
        """,
    ),
    _program(
        "timer_and_queue",
        """
        import threading, queue
        q = queue.Queue(); threading.Timer(.01, q.put, ['x']).start(); print(q.get(timeout=5))
        """,
    ),
    # -- processes
    _program(
        "subprocess",
        """
        import subprocess, sys
        print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv, sys.flags.isolated)', 'a'], capture_output=True, text=True))
        print(subprocess.call('exit 3', shell=True))
        subprocess.run(['false'], check=True)
        """,
    ),
    _program(
        "subprocess_pipe",
        """
        import subprocess
        p = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE); print(p.communicate(b'through'), p.returncode)
        try: subprocess.run(['sleep', '5'], timeout=.05)
        except subprocess.TimeoutExpired as e: print(e.cmd)
        subprocess.Popen(['no-such-program'])
        """,
    ),
    _program("os_system", "import os; print(os.system('exit 2') >> 8, os.popen('echo hi').read())"),
    _program(
        "fork",
        """
        import os, atexit
        atexit.register(print, 'bye')
        pid = os.fork()
        if pid:
            _, s = os.waitpid(pid, 0); print('parent', s)
        else:
            print('child')
        """,
    ),
    _program(
        "fork_child_raises",
        """
        import os
        pid = os.fork()
        if pid:
            print(os.waitpid(pid, 0)[1] >> 8)
        else:
            def f(): 1/0
            f()
        """,
    ),
    _program(
        "fork_child_exits",
        """
        import os, sys
        pid = os.fork()
        if pid == 0: sys.exit(7)
        print(os.waitpid(pid, 0)[1] >> 8)
        """,
    ),
    _program(
        "fork_in_thread",
        """
        import os, threading, warnings
        warnings.simplefilter('ignore')
        def f():
            pid = os.fork()
            if pid == 0: print(threading.current_thread() is threading.main_thread(), flush=True); os._exit(0)
            os.waitpid(pid, 0)
        t = threading.Thread(target=f); t.start(); t.join()
        """,
    ),
    _program(
        "exec",
        """
        import os, sys
        print('before', flush=True)
        os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])
        """,
    ),
    *[
        _program(
            "multiprocessing_" + method,
            f"""
            import multiprocessing as mp, os
            def square(x):
                return x * x
            def child(q):
                q.put((__name__ in ('__main__', '__mp_main__'), mp.current_process().name))
            def fails():
                raise ValueError('in child')
            if __name__ == '__main__':
                print(mp.get_start_method(allow_none=True), mp.current_process())
                mp.set_start_method('{method}')
                q = mp.Queue()
                p = mp.Process(target=child, args=(q,)); p.start(); print(q.get(timeout=60)); p.join()
                print(p.exitcode, p.name)
                with mp.Pool(2) as pool:
                    print(pool.map(square, range(6)))
                p = mp.Process(target=os._exit, args=(3,)); p.start(); p.join(); print(p.exitcode)
            """,
        )
        for method in ("fork", "spawn", "forkserver")
    ],
    _program(
        "multiprocessing_raises",
        """
        import multiprocessing as mp
        def f(): raise ValueError('in child')
        if __name__ == '__main__':
            p = mp.get_context('fork').Process(target=f); p.start(); p.join(); print(p.exitcode)
        """,
    ),
    _program(
        "multiprocessing_manager",
        """
        import multiprocessing as mp
        def f(d): d['x'] = 1
        if __name__ == '__main__':
            with mp.Manager() as m:
                d = m.dict(); p = mp.Process(target=f, args=(d,)); p.start(); p.join(); print(dict(d))
        """,
    ),
    _program(
        "process_pool",
        """
        from concurrent.futures import ProcessPoolExecutor
        def f(x): return x + 1
        if __name__ == '__main__':
            with ProcessPoolExecutor(2) as p: print(list(p.map(f, range(4))))
        """,
    ),
    _program(
        "shared_memory",
        """
        from multiprocessing import shared_memory
        s = shared_memory.SharedMemory(create=True, size=16); s.buf[0] = 7; print(s.buf[0]); s.close(); s.unlink()
        """,
    ),
    # -- asyncio and signals
    _program(
        "asyncio",
        """
        import asyncio
        async def f(x):
            await asyncio.sleep(0); return x * 2
        async def main(): print(await asyncio.gather(*map(f, range(4))))
        asyncio.run(main())
        """,
    ),
    _program(
        "asyncio_subprocess",
        """
        import asyncio
        async def main():
            p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)
            print(await p.communicate(), p.returncode)
        asyncio.run(main())
        """,
    ),
    _program(
        "asyncio_raises",
        """
        import asyncio
        async def f(): raise KeyError('async')
        asyncio.run(f())
        """,
    ),
    _program(
        "asyncio_signal",
        """
        import asyncio, os, signal
        async def main():
            e = asyncio.Event(); asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, e.set); os.kill(os.getpid(), signal.SIGUSR1); await e.wait(); print('got it')
        asyncio.run(main())
        """,
    ),
    _program(
        "never_awaited",
        """
        async def f(): pass
        f()
        print('x')
        """,
    ),
    _program(
        "pending_task",
        """
        import asyncio
        async def g():
            try: await asyncio.sleep(60)
            finally: print('cancelled')
        async def main(): asyncio.ensure_future(g()); await asyncio.sleep(0)
        asyncio.run(main())
        """,
    ),
    _program(
        "asyncio_thread",
        """
        import asyncio
        async def main(): print(await asyncio.get_running_loop().run_in_executor(None, sum, [1, 2]))
        asyncio.run(main())
        """,
    ),
    _program(
        "signals",
        """
        import signal
        for s in sorted(signal.valid_signals()):
            if signal.getsignal(s) is not signal.SIG_DFL: print(s, signal.getsignal(s))
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1))
        """,
    ),
    _program(
        "signal_handler",
        """
        import os, signal
        def h(n, f): print('signal', n, f.f_code.co_name)
        signal.signal(signal.SIGUSR1, h); os.kill(os.getpid(), signal.SIGUSR1); print('after')
        """,
    ),
    _program(
        "signal_handler_raises",
        """
        import os, signal
        def h(n, f): raise TimeoutError('too slow')
        signal.signal(signal.SIGALRM, h); signal.setitimer(signal.ITIMER_REAL, .05)
        while True: pass
        """,
    ),
    _program(
        "interrupt_while_joining",
        """
        import threading, time, os, signal
        t = threading.Thread(target=time.sleep, args=(.4,)); t.start()
        threading.Timer(.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        print('end')
        """,
    ),
    # -- other libraries with state
    _program(
        "random",
        """
        import random, tempfile, uuid
        random.seed(5); print(random.random(), random.randint(1, 100)); print(len(uuid.uuid4().hex))
        """,
    ),
    _program("decimal", "import decimal; print(decimal.getcontext(), decimal.Decimal(1) / 3)"),
    _program(
        "contextvars",
        """
        import contextvars
        print(len(contextvars.copy_context()))
        v = contextvars.ContextVar('v', default=1); v.set(2); print(v.get())
        """,
    ),
    _program(
        "ctypes_callback",
        """
        import ctypes, sys
        C = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
        def cmp(a, b): return a[0] - b[0]
        a = (ctypes.c_int * 4)(3, 1, 2, 0); ctypes.CDLL(None).qsort(a, 4, 4, C(cmp)); print(list(a))
        print(ctypes.PYFUNCTYPE(ctypes.c_int)(lambda: 5)())
        ctypes.CFUNCTYPE(None)(lambda: 1/0)()
        """,
    ),
    _program(
        "sqlite",
        """
        import sqlite3
        c = sqlite3.connect(':memory:'); print(c.execute('select 1 + 1').fetchone()); c.execute('nope')
        """,
    ),
    _program(
        "unraisable_hook",
        """
        import sys
        sys.unraisablehook = lambda a: print('unraisable', a.exc_value)
        class N:
            def __del__(self): 1/0
        N()
        sys.exit(3)
        """,
    ),
    _program(
        "tracemalloc",
        """
        import tracemalloc; tracemalloc.start(); x = [0] * 1000; print(tracemalloc.get_traced_memory()[0] > 0)
        """,
    ),
    _program(
        "gc_debug",
        """
        import gc, weakref
        class C: pass
        c = C(); c.c = c; r = weakref.ref(c); del c; gc.collect(); print(r(), gc.garbage)
        """,
    ),
    _program(
        "socket_pair",
        """
        import socket, selectors
        a, b = socket.socketpair(); s = selectors.DefaultSelector(); s.register(b, selectors.EVENT_READ); a.send(b'x'); print(len(s.select(5)), b.recv(1))
        """,
    ),
    _program(
        "open_descriptors",
        """
        import os
        print([fd for fd in range(64) if not os.system(f'test -e /proc/{os.getpid()}/fd/{fd}')])
        """,
    ),
    # -- the end, with something of the program's still to be called
    _program("excepthook_is_none", "import sys; sys.excepthook = None\n1/0"),
    _program(
        "excepthook_sees_no_stack",
        """
        import inspect, sys, traceback
        def hook(*args):
            traceback.print_stack()
            print(len(inspect.stack()), sys._getframe().f_back, sys.exc_info())
            sys.__excepthook__(*args)
        sys.excepthook = hook
        1/0
        """,
    ),
    _program(
        "exit_code_cannot_be_read",
        """
        class E(SystemExit):
            @property
            def code(self): raise RuntimeError('code')
        raise E(3)
        """,
    ),
    _program("exit_text_stderr_closed", "import sys; sys.stderr.close(); sys.exit('text')"),
    _program("exit_text_stderr_none", "import sys; sys.stderr = None; sys.exit('text')"),
    _program("exit_text_descriptor_closed", "import os, sys; os.close(2); sys.exit('text')"),
    _program("error_descriptor_closed", "import os; os.close(2); print('x'); 1/0"),
    _program(
        "exit_text_own_stderr",
        """
        import logging, sys  # which flushes it, too
        class Stream:
            def write(self, text): print('write', repr(text))
            def flush(self): print('flush')
        sys.stderr = Stream()
        sys.exit('text')
        """,
    ),
    _program(
        "own_stdout_cannot_be_flushed",
        """
        import sys
        class Stream:
            def write(self, text): pass
            def flush(self): raise ValueError('no')
        sys.stdout = Stream()
        """,
    ),
    _program("stdout_deleted", "import sys; print('x'); del sys.stdout; 1/0"),
    _program(
        "file_name_after_exit",
        """
        import atexit, sys
        atexit.register(lambda: print('__file__' in globals()))
        sys.exit(3)
        """,
    ),
    _program(
        "coroutine_left",
        """
        async def f(): pass
        left = f()
        print('end')
        """,
    ),
    _program(
        "resources_left",
        """
        import socket, warnings
        warnings.simplefilter('always')
        file, one = open('/dev/null'), socket.socket()
        print('end')
        """,
    ),
    _program(
        "open_in_del",
        """
        class A:
            def __del__(self):
                try: open('/dev/null')
                except NameError as e: print(e)
        a = A()
        """,
    ),
    _program(
        "kept_in_builtins",
        """
        import builtins
        class A:
            def __del__(self): print('del')
        builtins.kept = A()
        print('end')
        """,
    ),
    *[
        _program(
            "file_kept_in_" + module,
            f"""
            import {module}, os
            if os.fork() == 0:
                {module}.kept = open('kept', 'w')
                {module}.kept.write('data')
                raise SystemExit
            os.wait()
            print(repr(open('kept').read()))
            """,
        )
        for module in ("builtins", "sys", "os")
    ],
    _program(
        "trace_left",
        r"""
        import atexit, sys
        def trace(frame, event, arg):
            if '/lib/python' not in frame.f_code.co_filename:
                sys.__stderr__.write('%s %s\n' % (event, frame.f_code.co_name))
            return trace
        @atexit.register
        def bye(): print('bye')
        sys.settrace(trace)
        """,
    ),
    _program(
        "profile_left",
        r"""
        import atexit, sys
        def profile(frame, event, arg):
            if '/lib/python' not in frame.f_code.co_filename:
                sys.__stderr__.write('%s %s\n' % (event, frame.f_code.co_name))
        @atexit.register
        def bye(): return 1
        sys.setprofile(profile)
        """,
    ),
    *[
        _program(
            f"{kind}_set_late_by_{what}",
            rf"""
            import atexit, sys
            def watch(frame, event, arg):
                if '/lib/python' not in frame.f_code.co_filename:
                    sys.__stderr__.write('%s %s\n' % (event, frame.f_code.co_name))
                return watch
            class Late:
                set = sys.set{kind}
                watch = staticmethod(watch)
                def __del__(self): self.set(self.watch)
            class Last:
                write = sys.__stderr__.write
                def __del__(self): self.write('last\n')
            {set_up}
            """,
            needs=(3, 9),
        )
        for kind in ("trace", "profile")
        for what, set_up in (
            ("callback", f"atexit.register(sys.set{kind}, watch)"),
            ("hook", f"sys.excepthook = lambda *_: sys.set{kind}(watch); 1 / 0"),
            ("finalizer", "late = Late(); last = Last()"),
        )
    ],
    *[
        _program(f"without_{name}", f"import sys\ndel sys.{name}\nprint(1)")
        for name in ("gettrace", "settrace", "getprofile", "setprofile")
    ],
    _program(
        "tracers_replaced",
        """
        import sys
        def say(*_): print('asked')
        sys.gettrace = sys.settrace = sys.getprofile = sys.setprofile = say
        """,
    ),
    _program(
        "c_profile_left",
        """
        import cProfile
        profile = cProfile.Profile()
        profile.enable()
        print(sum(range(10)))
        """,
    ),
    _program(
        "false_trace_left",
        r"""
        import sys
        class Trace:
            def __bool__(self): return False
            def __call__(self, frame, event, arg):
                if '/lib/python' not in frame.f_code.co_filename:
                    sys.__stderr__.write('%s %s\n' % (event, frame.f_code.co_name))
                return self
        sys.settrace(Trace())
        """,
    ),
    _program(
        "gc_callbacks_left",
        "import gc; gc.callbacks.append(lambda phase, info: print(phase)); print('end')",
    ),
    _program(
        "builtins_replaced",
        """
        import builtins
        builtins.vars = None
        class A:
            def __del__(self): print('del')
        a = A()
        1/0
        """,
    ),
    _program(
        "functions_replaced",
        """
        import gc, os, weakref
        os._exit = os.write = os.kill = os.getpid = gc.collect = gc.isenabled = weakref.ref = None
        class A:
            def __del__(self): print('del')
        a = A()
        raise KeyboardInterrupt
        """,
    ),
    _program(
        "callback_of_exec",
        """
        import ctypes
        ctypes.PYFUNCTYPE(None, ctypes.py_object)(exec)('1/0')
        print('on')
        """,
    ),
    # -- what an interpreter that starts would have found
    _program(
        "shadows_what_is_imported",
        """
        import json, string
        print(json.__doc__, string.__doc__)
        """,
        files={"json.py": b"'''mine'''\n", "string/__init__.py": b"'''mine, too'''\n"},
    ),
    _program(
        "shadows_from_python_path",
        "import typing; print(typing.__doc__)",
        files={"lib/typing.py": b"'''mine'''\n"},
        env={"PYTHONPATH": "lib"},
    ),
    _program(
        "folders_and_files_that_shadow_nothing",
        "import json, string; print(json.__name__, string.digits)",
        files={"json/data.json": b"{}", "string.txt": b"text"},
    ),
    _program("breakpoint_off", "breakpoint(); print('on')", env={"PYTHONBREAKPOINT": "0"}),
    _program(
        "breakpoint_chosen",
        "import os; os.environ['PYTHONBREAKPOINT'] = 'builtins.print'; breakpoint(1, 2)",
    ),
    Program("not_utf8_in_a_comment", b"# caf\xe9\nprint('never')\n"),
    _program(
        "user_site",
        "import site; print(site.USER_BASE, site.USER_SITE)",
        env={"HOME": "/some/where"},
    ),
    _program(
        "no_guest_folders",
        "import sys; print([p for p in sys.path_importer_cache if 'paracle_sandbox' in p])",
    ),
    # -- left to a new interpreter
    _program("hash_seed", "print(hash('abc'))", env={"PYTHONHASHSEED": "0"}),
    _program("optimize", "assert False\nprint(__debug__)", env={"PYTHONOPTIMIZE": "1"}),
    _program(
        "dev_mode",
        """
        import sys; print(sys.flags.dev_mode); open('/dev/null')
        """,
        env={"PYTHONDEVMODE": "1"},
    ),
    _program(
        "dont_write_bytecode",
        """
        import sys, os, sibling; print(sys.dont_write_bytecode, sys.flags.dont_write_bytecode, os.path.exists('__pycache__'))
        """,
        files={"sibling.py": b""},
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    ),
    _program(
        "writes_bytecode",
        """
        import os, sibling; print(os.listdir('__pycache__') != [])
        """,
        files={"sibling.py": b""},
        env={"PYTHONDONTWRITEBYTECODE": ""},
    ),
]
