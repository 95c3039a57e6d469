"""Packages in sandboxes that have no network, and nothing but packages."""

from __future__ import annotations

import asyncio
import base64
import socket
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from index_server import IndexServer, wheel
from service_process import ServiceProcess

from no_http import mail_server
from paracle_sandbox.backends.base import Backend
from paracle_sandbox.backends.registry import get_backend
from paracle_sandbox.errors import SandboxError
from paracle_sandbox.sandbox import package_index, package_proxy
from paracle_sandbox.sandbox.package_index import NotOffered, PackageIndex, index_of_this_machine
from paracle_sandbox.sandbox.package_proxy import MAX_FETCHES, serving
from paracle_sandbox.sandbox.packages import checked_requirement
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.service.routes.packages import split_requirements
from paracle_sandbox.settings import load_settings
from paracle_sandbox.testing.fake import FakeBackend

REFUSED = [
    "--index-url http://evil.example",
    "-r /etc/passwd",
    "-e git+https://x.example/y",
    "x; rm -rf /",
    "pkg @ file:///etc/passwd",
    "pkg @ https://evil.example/x.whl",
    "--target=/",
    "good\n--pre",
    ".",
    "./dir",
    "/abs/path",
    "../up",
    "git+https://x.example/y",
    "",
    "a b",
    "$(id)",
    "x\0y",
    "https://evil.example/x.whl",
    "pkg --pre",
    "-",
    "`id`",
    "pkg ; import os",
]


@pytest.fixture
def index() -> Iterator[IndexServer]:
    server = IndexServer(
        wheel("needy", "1.0", requires="simple>=2"),
        wheel("simple", "1.0"),
        wheel("simple", "2.5"),
        wheel("simple", "3.0"),
        wheel("large", "1.0", body="X = '" + "x" * 2_000_000 + "'"),
    )
    yield server
    server.close()


@pytest_asyncio.fixture
async def backend(tmp_path: Path, native_works: None) -> AsyncIterator[Backend]:
    directories = {
        "PARACLE_STATE_DIR": str(tmp_path / "s"),
        "PARACLE_DATA_DIR": str(tmp_path / "d"),
    }
    settings = load_settings({**directories, "PARACLE_TEMPLATE_BUILD": "0", "HOME": str(tmp_path)})
    backend = get_backend("native", settings)
    yield backend
    await backend.close()


@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.case("N10")
def test_only_requirements_are_taken(text: str) -> None:
    with pytest.raises(ValueError):
        checked_requirement(text)


@pytest.mark.parametrize(
    "text", ["simple", "simple>=2.0", "simple[extra]==1.*", 'simple<3; python_version > "3.8"']
)
def test_requirements_are_taken(text: str) -> None:
    assert checked_requirement(text).startswith("simple")


async def test_packages_without_a_network(backend: Backend, index: IndexServer) -> None:
    async with Sandbox(backend, "pip-one") as sandbox, Sandbox(backend, "pip-two") as other:
        assert sandbox.config.network_mode == "none"
        done = await sandbox.install("needy", "simple<3", index_url=index.url)
        assert done["exit_code"] == 0, done
        told = "import needy, simple; print(needy.VERSION, simple.VERSION)"
        assert (await sandbox.run_code(told))["stdout"] == "1.0 2.5\n"
        assert await sandbox.run_command(["python3", "-c", told]) == "1.0 2.5\n"
        assert await sandbox.run_command("simple-tool") == "2.5\n"
        installed = await sandbox.installed_packages()
        assert {"name": "simple", "version": "2.5"} in installed
        assert (await other.run_code("import simple"))["exit_code"] == 1
        assert all(asked.startswith("GET /") for asked in index.asked)


async def test_packages_count_against_the_disk(backend: Backend, index: IndexServer) -> None:
    async with Sandbox(backend, "pip-disk") as sandbox:
        before = (await sandbox.get_stats())["disk_mb"]
        assert (await sandbox.install("large", index_url=index.url))["exit_code"] == 0
        assert (await sandbox.get_stats())["disk_mb"] > before + 1


async def test_what_is_not_there_fails_as_a_program(backend: Backend, index: IndexServer) -> None:
    async with Sandbox(backend, "pip-none") as sandbox:
        done = await sandbox.install("no-such-thing", index_url=index.url)
        assert done["exit_code"] != 0
        assert "no-such-thing" in done["stderr"]
        done = await sandbox.install("simple", index_url="http://127.0.0.1:9/simple/", timeout=60)
        assert done["exit_code"] != 0
        with pytest.raises(ValueError, match="at least one"):
            await sandbox.install()


