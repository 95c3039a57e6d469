"""What a service keeps to itself, what it refuses at once, and how it starts when it cannot."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from service_place import KEY, Place
from service_process import ServiceProcess

from paracle_sandbox import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError, SandboxError, SandboxExecutionError
from paracle_sandbox.results import CommandResult
from paracle_sandbox.sandbox.command import Command
from paracle_sandbox.service.errors import HIDDEN_PATH, PathHider, classify, status_of
from paracle_sandbox.service.middleware.wrong_keys import MAX_WRONG
from paracle_sandbox.service.service import Service
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend


def of(place: Place, *users: str) -> dict[str, str]:
    return {"X-API-Key": place.service.keys.make(users)}


# What others have


async def test_the_labels_of_a_client_are_not_those_of_the_machine(place: Place) -> None:
    """V14: by its labels `agents stop` finds what it stops."""
    wish = {"sandbox_id": "mine", "labels": {"paracle.agent": "boss", "team": "data"}}
    made = await place.client.post("/v1/sandboxes", json=wish, headers=of(place, "bob"))
    assert made.status_code == 201 and made.json()["labels"] == wish["labels"]
    found = await place.backend.list_sandboxes()
    assert len(found) >= 2
    assert all(set(one.labels) == {"paracle.service"} for one in found)


async def test_the_number_of_sandboxes_is_that_of_the_callers_own(place: Place) -> None:
    bob = of(place, "bob")
    for wanted in (0, 1):
        info = (await place.client.get("/info", headers=bob)).json()
        assert info["live_sandboxes"] == wanted
        assert (await place.client.post("/sandbox/bob/create", headers=bob)).status_code == 200
    await place.client.post("/v1/sandboxes", json={"sandbox_id": "x"}, headers=bob)
    assert (await place.client.get("/info", headers=bob)).json()["live_sandboxes"] == 2
    assert (await place.client.get("/info")).json()["live_sandboxes"] == 3


async def test_paths_of_the_machine_are_the_operators(place: Place) -> None:
    """V14: who uses a sandbox is not told where the service keeps things."""
    place.break_disk()
    bob = of(place, "ann")
    wish = {"path": "f", "content": "x"}
    told = await place.client.post("/sandbox/ann/file", json=wish, headers=bob)
    assert told.status_code == 507, told.text
    home = place.service.settings.service_dir
    for way, wish in (
        ("shell", {"command": "mkdir d; for n in $(seq 200); do echo $n > d/$n; done"}),
        ("shell", {"command": "echo again > d/1"}),
        ("execute", {"code": "open('e', 'w').close()"}),
    ):
        for headers in (bob, None):
            ran = await place.client.post(f"/sandbox/ann/{way}", json=wish, headers=headers)
            assert ran.status_code == 200 and ran.json()["files_kept"] is False, ran.text
            assert (home in ran.text, HIDDEN_PATH in ran.text) == (headers is None, headers is bob)
    await place.client.delete("/sandbox/ann")
    lost = [
        await place.client.post("/sandbox/ann/create", headers=headers) for headers in (bob, None)
    ]
    assert [one.status_code for one in lost] == [507, 507], lost[0].text
    assert home not in lost[0].text and HIDDEN_PATH in lost[0].text
    assert home in lost[1].text


def test_only_paths_of_the_service_are_hidden() -> None:
    hide = PathHider(Settings(service_dir="/var/lib/paracle", state_dir="/run/p/s", data_dir="/x"))
    assert hide("in '/var/lib/paracle/users/ab': full") == f"in '{HIDDEN_PATH}': full"
    assert hide("at /run/p/s.") == f"at {HIDDEN_PATH}."
    for text in ("/var/lib/paracles", "/workspace/var/lib", "/x/y", "/tmp/a"):
        assert hide(text) == text


async def test_a_path_of_the_host_is_hidden_wherever_an_error_is_shown(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V14: also where a program that was stopped, or a background command, is an answer."""
    home = place.service.settings.service_dir
    error = SandboxExecutionError(f"The guest ended: {home}/secret is full", "s")

    async def lost(self: Command) -> CommandResult:
        raise error

    bob = of(place, "bob")
    where = "/sandbox/bob"
    begun = await place.client.post(f"{where}/commands", json={"command": "true"}, headers=bob)
    command = f"{where}/commands/{begun.json()['command_id']}"

    while (await place.client.get(command, headers=bob)).json()["running"]:
        await asyncio.sleep(0.01)
    monkeypatch.setattr(Command, "wait", lost)
    for headers, is_hidden in ((bob, True), (None, False)):
        ways = [
            await place.client.get(command, headers=headers),
            (await place.client.get(f"{where}/commands", headers=headers)),
            await place.client.post(f"{where}/shell", json={"command": "true"}, headers=headers),
            await place.client.post(f"{where}/stream", json={"command": "true"}, headers=headers),
        ]  # fmt: skip
        for answer in ways:
            assert "secret" not in answer.text if is_hidden else home in answer.text, answer.text
            assert "The guest ended" in answer.text


async def test_a_slash_too_many_leads_nowhere(place: Place) -> None:
    """V14: a redirect to http would take the key there in the clear."""
    for path in ("/info/", "/sandbox/ann/status/", "/v1/sandboxes/"):
        answer = await place.client.get(path)
        assert answer.status_code == 404 and "location" not in answer.headers


