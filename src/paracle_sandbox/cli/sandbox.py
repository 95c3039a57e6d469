"""``paracle sandbox``: the flags of each command. What they do is in the modules they import."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .endings import ends_with_a_code
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
    as_json: Json = False,
    backend: Backend = None,
) -> int:
    """Run a quick test of a sandbox. Exits with 0 when it passes, else with 1."""
    from .health import test

    return test(backend, cpu, memory, as_json)


@app.command()
@ends_with_a_code
def execute(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Python program, or - to read it from stdin.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments of the program; put -- before them."),
    ] = None,
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Let its control sequences reach this terminal.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
    backend: Backend = None,
) -> int:
    """Run a Python program in a fresh sandbox, and show what it prints as it prints it.

    What is piped into this command reaches the program's stdin. Its stdout and stderr come
    out unchanged; on a terminal, control sequences are shown escaped.

    \b
    Exit codes:
      0    the program succeeded
      1    the program failed
      2    wrong usage
      3    the sandbox failed, or stopped the program at a limit
      124  the program was stopped at its timeout
      130  Ctrl-C (143 for SIGTERM); nothing is left behind

    \b
    Examples:
      paracle sandbox execute agent.py
      paracle sandbox execute agent.py --cpu 0.5 --memory 256 --timeout 60
      paracle sandbox execute agent.py --inputs data.json --monitor --verbose
      paracle sandbox execute agent.py --output results.json -- --flag value
      echo "print(6 * 7)" | paracle sandbox execute -
    """
    from .execute import Order, execute

    limits = {
        "cpu_cores": cpu, "memory_mb": memory, "disk_mb": disk, "timeout_seconds": timeout,
        "network_mode": network.value if network else None,
    }  # fmt: skip
    return execute(
        Order(
            file=file, args=args or (), limits=limits, template=template, env=env or (),
            inputs=inputs, output=output, monitor=monitor, as_json=as_json, raw=raw,
            verbose=verbose, backend=backend,
        )
    )  # fmt: skip


@app.command("list")
@ends_with_a_code
def list_sandboxes(as_json: Json = False, backend: Listed = None) -> int:
    """Show the active sandboxes of every process, with what they use."""
    from .inventory import list_sandboxes

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
    from .inventory import cleanup

    return cleanup(backend, everything, force, as_json)
