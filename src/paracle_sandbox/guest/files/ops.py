"""The file operations of the guest: the table OPS, and the functions for paths and trees."""

import errno
import os
import stat
from typing import Callable, Dict, Generator, List, Optional

from ...channel.frames import CHUNK
from .archive import pack
from .dirwalk import SLICE, Walk, remove_tree
from .job import MAX_OFFSET, Job, Message, Operation, Wire, Work, read_number, too_large_error
from .move import move
from .paths import DIRECTORY, FileError, Location, Roots, decode, real_path, resolve
from .read_write import read, write
from .staging import Staging

# An event of a listing holds about EVENT_BYTES and never more than EVENT_ROOM. It is sent only when
# the host has given credit for that much.
EVENT_BYTES = 256 << 10
EVENT_ROOM = 1 << 20
# JSON may turn each byte of a name into an escape of six characters.
ESCAPED = 6

Pause = Generator[bool, Optional[bytes], None]


def list_directory(request: Message, wire: Wire, roots: Roots) -> Work:
    """List a directory, or everything below it, as EVENTs with entries."""
    location = roots.locate(request.get("path"))
    walk = walk_below(roots, location, recursive=bool(request.get("recursive")))
    above = location.text.rstrip("/") + "/"
    batch: List[Message] = []
    count = size = 0
    try:
        for found in walk:
            weight = ESCAPED * (len(above) + len(found.path) + len(found.name)) + 200
            if len(batch) >= SLICE or (batch and size + weight > EVENT_BYTES):
                yield from send_event(wire, {"entries": batch})
                batch, size = [], 0
            batch.append(describe_entry(found.name, above + decode(found.path), found.status))
            size += weight
            count += 1
        if batch:
            yield from send_event(wire, {"entries": batch})
        return {"count": count, "skipped": walk.skipped}
    finally:
        walk.close()


def send_event(wire: Wire, event: Message) -> Pause:
    """Wait for enough credit and send an EVENT."""
    while wire.credit < EVENT_ROOM:
        yield False
    wire.event(event)
    yield True


def describe_entry(name: bytes, path: str, status: os.stat_result) -> Message:
    """Build the entry of a file as the host expects it."""
    return {
        "name": decode(name),
        "path": path,
        "kind": _KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "modified": status.st_mtime,
    }


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def describe_path(request: Message, wire: Wire, roots: Roots) -> Work:
    """Return the entry of a path. A link at its end is followed, as os.stat does."""
    yield from ()
    location = roots.locate(request.get("path"))
    try:
        parent, name = resolve(roots, location)
    except FileError as error:
        if error.code != "not_directory":
            raise
        # The path leads through a file, so there is nothing: a question whether it exists is
        # answered, and not an error.
        raise FileError("not_found", error.message, error.number) from None
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(parent)
    return describe_entry((location.root + location.names or [b"/"])[-1], location.text, status)


def resolve_real_path(request: Message, wire: Wire, roots: Roots) -> Work:
    """Return a path with all links resolved."""
    yield from ()
    return {"path": real_path(roots, roots.locate(request.get("path")))}


def make_directory(request: Message, wire: Wire, roots: Roots) -> Work:
    """Create a directory. With "parents", one that exists is accepted."""
    yield from ()
    location = roots.locate(request.get("path"))
    parents = bool(request.get("parents", True))
    parent, name = resolve(roots, location, make_parents=parents)
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
    """Remove a file, a link, or a directory, with "recursive" also one that is not empty."""
    location = roots.locate(request.get("path"))
    parent, name = resolve(roots, location, follow=False)
    try:
        if name == b".":
            raise FileError(
                "invalid", "%s itself cannot be removed, only what is in it" % location.text
            )
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
    """Send a directory with everything below it, as a tree stream (`archive`)."""
    location = roots.locate(request.get("path"))
    yield from _check_size(request, roots, location)
    walk = walk_below(roots, location)
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


def _check_size(request: Message, roots: Roots, location: Location) -> Pause:
    """Raise FileError if the tree is larger than the host accepts, before any of it is sent.

    A tree that is small here can be large on the host, where each hard link becomes a copy and each
    hole is written.
    """
    most = read_number(request, "max_bytes", MAX_OFFSET)
    entries = read_number(request, "max_entries", MAX_OFFSET)
    walk = walk_below(roots, location)
    try:
        for count, found in enumerate(walk, 1):
            if stat.S_ISREG(found.status.st_mode):
                most -= found.status.st_size
            elif not stat.S_ISDIR(found.status.st_mode):
                entries += 1  # links and special files are left out
            if most < 0:
                raise too_large_error(location, read_number(request, "max_bytes", 0))
            if count > entries:
                raise FileError(
                    "too_large", "%s has too many files to be copied" % location.text, errno.EFBIG
                )
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
    """Receive a tree stream, and move it to its path once it has arrived whole."""
    location = roots.locate(request.get("path"))
    parent, name = resolve(roots, location, make_parents=True)
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


def walk_below(roots: Roots, location: Location, recursive: bool = True) -> Walk:
    """Open a directory and return a walk over its entries. The caller has to close it."""
    parent, name = resolve(roots, location)
    try:
        top = os.open(name, DIRECTORY, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        return Walk(top, recursive)
    finally:
        os.close(top)


def operation_starter(operation: Operation) -> Callable[[Message, Wire, Message], Job]:
    """Return a function that creates the job of an operation from request, wire and setup."""
    return lambda request, wire, setup: Job(
        operation, request, wire, Roots(setup, request.get("places"))
    )


OPS: Dict[str, Callable[[Message, Wire, Message], Job]] = {
    "read": operation_starter(read),
    "write": operation_starter(write),
    "list": operation_starter(list_directory),
    "stat": operation_starter(describe_path),
    "realpath": operation_starter(resolve_real_path),
    "mkdir": operation_starter(make_directory),
    "move": operation_starter(move),
    "remove": operation_starter(remove),
    "get_tree": operation_starter(get_tree),
    "put_tree": operation_starter(put_tree),
}
