"""Images by name: of this server by alias or fingerprint, of an image server as ``images:alias``.

The names of our own Docker images stand for the aliases under which `paracle image build --incus`
leaves them: paracle/sandbox:latest is paracle/sandbox, paracle/sandbox:ml is paracle/sandbox/ml.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from ...errors import SandboxCreationError
from .remotes import Remotes
from .server import Refused, Server

OURS = "paracle/sandbox"
_OURS = re.compile(r"paracle/sandbox(?::(?P<tag>[\w.-]+))?\Z")
_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}\Z")


def alias_of(image: str) -> str:
    """Return the alias of an image on an Incus server."""
    match = _OURS.match(image)
    if match is None:
        return image
    tag = match["tag"] or "latest"
    return OURS if tag == "latest" else f"{OURS}/{tag}"


async def image_source(server: Server, remotes: Remotes, image: str) -> dict[str, Any]:
    """Return the ``source`` of an instance. Raises SandboxCreationError when there is no such
    image."""
    alias = alias_of(image)
    remote, colon, name = alias.partition(":")
    if colon and remote != "local":
        return await _of_image_server(remotes, remote, name)
    alias = name if colon else alias
    places = {f"/1.0/images/aliases/{quote(alias, safe='')}": "target"}
    if _FINGERPRINT.match(alias):
        places[f"/1.0/images/{alias}"] = "fingerprint"
    for path, field in places.items():
        try:
            return {"type": "image", "fingerprint": str((await server.get(path))[field])}
        except Refused as refused:
            if not refused.is_absence:
                raise
    raise not_found(image, f"the server has no image {alias!r}")


async def _of_image_server(remotes: Remotes, remote: str, alias: str) -> dict[str, Any]:
    from ...errors import BackendUnavailableError

    try:
        found = remotes.get(remote)
    except BackendUnavailableError as error:
        raise not_found(f"{remote}:{alias}", error.message.split(". See ")[0]) from error
    source = {
        "type": "image",
        "mode": "pull",
        "server": found.address,
        "protocol": found.protocol,
        "alias": alias,
    }
    if found.pinned_certificate is not None:
        source["certificate"] = found.pinned_certificate.read_text(encoding="ascii")
    return source


def not_found(image: str, reason: str) -> SandboxCreationError:
    """Return the error: the image, why it could not be had, and the exact command that makes or
    lists it."""
    match = _OURS.match(image)
    remote, colon, _ = image.partition(":")
    if match is not None:
        tag = match["tag"] or "latest"
        variant = "" if tag == "latest" else f" {tag}"
        remedy = f"Build it with: paracle image build --incus{variant}"
    elif colon:
        remedy = f"`incus image list {remote}:` shows what is there, if the server reaches it"
    else:
        remedy = "`incus image list` shows what is there"
    return SandboxCreationError(
        f"Image not found: {image} ({reason.strip().rstrip('.')}). {remedy}. Or choose another "
        "base_image, or INCUS_SANDBOX_IMAGE.",
        step="image",
    )
