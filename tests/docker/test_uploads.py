"""Files reach a container through its guest: the engine is given no archive to unpack.

An engine that unpacks a compressed one may do so with a program that it finds in the container.
"""

from __future__ import annotations

import asyncio
import gzip
import lzma
import re
import secrets
from pathlib import Path

import pytest
from container_fixtures import BACKENDS, changed
from test_elsewhere import Relay

from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

# To read one, of a container that never runs, is another thing: see image_files.py.
_GIVEN = rb"PUT /[^ ]*/archive"
UNPACKERS = ("unpigz", "pigz", "gzip", "gunzip", "xz", "unxz", "bzip2", "zstd", "unzstd", "tar")


class Recorded:
    """A reader that keeps what was read."""

    def __init__(self, reader: asyncio.StreamReader, said: list[bytes]) -> None:
        self._reader = reader
        self._said = said

    async def read(self, size: int) -> bytes:
        self._said.append(await self._reader.read(size))
        return self._said[-1]


class Witness(Relay):
    """Between a client and the engine: ``said`` is everything that the engine is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().accept(Recorded(reader, self.said), writer)  # type: ignore[arg-type]

    def saw(self, words: bytes) -> bool:
        return re.search(words, b"".join(self.said)) is not None


@pytest.mark.case("F14")
async def test_the_engine_is_never_given_an_archive(settings: Settings, tmp_path: Path) -> None:
    witness, marker = Witness(), tmp_path / "marker"
    tmp_path.chmod(0o777)  # no mode bit may be what saved it
    packed = {"x.tar.gz": gzip.compress(b"x" * 5000), "x.tar.xz": lzma.compress(b"x" * 5000)}
    (tmp_path / "given").mkdir()
    for name, content in packed.items():
        (tmp_path / "given" / name).write_bytes(content)
    server = await asyncio.start_unix_server(witness.accept, tmp_path / "sock")
    host = f"unix://{tmp_path}/sock"
    backend = BACKENDS["docker"](changed(settings, docker_host=host))
    async with Sandbox(backend, f"uploads-{secrets.token_hex(6)}") as sandbox:
        for name in UNPACKERS:
            for folder in ("/workspace", "/tmp"):
                trojan = f"{folder}/{name}"
                await sandbox.write_file(trojan, f"#!/bin/sh\ntouch /tmp/ran {marker}\n")
                await sandbox.execute(["chmod", "755", trojan])
        await sandbox.copy_to(tmp_path / "given", "given")
        for name, content in packed.items():
            await sandbox.copy_to(tmp_path / "given" / name, name)
            await sandbox.write_file(f"given/{name}", content)
            assert await sandbox.read_bytes(name) == content
        await sandbox.copy_from("given", tmp_path / "taken")
        assert {path.name for path in (tmp_path / "taken").rglob("x.*")} == set(packed)
        assert not await sandbox.exists("/tmp/ran") and not marker.exists()
        assert witness.saw(b"/containers/create") and not witness.saw(_GIVEN)
        # Docker's own command does send one; whether the engine takes it does not matter.
        name = f"paracle-sandbox-{sandbox.sandbox_id}:/workspace"
        copying = await asyncio.create_subprocess_exec(
            "docker", "-H", host, "cp", str(tmp_path / "given"), name,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await copying.wait()
        assert witness.saw(_GIVEN)
    await backend.close()
    await witness.close()
    server.close()
    await server.wait_closed()
