"""Routes for users' files: small ones as JSON, large ones raw."""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
import posixpath
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import islice
from operator import itemgetter
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from ...results import FileInfo
from ...sandbox.outcome import MIB
from ..errors import BadRequest, NotFound, OutOfRange, TooLarge
from ..schemas import (
    DirectoryRequest,
    DoneAnswer,
    ExecutionAnswer,
    ExistsAnswer,
    FileAnswer,
    FileEntry,
    FilesAnswer,
    UnzipRequest,
    WriteRequest,
)
from ..users.executions import Program
from ..users.spool import HeldText
from ..users.user_sandboxes import UserSandbox
from .dependencies import (
    FilePath,
    Limit,
    Offset,
    TheService,
    TheUser,
    next_offset,
    while_connected,
)
from .escaped_paths import escape, is_odd, show, unescape
from .sandboxes import to_response
from .strict_json import StrictRoute
from .unzip_program import UNPACK

router = APIRouter(tags=["files"], route_class=StrictRoute)

# Larger files do not fit into a JSON answer; they are for /files/raw.
MAX_INLINE = 4 * MIB
_SORTED_AT_ONCE = 5_000
_BY_PATH = itemgetter("path")
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_RANGE = re.compile(r"(\d{0,18})-(\d{0,18})\Z")


@router.get("/sandbox/{user_id}/file", response_model=FileAnswer)
async def read_file(service: TheService, user: TheUser, path: FilePath) -> Response:
    """A file as text, or as base64 when it is none."""

    async def read(owned: UserSandbox) -> bytes:
        info = await _file(owned, path)
        if info["size"] > MAX_INLINE:
            raise TooLarge(f"{show(path)} is larger than {MAX_INLINE} bytes: use files/raw")
        return await owned.sandbox.read_bytes(path, max_bytes=MAX_INLINE)

    content = await service.sandboxes.read(user, read)
    service.journal.record("read_file", user=user, path=show(path), size=len(content))
    try:
        text, encoding = content.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        text, encoding = base64.b64encode(content).decode(), "base64"
    held = HeldText.of(text)
    return to_response(
        {"path": show(path), "content": held, "encoding": encoding, "size": len(content)}
    )


@router.post("/sandbox/{user_id}/file", response_model=DoneAnswer)
async def write_file(service: TheService, user: TheUser, body: WriteRequest) -> dict[str, Any]:
    """Write a file, with the directories it needs: whole, or not at all."""
    content = _decode(body)
    async with service.sandboxes.using(user) as owned:
        await owned.sandbox.write_file(body.path, content)
        await service.sandboxes.keep(owned)
    service.journal.record("write_file", user=user, path=body.path, size=len(content))
    return {"output": f"Written {len(content)} bytes to {body.path}"}


@router.delete("/sandbox/{user_id}/file", response_model=DoneAnswer)
async def remove_file(
    service: TheService, user: TheUser, path: FilePath, recursive: bool = False
) -> dict[str, Any]:
    """Remove a file or an empty directory; any directory with recursive."""
    async with service.sandboxes.using(user) as owned:
        await owned.sandbox.remove(path, recursive)
        await service.sandboxes.keep(owned)
    service.journal.record("remove_file", user=user, path=show(path))
    return {"output": f"Removed {show(path)}"}


@router.get("/sandbox/{user_id}/files", response_model=FilesAnswer)
async def list_files(
    service: TheService,
    user: TheUser,
    path: Annotated[str, Query(min_length=1, max_length=4096)] = "/workspace",
    escaped_: Annotated[bool, Query(alias="escaped")] = False,
    recursive: bool = False,
    offset: Offset = 0,
    limit: Limit = 1000,
) -> dict[str, Any]:
    """List a directory, sorted by path, page by page. A path with bytes that are not UTF-8
    is escaped, and says so; to name it in a request, send it as it is with escaped=true."""
    path = unescape(path) if escaped_ else path
    entries = await service.sandboxes.read(
        user, lambda owned: owned.sandbox.list_files(path, recursive)
    )
    service.journal.record("list_files", user=user, path=show(path))
    page = await _page(entries, offset, limit)
    return {
        "path": show(path),
        "files": [_entry(entry) for entry in page],
        "total": len(entries),
        "next_offset": next_offset(offset, limit, len(entries)),
    }


@router.get("/sandbox/{user_id}/stat", response_model=FileEntry)
async def stat(service: TheService, user: TheUser, path: FilePath) -> dict[str, Any]:
    """Describe a path, with links followed; 404 when nothing is there."""
    info = await service.sandboxes.read(user, lambda owned: owned.sandbox.stat(path))
    service.journal.record("list_files", user=user, path=show(path))
    return _entry(info)


@router.get("/sandbox/{user_id}/exists", response_model=ExistsAnswer)
async def exists(service: TheService, user: TheUser, path: FilePath) -> dict[str, Any]:
    """Whether there is such a file or directory."""
    there = await service.sandboxes.read(user, lambda owned: owned.sandbox.exists(path))
    service.journal.record("list_files", user=user, path=show(path))
    return {"path": show(path), "exists": there}