async def test_an_index_may_speak_json(backend: Backend) -> None:
    index = IndexServer(wheel("simple", "1.0"), as_json=True)
    async with Sandbox(backend, "pip-json") as sandbox:
        done = await sandbox.install("simple", index_url=index.url)
        assert done["exit_code"] == 0, done
    index.close()


@pytest.mark.case("L11")
@pytest.mark.case("N10", "N11")
async def test_the_opening_is_no_way_out(index: IndexServer) -> None:
    """Whatever a program inside sends to the port: only lists and files of the index come back."""
    backend = FakeBackend()
    canary = IndexServer()
    target = canary.url.removeprefix("http://").partition("/")[0]
    async with Sandbox(backend, "relay") as sandbox:
        async with serving(sandbox._live(), PackageIndex(index.url)) as port:
            lines = [
                f"CONNECT {target} HTTP/1.1",
                f"GET http://{target}/ HTTP/1.1",
                "POST /simple/simple/ HTTP/1.1",
                "PUT /file/x HTTP/1.1",
                "GET /simple/../files/simple-1.0-py3-none-any.whl HTTP/1.1",
                "GET /files/simple-1.0-py3-none-any.whl HTTP/1.1",
                f"GET /file/{'0' * 32}/x HTTP/1.1",
                "GET //evil.example/x HTTP/1.1",
                "GET /simple/UPPER/ HTTP/1.1",
                "DELETE / HTTP/1.1",
                f"GET /simple/{'x' * 200}/ HTTP/1.1",
                "GET /simple/a%2fb/ HTTP/1.1",
                "nonsense",
                "",
                "GET /simple/simple/?q=secret HTTP/1.1",
                "GET @evil.example/ HTTP/1.1",
            ]
            program = textwrap.dedent(f"""
                import socket
                for line in {lines!r}:
                    with socket.create_connection(("127.0.0.1", {port})) as s:
                        s.sendall(line.encode() + b"\\r\\nHost: {target}\\r\\n\\r\\n")
                        answer = b""
                        while part := s.recv(65536):
                            answer += part
                        print(answer.split(b" ")[1].decode())
            """)
            codes = (await sandbox.run_code(program, timeout=60))["stdout"].split()
            assert codes and set(codes) <= {"404", "405"}, codes
            assert len(codes) == len(lines)
            good = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/simple/simple/').status)"
            assert (await sandbox.run_code(good))["stdout"] == "200\n"
        gone = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        assert "refused" in (await sandbox.run_code(gone))["stderr"]
    assert canary.asked == []
    assert index.asked == ["GET /simple/simple/"]
    canary.close()
    await backend.close()


