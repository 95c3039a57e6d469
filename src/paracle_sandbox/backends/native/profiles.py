"""The profiles that a machine or a container engine may need before it allows native sandboxes.

    python3 -m paracle_sandbox.backends.native.profiles seccomp     for a container engine
    python3 -m paracle_sandbox.backends.native.profiles apparmor    for Ubuntu from 24.04 on
    python3 -m paracle_sandbox.backends.native.profiles pod         for Kubernetes: a whole pod

jail/filters/container_profile.py says what is in the seccomp profile. The AppArmor profile is for
the programs of this installation and restricts nothing: it allows them the user namespaces that
Ubuntu refuses programs without a profile.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.resources import files

# Of the package, so that a wheel has them. The first is written by make seccomp.
_FILES = {"seccomp": "container_seccomp.json", "pod": "pod.yaml"}
_ALTERNATIVES = re.compile(r"[*?{}\[\]^,\"\\]")  # what is not itself in a path of a profile


def apparmor_profile(programs: list[str]) -> str:
    """``programs`` are paths of what is started; whatever they start has the profile as well."""
    # A path has to begin with its slash, also where it stands for several.
    paths = [_ALTERNATIVES.sub(r"\\\g<0>", program.removeprefix("/")) for program in programs]
    attached = paths[0] if len(paths) == 1 else "{" + ",".join(paths) + "}"
    return (
        "# Lets Paracle Sandbox, and no other program, make user namespaces.\n"
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n\n"
        f'profile paracle-sandbox "/{attached}" flags=(unconfined) {{\n'
        "  userns,\n"
        "  include if exists <local/paracle-sandbox>\n"
        "}\n"
    )


def own_programs() -> list[str]:
    """The command of this installation, and its interpreter where that is a file of its own. The
    machine's own interpreter is not: with it every Python program would be allowed."""
    found = [os.path.join(sys.prefix, "bin", "paracle")]
    if not os.path.exists(found[0]):
        command = shutil.which("paracle")
        found = [os.path.realpath(command)] if command else []
    python = sys.executable
    if sys.prefix != sys.base_prefix and not os.path.islink(python):
        found.append(python)
    return found


def main(words: list[str]) -> int:
    if len(words) == 1 and words[0] in _FILES:
        file = files(__package__).joinpath(_FILES[words[0]])
        print(file.read_text(encoding="utf-8"), end="")
        return 0
    programs = own_programs()
    if words == ["apparmor"] and programs:
        print(apparmor_profile(programs), end="")
        return 0
    if words == ["apparmor"]:
        print(
            "The paracle command is not installed here: install the package first.", file=sys.stderr
        )
        return 1
    print("Name one of: seccomp, apparmor, pod", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
