"""Files that an image has in a place that is a sandbox's own.

There our mount hides them. So they are read once for each image, out of a container that is never
started, and unpacked into each new sandbox: by a program inside, with the rights of the sandbox
and below its limits. Most images have nothing there; that is remembered on disk, because what an
id stands for never changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import secrets
import tarfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress

from ...config import SandboxConfig
from ...errors import SandboxCreationError
from ...host.own_directory import own_subdirectory
from ..machine.owner import Owner
from ..machine.workspaces import UID
from .attach_channel import AttachChannel
from .engine import Engine, EngineRefused, Json
from .labels import labels_of, look_title

# The tar of each place, in pieces.
Files = Mapping[str, Sequence[bytes]]

_MOST_BYTES = 256 << 20  # of one place, and kept of all of them
_TWO_ENTRIES = 1 << 20  # with all that may be said of them before and after their headers
_MOST_VOLUMES = 32
_UNPACK_SECONDS = 120.0
_MAX_ANSWER = 4096
_DONE = b"done\n"
# The archive names its own directory first. What the image says of owners and of special files
# is nothing that the user inside could have made.
_PROGRAM = """
import os, sys, tarfile
tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)
def wanted(tar):
    for member in tar:
        member.name = member.name.partition("/")[2]
        if member.islnk():
            member.linkname = member.linkname.partition("/")[2]
        member.mode &= 0o777
        if member.name and not member.isdev():
            yield member
answer = "done"
try:
    with tarfile.open(fileobj=open(0, "rb", buffering=0), mode="r|") as tar:
        tar.extractall(sys.argv[1], wanted(tar))
except (OSError, tarfile.TarError) as error:
    answer = str(error).replace("\\n", " ")[:1000]
os.write(1, answer.encode(errors="replace") + b"\\n")
"""


class ImageFiles:
    """Of the images of one engine."""

    def __init__(self, engine: Engine, state_dir: str, backend: str, session: str) -> None:
        self._engine = engine
        self._state_dir = state_dir
        self._backend = backend
        self._session = session
        self._known: OrderedDict[str, Files] = OrderedDict()
        self._looks: dict[str, asyncio.Task[Files]] = {}

    async def of(self, image: Json, config: SandboxConfig, volumes: Sequence[str]) -> Files:
        """A tar for each place where there is something: the working directory, and where the
        image wants volumes. Raises SandboxCreationError when that is too much."""
        if len(volumes) > _MOST_VOLUMES:
            raise SandboxCreationError(
                f"The image {config.base_image} wants {len(volumes)} volumes, and "
                f"{_MOST_VOLUMES} can be had.",
                step="image",
            )
        places = (config.working_dir, *volumes)
        key = hashlib.sha256(json.dumps([image["Id"], *places]).encode()).hexdigest()
        if key in self._known:
            return self._known[key]
        if self._is_known_empty(key):
            return self._known.setdefault(key, {})
        look = self._looks.get(key)
        if look is None:
            look = self._looks[key] = asyncio.ensure_future(self._look(image, config, places))
            look.add_done_callback(lambda _: self._looks.pop(key, None))
        # Whoever is cancelled takes nothing from the others who wait for it.
        files = await asyncio.shield(look)
        self._remember(key, files)
        return files

    async def _look(self, image: Json, config: SandboxConfig, places: Sequence[str]) -> Files:
        # Labelled, so that a sweep removes it if we are killed meanwhile.
        title = look_title(secrets.token_hex(8))
        owner = Owner.of(os.getpid())
        body = {
            "Image": image["Id"],
            "Entrypoint": ["none"],
            "Labels": labels_of(title, self._backend, self._session, owner, config, {}),
            # Mounted only when it starts. Instead of it, a volume could hide the files.
            "HostConfig": {"NetworkMode": "none", "Tmpfs": dict.fromkeys(places, "")},
        }
        container = await self._engine.create(title.name, body)
        try:
            return await self._read(container, config, places)
        finally:
            await self._engine.remove(container)

    async def _read(self, container: str, config: SandboxConfig, places: Sequence[str]) -> Files:
        found = {}
        for place in places:
            tar = await self._engine.archive(container, place, _MOST_BYTES)
            if _length(tar) > _MOST_BYTES:
                raise SandboxCreationError(
                    f"The image {config.base_image} has more than {_MOST_BYTES >> 20} MB in "
                    f"{place}, of which each sandbox has a copy. Keep them elsewhere in the image.",
                    step="image",
                )
            if _has_files(tar):
                found[place] = tar
        return found

    def _remember(self, key: str, files: Files) -> None:
        self._known[key] = files
        while len(self._known) > 1 and _size(self._known) > _MOST_BYTES:
            self._known.popitem(last=False)
        if not files:
            with suppress(OSError), self._empty(make=True) as empty:  # else it is looked again
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(key, flags, 0o600, dir_fd=empty))

    def _is_known_empty(self, key: str) -> bool:
        with suppress(OSError), self._empty() as empty:
            os.stat(key, dir_fd=empty, follow_symlinks=False)
            return True
        return False

    def _empty(self, *, make: bool = False) -> AbstractContextManager[int]:
        return own_subdirectory(self._state_dir, "images-without-files", make=make)


def _size(known: Mapping[str, Files]) -> int:
    return sum(_length(tar) for files in known.values() for tar in files.values())


def _length(tar: Sequence[bytes]) -> int:
    return sum(map(len, tar))


def _has_files(pieces: Sequence[bytes]) -> bool:
    """Whether there is more in it than the directory itself."""
    beginning = b""
    for piece in pieces:
        beginning += piece
        if len(beginning) >= _TWO_ENTRIES:
            break
    if not beginning:
        return False
    with tarfile.open(fileobj=io.BytesIO(beginning), mode="r:") as tar:
        first = tar.next()
        return first is not None and first.isdir() and tar.next() is not None


async def unpack(engine: Engine, container: str, files: Files) -> None:
    """Into a container that runs, before any program does. Raises SandboxCreationError."""
    for place, tar in files.items():
        try:
            async with asyncio.timeout(_UNPACK_SECONDS):
                answer = await _unpack(engine, container, place, tar)
        except (TimeoutError, ConnectionError, EngineRefused) as error:
            answer = str(error).encode() or b"it took too long"
        if answer != _DONE:
            said = answer.decode(errors="replace").strip()
            raise SandboxCreationError(
                f"What the image has in {place} could not be put there: {said or 'no answer'}. It "
                "counts against disk_mb.",
                step="image",
            )


async def _unpack(engine: Engine, container: str, place: str, tar: Sequence[bytes]) -> bytes:
    channel = await engine.execute(
        container,
        {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "User": f"{UID}:{UID}",
            "WorkingDir": "/",
            "Cmd": ["python3", "-I", "-S", "-c", _PROGRAM, place],
        },
    )
    # It may answer before it has read everything.
    sending = asyncio.ensure_future(_send(channel, tar))
    try:
        answer = b""
        while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER:
            piece = await channel.receive()
            if not piece:
                return answer or channel.last_words.encode()
            answer += piece
        return answer
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await channel.close()


async def _send(channel: AttachChannel, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        await channel.send(piece)
