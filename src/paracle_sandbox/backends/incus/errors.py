"""What the server refused, or why a guest did not start, in our words and with what to do."""

from __future__ import annotations

import re

from ...errors import BackendUnavailableError, SandboxCreationError
from .images import not_found
from .server import Refused

_NO_MACHINES = re.compile(r'instance type "?virtual-machine"? is not supported on this server:? ?'
                          r'(?P<piece>.*)', re.IGNORECASE)  # fmt: skip
_NO_IMAGE = re.compile(r"image.*(not found|couldn't be found)|image not provided|"
                       r"failed (getting|remote) (remote )?image", re.IGNORECASE)  # fmt: skip
# Of jail/instance/confine_instance.py.
_FAILED_STEP = re.compile(r"paracle-step (?P<step>[^:]+): (?P<why>.*)")
_RESTRICTED = re.compile(r'project "?(?P<project>[^"\s]+)"? is forbidden', re.IGNORECASE)
_OLD_FIREWALL = re.compile(r"failed to run: (ip6?tables|ebtables)\b", re.IGNORECASE)
# A word of the missing piece: what to do about it.
_PIECES = {
    "vsock": "Load it with: modprobe vhost_vsock, or boot a kernel that has it",
    "kvm": "Switch virtualisation on in the firmware, or nested virtualisation in the machine's own"
    " host, and load kvm",
    "qemu": "Install it with: apt install incus (not incus-base) or qemu-system",
    "ovmf": "Install it with: apt install ovmf",
    "edk2": "Install it with: apt install ovmf",
}


def creation_error(refused: Refused, sandbox_id: str, image: str) -> SandboxCreationError:
    text = refused.message
    lower = text.lower()
    if match := _NO_MACHINES.search(text):
        return no_machines(match["piece"])
    if _NO_IMAGE.search(text):
        return not_found(image, text)
    if "doesn't match instance type" in lower or "type mismatch" in lower:
        return SandboxCreationError(
            f"The image {image} is of another kind: {text}. A container image cannot be a virtual "
            "machine, nor the other way round; choose another base_image, for a virtual machine "
            "such as images:debian/12/cloud (also with INCUS_SANDBOX_IMAGE).",
            sandbox_id,
            step="image",
        )
    if "storage pool" in lower and "not found" in lower:
        return no_pool()
    if match := _RESTRICTED.search(text):
        return BackendUnavailableError(
            f"The restrictions of an Incus project forbid what a sandbox needs: {text}. Have its "
            f"administrator run `incus project set {match['project']} "
            "restricted.containers.lowlevel=allow restricted.devices.disk=allow`, or use another "
            "project.",
            step="project",
        )
    if _OLD_FIREWALL.search(text):
        return BackendUnavailableError(
            f"The Incus server cannot filter the card of a sandbox: {text}. It was started where "
            "there was no nft, and uses the older iptables. Install it (apt install nftables) and "
            "restart the server: `incus info` then says firewall: nftables.",
            sandbox_id,
            step="network firewall",
        )
    return SandboxCreationError(
        f"The Incus server refused: {text}. `incus warning list` may say more.",
        sandbox_id,
        step="instance",
    )


def no_machines(piece: str) -> BackendUnavailableError:
    """This machine cannot start virtual machines at all, whatever the image."""
    piece = piece.strip().rstrip(".") or "the server does not say why"
    remedy = next((text for word, text in _PIECES.items() if word in piece.lower()), "")
    return BackendUnavailableError(
        f"This machine cannot start virtual machines: {piece}. "
        + (f"{remedy}; or" if remedy else "See `incus info` and `incus warning list`, or")
        + " use containers: SANDBOX_MODE=incus.",
        step="virtual machines",
    )


def no_pool(name: str = "") -> BackendUnavailableError:
    """Without a name: it has none at all."""
    missing = f"no storage pool {name!r}" if name else "no storage pool"
    return BackendUnavailableError(
        f"The Incus server has {missing}. Make one with: incus storage create {name or 'default'} "
        "dir (or `incus admin init --minimal`)"
        + ("; or set INCUS_SANDBOX_POOL to one that `incus storage list` shows." if name else "."),
        step="storage pool",
    )


def no_network() -> BackendUnavailableError:
    return BackendUnavailableError(
        "The Incus server has no managed bridge network for network_mode=bridge. Make one with: "
        "incus network create incusbr0",
        step="network",
    )


def guest_error(last_words: str, image: str) -> SandboxCreationError:
    """Why a guest did not start, from the last thing that was said in its place."""
    if match := _FAILED_STEP.search(last_words):
        return SandboxCreationError(
            f"The sandbox could not be made: {match['step']}: {match['why']}. Nothing was started.",
            step=match["step"],
        )
    if "python3" in last_words and ("not found" in last_words.lower() or "No such" in last_words):
        return no_python(image)
    return SandboxCreationError(
        f"The instance ended before its guest was there: {last_words or 'it said nothing'}. Does "
        f"the image {image} have python3 (3.10 or newer)?",
        step="guest",
    )


def no_python(image: str) -> SandboxCreationError:
    return SandboxCreationError(
        f"The image {image} has no python3. Choose one that has it, or build ours with: "
        "paracle image build --incus",
        step="image",
    )
