"""Hostile clients: nobody gets in without a key, nobody gets more than a moment of attention."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import secrets
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from service_process import ServiceProcess, wait_until

from paracle_sandbox.service.app import MAX_OPEN_PER_KEY
from paracle_sandbox.service.server import MAX_CONNECTIONS

PUBLIC = {("get", "/health"), ("get", "/ready")}
LONG = bool(os.environ.get("PARACLE_LONG"))
SLOW = MAX_CONNECTIONS + 500 if LONG else 1000
SOCKETS = 5000 if LONG else MAX_OPEN_PER_KEY + 200


def dial(service: ServiceProcess) -> socket.socket:
    parts = urlsplit(service.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def raw(service: ServiceProcess, request: bytes) -> bytes:
    """The answer to exactly these bytes."""
    with dial(service) as connection:
        try:
            connection.sendall(request)
        except OSError:
            pass  # it hung up before it had all
        return answer_of(connection)


def answer_of(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except OSError:
        pass
    return answer


def one_answer(connection: socket.socket) -> bytes:
    """The head and the body of the next answer, however many pieces they come in."""
    answer = b""
    while part := connection.recv(65536):
        answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if length and len(body) >= int(length[1]):
            break
    return answer


def resident(service: ServiceProcess) -> int:
    text = Path(f"/proc/{service.pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Who are you


def routes(service: ServiceProcess, user: str = "u") -> Iterator[tuple[str, str]]:
    with service.client() as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            for method in methods:
                yield method, path.format(user_id=user, command_id="c", key_id="k", sandbox_id="s")


@pytest.mark.parametrize(
    "key", [None, "", "wrong", "prc_000000000000_" + "x" * 43, "x" * 10_000, "revoked"]
)
@pytest.mark.case("N01")
def test_every_route_wants_a_key(fake: ServiceProcess, key: str | None) -> None:
    if key == "revoked":
        key = fake.keys("make", "--admin")
        assert fake.paracle("keys", "revoke", key.split("_")[1]).returncode == 0
    headers = {} if key is None else {"X-API-Key": key}
    user = f"nobody-{secrets.token_hex(4)}"  # whom no other test has made a sandbox for
    found = [
        *routes(fake, user),
        ("options", "/info"),
        ("head", "/info"),
        ("trace", "/info"),
        ("get", "/sandbox/u/"),
        ("get", "//info"),
        ("get", "/INFO"),
        ("get", "/health/"),
        ("post", "/health"),
        ("get", "/health/..;/info"),
        ("get", "/%69nfo"),
        ("get", "/docs"),
        ("get", "/v1/sandboxes/"),
        ("patch", "/sandbox/u/file"),
    ]
    assert len(found) > 40
    with httpx2.Client(base_url=fake.url, headers=headers, timeout=30) as client:
        for method, path in found:
            answer = client.request(method, path)
            expected = 200 if (method, path) in PUBLIC else 401
            assert answer.status_code == expected, (method, path, answer.status_code)
    with fake.client() as operator:
        assert operator.get(f"/sandbox/{user}/status").status_code == 404, "it was made"


@pytest.mark.case("N01")
def test_two_different_keys_in_one_request_open_nothing(fake: ServiceProcess) -> None:
    answer = httpx2.get(
        f"{fake.url}/info", headers=[("X-API-Key", fake.key), ("X-API-Key", "other")]
    )
    assert answer.status_code == 401


@pytest.mark.case("N04")
def test_the_time_of_a_refusal_tells_nothing(fake: ServiceProcess) -> None:
    right_id = fake.key.rsplit("_", 1)[0] + "_" + "x" * 43
    nearly = fake.key[:-1] + ("A" if fake.key[-1] != "A" else "B")
    samples: dict[str, list[float]] = {right_id: [], nearly: [], "prc_000000000000_" + "x" * 43: []}
    with httpx2.Client(base_url=fake.url, timeout=30) as client:
        for _ in range(150):
            for key, times in samples.items():
                started = time.perf_counter()
                assert client.get("/info", headers={"X-API-Key": key}).status_code == 401
                times.append(time.perf_counter() - started)
    medians = [statistics.median(times) for times in samples.values()]
    # A byte-by-byte comparison would show in nanoseconds; a lookup that is skipped in tens of
    # microseconds. What is allowed here is the noise of a loopback.
    assert max(medians) - min(medians) < 0.0015, medians


# Addresses and names


@pytest.mark.parametrize(
    "path",
    [
        "/sandbox/../execute",
        "/sandbox/..%00/create",
        "/sandbox//create",
        "/sandbox/./create",
        "/sandbox/%0d%0aX-Evil:1/create",
        "/sandbox/" + "x" * 10_000 + "/create",
        "/sandbox/%ff%fe/create/..",
        "/sandbox/a%00b/create",
        "/sandbox/%2e/create",
        "/sandbox/%2e%2e%2f%2e%2e/create",
        "/sandbox/..%2f..%2fcanary/create",
        "/sandbox/%2fetc%2fpasswd/create",
        "/sandbox/..%5c../create",
        "/sandbox/%e2%88%95b/create",
    ],
)
@pytest.mark.case("N03")
def test_odd_users_are_refused(fake: ServiceProcess, path: str) -> None:
    before = (
        sorted(p.name for p in (fake.data / "users").iterdir())
        if (fake.data / "users").exists()
        else []
    )
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {fake.key}\r\nContent-Length: 0\r\n"
    answer = raw(fake, (head + "Connection: close\r\n\r\n").encode())
    assert answer.startswith(b"HTTP/1.1 4"), answer[:200]
    after = (
        sorted(p.name for p in (fake.data / "users").iterdir())
        if (fake.data / "users").exists()
        else []
    )
    assert before == after
    assert b"X-Evil" not in answer.split(b"\r\n\r\n")[0]


@pytest.mark.parametrize("user", ["a%2f...%2fcanary", "etc%2fpasswd", "...", "%252e%252e", "CON"])
@pytest.mark.case("N03")
def test_users_that_look_like_paths_lead_nowhere(fake: ServiceProcess, user: str) -> None:
    """A user id is text, and names of directories are hashes of it."""
    with fake.client() as client:  # with the first user comes the directory of all
        client.post("/sandbox/first/create")
    canary = fake.data / "canary"
    canary.write_text("untouched")
    outside = sorted(path.name for path in fake.data.iterdir())
    head = f"POST /sandbox/{user}/create HTTP/1.1\r\nHost: x\r\nX-API-Key: {fake.key}\r\n"
    answer = raw(fake, (head + "Content-Length: 0\r\nConnection: close\r\n\r\n").encode())
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    assert sorted(path.name for path in fake.data.iterdir()) == outside
    made = [path.name for path in (fake.data / "users").iterdir()]
    assert all(re.fullmatch("[0-9a-f]{40}", name) for name in made), made
    assert canary.read_text() == "untouched"


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "..",
        "/",
        "/proc/self/environ",
        "x\0y",
        "/workspace/../etc/shadow",
        "../" * 500 + "etc/passwd",
    ],
)
@pytest.mark.case("N03")
def test_paths_that_leave_are_refused_and_recorded(native: ServiceProcess, path: str) -> None:
    with native.client() as client:
        user = "/sandbox/escaper"
        tried = [
            client.get(f"{user}/file", params={"path": path}),
            client.post(f"{user}/file", json={"path": path, "content": "x"}),
            client.delete(f"{user}/file", params={"path": path}),
            client.get(f"{user}/files", params={"path": path}),
            client.get(f"{user}/stat", params={"path": path}),
            client.get(f"{user}/exists", params={"path": path}),
            client.post(f"{user}/mkdir", json={"path": path}),
            client.get(f"{user}/files/raw", params={"path": path}),
            client.put(f"{user}/files/raw", params={"path": path}, content=b"x"),
        ]
        assert all(400 <= answer.status_code < 500 for answer in tried), [
            (answer.status_code, answer.text[:100]) for answer in tried
        ]
    log = native.paracle("audit", "show", "--event", "security", "--json").stdout
    assert "path_escape" in log and '"user": "escaper"' in log


@pytest.mark.case("N03")
def test_links_that_leave_are_refused(native: ServiceProcess) -> None:
    with native.client() as client:
        client.post("/sandbox/linker/shell", json={"command": "ln -s /etc/passwd l; ln -s /etc d"})
        assert client.get("/sandbox/linker/file", params={"path": "l"}).status_code == 400
        assert client.get("/sandbox/linker/file", params={"path": "d/passwd"}).status_code == 400


@pytest.mark.case("N17")
def test_a_file_name_cannot_add_a_header(native: ServiceProcess) -> None:
    name = 'x"\r\nSet-Cookie: evil=1\r\n.html'
    with native.client() as client:
        client.post("/sandbox/namer/file", json={"path": name, "content": "<script>"})
        answer = client.get("/sandbox/namer/files/raw", params={"path": name})
    assert answer.content == b"<script>"
    assert "set-cookie" not in answer.headers
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"


# Bodies and headers


def body_request(service: ServiceProcess, headers: str, path: str = "/sandbox/u/execute") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n"
        f"Content-Type: application/json\r\n{headers}\r\n"
    ).encode()


@pytest.mark.case("N05")
def test_an_announced_giant_is_refused_at_once(fake: ServiceProcess) -> None:
    for length in ("10737418240", "9" * 30):
        answer = raw(fake, body_request(fake, f"Content-Length: {length}\r\n"))
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400")), answer[:100]
        assert b"onnection: close" in answer.split(b"\r\n\r\n")[0]


@pytest.mark.parametrize("length", ["-1", "1e3", "abc", "+5", "5, 6"])
@pytest.mark.case("N05")
def test_a_length_that_is_none(fake: ServiceProcess, length: str) -> None:
    answer = raw(fake, body_request(fake, f"Content-Length: {length}\r\n"))
    assert answer.startswith(b"HTTP/1.1 4"), answer[:100]


@pytest.mark.case("N05")
def test_an_endless_body_is_cut_off_and_costs_little(fake: ServiceProcess) -> None:
    before = resident(fake)
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with dial(fake) as connection:
        connection.sendall(body_request(fake, "Transfer-Encoding: chunked\r\n"))
        sent = 0
        try:
            while sent < 200:
                connection.sendall(piece)
                sent += 1
        except OSError:
            pass
        answer = answer_of(connection)
    assert sent < 200, "it took 200 MB"
    assert not answer or answer.startswith(b"HTTP/1.1 413"), answer[:200]
    assert resident(fake) - before < 50 << 20


@pytest.mark.case("N05")
def test_compressed_bodies_are_not_unpacked(fake: ServiceProcess) -> None:
    answer = raw(
        fake, body_request(fake, "Content-Encoding: gzip\r\nContent-Length: 5\r\n") + b"xxxxx"
    )
    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "headers",
    ["X-Big: " + "x" * (1 << 20) + "\r\n", "".join(f"X-{n}: 1\r\n" for n in range(100_000))],
    ids=["one of a megabyte", "a hundred thousand"],
)
@pytest.mark.case("N05")
def test_too_many_headers(fake: ServiceProcess, headers: str) -> None:
    before = resident(fake)
    answer = raw(fake, body_request(fake, headers))
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")) or not answer, answer[:100]
    assert resident(fake) - before < 50 << 20


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"1;", b"a" * 4096),
        (b"1\r\n \r\n0\r\n", b"X-After: 1\r\n" * 400),
        (b"1\r\n \r\n0\r\nX-After: ", b"x" * 4096),
    ],
    ids=["what describes a piece", "headers after it", "one header after it"],
)
@pytest.mark.case("N05")
def test_what_has_no_end_around_a_body_is_cut_off(
    fake: ServiceProcess, begin: bytes, more: bytes
) -> None:
    before = resident(fake)
    with dial(fake) as connection:
        connection.sendall(body_request(fake, "Transfer-Encoding: chunked\r\n") + begin)
        sent = 0
        try:
            while sent < 4096:
                connection.sendall(more)
                sent += 1
        except OSError:
            pass
    assert sent < 4096, "it took 16 MB"
    assert resident(fake) - before < 20 << 20


@pytest.mark.parametrize("hosts", ["", "Host: a\r\nHost: b\r\n"], ids=["none", "two"])
@pytest.mark.case("N05")
def test_a_request_names_one_host(fake: ServiceProcess, hosts: str) -> None:
    request = f"GET /health HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n"
    assert raw(fake, request.encode()).startswith(b"HTTP/1.1 400")
    old = raw(fake, b"GET /health HTTP/1.0\r\n\r\n")
    assert old.startswith(b"HTTP/1.1 200")


def test_what_comes_after_a_body_is_no_header(fake: ServiceProcess) -> None:
    answer = raw(
        fake,
        b"POST /sandbox/u/execute HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b'd\r\n{"code": "1"}\r\n0\r\nX-API-Key: %s\r\n\r\n' % fake.key.encode(),
    )
    assert answer.startswith(b"HTTP/1.1 401"), answer[:100]


@pytest.mark.parametrize("kind", ["x", "h2c", "websocket"])
def test_a_body_is_no_request(fake: ServiceProcess, kind: str) -> None:
    """Whatever else its head asks for: behind a proxy, the next request is another's."""
    hidden = "DELETE /sandbox/victim/destroy HTTP/1.1\r\nHost: x\r\nX-Hides: "
    head = (
        "GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\n"
        f"Upgrade: {kind}\r\nContent-Length: {len(hidden)}\r\n\r\n"
    )
    other = f"GET /info HTTP/1.1\r\nHost: x\r\nX-API-Key: {fake.key}\r\nConnection: close\r\n\r\n"
    with dial(fake) as connection:
        connection.sendall((head + hidden).encode())
        first = one_answer(connection)
        try:
            connection.sendall(other.encode())
        except OSError:
            pass  # it hung up on us: just as well
        rest = answer_of(connection)
    assert b"sandbox" not in (first + rest).split(b"\r\n\r\n")[1], "it took it for a request"
    assert b"victim" not in first + rest
    assert first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4"))
    assert not rest or rest.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4"))
    assert b"404" not in rest[:20], rest[:200]


