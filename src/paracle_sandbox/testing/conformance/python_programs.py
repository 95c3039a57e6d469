"""Checks of Python code: it behaves as under ``python3 file.py``."""

from __future__ import annotations

import asyncio

from .case import Case
from .expect import contains, equal, expect
from .registry import check


@check(quick=True)
async def hello(case: Case) -> None:
    """Code prints, and that is all that is printed."""
    sandbox = await case.sandbox()
    result = await sandbox.run_code("print('hello')")
    expected = {"exit_code": 0, "stdout": "hello\n", "stderr": "",
                "timed_out": False, "truncated": False}  # fmt: skip
    equal(result, expected)


@check()
async def digits_are_output(case: Case) -> None:
    """print(42) is 42."""
    sandbox = await case.sandbox()
    equal((await sandbox.run_code("print(42)"))["stdout"], "42\n")


@check()
async def it_is_the_main_program(case: Case) -> None:
    """__name__, sys.argv and __file__ are those of a program."""
    sandbox = await case.sandbox()
    code = "import sys, os; print(__name__, sys.argv[1:], sys.argv[0] == __file__)"
    result = await sandbox.run_code(code, ["a b", "--é", ""])
    equal(result["stdout"], "__main__ ['a b', '--é', ''] True\n")


@check()
async def an_exception_is_a_traceback(case: Case) -> None:
    """An exception is exit code 1 and a traceback with the code's own file, line and function."""
    sandbox = await case.sandbox()
    code = "def divide():\n    return 1 / 0\n\ndivide()\n"
    result = await sandbox.run_code(code)
    equal((result["exit_code"], result["stdout"]), (1, ""))
    lines = result["stderr"].splitlines()
    equal(lines[0], "Traceback (most recent call last):")
    contains(lines[1], 'code.py", line 4, in <module>')
    contains(result["stderr"], 'code.py", line 2, in divide')
    equal(lines[-1], "ZeroDivisionError: division by zero")
    expect("paracle_sandbox" not in result["stderr"], f"our own frames show: {lines}")


@check()
async def a_syntax_error_is_told(case: Case) -> None:
    """Code that is no Python is exit code 1 with a SyntaxError and its line."""
    sandbox = await case.sandbox()
    result = await sandbox.run_code("x = 1\nif x\n")
    equal(result["exit_code"], 1)
    contains(result["stderr"], "SyntaxError")
    contains(result["stderr"], "line 2")


@check()
async def exit_codes(case: Case) -> None:
    """sys.exit in each of its forms, os._exit and a signal give their exit codes."""
    sandbox = await case.sandbox()
    forms = {"": 0, "sys.exit()": 0, "sys.exit(3)": 3, "sys.exit(256 + 7)": 7,
             "raise SystemExit(9)": 9, "os._exit(4)": 4,
             "os.kill(os.getpid(), 9)": -9}  # fmt: skip
    for form, code in forms.items():
        result = await sandbox.run_code(f"import os, sys\n{form}\n")
        equal(result["exit_code"], code, form)
    result = await sandbox.run_code("import sys; sys.exit('a reason')")
    equal((result["exit_code"], result["stderr"]), (1, "a reason\n"))


@check()
async def stdin_is_read(case: Case) -> None:
    """input() and sys.stdin read the given stdin; without one they reach its end at once."""
    sandbox = await case.sandbox()
    code = "import sys; print(input().upper()); print(repr(sys.stdin.read()))"
    result = await sandbox.run_code(code, stdin="première\nrest\n")
    equal(result["stdout"], "PREMIÈRE\n'rest\\n'\n")
    equal((await sandbox.run_code("import sys; print(sys.stdin.read() == '')"))["stdout"], "True\n")


@check()
async def it_runs_in_the_working_directory(case: Case) -> None:
    """Files are relative to the working directory, and modules there can be imported."""
    sandbox = await case.sandbox()
    await sandbox.write_file("helper.py", "def word():\n    return 'imported'\n")
    await sandbox.write_file("data.txt", "data")
    code = "import helper\nprint(helper.word(), open('data.txt').read())\n"
    equal((await sandbox.run_code(code))["stdout"], "imported data\n")


