"""The remote backend where the contract does not look: breaks, refusals, falling back."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from service_place import Place
from service_process import ServiceProcess

from event_loops import use_in_several
from paracle_sandbox.backends.base import Usage
from paracle_sandbox.backends.registry import explain, get_backend
from paracle_sandbox.backends.remote.backend import RemoteBackend
from paracle_sandbox.backends.remote.failures import remote_error
from paracle_sandbox.channel.frames import (
    CHUNK,
    DATA,
    OPEN,
    PART,
    RESULT,
    ProtocolError,
    encode,
    encode_json,
)
from paracle_sandbox.channel.resumable import (
    MAX_MESSAGE,
    Inbox,
    Outbox,
    OutOfStep,
    count_of,
    parse,
)
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    BackendUnavailableError,
    ResourceLimitError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.service.remote.leases import Leases
from paracle_sandbox.service.remote.relay import Relay, Watch
from paracle_sandbox.service.service import Service
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend
from turns import Flood, Turns


class Wire:
    """A TCP proxy that can be cut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.url = ""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Everybody loses their connection, in the middle of whatever they send."""
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()


@pytest_asyncio.fixture
async def wire(native: ServiceProcess) -> AsyncIterator[Wire]:
    async with Wire(native.url) as wire:
        yield wire


def remote(
    service: ServiceProcess, url: str | None = None, key: str | None = None
) -> RemoteBackend:
    return RemoteBackend(Settings(api_url=url or service.url, api_key=key or service.key))


async def test_a_cut_connection_is_resumed_without_a_byte_lost(
    native: ServiceProcess, wire: Wire
) -> None:
    backend = remote(native, wire.url)
    async with Sandbox(backend, "cut-output") as sandbox:
        script = "for i in $(seq 60000); do echo line $i; [ $((i % 500)) = 0 ] && sleep 0.01; done"
        received = bytearray()
        async for _, data in sandbox.stream(script, timeout=120):
            received += data
            if len(received) > 80_000 * (wire.cuts + 1) and wire.cuts < 5:
                wire.cut()
        assert wire.cuts == 5
        assert received.decode().split("\n")[:-1] == [f"line {n}" for n in range(1, 60001)]
    await backend.close()


async def test_what_is_sent_survives_a_cut_as_well(
    native: ServiceProcess, wire: Wire, tmp_path: Path
) -> None:
    backend = remote(native, wire.url)
    content = random.Random(1).randbytes(20 << 20)
    (tmp_path / "in").write_bytes(content)
    async with Sandbox(backend, "cut-input", SandboxConfig(timeout_seconds=120)) as sandbox:
        copying = asyncio.create_task(sandbox.copy_to(tmp_path / "in", "file"))
        for _ in range(3):
            await asyncio.sleep(0.05)
            wire.cut()
        await copying
        await sandbox.copy_from("file", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    await backend.close()


async def test_a_service_that_stays_away_is_an_error(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "gone", SANDBOX_MODE="fake").start()
    backend = remote(service)
    sandbox = Sandbox(backend, "gone")
    await sandbox.start()
    command = await sandbox.start_command("sleep 100")
    service.stop()
    with pytest.raises(SandboxExecutionError):
        await asyncio.wait_for(command.wait(), 60)
    assert not sandbox.is_running
    with pytest.raises(SandboxError, match="connect"):
        await sandbox.stop()
    assert not (await backend.health()).available
    await backend.close()


async def test_errors_arrive_as_what_they_are(native: ServiceProcess) -> None:
    backend = remote(native)
    async with Sandbox(backend, "errors", SandboxConfig(memory_mb=128)) as sandbox:
        with pytest.raises(SandboxConflictError):
            await backend.create("errors", SandboxConfig(), {})
        with pytest.raises(SandboxTimeoutError) as late:
            await sandbox.execute("echo partial; sleep 50", timeout=0.5)
        assert (late.value.stdout, late.value.timeout_seconds) == ("partial\n", 0.5)
        with pytest.raises(ResourceLimitError) as full:
            await sandbox.run_code("x = bytearray(b'1') * (1 << 30)")
        assert full.value.resource_type == "memory"
    with pytest.raises(SandboxNotFoundError):
        await backend.usage("errors")
    with pytest.raises(SandboxCreationError, match="no-such"):
        await backend.create("errors", SandboxConfig(base_image="no-such-image:x"), {})
    await backend.close()


async def test_a_wrong_key_and_no_service_say_what_to_do(native: ServiceProcess) -> None:
    backend = remote(native, key="wrong")
    with pytest.raises(BackendUnavailableError, match="SANDBOX_API_KEY"):
        await backend.create("x", SandboxConfig(), {})
    assert "Invalid API key" in (await backend.health()).detail
    await backend.close()
    nowhere = RemoteBackend(Settings(api_url="http://127.0.0.1:9"))
    with pytest.raises(BackendUnavailableError, match="SANDBOX_API_URL"):
        await nowhere.create("x", SandboxConfig(), {})
    await nowhere.close()
    unset = RemoteBackend(Settings())
    with pytest.raises(BackendUnavailableError, match="SANDBOX_API_URL"):
        await unset.create("x", SandboxConfig(), {})


@pytest.mark.case("N02")
async def test_ids_of_different_users_do_not_meet(native: ServiceProcess) -> None:
    ann, bob = (remote(native, key=native.keys("make", user)) for user in ("ra", "rb"))
    async with Sandbox(ann, "same-id") as hers, Sandbox(bob, "same-id") as his:
        await hers.write_file("f", "hers")
        assert not await his.exists("f")
        assert [one.sandbox_id for one in await ann.list_sandboxes()] == ["same-id"]
        await bob.destroy("same-id")
        assert await hers.read_file("f") == "hers"
    await ann.close()
    await bob.close()


async def test_a_key_for_several_users_names_one(native: ServiceProcess) -> None:
    key = native.keys("make", "rc", "rd")
    unnamed = remote(native, key=key)
    with pytest.raises(SandboxError, match="X-Sandbox-User"):
        await unnamed.create("which", SandboxConfig(), {})
    await unnamed.close()
    for user, error in (("rc", None), ("rx", SandboxNotFoundError)):
        backend = RemoteBackend(Settings(api_url=native.url, api_key=key, api_user=user))
        if error is None:
            async with Sandbox(backend, "which") as sandbox:
                assert await sandbox.run_command("echo mine") == "mine\n"
        else:
            with pytest.raises(error):
                await backend.create("which", SandboxConfig(), {})
        await backend.close()


@pytest.mark.parametrize("user", ["team/ann", "Zoë ✓", "a..b", "50%"])
async def test_a_remote_client_acts_for_any_text(native: ServiceProcess, user: str) -> None:
    key = native.keys("make", user, "another")
    backend = RemoteBackend(Settings(api_url=native.url, api_key=key, api_user=user))
    async with Sandbox(backend, "any-text") as sandbox:
        assert (await sandbox.execute("echo here"))["stdout"] == "here\n"
        assert [one.sandbox_id for one in await backend.list_sandboxes()] == ["any-text"]
    await backend.close()
    log = native.paracle("audit", "show", "--user", user, "--json").stdout
    assert '"create"' in log and '"execution"' in log


async def test_quotas_hold_over_the_channel(tmp_path: Path) -> None:
    service = ServiceProcess(
        tmp_path / "tight", SANDBOX_MODE="fake", SANDBOX_USER_RATE="2", SANDBOX_USER_SANDBOXES="1"
    ).start()
    backend = remote(service)
    try:
        async with Sandbox(backend, "one") as sandbox:
            with pytest.raises(SandboxLimitError, match="sandboxes in all"):
                await backend.create("two", SandboxConfig(), {})
            for _ in range(2):
                assert await sandbox.run_command("echo x") == "x\n"
            with pytest.raises(SandboxError, match="executions in a minute"):
                await sandbox.run_command("echo x")
            await sandbox.write_file("still", "works")
    finally:
        await backend.close()
        service.stop()
    log = service.paracle("audit", "show", "--json").stdout
    assert '"event": "refused"' in log and '"reason": "quota"' in log


async def test_a_limit_over_the_channel_is_a_security_event(native: ServiceProcess) -> None:
    backend = remote(native, key=native.keys("make", "greedy"))
    async with Sandbox(backend, "greedy", SandboxConfig(memory_mb=128)) as sandbox:
        with pytest.raises(ResourceLimitError):
            await sandbox.run_code("x = bytearray(b'1') * (1 << 30)")
        await sandbox.execute("exit 3")
    await backend.close()
    lines = logged(native, "greedy")
    (event,) = [line for line in lines if line["event"] == "security"]
    assert (event["kind"], event["address"]) == ("limit", "127.0.0.1")
    ended = [line for line in lines if line["event"] == "execution"]
    assert [line["outcome"] for line in ended] == ["failed", "failed"]


async def test_a_limit_is_told_once_for_each_time(place: Place) -> None:
    leases = place.service.leases
    lease = await leases.create("bob", "one", SandboxConfig(), {})
    for usage in (
        Usage(), Usage(oom_kills=1), Usage(oom_kills=1), Usage(oom_kills=2), Usage(oom_kills=2),
        Usage(oom_kills=2, disk_full=True), Usage(oom_kills=2, disk_full=True),
    ):  # fmt: skip
        place.backend.usage_of[lease.name] = usage
        await leases.usage(lease)
    lines = await place.audit_lines()
    told = [line["details"]["error"] for line in lines if line["event"] == "security"]
    assert [text.split()[0] for text in told] == ["Memory", "Memory", "Disk"]


async def test_a_program_that_ends_with_its_sandbox_is_written_down(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "s", SANDBOX_MODE="fake").start()
    backend = remote(service, key=service.keys("make", "ann"))
    try:
        sandbox = Sandbox(backend, "ends")
        await sandbox.start()
        await sandbox.execute("exit 0")
        command = await sandbox.start_command("echo up; sleep 100")
        async for _ in command.output():
            break
        await sandbox.stop()
    finally:
        await backend.close()
        service.stop()
    first, last = [line for line in logged(service, "ann") if line["event"] == "execution"]
    assert (first["cause"], last["cause"]) == ("ok", "removed")
    assert first["key"] == last["key"]


async def test_programs_whose_sandbox_was_lost_are_written_down(place: Place) -> None:
    parts = place.service
    failures: list[str] = []
    lease = await parts.leases.create("bob", "one", SandboxConfig(), {})

    async def answer(frame: bytes) -> None:
        raise AssertionError(frame)

    watch = Watch(
        "bob", lease.name, parts.executions, parts.journal, parts.metrics, answer,
        lambda: failures.append("failed"),
    )  # fmt: skip
    for stream in (1, 3):
        await watch.pass_requests(encode_json(OPEN, stream, {"op": "exec", "argv": ["sleep", "9"]}))
    await watch.pass_answers(encode_json(RESULT, 1, {"exit_code": -9, "killed": True}))
    watch.close("sandbox_lost")
    assert failures == ["failed"] and parts.executions.running("bob") == 0
    lines = await place.audit_lines()
    found = [line for line in lines if line.get("user") == "bob" and line["event"] != "create"]
    assert [line.get("cause") or line["kind"] for line in found] == [
        "killed", "sandbox_lost", "sandbox_lost",
    ]  # fmt: skip
    assert [line["event"] for line in found] == ["execution", "execution", "security"]


def watch_of(parts: Service, answer: Any = None) -> Watch:
    """What a client of bob's asks a guest."""
    return Watch(
        "bob", "box", parts.executions, parts.journal, parts.metrics, answer, lambda: None
    )  # fmt: skip


