"""The shape and the identity of a sandbox: what is settled before its first process is forked."""

from __future__ import annotations

import os
from typing import NamedTuple

UID_INSIDE = 1000  # and gid, of every program in every sandbox
EXTRA_WRITABLE = ("home", "opt", "srv", "mnt")


class Shape(NamedTuple):
    """The part of a configuration that is fixed when the child is forked."""

    network: str = "none"
    working_dir: str = "/workspace"
    read_only: bool = True
    tmpfs_mb: int = 0  # 0: the workspace is a subvolume of the volume
    resolv_conf: str = ""


class Identity(NamedTuple):
    """The user and group that a sandbox runs as, in the spawner's user namespace."""

    uid: int
    gid: int
    rootless: bool


def prepare_workspace(home: str, shape: Shape, identity: Identity) -> None:
    """Make the directories that belong to the sandbox."""
    for name in ("workspace", "tmp", *(() if shape.read_only else EXTRA_WRITABLE)):
        os.mkdir(f"{home}/{name}", 0o755)
        os.chmod(f"{home}/{name}", 0o1777 if name == "tmp" else 0o755)
        os.chown(f"{home}/{name}", identity.uid, identity.gid)
