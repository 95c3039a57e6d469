"""``paracle sandbox execute``: read the order of the user, run it, show what it did."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..backends.native.prestart import end_early, prepare_early
from ..config import InvalidConfigError, OneOf, SandboxConfig
from ..errors import SandboxError
from ..settings import Settings
from . import exit_codes, output
from .exit_codes import UsageFault
from .options import (
    CONFIG_FIELDS,
    add_allow_degraded,
    add_backend,
    add_config_options,
    add_env,
    add_json,
    add_terminal,
    add_verbose,
    check_backend,
    check_terminal,
    complete_template,
    given_limits,
    settings_or_fault,
    waived_layers,
)
from .parser import Command
from .result_file import check_output, save_document

if TYPE_CHECKING:
    from ..results import JobResult
    from . import program
    from .workspace import Workspace

CODE_FILE = "agent_code.py"
_EXIT_CODES = ("documented", "program")
_FLAGS = {
    **{name: flag for flag, name in CONFIG_FIELDS.items()},
    "base_image": "--template",
    "env_vars": "--env",
}

# The files that a folder is started with: Python's own choice first, then people's.
_STARTS = ("__main__.py", "main.py")


@dataclass(frozen=True)
class Order:
    """The request of the user, flag by flag; ``limits`` are fields of SandboxConfig. One of
    ``file``, ``code`` and ``command`` says what to run."""

    file: str | None = None
    code: str | None = None
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    env: Sequence[str] = ()
    inputs: str | None = None
    output: str | None = None
    monitor: bool = True
    as_json: bool = False
    raw: bool = False
    verbose: bool = False
    quiet: bool = False
    backend: str | None = None
    files: Sequence[str] = ()
    workspace: str | None = None
    install: Sequence[str] = ()
    save: str | None = None
    apply: bool = False
    diff: bool = False
    tty: bool = False
    own_exit_code: bool = False
    allow_degraded: Sequence[str] = ()

    @property
    def shows_summary(self) -> bool:
        """Return whether a person looks: a log or a pipe gets only what the program prints."""
        if self.quiet or (self.as_json and not self.verbose):
            return False
        return self.verbose or sys.stderr.isatty()


def declare_execute(command: Command) -> None:
    command.text = """\
        Run a program in a fresh sandbox, and show what it prints as it prints it.

        FILE is a Python program, - to read one from stdin, or a folder: its __main__.py or main.py
        is run, among a copy of everything in it. Without FILE, what follows -- is a command; a
        single word is a line for the shell.

        What is piped or typed into this command reaches the program's stdin. Its stdout and stderr
        come out unchanged; on a terminal, control sequences are shown escaped. A summary follows
        on a terminal, or with --verbose.

        Exit codes:
          0    the program succeeded
          1    the program failed
          2    wrong usage
          3    the sandbox failed, or stopped the program at a limit
          124  the program was stopped at its timeout
          130  Ctrl-C (143 for SIGTERM); nothing is left behind
        With --exit-code program: the program's own, and 125 instead of 3.

        Examples:
          paracle sandbox execute agent.py
          paracle sandbox execute agent.py --cpu 0.5 --memory 256 --timeout 60
          paracle sandbox execute agent.py --inputs data.json --monitor --verbose
          paracle sandbox execute agent.py --output results.json -- --flag value
          paracle sandbox execute -c "print(6 * 7)"
          paracle sandbox execute --file data.csv report.py
          paracle sandbox execute --workspace . --apply -- python3 -m unittest
          paracle sandbox execute -it -- bash
        """
    command.keeps_dashes = True
    command.argument("file", "FILE", "Python program, a folder of one, or - for stdin.", "?")
    command.argument("args", "ARGS", "Arguments of the program; put -- before them.", "*")
    command.start_section("What to run")
    command.option("-c", dest="code", metavar="CODE", help="Run this Python code.")
    command.option("--inputs", metavar="FILE", help="JSON file; becomes inputs.json inside.")
    add_env(command)
    add_terminal(command)
    command.start_section("What goes in and comes out")
    command.option("--workspace", metavar="DIR", help="Copy this folder in and run there.")
    command.option(
        "--file", dest="files", metavar="PATH[:DEST]", is_list=True,
        help="Copy this file in as well; repeatable.",
    )  # fmt: skip
    command.option(
        "--install", metavar="PKG", is_list=True, help="Install this package first; repeatable."
    )
    command.option("--save", metavar="DIR", help="Copy the working directory out, to a new folder.")
    command.switch("--apply", help="Write what changed back into the workspace.")
    command.switch("--diff", help="Show what changed in the workspace, as a patch.")
    command.start_section("The sandbox")
    add_config_options(command, *CONFIG_FIELDS)
    command.option(
        "--template", metavar="NAME", help="default, dev, ml or api.", complete=complete_template
    )
    add_allow_degraded(command)
    add_backend(command)
    command.start_section("What is shown")
    command.on_off("--monitor", help="Sample what it uses while it runs.", default=True)
    command.option("--output", metavar="FILE", help="Save the result as JSON.")
    command.option(
        "--exit-code", metavar="|".join(_EXIT_CODES), choices=_EXIT_CODES, default="documented",
        check=OneOf(*_EXIT_CODES), help="Whose exit code to end with.",
    )  # fmt: skip
    command.switch("--raw", help="Let its control sequences reach this terminal.")
    command.switch("--quiet", "-q", help="Only what the program prints, and errors.")
    add_verbose(command)
    add_json(command)
    command.action = lambda given: execute(_order(given))


def _order(given: Namespace) -> Order:
    """Tell a file with its arguments from the arguments of ``-c`` and from a command."""
    words = [*([] if given.file is None else [given.file]), *given.args]
    after = given.after_dashes or []
    file = words.pop(0) if given.code is None and words else None
    is_command = given.code is None and file is None
    return Order(
        file=file, code=given.code,
        command=after if is_command else (), args=() if is_command else [*words, *after],
        limits=given_limits(given), template=given.template, env=given.env or (),
        inputs=given.inputs, output=given.output, monitor=given.monitor, as_json=given.as_json,
        raw=given.raw, verbose=given.verbose, quiet=given.quiet, backend=given.backend,
        files=given.files or (), workspace=given.workspace, install=given.install or (),
        save=given.save, apply=given.apply, diff=given.diff, tty=given.tty,
        allow_degraded=given.allow_degraded or (), own_exit_code=given.exit_code == "program",
    )  # fmt: skip


def execute(order: Order) -> int:
    try:
        return _checked_execute(order)
    except SandboxError as error:
        if not order.own_exit_code:
            raise
        output.complain(str(error))
        return _code_of_stop(order, error)


def _checked_execute(order: Order) -> int:
    # All mistakes in the order are found before anything is made for it.
    settings = settings_or_fault()
    check_backend(order.backend)
    config = make_config(order, settings)
    _check_what(order)
    workspace = _workspace(order, config)
    job = _program(order, workspace)
    check_output(order.output)
    if order.verbose:
        from . import summary

        summary.show_config(config, _FLAGS)
    # One sandbox needs no stock of children for the next.
    settings = replace(settings, stock=0)
    try:
        if order.backend is None and prepare_early(settings, config):
            _import_asyncio_alone()
        return _execute(order, job, workspace, config, settings)
    finally:
        if workspace is not None:
            workspace.close()
        end_early()


def _import_asyncio_alone() -> None:
    """Import asyncio without TLS, which is a tenth of all imports here: a sandbox of this machine
    has no use for it."""
    if "asyncio" in sys.modules or "ssl" in sys.modules:
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]
    try:
        import asyncio  # noqa: F401
    finally:
        del sys.modules["ssl"]


@dataclass(frozen=True)
class _What:
    """The program, read and checked; ``program.Program`` is more, and takes longer to import."""

    source: bytes | None = None
    path: str | None = None
    code: str | None = None
    command: str | Sequence[str] | None = None
    inputs: bytes | None = None


def _check_what(order: Order) -> None:
    given = [order.file is not None, order.code is not None, bool(order.command)]
    if sum(given) != 1:
        raise UsageFault(
            "Say what to run: a FILE, a folder, - for stdin, -c CODE, or a command after --"
        )
    check_terminal(order.tty)
    if order.tty and order.as_json:
        raise UsageFault("--json and -t: a terminal's output is for eyes; leave one of them out")
    if order.quiet and order.verbose:
        raise UsageFault("--quiet and --verbose: leave one of them out")
    if order.save is not None and not order.save:
        raise UsageFault("--save: name a new directory")


def _workspace(order: Order, config: SandboxConfig) -> Workspace | None:
    """Check what goes in beside the program; None if nothing does."""
    folder = order.workspace
    if folder is None and _is_folder(order.file):
        folder = order.file
    if not (folder or order.files or order.install or order.save or order.apply or order.diff):
        return None
    from .workspace import Wanted, Workspace

    ours = {"inputs.json"} if order.inputs is not None else set()
    if order.file is not None and not _is_folder(order.file):
        ours.add(_name(order))
    return Workspace.checked(
        Wanted(
            folder=folder, files=order.files, install=order.install, save=order.save,
            apply=order.apply, diff=order.diff, quiet=order.quiet, ours=frozenset(ours),
        ),
        config.working_dir,
    )  # fmt: skip


def _is_folder(file: str | None) -> bool:
    return file not in (None, "-") and os.path.isdir(str(file))


def _name(order: Order) -> str:
    """Name the program inside as it is named outside, for its own sys.argv and tracebacks."""
    name = os.path.basename(order.file or "")
    if order.file == "-" or not name.isprintable():
        return CODE_FILE
    return name or CODE_FILE


def _program(order: Order, workspace: Workspace | None) -> _What:
    inputs = _read_inputs(order.inputs)
    if order.command:
        # One word may be a whole line for the shell; several are the program and its arguments.
        command = order.command[0] if len(order.command) == 1 else list(order.command)
        return _What(command=command, inputs=inputs)
    if order.code is not None:
        return _What(code=_text(order.code), inputs=inputs)
    assert order.file is not None
    if _is_folder(order.file):
        return _What(path=_start_of(order.file, workspace), inputs=inputs)
    inside = workspace.find(order.file) if workspace is not None else None
    if inside is not None:
        return _What(path=inside, inputs=inputs)
    source, name = _read_source(order.file), _name(order)
    if (
        workspace is not None
        and workspace.project is not None
        and name in workspace.project.sources
    ):
        raise UsageFault(
            f"{order.file} is not in the workspace, which has another {name}: rename one of them"
        )
    if name == "inputs.json" and inputs is not None:
        raise UsageFault("--inputs becomes inputs.json inside, and so would FILE: rename it")
    return _What(source=source, path=name, inputs=inputs)


def _start_of(folder: str, workspace: Workspace | None) -> str:
    assert workspace is not None
    for start in _STARTS:
        inside = workspace.find(os.path.join(folder, start))
        if inside is not None:
            return inside
    if any(os.path.isfile(os.path.join(folder, start)) for start in _STARTS):
        raise UsageFault(f"{folder} is not in the workspace; leave --workspace out, or name it")
    raise UsageFault(f"{folder} is a folder with neither {' nor '.join(_STARTS)}: name the file")


def _text(code: str) -> str:
    try:
        code.encode()
    except UnicodeEncodeError:
        raise UsageFault("-c: the code is not valid text") from None
    return code


def _execute(
    order: Order,
    what: _What,
    workspace: Workspace | None,
    config: SandboxConfig,
    settings: Settings,
) -> int:
    """Run the program. The sandbox is being made while this imports what it needs."""
    from . import program, stdio, summary

    job = program.Program(
        source=what.source,
        path=what.path or CODE_FILE,
        code=what.code,
        command=what.command,
        inputs=what.inputs,
        args=tuple(order.args),
        stdin=None if order.file == "-" else stdio.own_stdin(),
        monitor=order.monitor,
    )
    if workspace is not None:
        job = replace(job, before=workspace.bring_in, after=workspace.bring_out)
    outlets = stdio.Outlets(order.raw or order.tty)
    if not order.as_json:
        job = replace(job, on_output=outlets)
    if order.tty:
        job = _with_terminal(job, config)
    try:
        outcome = exit_codes.run(_run(order, job, config, settings))
    except SandboxError as error:  # there was no sandbox: a result all the same
        _save_failure(order, error)
        raise
    problems = [*workspace.problems] if workspace is not None else []
    try:
        _save(order.output, outcome.result)
    except SandboxError as error:
        problems.append(error.message)
    if order.as_json:
        output.say_json(outcome.result)
    if order.shows_summary:
        outlets.end_line()
        summary.show_end(outcome, order.verbose)
    elif outcome.error is not None and not order.as_json:
        outlets.end_line()
        output.complain(str(outcome.error))
    return _code(order, outcome, problems)


def _with_terminal(job: program.Program, config: SandboxConfig) -> program.Program:
    from .environment import terminal_kind
    from .tty import OwnTerminal

    kind = terminal_kind()
    env = {} if kind is None or "TERM" in config.env_vars else {"TERM": kind}
    return replace(job, terminal=OwnTerminal(job.stdin), env=env)


def _code(order: Order, outcome: program.Outcome, problems: Sequence[str]) -> int:
    for problem in problems:
        output.complain(problem)
    if outcome.error is not None:
        return _code_of_stop(order, outcome.error)
    if problems:
        return exit_codes.NOT_THE_PROGRAM if order.own_exit_code else exit_codes.SANDBOX
    if order.own_exit_code and "result" in outcome.result:
        code = outcome.result["result"]["exit_code"]
        return code if code >= 0 else 128 - code
    return exit_codes.SUCCESS if outcome.result["success"] else exit_codes.FAILURE


def _code_of_stop(order: Order, error: SandboxError) -> int:
    code = exit_codes.code_for(error)
    return (
        exit_codes.NOT_THE_PROGRAM if order.own_exit_code and code == exit_codes.SANDBOX else code
    )


async def _run(
    order: Order, job: program.Program, config: SandboxConfig, settings: Settings
) -> program.Outcome:
    from ..backends.registry import open_backend
    from . import program
    from .progress import late_progress

    async with open_backend(order.backend, settings) as backend:
        backend.on_progress = late_progress()
        return await program.run_program(job, config, backend)


# Reading the order


def make_config(order: Order, settings: Settings) -> SandboxConfig:
    """Apply the flags to the settings' defaults. Raises UsageFault that names the flag."""
    backend = order.backend or settings.mode
    if settings.depends_on_backend:
        # Only then: to find out what "auto" stands for, files of this machine have to be read.
        from ..backends.registry import resolve_name

        backend = resolve_name(backend, settings, quiet=True)
    values = settings.default_values(backend)
    values.update({name: value for name, value in order.limits.items() if value is not None})
    values["env_vars"] = assignments(order.env)
    if order.allow_degraded:
        values["allow_degraded"] = waived_layers(order.allow_degraded)
    if order.template is not None:
        values["base_image"] = _image_of(order.template)
    try:
        return SandboxConfig(**values)
    except InvalidConfigError as error:
        settings.default_config(backend)  # it may be the file's fault, and says so then
        first = error.errors()[0]
        flag = _FLAGS.get(str(first["loc"][0]), str(first["loc"][0]))
        shown = "" if flag == "--env" else f" (got {first['input']!r})"
        raise UsageFault(f"{flag}: {first['msg']}{shown}") from None


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """Read the values of ``--env``. Raises UsageFault."""
    return dict(map(_assignment, texts))


