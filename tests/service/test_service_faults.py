"""Faults around the service: full disks, floods of output, clients that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from service_process import ServiceProcess, wait_until
from websockets.sync.client import connect

MIB = 1 << 20
LONG = bool(os.environ.get("PARACLE_LONG"))
# R24: in all a thousand clients that go away at a random moment.
VISITS = 910 if LONG else 200
HERD = 500
CROWD = 200


def resident(service: ServiceProcess) -> int:
    pages = int(Path(f"/proc/{service.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(service: ServiceProcess) -> int:
    return len(os.listdir(f"/proc/{service.pid}/fd"))


def test_a_full_disk_of_the_service_is_told_and_passes(
    tmp_path: Path, small_disk: Path, native_works: None
) -> None:
    """R12: users' files, the log and the records of sandboxes are all on it."""
    service = ServiceProcess(
        tmp_path / "s",
        SANDBOX_DATA_DIR=str(small_disk / "data"),
        PARACLE_STATE_DIR=str(small_disk / "state"),
    )
    service.data = small_disk / "data"
    service.start()
    try:
        with service.client() as client:
            first = client.post("/sandbox/ann/file", json={"path": "a", "content": "old"})
            assert first.status_code == 200
            filler = small_disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 65536)
            big = {"path": "a", "content": "n" * 500_000}
            full = client.post("/sandbox/ann/file", json=big)
            assert (full.status_code, full.json()["kind"]) == (507, "storage"), full.text
            answer = client.post("/sandbox/ann/shell", json={"command": "wc -c < a"}).json()
            assert (answer["output"].strip(), answer["files_kept"]) == ("500000", False)
            kept = next((small_disk / "data/users").glob("*/a"))
            assert kept.read_text() == "old", "the old file stays whole"
            # Who comes now is served or told, and whoever goes, goes.
            new = client.post("/sandbox/bob/shell", json={"command": "echo in"})
            told = new.json()
            assert told.get("output") == "in\n" or told["kind"] in ("storage", "creation"), told
            client.post("/sandbox/carl/create")
            for user in ("bob", "carl"):
                gone = client.delete(f"/sandbox/{user}/destroy")
                assert gone.status_code == 200, gone.text
            assert client.get("/sandboxes").json()["total"] == 1
            large = {"command": "yes | head -c 500000"}
            loud = client.post("/sandbox/ann/shell", json=large).json()
            assert loud["success"] and len(loud["output"]) <= 500_000
            for _ in range(100):  # until the last page of the log is full as well
                client.post("/sandbox/ann/shell", json={"command": "true"})
                if "paracle_audit_failures 0.0" not in client.get("/metrics").text:
                    break
            else:
                raise AssertionError("the log took it all: the disk was not full")
            filler.unlink()
            answer = client.post("/sandbox/ann/shell", json={"command": "true"}).json()
            assert answer["files_kept"] is True
            assert kept.stat().st_size == 500_000
            assert client.delete("/sandbox/ann/destroy").json()["status"] == "deleted"
            read = client.get("/sandbox/ann/file", params={"path": "a"}).json()
            assert read["size"] == 500_000
            again = client.post("/sandbox/bob/shell", json={"command": "echo again"}).json()
            assert again["output"] == "again\n"
        assert service.paracle("audit", "verify").returncode == 0
    finally:
        service.stop()


def test_floods_of_output_are_bounded(native: ServiceProcess) -> None:
    before = resident(native)
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], resident(native))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with native.client() as client, ThreadPoolExecutor(50) as pool:
            flood = {"command": "yes 0123456789abcdef", "timeout": 60}
            answers = list(
                pool.map(
                    lambda n: client.post(f"/sandbox/flood{n % 10}/shell", json=flood), range(50)
                )
            )
    finally:
        done.set()
        watcher.join()
    assert [answer.status_code for answer in answers] == [200] * 50
    told = [answer.json() for answer in answers]
    assert all(one["error_type"] == "ResourceLimitError" for one in told), told[0]["error"]
    assert all(len(one["output"]) <= 2 * MIB for one in told)
    assert peak[0] - before < 64 * MIB, f"{(peak[0] - before) // MIB} MiB more"


