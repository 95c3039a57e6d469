"""The parser of the command line: argparse, and what it lacks.

A command is declared by a function, which is imported when the command is named: what one command
needs costs the others nothing. Options and arguments may stand in any order before ``--``; behind
it nothing is an option. argparse can do neither, so it reads the options alone, and what it leaves
is given to the arguments here.
"""

from __future__ import annotations

import argparse
from argparse import Action, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from .exit_codes import UsageFault

HELP = ("-h", "--help")
HELP_TEXT = "Show this message and exit."

# The values that begin like this, for the shell's TAB key.
Complete = Callable[[str], Sequence[str]]
Check = Callable[[Any], Any]


class Argument:
    """A word that is no option; ``times`` is one of "1", "?" (it may be missing), "*" and "+"."""

    def __init__(
        self,
        name: str,
        metavar: str,
        help: str,
        times: str = "1",
        default: Any = None,
        complete: Complete | None = None,
    ) -> None:
        self.name, self.metavar, self.help = name, metavar, help
        self.times, self.default, self.complete = times, default, complete

    @property
    def usage(self) -> str:
        form = {"1": "{}", "?": "[{}]", "*": "[{}]...", "+": "{}..."}[self.times]
        return form.format(self.metavar)


class Command(argparse.ArgumentParser):
    """One command: its options, its arguments, and in ``action`` what runs it.

    ``keeps_dashes`` is for commands to which it matters what stands behind ``--``: they find it in
    ``after_dashes``."""

    def __init__(self, words: str) -> None:
        super().__init__(
            prog=words, add_help=False, allow_abbrev=False, exit_on_error=False,
            formatter_class=_formatter,
        )  # fmt: skip
        self.text = ""
        self.action: Callable[[Namespace], int] = lambda given: 0
        self.arguments: list[Argument] = []
        # The options under each heading, as --help shows them.
        self.sections: dict[str, list[Action]] = {}
        self.keeps_dashes = False
        self._heading = "Options"
        self._by_flag: dict[str, Action] = {}
        self._completed: dict[str, Complete] = {}
        self._required: list[Action] = []

    # Declaring

    def start_section(self, heading: str) -> None:
        """Put the options that follow under this heading of ``--help``."""
        self._heading = heading

    def argument(self, name: str, metavar: str, help: str, times: str = "1", **rest: Any) -> None:
        self.arguments.append(Argument(name, metavar, help, times, **rest))

    def switch(self, *flags: str, help: str, **rest: Any) -> None:
        """Declare an option without a value, which is off if it is not given."""
        self._register(self.add_argument(*flags, action="store_true", help=help, **rest))

    def on_off(self, flag: str, *, help: str, default: bool) -> None:
        """Declare ``--this`` and ``--no-this``."""
        action = self.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        action.help = f"{help} [default: {'on' if default else 'off'}]"
        self._register(action)

    def option(
        self,
        *flags: str,
        metavar: str,
        help: str,
        default: Any = None,
        check: Check | None = None,
        choices: Sequence[str] = (),
        complete: Complete | None = None,
        is_list: bool = False,
        is_required: bool = False,
        **rest: Any,
    ) -> None:
        """Declare an option with a value. ``check`` answers the value as it is kept, or raises
        ValueError with a text that says what the value must be."""
        if default not in (None, ""):
            help = f"{help} [default: {default}]"
        action = self.add_argument(
            *flags, metavar=metavar, help=help, default=default,
            type=str if check is None else _converter(check),
            action="append" if is_list else "store", **rest,
        )  # fmt: skip
        self._register(action)
        if choices:
            complete = _beginning_of(choices)
        if complete is not None:
            self._completed.update(dict.fromkeys(flags, complete))
        if is_required:
            self._required.append(action)

    def _register(self, action: Action) -> None:
        self.sections.setdefault(self._heading, []).append(action)
        self._by_flag.update(dict.fromkeys(action.option_strings, action))

    @property
    def flags(self) -> list[str]:
        """Every option, as it is typed."""
        return [*self._by_flag, *HELP]

    # Reading

    def read(self, words: Sequence[str]) -> Namespace:
        """The values by name; ``help`` says that only help is wanted. Raises UsageFault."""
        before, after = split_at_dashes(words)
        joined = list(self._join_values(before))
        if any(word in HELP for word in joined):
            return Namespace(help=True)
        try:
            given, rest = self.parse_known_args(joined)
        except argparse.ArgumentError as error:
            self.error(f"{error.argument_name}: {_plain(error.message)}")
        for word in rest:
            if word[:1] == "-" and word != "-":
                self._refuse_unknown(word)
        given.help = False
        given.after_dashes = after if self.keeps_dashes else None
        if not self.keeps_dashes:
            rest += after or []
        self._give_to_arguments(rest, given)
        for action in self._required:
            if getattr(given, action.dest) is None:
                self.error(f"{action.option_strings[0]} is missing")
        return given

    def _join_values(self, words: Sequence[str]) -> Iterator[str]:
        """Write an option and its value as one word: argparse would take a value that begins with
        a dash for another option."""
        rest = iter(words)
        for word in rest:
            *switches, last = self._split_letters(word)
            yield from switches
            action = self._by_flag.get(last)
            if action is None or action.nargs == 0:
                yield last
                continue
            value = next(rest, None)
            if value is None:
                self.error(f"{last}: its value is missing")
            yield f"{last}={value}"

    def _split_letters(self, word: str) -> list[str]:
        """Write ``-it`` as two words, and ``-cCODE`` with an equals sign."""
        if word in self._by_flag or word[:2] not in self._by_flag:
            return [word]
        found: list[str] = []
        for at, letter in enumerate(word[1:], 2):
            flag = f"-{letter}"
            action = self._by_flag.get(flag)
            if letter == "=":
                self.error(f"{found[-1]}: it takes no value (got {word[at:]!r})")
            if action is None and flag not in HELP:
                self._refuse_unknown(flag)
            if action is not None and action.nargs != 0 and word[at:]:
                return [*found, f"{flag}={word[at:].removeprefix('=')}"]
            found.append(flag)
        return found

    def _give_to_arguments(self, words: list[str], given: Namespace) -> None:
        for argument in self.arguments:
            if argument.times in ("*", "+"):
                setattr(given, argument.name, words)
                if argument.times == "+" and not words:
                    self.error(f"the argument {argument.metavar} is missing")
                words = []
            elif words:
                setattr(given, argument.name, words[0])
                words = words[1:]
            elif argument.times == "?":
                setattr(given, argument.name, argument.default)
            else:
                self.error(f"the argument {argument.metavar} is missing")
        if words:
            self.error(f"there is no argument for {words[0]!r}")

    def _refuse_unknown(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        self.error(f"there is no option {flag}", _did_you_mean(flag, self.flags))

    def error(self, message: str, advice: str = "") -> NoReturn:
        """Raise UsageFault."""
        sentence = f"{message[:1].upper()}{message[1:]}."
        raise UsageFault(f"{sentence}{advice} See: {self.prog} --help")

    # Completing

    def complete_words(self, words: Sequence[str], incomplete: str) -> list[tuple[str, str]]:
        """Find what may stand in place of the incomplete word, each with its meaning."""
        before, after = split_at_dashes(words)
        if after is not None:
            return []
        action = self._by_flag.get(before[-1]) if before else None
        if action is not None and action.nargs != 0:
            return self._values(before[-1], incomplete)
        flag, equals, value = incomplete.partition("=")
        if equals and flag in self._completed:
            return [(f"{flag}={one}", help) for one, help in self._values(flag, value)]
        if incomplete[:1] == "-":
            meanings = {flag: action.help or "" for flag, action in self._by_flag.items()}
            meanings |= dict.fromkeys(HELP, HELP_TEXT)
            return [one for one in meanings.items() if one[0].startswith(incomplete)]
        try:
            argument = self._argument_at(before)
        except UsageFault:
            return []
        if argument is None or argument.complete is None:
            return []
        return [(one, "") for one in argument.complete(incomplete)]

    def _values(self, flag: str, incomplete: str) -> list[tuple[str, str]]:
        complete = self._completed.get(flag)
        return [(one, "") for one in complete(incomplete)] if complete is not None else []

    def _argument_at(self, before: Sequence[str]) -> Argument | None:
        """The argument that the next word would be for."""
        joined = self._join_values(before)
        number = sum(word[:1] != "-" or word == "-" for word in joined)
        for argument in self.arguments:
            if number == 0 or argument.times in ("*", "+"):
                return argument
            number -= 1
        return None


class Entry:
    """A command of a group: the function that declares it, as "module:function" of this package.

    ``starts_early`` is for one that runs a program in a sandbox, which can be made while the rest
    is imported."""

    def __init__(
        self,
        declared_by: str,
        summary: str,
        heading: str = "Commands",
        *,
        starts_early: bool = False,
    ) -> None:
        self.declared_by, self.summary, self.heading = declared_by, summary, heading
        self.starts_early = starts_early

    def build(self, words: str) -> Command:
        module, _, function = self.declared_by.partition(":")
        command = Command(words)
        getattr(import_module(f".{module}", __package__), function)(command)
        return command


class Group:
    """Commands under a common word; ``declare`` is for options of the group itself."""

    def __init__(
        self,
        summary: str,
        commands: Mapping[str, Entry | Group],
        heading: str = "Commands",
        *,
        text: str = "",
        declare: Callable[[Command], None] | None = None,
    ) -> None:
        self.summary, self.commands, self.heading = summary, commands, heading
        self.text, self.declare = text, declare

    def build(self, words: str) -> Command:
        """The parser of what may stand in place of a command."""
        command = Command(words)
        command.text = self.text or self.summary
        if self.declare is not None:
            self.declare(command)
        return command


def find(root: Group, words: Sequence[str]) -> tuple[str, Entry | Group, list[str]]:
    """Follow the words that name a command. Answers them, what they name, and the other words.
    Raises UsageFault when there is no such command."""
    name, node, rest = "paracle", root, list(words)
    while rest and rest[0][:1] != "-":
        word = rest.pop(0)
        if word not in node.commands:
            near = _did_you_mean(word, [*node.commands])
            raise UsageFault(f"There is no command {name} {word}.{near} See: {name} --help")
        name = f"{name} {word}"
        found = node.commands[word]
        if isinstance(found, Entry):
            return name, found, rest
        node = found
    return name, node, rest


def walk(node: Group, words: str = "paracle") -> Iterator[tuple[str, Command]]:
    """Every command of the tree, built."""
    yield words, node.build(words)
    for name, one in node.commands.items():
        if isinstance(one, Group):
            yield from walk(one, f"{words} {name}")
        else:
            yield f"{words} {name}", one.build(f"{words} {name}")


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return what stands before ``--``, and what behind; None without one."""
    words = list(words)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, 2)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Only for argparse's own checks; ``help`` shows the help. With a width it imports less."""
    return argparse.HelpFormatter(prog, width=80)


def _converter(check: Check) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error} (got {text!r})") from None

    return convert


def _plain(message: str) -> str:
    """In our words what argparse says of an option that has a value and takes none."""
    return message.replace("ignored explicit argument", "it takes no value (got", 1) + (
        ")" if message.startswith("ignored") else ""
    )


def _beginning_of(choices: Sequence[str]) -> Complete:
    return lambda incomplete: [one for one in choices if one.startswith(incomplete)]
