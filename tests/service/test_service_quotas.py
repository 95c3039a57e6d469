"""Quotas: refused in time, told when to come back, and never exceeded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
from service_process import ServiceProcess, wait_until

from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.service.errors import TooMany
from paracle_sandbox.service.users.quotas import Executions, check_room
from paracle_sandbox.settings import Settings


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    process = ServiceProcess(
        tmp_path_factory.mktemp("tight"),
        SANDBOX_MODE="fake",
        SANDBOX_MAX_CONTAINERS="3",
        SANDBOX_USER_RATE="5",
        SANDBOX_USER_CONCURRENT="1",
    ).start()
    yield process
    process.stop()


def test_executions_per_minute() -> None:
    now = [0.0]
    executions = Executions(Settings(user_rate=3), clock=lambda: now[0])
    for moment in (0.0, 10.0, 20.0):
        now[0] = moment
        with executions.one("ann"):
            pass
    with pytest.raises(TooMany) as refusal, executions.one("ann"):
        pass
    assert refusal.value.retry_after == 40
    with executions.one("bob"):
        pass
    now[0] = 61.0
    with executions.one("ann"):
        pass
    now[0] = 1000.0
    executions.forget_quiet()
    assert executions.running("ann") == 0


def test_executions_at_the_same_time() -> None:
    executions = Executions(Settings(user_concurrent=2))
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(executions.one("ann"))
        with pytest.raises(TooMany), executions.one("ann"):
            pass
        assert executions.running("ann") == 2
    with executions.one("ann"):
        pass


@pytest.mark.parametrize(
    "wanted",
    [{"cpu_cores": 5.0}, {"memory_mb": 3000}, {"disk_mb": 6000}],
)
@pytest.mark.case("N09")
def test_room_of_one_user(wanted: dict[str, float]) -> None:
    settings = Settings(user_cpu_cores=8.0, user_memory_mb=4096, user_disk_mb=10240)
    config = SandboxConfig(**wanted)  # type: ignore[arg-type]
    check_room(settings, [], config)
    with pytest.raises(TooMany):
        check_room(settings, [config], config)
    with pytest.raises(TooMany, match="sandboxes"):
        check_room(Settings(user_sandboxes=1), [SandboxConfig()], SandboxConfig())


def test_a_full_service_serves_those_it_has(tight: ServiceProcess) -> None:
    with tight.client() as client, ThreadPoolExecutor(10) as pool:
        made = list(pool.map(lambda n: client.post(f"/sandbox/u{n}/create"), range(10)))
        codes = sorted(answer.status_code for answer in made)
        assert codes == [200] * 3 + [503] * 7
        refused = next(answer for answer in made if answer.status_code == 503)
        assert refused.json()["error"] == "Maximum containers (3) reached"
        assert int(refused.headers["retry-after"]) >= 1
        first = next(n for n, answer in enumerate(made) if answer.status_code == 200)
        assert client.post(f"/sandbox/u{first}/create").status_code == 200
        late = next(n for n, answer in enumerate(made) if answer.status_code == 503)
        client.delete(f"/sandbox/u{first}")
        assert client.post(f"/sandbox/u{late}/create").status_code == 200
        for number in range(10):
            client.delete(f"/sandbox/u{number}")


def test_too_many_executions_are_told_when_to_come_back(tight: ServiceProcess) -> None:
    with tight.client() as client:
        answers = [client.post("/sandbox/r/shell", json={"command": "true"}) for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        assert answers[-1].json()["kind"] == "quota"
        client.delete("/sandbox/r")


def test_one_at_a_time(tight: ServiceProcess) -> None:
    with tight.client() as client:
        client.post("/sandbox/c/create")
        with client.stream("POST", "/sandbox/c/stream", json={"command": "echo up; sleep 60"}) as s:
            lines = s.iter_lines()  # held, because its end would close the answer
            while "stdout" not in next(lines):
                pass
            second = client.post("/sandbox/c/shell", json={"command": "true"})
            assert second.status_code == 429
        wait_until(lambda: _running(client) == 0, 30)
        assert client.post("/sandbox/c/shell", json={"command": "true"}).status_code == 200


def _running(client: httpx2.Client) -> int:
    return int(client.get("/sandbox/c/usage").json()["running_executions"])


@pytest.mark.case("N09")
def test_a_request_cannot_ask_for_more_than_the_service_gives(
    client: httpx2.Client, user: str
) -> None:
    for wish in (
        {"cpu_limit": "inf"},
        {"cpu_limit": 1e9},
        {"cpu_limit": 4.1},
        {"cpu_limit": -1},
        {"memory_limit": "-1"},
        {"memory_limit": "NaN"},
        {"memory_limit": "1e99"},
        {"privileged": True},
        {"mounts": ["/"]},
        {"image": "../../etc"},
        {"memory_limit": ["512m"]},
    ):
        answer = client.post(f"/sandbox/{user}/create", json=wish)
        assert answer.status_code in (400, 422), (wish, answer.text)
    done = client.post(f"/sandbox/{user}/create", json={"memory_limit": "16g", "cpu_limit": 4})
    assert done.status_code == 200, done.text
    limit = client.get(f"/sandbox/{user}/usage").json()["stats"]["memory_limit_mb"]
    assert limit == 512


@pytest.mark.parametrize(
    "config",
    [
        {"network_mode": "host"},
        {"network_mode": "bridge"},
        {"drop_capabilities": False},
        {"allow_degraded": ["cgroup"]},
        {"base_image": "registry.example/evil:latest"},
        {"memory_mb": 1 << 40},
        {"working_dir": "/etc"},
        {"privileged": True},
        {"timeout_seconds": 1e9},
    ],
)
@pytest.mark.case("N09")
def test_a_remote_client_gets_no_more_than_the_operator_gives(
    client: httpx2.Client, config: dict[str, object]
) -> None:
    answer = client.post("/v1/sandboxes", json={"sandbox_id": "greedy", "config": config})
    assert answer.status_code in (400, 422), answer.text
    assert "\n" not in answer.json()["error"]
    assert client.get("/v1/sandboxes").json()["sandboxes"] == []
