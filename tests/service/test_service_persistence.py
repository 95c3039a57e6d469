"""Users' files outlive their sandboxes, the service, and the service's violent end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from service_process import ServiceProcess, wait_until

from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.service.users.kept_files import Workspace, Workspaces
from paracle_sandbox.testing.fake import FakeBackend

Make = Callable[..., ServiceProcess]
LOOPS = 20
DEAD_SECONDS = 2.0
RUNNING = 50
ENDS_SECONDS = 10.0


@pytest.fixture
def make(tmp_path: Path, native_works: None) -> Iterator[Make]:
    made: list[ServiceProcess] = []

    def make(**variables: str) -> ServiceProcess:
        made.append(ServiceProcess(tmp_path / "service", **variables))
        return made[-1].start()

    yield make
    for process in made:
        process.stop()


def records(service: ServiceProcess) -> list[dict[str, object]]:
    """The sandboxes that the machine knows of this service."""
    found = json.loads(service.paracle("sandbox", "list", "--json").stdout)
    return list(found["sandboxes"] if isinstance(found, dict) else found)


def write(client: httpx2.Client, user: str, path: str, content: str) -> None:
    done = client.post(f"/sandbox/{user}/file", json={"path": path, "content": content})
    assert done.status_code == 200, done.text


def read(client: httpx2.Client, user: str, path: str) -> str:
    return str(client.get(f"/sandbox/{user}/file", params={"path": path}).json()["content"])


def test_files_survive_a_restart(make: Make) -> None:
    first = make()
    with first.client() as client:
        write(client, "ann", "dir/file.txt", "by hand")
        script = "echo by program > out.txt; mkdir -p empty; printf x > run.sh; chmod 755 run.sh"
        client.post("/sandbox/ann/shell", json={"command": script})
        write(client, "bob", "file.txt", "bob's")
    assert first.stop() == -signal.SIGTERM
    assert records(first) == []
    second = make()
    second.key = first.key
    with second.client() as client:
        look = {
            "command": "cat dir/file.txt out.txt; ls -d empty; test -x run.sh && echo executable"
        }
        answer = client.post("/sandbox/ann/shell", json=look).json()
        assert answer["output"] == "by handby program\nempty\nexecutable\n", answer
        assert read(client, "bob", "file.txt") == "bob's"
        client.post("/sandbox/ann/shell", json={"command": "rm -r dir; rm out.txt; mkdir out.txt"})
        client.delete("/sandbox/ann")
        listed = client.get("/sandbox/ann/files").json()["files"]
        assert sorted((one["name"], one["kind"]) for one in listed) == [
            ("empty", "directory"), ("out.txt", "directory"), ("run.sh", "file"),
        ]  # fmt: skip


@pytest.mark.clock
def test_a_killed_service_leaves_files_and_nothing_else(make: Make) -> None:
    """R01: twenty sandboxes in endless loops are dead within two seconds, and nothing is left."""
    users = ["ann", *(f"u{number}" for number in range(1, LOOPS))]
    mark = f"loop-{secrets.token_hex(8)}"
    # Each loop has a tenth of a core: the machine has other things to do than to spin.
    first = make(SANDBOX_MAX_CONTAINERS="30", SANDBOX_DOCKER_CPU="0.1")
    with first.client() as client:
        write(client, "ann", "kept.txt", "here")
        client.post("/sandbox/ann/shell", json={"command": "echo more > more.txt"})
        for user in users:
            loop = {"command": f"while :; do :; done # {mark}"}
            assert client.post(f"/sandbox/{user}/commands", json=loop).status_code == 201
        assert len(records(first)) == LOOPS
    wait_until(lambda: len(_processes_with(mark)) >= LOOPS, 20)
    first.kill()
    killed = time.monotonic()
    # Without anybody's help: the kernel and the spawner see to it.
    while left := _processes_with(mark):
        assert time.monotonic() - killed < DEAD_SECONDS, left
    wait_until(lambda: not _busy(first), 10)
    second = make()
    second.key = first.key
    assert records(second) == []
    with second.client() as client:
        assert client.get("/sandboxes").json()["total"] == 0
        assert read(client, "ann", "kept.txt") == "here"
        assert read(client, "ann", "more.txt") == "more\n"
    assert second.paracle("audit", "verify").returncode == 0


def _busy(service: ServiceProcess) -> list[int]:
    """Processes with this service's state directory in their command line."""
    return _processes_with(str(service.home))