def test_clients_that_come_and_go_leave_nothing(native: ServiceProcess) -> None:
    chance = random.Random(7)
    with native.client() as client:
        for number in range(4):
            client.post(f"/sandbox/goer{number}/create")
        before = descriptors(native)
        parts = urlsplit(native.url)
        body = json.dumps({"command": "echo hello; sleep 30"}).encode()

        def visit(number: int) -> None:
            where = f"/sandbox/goer{number % 4}/{('shell', 'stream')[number % 2]}"
            head = (
                f"POST {where} HTTP/1.1\r\nHost: x\r\nX-API-Key: {native.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            whole = head + body
            with socket.create_connection((parts.hostname, parts.port)) as connection:
                connection.sendall(whole[: chance.randint(1, len(whole))])
                connection.settimeout(chance.random() * 0.05)
                with suppress(OSError):
                    connection.recv(100)

        def visit_by_socket(number: int) -> None:
            url = native.url.replace("http", "ws", 1) + f"/sandbox/goer{number % 4}/ws"
            with connect(url, additional_headers={"X-API-Key": native.key}) as connection:
                connection.send(body.decode())
                if number % 2:
                    connection.recv(timeout=10)
                connection.socket.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(visit, range(VISITS)))
            list(pool.map(visit_by_socket, range(VISITS // 10)))

        def running() -> int:
            usages = (client.get(f"/sandbox/goer{n}/usage").json() for n in range(4))
            return sum(usage["running_executions"] for usage in usages)

        wait_until(lambda: running() == 0, 60)
        wait_until(lambda: descriptors(native) <= before + 4, 60)
        for number in range(4):
            look = {"command": "cat /proc/[0-9]*/comm"}
            seen = client.post(f"/sandbox/goer{number}/shell", json=look).json()["output"]
            assert "sleep" not in seen


async def herd(service: ServiceProcess, users: list[str]) -> list[httpx2.Response]:
    """All of them at once, each on a connection of its own."""
    async with httpx2.AsyncClient(
        base_url=service.url, headers={"X-API-Key": service.key}, timeout=120,
        limits=httpx2.Limits(max_connections=len(users)),
    ) as client:  # fmt: skip
        return await asyncio.gather(*(client.post(f"/sandbox/{user}/create") for user in users))


@pytest.mark.clock
async def test_a_herd_is_served_or_told_to_come_back(tmp_path: Path, native_works: None) -> None:
    """R27: five hundred at once, then once more while what runs takes all of the CPU."""
    service = ServiceProcess(
        tmp_path / "herd", SANDBOX_MAX_CONTAINERS="20", SANDBOX_DOCKER_CPU="2"
    ).start()
    try:
        made = await herd(service, [f"herd{number}" for number in range(HERD)])
        codes = [answer.status_code for answer in made]
        assert codes.count(200) == 20 and codes.count(503) == HERD - 20, set(codes)
        assert all("retry-after" in a.headers for a in made if a.status_code == 503)
        inside = [f"herd{number}" for number, code in enumerate(codes) if code == 200]
        with service.client() as client:
            for user in inside[:4]:
                loop = {"command": "while :; do :; done", "timeout": 120}
                assert client.post(f"/sandbox/{user}/commands", json=loop).status_code == 201
            # Those that are in are served, whatever the rest does; the time of a program begins
            # with the program.
            again = await herd(service, inside + [f"late{number}" for number in range(HERD // 5)])
            assert [answer.status_code for answer in again[:20]] == [200] * 20
            assert {answer.status_code for answer in again[20:]} == {503}
            for user in inside[-4:]:
                answer = client.post(
                    f"/sandbox/{user}/shell", json={"command": "echo y", "timeout": 5}
                ).json()
                assert answer["output"] == "y\n", answer
            client.delete(f"/sandbox/{inside[-1]}")
            assert client.post("/sandbox/next/create").status_code == 200
    finally:
        service.stop()


async def test_two_hundred_users_at_once(tmp_path: Path, native_works: None) -> None:
    """Each makes a sandbox, runs, reads a file and leaves; one reader that stopped reading does
    not keep them from it. Nothing fails, and nothing is left."""
    service = ServiceProcess(tmp_path / "crowd", SANDBOX_MAX_CONTAINERS="250").start()
    try:
        before = descriptors(service)
        with lazy_reader(service):
            async with httpx2.AsyncClient(
                base_url=service.url, headers={"X-API-Key": service.key}, timeout=120,
                limits=httpx2.Limits(max_connections=CROWD),
            ) as client:  # fmt: skip
                await asyncio.gather(*(visitor(client, f"user{n}") for n in range(CROWD)))
                assert (await client.get("/sandboxes")).json()["total"] == 1, "the lazy one's"
        with service.client() as client:
            wait_until(lambda: client.delete("/sandbox/lazy/destroy").status_code == 200, 30)
            assert client.get("/sandboxes").json()["total"] == 0
        wait_until(lambda: descriptors(service) <= before + 4, 60)
        listed = json.loads(service.paracle("sandbox", "list", "--json").stdout)
        assert (listed["sandboxes"] if isinstance(listed, dict) else listed) == []
    finally:
        service.stop()


async def visitor(client: httpx2.AsyncClient, user: str) -> None:
    where = f"/sandbox/{user}"
    made = await client.post(f"{where}/create")
    assert made.status_code == 200, made.text
    code = f"open('f', 'w').write({user!r}); print({user!r})"
    ran = await client.post(f"{where}/execute", json={"code": code, "timeout": 120})
    assert (ran.status_code, ran.json()["output"]) == (200, f"{user}\n"), ran.text
    read = await client.get(f"{where}/file", params={"path": "f"})
    assert read.json()["content"] == user, read.text
    gone = await client.delete(f"{where}/destroy")
    assert gone.json()["status"] == "deleted", gone.text


@contextmanager
def lazy_reader(service: ServiceProcess) -> Iterator[None]:
    """It asks for a stream without end and reads none of it."""
    parts = urlsplit(service.url)
    body = json.dumps({"command": "yes", "timeout": 300}).encode()
    head = (
        f"POST /sandbox/lazy/stream HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        yield
