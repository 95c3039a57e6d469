"""PythonSession: an interpreter that remembers, compared with IPython where that has an answer."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cell_sequences import REFERENCE, SEQUENCES

from paracle_sandbox import (
    ResourceLimitError,
    Sandbox,
    SandboxExecutionError,
    SandboxTimeoutError,
)
from paracle_sandbox.sessions import PythonSession

pytestmark = pytest.mark.asyncio(loop_scope="module")


@cache
def reference() -> dict[str, list[dict[str, Any]]]:
    """Return what IPython answers to all sequences, from one run."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFERENCE], input=json.dumps(SEQUENCES),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("name", SEQUENCES)
async def test_cells_as_ipython_runs_them(shared: Sandbox, name: str) -> None:
    if importlib.util.find_spec("IPython") is None:
        pytest.skip("compares with IPython: pip install ipython")
    async with PythonSession(shared) as session:
        for cell, expected in zip(SEQUENCES[name], reference()[name], strict=True):
            result = await session.run(cell)
            error = result["error"]
            assert {
                "stdout": result["stdout"],
                "stderr": result["stderr"],
                "text": result["text"],
                "error": error["name"] if error else None,
            } == expected


async def test_traceback_shows_the_cell_and_nothing_of_ours(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        await session.run("def f():\n    return 1 / 0")
        result = await session.run("f()")
    assert result["error"] is not None
    assert result["error"]["traceback"].splitlines()[:4] == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 1, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
    ]


