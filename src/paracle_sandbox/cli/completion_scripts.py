"""The scripts by which bash, zsh and fish learn to complete ``paracle``, and where they belong.

Each asks ``completion`` with every TAB.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from . import output
from .environment import login_shell
from .exit_codes import SUCCESS, UsageFault

_BASH = """\
_paracle_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
                   _PARACLE_COMPLETE=complete_bash $1 ) )
    return 0
}

complete -o default -F _paracle_completion paracle
"""
_ZSH = """\
#compdef paracle

_paracle_completion() {
  eval $(env _PARACLE_COMPLETE_LINE="${words[1,$CURRENT]}" _PARACLE_COMPLETE=complete_zsh paracle)
}

compdef _paracle_completion paracle
"""
_FISH_ASKS = "env _PARACLE_COMPLETE=complete_fish _PARACLE_COMPLETE_FOR={} " \
    "_PARACLE_COMPLETE_LINE=(commandline -cp) paracle"  # fmt: skip
_FISH = (
    f'complete --command paracle --no-files --arguments "({_FISH_ASKS.format("words")})" '
    f'--condition "{_FISH_ASKS.format("condition")}"\n'
)
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def show() -> int:
    """Print the script of the shell that this was started from."""
    print(SCRIPTS[_own_shell()], end="")
    return SUCCESS


def install() -> int:
    """Put the script where that shell reads it."""
    shell = _own_shell()
    home = Path.home()
    if shell == "bash":
        path = home / ".bash_completions" / "paracle.sh"
        _add_lines(home / ".bashrc", f"source {shlex.quote(str(path))}")
    elif shell == "zsh":
        path = home / ".zfunc" / "_paracle"
        _add_lines(home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    else:
        path = home / ".config" / "fish" / "completions" / "paracle.fish"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCRIPTS[shell])
    output.say(f"{shell} completion installed in {path}")
    output.say("Completion will take effect once you restart the terminal")
    return SUCCESS


def _add_lines(file: Path, line: str) -> None:
    text = file.read_text() if file.is_file() else ""
    if line.replace("'", "") not in text.replace("'", ""):
        file.write_text(f"{text}\n{line}\n")


def _own_shell() -> str:
    """The nearest process above this one that is a shell we know, else that of the login."""
    pid = os.getppid()
    while pid > 1:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip().lstrip("-")
            if name in SCRIPTS:
                return name
            # Behind the name, which may have any letter in it: state and number of the parent.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    name = login_shell()
    if name in SCRIPTS:
        return name
    raise UsageFault(f"Completion is for {', '.join(SCRIPTS)}; set SHELL to one of them")