def _processes_with(text: str) -> list[int]:
    """Those whose command line has it; not those that have ended and wait for their parent."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and text.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def test_a_kill_during_writes_leaves_every_file_whole(make: Make) -> None:
    service = make()
    sizes = (200_000, 300_000)
    contents = {letter * size for letter, size in zip("ab", sizes, strict=True)}
    enough = threading.Event()

    def hammer(name: str) -> None:
        with service.client() as client, suppress(httpx2.HTTPError):
            for number in range(1000):
                content = "ab"[number % 2] * sizes[number % 2]
                write(client, "ann", name, content)
                if number == 3:
                    enough.set()

    threads = [threading.Thread(target=hammer, args=(f"f{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    assert enough.wait(60)
    service.kill()
    for thread in threads:
        thread.join()
    again = make()
    again.key = service.key
    with again.client() as client:
        listed = client.get("/sandbox/ann/files", params={"recursive": True}).json()["files"]
        assert listed and all(not one["name"].startswith(".paracle-") for one in listed)
        for one in listed:
            assert read(client, "ann", one["name"]) in contents
    left = list((again.data / "users").rglob(".paracle-*"))
    assert left == []


def test_idle_sandboxes_go_and_their_files_stay(make: Make) -> None:
    service = make(SANDBOX_DOCKER_TIMEOUT="1")
    with service.client() as client:
        write(client, "ann", "kept.txt", "here")
        wait_until(lambda: client.get("/sandbox/ann/status").status_code == 404, 30)
        assert records(service) == []
        assert read(client, "ann", "kept.txt") == "here"
        long = {"command": "sleep 4; echo survived"}
        assert client.post("/sandbox/ann/shell", json=long).json()["output"] == "survived\n"
        assert 'reason="idle"' in client.get("/metrics").text


def test_a_sandbox_that_dies_is_replaced_and_the_caller_is_told(make: Make) -> None:
    service = make()
    with service.client() as client:
        write(client, "ann", "kept.txt", "here")
        client.post("/sandbox/ann/shell", json={"command": "echo gone > /tmp/gone"})
        before = client.get("/sandbox/ann/status").json()
        _kill_sandbox(service)
        wait_until(lambda: client.get("/sandbox/ann/status").json()["status"] == "lost", 20)
        answer = client.post(
            "/sandbox/ann/shell", json={"command": "cat kept.txt; ls /tmp/gone"}
        ).json()
        assert (answer["output"], answer["recreated"]) == ("here", True)
        assert client.get("/sandbox/ann/status").json()["created_at"] >= before["created_at"]
        again = client.post("/sandbox/ann/shell", json={"command": "true"}).json()
        assert again["recreated"] is False
    log = service.paracle("audit", "show", "--json").stdout
    assert '"event": "sandbox_lost"' in log


def test_a_sandbox_that_dies_under_a_program_is_told(make: Make) -> None:
    service = make()
    with service.client() as client, service.client() as other:
        answers: list[dict[str, object]] = []

        def run() -> None:
            body = {"command": "echo begun > mark; sleep 100"}
            answers.append(client.post("/sandbox/ann/shell", json=body).json())

        thread = threading.Thread(target=run)
        thread.start()
        mark = {"path": "mark"}
        wait_until(lambda: other.get("/sandbox/ann/file", params=mark).status_code == 200, 30)
        _kill_sandbox(service)
        thread.join(30)
        (answer,) = answers
        assert (answer["success"], answer["kind"], answer["state_lost"]) == (
            False, "sandbox_lost", True,
        )  # fmt: skip


def _kill_sandbox(service: ServiceProcess) -> None:
    """The first process of the only sandbox, as an administrator might."""
    for path in (service.home / "state").glob("*.json"):
        content = json.loads(path.read_text().splitlines()[-1])
        if str(content.get("id", "")).startswith("u-"):
            os.kill(content["init"]["pid"], signal.SIGKILL)
            return
    raise AssertionError("there is no sandbox")


@pytest.mark.clock
def test_sigterm_ends_running_programs_with_a_definite_answer(make: Make) -> None:
    """R05: with fifty of them, within ten seconds."""
    service = make(SANDBOX_MAX_CONTAINERS="60")
    outcomes: list[object] = []

    def run(number: int) -> None:
        with service.client() as client:
            try:
                answer = client.post(f"/sandbox/u{number}/shell", json={"command": "sleep 200"})
                outcomes.append((answer.status_code, answer.json().get("success", False)))
            except httpx2.HTTPError as error:
                outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(RUNNING)]
    for thread in threads:
        thread.start()
    with service.client() as client:
        usages = [f"/sandbox/u{n}/usage" for n in range(RUNNING)]
        wait_until(
            lambda: all(client.get(path).json()["running_executions"] == 1 for path in usages), 60
        )
        wait_until(lambda: client.get("/sandboxes").json()["total"] == RUNNING, 60)
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < ENDS_SECONDS
    for thread in threads:
        thread.join(30)
    # Each gets an answer; 503 if its sandbox was still being made.
    assert len(outcomes) == RUNNING
    assert set(outcomes) <= {(200, False), (503, False)}, outcomes
    assert records(service) == []
    assert not _busy(service)


def test_a_full_disk_of_the_sandbox_is_an_answer(make: Make) -> None:
    service = make(SANDBOX_DOCKER_DISK="256m")
    with service.client() as client:
        command = {"command": "head -c 400000000 /dev/zero > big; echo after"}
        client.post("/sandbox/ann/shell", json=command)
        body = b"x" * (1 << 20)
        full = client.put("/sandbox/ann/files/raw", params={"path": "more"}, content=body * 8)
        assert full.status_code in (507, 200)
        client.post("/sandbox/ann/shell", json={"command": "rm -f big more"})
        assert client.post("/sandbox/ann/shell", json={"command": "echo ok"}).json()["success"]


async def test_only_what_changed_is_copied(tmp_path: Path) -> None:
    backend = FakeBackend()
    workspace = Workspaces(tmp_path).get("w")
    async with Sandbox(backend, "one") as sandbox:
        await workspace.restore(sandbox)
        await sandbox.write_file("a", "1")
        await sandbox.write_file("d/b", "2")
        await workspace.save(sandbox)
        kept = (workspace.directory / "a").stat().st_ino
        await sandbox.write_file("d/b", "22")
        await workspace.save(sandbox)
        assert (workspace.directory / "a").stat().st_ino == kept
        assert (workspace.directory / "d/b").read_text() == "22"
        await sandbox.remove("d", recursive=True)
        await sandbox.execute(["ln", "-s", "/etc/passwd", "link"])
        await workspace.save(sandbox)
        assert [path.name for path in workspace.directory.iterdir()] == ["a"]
    fresh = Workspace(workspace.directory)
    async with Sandbox(backend, "two") as sandbox:
        await fresh.restore(sandbox)
        assert await sandbox.read_file("a") == "1"
        assert not await sandbox.exists("link")
    await backend.close()


async def test_many_files_are_kept_too(tmp_path: Path) -> None:
    backend = FakeBackend()
    workspace = Workspaces(tmp_path).get("w")
    async with Sandbox(backend, "many") as sandbox:
        await workspace.restore(sandbox)
        await sandbox.execute("mkdir d; for i in $(seq 300); do echo $i > d/$i; done")
        await workspace.save(sandbox)
    assert {path.name for path in (workspace.directory / "d").iterdir()} == {
        str(number) for number in range(1, 301)
    }
    await backend.close()


def test_two_services_do_not_share_a_directory(fake: ServiceProcess) -> None:
    done = fake.paracle("serve")
    assert done.returncode == 3
    assert "SANDBOX_DATA_DIR" in done.stderr


def test_what_an_abandoned_program_wrote_is_kept(make: Make) -> None:
    service = make()
    with service.client() as client:
        client.post("/sandbox/ann/create")
        body = {"command": "echo half > half.txt; echo up; sleep 300"}
        with client.stream("POST", "/sandbox/ann/stream", json=body) as answer:
            lines = answer.iter_lines()
            while "stdout" not in next(lines):
                pass
        kept = service.data / "users"
        wait_until(lambda: bool(list(kept.glob("*/half.txt"))), 30)
        assert next(kept.glob("*/half.txt")).read_text() == "half\n"


def test_idempotency_keys_survive_a_restart(make: Make) -> None:
    first = make()
    body = {"command": "echo run >> log; wc -l < log"}
    headers = {"Idempotency-Key": "once"}
    with first.client() as client:
        answer = client.post("/sandbox/ann/shell", json=body, headers=headers)
        assert answer.json()["output"].strip() == "1"
        secret = client.post("/keys", json={"admin": True}, headers=headers).json()["key"]
    first.stop()
    second = make()
    second.key = first.key
    with second.client() as client:
        again = client.post("/sandbox/ann/shell", json=body, headers=headers)
        assert (again.status_code, again.json()) == (200, answer.json())
        assert read(client, "ann", "log") == "run\n"
        other = client.post("/sandbox/ann/shell", json={"command": "true"}, headers=headers)
        assert other.status_code == 422
        fresh = client.post("/sandbox/bob/shell", json=body, headers=headers)
        assert fresh.json()["output"].strip() == "1", "another address is another request"
    for path in second.data.glob("answers.db*"):
        assert path.stat().st_mode & 0o077 == 0
        assert secret.split("_", 2)[2].encode() not in path.read_bytes()


@pytest.mark.case("N14")
def test_what_was_under_way_when_the_service_was_killed_is_not_run_again(make: Make) -> None:
    first = make()
    body = {"command": "echo run >> log; echo begun > mark; sleep 200"}
    headers = {"Idempotency-Key": "half"}

    def send() -> None:
        with first.client() as client, suppress(httpx2.HTTPError):
            client.post("/sandbox/ann/shell", json=body, headers=headers)

    thread = threading.Thread(target=send)
    thread.start()
    with first.client() as client:
        mark = {"path": "mark"}
        wait_until(lambda: client.get("/sandbox/ann/file", params=mark).status_code == 200, 30)
    first.kill()
    thread.join(30)
    second = make()
    second.key = first.key
    with second.client() as client:
        again = client.post("/sandbox/ann/shell", json=body, headers=headers)
        assert (again.status_code, again.json()["kind"]) == (409, "unknown_outcome")
        fresh = client.post(
            "/sandbox/ann/shell", json={"command": "true"}, headers={"Idempotency-Key": "new"}
        )
        assert fresh.json()["success"]
