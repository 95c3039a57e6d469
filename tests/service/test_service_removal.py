"""A sandbox can always be removed, whatever runs in it, and no other waits for it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from service_place import HEADER, Place
from service_process import ServiceProcess, wait_until

FILES = 6_000
LOOPS = 120
# It starves the guest of a sandbox with a tenth of a processor: to list these files then takes it
# minutes. Nobody spins before all are there. The marker is in the command line of each of them,
# which the host can read.
ATTACK = f"""
import os
for number in range({FILES}):
    os.mkdir(str(number))
gate, latch = os.pipe()
for number in range({LOOPS}):
    if os.fork() == 0:
        os.close(latch)
        os.read(gate, 1)
        while True:
            pass
os.mkdir("up")
os.close(latch)
os.read(gate, 1)
"""


@asynccontextmanager
async def started(directory: Path, **settings: Any) -> AsyncIterator[Place]:
    place = Place(directory, **settings)
    await place.service.start()
    try:
        yield place
    finally:
        for user in ("ann", "bob"):
            with suppress(Exception):
                place.backend.kill_guest(place.service.sandboxes.sandbox_id(user))
        await place.close()


def destroyed(place: Place, user: str) -> int:
    """How often that user's sandbox was."""
    return place.backend.destroyed.count(place.service.sandboxes.sandbox_id(user))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_guest_that_does_not_answer_is_destroyed_and_the_loss_is_told(
    tmp_path: Path,
) -> None:
    async with started(tmp_path, save_timeout=0.3) as place:
        await place.shell("echo 1 > kept")
        place.freeze("ann")
        gone = await place.client.delete("/sandbox/ann")
        assert gone.json() == {"status": "deleted", "files_preserved": True, "files_kept": False}
        assert destroyed(place, "ann") == 1
        again = await place.client.post("/sandbox/ann/shell", json={"command": "cat kept"})
        assert again.headers[HEADER] == "true" and again.json()["output"] == "1\n"


async def test_idle_sandboxes_are_removed_while_another_does_not_answer(tmp_path: Path) -> None:
    async with started(tmp_path, save_timeout=600, service_idle_timeout=0.2) as place:
        await place.client.post("/sandbox/ann/create")
        place.freeze("ann")
        ann = place.service.sandboxes.find("ann")
        assert ann is not None
        await until(lambda: ann.leaving is not None)
        await place.client.post("/sandbox/bob/shell", json={"command": "echo 1 > kept"})
        bob = place.service.sandboxes.sandbox_id("bob")
        await until(lambda: bob in place.backend.destroyed)
        assert not ann.leaving.done() if ann.leaving else False


async def test_who_asks_while_a_sandbox_is_removed_gets_the_next(tmp_path: Path) -> None:
    async with started(tmp_path, save_timeout=1.0) as place:
        await place.client.post("/sandbox/ann/create")
        place.freeze("ann")
        removing = asyncio.create_task(place.client.delete("/sandbox/ann"))
        ann = place.service.sandboxes.find("ann")
        await until(lambda: ann is None or ann.leaving is not None)
        answer = await place.client.post("/sandbox/ann/shell", json={"command": "echo next"})
        assert answer.json()["output"] == "next\n", answer.text
        assert (await removing).status_code == 200


async def test_a_removal_goes_on_when_nobody_waits_for_it(tmp_path: Path) -> None:
    async with started(tmp_path, save_timeout=0.5) as place:
        await place.client.post("/sandbox/ann/create")
        place.freeze("ann")
        removing = asyncio.create_task(place.service.sandboxes.remove("ann", "request"))
        ann = place.service.sandboxes.find("ann")
        await until(lambda: ann is None or ann.leaving is not None)
        removing.cancel()
        await until(lambda: destroyed(place, "ann"))
        await until(lambda: place.service.sandboxes.slots_taken == 0)


async def test_a_sandbox_that_does_not_take_its_files_can_be_removed(tmp_path: Path) -> None:
    async with started(tmp_path, save_timeout=0.3) as place:
        kept = tmp_path / "users" / place.service.names.workspace("ann")
        kept.mkdir(parents=True)
        with (kept / "big").open("wb") as file:
            file.truncate(8 << 30)  # a hole: it takes long to send, and no room
        making = asyncio.create_task(place.client.post("/sandbox/ann/create"))
        await until(lambda: place.service.sandboxes.sandbox_id("ann") in place.backend.created)
        directory = Path(place.backend.directory_of(place.service.sandboxes.sandbox_id("ann")))
        await until(lambda: any(directory.iterdir()))  # its files begin to come
        place.freeze("ann")
        assert (await place.client.delete("/sandbox/ann")).json()["status"] == "not_found"
        assert (await making).status_code == 503
        assert destroyed(place, "ann") == 1


async def test_the_service_ends_although_a_guest_does_not_answer(tmp_path: Path) -> None:
    place = Place(tmp_path, save_timeout=0.3)
    await place.service.start()
    await asyncio.gather(
        *(place.client.post(f"/sandbox/{user}/create") for user in ("ann", "bob", "carl"))
    )
    for user in ("ann", "bob", "carl"):
        place.freeze(user)
    await place.close()
    assert [destroyed(place, user) for user in ("ann", "bob", "carl")] == [1, 1, 1]


