"""The tree of all commands: a row here for each names the function that declares it."""

from __future__ import annotations

from argparse import Namespace

from .. import __version__
from .parser import Command, Entry, Group

_EXAMPLES = """\
Run untrusted code in sandboxes.

Examples:
  paracle sandbox health
  paracle sandbox execute agent.py --memory 256 --timeout 60
  paracle sandbox list
  paracle template build ml
  paracle image build
  paracle serve
"""


def _declare_root(command: Command) -> None:
    command.switch("--version", help="Show the version.")
    command.switch("--install-completion", help="Install completion for the current shell.")
    command.switch(
        "--show-completion",
        help="Show completion for the current shell, to copy it or customize the installation.",
    )
    command.action = _answer_root


def _answer_root(given: Namespace) -> int:
    if given.version:
        print(f"paracle {__version__}")
        return 0
    from .completion_scripts import install, show

    return install() if given.install_completion else show()


_RUN, _SEE, _ENTER = "Run programs", "See and remove sandboxes", "Use sandboxes of other processes"

_SANDBOX = Group(
    "Run code in sandboxes, see them, remove them.",
    {
        "health": Entry(
            "health:declare_health",
            "Check which sandboxes work on this machine, by using them.", _RUN,
        ),
        "test": Entry("health:declare_test", "Run a quick test of a sandbox.", _RUN),
        "execute": Entry(
            "execute:declare_execute",
            "Run a program in a fresh sandbox, and show what it prints as it prints it.", _RUN,
            starts_early=True,
        ),
        "list": Entry(
            "list_cleanup:declare_list",
            "Show the active sandboxes of every process, with what they use.", _SEE,
        ),
        "cleanup": Entry(
            "list_cleanup:declare_cleanup",
            "Remove sandboxes that dead processes left behind; with --all, every sandbox.", _SEE,
        ),
        "rm": Entry("attach:declare_rm", "Remove sandboxes of any process.", _SEE),
        "logs": Entry("attach:declare_logs", "Say where the output of a sandbox is.", _SEE),
        "exec": Entry(
            "attach:declare_exec", "Run a command in a sandbox that another process made.", _ENTER
        ),
        "shell": Entry(
            "attach:declare_shell", "Open a shell in a sandbox that another process made.", _ENTER
        ),
        "cp": Entry(
            "attach:declare_cp", "Copy a file or folder into a sandbox or out of it.", _ENTER
        ),
    },
    "Sandboxes",
)  # fmt: skip
_TEMPLATE = Group(
    "Sets of packages that native sandboxes start with.",
    {
        "list": Entry("template:declare_list", "Show the templates and whether they are built."),
        "build": Entry(
            "template:declare_build", "Install the packages of a template, once for all sandboxes."
        ),
        "remove": Entry(
            "template:declare_remove", "Delete a template; sandboxes that use it now keep running."
        ),
    },
    "Sandboxes",
)
_IMAGE = Group(
    "Images that Docker, gVisor and Incus sandboxes start from.",
    {
        "list": Entry(
            "image:declare_list",
            "Show the images, those made from them, and whether they are there.",
        ),
        "build": Entry(
            "image:declare_build", "Build an image on the Docker engine or Incus server."
        ),
    },
    "Sandboxes",
)
_KEYS = Group(
    "API keys of the sandbox service.",
    {
        "make": Entry(
            "keys:declare_make", "Make a key and show it, this once: only its hash is kept."
        ),
        "list": Entry("keys:declare_list", "Show the keys, without their secrets."),
        "revoke": Entry("keys:declare_revoke", "Make a key useless, at once and for good."),
    },
    "Service",
)
_AUDIT = Group(
    "The audit log of the sandbox service.",
    {
        "show": Entry("audit:declare_show", "Show what was written down, the newest last."),
        "verify": Entry("audit:declare_verify", "Check that nothing was changed or removed."),
        "tail": Entry("audit:declare_tail", "Show what is written down from now on, until Ctrl-C."),
    },
    "Service",
)
_AGENTS = Group(
    "Let agents work on tasks, in sandboxes.",
    {
        "run": Entry("agents.commands:declare_run", "Let an agent work on a task."),
        "list": Entry(
            "agents.commands:declare_list", "Show the agents there are, built in and your own."
        ),
        "show": Entry(
            "agents.commands:declare_show",
            "Show one agent: its tools, its limits, its instructions.",
        ),
        "audit": Entry(
            "agents.commands:declare_audit",
            "Show what agents did: tasks, tool calls and their outcome, what was blocked.",
        ),
        "stop": Entry(
            "agents.commands:declare_stop",
            "Stop every run of an agent, and remove all its sandboxes.",
        ),
    },
    "Agents",
)
ROOT = Group(
    "Run untrusted code in sandboxes.",
    {
        "sandbox": _SANDBOX,
        "template": _TEMPLATE,
        "image": _IMAGE,
        "serve": Entry("serve:declare_serve", "Serve sandboxes over HTTP until Ctrl-C.", "Service"),
        "keys": _KEYS,
        "audit": _AUDIT,
        "agents": _AGENTS,
        "mcp": Entry("mcp:declare_mcp", "Serve sandboxes to an MCP client.", "Agents"),
    },
    text=_EXAMPLES,
    declare=_declare_root,
)
