"""Converts the configuration of this machine's pip, so that a build in a container can use it.

The indexes, the proxy and the certificates of `pip config list` become a pip.conf and a ca.pem of
the build context. Only the stage that installs packages sees them, and it is not kept. Options that
work only on this machine, such as a folder of wheels, are left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CONF, CERTIFICATES = "pip.conf", "ca.pem"

_ADDRESSES = ("index-url", "extra-index-url", "find-links")
_AS_THEY_ARE = ("trusted-host", "proxy", "timeout", "default-timeout", "retries")
# Later sections win, as in pip.
_SECTIONS = ("global", "install", ":env:")
_SECONDS = 60.0


def read_machine_files() -> dict[str, bytes]:
    """Return the files for the build context. Raises OSError if a file that the configuration of
    pip names cannot be read."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    listing = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_SECONDS,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    # If pip is not installed, it has no configuration.
    return make_files(read_listing(listing.stdout)) if listing.returncode == 0 else {}


def make_files(options: Mapping[str, str]) -> dict[str, bytes]:
    """Return the pip.conf, and the certificates if some are configured."""
    kept = {name: options[name] for name in _AS_THEY_ARE if name in options}
    for name in _ADDRESSES:
        addresses = [word for word in options.get(name, "").split() if _is_remote(word)]
        if addresses:
            kept[name] = " ".join(addresses)
    found: dict[str, bytes] = {}
    if options.get("cert"):
        found[CERTIFICATES] = Path(options["cert"]).read_bytes()
        kept["cert"] = f"/build/{CERTIFICATES}"
    lines = ["[global]", *(f"{name} = {value}" for name, value in kept.items())]
    return {CONF: "\n".join(lines).encode() + b"\n", **found}


def read_listing(text: str) -> dict[str, str]:
    """Parse the output of `pip config list`, and merge the sections as `pip install` does."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if equals and section in by_section:
            by_section[section][name.strip()] = str(ast.literal_eval(value))
    return {name: value for options in by_section.values() for name, value in options.items()}


def _is_remote(address: str) -> bool:
    return address.startswith(("http://", "https://"))
