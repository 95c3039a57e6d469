"""Archives that a client uploads are unpacked inside, and what comes of them stays inside."""

from __future__ import annotations

import base64
import io
import os
import stat
import zipfile
import zlib
from pathlib import Path

import pytest
from service_process import ServiceProcess

BOMB_BYTES = 3 << 30


def of_entries(*entries: tuple[str, bytes, int]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, content)
    return written.getvalue()


def bomb() -> bytes:
    """Three gigabytes of zeros in three megabytes, as one entry."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece, checksum, packed = bytes(1 << 24), 0, []
    for _ in range(BOMB_BYTES >> 24):
        checksum = zlib.crc32(piece, checksum)
        packed.append(packer.compress(piece))
    packed.append(packer.flush())
    data = b"".join(packed)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("zeros", b"")
    small = bytearray(written.getvalue())
    directory = small.rindex(b"PK\x01\x02")
    end = small.rindex(b"PK\x05\x06")
    sizes = checksum.to_bytes(4, "little") + len(data).to_bytes(4, "little")
    sizes += BOMB_BYTES.to_bytes(4, "little")
    deflated = zipfile.ZIP_DEFLATED.to_bytes(2, "little")
    head = bytes(small[:8]) + deflated + bytes(small[10:14]) + sizes + bytes(small[26:directory])
    entry = small[directory:end]
    entry = entry[:10] + deflated + entry[12:16] + sizes + entry[28:]
    tail = small[end : 16 + end] + (len(head) + len(data)).to_bytes(4, "little") + small[end + 20 :]
    return head + data + bytes(entry) + bytes(tail)


def overlapping() -> bytes:
    """Two entries of the directory that are the same bytes of the file."""
    plain = bytearray(of_entries(("a", b"x" * 1000, 0o644), ("b", b"x" * 1000, 0o644)))
    second = plain.index(b"PK\x01\x02", plain.index(b"PK\x01\x02") + 4)
    plain[second + 42 : second + 46] = (0).to_bytes(4, "little")
    return bytes(plain)


# Inside: beside the folder that archives are unpacked into, and in the other writable place.
CANARIES = (Path("/workspace/canary"), Path("/tmp/canary"))
LINK = stat.S_IFLNK | 0o777
HOSTILE = {
    "link": lambda canary: of_entries(("out", str(canary).encode(), LINK)),
    "through a link": lambda canary: of_entries(
        ("out", str(canary.parent).encode(), LINK), (f"out/{canary.name}", b"broken", 0o644)
    ),
    "upwards": lambda canary: of_entries(("../" * 20 + str(canary)[1:], b"broken", 0o644)),
    "absolute": lambda canary: of_entries((str(canary), b"broken", 0o644)),
    "backslashes": lambda canary: of_entries(("..\\..\\..\\canary", b"broken", 0o644)),
    "setuid": lambda _: of_entries(("root", b"#!/bin/sh\n", stat.S_IFREG | 0o6777)),
    "overlapping": lambda _: overlapping(),
    "not at all": lambda _: b"PK\x03\x04" + os.urandom(400),
}


def upload(service: ServiceProcess, user: str, archive: bytes) -> dict[str, object]:
    with service.client() as client:
        content = base64.b64encode(archive).decode()
        body = {"path": "it.zip", "content": content, "encoding": "base64"}
        assert client.post(f"/sandbox/{user}/file", json=body).status_code == 200
        answer = client.post(
            f"/sandbox/{user}/unzip", json={"path": "it.zip", "destination": "out"}, timeout=120
        )
        assert answer.status_code < 500, answer.text
        return dict(answer.json())


@pytest.mark.case("F12")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_zip_reaches_nothing_of_the_host(
    kind: str, native: ServiceProcess, tmp_path: Path
) -> None:
    """Nor anything of the sandbox outside of the folder it is unpacked into. That is done inside,
    where the host's canary is not: those of the sandbox show whether it stays in its folder."""
    canary = tmp_path / "canary"
    canary.write_text("whole")
    user = f"zip-{kind.replace(' ', '-')}"
    others = set(kept_by(native))
    with native.client() as client:
        for inside in CANARIES:
            plant = {"path": str(inside), "content": "whole"}
            assert client.post(f"/sandbox/{user}/file", json=plant).status_code == 200
        for one in (canary, *CANARIES):
            upload(native, user, HOSTILE[kind](one))
        for inside in CANARIES:
            read = client.get(f"/sandbox/{user}/file", params={"path": str(inside)})
            assert read.json()["content"] == "whole", inside
        client.delete(f"/sandbox/{user}/destroy")
    assert canary.read_text() == "whole"
    (home,) = set(kept_by(native)) - others
    kept = list(home.rglob("*"))
    names = {str(path.relative_to(home)) for path in kept}
    at_the_top = {"it.zip", "canary", "out"}
    assert at_the_top - {"out"} <= names, "the upload was kept, so this looks there"
    assert {name.partition("/")[0] for name in names} <= at_the_top, names
    for path in kept:
        found = path.lstat()
        assert stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode), path
        assert not found.st_mode & 0o6000, path


def kept_by(service: ServiceProcess) -> list[Path]:
    """The folder of each user."""
    users = service.data / "users"
    return list(users.iterdir()) if users.exists() else []


@pytest.mark.case("F12")
def test_a_bomb_meets_the_limit_of_the_disk(native: ServiceProcess) -> None:
    """The host has room for it; the sandbox has not, and what is kept is no more than it held."""
    answer = upload(native, "zip-bomb", bomb())
    assert answer["success"] is False, answer
    kept = sum(path.stat().st_size for path in (native.data / "users").rglob("*") if path.is_file())
    assert kept < BOMB_BYTES / 2
    with native.client() as client:
        assert client.get("/health").status_code == 200
        client.delete("/sandbox/zip-bomb/destroy")
