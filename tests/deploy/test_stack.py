"""The deployment on a real engine: built, started, used, stopped, killed and started again."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from stack import API, BUILT, IMAGE, PROXY, ROOT, Stack

import engines

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


def test_a_stack_without_a_key_does_not_start(tmp_path: Path) -> None:
    engines.require("docker")
    stack = Stack(tmp_path)
    (tmp_path / "deploy/.env").unlink()
    with pytest.raises(AssertionError, match="SANDBOX_API_KEY"):
        stack.resolve()


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
