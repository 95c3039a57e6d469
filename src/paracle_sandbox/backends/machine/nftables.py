"""nftables, as the backends of this machine use it: whole tables, each as one transaction."""

from __future__ import annotations

import shutil
import subprocess

from ...errors import BackendUnavailableError, SandboxCreationError

NFT_MISSING = "the nft program (apt install nftables)"

_SECONDS = 30.0
# Where nft lies when the PATH of an ordinary session does not name it.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# "This" network, loopback, link-local with the metadata services, the metadata services that are
# elsewhere (Oracle, Alibaba), multicast, reserved and broadcast.
DENIED = (
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "192.0.0.0/24",
    "100.100.100.200",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
# Azure's machine agent answers here, on the address of its name server.
AZURE = "168.63.129.16"


def find_nft() -> str | None:
    return shutil.which("nft") or shutil.which("nft", path=_SYSTEM_PATH)


def load_table(table: str, text: str) -> None:
    """Put a table in force, whatever is there. Raises SandboxCreationError.

    Its sets stay: a rule that counts an address's connections would forget them with its set, each
    time that any process makes a sandbox.
    """
    try:
        _run_nft(f"table inet {table}\nflush table inet {table}\n{text}")
    except SandboxCreationError:
        # That of another version of ours may have something else under a name.
        _run_nft(f"table inet {table}\ndelete table inet {table}\n{text}")


def remove_table(table: str) -> None:
    """Remove a table, whether it is there or not."""
    _run_nft(f"table inet {table}\ndelete table inet {table}\n")


def _run_nft(text: str) -> None:
    """Run one transaction. Raises SandboxCreationError when the kernel refuses; then nothing has
    changed."""
    program = find_nft()
    if program is None:
        raise BackendUnavailableError(
            f"network_mode=bridge needs {NFT_MISSING}.", step="network firewall"
        )
    try:
        done = subprocess.run(
            [program, "-f", "-"],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env={"PATH": _SYSTEM_PATH, "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxCreationError(f"nft did not run: {error}", step="network firewall") from error
    if done.returncode:
        raise SandboxCreationError(
            f"The kernel refused the firewall rules: {done.stderr.strip()[:300]}. "
            "network_mode=bridge needs nftables with nat, fib and connection counting.",
            step="network firewall",
        )