async def test_a_message_of_many_small_frames_shares_the_loop(place: Place) -> None:
    """As many as a message may hold; the guest gets every one of them."""
    watch, turns = watch_of(place.service), Turns()
    message = b"".join(encode_json(OPEN, number, {}) for number in range(1, 16385))
    assert await watch.pass_requests(message) == message
    assert turns.count >= 16384 // 512
    turns.close()


@pytest.mark.parametrize(
    "frame",
    [encode(OPEN, 1, b"{}"), encode(DATA, 1, b""), encode(PART, 1, b""), encode(PART, 1, b"x")],
    ids=["more than a client asks", "empty", "an empty part", "a small part"],
)
async def test_a_message_full_of_tiny_frames_is_refused(place: Place, frame: bytes) -> None:
    """None of our clients sends it, and going through it would be all that the service does."""
    with pytest.raises(ProtocolError, match=r"more than 16384 frames|empty frame|not full"):
        await watch_of(place.service).pass_requests(frame * (MAX_MESSAGE // len(frame)))


@pytest.mark.parametrize("size", [1, 9000], ids=["tiny frames", "one frame at a time"])
async def test_a_guest_that_floods_shares_the_loop_of_the_service(place: Place, size: int) -> None:
    """V3: also while no client is there that it would have to wait for."""
    parts = place.service
    frame = encode(DATA, 1, b"x" * size)
    many = CHUNK // len(frame) if size == 1 else 1
    flood = Flood(*[frame * many] * 24)
    relay = Relay(
        flood, "bob", "box", parts.executions, parts.journal, parts.metrics, lambda: None
    )  # fmt: skip
    relay.start()
    await flood.read.wait()
    assert min(flood.turns[1:]) >= many // 2048 and sum(flood.turns) >= 24 // 8
    told: list[bytes] = []

    async def send(message: bytes) -> None:
        told.append(message)

    await relay.attach(send, 0)
    assert b"".join(message[1:] for message in told if message[:1] == b"d") == frame * many * 24
    await relay.close()


def logged(service: ServiceProcess, user: str) -> list[dict[str, Any]]:
    lines = service.paracle("audit", "show", "--json", "--user", user).stdout.splitlines()
    return [json.loads(line) for line in lines]


async def test_a_sandbox_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    backend = FakeBackend()
    service = Service(Settings(service_dir=str(tmp_path)), backend)
    leases = Leases(
        service.sandboxes, service.executions, service.names, service.journal, service.metrics, 0.2
    )
    leases.start()
    await leases.create("ann", "one", SandboxConfig(), {})
    while leases.all("ann"):
        await asyncio.sleep(0.05)
    assert await backend.list_sandboxes() == []
    await leases.close()
    await service.close()


# auto


def test_auto_takes_the_service_when_it_answers(native: ServiceProcess) -> None:
    settings = Settings(api_url=native.url, api_key=native.key)
    assert get_backend("auto", settings).name == "remote"
    with native.client() as client:
        assert client.get("/info").json()["ready"] is True


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9", "cannot be reached"),
        ("ftp://x", "not http"),
        ("{}", "refuses the key"),
    ],
)
def test_auto_falls_back_and_says_so(
    native: ServiceProcess, url: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(api_url=url.format(native.url), api_key="wrong")
    with caplog.at_level(logging.WARNING):
        assert get_backend("auto", settings).name == "native"
    assert reason in caplog.text and "using native" in caplog.text


async def test_explain_asks_the_service(native: ServiceProcess) -> None:
    first = (await explain(Settings(api_url=native.url, api_key=native.key)))[0]
    assert (first.backend, first.available) == ("remote", True)
    assert any(layer.in_force for layer in first.layers)


def test_the_command_line_runs_elsewhere(native: ServiceProcess, tmp_path: Path) -> None:
    there = ServiceProcess(
        tmp_path / "home", SANDBOX_MODE="remote", SANDBOX_API_URL=native.url,
        SANDBOX_API_KEY=native.key,
    )  # fmt: skip
    (there.home / "hello.py").write_text("import getpass; print('hello from', getpass.getuser())")
    done = there.paracle("sandbox", "execute", "hello.py")
    assert (done.returncode, done.stdout) == (0, "hello from paracle\n"), done


# Event loops


def test_one_manager_serves_one_event_loop_after_the_other(native: ServiceProcess) -> None:
    use_in_several(SandboxManager(backend=remote(native)))


# The parts


@pytest.mark.parametrize("body", [None, [], {}, {"error": 5}, {"error_type": "os.system"}, "x"])
def test_an_odd_answer_is_still_an_error_of_ours(body: object) -> None:
    for status in (400, 401, 404, 409, 418, 429, 500, 503):
        assert isinstance(remote_error(status, body, "id"), SandboxError)


@given(st.lists(st.binary(max_size=50)), st.data())
def test_an_outbox_sends_again_exactly_what_is_missing(
    pieces: list[bytes], data: st.DataObject
) -> None:
    async def check() -> None:
        outbox, everything = Outbox(), b"".join(pieces)
        for piece in pieces:
            outbox.put(piece)
        for received in sorted(data.draw(st.lists(st.integers(0, len(everything)), max_size=4))):
            outbox.acknowledge(received)
            assert b"".join(outbox.pending()) == everything[received:]
        with pytest.raises(OutOfStep):
            outbox.acknowledge(len(everything) + 1)

    asyncio.run(check())


@pytest.mark.parametrize("message", [b"", b"x", b"a", b"a-1", b"a1x", b"a" + b"9" * 30])
def test_messages_that_are_none(message: bytes) -> None:
    with pytest.raises(OutOfStep):
        count_of(parse(message)[1])


def test_an_inbox_tells_now_and_then() -> None:
    inbox = Inbox()
    assert inbox.take(10) is None
    assert inbox.take(1 << 20) == b"a1048586"
    assert inbox.received == 1048586