def _image_of(template: str) -> str:
    from ..backends.registry import template_names

    names = template_names()
    if template not in names:
        raise UsageFault(f"--template: there is no {template!r}; known are {', '.join(names)}")
    return f"paracle/sandbox:{'latest' if template == 'default' else template}"


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageFault(f"--env: write NAME=VALUE, not {text!r}")
    return name, value


def _read_source(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    return _read(file, "File")


def _read_inputs(file: str | None) -> bytes | None:
    if file is None:
        return None
    try:
        inputs = json.loads(_read(file, "--inputs: file"))
    except (ValueError, RecursionError) as error:
        raise UsageFault(f"--inputs: {file} is not JSON: {error}") from None
    if not isinstance(inputs, dict):
        raise UsageFault(f"--inputs: {file} must hold a JSON object, {{...}}")
    return json.dumps(inputs).encode()


def _read(file: str, what: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except FileNotFoundError:
        raise UsageFault(f"{what} not found: {file}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageFault(f"{what} cannot be read: {file}: {reason}") from None


def _save(file: str | None, result: JobResult) -> None:
    if file is not None:
        save_document(file, result)


def _save_failure(order: Order, error: SandboxError) -> None:
    from ..sandbox.execution import error_result

    result = error_result(error)
    try:
        _save(order.output, result)
    except SandboxError as unsaved:
        output.complain(unsaved.message)
    if order.as_json:
        output.say_json(result)
