"""``paracle sandbox``: the flags of each command. What they do is in the modules they import."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .exit_codes import ends_with_a_code
from .options import complete_backend, complete_template

app = typer.Typer(
    help="Run code in sandboxes, see them, remove them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Network(StrEnum):
    none = "none"
    bridge = "bridge"
    host = "host"


class ExitCode(StrEnum):
    documented = "documented"
    program = "program"


class AfterDashes(TyperCommand):
    """A command that is told apart what stands before ``--`` and what after: a file with its
    arguments, or a command of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before, after = split_at_dashes(args)
        ctx.meta["after_dashes"] = after
        return super().parse_args(ctx, before)


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    words = list(words)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell more.")]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="auto, native, docker, ... [default: auto]",
        autocompletion=complete_backend,
    ),
]
AllowDegraded = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-degraded", metavar="LAYER", help="Do without this layer; cgroup or firewall."
    ),
]
Listed = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Only this one's. [default: all here]",
        autocompletion=complete_backend,
    ),
]


@app.command()
@ends_with_a_code
def health(verbose: Verbose = False, as_json: Json = False, backend: Backend = None) -> int:
    """Check which sandboxes work on this machine, by using them.

    Exits with 0 when one does, else with 1; says what is missing and what to do about it.
    """
    from .health import health

    return health(backend, verbose, as_json)


@app.command()
@ends_with_a_code
def test(
    cpu: Annotated[float, typer.Option(help="CPU cores.")] = 0.5,
    memory: Annotated[int, typer.Option(help="Memory in MB.")] = 256,
    allow_degraded: AllowDegraded = None,
    as_json: Json = False,
    backend: Backend = None,
) -> int:
    """Run a quick test of a sandbox. Exits with 0 when it passes, else with 1."""
    from .health import test

    return test(backend, cpu, memory, as_json, allow_degraded or ())


