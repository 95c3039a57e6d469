"""The deployment on a real engine: built, started, used, stopped, killed and started again."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from stack import API, BUILT, IMAGE, PROXY, ROOT, Stack

import engines
from paracle_sandbox.backends.registry import get_backend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.timeout(900)


def wait_until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    engines.require("docker")
    made = Stack(tmp_path_factory.mktemp("stack"))
    if shutil.which("apt-get") is None:
        engines.missing("docker", "the proxy's image is made of Debian's caddy")
    made._run([str(ROOT / "scripts/caddy_image.sh")])
    made.adapt(made.resolve())
    made.compose("--profile", "build", "build", IMAGE)
    made.compose("build", API)
    try:
        up(made)
        with made.api() as client:
            first = client.post("/sandbox/first/create").json()
            made.label = made.installation(first["sandbox_id"])
            client.delete("/sandbox/first")
        yield made
    finally:
        made.compose("down", "-v", "--remove-orphans")


def up(stack: Stack) -> None:
    stack.compose("up", "-d")
    wait_until(lambda: is_ready(stack))


def is_ready(stack: Stack) -> bool:
    try:
        with stack.api() as client:
            return client.get("/ready").status_code == 200
    except (httpx2.HTTPError, KeyError, IndexError, TypeError):
        assert stack.inspect(API)["State"]["Status"] in ("running", "created"), stack.docker(
            "logs", stack.container(API)
        )
        return False


def run(client: httpx2.Client, command: str) -> str:
    answer = client.post("/sandbox/ann/shell", json={"command": command}).json()
    assert answer["success"] and answer["files_kept"], answer
    return str(answer["output"])


def test_compose_understands_the_file(tmp_path: Path) -> None:
    engines.require("docker")
    resolved = Stack(tmp_path).resolve()
    assert set(resolved["services"]) == {IMAGE, API, PROXY}
    assert {"sandbox-data", "caddy-data"} == set(resolved["volumes"])
    environment = resolved["services"][API]["environment"]
    assert environment["SANDBOX_MODE"] == "docker"
    assert environment["SANDBOX_DATA_DIR"].startswith("/data/")
    for one in resolved["services"].values():
        if "build" in one:
            assert (Path(one["build"]["context"]) / one["build"]["dockerfile"]).is_file()


def test_a_full_round_trip(stack: Stack) -> None:
    with stack.api() as client:
        health = client.get("/health").json()
        assert (health["status"], health["docker"]) == ("healthy", True), health
        made = client.post("/sandbox/trip/create")
        assert made.status_code == 200, made.text
        assert len(stack.sandboxes()) == 1, "a container beside the service's own"
        ran = client.post("/sandbox/trip/execute", json={"code": "print(6 * 7)"}).json()
        assert (ran["success"], ran["output"], ran["exit_code"]) == (True, "42\n", 0), ran
        assert ran["stats"]["memory_limit_mb"] == 256
        packages = {"code": "import requests, pydantic, click, rich, jinja2, yaml"}
        assert client.post("/sandbox/trip/execute", json=packages).json()["success"]
        wrote = client.post("/sandbox/trip/file", json={"path": "d/f.txt", "content": "kept"})
        assert wrote.status_code == 200, wrote.text
        read = client.get("/sandbox/trip/file", params={"path": "d/f.txt"}).json()
        assert read["content"] == "kept"
        removed = client.delete("/sandbox/trip/destroy").json()
        assert (removed["status"], removed["files_preserved"]) == ("deleted", True)
    wait_until(lambda: not stack.sandboxes())


def test_every_route_of_the_deployed_service_works(stack: Stack, tmp_path: Path) -> None:
    """What the image lacks shows in the one route that needs it: each is asked with good input."""
    with stack.api() as client:
        described = {
            (method.upper(), path)
            for path, operations in client.get("/openapi.json").json()["paths"].items()
            for method in operations
        }
        asked = Asked(client)
        ask_operations(asked)
        ask_sandboxes(asked)
        ask_files(asked)
        ask_commands(asked)
        ask_leases(asked)
        assert asked.routes == described
    assert asyncio.run(run_remotely(stack, tmp_path)) == "from afar\n"


class Asked:
    """A client that insists on success, and notes which routes it has asked."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client
        self.routes: set[tuple[str, str]] = set()

    def __call__(self, method: str, route: str, status: int = 200, **about: Any) -> Any:
        names = {
            name: about.pop(name)
            for name in ("command_id", "key_id", "sandbox_id")
            if name in about
        }
        self.routes.add((method, route))
        answer = self.client.request(method, route.format(user_id="all", **names), **about)
        assert answer.status_code == status, f"{method} {route}: {answer.status_code} {answer.text}"
        is_json = answer.headers["content-type"].startswith("application/json")
        return answer.json() if is_json else answer.text


