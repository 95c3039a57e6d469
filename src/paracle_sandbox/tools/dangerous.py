"""Commands that no task needs: they would wipe a disk, a system or a home, or stop the machine.

The sandbox is what keeps the host safe, and does so without this. This keeps a model from ruining
its own work by one line, and whoever lets it run on the host from the worst. It reads a command as
a shell would, as far as that can be done without one: what is quoted is text, what follows an
operator is another command. Who hides a command from it on purpose will succeed.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise

# From a command to why it may not be run; None lets it run.
CommandPolicy = Callable[[str], str | None]

_MAX_DEPTH = 5
_SYSTEM = frozenset(
    ["", "bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "opt", "proc", "root",
     "run", "sbin", "srv", "sys", "usr", "var"]
)  # fmt: skip
_HOMES = ("~", "$HOME", "${HOME}")
_OPERATORS = "();<>|&\n"
_SHELLS = frozenset(["sh", "bash", "dash", "zsh", "ash", "ksh"])
# They run what follows them.
_WRAPPERS = frozenset(
    ["sudo", "doas", "env", "nice", "nohup", "exec", "time", "command", "builtin", "setsid",
     "timeout", "xargs", "busybox", "then", "do", "else", "if", "while", "until", "!", "{"]
)  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*\n)(?:.*?\n)??[\t ]*\2(?=\n|\Z)", re.DOTALL)
_FORK_BOMB = re.compile(r"([\w:.]+)\s*\(\)\s*\{[^}]*\1\s*\|\s*\1\s*&[^}]*\}")
_DISK = re.compile(r"/dev/(?:sd|hd|vd|xvd|nvme|mmcblk|loop|dm-|md|mapper/|mem\b|kmem\b|port\b)")


def danger(command: str) -> str | None:
    """Why a shell command is refused; None for all others."""
    return _danger(command, _MAX_DEPTH)


def _danger(text: str, depth: int) -> str | None:
    if depth <= 0:
        return None
    if _FORK_BOMB.search(text):
        return "it starts processes without end"
    for argv in _commands(text):
        inner = [part for word in argv for found in _SUBSTITUTION.findall(word) for part in found]
        for part in filter(None, inner):
            if reason := _danger(part, depth - 1):
                return reason
        if reason := _judged(_unwrapped(argv), depth):
            return reason
    return None


def _commands(text: str) -> Iterator[list[str]]:
    """The simple commands in a text, each as its words; a redirection is a word and its target."""
    plain = text if _feeds_a_shell(text) else _HEREDOC.sub(r"\3", text)
    current: list[str] = []
    for word in _words(_COMMENT.sub("", plain)):
        if set(word) <= set(_OPERATORS) and not set(word) & set("<>"):
            if current:
                yield current
            current = []
        else:
            current.append(word)
    if current:
        yield current


def _feeds_a_shell(text: str) -> bool:
    return re.search(rf"(?:^|[\s;|&(/])(?:{'|'.join(_SHELLS)})\s[^\n]*<<", text) is not None


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        return list(lexer)
    except ValueError:  # quotes that do not close: better read roughly than not at all
        return re.findall(r"[;&|\n]+|[^\s;&|]+", text)


def _unwrapped(argv: list[str]) -> list[str]:
    """The command itself, without assignments, sudo and the like."""
    position = 0
    wrapped = False
    while position < len(argv):
        word = argv[position]
        if posixpath.basename(word) in _WRAPPERS:
            wrapped = True
        elif not (_ASSIGNMENT.match(word) or (wrapped and re.match(r"-|\d", word))):
            break
        position += 1
    return argv[position:]


def _judged(argv: list[str], depth: int) -> str | None:
    if not argv:
        return None
    # A program of the project may be called anything.
    name = posixpath.basename(argv[0]) if argv[0].startswith("/") else argv[0]
    words = argv[1:]
    if name in _SHELLS and "-c" in words[:-1]:
        return _danger(words[words.index("-c") + 1], depth - 1)
    if name == "eval":
        return _danger(" ".join(words), depth - 1)
    if _writes_to_a_disk(name, argv):
        return "it writes over a disk"
    if name in ("shutdown", "reboot", "halt", "poweroff") or _ends_the_machine(name, words):
        return "it stops the machine"
    if name == "kill" and "-1" in words[1:]:
        return "it ends every process"
    return _ruins_the_system(name, words)


def _writes_to_a_disk(name: str, argv: list[str]) -> bool:
    if name.startswith("mkfs") or name in ("mke2fs", "mkswap", "wipefs", "fdisk", "sfdisk"):
        return True
    if name in ("dd", "tee", "shred", "cp"):
        return any(_DISK.match(word.removeprefix("of=")) for word in argv[1:])
    written = (b for a, b in pairwise(argv) if a.startswith(">"))
    return any(_DISK.match(word) for word in written)


def _ends_the_machine(name: str, words: list[str]) -> bool:
    if name == "systemctl":
        return any(word in ("poweroff", "reboot", "halt", "kexec") for word in words)
    return name in ("init", "telinit") and words[:1] in (["0"], ["6"])


def _ruins_the_system(name: str, words: list[str]) -> str | None:
    targets = [word for word in words if not word.startswith("-") and _is_system(word)]
    if not targets:
        return None
    deletes = name == "find" and "-delete" in words
    if deletes or (name == "rm" and _is_recursive(words, "rR")):
        return f"it deletes {targets[0]} with everything below it"
    if name in ("chmod", "chown", "chgrp") and _is_recursive(words, "R"):
        return f"it changes everything below {targets[0]}"
    if name == "mv" and targets[0] in words[:-1]:
        return f"it moves {targets[0]} away"
    return None


def _is_recursive(words: list[str], letters: str) -> bool:
    flags = [word for word in words if re.fullmatch(r"-[A-Za-z]+", word)]
    return "--recursive" in words or any(set(flag) & set(letters) for flag in flags)


def _is_system(path: str) -> bool:
    """The root, a directory of the system directly below it, or a home as a whole."""
    bare = path.removesuffix("/*").rstrip("/") if path not in ("/", "/*") else ""
    if bare in _HOMES:
        return True
    if path[:1] != "/":
        return False
    parts = posixpath.normpath("/" + bare.lstrip("/")).strip("/").split("/")
    return len(parts) == 1 and parts[0] in _SYSTEM