@router.post("/sandbox/{user_id}/mkdir", response_model=DoneAnswer)
async def make_directory(
    service: TheService, user: TheUser, body: DirectoryRequest
) -> dict[str, Any]:
    """Make a directory; with parents the missing ones above it, and it may exist."""
    async with service.sandboxes.using(user) as owned:
        await owned.sandbox.mkdir(body.path, body.parents)
        await service.sandboxes.keep(owned)
    service.journal.record("write_file", user=user, path=body.path, size=0)
    return {"output": f"Made {body.path}"}


@router.put(
    "/sandbox/{user_id}/files/raw",
    response_model=DoneAnswer,
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def upload(
    request: Request, service: TheService, user: TheUser, path: FilePath
) -> dict[str, Any]:
    """Write the body to a file, of any size the disk has room for."""
    async with service.sandboxes.using(user) as owned:
        size = await owned.sandbox.write_stream(path, request.stream())
        await service.sandboxes.keep(owned)
    service.journal.record("write_file", user=user, path=show(path), size=size)
    return {"output": f"Written {size} bytes to {show(path)}"}


@router.get(
    "/sandbox/{user_id}/files/raw",
    response_class=Response,
    responses={
        200: {"content": _BYTES},
        206: {"content": _BYTES, "description": "A part of the file"},
    },
)
async def download(
    service: TheService,
    user: TheUser,
    path: FilePath,
    range_: str | None = Header(None, alias="range", max_length=100),
) -> Response:
    """The exact bytes of a file, or the part that a Range header asks for."""
    stack = AsyncExitStack()
    owned = await stack.enter_async_context(service.sandboxes.using(user))
    try:
        info = await _file(owned, path)
        part = _part(range_, info["size"])
    except BaseException:
        await stack.aclose()
        raise
    start, length = part or (0, info["size"])
    service.journal.record("read_file", user=user, path=show(path), size=length)
    headers = _headers(path, length)
    if part is not None:
        headers["content-range"] = f"bytes {start}-{start + length - 1}/{info['size']}"
    return StreamingResponse(
        _pieces(stack, owned, path, start, length),
        206 if part is not None else 200,
        headers,
        "application/octet-stream",
    )


@router.head("/sandbox/{user_id}/files/raw", include_in_schema=False)
async def look(service: TheService, user: TheUser, path: FilePath) -> Response:
    """Describe a download without making it."""
    info = await service.sandboxes.read(user, lambda owned: _file(owned, path))
    headers = _headers(path, info["size"])
    return Response(headers=headers, media_type="application/octet-stream")


def _headers(path: str, length: int) -> dict[str, str]:
    return {
        "content-length": str(length),
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{_file_name(path)}",
    }


async def _pieces(
    stack: AsyncExitStack, owned: UserSandbox, path: str, start: int, length: int
) -> AsyncIterator[bytes]:
    async with stack:
        async for piece in owned.sandbox.read_stream(path, offset=start, length=length):
            yield piece


@router.post("/sandbox/{user_id}/unzip", response_model=ExecutionAnswer)
async def unzip(
    request: Request, service: TheService, user: TheUser, body: UnzipRequest
) -> Response:
    """Unpack a zip, tar or gzip archive of the sandbox, inside it."""
    program = Program("python", UNPACK, 300, args=(body.path, body.destination or ""))
    return to_response(await while_connected(request, service.runner.run(user, program)))


async def _page(entries: list[FileInfo], offset: int, limit: int) -> list[FileInfo]:
    """Return one page of the entries, by path. There may be a hundred thousand, and sorting them at
    once would hold the event loop, also from a thread, because it holds the interpreter's lock.
    So they are sorted in parts and merged, and other tasks run in between."""
    parts = []
    for start in range(0, len(entries), _SORTED_AT_ONCE):
        parts.append(sorted(entries[start : start + _SORTED_AT_ONCE], key=_BY_PATH))
        await asyncio.sleep(0)
    if len(parts) < 2:
        return entries and parts[0][offset : offset + limit]
    page = []
    merged = islice(heapq.merge(*parts, key=_BY_PATH), offset + limit)
    for number, entry in enumerate(merged):
        if number >= offset:
            page.append(entry)
        if number % _SORTED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return page


async def _file(owned: UserSandbox, path: str) -> FileInfo:
    info = await owned.sandbox.stat(path)
    if info["kind"] != "file":
        raise NotFound(f"{show(path)} is not a file")
    return info


def _decode(body: WriteRequest) -> bytes:
    if body.encoding == "utf-8":
        return body.content.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(body.content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"The content is not base64: {error}") from None


def _entry(info: FileInfo) -> dict[str, Any]:
    entry = {**info, "is_dir": info["kind"] == "directory"}
    if is_odd(info["path"]):
        entry.update(path=escape(info["path"]), name=escape(info["name"]), escaped=True)
    return entry


def _file_name(path: str) -> str:
    """Quote the name, so that it cannot add a header or hide its ending."""
    return quote(posixpath.basename(path)[:200], safe="", errors="replace")


def _part(text: str | None, size: int) -> tuple[int, int] | None:
    """Return offset and length of one range; None for all, also where the unit is unknown. Raises
    OutOfRange."""
    unit, _, asked = (text or "").partition("=")
    if unit.strip().lower() != "bytes":
        return None
    match = _RANGE.match(asked)
    if match is None or match.groups() == ("", ""):
        raise OutOfRange("Ask for one range of bytes: bytes=0-99, bytes=100- or bytes=-50", size)
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= end:
        raise OutOfRange(f"The file has {size} bytes; nothing lies in {text}", size)
    return start, end - start