async def test_input_is_refused_clearly(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        result = await session.run("input('name? ')")
        assert result["error"] is not None and "nobody can answer" in result["error"]["message"]
        assert (await session.run("import sys\nsys.stdin.read()"))["text"] == "''"
        stopped = await session.run("breakpoint()")
        assert stopped["error"] is not None and "nobody can answer" in stopped["error"]["message"]
        left = await session.run("exit()")
        assert left["error"] is not None and left["error"]["name"] == "SystemExit"
        assert "Return the number" in (await session.run("help(len)"))["stdout"]


@pytest.mark.parametrize(
    "value", ["list(range(10**6))", "'a' * 10**7", "{i: [i] * 100 for i in range(5000)}",
              "[[0] * 900 for _ in range(900)]"]
)  # fmt: skip
async def test_huge_repr_is_bounded(shared: Sandbox, value: str) -> None:
    async with PythonSession(shared) as session:
        text = (await session.run(value))["text"]
    assert text is not None and len(text) < 100_000 and "..." in text


@pytest.mark.parametrize(
    "value", ["type('H', (), {'__repr__': lambda self: 'r' * 10**8})()", "bytearray(10**8)",
              "[['x' * 900] * 900] * 900"]
)  # fmt: skip
async def test_huge_text_of_one_value_is_bounded(shared: Sandbox, value: str) -> None:
    async with PythonSession(shared) as session:
        text = (await session.run(value))["text"]
        assert text is not None and len(text) < 100_000
        assert (await session.run("'still here'"))["text"] == "'still here'"


async def test_json_and_html(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        [shown] = (await session.run("{'a': [1, None]}"))["shown"]
        assert json.loads(shown["application/json"]) == {"a": [1, None]}
        await session.run("class T:\n    def _repr_html_(self): return '<b>t</b>'")
        first, second = (await session.run("display(T(), 1)"))["shown"]
        assert first["text/html"] == "<b>t</b>" and second["text/plain"] == "1"


ODD = """
class Odd:
    def __init__(self, broken=()): self.broken = broken
    def __repr__(self):
        if "text" in self.broken: raise ValueError("no text")
        return "<Odd>"
    def _repr_html_(self):
        if "html" in self.broken: raise ValueError("no html")
        return "<b>odd</b>", {"isolated": True}
    def _repr_svg_(self): raise NotImplementedError
    def _repr_latex_(self): return "$x$"
    def _repr_jpeg_(self): return bytes([255, 216, 255, 224])
    def _repr_json_(self): return {"odd": [1]}
class Whole:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "whole", "text/html": "<i>", "image/png": bytes([137]) + b"PNG\\r\\n",
                "application/x": {}, "application/json": {"a": 1}}, {}
    def _repr_html_(self): return "not asked"
class NoNames:
    def __getattr__(self, name): raise RuntimeError(name)
    def __repr__(self): return "no names"
class EveryName:
    def __getattr__(self, name): return lambda **given: name
    def __repr__(self): return "every name"
"""


async def test_values_by_media_type(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        assert (await session.run(ODD))["error"] is None
        [odd] = (await session.run("Odd()"))["shown"]
        assert odd == {"text/plain": "<Odd>", "text/html": "<b>odd</b>", "text/latex": "$x$",
                       "image/jpeg": "/9j/4A==", "application/json": '{"odd": [1]}'}  # fmt: skip
        whole = await session.run("Whole()")
        assert whole["text"] == "whole" and whole["stderr"] == ""
        assert set(whole["shown"][0]) == {
            "text/plain", "text/html", "image/png", "application/json",
        }  # fmt: skip
        assert whole["shown"][0]["text/html"] == "<i>"
        for cell, text in (("NoNames()", "no names"), ("EveryName()", "every name")):
            result = await session.run(cell)
            assert (result["shown"], result["stderr"]) == ([{"text/plain": text}], "")


async def test_what_cannot_be_shown_does_not_fail_the_cell(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        await session.run(ODD)
        result = await session.run("Odd(['html'])")
        assert result["error"] is None and result["text"] == "<Odd>"
        assert "text/html" not in result["shown"][0] and "text/latex" in result["shown"][0]
        assert "ValueError: no html" in result["stderr"] and '"<cell 1>"' in result["stderr"]
        assert "driver" not in result["stderr"] and result["stderr"].count("Traceback") == 1
        result = await session.run("display(Odd(['text']))\nOdd(['text'])")
        assert result["error"] is None and result["text"] is None
        assert "text/html" in result["shown"][0]
        assert result["stderr"].count("ValueError: no text") == 2
        nothing = await session.run("class N:\n    def __repr__(self): 1 / 0\nN()")
        assert nothing["success"] and nothing["shown"] == []
        assert "ZeroDivisionError" in nothing["stderr"]
        assert (await session.run("type(_).__name__"))["text"] == "'N'"
        deep = await session.run("d = []\nfor _ in range(10**5): d = [d]\nd")
        assert deep["error"] is None


async def test_json_is_what_others_read_too(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        for cell in ("[float('nan')]", "{'a': float('inf')}", "{(1, 2): 3}"):
            [shown] = (await session.run(cell))["shown"]
            assert "application/json" not in shown and shown["text/plain"]
        forged = "class J:\n    def _repr_json_(self): return '[NaN]'\nJ()"
        assert "application/json" not in (await session.run(forged))["shown"][0]


async def test_display_takes_what_notebooks_give_it(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        result = await session.run(
            "handle = display(1, display_id=True, metadata={}, clear=True)\n"
            "handle.update(2)\nhandle.display(3)\n"
            "display({'text/html': '<u>', 'other': 4}, raw=True)\n"
            "assert display('x', display_id='mine').display_id == 'mine'"
        )
        assert result["error"] is None, result["error"]
        one, two, three, raw, _ = result["shown"]
        assert [one, two, three] == [{"text/plain": str(n)} for n in (1, 2, 3)]
        assert raw == {"text/html": "<u>"}
        assert (await session.run("display()"))["error"] is None


@pytest.mark.parametrize(
    ("cell", "out"),
    [
        ("%%bash\nfor i in 1 2; do echo $i; done", "1\n2\n"),
        ("%%writefile note.txt\nhello", "Writing note.txt\n"),
        ("%matplotlib inline\nprint('drawn')", "drawn\n"),
        ("print('a')\n!echo b\nprint('c')", "a\nb\nc\n"),
        ("for i in range(2):\n    !echo {i} $i $HOME", "0 0 /tmp\n1 1 /tmp\n"),
    ],
)
async def test_lines_of_notebooks(shared: Sandbox, cell: str, out: str) -> None:
    async with PythonSession(shared) as session:
        result = await session.run(cell)
    assert result["error"] is None, result["error"]
    assert result["stdout"] == out


async def test_braces_that_are_the_shells(shared: Sandbox) -> None:
    """IPython would expand these too, but they are never meant as Python."""
    async with PythonSession(shared) as session:
        for command, out in (
            ("""!echo '{"a":1}' '{"a": {"b": {}}}'""", '{"a":1} {"a": {"b": {}}}\n'),
            ("!echo one two | awk '{print $2}' | awk '{print}'", "two\n"),
            ("!echo {none} {none+1} {} ${HOME} {1..3}", None),
        ):
            result = await session.run(command)
            assert result["error"] is None, result["error"]
            expected = out or "{none} {none+1} {} /tmp {1..3}\n"
            assert result["stdout"].replace("1 2 3", "{1..3}") == expected


async def test_question_marks_show_help(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        await session.run('def twice(n: int) -> int:\n    """Two of it."""\n    return 2 * n')
        for cell in ("twice?", "?twice", "x = 1\ntwice?"):
            said = (await session.run(cell))["stdout"]
            assert "twice(n: int) -> int" in said and "Two of it." in said, cell
            assert "return 2 * n" not in said
        assert "return 2 * n" in (await session.run("twice??"))["stdout"]
        assert "Return the number" in (await session.run("len?"))["stdout"]
        assert "`nothing.there` not found" in (await session.run("nothing.there?"))["stdout"]
        wrong = await session.run("1 +?")
        assert wrong["error"] is not None and wrong["error"]["name"] == "SyntaxError"


async def test_magic_that_is_not_there_is_said(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        for cell in ("%%html\n<b>", "%load_everything"):
            error = (await session.run(cell))["error"]
            assert error is not None and "not available here" in error["message"]
        timed = await session.run("%%time\nx = 41\nx + 1")
        assert timed["text"] == "42" and "Wall time" in timed["stdout"]
        assert "Wall time" in (await session.run("%time x += 1"))["stdout"]
        assert (await session.run("x"))["text"] == "42"


async def test_timeout_interrupts_and_keeps_the_variables(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        with pytest.raises(SandboxTimeoutError, match="still there") as caught:
            await session.run("x = 5\nprint('on', flush=True)\nwhile True: pass", timeout=1)
        assert caught.value.stdout == "on\n"
        assert (await session.run("x"))["text"] == "5"


async def test_timeout_kills_what_does_not_heed(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        await session.run("x = 5")
        with pytest.raises(SandboxTimeoutError, match="are lost"):
            await session.run(
                "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass", timeout=0.5
            )
        result = await session.run("x")
        assert result["error"] is not None and result["error"]["name"] == "NameError"


async def test_interrupt(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        started = asyncio.Event()
        cell = asyncio.create_task(
            session.run(
                "kept = 1\nprint('on', flush=True)\nimport time\ntime.sleep(100)",
                on_stdout=lambda text: started.set(),
            )
        )
        await started.wait()
        await session.interrupt()
        result = await cell
        assert result["error"] is not None and result["error"]["name"] == "KeyboardInterrupt"
        assert (await session.run("kept"))["text"] == "1"
        await session.interrupt()  # nothing runs: no matter
        assert (await session.run("kept"))["text"] == "1"


async def test_cancelled_cell_is_interrupted(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        started = asyncio.Event()
        cell = asyncio.create_task(
            session.run(
                "kept = 2\nprint('on', flush=True)\nwhile True: pass",
                on_stdout=lambda text: started.set(),
            )
        )
        await started.wait()
        cell.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cell
        assert (await session.run("kept"))["text"] == "2"


async def test_output_limit(shared: Sandbox) -> None:
    async with PythonSession(shared, max_output=1000) as session:
        with pytest.raises(ResourceLimitError) as caught:
            await session.run("y = 1\nwhile True: print('a' * 100)")
        assert caught.value.resource_type == "output" and len(caught.value.stdout) <= 1000
        assert (await session.run("y"))["text"] == "1"


async def test_interpreter_that_ends(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        with pytest.raises(SandboxExecutionError, match="exit code 4.*are lost"):
            await session.run("print('last words', flush=True)\nimport os\nos._exit(4)")
        assert (await session.run("'new'"))["text"] == "'new'"


async def test_reset_forgets(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        await session.run("x = 1")
        await session.reset()
        result = await session.run("x")
        assert result["error"] is not None and result["error"]["name"] == "NameError"


async def test_output_of_children_and_closed_stdout(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        result = await session.run(
            "import os\nprint('a')\nos.system('echo b; echo c >&2')\nprint('d')"
        )
        assert result["stdout"] == "a\nb\nd\n" and result["stderr"] == "c\n"
        await session.run("import sys\nsys.stdout.close()\nos.close(1)")
        assert (await session.run("1 + 1"))["text"] == "2"


async def test_cells_wait_for_one_another(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        await session.run("seen = []")
        await asyncio.gather(*(session.run(f"seen.append({i})") for i in range(10)))
        assert (await session.run("seen"))["text"] == str(list(range(10)))


async def test_large_code(shared: Sandbox) -> None:
    async with PythonSession(shared) as session:
        assert (await session.run(f"len('{'x' * 500_000}')"))["text"] == "500000"


PLOTTING = ("numpy", "matplotlib", "PIL", "kiwisolver", "contourpy", "cycler", "pyparsing",
            "packaging", "dateutil", "six", "fontTools", "pandas")  # fmt: skip


def packages_of_the_host() -> list[Path]:
    """Return the packages for figures and tables, with the shared libraries in their wheels."""
    specs = [importlib.util.find_spec(name) for name in PLOTTING]
    missing = [n for n, s in zip(PLOTTING, specs, strict=True) if s is None and n != "six"]
    if missing:
        pytest.skip(f"draws and tabulates: pip install matplotlib pandas ({missing} missing)")
    origins = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    folders = [o.parent if o.name == "__init__.py" else o for o in origins]
    site = folders[0].parent
    return [*folders, site / "mpl_toolkits", *site.glob("*.libs")]


async def test_figures_and_tables(shared: Sandbox) -> None:
    for folder in packages_of_the_host():
        await shared.copy_to(folder, f"/tmp/site/{folder.name}")
    env = {"PYTHONPATH": "/tmp/site", "OPENBLAS_NUM_THREADS": "1"}
    async with PythonSession(shared, env=env) as session:
        drawn = await session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]);\nplt.show()")
        assert drawn["error"] is None, drawn["error"]
        [figure] = drawn["shown"]
        assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
        assert drawn["stderr"] == ""
        [once] = (await session.run("fig, ax = plt.subplots()\nfig"))["shown"]
        assert "image/png" in once
        assert (await session.run("plt.get_fignums()"))["text"] == "[]"
        failed = await session.run("plt.plot([3])\n1 / 0")
        assert failed["error"] is not None and "image/png" in failed["shown"][0]
        await session.run("plt.plot([1]);")
        assert (await session.run("1"))["shown"] == [{"text/plain": "1"}], "shown once"
        [table] = (await session.run("import pandas as pd\npd.DataFrame({'a': [1, 2]})"))["shown"]
        assert "<table" in table["text/html"] and "a" in table["text/plain"]
    await shared.remove("/tmp/site", recursive=True)
