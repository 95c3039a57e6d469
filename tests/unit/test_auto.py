"""Tests of the backend that ``auto`` selects.

The facts of many kinds of machines are given to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import paracle_sandbox
from no_http import mail_server
from paracle_sandbox.backends.native.obstacles import native_problem
from paracle_sandbox.backends.registry import AUTO_ORDER, PROBLEMS, choose
from paracle_sandbox.backends.remote.backend import RemoteBackend
from paracle_sandbox.backends.remote.reachability import service_problem
from paracle_sandbox.settings import Settings

SOURCES = Path(paracle_sandbox.__file__).parents[1]
GOOD = {"version": "1.0", "backend": "native", "layers": {}}
SYS_ADMIN, FEW = "000001ffffffffff", "00000000a80425fb"
CLONE, MOST, APPARMOR, PROFILE = (
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/self/attr/current",
)


def machine(**problems: str) -> dict[str, Callable[[Settings], str | None]]:
    def told(name: str) -> Callable[[Settings], str | None]:
        return lambda _: problems.get(name)

    return {name: told(name) for name in AUTO_ORDER}


@pytest.mark.parametrize(
    ("problems", "chosen"),
    [
        ({}, "remote"),
        ({"remote": "away"}, "native"),
        ({"remote": "away", "native": "no namespaces"}, "docker"),
        ({"remote": "away", "native": "no namespaces", "docker": "asleep"}, "incus"),
        (dict.fromkeys(AUTO_ORDER, "no"), "native"),
    ],
)
def test_the_first_that_can_be_had(
    problems: dict[str, str], chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(api_url="http://service.example")
    with caplog.at_level(logging.WARNING):
        assert choose(settings, machine(**problems), "linux") == chosen
    for name, problem in problems.items():
        # The error of the selected backend says why it cannot be used either.
        assert (f"not {name}: {problem}" in caplog.text) == (name != chosen)
    assert bool(caplog.text) == bool(problems)
    assert not problems or f"using {chosen}" in caplog.text


def test_what_is_no_candidate_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    def never(_: Settings) -> str | None:
        raise AssertionError("asked")

    facts = {**machine(), "remote": never, "docker": never, "incus": never}
    assert choose(Settings(), facts, "linux") == "native"
    facts = {**machine(), "remote": never, "native": never, "incus": never}
    assert choose(Settings(), facts, "darwin") == "docker"
    facts = {**machine(docker="asleep", incus="absent"), "native": never}
    assert choose(Settings(), facts, "darwin") == "docker", "its error says what to do"


def test_choosing_native_imports_no_other(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n"
        "from paracle_sandbox.backends.registry import get_backend\n"
        "from paracle_sandbox.settings import Settings\n"
        "print(get_backend('auto', Settings()).name, *sys.modules)\n"
    )
    name, *loaded = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True,
        check=True,
    ).stdout.split()  # fmt: skip
    if name != "native":
        pytest.skip(f"auto takes {name} here")
    others = [f"paracle_sandbox.backends.{other}" for other in ("docker", "incus", "remote")]
    assert not [module for module in loaded if module.startswith((*others, "urllib.request"))]


def reading(files: Mapping[str, str]) -> Callable[[str], str]:
    return lambda path: files.get(path, "")


@pytest.mark.parametrize(
    ("euid", "files", "cause"),
    [
        (0, {"/proc/self/status": f"Name:\tx\nCapEff:\t{SYS_ADMIN}\nCapBnd:\t0\n"}, None),
        (0, {"/proc/self/status": f"Name:\tx\nCapEff:\t{FEW}\nCapBnd:\t0\n"}, "CAP_SYS_ADMIN"),
        (0, {}, None),
        (0, {"/proc/self/status": f"CapEff:\t{SYS_ADMIN}\n", CLONE: "0\n", MOST: "0\n"}, None),
        (1000, {}, None),
        (1000, {CLONE: "1\n", MOST: "96349\n", APPARMOR: "0\n"}, None),
        (1000, {CLONE: "0\n", MOST: "96349\n"}, "unprivileged_userns_clone is 0"),
        (1000, {CLONE: "1\n", MOST: "0\n"}, "max_user_namespaces is 0"),
        (1000, {MOST: "96349\n", APPARMOR: "1\n", PROFILE: "unconfined\n"}, "apparmor_restrict"),
        (1000, {MOST: "96349\n", APPARMOR: "1\n", PROFILE: "paracle (unconfined)\n"}, None),
    ],
)
def test_whether_native_can_be_had(euid: int, files: dict[str, str], cause: str | None) -> None:
    found = native_problem(euid, reading(files))
    assert (found is None) == (cause is None)
    assert (cause or "") in (found or "")


@pytest.mark.parametrize(
    ("files", "is_tried"),
    [
        ({}, False),
        ({"/proc/self/status": "Seccomp:\t0\n", PROFILE: "unconfined\n"}, False),
        ({"/proc/self/status": "Seccomp:\t0\n", PROFILE: "paracle (unconfined)\n"}, False),
        ({PROFILE: "snap.code.code (complain)\n"}, False),
        ({PROFILE: "unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023\0"}, False),
        ({PROFILE: "docker-default (enforce)\n"}, True),
        ({"/proc/self/status": "Seccomp:\t2\n", MOST: "96349\n"}, True),
        ({"/proc/self/status": "Seccomp:\t2\n", MOST: "0\n"}, False),
    ],
    ids=["nothing known", "no filter", "free profile", "complaining", "SELinux", "AppArmor",
         "filter", "known without"],
)  # fmt: skip
def test_a_trial_is_for_processes_that_are_confined(files: dict[str, str], is_tried: bool) -> None:
    """A trial takes as long as a start of Python, so other processes must not pay for it."""
    tried = []

    def trial() -> list[str]:
        tried.append(True)
        return ["the AppArmor profile docker-default refuses mounts"]

    found = native_problem(1000, reading(files), trial)
    assert bool(tried) == is_tried
    assert ("refuses mounts" in (found or "")) == is_tried


def test_engines_are_had_when_somebody_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "engine")
    for name, settings in {
        "docker": Settings(docker_host=f"unix://{path}"),
        "incus": Settings(incus_socket=path),
    }.items():
        assert path in (PROBLEMS[name](settings) or ""), "there is no such socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            assert "refused" in (PROBLEMS[name](settings) or ""), "nobody listens"
            listener.listen()
            assert PROBLEMS[name](settings) is None
        Path(path).unlink()


# The service of SANDBOX_API_URL


class Site:
    """A server that gives the same response to every request."""

    def __init__(self) -> None:
        self.status, self.body, self.location = 200, b"", ""
        self.keys: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.keys.append(self.headers.get("X-API-Key", ""))
                self.send_response(site.status)
                if site.location:
                    self.send_header("Location", site.location)
                self.send_header("Content-Length", str(len(site.body)))
                self.end_headers()
                self.wfile.write(site.body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (json.dumps(GOOD).encode(), None),
        (json.dumps({**GOOD, "ready": True}).encode(), None),
        (json.dumps({**GOOD, "ready": False}).encode(), "not ready"),
        (json.dumps({**GOOD, "ready": None}).encode(), "not ready"),
        (b"<html>Welcome to nginx</html>", "not a sandbox service"),
        (b"\xff\xfe", "not a sandbox service"),
        (b"", "not a sandbox service"),
        (b"[]", "not a sandbox service"),
        (b'"version backend"', "not a sandbox service"),
        (b'{"version": "2"}', "not a sandbox service"),
        (b"[" * 50_000, "not a sandbox service"),
        (b"[" + b"[]," * 20_000 + b"[]]", "not a sandbox service"),
    ],
)
async def test_what_answers_has_to_be_a_service(
    site: Site, body: bytes, reason: str | None
) -> None:
    site.body = body
    settings = Settings(api_url=site.url)
    assert (reason or "None") in str(service_problem(settings))
    backend = RemoteBackend(settings)
    health = await backend.health()
    await backend.close()
    assert health.available == (reason is None)
    assert reason is None or (reason in health.detail and health.remedy)


def test_a_key_does_not_follow_to_another_address(site: Site) -> None:
    other = Site()
    other.body = json.dumps(GOOD).encode()
    site.status, site.location = 302, f"{other.url}/info"
    settings = Settings(api_url=site.url, api_key="secret")
    assert service_problem(settings) == "it answers 302"
    assert (site.keys, other.keys) == (["secret"], [])
    other.close()


def test_something_that_does_not_speak_http() -> None:
    with mail_server() as url:
        assert "cannot be reached" in str(service_problem(Settings(api_url=url)))


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n"])
def test_a_service_that_drips_is_not_waited_for(head: bytes) -> None:
    """The head of the response or its body may come byte by byte."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(head)
                while not over.wait(0.01):
                    connection.sendall(b"H")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            problem = service_problem(Settings(api_url=url), 0.3)
            assert problem is not None and "answer" in problem
        finally:
            over.set()
            dripping.join()
