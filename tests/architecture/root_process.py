"""Print the modules of ours that the spawner, the one process with all rights, loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
# As `backends.native.spawner_process` starts it, as far as to the point where it knows what for.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from paracle_sandbox.jail.launch import _import_spawner
_import_spawner(sys.argv[1])
for name, module in sys.modules.items():
    if name.partition(".")[0] == "paracle_sandbox":
        print(name, module.__file__)
"""


def root_modules() -> dict[str, int]:
    """The lines of each module, in the order in which they are loaded."""
    command = [sys.executable, "-I", "-S", "-E", "-c", _PROGRAM, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = (line.split(" ", 1) for line in done.stdout.splitlines())
    return {name: len(Path(path).read_text().splitlines()) for name, path in found}


if __name__ == "__main__":
    modules = root_modules()
    for name, lines in modules.items():
        print(f"{lines:6} {name}")
    own = {name: lines for name, lines in modules.items() if ".guest" not in name}
    print(
        f"{sum(modules.values()):6} in {len(modules)} modules; {sum(own.values())} without guest/"
    )