def test_requests_sent_all_at_once_cost_little(fake: ServiceProcess) -> None:
    before = resident(fake)
    body = b'{"code": "print(1)"}'
    many = (body_request(fake, f"Content-Length: {len(body)}\r\n") + body) * 400
    with dial(fake) as connection:
        connection.setblocking(False)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                connection.send(many)
            except BlockingIOError:
                with contextlib.suppress(BlockingIOError):
                    connection.recv(1 << 20)
                time.sleep(0.001)
            except OSError:
                break
        else:
            pytest.fail("it was listened to all the time")
        assert resident(fake) - before < 50 << 20
        assert httpx2.get(f"{fake.url}/health", timeout=5).status_code == 200


def test_answered_requests_are_not_kept(fake: ServiceProcess) -> None:
    with dial(fake) as connection, connection.makefile("rb") as answers:
        for number in range(6000):
            if number == 1000:  # from here on, all that is needed is there
                before = resident(fake)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            length = 0
            while (line := answers.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length"):
                    length = int(line.split()[1])
            answers.read(length)
    assert resident(fake) - before < 10 << 20


@pytest.mark.parametrize("count", [10_000, 1_000_000])
@pytest.mark.case("N05")
def test_parts_without_end_are_refused(fake: ServiceProcess, count: int) -> None:
    """Nothing here takes forms: a body of many parts is not JSON, or too large."""
    before = resident(fake)
    body = b"--b\r\n\r\n\r\n" * count + b"--b--\r\n"
    head = (
        f"POST /sandbox/u/execute HTTP/1.1\r\nHost: x\r\nX-API-Key: {fake.key}\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    answer = raw(fake, head.encode() + body)
    assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 422")) or not answer, answer[:100]
    assert resident(fake) - before < 50 << 20


@pytest.mark.case("N05")
def test_a_small_body_that_unpacks_to_much_is_not_unpacked(fake: ServiceProcess) -> None:
    bomb = gzip.compress(b" " * (100 << 20))
    before = resident(fake)
    head = f"Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n"
    assert raw(fake, body_request(fake, head) + bomb).startswith(b"HTTP/1.1 400")
    assert resident(fake) - before < 50 << 20


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0\1\2\3" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /info HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nabc",
    ],
)
def test_what_is_not_http_ends_in_a_refusal(fake: ServiceProcess, request_bytes: bytes) -> None:
    with dial(fake) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = answer_of(connection)
    assert not answer or answer[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 2"), answer[:100]
    assert httpx2.get(f"{fake.url}/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        '{"code": "1", "code": "2"}',
        '{"code": NaN}',
        "[" * 100_000,
        '{"code": ' + "9" * 100_000 + "}",
        '{"code": 1}',
        '{"code": ["1"]}',
        '{"code": null}',
        "null",
        "[]",
        '"x"',
        "",
        "\xff",
        '{"code": "1", "privileged": true}',
        '{"code": "1", "timeout": true}',
        '{"code": "1",}',
        '{"code": "1", "timeout": 1e400}',
        '{"code": "1", "timeout": "30x"}',
        '{"__proto__": {}}',
        '{"a":' * 40 + "1" + "}" * 40,
    ],
)
@pytest.mark.case("N08")
def test_json_that_means_mischief(fake: ServiceProcess, body: str) -> None:
    with fake.client() as client:
        answer = client.post(
            "/sandbox/u/execute",
            content=body.encode("latin-1"),
            headers={"Content-Type": "application/json"},
        )
    assert answer.status_code in (400, 413, 422), (body[:50], answer.text[:200])
    assert answer.json()["error"] and answer.json()["kind"] == "bad_input"


