"""network_mode="bridge": a way out for a sandbox, and only out.

A sandbox gets a cable to the host (`cable.py`), and the host a table of rules that says what may
pass (`firewall.py`). The order: the cable is made while both ends are down, then the rules are put
in force, then the ends are brought up, so that nothing passes unfiltered. A lock that attachments
share, and that a sweep has for itself, keeps the sweep from taking the table from under a cable
that was made since it looked.

Forwarding is switched on for the host (`net.ipv4.ip_forward`) if it was off, and stays on: others
may have come to rely on it. A host that must not pass on packets of others says so in its own
firewall.

The cable goes with the namespace of the sandbox, also when the owner is killed. The table, which
does nothing without cables, may then be left; the next start of a spawner, or sweep, removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ...errors import BackendUnavailableError, SandboxCleanupError, SandboxCreationError
from ..machine.nftables import NFT_MISSING, find_nft
from . import firewall, veth
from .table_mark import TABLE_LOCK, clear_mark, set_mark
from .veth import Link

_OURS = re.compile(veth.PREFIX + r"[0-9]+\Z")
_FORWARDING_LOCK = "/run/paracle-sandbox-forwarding.lock"
_LOCK_SECONDS = 30.0


def missing() -> list[str]:
    """List what this machine lacks for bridge networks, each with its remedy."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append("root (or use network_mode=none)")
    if find_nft() is None:
        lacks.append(NFT_MISSING)
    if find_spec("pyroute2") is None:
        lacks.append("pyroute2 (pip install '.[network]' in a checkout)")
    return lacks


async def attach(process: Mapping[str, Any]) -> Link:
    """Give the network namespace of a process (its ``pid`` and ``start`` time), which must have
    none but loopback, a way out.

    On failure nothing is left. Raises BackendUnavailableError when the machine cannot do it,
    SandboxCreationError with the name of the step otherwise."""
    work = asyncio.ensure_future(asyncio.to_thread(_attach, process))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # A thread cannot be stopped. It is waited for, so that whoever cleans up finds it all.
        await asyncio.wait([work])
        if not work.cancelled() and work.exception() is None:
            await detach(work.result())
        raise


async def detach(*links: Link) -> None:
    """Remove cables, if they are still there, and the firewall table after the last of all.
    Raises SandboxCleanupError when something stays."""
    if links:
        await asyncio.to_thread(_detach, links)


async def sweep() -> None:
    """Remove the firewall table if no sandbox, of any process, has a cable."""
    await asyncio.to_thread(_sweep)


def _attach(process: Mapping[str, Any]) -> Link:
    if lacks := missing():
        raise BackendUnavailableError(
            f"network_mode=bridge needs {', and '.join(lacks)}.", step="network"
        )
    with veth.namespace_of(process) as namespace:
        try:
            with _lock(TABLE_LOCK, fcntl.LOCK_SH) as lock:
                with veth.step("network lock"):
                    set_mark(lock)
                return _make_and_connect(namespace)
        except BaseException:
            with contextlib.suppress(SandboxCleanupError):  # why it failed matters more
                _sweep()
            raise


def _make_and_connect(namespace: int) -> Link:
    link = veth.make(namespace)
    try:
        firewall.load(veth.PREFIX, veth.SANDBOXES)
        with _lock(_FORWARDING_LOCK, fcntl.LOCK_EX):
            veth.forward(link)
        veth.connect(link, namespace)
    except BaseException:
        veth.remove(link)
        raise
    return link


def _detach(links: tuple[Link, ...]) -> None:
    try:
        veth.remove(*links)
    except SandboxCreationError as error:
        raise SandboxCleanupError(f"A network link was not removed: {error}") from error
    _sweep()


def _sweep() -> None:
    if missing():
        return  # what could not be made is not there
    try:
        with _lock(TABLE_LOCK, fcntl.LOCK_EX) as lock:
            if not any(_OURS.match(name) for _, name in socket.if_nameindex()):
                firewall.remove()
                clear_mark(lock)
    except SandboxCreationError as error:
        raise SandboxCleanupError(f"The firewall table was not removed: {error}") from error


@contextlib.contextmanager
def _lock(path: str, kind: int) -> Iterator[int]:
    """Between the processes of this machine. Root's own file: nobody else can hold it."""
    with veth.step("network lock"):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with veth.step("network lock"):
            _wait_for_lock(file, kind)
        yield file
    finally:
        os.close(file)


def _wait_for_lock(file: int, kind: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.003)