@check()
async def files_run_where_they_are(case: Case) -> None:
    """run_file() imports from the file's own directory; a missing file is Python's exit code 2."""
    sandbox = await case.sandbox()
    await sandbox.write_file("app/main.py", "import part\nprint(part.NAME, __file__)\n")
    await sandbox.write_file("app/part.py", "NAME = 'part'\n")
    result = await sandbox.run_file("app/main.py")
    equal((result["exit_code"], result["stderr"]), (0, ""))
    contains(result["stdout"], "part ")
    contains(result["stdout"], "app/main.py")
    result = await sandbox.run_file("app/none.py")
    equal(result["exit_code"], 2)
    contains(result["stderr"], "No such file or directory")


@check()
async def runs_do_not_clash(case: Case) -> None:
    """Runs at the same time each execute their own code."""
    sandbox = await case.sandbox()

    async def one(number: int) -> str:
        code = f"import time\ntime.sleep(0.05)\nprint({number}, __name__)\n"
        return (await sandbox.run_code(code))["stdout"]

    texts = await asyncio.gather(*map(one, range(12)))
    equal(texts, [f"{n} __main__\n" for n in range(12)])


@check()
async def runs_share_nothing_but_files(case: Case) -> None:
    """A variable, module or environment change of one run is unknown to the next."""
    sandbox = await case.sandbox()
    spoil = "import builtins, os, json; builtins.left = 1; os.environ['LEFT'] = '1'; json.left = 1"
    equal((await sandbox.run_code(spoil))["exit_code"], 0)
    look = (
        "import builtins, os, json\n"
        "print(hasattr(builtins, 'left'), 'LEFT' in os.environ, hasattr(json, 'left'))"
    )
    equal((await sandbox.run_code(look))["stdout"], "False False False\n")


@check()
async def fresh_interpreters_have_nothing_in_common(case: Case) -> None:
    """Each program has its own seed of hash() and its own addresses if fresh_interpreter=True."""
    sandbox = await case.sandbox(fresh_interpreter=True)
    code = "print(hash('x'), id(object()))"
    printed = [(await sandbox.run_code(code))["stdout"].split() for _ in range(3)]
    for what, found in zip(("seeds", "addresses"), zip(*printed, strict=True), strict=True):
        equal(len(set(found)), 3, f"different {what} of {found}")


@check()
async def no_script_stays_behind(case: Case) -> None:
    """The working directory holds only what the code wrote."""
    sandbox = await case.sandbox()
    await sandbox.run_code("open('made', 'w').close()")
    equal([entry["name"] for entry in await sandbox.list_files()], ["made"])


@check()
async def very_long_code(case: Case) -> None:
    """Code of half a megabyte, with every kind of character, runs."""
    sandbox = await case.sandbox()
    text = "é\\n'\"EOF$`€😀" * 40_000
    code = f"text = {text!r}\nprint(len(text), hash(text) == hash({text[:14]!r} * 0 + text))\n"
    equal((await sandbox.run_code(code))["stdout"], f"{len(text)} True\n")


@check()
async def processes_and_threads(case: Case) -> None:
    """subprocess, posix_spawn, threads and multiprocessing work as in any program."""
    sandbox = await case.sandbox()
    code = """
import multiprocessing, os, subprocess, sys, threading
def square(n):
    return n * n
if __name__ == "__main__":
    out = subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True)
    print(out.stdout.strip())
    command = ["sh", "-c", "exit 7"]
    child = os.posix_spawnp("sh", command, os.environ, setpgroup=0, resetids=True)
    print(os.waitpid(child, 0)[1] >> 8)
    seen = []
    thread = threading.Thread(target=seen.append, args=(1,))
    thread.start(); thread.join()
    print(seen)
    with multiprocessing.Pool(2) as pool:
        print(pool.map(square, range(4)))
"""
    result = await sandbox.run_code(code)
    equal(result["stdout"], "child\n7\n[1]\n[0, 1, 4, 9]\n", result["stderr"][-300:])


@check()
async def exit_handlers_run(case: Case) -> None:
    """atexit functions run and buffers are flushed at the end."""
    sandbox = await case.sandbox()
    code = "import atexit, sys; atexit.register(print, 'bye'); sys.stdout.write('text ')"
    equal((await sandbox.run_code(code))["stdout"], "text bye\n")