@pytest.mark.case("N19")
def test_log_lines_cannot_be_forged(fake: ServiceProcess) -> None:
    evil = 'a"}\n{"n": 1, "event": "forged'
    with fake.client() as client:
        client.post("/sandbox/forger/file", json={"path": evil, "content": "x"})
        client.get("/info", headers={"X-API-Key": evil.replace("\n", " ")})
        for name in ("\x1b[2Jwiped", "\u202egpj.exe", "\x9b31m"):
            client.post("/sandbox/forger/file", json={"path": f"../{name}", "content": "x"})
            client.post(f"/sandbox/forger-{quote(name)}/create")
        client.get("/metrics", headers={"User-Agent": "\x9b31m\u00ff".encode("latin-1")})
    lines = (fake.data / "audit.jsonl").read_text().splitlines()
    assert all(json.loads(line)["event"] != "forged" for line in lines)
    assert fake.paracle("audit", "verify").returncode == 0
    raw_text = "\n".join(lines) + fake.errors.read_text()
    assert "wiped" in raw_text, "they are on record"
    assert not {"\x1b", "\x9b", "\u202e"} & set(raw_text), "what is read in a terminal"


@pytest.mark.case("N04")
def test_keys_are_in_no_log(fake: ServiceProcess) -> None:
    with fake.client("prc_123456789abc_" + "s" * 43) as stranger:
        stranger.get("/info")
    secret = fake.key.split("_", 2)[2]
    # The file for the owner alone is where the key is to be.
    written = [p for p in fake.home.rglob("*") if p.is_file() and p.name != "first-key"]
    for path in written:
        content = path.read_bytes()
        assert secret.encode() not in content, path
        assert b"s" * 43 not in content, path


