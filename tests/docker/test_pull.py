"""A missing image is pulled once, whoever asks for it and however many do."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import logging
import os
import subprocess
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

import engines
from paracle_sandbox.backends.docker import engine
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.images import Images
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.settings import Settings


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


class Registry:
    """The little of a registry that a pull needs: one image, and a count of who asked for it."""

    def __init__(self) -> None:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            entry = tarfile.TarInfo("file")
            entry.size = 4 << 20
            tar.addfile(entry, io.BytesIO(os.urandom(4 << 20)))
        packed = gzip.compress(layer.getvalue())
        config = json.dumps(
            {"architecture": "amd64", "os": "linux", "config": {},
             "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]}}
        ).encode()  # fmt: skip
        kind = "application/vnd.docker.container.image.v1+json"
        layer_kind = "application/vnd.docker.image.rootfs.diff.tar.gzip"
        self.manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST,
             "config": {"mediaType": kind, "size": len(config), "digest": _digest(config)},
             "layers": [{"mediaType": layer_kind, "size": len(packed), "digest": _digest(packed)}]}
        ).encode()  # fmt: skip
        self.blobs = {_digest(config): config, _digest(packed): packed}
        self.asked: Counter[str] = Counter()
        self.is_quick = threading.Event()
        self.is_quick.set()


MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@contextlib.contextmanager
def serving(registry: Registry) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            content, kind = b"{}", "application/json"
            if "/manifests/" in self.path:
                content, kind = registry.manifest, MANIFEST
            elif "/blobs/" in self.path:
                registry.is_quick.wait(60)
                name = self.path.rpartition("/")[2]
                registry.asked[name] += self.command == "GET"
                content, kind = registry.blobs[name], "application/octet-stream"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Docker-Content-Digest", _digest(content))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_many_who_want_it_share_one_pull(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """B8, between the tasks of one process and between processes, which share a lock file."""
    registry = Registry()
    backends = [DockerBackend(settings) for _ in range(2)]
    with serving(registry) as address, caplog.at_level(logging.INFO):
        image = f"{address}/paracle-test/pulled:1"
        try:
            pulls = [Images(b.engine, settings.state_dir) for b in backends]
            await asyncio.gather(*(pulls[n % 2].fetch(image) for n in range(10)))
            assert await backends[0].engine.has_image(image)
        finally:
            env = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
            subprocess.run(["docker", "rmi", image], env=env, capture_output=True, check=False)
    assert set(registry.asked.values()) == {1}, "each part was fetched once"
    assert sum("pulling the image" in record.message for record in caplog.records) == 1
    for backend in backends:
        await backend.close()


async def test_a_pull_that_fails_is_tried_again_by_the_next(settings: Settings) -> None:
    """R23: a registry that is down."""
    backend = DockerBackend(settings)
    images = Images(backend.engine, settings.state_dir)
    for _ in range(2):
        with pytest.raises(SandboxCreationError, match="Image not found: 127.0.0.1:1/x/y:1"):
            await images.fetch("127.0.0.1:1/x/y:1")
    await backend.close()


async def test_a_pull_that_never_ends_is_given_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23: a registry that begins and does not go on. Whoever creates a sandbox is told, of the
    registry and not of the engine, and no container is left; once it goes on, the same works."""
    monkeypatch.setattr(engine, "PULL_SECONDS", 1.0)
    registry, backend = Registry(), DockerBackend(settings)
    registry.is_quick.clear()
    with serving(registry) as address:
        image = f"{address}/paracle-test/slow:1"
        try:
            with pytest.raises(SandboxCreationError) as late:
                await backend.create("slow-pull", SandboxConfig(base_image=image), {})
            assert f"Image not found: {image}" in late.value.message
            assert "did not come within 1 seconds" in late.value.message
            assert f"docker pull {image}" in late.value.message
            assert await backend.list_sandboxes() == []
            assert not await backend.engine.has_image(image)
            registry.is_quick.set()
            monkeypatch.setattr(engine, "PULL_SECONDS", 60.0)
            await Images(backend.engine, settings.state_dir).fetch(image)
            assert await backend.engine.has_image(image)
        finally:
            registry.is_quick.set()
            env = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
            subprocess.run(["docker", "rmi", image], env=env, capture_output=True, check=False)
    await backend.close()


OURS = [
    "paracle/nobodys:1",
    "paracle/nobodys",
    "docker.io/paracle/nobodys:1",
    "localhost/paracle/x",
]


async def test_our_images_are_asked_of_no_public_registry(settings: Settings) -> None:
    """Their names are nobody's there. The engine is not asked to pull: it would not say this."""
    backend = DockerBackend(settings)
    images = Images(backend.engine, settings.state_dir)
    for image in OURS:
        with pytest.raises(SandboxCreationError) as refused:
            await images.ensure(image)
        assert "DOCKER_SANDBOX_REGISTRY names no registry" in refused.value.message
        assert "paracle image build" in refused.value.message
    await backend.close()


async def test_our_images_come_from_a_registry_that_is_configured(settings: Settings) -> None:
    registry, image = Registry(), "paracle/only-for-this-test:2"
    backend = DockerBackend(settings)
    with serving(registry) as address:
        try:
            found = await Images(backend.engine, settings.state_dir, f"{address}/team/").ensure(
                image
            )
            assert {image, f"{address}/team/{image}"} == set(found["RepoTags"])
        finally:
            env = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
            command = ["docker", "rmi", image, f"{address}/team/{image}"]
            subprocess.run(command, env=env, capture_output=True, check=False)
    assert set(registry.asked.values()) == {1}
    await backend.close()
