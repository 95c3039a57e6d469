"""The text of a cell, made Python: indentation, prompts, !commands and %magic as notebooks know
them. Part of the program of a session, as driver.py.

Text that is Python already is not touched.
"""

import ast
import re
from typing import Callable, Dict, List, Optional

PROMPT = r"(?m)^\s*(?:>>>|\.\.\.|In ?\[\d*\]:|\.\.\.:) ?"
LINE = r"(?m)^([ \t]*)(?:(\w[\w, ]*?) *= *)?(!|%)([^\n]*)$"
CELL = r"(?s)\A\s*%%(\w+)([^\n]*)\n?(.*)\Z"
# What the rewritten text calls; the session puts them there.
TOOL = "__notebook__"


class UsageError(Exception):
    """A %magic that is not to be had here."""


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
        return True
    except (SyntaxError, ValueError):
        return False


def translated(text: str) -> str:
    """The text as Python, if it can be made so; else the text itself."""
    if text.lstrip().startswith("In ["):  # with its colon it would be Python: an annotation
        text = without_prompts(text)
    if is_python(text):
        return text
    for change in (without_indent, without_prompts, with_magic):
        made = change(text)
        if is_python(made):
            return made
    together = with_magic(without_prompts(without_indent(text)))
    return together if is_python(together) else text


def without_indent(text: str) -> str:
    """As much as the first line has, from every line that has it."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    return "\n".join(line[len(indent) :] if line.startswith(indent) else line for line in lines)


def without_prompts(text: str) -> str:
    return re.sub(PROMPT, "", text) if re.match(PROMPT, text.lstrip("\n")) else text


def with_magic(text: str) -> str:
    cell = re.match(CELL, text)
    if cell is not None:
        name, words, body = cell.groups()
        if name == "time":
            return "%s.start_clock()\n%s" % (TOOL, with_magic(body))
        return "%s.cell(%r, %r, %r)" % (TOOL, name, words.strip(), body)
    return re.sub(LINE, _line, text)


def _line(found: "re.Match[str]") -> str:
    indent, name, sign, rest = found.groups()
    command = "shell" if name is None else "lines"
    call = "%s.%s(%r)" % (TOOL, command if sign == "!" else "line", rest.strip())
    return indent + call if name is None else "%s%s = %s" % (indent, name, call)


def is_quiet(text: str) -> bool:
    """Whether it ends with a semicolon, comments aside."""
    if ";" not in text:
        return False
    import io
    import tokenize

    passed = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    last = next((token for token in reversed(tokens) if token.type not in passed), None)
    return last is not None and last.string == ";"


class Notebook:
    """What !commands and %magic do. ``run`` runs Python of the session."""

    def __init__(self, run: Callable[[str], None], scope: Dict[str, object]) -> None:
        self._run = run
        self._scope = scope
        self._started = 0.0

    def shell(self, command: str) -> None:
        self._start(command, None)

    def lines(self, command: str) -> List[str]:
        """What a command prints."""
        return self._start(command, -1).decode("utf-8", "replace").splitlines()

    def _start(self, command: str, stdout: Optional[int]) -> bytes:
        import subprocess
        import sys

        sys.stdout.flush()
        done = subprocess.run(self._filled(command), shell=True, stdout=stdout)  # noqa: S602
        self._scope["_exit_code"] = done.returncode
        return done.stdout or b""

    def _filled(self, command: str) -> str:
        """With the values of {names} and $names that there are."""

        def value(found: "re.Match[str]") -> str:
            name = found[1] or found[2]
            return str(self._scope[name]) if name in self._scope else found[0]

        return re.sub(r"\{(\w+)\}|\$(\w+)", value, command)

    def line(self, text: str) -> object:
        import os
        import sys

        name, _, rest = text.partition(" ")
        if name == "pip":
            self.shell("%s -m pip %s" % (sys.executable, rest))
        elif name == "cd":
            os.chdir(os.path.expanduser(rest.strip() or "~"))
            print(os.getcwd())
        elif name == "pwd":
            return os.getcwd()
        elif name == "time":
            self.start_clock()
            self._run(rest)
        elif name not in ("matplotlib", "config", "load_ext", "autoreload", "autosave"):
            # Those have nothing to do here.
            raise UsageError("%%%s is not available here: write it in Python, or use !" % name)
        return None

    def cell(self, name: str, words: str, body: str) -> None:
        if name in ("bash", "sh", "shell"):
            self.shell(body)
        elif name == "writefile":
            with open(words, "w", encoding="utf-8") as file:
                file.write(body)
            print("Writing " + words)
        else:
            raise UsageError("%%%%%s is not available here: write it in Python" % name)

    def start_clock(self) -> None:
        import time

        self._started = time.perf_counter()

    def end_clock(self) -> None:
        import time

        if self._started:
            print("Wall time: %.3g s" % (time.perf_counter() - self._started))
        self._started = 0.0