# Slow clients


@pytest.mark.case("N06")
def test_a_connection_that_says_nothing_is_closed(fake: ServiceProcess) -> None:
    with dial(fake) as silent, dial(fake) as slow, dial(fake) as stuck:
        slow.sendall(b"GET /health HTTP/1.1\r\nHo")
        stuck.sendall(body_request(fake, "Content-Length: 100\r\n") + b'{"code"')
        started = time.monotonic()
        for connection in (silent, slow, stuck):
            assert b"HTTP/1.1 200" not in answer_of(connection)
        assert time.monotonic() - started < 45


def times_of(client: httpx2.Client, count: int = 200) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        assert client.get("/info").status_code == 200
        times.append(time.perf_counter() - started)
    return sorted(times)


def p99(times: list[float]) -> float:
    return times[len(times) * 99 // 100]


def assert_no_slower(client: httpx2.Client, alone: float) -> None:
    """Five times as slow at most. A machine that does other things meanwhile has bad moments, which
    pass; what the held connections cost does not, so one good round of a few is enough."""
    rounds = []
    for _ in range(5):
        rounds.append(p99(times_of(client)))
        if rounds[-1] < alone * 5 + 0.05:
            return
    pytest.fail(f"{alone:.3f} s alone, now {rounds}")


@pytest.mark.case("N06")
@pytest.mark.clock
def test_many_slow_clients_do_not_slow_the_others(fake: ServiceProcess) -> None:
    """N06, and more of them than the service has connections for."""
    before = resident(fake)
    held: list[socket.socket] = []
    with fake.client() as client:
        alone = p99(times_of(client))
        try:
            for number in range(SLOW):
                held.append(dial(fake))
                held[-1].sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
                if number % 500 == 0:
                    assert client.get("/info").status_code == 200
            assert_no_slower(client, alone)
            with httpx2.Client(base_url=fake.url, timeout=30) as stranger:
                assert stranger.get("/health").status_code == 200
            assert resident(fake) - before < 300 << 20
        finally:
            for connection in held:
                connection.close()


@pytest.mark.case("N06")
@pytest.mark.clock
def test_idle_websockets_are_counted(fake: ServiceProcess) -> None:
    """N06: a key has so many open, and its neighbours do not notice."""
    greedy, modest = fake.keys("make", "greedy"), fake.keys("make", "modest")
    head = (
        f"GET /sandbox/greedy/ws HTTP/1.1\r\nHost: x\r\nX-API-Key: {greedy}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()
    held: list[socket.socket] = []
    statuses: Counter[bytes] = Counter()
    with fake.client(modest) as client:
        alone = p99(times_of(client))
        try:
            for _ in range(SOCKETS):
                connection = dial(fake)
                held.append(connection)
                connection.sendall(head)
            for connection in held:
                statuses[connection.recv(12)[-3:]] += 1
            assert 0 < statuses[b"101"] <= MAX_OPEN_PER_KEY, statuses
            assert set(statuses) == {b"101", b"429"}, statuses
            assert_no_slower(client, alone)
            assert '"reason":"connections"' in (fake.data / "audit.jsonl").read_text()
        finally:
            for connection in held:
                connection.close()
    with fake.client(greedy) as client:
        wait_until(lambda: client.get("/info").status_code == 200, 30)


@pytest.mark.case("N06")
def test_a_reader_that_stops_does_not_stop_the_others(native: ServiceProcess) -> None:
    body = json.dumps({"command": "yes | head -c 200000000", "timeout": 120}).encode()
    before = resident(native)
    with dial(native) as lazy, native.client() as client:
        head = body_request(native, f"Content-Length: {len(body)}\r\n", "/sandbox/lazy/stream")
        lazy.sendall(head + body)
        assert lazy.recv(100).startswith(b"HTTP/1.1 200")
        for number in range(20):
            answer = client.post("/sandbox/eager/execute", json={"code": f"print({number})"})
            assert answer.json()["output"] == f"{number}\n"
        assert resident(native) - before < 50 << 20
    with native.client() as client:
        usage = "/sandbox/lazy/usage"
        wait_until(lambda: client.get(usage).json()["running_executions"] == 0, 60)


@pytest.mark.case("N14")
def test_who_goes_away_leaves_nothing_running(native: ServiceProcess) -> None:
    body = json.dumps({"command": "echo started > mark; sleep 250", "timeout": 300}).encode()
    with native.client() as client:
        client.post("/sandbox/leaver/create")

        def usage() -> Any:
            return client.get("/sandbox/leaver/usage").json()

        for path in ("shell", "stream"):
            with dial(native) as connection:
                head = body_request(
                    native, f"Content-Length: {len(body)}\r\n", f"/sandbox/leaver/{path}"
                )
                connection.sendall(head + body)
                wait_until(lambda: usage()["running_executions"] == 1, 30)
            wait_until(lambda: usage()["running_executions"] == 0, 30)
        look = {"command": "cat /proc/[0-9]*/comm"}
        assert "sleep" not in client.post("/sandbox/leaver/shell", json=look).json()["output"]