async def test_connections_that_say_nothing_cost_the_host_little(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, only some are taken at a time, and the others have their turn."""
    monkeypatch.setattr(package_proxy, "MAX_ANSWERS", 2)
    answer, now, most = package_proxy._answer, 0, 0

    async def counted(*args: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            await answer(*args)
        finally:
            now -= 1

    monkeypatch.setattr(package_proxy, "_answer", counted)
    backend = FakeBackend()
    async with Sandbox(backend, "relay") as sandbox:
        async with serving(sandbox._live(), PackageIndex(index.url)) as port:
            program = textwrap.dedent(f"""
                import socket
                silent = [socket.create_connection(("127.0.0.1", {port})) for _ in range(8)]
                for one in silent:
                    one.sendall(b"GET /simple/simple/ HTTP/1.1\\r\\n\\r\\n")
                    print(one.recv(65536).split(b" ")[1].decode())
                    one.close()
            """)
            said = await sandbox.run_code(program, timeout=60)
            assert said["stdout"].split() == ["200"] * 8, said
    assert most == 2
    await backend.close()


@pytest.mark.case("N11")
def test_links_of_a_list_lead_only_where_it_said(index: IndexServer) -> None:
    pages = PackageIndex(index.url)
    _, page = pages.open("/simple/simple/")
    assert isinstance(page, bytes)
    assert index.url.encode() not in page and b"127.0.0.1" not in page
    with pytest.raises(NotOffered):
        pages.open("/simple/simple/../../")
    evil = IndexServer(("evil-1.0-py3-none-any.whl", b""))
    evil._html = lambda project: ("text/html", b'<a href="file:///etc/passwd">x</a>')  # type: ignore[method-assign]
    pages = PackageIndex(evil.url)
    _, page = pages.open("/simple/evil/")
    assert isinstance(page, bytes)
    link = page.decode().partition('href="')[2].partition('"')[0]
    with pytest.raises(NotOffered):
        pages.open(link)
    evil.close()


INNER = ["http://127.0.0.1:{port}", "http://localhost:{port}", "http://[::ffff:127.0.0.1]:{port}",
         "http://0.0.0.0:{port}", "http://2130706433:{port}", "http://{name}:{port}",
         "http://%31%32%37.0.0.%31:{port}", "http://loc%61lhost:{port}"]  # fmt: skip


@pytest.mark.parametrize("form", INNER)
@pytest.mark.parametrize("by", ["link", "redirect"])
@pytest.mark.case("N11")
def test_an_index_leads_to_no_service_of_this_machine(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch, form: str, by: str
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    canary = IndexServer(wheel("far", "1.0"))
    port = urlsplit(canary.url).port
    # The name of this machine leads to an address of its own.
    there = form.format(port=port, name=socket.gethostname())
    link = there if by == "link" else "/away"
    usual = index.answer

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.path != "/away":
            usual(handler)
            return
        handler.send_response(302)
        handler.send_header("Location", there + "/files/far-1.0-py3-none-any.whl")
        handler.end_headers()

    index.answer = answer  # type: ignore[method-assign]
    index._html = lambda project: (  # type: ignore[method-assign]
        "text/html", f'<a href="{link}/files/far-1.0-py3-none-any.whl">far</a>'.encode()
        if by == "link" else b'<a href="/away">away</a>',
    )  # fmt: skip
    pages = PackageIndex(index.url)
    _, page = pages.open("/simple/simple/")
    assert isinstance(page, bytes)
    with pytest.raises(NotOffered) as refused:
        pages.open(page.decode().partition('href="')[2].partition('"')[0])
    assert refused.value.status in (403, 502), refused.value
    assert canary.asked == []
    canary.close()


ODD_LISTS = {
    "many lists": lambda: b'{"files": [' + b"[]," * 10_000_000 + b"[]]}",
    "long numbers": lambda: b'{"files": [' + (b"1" * 4300 + b",") * 7_000 + b"1]}",
    "bottomless": lambda: b"[" * 100_000,
    "texts": lambda: b'{"files": ["a", "b"]}',
    "odd hashes": lambda: b'{"files": [{"hashes": ["a"], "filename": "f", "url": "f"}]}',
}


@pytest.mark.parametrize("what", ODD_LISTS)
def test_an_odd_list_is_told(index: IndexServer, what: str) -> None:
    page = ODD_LISTS[what]()
    index._html = lambda project: ("application/json", page)  # type: ignore[method-assign]
    reason = "too long" if what == "many lists" else "the index gave no list"
    with pytest.raises(NotOffered, match=reason) as refused:
        PackageIndex(index.url).open("/simple/simple/")
    assert refused.value.status == 502


def test_a_list_that_is_asked_for_again_costs_nothing(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = PackageIndex(index.url)
    first = pages.open("/simple/simple/")
    assert all(pages.open("/simple/simple/") == first for _ in range(20))
    monkeypatch.setattr(package_index, "MAX_LINKS", 3)
    assert pages.open("/simple/simple/") == first, "they are known"
    with pytest.raises(NotOffered, match="more than 3 files"):
        pages.open("/simple/large/")


async def test_a_slow_index_keeps_nobody_else_waiting(index: IndexServer, tmp_path: Path) -> None:
    """R23. Files of other sandboxes are written in the event loop's own threads."""
    backend = FakeBackend()
    gate = threading.Event()
    usual = index.answer

    def wait(handler: BaseHTTPRequestHandler) -> None:
        gate.wait(60)
        usual(handler)

    index.answer = wait  # type: ignore[method-assign]
    pool = ThreadPoolExecutor(max_workers=1)
    asyncio.get_running_loop().set_default_executor(pool)
    async with Sandbox(backend, "slow") as sandbox, Sandbox(backend, "other") as other:
        async with serving(sandbox._live(), PackageIndex(index.url)) as port:
            program = (
                f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/simple/simple/')"
            )
            asking = [await sandbox.start_code(program) for _ in range(MAX_FETCHES + 2)]
            while len(index.asked) < MAX_FETCHES:
                await asyncio.sleep(0.01)
            await other.write_file("f", "x" * 1000)
            await other.copy_from("f", tmp_path / "f")
            assert len(index.asked) == MAX_FETCHES, "the others wait for their turn"
            gate.set()
            assert [(await one.wait())["exit_code"] for one in asking] == [0] * len(asking)
    await backend.close()


@pytest.mark.parametrize("proxy", ["is down", "hangs up"])
def test_a_dead_proxy_is_not_gone_around(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """R23: what is to go through it fails, and nothing is sent past it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)

        if proxy == "is down":
            listener.close()
        else:
            threading.Thread(target=hang_up, daemon=True).start()
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name.upper(), raising=False)
            monkeypatch.setenv(name, "" if name == "no_proxy" else address)
        with pytest.raises(NotOffered) as refused:
            PackageIndex(index.url).open("/simple/simple/")
        assert refused.value.status == 502
        monkeypatch.setenv("no_proxy", "*")
        PackageIndex(index.url).open("/simple/simple/")
    assert index.asked == ["GET /simple/simple/"], "without the proxy it is there"


def test_an_index_whose_name_leads_nowhere() -> None:
    """R23. No name server has this one (RFC 6761)."""
    with pytest.raises(NotOffered, match="cannot be reached") as refused:
        PackageIndex("http://index.invalid/simple/").open("/simple/simple/")
    assert refused.value.status == 502


async def test_a_relay_ends_while_the_name_server_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R23: the lookup of a name has no deadline of its own, and holds up nobody for that."""
    asked, answered = threading.Event(), threading.Event()
    usual = socket.getaddrinfo

    def ask(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "index.invalid":
            asked.set()
            answered.wait(60)
        return usual(host, *arguments, **options)

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    backend = FakeBackend()
    try:
        async with Sandbox(backend, "dead-dns") as sandbox:
            index = PackageIndex("http://index.invalid/simple/")
            async with serving(sandbox._live(), index) as port:
                address = f"http://127.0.0.1:{port}/simple/simple/"
                program = f"import urllib.request as u; print(u.urlopen({address!r}).status)"
                running = await sandbox.start_code(program)
                while not asked.is_set():
                    await asyncio.sleep(0.01)
                assert await sandbox.run_command("echo others") == "others\n"
            done = await running.wait()
            assert done["exit_code"] != 0 and done["stdout"] == "", done
            assert not answered.is_set(), "nobody waited for the name"
    finally:
        answered.set()
    await backend.close()


async def test_an_index_that_goes_in_the_middle_of_a_file(
    backend: Backend, index: IndexServer
) -> None:
    """R23: half a package is none, and the next installation finds nothing of it in its way."""
    usual, halves = index.answer, []

    def half(handler: BaseHTTPRequestHandler) -> None:
        if not handler.path.startswith("/files/"):
            usual(handler)
            return
        content = index.files["simple-3.0-py3-none-any.whl"]
        halves.append(handler.path)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])

    async with Sandbox(backend, "pip-half") as sandbox:
        index.answer = half  # type: ignore[method-assign]
        done = await sandbox.install("simple==3.0", index_url=index.url)
        assert done["exit_code"] != 0 and halves, done
        assert (await sandbox.run_code("import simple"))["exit_code"] == 1
        assert {"name": "simple", "version": "3.0"} not in await sandbox.installed_packages()
        index.answer = usual  # type: ignore[method-assign]
        done = await sandbox.install("simple==3.0", index_url=index.url)
        assert done["exit_code"] == 0, done
        assert (await sandbox.run_code("import simple"))["exit_code"] == 0


def with_login(url: str) -> str:
    return url.replace("http://", "http://ann:s%40cret@")


LOGIN = "Basic " + base64.b64encode(b"ann:s@cret").decode()


def test_a_login_is_for_the_index_alone(index: IndexServer) -> None:
    """Its lists and its own files get it; a file elsewhere, and where it sends us, do not."""
    elsewhere = IndexServer(wheel("far", "1.0"))
    link = f"{elsewhere.url.removesuffix('/simple/')}/files/far-1.0-py3-none-any.whl"
    index._html = lambda project: (  # type: ignore[method-assign]
        "text/html",
        f'<a href="{link}">far</a><a href="/files/simple-1.0-py3-none-any.whl">own</a>'.encode(),
    )
    pages = PackageIndex(with_login(index.url), hosts=[urlsplit(elsewhere.url).netloc])
    _, page = pages.open("/simple/simple/")
    assert isinstance(page, bytes) and b"cret" not in page
    far, own = (part.partition('"')[0] for part in page.decode().split('href="')[1:])
    for path in (far, own):
        _, file = pages.open(path)
        assert not isinstance(file, bytes)
        with file:
            assert file.read(2) == b"PK"
    assert index.logins == [LOGIN, LOGIN]
    assert elsewhere.logins == [None]

    def send_away(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", f"{elsewhere.url}far/")
        handler.end_headers()

    index.answer = send_away  # type: ignore[method-assign]
    _, page = pages.open("/simple/far/")
    assert isinstance(page, bytes) and b"far-1.0" in page
    assert index.logins == [LOGIN] * 3
    assert elsewhere.logins == [None, None]
    elsewhere.close()


@pytest.mark.parametrize("written", [str, with_login])
def test_an_index_that_does_not_speak_http(written: Callable[[str], str]) -> None:
    """Nor may the reason, which a program inside can read, name the login."""
    with mail_server() as url:
        with pytest.raises(NotOffered, match="cannot be reached") as refused:
            PackageIndex(written(f"{url}/simple/")).open("/simple/simple/")
    assert refused.value.status == 502 and "cret" not in str(refused.value)


async def test_packages_from_an_index_with_a_login(backend: Backend, index: IndexServer) -> None:
    async with Sandbox(backend, "pip-login") as sandbox:
        done = await sandbox.install("simple", index_url=with_login(index.url))
        assert done["exit_code"] == 0, done
    assert set(index.logins) == {LOGIN}


def test_the_index_of_this_machine_is_found() -> None:
    assert index_of_this_machine().startswith(("http://", "https://"))


def test_over_http(tmp_path: Path, index: IndexServer, native_works: None) -> None:
    service = ServiceProcess(tmp_path / "service", SANDBOX_PACKAGE_INDEX=index.url).start()
    try:
        with service.client() as client:
            for text in REFUSED:
                answer = client.post("/sandbox/ann/pip/install", json={"package": text})
                # Plain names with a space between are two packages here.
                assert answer.status_code in (400, 422) or text == "a b", (text, answer.text)
            index.asked = [
                asked for asked in index.asked if asked not in ("GET /simple/a/", "GET /simple/b/")
            ]
            assert index.asked == []
            done = client.post("/sandbox/ann/pip/install", json={"package": "simple>=2,<3"}).json()
            assert done["success"], done
            both = {"package": "needy, large"}
            assert client.post("/sandbox/ann/pip/install", json=both).json()["success"]
            code = {"code": "import needy, large, simple; print(simple.VERSION)"}
            assert client.post("/sandbox/ann/execute", json=code).json()["output"] == "2.5\n"
            names = [p["name"] for p in client.get("/sandbox/ann/pip/list").json()["packages"]]
            assert {"needy", "large", "simple"} <= set(names)
            other = client.post("/sandbox/bob/execute", json={"code": "import simple"}).json()
            assert not other["success"]
            log = service.paracle("audit", "show", "--event", "install", "--json").stdout
            assert "simple<3,>=2" in log or "simple>=2,<3" in log
    finally:
        service.stop()


def test_an_operator_can_switch_it_off(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "off", SANDBOX_MODE="fake", SANDBOX_PACKAGES="0").start()
    try:
        with service.client() as client:
            answer = client.post("/sandbox/ann/pip/install", json={"package": "simple"})
            assert answer.status_code == 403
            assert "SANDBOX_PACKAGES" in answer.json()["error"]
    finally:
        service.stop()


async def test_the_library_heeds_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_PACKAGES", "0")
    backend = FakeBackend()
    async with Sandbox(backend, "off") as sandbox:
        with pytest.raises(SandboxError, match="switched off"):
            await sandbox.install("simple")
    await backend.close()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("numpy", ["numpy"]),
        ("numpy pandas", ["numpy", "pandas"]),
        ("numpy,pandas", ["numpy", "pandas"]),
        ("numpy and pandas", ["numpy", "pandas"]),
        ("pandas>=2.0,<3 numpy", ["pandas>=2.0,<3", "numpy"]),
        ("pandas >= 2.0, < 3", ["pandas >= 2.0, < 3"]),
        ("numpy, pandas>=2", ["numpy", "pandas>=2"]),
        ("x; python_version > '3'\ny[z]", ["x; python_version > '3'", "y[z]"]),
        ("x; rm -rf /", ["x; rm -rf /"]),
        ("x --index-url http://evil", ["x --index-url http://evil"]),
        ("", []),
    ],
)
def test_several_in_one_text(text: str, wanted: list[str]) -> None:
    assert split_requirements(text) == wanted


@pytest.mark.case("N10")
def test_what_is_no_package_is_refused_and_recorded(fake: ServiceProcess, user: str) -> None:
    with fake.client() as client:
        for package in ("x; rm -rf /", "-r /etc/passwd", "p @ file:///etc", ".", "a\n--pre"):
            body = {"package": package}
            answer = client.post(f"/sandbox/{user[:40]}/pip/install", json=body)
            assert answer.status_code == 400, (package, answer.text)
        assert client.get(f"/sandbox/{user[:40]}/status").status_code == 404, "nothing was made"
    told = fake.paracle("audit", "show", "--user", user[:40], "--event", "refused").stdout
    assert told.count("'package'") == 5