# What cannot be had


@pytest.mark.parametrize(
    "config",
    [
        {"working_dir": "/" + "x" * 300},
        {"working_dir": "/x" * 1000},
        {"volumes": {"/etc": "/data"}},
        {"volumes": {"/no/such/directory": "/data"}},
        {"base_image": "elsewhere/image"},
    ],
)
@pytest.mark.case("N09")
async def test_what_cannot_be_had_is_refused_for_good(place: Place, config: object) -> None:
    """V14: 503 says that it may be had later."""
    wish = {"sandbox_id": "odd", "config": config}
    answer = await place.client.post("/v1/sandboxes", json=wish, headers=of(place, "bob"))
    assert answer.status_code in (400, 422), answer.text
    assert not answer.json().get("retryable") and "retry-after" not in answer.headers
    # Whether a directory is there is nothing that a user learns.
    assert "not there" not in answer.text and "PARACLE_VOLUMES" not in answer.text


@pytest.mark.parametrize("step", ["volumes", "interpreter", "image", None])
def test_a_fault_of_the_configuration_is_not_tried_again(step: str | None) -> None:
    error = SandboxCreationError("x", step=step)
    assert status_of(error) == 400 and not classify(error).retryable


def test_a_working_directory_has_a_length() -> None:
    assert SandboxConfig(working_dir="/" + "x" * 255).working_dir
    with pytest.raises(ValueError, match="too long"):
        SandboxConfig(working_dir="/" + "é" * 128)


# Keys


@pytest.mark.parametrize("key", ["a", "x" * 40, "short secret"])
@pytest.mark.case("N12")
def test_a_key_that_can_be_guessed_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(SandboxError, match="SANDBOX_API_KEY is too weak.*openssl rand"):
        Service(Settings(service_dir=str(tmp_path), api_key=key), FakeBackend())


@pytest.mark.case("N04")
async def test_who_guesses_keys_has_to_wait(place: Place) -> None:
    """V14: from one address, by different keys; what was right there before goes on."""
    bob, late = of(place, "bob"), of(place, "bob")

    async def status(key: str) -> int:
        return (await place.client.get("/info", headers={"X-API-Key": key})).status_code

    assert await status(bob["X-API-Key"]) == 200
    assert [await status("the same") for _ in range(2 * MAX_WRONG)] == [401] * 2 * MAX_WRONG
    tried = [await status(f"guess {n}") for n in range(MAX_WRONG + 5)]
    assert tried == [401] * (MAX_WRONG - 1) + [429] * 6
    assert await status(bob["X-API-Key"]) == 200 and await status(KEY) == 200
    assert await status(late["X-API-Key"]) == 429
    assert (await place.client.get("/health", headers={"X-API-Key": "x"})).status_code == 200


@pytest.mark.case("N04")
def test_the_first_key_is_in_no_log(tmp_path: Path) -> None:
    """V14: where the output is no terminal it is in a file for its owner alone."""
    process = ServiceProcess(tmp_path, SANDBOX_MODE="fake").start()
    try:
        assert process.key.startswith("prc_")
        secret = process.key.rsplit("_", 1)[1]
        assert secret not in "\n".join(process.lines) + process.errors.read_text()
        with process.client() as client:
            assert client.get("/info").status_code == 200
        assert stat.S_IMODE(process.data.stat().st_mode) == 0o700
    finally:
        process.stop()


# Starting


def broken(directory: Path, what: str) -> None:
    if what == "keys":
        (directory / "keys.db").write_bytes(b"no database at all" * 100)
    elif what == "answers":
        (directory / "answers.db").write_bytes(b"no database at all" * 100)
    elif what == "installation":
        (directory / "installation").write_text("zz")
    elif what == "a directory":
        (directory / "audit.jsonl").unlink()
        (directory / "audit.jsonl").mkdir()


@pytest.mark.parametrize("what", ["keys", "answers", "installation", "a directory"])
async def test_a_damaged_file_is_named_at_the_start(tmp_path: Path, what: str) -> None:
    place = Place(tmp_path)
    await place.close()
    broken(tmp_path, what)
    with pytest.raises(SandboxError, match=f"cannot use its files in {tmp_path}"):
        Place(tmp_path)


async def test_a_damaged_line_of_the_log_keeps_nobody_from_starting(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.service.start()
    await place.close()
    for damage in (b'{"n": 1\n', b"\xff\xfe\n", b"[]\n", b'{"n": "x"}\n', b"half a li"):
        with (tmp_path / "audit.jsonl").open("ab") as log:
            log.write(damage)
        again = Place(tmp_path)
        await again.service.start()
        assert (await again.client.get("/info")).status_code == 200
        await again.close()


def test_a_full_disk_at_the_start_is_told_in_one_line(tmp_path: Path) -> None:
    """The limit of a file's size stands for a disk without room."""
    process = ServiceProcess(tmp_path, SANDBOX_MODE="fake")
    limited = "import resource, signal, runpy; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    limited += "import sys; sys.argv = ['paracle', 'serve']; "
    limited += "runpy.run_module('paracle_sandbox', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", limited], env=process.env, cwd=tmp_path, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert "Is there room on the disk" in done.stderr, done.stderr
