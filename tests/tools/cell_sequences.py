"""Cells that a session and IPython must agree on: what they print, show and raise."""

SEQUENCES: dict[str, list[str]] = {
    "last expression": ["1 + 1"],
    "none is not shown": ["None", "print('x')"],
    "variables stay": ["x = 41", "x + 1"],
    "semicolon hides": ["5;", "5"],
    "only the last": ["1\n2\n3"],
    "assignment shows nothing": ["y = 3"],
    "string": ["'a\\'b'"],
    "multi-line string": ["'''a\nb'''"],
    "print and value": ["print('out')\n'value'"],
    "stderr": ["import sys\nprint('oops', file=sys.stderr)\n1"],
    "function": ["def f(n):\n    return n * 2", "f(21)"],
    "class": ["class A:\n    def __repr__(self):\n        return '<A!>'", "A()"],
    "import stays": ["import math", "math.floor(math.pi)"],
    "exception": ["1 / 0", "'still here'"],
    "exception keeps what came before": ["z = 1\nraise ValueError('no')", "z"],
    "syntax error": ["def (", "2"],
    "name error": ["nothing_of_that_name"],
    "await": ["import asyncio\nawait asyncio.sleep(0)\n'waited'"],
    "await value": ["import asyncio\nasync def g():\n    return 7", "await g()"],
    "async for": ["async def h():\n    yield 1\n    yield 2\n[i async for i in h()]"],
    "async with": [
        "from contextlib import asynccontextmanager\n@asynccontextmanager\n"
        "async def c():\n    yield 3",
        "async with c() as v:\n    print(v)",
    ],
    "underscore": ["6 * 7", "_ + 1"],
    "two underscores": ["1", "2", "__"],
    "system exit": ["import sys\nsys.exit(3)", "4"],
    "keyboard interrupt raised": ["raise KeyboardInterrupt", "5"],
    "loop": ["total = 0\nfor i in range(5):\n    total += i\ntotal"],
    "if at the end shows nothing": ["if True:\n    8"],
    "comment after": ["9  # nine"],
    "empty": ["", "10"],
    "blank lines and unicode": ["\n\n'grüße ☃'"],
    "bytes": ["b'\\x00a'"],
    "dict": ["{'b': 1, 'a': [1, 2]}"],
    "nested": ["[(1, 'a'), {2: None}]"],
    "float": ["0.1 + 0.2"],
    "lambda stays": ["double = lambda n: n * 2", "double(4)"],
    "comprehension scope": ["n = 3\n[n for _ in range(2)]"],
    "global": ["def setit():\n    global made\n    made = 'yes'\nsetit()", "made"],
    "walrus": ["(q := 12)", "q"],
    "decorator at the end": ["def d(f): return f", "@d\ndef e(): pass"],
    "main": ["__name__"],
    "shell": ["!echo from the shell"],
    "blank lines kept": ["print()\nprint('a')\nprint()"],
    "semicolon before a comment": ["5;  # hidden", "6  # shown;", "'a;'"],
    "class itself": ["class A: pass\nA", "int", "[int, str]"],
    "function itself": ["def f(a, *, b=1): pass", "f", "len"],
    "long list": ["list(range(100))", "list(range(1500))"],
    "long dict": ["{f'key {i}': 'v' * i for i in range(20)}"],
    "nested and long": ["[{'name': 'x' * 30, 'values': [1, 2, 3], 'more': {'a': 'b' * 40}}] * 3"],
    "sets in order": ["{3, 1, 2}", "frozenset('cab')", "{1, 'a'}", "set()"],
    "collections": [
        "from collections import *",
        "Counter('hello world')",
        "defaultdict(list, {1: [2]})",
        "deque(range(3), maxlen=5)",
        "OrderedDict(a=1)",
        "namedtuple('N', 'a b')(1, 2)",
    ],
    "exception as a value": ["ValueError('no', 2)"],
    "multi-line repr": ["class T:\n    def __repr__(self): return 'a\\nb'", "[T(), T()]"],
    "cycle": ["l = [1]; l.append(l); l"],
    "own pretty": [
        "class R:\n    def _repr_pretty_(self, p, cycle):\n        p.text('R!')",
        "[R()]",
    ],
    "out": ["7", "x = 1", "8", "Out", "_1 + _3", "Out[3]"],
    "in": ["x = 2", "In[1]", "_i", "_i1"],
    "empty cells are not counted": ["", "  \n", "1", "Out"],
    "underscore at the start": ["_"],
    "underscore of one's own": ["for _ in range(3): pass", "5", "_"],
    "indented": ["    a = 1\n    a + 1", "  3"],
    "prompts": [">>> b = 2\n>>> b + 1", "In [1]: 4"],
    "strings that look like commands": [
        "s = '''\n%d items\n!x\nlen?\n'''\n!true",
        "s",
        's = """\n%d "it\'s" \\""" \n!y\n""" # \'\'\'\n!echo "it\'s"\nt = \'\'\'a\n!b\'\'\'',
        "s, t",
    ],
    "brackets and long lines that look like commands": [
        "z = (7\n%4)\ny = z \\\n% 2\n!true",
        "z, y",
    ],
    "command over two lines": ["!echo a \\\n  b\nprint('c')"],
    "expressions in commands": [
        "x, d = 3, {'k': [4.5]}",
        "!echo {x+1} {str(x)!r} {d['k'][0]} {'abc'[1:]} {len(d)} {{x}} $x $$x",
        "lines = !echo {x * 2}",
        "list(lines)",
    ],
    "names of a function in commands": ["def f(n):\n    !echo {n} {n + 1} $n", "f(5)"],
    "dollars in quotes": ["x = 3", "!echo '$x' \"$x\""],
    "scripts are not filled": ["i = 5", "%%bash\nfor i in 1 2; do echo $i {i}; done"],
    "lines of a command": ["files = !echo one; echo two", "list(files)"],
    "cd": ["import os\nos.chdir('/')", "%pwd"],
    "future": ["from __future__ import annotations", "def g(x: nothing): pass\ng.__annotations__"],
    "task over cells": [
        "import asyncio\nasync def w():\n    await asyncio.sleep(0)\n    return 9",
        "t = asyncio.create_task(w())\nawait asyncio.sleep(0)\nt.done()",
        "await t",
    ],
    "no loop without await": ["import asyncio\nasyncio.get_running_loop()"],
    "dataclass": [
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int",
        "P(1)",
        "[P(2)]",
    ],
    "return outside": ["return 1", "1"],
    "del": ["k = 1", "del k", "k"],
    "star": ["a, *b = range(4)\nb"],
    "ellipsis": ["...", "NotImplemented", "True"],
    "print to both": ["import sys\nprint('o'); print('e', file=sys.stderr)"],
    "nested functions keep scope": [
        "v = 1\ndef outer():\n    return [v for _ in range(2)]",
        "outer()",
    ],
    "generator": ["sum(i for i in range(5))"],
    "exception group": ["raise ExceptionGroup('g', [ValueError(1)])", "1"],
    "assert": ["assert 1 == 2, 'no'"],
    "chained exception": [
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e"
    ],
}

REFERENCE = """
import asyncio, contextlib, io, json, subprocess, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

answers = {}
for name, cells in json.load(sys.stdin).items():
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.user_ns["__name__"] = "__main__"
    shell.showtraceback = lambda *a, **k: None
    shell.showsyntaxerror = lambda *a, **k: None
    shell.showindentationerror = lambda *a, **k: None
    def system(command):
        filled = shell.var_expand(command, depth=1)
        done = subprocess.run(filled, shell=True, stdout=-1, stderr=-2, text=True)
        print(done.stdout, end="")
    shell.system = system
    answers[name] = []
    for cell in cells:
        shown = []
        shell.displayhook.write_format_data = lambda data, md=None: shown.append(data["text/plain"])
        shell.displayhook.write_output_prompt = shell.displayhook.finish_displayhook = lambda: None
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            done = shell.run_cell(cell, store_history=True)
        error = done.error_before_exec or done.error_in_exec
        answers[name].append({
            "stdout": out.getvalue(), "stderr": err.getvalue(),
            "text": shown[-1] if shown else None,
            "error": type(error).__name__ if error else None,
        })
json.dump(answers, sys.__stdout__)
"""
