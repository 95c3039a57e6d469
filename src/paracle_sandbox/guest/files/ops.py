"""File operations inside the sandbox: the table OPS, and what each does."""

import errno
import os
import stat
from typing import Callable, Dict, Generator, List, Optional

from ...channel.frames import CHUNK
from .archive import pack
from .dirwalk import SLICE, Walk, remove_tree
from .job import MAX_OFFSET, Job, Message, Operation, Wire, Work, number_of, too_large
from .move import move
from .paths import DIRECTORY, FileError, Place, Roots, decode, real_path, resolve
from .read_write import read, write
from .staging import Staging

# A listing event holds about EVENT_BYTES and never more than EVENT_ROOM, which must be credited.
EVENT_BYTES = 256 << 10
EVENT_ROOM = 1 << 20
# Each byte of a name may become an escape of six characters.
ESCAPED = 6

Pause = Generator[bool, Optional[bytes], None]


def list_directory(request: Message, wire: Wire, roots: Roots) -> Work:
    place = roots.locate(request.get("path"))
    walk = walk_below(roots, place, recursive=bool(request.get("recursive")))
    above = place.text.rstrip("/") + "/"
    batch: List[Message] = []
    count = size = 0
    try:
        for found in walk:
            weight = ESCAPED * (len(above) + len(found.path) + len(found.name)) + 200
            if len(batch) >= SLICE or (batch and size + weight > EVENT_BYTES):
                yield from announce(wire, {"entries": batch})
                batch, size = [], 0
            batch.append(describe_entry(found.name, above + decode(found.path), found.status))
            size += weight
            count += 1
        if batch:
            yield from announce(wire, {"entries": batch})
        return {"count": count, "skipped": walk.skipped}
    finally:
        walk.close()


def announce(wire: Wire, event: Message) -> Pause:
    while wire.credit < EVENT_ROOM:
        yield False
    wire.event(event)
    yield True


def describe_entry(name: bytes, path: str, status: os.stat_result) -> Message:
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
    return describe_entry((place.root + place.names or [b"/"])[-1], place.text, status)


def real(request: Message, wire: Wire, roots: Roots) -> Work:
    yield from ()
    return {"path": real_path(roots, roots.locate(request.get("path")))}


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
    place = roots.locate(request.get("path"))
    yield from _check_size(request, roots, place)
    walk = walk_below(roots, place)
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


def _check_size(request: Message, roots: Roots, place: Place) -> Pause:
    """FileError if the tree is more than the host takes, before any of it is sent: what is small
    here can be large there, where each name of a file is a copy of it and a hole is written."""
    most = number_of(request, "max_bytes", MAX_OFFSET)
    entries = number_of(request, "max_entries", MAX_OFFSET)
    walk = walk_below(roots, place)
    try:
        for count, found in enumerate(walk, 1):
            if stat.S_ISREG(found.status.st_mode):
                most -= found.status.st_size
            elif not stat.S_ISDIR(found.status.st_mode):
                entries += 1  # links and special files are left out
            if most < 0:
                raise too_large(place, number_of(request, "max_bytes", 0))
            if count > entries:
                raise FileError("too_large", "%s has too many files" % place.text, errno.EFBIG)
            if count % SLICE == 0:
                yield True
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


def walk_below(roots: Roots, place: Place, recursive: bool = True) -> Walk:
    parent, name = resolve(roots, place)
    try:
        top = os.open(name, DIRECTORY, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        return Walk(top, recursive)
    finally:
        os.close(top)


def operation_starter(operation: Operation) -> Callable[[Message, Wire, Message], Job]:
    return lambda request, wire, setup: Job(
        operation, request, wire, Roots(setup, request.get("places"))
    )


OPS: Dict[str, Callable[[Message, Wire, Message], Job]] = {
    "read": operation_starter(read),
    "write": operation_starter(write),
    "list": operation_starter(list_directory),
    "stat": operation_starter(describe),
    "realpath": operation_starter(real),
    "mkdir": operation_starter(make_directory),
    "move": operation_starter(move),
    "remove": operation_starter(remove),
    "get_tree": operation_starter(get_tree),
    "put_tree": operation_starter(put_tree),
}