def ask_operations(asked: Asked) -> None:
    assert asked("GET", "/health")["status"] == "healthy"
    assert asked("GET", "/ready") == {"ready": True}
    assert asked("GET", "/info")["packages"]
    assert "paracle" in asked("GET", "/metrics")
    made = asked("POST", "/keys", 201, json={"users": ["all"]})
    assert made["key_id"] in str(asked("GET", "/keys"))
    assert asked("DELETE", "/keys/{key_id}", key_id=made["key_id"])["status"] == "revoked"


def ask_sandboxes(asked: Asked) -> None:
    user = "/sandbox/{user_id}"
    assert asked("POST", f"{user}/create", json={"memory_limit": "256m"})["status"] == "running"
    assert asked("POST", f"{user}/execute", json={"code": "print(1)"})["output"] == "1\n"
    assert asked("POST", f"{user}/shell", json={"command": "echo 2"})["output"] == "2\n"
    assert asked("GET", f"{user}/status")["execution_count"] == 2
    assert asked("GET", f"{user}/usage")["stats"]["memory_limit_mb"] == 256
    assert asked("GET", "/sandboxes")["total"] == 1
    installed = asked("POST", f"{user}/pip/install", json={"packages": ["greeting>=1"]})
    assert installed["success"], installed
    assert {"name": "greeting", "version": "1.0"} in asked("GET", f"{user}/pip/list")["packages"]
    code = {"code": "import greeting; print(greeting.WORD)"}
    assert asked("POST", f"{user}/execute", json=code)["output"] == "hello\n"
    assert asked("POST", f"{user}/restart")["status"] == "running"
    assert asked("POST", f"{user}/stop")["status"] == "stopped"
    assert asked("DELETE", f"{user}/destroy")["status"] == "not_found"
    assert asked("DELETE", user)["status"] == "not_found"


def ask_files(asked: Asked) -> None:
    user, path = "/sandbox/{user_id}", {"path": "notes.txt"}
    asked("POST", f"{user}/file", json={**path, "content": "one"})
    assert asked("GET", f"{user}/file", params=path)["content"] == "one"
    asked("PUT", f"{user}/files/raw", params=path, content=b"two")
    assert asked("GET", f"{user}/files/raw", params=path) == "two"
    pack = {"command": "tar -czf notes.tgz notes.txt && rm notes.txt"}
    assert asked("POST", f"{user}/shell", json=pack)["success"]
    assert asked("POST", f"{user}/unzip", json={"path": "notes.tgz"})["success"]
    names = [entry["name"] for entry in asked("GET", f"{user}/files")["files"]]
    assert {"notes.txt", "notes.tgz"} <= set(names)
    assert asked("GET", f"{user}/exists", params=path)["exists"]
    assert asked("GET", f"{user}/stat", params=path)["size"] == 3
    asked("POST", f"{user}/mkdir", json={"path": "folder"})
    asked("DELETE", f"{user}/file", params=path)


