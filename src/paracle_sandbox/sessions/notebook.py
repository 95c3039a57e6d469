"""Translates the text of a cell to Python: indentation, prompts, !commands, %magic and help?.

Text that is Python already is not changed. This file is a part of the program that driver.py
belongs to.
"""

import ast
import re
import sys
import types
from typing import Callable, Dict, List, Optional

PROMPT = r"(?m)^\s*(?:>>>|\.\.\.|In ?\[\d*\]:|\.\.\.:) ?"
LINE = r"([ \t]*)(?:(\w[\w, ]*?) *= *)?(!|%)((?:\\\n|[^\n])*)"
HELP = r"([ \t]*)(\?{0,2})([^\W\d]\w*(?:\.\w+|\[[^][\n]+\])*)(\?{0,2})[ \t]*(?=\n|\Z)"
# The tokens that decide where a statement ends. A string may be left open.
PART = (
    r"(?s)(\"\"\"|\'\'\')(?:\\.|.)*?(?:\1|\Z)"
    r"|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?|#[^\n]*|\\\n|[][(){}\n]"
)
FIELD = r"\{\{([^{}\n]*)\}\}|\{([^{}\n]*)\}|\$(\$\w+)|\$(\w+)(?=(?:[^']*'[^']*')*[^']*\Z)"
CELL = r"(?s)\A\s*%%(\w+)([^\n]*)\n?(.*)\Z"
# The name under which translated text finds the Notebook; the session defines it.
TOOL = "__notebook__"


class UsageError(Exception):
    """A %magic that does not exist here."""


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
        return True
    except (SyntaxError, ValueError):
        return False


def translate_cell(text: str) -> str:
    """Return the text as Python, or unchanged if that is not possible."""
    if text.lstrip().startswith("In ["):  # with a colon it is valid Python: an annotation
        text = strip_prompts(text)
    if is_python(text):
        return text
    for change in (strip_indent, strip_prompts, translate_magic):
        made = change(text)
        if is_python(made):
            return made
    together = translate_magic(strip_prompts(strip_indent(text)))
    return together if is_python(together) else text


