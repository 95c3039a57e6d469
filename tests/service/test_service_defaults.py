"""What a service does that nobody has configured, and what a page in somebody's browser can do."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx2
import pytest
from service_process import ServiceProcess
from test_service_sockets import dial
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from paracle_sandbox.settings import Settings

EVIL = "https://evil.example"
PAGE = {"Origin": EVIL, "Referer": f"{EVIL}/", "Sec-Fetch-Site": "cross-site"}


def addresses(service: ServiceProcess) -> list[tuple[str, str]]:
    """All that the service describes, and a few that it does not."""
    with service.client() as client:
        described = client.get("/openapi.json").json()["paths"]
    found = [
        (method.upper(), path.format(user_id="u", command_id="c", key_id="k", sandbox_id="s"))
        for path, methods in described.items()
        for method in methods
    ]
    assert len(found) > 30
    return [*found, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/no/such/address")]


def assert_no_page_may_read(answer: httpx2.Response) -> None:
    assert "set-cookie" not in answer.headers, answer.headers
    assert not [name for name in answer.headers if name.startswith("access-control-")], answer
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


@pytest.mark.case("N12")
def test_no_address_lets_pages_of_others_read_or_sets_a_cookie(fake: ServiceProcess) -> None:
    """With a key and without, and when a browser asks first what it may send."""
    asking = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "X-API-Key",
    }
    found = addresses(fake)
    with fake.client() as known, httpx2.Client(base_url=fake.url, timeout=60) as unknown:
        for method, path in found:
            answer = unknown.request(method, path, headers=PAGE)
            assert_no_page_may_read(answer)
            preflight = unknown.request("OPTIONS", path, headers={**PAGE, **asking})
            assert preflight.status_code == 401 or path in ("/health", "/ready"), path
            assert_no_page_may_read(preflight)
            assert_no_page_may_read(known.request("OPTIONS", path, headers={**PAGE, **asking}))
            if method == "GET" and not path.endswith("/stream"):
                assert_no_page_may_read(known.get(path, headers=PAGE))
        done = known.post("/sandbox/cookies/shell", json={"command": "true"}, headers=PAGE)
        assert done.status_code == 200
        assert_no_page_may_read(done)


def sent_by_a_browser(key: str) -> list[dict[str, dict[str, str]]]:
    """Ways in which a browser would add the key by itself, or a link or form could carry it."""
    words = ("api_key", "X-API-Key", "x-api-key", "key", "token", "access_token", "session")
    cookies = "; ".join(f"{word}={key}" for word in words)
    return [
        {"headers": {"Cookie": cookies}},
        {"headers": {"Cookie": f"Authorization=Bearer {key}"}},
        {"params": dict.fromkeys(words, key)},
        {"params": {"Authorization": f"Bearer {key}"}},
    ]


@pytest.mark.parametrize(
    "kind", ["application/json", "text/plain", "application/x-www-form-urlencoded"]
)
@pytest.mark.case("N12")
def test_a_page_makes_no_request_in_somebodys_name(fake: ServiceProcess, kind: str) -> None:
    """The right key counts as a header alone, which no form can send and no browser adds."""
    user = f"forged-{kind.rpartition('/')[2]}"
    with httpx2.Client(base_url=fake.url, timeout=60) as page, fake.client() as operator:
        for how in sent_by_a_browser(fake.key):
            headers = {**PAGE, "Content-Type": kind, **how.get("headers", {})}
            answer = page.post(
                f"/sandbox/{user}/shell", content=b'{"command": "echo forged > mark"}',
                headers=headers, params=how.get("params"),
            )  # fmt: skip
            assert answer.status_code == 401, (how, answer.text)
        answer = page.get("/info", auth=("api", fake.key))
        assert answer.status_code == 401, "a browser remembers a password"
        assert answer.headers["www-authenticate"] == "Bearer", "or it would ask for a password"
        assert operator.get(f"/sandbox/{user}/status").status_code == 404, "it was made"


@pytest.mark.parametrize("path", ["/sandbox/forged/ws", "/sandbox/forged/terminal",
                                  "/v1/sandboxes/forged/channel"])  # fmt: skip
@pytest.mark.case("N12")
def test_a_page_opens_no_socket_in_somebodys_name(fake: ServiceProcess, path: str) -> None:
    """No other origin is kept from WebSockets by a browser: the key alone does it."""
    for how in sent_by_a_browser(fake.key):
        query = "&".join(f"{name}={value}" for name, value in how.get("params", {}).items())
        headers = {"Origin": EVIL, **how.get("headers", {})}
        url = f"{fake.url.replace('http', 'ws', 1)}{path}?{query.replace(' ', '%20')}"
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers)
        assert refused.value.response.status_code == 401


@pytest.mark.case("N12")
def test_documentation_wants_a_key_and_figures_an_admins(fake: ServiceProcess) -> None:
    with fake.client("") as nobody, fake.client(fake.keys("make", "ann")) as ann:
        for path in ("/docs", "/redoc", "/openapi.json", "/metrics", "/metrics/", "/keys"):
            assert nobody.get(path).status_code == 401, path
        assert ann.get("/openapi.json").status_code == 200
        for path in ("/metrics", "/keys"):
            assert ann.get(path).status_code == 403, path
            with fake.client() as admin:
                assert admin.get(path).status_code == 200, path


def listening(service: ServiceProcess) -> set[str]:
    """Where the process listens, from the kernel's own list: addresses in hexadecimal."""
    ours = {
        link.readlink().name if link.is_symlink() else ""
        for link in Path(f"/proc/{service.pid}/fd").iterdir()
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{service.pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours
    }


GUESSES = ["", "admin", "password", "changeme", "secret", "test", "key", "paracle", "sandbox",
           "prc_", "null", "None", "undefined", "0", "*"]  # fmt: skip


@pytest.mark.case("N12")
def test_a_first_start_has_a_key_of_its_own_wherever_it_listens(
    fake: ServiceProcess, tmp_path: Path
) -> None:
    """There is no start without a key: one that nobody gave is made, and is as long as a key is.
    Other machines are listened to only by who says so, and get no more for it."""
    assert Settings().api_host == "127.0.0.1" and Settings().api_key is None
    assert listening(fake) == {f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}"}
    open_wide = ServiceProcess(tmp_path / "wide", SANDBOX_MODE="fake", SANDBOX_API_HOST="0.0.0.0")
    open_wide.start()
    try:
        assert listening(open_wide) == {"00000000"}
        secret = open_wide.key.split("_", 2)[2]
        assert len(secret) >= 43 and secret != fake.key.split("_", 2)[2]
        with httpx2.Client(base_url=open_wide.url, timeout=60) as stranger:
            for guess in (*GUESSES, fake.key, open_wide.key[:-1]):
                bearer = f"Bearer {guess}".rstrip()
                for headers in ({"X-API-Key": guess}, {"Authorization": bearer}):
                    assert stranger.get("/info", headers=headers).status_code == 401, guess
        with open_wide.client() as owner:
            assert owner.get("/info").status_code == 200
    finally:
        open_wide.stop()


@pytest.mark.case("N12")
def test_an_empty_key_of_the_settings_opens_nothing(tmp_path: Path) -> None:
    """As the compose file hands it on where it is not set."""
    service = ServiceProcess(tmp_path / "empty", SANDBOX_MODE="fake", SANDBOX_API_KEY="").start()
    try:
        with service.client("") as nobody:
            assert nobody.get("/info").status_code == 401
        with pytest.raises(InvalidStatus):
            dial(service, "/sandbox/ann/ws", "")
        assert service.key.startswith("prc_"), "the first start made one"
        with service.client() as owner:
            assert owner.get("/info").status_code == 200
    finally:
        service.stop()


@pytest.mark.case("N11")
def test_no_request_names_an_address_to_fetch_from_or_to_call(fake: ServiceProcess) -> None:
    """There is no webhook, and no file comes from an address: what is not there leads nowhere."""
    with fake.client() as client:
        found = client.get("/openapi.json").json()
    words = {"url", "uri", "webhook", "callback", "hook", "git", "registry", "proxy", "index"}
    names = [
        name
        for schema in found["components"]["schemas"].values()
        for name in schema.get("properties", {})
    ] + [
        one["name"]
        for methods in found["paths"].values()
        for operation in methods.values()
        for one in operation.get("parameters", [])
    ]
    assert len(names) > 40
    assert [name for name in names if words & set(name.lower().split("_"))] == []
    assert "callbacks" not in str(found) and "webhooks" not in found
