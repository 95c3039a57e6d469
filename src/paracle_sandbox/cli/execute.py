"""``paracle sandbox execute``: read what the user gave, run it, show what it did."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..backends.native.prestart import end_early, prepare_early
from ..config import InvalidConfigError, SandboxConfig
from ..errors import SandboxError
from ..settings import Settings
from . import exit_codes, output
from .exit_codes import UsageFault
from .options import check_backend, check_terminal, settings_or_fault, waived_layers

if TYPE_CHECKING:
    from ..results import JobResult, Stats
    from . import program
    from .workspace import Workspace

CODE_FILE = "agent_code.py"
_FLAGS = {
    "cpu_cores": "--cpu", "memory_mb": "--memory", "disk_mb": "--disk",
    "timeout_seconds": "--timeout", "network_mode": "--network", "base_image": "--template",
    "env_vars": "--env",
}  # fmt: skip


# What a folder is started with, as Python itself would, or as people call it.
_STARTS = ("__main__.py", "main.py")


@dataclass(frozen=True)
class Order:
    """What the user asked for, flag by flag; ``limits`` are fields of SandboxConfig. One of
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
        """The summary is for a person: a log or a pipe gets what the program prints, alone."""
        if self.quiet or (self.as_json and not self.verbose):
            return False
        return self.verbose or sys.stderr.isatty()


def execute(order: Order) -> int:
    try:
        return _checked_execute(order)
    except SandboxError as error:
        if not order.own_exit_code:
            raise
        output.complain(str(error))
        return _code_of_stop(order, error)


def _checked_execute(order: Order) -> int:
    # Everything that can be wrong with the order is found before anything is made for it.
    settings = settings_or_fault()
    check_backend(order.backend)
    config = make_config(order, settings)
    _check_what(order)
    workspace = _workspace(order, config)
    job = _program(order, workspace)
    check_output(order.output)
    if order.verbose:
        _show_config(config)
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
    """Without TLS, which it can be without, and which is a tenth of all imports here: a sandbox of
    this machine has no use for it."""
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
    """What goes in beside the program, if anything does."""
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
    """What the program is called inside: as outside, for its own sys.argv and tracebacks."""
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
    """What it imports takes as long as a sandbox does, which is being made meanwhile."""
    from . import program, stdio

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
    outlets = _Outlets(order.raw or order.tty)
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
        _show_end(outcome, order.verbose)
    elif outcome.error is not None and not order.as_json:
        outlets.end_line()
        output.complain(str(outcome.error))
    return _code(order, outcome, problems)


def _with_terminal(job: program.Program, config: SandboxConfig) -> program.Program:
    from .tty import OwnTerminal

    kind = OwnTerminal.kind()
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


class _Outlets:
    """Our stdout and stderr, as the program's."""

    def __init__(self, raw: bool) -> None:
        from . import stdio

        self._outlets = {
            name: stdio.Outlet(stream.fileno(), raw)
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))
        }

    def __call__(self, name: str, data: bytes) -> Awaitable[None] | None:
        return self._outlets[name].write(data)

    def end_line(self) -> None:
        for outlet in self._outlets.values():
            outlet.end_line()


# Reading the order


def make_config(order: Order, settings: Settings) -> SandboxConfig:
    """The settings' defaults, then the flags. Raises UsageFault that names the flag."""
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
    """Of ``--env``. Raises UsageFault."""
    return dict(map(_assignment, texts))


def outlets(raw: bool) -> _Outlets:
    """Our stdout and stderr for what a program prints."""
    return _Outlets(raw)


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


