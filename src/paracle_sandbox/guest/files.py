"""File operations inside the sandbox: the table OPS, and what each does."""

import os
import stat
from typing import Callable, Dict, Generator, List, Optional

from ..channel.frames import CHUNK
from .contents import read, write
from .descent import SLICE, Walk, remove_tree
from .jobs import Job, Message, Operation, Wire, Work
from .moves import move
from .paths import DIRECTORY, FileError, Place, Roots, decode, resolve
from .staging import Staging
from .trees import pack

# A listing event holds about EVENT_BYTES and never more than EVENT_ROOM, which must be credited.
EVENT_BYTES = 256 << 10
EVENT_ROOM = 1 << 20
# Each byte of a name may become an escape of six characters.
ESCAPED = 6

Pause = Generator[bool, Optional[bytes], None]


def list_directory(request: Message, wire: Wire, roots: Roots) -> Work:
    place = roots.locate(request.get("path"))
    walk = _walk(roots, place, recursive=bool(request.get("recursive")))
    above = place.text.rstrip("/") + "/"
    batch: List[Message] = []
    count = size = 0
    try:
        for found in walk:
            weight = ESCAPED * (len(above) + len(found.path) + len(found.name)) + 200
            if len(batch) >= SLICE or (batch and size + weight > EVENT_BYTES):
                yield from _announce(wire, batch)
                batch, size = [], 0
            batch.append(_describe(found.name, above + decode(found.path), found.status))
            size += weight
            count += 1
        if batch:
            yield from _announce(wire, batch)
        return {"count": count, "skipped": walk.skipped}
    finally:
        walk.close()


def _announce(wire: Wire, batch: List[Message]) -> Pause:
    while wire.credit < EVENT_ROOM:
        yield False
    wire.event({"entries": batch})
    yield True


def _describe(name: bytes, path: str, status: os.stat_result) -> Message:
    return {
        "name": decode(name),
        "path": path,
        "kind": _KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "modified": status.st_mtime,
    }


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def describe(request: Message, wire: Wire, roots: Roots) -> Work:
    """The entry of a path; a link at its end is followed, as os.stat does."""
    yield from ()
    place = roots.locate(request.get("path"))
    try:
        parent, name = resolve(roots, place)
    except FileError as error:
        if error.code != "not_directory":
            raise
        # Nothing is below a file: who asks whether something is there has the answer.
        raise FileError("not_found", error.message, error.number) from None
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(parent)
    return _describe((place.root + place.names or [b"/"])[-1], place.text, status)


def make_directory(request: Message, wire: Wire, roots: Roots) -> Work:
    yield from ()
    place = roots.locate(request.get("path"))
    parents = bool(request.get("parents", True))
    parent, name = resolve(roots, place, make_parents=parents)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not (parents and stat.S_ISDIR(status.st_mode)):
            raise
    finally:
        os.close(parent)
    return {}


def remove(request: Message, wire: Wire, roots: Roots) -> Work:
    place = roots.locate(request.get("path"))
    parent, name = resolve(roots, place, follow=False)
    try:
        if name == b".":
            raise FileError("invalid", "%s itself cannot be removed" % place.text)
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
        elif not request.get("recursive"):
            os.rmdir(name, dir_fd=parent)
        else:
            for _ in remove_tree(parent, name):
                yield True
        return {}
    finally:
        os.close(parent)


def get_tree(request: Message, wire: Wire, roots: Roots) -> Work:
    walk = _walk(roots, roots.locate(request.get("path")))
    pieces = 0
    buffer = bytearray()
    try:
        for piece in pack(walk, links=False):
            buffer += piece
            pieces += 1
            if len(buffer) >= CHUNK or pieces >= SLICE:
                yield from _send(wire, bytes(buffer))
                buffer.clear()
                pieces = 0
        yield from _send(wire, bytes(buffer))
        return {"entries": walk.packed, "skipped": walk.skipped}
    finally:
        walk.close()


def _send(wire: Wire, data: bytes) -> Pause:
    while wire.credit < len(data):
        yield False
    if data:
        wire.data(data)
    yield True


def put_tree(request: Message, wire: Wire, roots: Roots) -> Work:
    place = roots.locate(request.get("path"))
    parent, name = resolve(roots, place, make_parents=True)
    staging = Staging(parent, name, links=True, mode_mask=0o777)
    try:
        data = yield False
        while data != b"":
            if data:
                staging.writer.feed(data)
                wire.consumed(len(data))
            data = yield False
        for _ in staging.settle():
            yield True
        return {"entries": staging.writer.entries}
    finally:
        staging.discard()


def _walk(roots: Roots, place: Place, recursive: bool = True) -> Walk:
    parent, name = resolve(roots, place)
    try:
        top = os.open(name, DIRECTORY, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        return Walk(top, recursive)
    finally:
        os.close(top)


def _starter(operation: Operation) -> Callable[[Message, Wire, Message], Job]:
    return lambda request, wire, setup: Job(operation, request, wire, Roots(setup))


OPS: Dict[str, Callable[[Message, Wire, Message], Job]] = {
    "read": _starter(read),
    "write": _starter(write),
    "list": _starter(list_directory),
    "stat": _starter(describe),
    "mkdir": _starter(make_directory),
    "move": _starter(move),
    "remove": _starter(remove),
    "get_tree": _starter(get_tree),
    "put_tree": _starter(put_tree),
}