def ask_commands(asked: Asked) -> None:
    user, one = "/sandbox/{user_id}", "/sandbox/{user_id}/commands/{command_id}"
    assert "42" in asked("POST", f"{user}/stream", json={"code": "print(42)"})
    cat = {"command": "cat", "keep_stdin": True, "timeout": 60}
    command = asked("POST", f"{user}/commands", 201, json=cat)["command_id"]
    assert asked("GET", f"{user}/commands")["total"] == 1
    asked("POST", f"{one}/stdin", command_id=command, json={"data": "through", "close": True})
    assert "through" in asked("GET", f"{one}/stream", command_id=command)
    assert asked("GET", one, command_id=command)["exit_code"] == 0
    waits = {"command": "read x", "keep_stdin": True, "timeout": 60}
    command = asked("POST", f"{user}/commands", 201, json=waits)["command_id"]
    asked("POST", f"{one}/signal", command_id=command, json={"signal": 9})
    asked("DELETE", one, command_id=command)
    asked("DELETE", user)


def ask_leases(asked: Asked) -> None:
    wish = {"sandbox_id": "leased", "config": {"memory_mb": 128, "base_image": BUILT[IMAGE]}}
    assert asked("POST", "/v1/sandboxes", 201, json=wish)["sandbox_id"] == "leased"
    assert len(asked("GET", "/v1/sandboxes")["sandboxes"]) == 1
    assert asked("GET", "/v1/sandboxes/{sandbox_id}/usage", sandbox_id="leased")["processes"]
    gone = asked("DELETE", "/v1/sandboxes/{sandbox_id}", sandbox_id="leased")
    assert gone["status"] == "deleted"


async def run_remotely(stack: Stack, folder: Path) -> str:
    """Over the channel of the library's remote backend, which is a WebSocket."""
    settings = Settings(
        api_url=f"http://{stack.address(API, 8080)}", api_key=stack.key,
        state_dir=str(folder / "state"), data_dir=str(folder / "data"),
    )  # fmt: skip
    backend = get_backend("remote", settings)
    try:
        config = SandboxConfig(memory_mb=128, base_image=BUILT[IMAGE])
        async with Sandbox(backend, "afar", config) as sandbox:
            return (await sandbox.run_code("print('from afar')"))["stdout"]
    finally:
        await backend.close()


def test_the_proxy_lets_in_who_has_a_key(stack: Stack) -> None:
    wait_until(lambda: "serving initial configuration" in logs(stack, PROXY))
    wait_until(lambda: answers(stack))
    with stack.proxy() as client:
        assert client.get("/health").json()["status"] == "healthy"
        refused = client.get("/info")
        assert (refused.status_code, refused.text) == (401, "Unauthorized"), "by the proxy itself"
        wrong = client.get("/info", headers={"X-API-Key": "wrong"})
        assert (wrong.status_code, wrong.json()["kind"]) == (401, "denied"), "by the service"
        key = {"X-API-Key": stack.key}
        body = {"code": "print('through')"}
        answer = client.post("/sandbox/a%2Fb/execute", json=body, headers=key)
        assert answer.json()["output"] == "through\n", answer.text
        assert answer.headers["x-frame-options"] == "DENY" and "server" not in answer.headers
        with client.stream(
            "POST", "/sandbox/a%2Fb/stream", headers=key,
            json={"command": "echo one; read x", "keep_stdin": True, "timeout": 60},
        ) as events:  # fmt: skip
            # The program goes on until we leave: what it has printed comes through before.
            assert any("one" in line for line in events.iter_lines())
        assert client.delete("/sandbox/a%2Fb", headers=key).json()["status"] == "deleted"