def strip_indent(text: str) -> str:
    """Remove the indentation of the first line from every line that has it."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    return "\n".join(line[len(indent) :] if line.startswith(indent) else line for line in lines)


def strip_prompts(text: str) -> str:
    return re.sub(PROMPT, "", text) if re.match(PROMPT, text.lstrip("\n")) else text


def translate_magic(text: str) -> str:
    cell = re.match(CELL, text)
    if cell is not None:
        name, words, body = cell.groups()
        if name == "time":
            return "%s.start_clock()\n%s" % (TOOL, translate_magic(body))
        return "%s.run_cell_magic(%r, %r, %r)" % (TOOL, name, words.strip(), body)
    return translate_lines(text)


def translate_lines(text: str) -> str:
    """Translate lines that begin a statement. A string may contain lines that look like them."""
    made: List[str] = []
    position = 0
    while position < len(text):
        line = re.compile(LINE).match(text, position)
        help_line = re.compile(HELP).match(text, position)
        if line is not None:
            made.append(_translate_line(line))
            position = line.end()
        elif help_line is not None and (help_line[2] or help_line[4]):
            made.append(
                "%s%s.show_help(%r, %r)" % (help_line[1], TOOL, help_line[3], "??" in help_line[0])
            )
            position = help_line.end()
        else:
            end = find_statement_end(text, position)
            made.append(text[position:end])
            position = end
    return "".join(made)


def find_statement_end(text: str, position: int) -> int:
    """Return the position behind the line feed that ends the statement at ``position``."""
    depth = 0
    for part in re.compile(PART).finditer(text, position):
        if part[0] == "\n" and not depth:
            return part.end()
        if part[0] in "([{":
            depth += 1
        elif part[0] in ")]}":
            depth = max(0, depth - 1)
    return len(text)


def _translate_line(found: "re.Match[str]") -> str:
    indent, name, sign, rest = found.groups()
    command = "run_shell" if name is None else "read_lines"
    whole = rest.replace("\\\n", " ").strip()
    call = "%s.%s(%r)" % (TOOL, command if sign == "!" else "run_line_magic", whole)
    # Line feeds keep the line numbers of the text below.
    call += "\n" * rest.count("\\\n")
    return indent + call if name is None else "%s%s = %s" % (indent, name, call)


def is_quiet(text: str) -> bool:
    """Whether the text ends with a semicolon, apart from comments."""
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


def evaluate_field(field: str, names: Dict[str, object]) -> str:
    """Return the value of an expression in braces as text. Raises if the braces rather belong to
    awk, JSON or the shell: around an unknown name, a literal, or a list with commas."""
    import string

    formatter = string.Formatter()
    [(_, expression, rest, conversion)] = formatter.parse("{%s}" % field)
    if rest:  # it is not a format, but the second half of a slice
        expression = "%s:%s" % (expression, rest)
    tree = ast.parse((expression or "").strip(), mode="eval")
    kind = type(tree.body)
    if kind in (ast.Constant, ast.Tuple) or (kind is ast.Name and expression not in names):
        raise ValueError(field)
    value = eval(compile(tree, "<command>", "eval"), names)  # noqa: S307 - the cell's own text
    return str(formatter.convert_field(value, conversion))


class Notebook:
    """Runs !commands and %magic. ``run`` runs Python in the session."""

    def __init__(self, run: Callable[[str], None], scope: Dict[str, object]) -> None:
        self._run = run
        self._scope = scope
        self._started = 0.0

    def run_shell(self, command: str) -> None:
        """Run a command. Its output is the cell's."""
        self._run_command(self._fill_in(command, sys._getframe(1)), None)

    def read_lines(self, command: str) -> List[str]:
        """Run a command and return the lines that it prints."""
        printed = self._run_command(self._fill_in(command, sys._getframe(1)), -1)
        return printed.decode("utf-8", "replace").splitlines()

    def _run_command(self, command: str, stdout: Optional[int]) -> bytes:
        import subprocess

        sys.stdout.flush()
        done = subprocess.run(command, shell=True, stdout=stdout)  # noqa: S602
        self._scope["_exit_code"] = done.returncode
        return done.stdout or b""

    def _fill_in(self, command: str, caller: types.FrameType) -> str:
        """Fill in the values of {expressions} and $names. {{ }} and $$ stand for { } and $."""
        names = dict(self._scope)
        if caller.f_globals is self._scope:  # a function of a cell
            names.update(caller.f_locals)

        def value(found: "re.Match[str]") -> str:
            escaped, expression, dollars, name = found.groups()
            if escaped is not None:
                return "{%s}" % escaped
            if dollars is not None:
                return dollars
            if name is not None:
                return str(names[name]) if name in names else found[0]
            try:
                return evaluate_field(expression, names)
            except Exception:  # noqa: BLE001 - then the braces are the shell's
                return found[0]

        return re.sub(FIELD, value, command)

    def run_line_magic(self, text: str) -> object:
        """Run one %magic and return its value."""
        import os

        name, _, rest = text.partition(" ")
        if name == "pip":
            self.run_shell("%s -m pip %s" % (sys.executable, rest))
        elif name == "cd":
            os.chdir(os.path.expanduser(rest.strip() or "~"))
            print(os.getcwd())
        elif name == "pwd":
            return os.getcwd()
        elif name == "time":
            self.start_clock()
            self._run(rest)
        elif name not in ("matplotlib", "config", "load_ext", "autoreload", "autosave"):
            # The commands in this list have no effect here.
            raise UsageError("%%%s is not available here: write it in Python, or use !" % name)
        return None

    def run_cell_magic(self, name: str, words: str, body: str) -> None:
        """Run one %%magic with the rest of the cell."""
        if name in ("bash", "sh", "shell"):
            self._run_command(body, None)  # a script has its own names and braces
        elif name == "writefile":
            with open(words, "w", encoding="utf-8") as file:
                file.write(body)
            print("Writing " + words)
        else:
            raise UsageError("%%%%%s is not available here: write it in Python" % name)

    def show_help(self, name: str, with_source: bool) -> None:
        """Print the help of ``name?``, or with its source that of ``name??``."""
        import inspect

        try:
            value = eval(name, self._scope)  # noqa: S307 - a name of the session
        except Exception:  # noqa: BLE001 - its lookup may do anything
            print("Object `%s` not found." % name)
            return
        if callable(value):
            try:
                print("Signature: %s%s" % (name, inspect.signature(value)))
            except (TypeError, ValueError):
                pass  # some built-in functions have none
        print("Type:      %s" % type(value).__name__)
        print("Docstring: %s" % (inspect.getdoc(value) or "<no docstring>"))
        if with_source:
            try:
                print("Source:\n" + inspect.getsource(value))
            except (TypeError, OSError):
                print("Source:    not available")

    def start_clock(self) -> None:
        import time

        self._started = time.perf_counter()

    def end_clock(self) -> None:
        import time

        if self._started:
            print("Wall time: %.3g s" % (time.perf_counter() - self._started))
        self._started = 0.0