@app.command(cls=AfterDashes)
@ends_with_a_code
def execute(
    ctx: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Python program, a folder of one, or - for stdin."),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments of the program; put -- before them."),
    ] = None,
    code: Annotated[
        str | None, typer.Option("-c", metavar="CODE", help="Run this Python code.")
    ] = None,
    workspace: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Copy this folder in and run there."),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--file", metavar="PATH[:DEST]", help="Copy this file in as well; repeatable."
        ),
    ] = None,
    install: Annotated[
        list[str] | None,
        typer.Option(metavar="PKG", help="Install this package first; repeatable."),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Copy the working directory out, to a new folder."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write what changed back into the workspace.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what changed in the workspace, as a patch.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("-i", help="Pass stdin on, which is done anyway; for -it.")
    ] = False,
    tty: Annotated[bool, typer.Option("-t", help="Give the program a terminal.")] = False,
    cpu: Annotated[
        float | None, typer.Option(help="CPU cores (0.1-16.0) [default: 1.0]", show_default=False)
    ] = None,
    memory: Annotated[
        int | None, typer.Option(help="Memory in MB (128-16384) [default: 512]")
    ] = None,
    disk: Annotated[int | None, typer.Option(help="Disk in MB (256-10240) [default: 1024]")] = None,
    timeout: Annotated[
        int | None, typer.Option(help="Timeout in seconds (10-3600) [default: 300]")
    ] = None,
    network: Annotated[Network | None, typer.Option(help="Network mode [default: none]")] = None,
    inputs: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file; becomes inputs.json inside.")
    ] = None,
    monitor: Annotated[
        bool, typer.Option("--monitor/--no-monitor", help="Sample what it uses while it runs.")
    ] = True,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save the result as JSON.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set a variable; repeatable.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="default, dev, ml or api.", autocompletion=complete_template
        ),
    ] = None,
    exit_code: Annotated[
        ExitCode, typer.Option(help="Whose exit code to end with.")
    ] = ExitCode.documented,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let its control sequences reach this terminal.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only what the program prints, and errors.")
    ] = False,
    allow_degraded: AllowDegraded = None,
    verbose: Verbose = False,
    as_json: Json = False,
    backend: Backend = None,
) -> int:
    """Run a program in a fresh sandbox, and show what it prints as it prints it.

    FILE is a Python program, - to read one from stdin, or a folder: its __main__.py or main.py
    is run, among a copy of everything in it. Without FILE, what follows -- is a command; a single
    word is a line for the shell.

    What is piped or typed into this command reaches the program's stdin. Its stdout and stderr
    come out unchanged; on a terminal, control sequences are shown escaped. A summary follows
    on a terminal, or with --verbose.

    \b
    Exit codes:
      0    the program succeeded
      1    the program failed
      2    wrong usage
      3    the sandbox failed, or stopped the program at a limit
      124  the program was stopped at its timeout
      130  Ctrl-C (143 for SIGTERM); nothing is left behind
    With --exit-code program: the program's own, and 125 instead of 3.

    \b
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
    from .execute import Order, execute

    limits = {
        "cpu_cores": cpu, "memory_mb": memory, "disk_mb": disk, "timeout_seconds": timeout,
        "network_mode": network.value if network else None,
    }  # fmt: skip
    words = [*([] if file is None else [file]), *(args or ())]
    after = ctx.meta["after_dashes"]
    if code is None and words:
        file, words = words[0], words[1:]
    return execute(
        Order(
            file=None if code is not None else file, code=code,
            command=(after or ()) if code is None and file is None else (),
            args=[*words, *(after or ())] if code is not None or file is not None else (),
            limits=limits, template=template, env=env or (),
            inputs=inputs, output=output, monitor=monitor, as_json=as_json, raw=raw,
            verbose=verbose, quiet=quiet, backend=backend, files=files or (), workspace=workspace,
            install=install or (), save=save, apply=apply, diff=diff, tty=tty,
            allow_degraded=allow_degraded or (), own_exit_code=exit_code is ExitCode.program,
        )
    )  # fmt: skip


@app.command("list")
@ends_with_a_code
def list_sandboxes(as_json: Json = False, backend: Listed = None) -> int:
    """Show the active sandboxes of every process, with what they use."""
    from .list_cleanup import list_sandboxes

    return list_sandboxes(backend, as_json)


@app.command()
@ends_with_a_code
def cleanup(
    everything: Annotated[bool, typer.Option("--all", help="Also those still in use.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Do not ask.")] = False,
    as_json: Json = False,
    backend: Listed = None,
) -> int:
    """Remove sandboxes that dead processes left behind; with --all, every sandbox.

    \b
    Examples:
      paracle sandbox cleanup
      paracle sandbox cleanup --all --force
    """
    from .list_cleanup import cleanup

    return cleanup(backend, everything, force, as_json)


Sandbox = Annotated[str, typer.Argument(metavar="ID", help="As list shows it, or its beginning.")]


@app.command("exec", cls=AfterDashes)
@ends_with_a_code
def exec_(
    ctx: typer.Context,
    sandbox: Sandbox,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="Put -- before it.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("-i", help="Pass stdin on, which is done anyway; for -it.")
    ] = False,
    tty: Annotated[bool, typer.Option("-t", help="Give the program a terminal.")] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set a variable; repeatable.")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Timeout in seconds (1-3600).")] = 3600,
    backend: Listed = None,
) -> int:
    """Run a command in a sandbox that another process made; those of docker and gvisor.

    Ends with the program's own exit code; 125 when it was not the program that failed.

    \b
    Examples:
      paracle sandbox exec 01hq3 -- ls -l
      paracle sandbox exec 01hq3 -- 'cat *.log | wc -l'
    """
    from .attach import Order, execute

    words = [*(command or ()), *(ctx.meta["after_dashes"] or ())]
    return execute(Order(sandbox, words, env or (), tty, timeout, backend))


@app.command()
@ends_with_a_code
def shell(sandbox: Sandbox, backend: Listed = None) -> int:
    """Open a shell in a sandbox that another process made; those of docker and gvisor."""
    from .attach import shell

    return shell(sandbox, backend)


@app.command()
@ends_with_a_code
def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path here, or ID:PATH.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="ID:PATH, or a path here.")],
    backend: Listed = None,
) -> int:
    """Copy a file or folder into a sandbox or out of it; those of docker and gvisor.

    \b
    Examples:
      paracle sandbox cp 01hq3:report.txt .
      paracle sandbox cp data/ 01hq3:data
    """
    from .attach import copy

    return copy(source, target, backend)


@app.command()
@ends_with_a_code
def logs(sandbox: Sandbox, backend: Listed = None) -> int:
    """Say where the output of a sandbox is: with the process that made it, for none is kept."""
    from .attach import logs

    return logs(sandbox, backend)


@app.command()
@ends_with_a_code
def rm(
    sandboxes: Annotated[
        list[str], typer.Argument(metavar="ID", help="As list shows them, or their beginnings.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Also while it is in use.")] = False,
    as_json: Json = False,
    backend: Listed = None,
) -> int:
    """Remove sandboxes, whoever made them."""
    from .attach import remove

    return remove(sandboxes, backend, force, as_json)