async def test_the_output_of_ended_commands_goes_with_their_sandbox(tmp_path: Path) -> None:
    async with started(tmp_path, service_idle_timeout=0.3) as place:
        body = {"command": "head -c 1000000 /dev/zero"}
        await place.client.post("/sandbox/ann/commands", json=body)
        assert place.service.background.user_count == 1
        await until(lambda: destroyed(place, "ann"))
        await until(lambda: place.service.background.user_count == 0)


def with_marker(marker: str) -> list[int]:
    """The living processes of this machine with it in their command line."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if marker.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def spinning(marker: str) -> list[int]:
    return [pid for pid in with_marker(marker) if _state(pid) == "R"]


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def attack(client: httpx2.Client, user: str, marker: str) -> None:
    client.post(f"/sandbox/{user}/create", json={"cpu_limit": 0.1})
    client.post(f"/sandbox/{user}/file", json={"path": "attack.py", "content": ATTACK})
    wish = {"command": f"exec python3 attack.py {marker}", "timeout": 3000}
    begun = client.post(f"/sandbox/{user}/commands", json=wish)
    assert begun.status_code == 201, begun.text
    wait_until(lambda: len(spinning(marker)) == LOOPS, 120)


def test_a_starved_guest_does_not_keep_the_operator_waiting(
    tmp_path: Path, native_works: None
) -> None:
    marker = f"mallory-{tmp_path.name}-{os.getpid()}"
    service = ServiceProcess(
        tmp_path / "service", SANDBOX_SAVE_TIMEOUT="2", SANDBOX_DOCKER_TIMEOUT="2"
    ).start()
    try:
        with service.client() as client:
            attack(client, "mallory", marker)
            client.post("/sandbox/bob/shell", json={"command": "true"})
            wait_until(lambda: _users(client) == {"mallory"}, 60)
            assert len(spinning(marker)) == LOOPS
            gone = client.delete("/sandbox/mallory/destroy")
            assert gone.json()["status"] == "deleted"
            wait_until(lambda: with_marker(marker) == [], 30)
        assert service.stop() == -signal.SIGTERM
    finally:
        service.stop()


def _users(client: httpx2.Client) -> set[str]:
    return {one["user_id"] for one in client.get("/sandboxes").json()["sandboxes"]}


async def test_a_service_without_descriptors_says_so_and_takes_no_slot(tmp_path: Path) -> None:
    used_up = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    async with started(tmp_path) as place:
        place.backend.create_error = used_up  # type: ignore[assignment]
        lease = {"sandbox_id": "mine", "config": {}, "labels": {}}
        for path, body in (
            ("/sandbox/ann/shell", {"command": "true"}),
            ("/sandbox/ann/create", {}),
            ("/v1/sandboxes", lease),
        ):
            refused = await place.client.post(path, json=body, headers={"X-Sandbox-User": "ann"})
            assert (refused.status_code, refused.json()["kind"]) == (503, "busy"), refused.text
            assert int(refused.headers["retry-after"]) > 0
            assert place.service.sandboxes.slots_taken == 0
        place.backend.create_error = None
        await place.shell("true")


async def test_a_sandbox_that_cannot_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    used_up = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    async with started(tmp_path) as place:
        await place.shell("echo 1 > kept")
        place.backend.destroy_error = used_up  # type: ignore[assignment]
        gone = await place.client.delete("/sandbox/ann")
        assert gone.json()["status"] == "deleted" and place.service.sandboxes.slots_taken == 0
        place.backend.destroy_error = None
        assert (await place.shell("cat kept"))["output"] == "1\n"


async def test_a_lease_that_cannot_be_removed_is_tried_again(tmp_path: Path) -> None:
    used_up = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    async with started(tmp_path) as place:
        client, headers = place.client, {"X-Sandbox-User": "ann"}
        lease = {"sandbox_id": "mine", "config": {}, "labels": {}}
        made = await client.post("/v1/sandboxes", json=lease, headers=headers)
        assert made.status_code in (200, 201), made.text
        place.backend.destroy_error = used_up  # type: ignore[assignment]
        assert (await client.delete("/v1/sandboxes/mine", headers=headers)).status_code == 503
        assert place.service.sandboxes.slots_taken == 1
        place.backend.destroy_error = None
        assert (await client.delete("/v1/sandboxes/mine", headers=headers)).status_code < 300
        assert place.service.sandboxes.slots_taken == 0


async def test_a_lease_is_removed_though_its_client_reads_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as place:
        lease = {"sandbox_id": "mine", "config": {}, "labels": {}}
        headers = {"X-Sandbox-User": "ann"}
        await place.client.post("/v1/sandboxes", json=lease, headers=headers)
        leases = place.service.leases
        relay = await leases.relay(leases.get("ann", "mine"))

        async def never(message: bytes) -> None:
            await asyncio.Event().wait()

        reading = asyncio.create_task(relay.attach(never, 0))
        await until(lambda: relay.is_held)
        gone = await asyncio.wait_for(
            place.client.delete("/v1/sandboxes/mine", headers=headers), timeout=60
        )
        assert gone.status_code < 300 and place.service.sandboxes.slots_taken == 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