def logs(stack: Stack, service: str) -> str:
    done = subprocess.run(
        ["docker", "-H", engines.DOCKER_HOST, "logs", stack.container(service)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_first_key_is_where_the_readme_says(stack: Stack, tmp_path: Path) -> None:
    """A second stack of the same images, as somebody starts it who set no key."""
    readme = (ROOT / "deploy/README.md").read_text()
    read, remove = re.findall(r"^docker-compose (exec \S+ \S+ \S+first-key)$", readme, re.MULTILINE)
    keyless = Stack(tmp_path, key="")
    keyless.adapt(keyless.resolve())
    try:
        keyless.compose("up", "-d", API)
        wait_until(lambda: is_ready(keyless))
        keyless.key = in_the_container(keyless, read).strip()
        assert keyless.key.startswith("prc_")
        with keyless.api() as client:
            assert client.get("/info").status_code == 200
            assert client.get("/info", headers={"X-API-Key": ""}).status_code == 401
        said = logs(keyless, API)
        assert "first-key" in said and keyless.key.rsplit("_", 1)[1] not in said
        in_the_container(keyless, remove)
        with pytest.raises(AssertionError, match="No such file"):
            in_the_container(keyless, read)
    finally:
        keyless.compose("down", "-v", "--remove-orphans")


def in_the_container(stack: Stack, documented: str) -> str:
    """A line of the README without a terminal, which the tests have not."""
    command, *rest = documented.split()
    return stack.compose(command, "-T", *rest)


def answers(stack: Stack) -> bool:
    try:
        with stack.proxy() as client:
            return client.get("/health").status_code == 200
    except (httpx2.HTTPError, AssertionError):
        return False  # its certificate is being made


def test_the_service_has_little_power_of_its_own(stack: Stack) -> None:
    found = stack.inspect(API)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] and not host["Privileged"]
    assert host["CapDrop"] == ["ALL"] and "no-new-privileges:true" in host["SecurityOpt"]
    status = stack.docker("exec", found["Id"], "cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    history = stack.docker("history", "--no-trunc", BUILT[API])
    assert "index-url" not in history
    assert stack.docker("exec", found["Id"], "find", "/", "-xdev", "-name", "pip.conf") == ""


def test_files_survive_a_restart_of_the_stack(stack: Stack) -> None:
    with stack.api() as client:
        run(client, "mkdir -p d; echo program > d/by.txt; chmod 750 d/by.txt")
        client.post("/sandbox/ann/file", json={"path": "by-hand.txt", "content": "hand"})
        assert len(stack.sandboxes()) == 1
    stack.compose("down")
    assert stack.sandboxes() == [], "it ended its sandboxes before it went"
    up(stack)
    with stack.api() as client:
        assert run(client, "cat d/by.txt by-hand.txt; stat -c %a d/by.txt") == "program\nhand750\n"
    stack.compose("restart", API)
    wait_until(lambda: is_ready(stack))
    with stack.api() as client:
        assert run(client, "cat by-hand.txt") == "hand"


def test_a_killed_service_comes_back_with_the_files(stack: Stack) -> None:
    with stack.api() as client:
        run(client, "echo before > kept.txt")
        client.post("/sandbox/ann/commands", json={"command": "while :; do sleep 1; done"})
        before = stack.sandboxes()
        assert len(before) == 1
    stack.docker("kill", stack.container(API))
    stack.compose("up", "-d")
    wait_until(lambda: is_ready(stack))
    with stack.api() as client:
        assert run(client, "cat kept.txt") == "before\n"
        wait_until(lambda: not set(before) & set(stack.sandboxes()))
        audit = stack.docker("exec", stack.container(API), "paracle", "audit", "verify")
        assert "unbroken" in audit


def test_a_container_removed_behind_our_back_is_made_again(stack: Stack) -> None:
    with stack.api() as client:
        run(client, "echo here > kept.txt")
        (sandbox,) = stack.sandboxes()
        stack.docker("rm", "-f", sandbox)
        answer: dict[str, object] = {}
        look = {"command": "cat kept.txt"}

        def told() -> bool:
            answer.update(client.post("/sandbox/ann/shell", json=look).json())
            return bool(answer.get("recreated"))

        wait_until(told)
        assert answer["output"] == "here\n"
        assert len(stack.sandboxes()) == 1
        client.delete("/sandbox/ann")