def check_output(file: str | None) -> None:
    """Before the program runs, so that its result is not lost. Until there is one, nothing is left:
    neither a new file, nor a pipe whose reader has been told that this is all."""
    if file is None:
        return
    try:
        is_new = not os.path.lexists(file)
        if is_new or not stat.S_ISFIFO(os.stat(file).st_mode):
            with open(file, "ab"):
                pass
        if is_new:
            os.unlink(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageFault(f"--output: cannot write {file}: {reason}") from None


# Showing the outcome


def _save(file: str | None, result: JobResult) -> None:
    if file is not None:
        save_document(file, result)


def save_document(file: str, document: object) -> None:
    """As JSON, whole or not at all. Raises SandboxError that names the file."""
    try:
        _write_whole(file, output.as_json(document) + "\n")
    except OSError as error:
        raise SandboxError(
            f"--output: {file} cannot be written: {error.strerror or error}. Nothing was saved."
        ) from error


def _write_whole(file: str, text: str) -> None:
    """Replace a file by a new one; a disk that is full leaves the old one, and no half."""
    target = os.path.realpath(file)
    try:
        is_regular = stat.S_ISREG(os.stat(target).st_mode)
    except FileNotFoundError:
        is_regular = True
    if not is_regular:
        with open(target, "w", encoding="utf-8") as opened:
            opened.write(text)
        return
    draft = f"{target}.{os.urandom(6).hex()}"
    try:
        opened = open(draft, "x", encoding="utf-8")  # noqa: SIM115
    except PermissionError:  # of the folder; the file itself may be ours to write
        opened = open(target, "w", encoding="utf-8")  # noqa: SIM115
        draft = target
    try:
        with opened:
            opened.write(text)
        if draft == target:
            return
        if os.path.exists(target):
            os.chmod(draft, os.stat(target).st_mode & 0o777)
        os.replace(draft, target)
    except OSError:
        if draft != target and os.path.lexists(draft):
            os.unlink(draft)
        raise


def _save_failure(order: Order, error: SandboxError) -> None:
    from ..sandbox.execution import error_result

    result = error_result(error)
    try:
        _save(order.output, result)
    except SandboxError as unsaved:
        output.complain(unsaved.message)
    if order.as_json:
        output.say_json(result)


def _show_config(config: SandboxConfig) -> None:
    rows = [(flag, str(getattr(config, name))) for name, flag in _FLAGS.items()]
    # What a variable holds may be a secret; its name is enough.
    rows[-1] = ("--env", ", ".join(config.env_vars))
    output.table("Configuration", ("Flag", "Value"), rows, sys.stderr)


def _show_end(outcome: program.Outcome, verbose: bool) -> None:
    result = outcome.result
    if result["success"]:
        output.note("✅ Execution Successful")
    else:
        output.note("❌ Execution Failed")
        # What the program said itself has been shown already.
        code = result["result"]["exit_code"] if "result" in result else None
        reason = f"exit code {code}" if outcome.error is None else str(outcome.error)
        output.complain(reason)
    if "stats" in result:
        stats = result["stats"]
        if verbose:
            _show_stats(stats, result["sandbox_id"])
        else:
            output.notes([*zip(*_figures(stats), strict=True)])
    missing = result["posture"]["missing"] if "posture" in result else []
    if missing:
        output.note(f"Without: {', '.join(missing)} (see paracle sandbox health)")


def _figures(stats: Stats) -> list[tuple[str, str]]:
    return [
        ("time", f"{stats['duration_seconds']:.3f} s"),
        ("cpu", f"{stats['cpu_seconds']:.3f} s"),
        ("memory peak", f"{stats['memory_peak_mb']:.1f} of {stats['memory_limit_mb']} MB"),
        ("disk", f"{stats['disk_mb']:.1f} of {stats['disk_limit_mb']} MB"),
    ]


def _show_stats(stats: Stats, sandbox_id: str | None) -> None:
    rows = [("sandbox", str(sandbox_id)), *_figures(stats)]
    received, sent = stats["network_rx_bytes"], stats["network_tx_bytes"]
    unknown = received is None or sent is None
    rows.append(("network", "not known (the host's)" if unknown else f"{received} in, {sent} out"))
    if "monitoring" in stats:
        monitoring = stats["monitoring"]
        for name, seen in (("averages", monitoring["averages"]), ("peaks", monitoring["peaks"])):
            rows.append(
                (name, f"{seen['cpu_percent']:.1f} % CPU, {seen['memory_mb']:.1f} MB memory")
            )
        rows.append(("samples", str(monitoring["history_samples"])))
    output.table("Used", ("", ""), rows, sys.stderr)
