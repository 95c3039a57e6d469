"""The audit log: complete, chained, without secrets, and able to show that it was touched."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from service_place import Place
from service_process import ServiceProcess, wait_until

from paracle_sandbox.audit import security_events
from paracle_sandbox.audit.log import AuditLog, AuditQueue, follow, read, verify
from paracle_sandbox.backends.base import Usage
from paracle_sandbox.service.journal import SUSPICIOUS_EVENTS, SUSPICIOUS_FAILURES, Journal


def events(service: ServiceProcess) -> list[dict[str, object]]:
    return list(read(service.data / "audit.jsonl"))


def test_what_happens_is_written_down(fake: ServiceProcess, user: str) -> None:
    with fake.client() as client:
        where = f"/sandbox/{user}"
        client.post(f"{where}/execute", json={"code": "print('the secret code')"})
        client.post(f"{where}/shell", json={"command": "exit 3"})
        client.post(f"{where}/file", json={"path": "f", "content": "the secret content"})
        client.delete(f"{where}/destroy")
    mine = [line for line in events(fake) if line.get("user") == user]
    assert [line["event"] for line in mine] == [
        "create", "execution", "execution", "write_file", "destroy",
    ]  # fmt: skip
    create, good, bad, write, destroy = mine
    assert create["outcome"] == "ok" and create["resources"]["memory_mb"] == 512  # type: ignore[index]
    assert (good["outcome"], good["exit_code"], good["kind"]) == ("ok", 0, "python")
    assert (bad["outcome"], bad["exit_code"], bad["cause"]) == ("failed", 3, "failed")
    assert (write["path"], write["size"]) == ("f", 18)
    assert destroy["files_kept"] is True
    assert "the secret" not in (fake.data / "audit.jsonl").read_text()


def test_every_line_of_a_request_says_whose_it_was(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "s", SANDBOX_MODE="fake").start()
    key = service.keys("make", "ann")
    try:
        with service.client(key) as ann:
            body = {"command": "true"}
            ann.post("/sandbox/ann/shell", json=body)
            ann.post("/sandbox/ann/shell", json=body, headers={"Idempotency-Key": "k"})
            ann.post("/sandbox/ann/commands", json=body)
            ann.post("/sandbox/ann/file", json={"path": "f", "content": "x"})
            ann.get("/sandbox/ann/file", params={"path": "../../etc/passwd"})
            ann.get("/sandbox/ann/file", params={"path": "f"})
            ann.get("/sandbox/ann/files")
            ann.get("/sandbox/ann/files/raw", params={"path": "f"})
            ann.delete("/sandbox/ann/file", params={"path": "f"})
            ann.delete("/sandbox/ann")
            ann.post("/sandbox/ann/create")
        wait_until(lambda: sum(e["event"] == "execution" for e in events(service)) == 3, 30)
    finally:
        service.stop()
    *asked, ended = [line for line in events(service) if line.get("user") == "ann"]
    assert {line["event"] for line in asked} == {
        "create", "execution", "write_file", "read_file", "list_files", "security", "remove_file",
        "destroy",
    }  # fmt: skip
    assert sum(line["event"] == "read_file" for line in asked) == 2
    whose = {(line.get("key"), line.get("address")) for line in asked}
    assert whose == {(key.split("_")[1], "127.0.0.1")}
    assert ended["reason"] == "shutdown" and "key" not in ended, "the service did it by itself"
    assert service.paracle("audit", "verify").returncode == 0


async def test_figures_are_the_programs_own_or_named_as_the_sandboxs(place: Place) -> None:
    name = place.service.sandboxes.sandbox_id("ann")

    async def resources() -> list[dict[str, float]]:
        lines = await place.audit_lines()
        return [line["resources"] for line in lines if line["event"] == "execution"]

    def used(cpu_seconds: float) -> None:
        place.backend.usage_of[name] = Usage(cpu_seconds, memory_peak_bytes=32 << 20, processes=2)

    used(1.0)
    await place.shell("true")
    used(1.5)
    await place.shell("true")
    used(3.5)
    assert (await place.shell("sleep 30", timeout=1))["kind"] == "timeout"
    used(4.0)
    await asyncio.gather(place.shell("sleep 0.2"), place.shell("sleep 0.2"))
    first, *alone, one, other = await resources()
    assert "cpu_seconds" not in first, "nobody had looked before it"
    assert [found["cpu_seconds"] for found in alone] == [1.0, 0.5, 2.0]
    assert [found["sandbox_cpu_seconds"] for found in alone] == [1.0, 1.5, 3.5]
    assert alone[-1]["sandbox_memory_peak_mb"] == 32
    assert "cpu_seconds" not in one and "cpu_seconds" not in other


@pytest.mark.case("N20")
def test_refusals_are_written_down(fake: ServiceProcess) -> None:
    with fake.client("wrong") as stranger:
        stranger.get("/info")
    with fake.client(fake.keys("make", "ann")) as ann:
        ann.get("/sandbox/someone-else/status")
        ann.get("/metrics")
        ann.get("/v1/sandboxes", headers={"X-Sandbox-User": "a-third"})
    reasons = {line["reason"] for line in refusals(fake)}
    assert {"denied_key", "other_user", "admin_only"} <= reasons
    with fake.client() as client:
        assert all(count(client, str(reason)) for reason in reasons)
    others = {line.get("user") for line in refusals(fake) if line["reason"] == "other_user"}
    assert {"someone-else", "a-third"} <= others


def test_whatever_is_refused_is_written_down_once(fake: ServiceProcess, user: str) -> None:
    """And counted, under the same reason; without code, values or keys."""
    where, secret = f"/sandbox/{user}", "s3cr3t-value"
    run, once = f"{where}/execute", {"Idempotency-Key": user}
    big, as_json = b"x" * (9 << 20), {"Content-Type": "application/json"}
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("bad_input", f"{where}/create", {"json": {"privileged": True}}),
        ("bad_input", run, {"json": {"code": secret, "timeout": 0}}),
        ("bad_input", run, {"json": {f"{secret}()": 1}}),
        ("bad_input", run, {"content": b'{"code": "1", "code": "2"}', "headers": as_json}),
        ("bad_input", run, {"content": b"x", "headers": {"Content-Encoding": "gzip"}}),
        ("bad_input", run, {"content": big}),
        ("bad_input", run, {"content": iter([big])}),
        ("bad_input", run, {"json": {"code": "2"}, "headers": once}),
        ("bad_input", "/sandbox/..%2fetc/create", {}),
        ("bad_input", "/v1/sandboxes", lease(env_vars={"A-B": secret})),
        ("bad_input", "/v1/sandboxes", lease(network_mode="host")),
        ("bad_input", "/v1/sandboxes", lease(allow_degraded=["seccomp"])),
        ("creation", f"{where}/create", {"json": {"image": "evil/image:x"}}),
        ("package", f"{where}/pip/install", {"json": {"package": "-r x"}}),
    ]
    with fake.client() as client:
        assert client.post(run, json={"code": "1"}, headers=once).status_code == 200
        for reason, path, request in refused:
            before, counted = len(refusals(fake)), count(client, reason)
            status = client.post(path, **request).status_code
            assert 400 <= status < 500, (request, status)
            (line,) = refusals(fake)[before:]
            assert line["reason"] == reason and line["key"], line
            assert count(client, reason) == counted + 1, request
    mine = [str(line.get("what")) for line in refusals(fake) if line.get("user") == user]
    assert any("twice" in what for what in mine), "also before the user was looked at"
    assert secret not in (fake.data / "audit.jsonl").read_text()


def lease(**config: object) -> dict[str, Any]:
    return {"json": {"sandbox_id": "x", "config": config}}


def refusals(service: ServiceProcess) -> list[dict[str, object]]:
    return [line for line in events(service) if line["event"] == "refused"]


def count(client: httpx2.Client, reason: str) -> float:
    name = f'paracle_refusals_total{{reason="{reason}"}} '
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


def test_packages_that_are_switched_off_are_a_refusal(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "s", SANDBOX_MODE="fake", SANDBOX_PACKAGES="0").start()
    try:
        with service.client() as client:
            body = {"package": "requests"}
            assert client.post("/sandbox/ann/pip/install", json=body).status_code == 403
    finally:
        service.stop()
    (line,) = refusals(service)
    assert (line["reason"], line["user"]) == ("denied", "ann")


def test_the_commands_show_verify_and_notice(fake: ServiceProcess, tmp_path: Path) -> None:
    with fake.client() as client:
        client.post("/sandbox/shown/shell", json={"command": "true"})
    shown = fake.paracle("audit", "show", "--user", "shown").stdout
    assert "create" in shown and "execution" in shown
    as_json = fake.paracle("audit", "show", "--last", "1", "--json").stdout
    assert json.loads(as_json)["event"]
    good = fake.paracle("audit", "verify")
    assert (good.returncode, "unbroken" in good.stdout) == (0, True), good
    copy = ServiceProcess(tmp_path / "copy")
    copy.data.mkdir()
    lines = (fake.data / "audit.jsonl").read_text().splitlines(keepends=True)
    (copy.data / "audit.jsonl").write_text("".join(lines[:3] + lines[4:]))
    bad = copy.paracle("audit", "verify")
    assert (bad.returncode, "Broken at line 4" in bad.stdout) == (1, True), bad
    assert copy.paracle("audit", "verify", "--json").returncode == 1
    missing = ServiceProcess(tmp_path / "none").paracle("audit", "show")
    assert missing.returncode == 2 and "SANDBOX_DATA_DIR" in missing.stderr


def filled(path: Path, count: int = 5) -> list[str]:
    log = AuditLog(path)
    for number in range(count):
        log.record("event", number=number, user="ann")
    log.close()
    return path.read_text().splitlines(keepends=True)


def test_every_way_to_touch_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = filled(path)
    assert verify(path).broken_at is None
    changed = lines[2].replace('"ann"', '"bob"')
    for text, broken in (
        (lines[:2] + [changed] + lines[3:], 3),
        (lines[:1] + lines[2:], 2),
        (lines[1:], 1),
        (lines[:2] + [lines[3], lines[2]] + lines[4:], 3),
        (lines[:3] + [lines[2]] + lines[3:], 4),
        (lines[:2] + ["garbage\n"] + lines[2:], 3),
        (lines[:2] + ["[]\n"] + lines[2:], 3),
        (lines[:2] + ["{}\n"] + lines[2:], 3),
    ):
        path.write_text("".join(text))
        assert verify(path).broken_at == broken


def test_a_torn_line_is_taken_back_and_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filled(path)
    with path.open("a") as file:
        file.write('{"n": 6, "event": "half a li')
    log = AuditLog(path)
    log.record("next")
    log.close()
    assert verify(path).broken_at is None
    assert [line["event"] for line in read(path)][-2:] == ["torn_line_removed", "next"]


def _write(path: str, name: str) -> None:
    log = AuditLog(Path(path))
    for number in range(200):
        log.record("event", writer=name, number=number)
    log.close()


def test_several_processes_make_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path = str(tmp_path / "log")
    writers = [context.Process(target=_write, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    verdict = verify(Path(path))
    assert (verdict.broken_at, verdict.lines) == (None, 600)


def test_long_and_odd_values_are_bounded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log")
    log.record("event", text="x" * 100_000, many=list(range(1000)), odd="\udcff\n\x1b")
    log.close()
    (line,) = read(tmp_path / "log")
    assert len(str(line["text"])) < 3000 and len(line["many"]) == 50
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert verify(tmp_path / "log").broken_at is None


def test_a_log_that_cannot_be_written_does_not_stop_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(Path("/dev/full"))
    log.record("event")
    log.close()
    assert log.failures == 1
    assert "cannot be written" in caplog.text


def test_security_events_get_their_user_and_raise_suspicion(tmp_path: Path) -> None:
    journal = Journal(AuditLog(tmp_path / "log"))
    journal.know_users({"u-1": "ann"}.get)
    for _ in range(SUSPICIOUS_EVENTS):
        security_events.security_event("path_escape", sandbox_id="u-1", path="/etc/passwd")
    for _ in range(SUSPICIOUS_FAILURES):
        journal.record_execution(user="bob", ok=False)
    security_events.security_event("protocol", sandbox_id="unknown")
    journal.close()
    security_events.security_event("path_escape", sandbox_id="u-1", path="after the end")
    lines = list(read(tmp_path / "log"))
    security = [line for line in lines if line["event"] == "security"]
    assert [line.get("user") for line in security] == ["ann"] * SUSPICIOUS_EVENTS + [None]
    suspicious = [(line["user"], line["reason"]) for line in lines if line["event"] == "suspicious"]
    assert suspicious == [("ann", "repeated_security_events"), ("bob", "repeated_failures")]


def test_content_is_kept_only_when_asked_for(tmp_path: Path) -> None:
    for wanted in (False, True):
        path = tmp_path / str(wanted)
        journal = Journal(AuditLog(path), with_content=wanted)
        journal.record_execution(user="ann", ok=True, content="print('hello')")
        journal.close()
        assert ("hello" in path.read_text()) == wanted


def files_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob("log-*")) + [path]


def test_a_large_log_goes_on_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=1000)
    for number in range(50):
        log.record("event", number=number)
    log.close()
    assert len(files_of(path)) > 5
    assert all(one.stat().st_size < 1400 for one in files_of(path))
    assert [line["number"] for line in read(path)] == list(range(50))
    assert (verify(path).lines, verify(path).broken_at) == (50, None)
    again = AuditLog(path, max_bytes=1000)
    again.record("event", number=50)
    again.close()
    assert [line["n"] for line in read(path)] == list(range(1, 52))
    assert verify(path).broken_at is None


@pytest.mark.parametrize("what", ["remove", "swap", "cut", "change"])
def test_files_that_were_set_aside_are_part_of_the_chain(tmp_path: Path, what: str) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=1000)
    for number in range(50):
        log.record("event", number=number)
    log.close()
    first, second, third, *_ = files_of(path)
    if what == "remove":
        second.unlink()
    elif what == "swap":
        one, other = second.read_bytes(), third.read_bytes()
        second.write_bytes(other)
        third.write_bytes(one)
    elif what == "cut":
        second.write_bytes(b"".join(second.read_bytes().splitlines(keepends=True)[:-1]))
    else:
        second.write_text(second.read_text().replace('"number":8', '"number":9'))
    verdict = verify(path)
    assert verdict.broken_at is not None
    assert verdict.file in (second.name, third.name)
    assert verdict.lines >= len(first.read_text().splitlines())


def test_the_first_files_may_be_kept_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=1000)
    for number in range(50):
        log.record("event", number=number)
    log.close()
    first = files_of(path)[0]
    last = json.loads(first.read_text().splitlines()[-1])["hash"]
    first.unlink()
    assert verify(path).broken_at == 1
    assert verify(path, after=last).broken_at is None
    assert verify(path, after="1" * 64).broken_at == 1


def test_a_crash_between_two_files_breaks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=1000)
    for number in range(20):
        log.record("event", number=number)
    log.close()
    path.unlink(missing_ok=True)  # set aside, and then it was killed
    kept = sum(len(one.read_text().splitlines()) for one in files_of(path)[:-1])
    assert len(list(read(path))) == kept
    log = AuditLog(path, max_bytes=1000)
    log.record("after")
    log.close()
    assert (verify(path).lines, verify(path).broken_at) == (kept + 1, None)


def _write_small(path: str, name: str) -> None:
    log = AuditLog(Path(path), max_bytes=2000)
    for number in range(200):
        log.record("event", writer=name, number=number)
    log.close()


def test_several_processes_set_files_aside(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "log"
    writers = [context.Process(target=_write_small, args=(str(path), name)) for name in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        # Whoever reads meanwhile sees a beginning of the log, without a gap.
        if path.exists():
            numbers = [line["n"] for line in read(path)]
            assert numbers == list(range(1, len(numbers) + 1))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert (verify(path).lines, verify(path).broken_at) == (600, None)
    assert len(files_of(path)) > 20


def test_following_goes_from_file_to_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path, max_bytes=1000)
    log.record("before")
    following = follow(path)
    seen = []
    # The first is written while it waits for one; then several files at once.
    timer = threading.Timer(0.1, lambda: log.record("event", number=0))
    timer.start()
    seen.append(next(following)["number"])
    timer.join()
    for number in range(1, 60):
        log.record("event", number=number)
    assert len(files_of(path)) > 8
    seen += [next(following)["number"] for _ in range(59)]
    assert seen == list(range(60))
    following.close()
    log.close()


def test_a_last_line_of_any_length_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = AuditLog(path)
    log.record("event", deep=[["\x01" * 2000] * 50] * 50)
    log.close()
    assert path.stat().st_size > 1 << 20
    again = AuditLog(path)
    again.record("next")
    again.close()
    assert (verify(path).lines, verify(path).broken_at) == (2, None)


def test_the_service_and_its_commands_know_of_all_files(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "small", SANDBOX_MODE="fake", SANDBOX_AUDIT_FILE="1m")
    service.start()
    try:
        with service.client() as client:
            client.post("/sandbox/early/shell", json={"command": "true"})
            beside = AuditLog(service.data / "audit.jsonl", max_bytes=1 << 30)
            while (service.data / "audit.jsonl").stat().st_size < 1 << 20:
                beside.record("filler", text="x" * 2000)
            client.post("/sandbox/middle/shell", json={"command": "true"})
            beside.record("filler", text="after")
            beside.close()
            client.post("/sandbox/last/shell", json={"command": "true"})
        assert len(list(service.data.glob("audit-*.jsonl"))) == 1
        for user in ("early", "middle", "last"):
            assert "execution" in service.paracle("audit", "show", "--user", user).stdout
        told = json.loads(service.paracle("audit", "verify", "--json").stdout)
        assert told["whole"] is True
    finally:
        service.stop()
    service.start()
    service.stop()
    assert service.paracle("audit", "verify").returncode == 0


def test_lines_that_were_lost_are_counted_in_the_next(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "log"
    log = AuditLog(path)
    log.record("first")
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    while not log.failures:  # until the last page of the log is full as well
        log.record("execution", text="x" * 1000)
    log.record("refused")
    assert log.failures == 2 and "cannot be written" in caplog.text
    filler.unlink()
    log.record("last")
    *_, lost, last = read(path)
    assert (lost["event"], lost["count"]) == ("lines_lost", 2)
    assert lost["events"] == {"execution": 1, "refused": 1} and lost["since"] <= last["time"]
    assert verify(path).broken_at is None
    log.record("more")
    assert sum(line["event"] == "lines_lost" for line in read(path)) == 1


def test_a_made_up_beginning_shows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filled(path)
    log = AuditLog(path)
    first, *others = path.read_bytes().splitlines(keepends=True)[2:]
    head = json.loads(first)["previous"]
    forged = {"n": 2, "time": json.loads(first)["time"], "event": "pruned", "previous": "0" * 64,
              "removed": 2, "head": head}  # fmt: skip
    honest = path.read_bytes()
    for more in ({}, {"seal": "0" * 64}):
        body = _canonical({**forged, **more})
        digest = hashlib.sha256(body.encode()).hexdigest()
        header = _canonical({**forged, **more, "hash": digest}).encode() + b"\n"
        path.write_bytes(header + first + b"".join(others))
        assert verify(path).broken_at == 1, "no key: nobody can tell who removed them"
    path.write_bytes(honest)
    # What paracle removes itself, it seals.
    assert log.prune(time.time() + 1) == 5
    log.record("after")
    log.close()
    whole = verify(path)
    assert (whole.broken_at, whole.removed) == (None, 5)
    sealed, *rest = path.read_bytes().splitlines(keepends=True)
    line = json.loads(sealed)
    for change in ({"removed": 4}, {"seal": "0" * 64}):
        odd = {**line, **change}
        del odd["hash"]
        odd["hash"] = hashlib.sha256(_canonical(odd).encode()).hexdigest()
        path.write_bytes(_canonical(odd).encode() + b"\n" + b"".join(rest))
        assert "seal" in verify(path).reason, change
    # Elsewhere, without the key, the hash that they ended with serves instead.
    path.write_bytes(sealed + b"".join(rest))
    (tmp_path / ".log.key").unlink()
    assert verify(path).broken_at == 1
    assert verify(path, after=line["head"]).broken_at is None


def _canonical(line: dict[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, separators=(",", ":"))


LONG_ADDRESS = "9" * 5000


@pytest.mark.parametrize(
    ("trusted", "given", "address"),
    [
        ((), "203.0.113.7", "127.0.0.1"),
        (("10.0.0.0/8",), "203.0.113.7", "127.0.0.1"),
        (("127.0.0.1",), "203.0.113.7", "203.0.113.7"),
        (("127.0.0.1",), "198.51.100.1, 203.0.113.7:5000", "203.0.113.7"),
        (("127.0.0.1", "10.0.0.0/8"), "198.51.100.1, 203.0.113.7, 10.1.1.1", "203.0.113.7"),
        (("127.0.0.1",), "[2001:db8::7]:443", "2001:db8::7"),
        (("127.0.0.1",), "<script>", "127.0.0.1"),
        (("127.0.0.1",), LONG_ADDRESS, "127.0.0.1"),
        (("127.0.0.1",), "203.0.113.7, " + LONG_ADDRESS, "127.0.0.1"),
    ],
)
async def test_a_proxys_word_counts_only_where_it_is_trusted(
    tmp_path: Path, trusted: tuple[str, ...], given: str, address: str
) -> None:
    place = Place(tmp_path, trusted_proxies=trusted)
    await place.service.start()
    headers = {"X-Forwarded-For": given, "X-API-Key": "wrong"}
    assert (await place.client.get("/info", headers=headers)).status_code == 401
    await place.close()
    lines = list(read(tmp_path / "audit.jsonl"))
    assert [one["address"] for one in lines if one["event"] == "refused"] == [address]


def test_the_server_itself_believes_no_proxy(fake: ServiceProcess) -> None:
    with fake.client("wrong") as stranger:
        stranger.get("/info", headers={"X-Forwarded-For": "203.0.113.99"})
    assert "203.0.113.99" not in (fake.data / "audit.jsonl").read_text()


def test_lines_keep_their_order_and_what_finds_no_room_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log, other = AuditLog(path), AuditLog(path)
    queue = AuditQueue(log, room=3)
    with other._locked():  # as while another process prunes
        for number in range(5):
            queue.record("event", number=number)
        queue.record("other")
        assert (queue.failures, queue.is_written) == (3, False)
        assert not queue.end(0.01), "nothing can be written yet"
    assert queue.end()
    assert queue.failures == 3 and queue.is_written
    log.record("after")
    lines = list(read(path))
    assert [line.get("number") for line in lines[:3]] == [0, 1, 2]
    assert [line["event"] for line in lines[3:]] == ["lines_lost", "after"]
    assert lines[3]["events"] == {"event": 2, "other": 1}
    assert verify(path).broken_at is None
    log.close()
    other.close()


async def test_the_event_loop_goes_on_while_another_process_has_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    other, journal = AuditLog(path), Journal(AuditLog(path))
    with other._locked():
        journal.record("event")  # returns, though nobody can write
        waiting = asyncio.create_task(journal.written())
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done and not journal.is_written
    await waiting
    assert journal.is_written and [line["event"] for line in read(path)] == ["event"]
    await asyncio.to_thread(journal.close)
    other.close()


def test_a_service_answers_while_its_log_is_held(fake: ServiceProcess, user: str) -> None:
    """And what is logged is answered once its line is written, not before."""
    other = AuditLog(fake.data / "audit.jsonl")
    answers: list[int] = []

    def run() -> None:
        with fake.client() as client:
            answers.append(
                client.post(f"/sandbox/{user}/shell", json={"command": "true"}).status_code
            )

    with fake.client() as client:
        with other._locked():
            asking = threading.Thread(target=run)
            asking.start()
            for _ in range(20):
                assert client.get("/health").status_code == 200
            assert not answers
            assert not any(line.get("user") == user for line in events(fake))
        asking.join()
    assert answers == [200]
    assert [line["event"] for line in events(fake) if line.get("user") == user] == [
        "create", "execution",
    ]  # fmt: skip
    other.close()
