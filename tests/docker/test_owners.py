"""Whose a container is: an owner that dies leaves nothing, and nobody else's is ever touched."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import oracles
import pytest
from container_fixtures import BACKENDS

import engines
import loop_watch
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.machine.owner import Owner
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxConflictError, SandboxCreationError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

HERE = Path(__file__).parent
LONG = bool(os.environ.get("PARACLE_LONG"))
# Each runs an endless loop.
OWNED = {"docker": 20, "gvisor": 6} if LONG else {"docker": 6, "gvisor": 2}
AT_ONCE = 100 if LONG else 20
# What an engine of two cores takes to remove one of many.
REMOVAL_SECONDS = 2.0


def docker(*arguments: str) -> str:
    env = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True,
                          env=env, timeout=60)  # fmt: skip
    return done.stdout.strip()


def ours() -> set[str]:
    return set(docker("ps", "-a", "--filter", "label=paracle.managed=true",
                      "--format", "{{.Names}}").split())  # fmt: skip


@contextlib.contextmanager
def owner(engine: str, count: int) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that has ``count`` sandboxes, each in an endless loop."""
    with tempfile.TemporaryDirectory(prefix="paracle-owner-") as base:
        options = {
            "docker_host": engines.DOCKER_HOST, "state_dir": f"{base}/st-{os.urandom(3).hex()}",
            "data_dir": f"{base}/data",
        }  # fmt: skip
        command = [sys.executable, str(HERE / "owner_program.py"), engine, str(count)]
        process = subprocess.Popen([*command, json.dumps(options)], text=True,
                                   stdout=subprocess.PIPE,
                                   env=loop_watch.watched_environment())  # fmt: skip
        try:
            assert process.stdout is not None
            ids = json.loads(process.stdout.readline())
            yield process, {"ids": ids, **options}
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            store = f"{options['state_dir']}/store-0"
            assert oracles.wait_until(lambda: not os.path.exists(store), 60), "its volume is left"


@pytest.mark.parametrize(("engine", "count"), OWNED.items(), ids=OWNED)
def test_an_owner_that_is_killed_leaves_nothing(engine: str, count: int) -> None:
    """R01, without a new start of anybody: the end of its connections is the end of them."""
    engines.require(engine)
    with owner(engine, count) as (process, told):
        names = {f"paracle-sandbox-{name}" for name in told["ids"]}
        mine = f"label=paracle.owner={Owner.of(process.pid)}"

        def all_of_it(*more: str) -> set[str]:
            words = ("ps", "-a", "--filter", mine, *more, "--format", "{{.Names}}")
            return set(docker(*words).split())

        def running() -> set[str]:
            """One that was never started would wait for the next sweep."""
            return all_of_it("--filter", "status=running")

        assert names <= all_of_it()
        assert names <= running()
        os.kill(process.pid, signal.SIGKILL)
        limit = 10 + REMOVAL_SECONDS * count
        assert oracles.wait_until(lambda: not all_of_it(), limit), "containers are left"
    mounted = [line for line in oracles.mountinfo() if told["state_dir"] in line]
    assert not mounted, "a volume is mounted"


async def test_a_store_that_is_killed_is_swept_up(settings: Settings) -> None:
    """The volume stays mounted then; the next store of anybody removes it."""
    first = BACKENDS["docker"](settings)
    store = await first.store.get()
    assert store is not None
    store._process.kill()
    store._process.wait()
    assert os.path.ismount(store.path)
    sandbox = Sandbox(first, "after-the-store")
    await sandbox.start()
    assert await sandbox.run_command("echo x >file; cat file") == "x\n"
    await sandbox.stop()
    await first.close()
    assert not list(Path(settings.state_dir).glob("store-*"))


async def test_another_process_sees_and_removes_it(backend: DockerBackend) -> None:
    with owner("docker", 1) as (process, told):
        name = told["ids"][0]
        infos = {info.sandbox_id: info for info in await backend.list_sandboxes()}
        assert infos[name].owner_pid == process.pid and infos[name].owner_alive
        assert (await backend.usage(name)).processes >= 1
        assert await backend.sweep() == 0, "its owner lives"
        assert f"paracle-sandbox-{name}" in ours()
        await backend.destroy(name)
        assert f"paracle-sandbox-{name}" not in ours()


async def test_the_sweep_takes_what_a_dead_owner_had_not_started(backend: DockerBackend) -> None:
    dead = Owner.of(os.getpid())
    dead = Owner(dead.machine, dead.boot, dead.namespace, dead.pid, dead.start - 1)
    elsewhere = Owner("another-machine", "boot", "1", 1, 1)
    before = Owner(dead.machine, "an-earlier-boot", dead.namespace, 1, 1)
    owners = {"dead": dead, "elsewhere": elsewhere, "rebooted": before}
    strangers = ("somebody-elses", "paracle-ready-elses", "not-managed")
    try:
        for name, owner_of_it in owners.items():
            _create(f"paracle-sandbox-{name}", name, owner_of_it)
        # One that was made to look at an image.
        _create("paracle-ready-0123", "", dead, {"paracle.ready": "0123"})
        # An image can bring labels, but no name.
        _create("somebody-elses", "spoofed", dead)
        _create("paracle-ready-elses", "", dead, {"paracle.ready": "0123"})
        docker("create", "--name", "not-managed", "paracle/sandbox:latest", "true")
        listed = {info.sandbox_id: info.owner_alive for info in await backend.list_sandboxes()}
        assert listed["dead"] is False and listed["elsewhere"] is True
        assert "spoofed" not in listed and "0123" not in listed and "" not in listed
        assert await backend.sweep() == 2
        names = set(docker("ps", "-a", "--format", "{{.Names}}").split())
        assert {"paracle-sandbox-elsewhere", *strangers} <= names
        assert (
            not {"paracle-sandbox-dead", "paracle-sandbox-rebooted", "paracle-ready-0123"} & names
        )
    finally:
        ready = ("paracle-ready-0123", *strangers)
        for name in (*(f"paracle-sandbox-{n}" for n in owners), *ready):
            with contextlib.suppress(subprocess.CalledProcessError):
                docker("rm", "-f", name)


def _create(
    container: str, sandbox_id: str, owner: Owner, more: Mapping[str, str] = MappingProxyType({})
) -> None:
    labels = {
        "paracle.managed": "true", "paracle.backend": "docker", "paracle.owner": str(owner),
        "paracle.sandbox_id": sandbox_id, **more,
    }  # fmt: skip
    flags = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    docker("create", "--name", container, *flags, "paracle/sandbox:latest", "true")


async def test_the_name_of_a_dead_one_can_be_taken(backend: DockerBackend) -> None:
    dead = Owner.of(os.getpid())
    _create("paracle-sandbox-again", "again", Owner(dead.machine, dead.boot, dead.namespace, 1, 0))
    async with Sandbox(backend, "again") as sandbox:
        assert await sandbox.run_command("echo mine") == "mine\n"


async def test_one_id_wanted_by_many_at_once(settings: Settings) -> None:
    """R19: exactly one of two managers wins, the others are told; nobody removes another's."""
    backends = [BACKENDS["docker"](settings) for _ in range(2)]
    answers = await asyncio.gather(
        *(backends[n % 2].create("wanted", SandboxConfig(), {}) for n in range(AT_ONCE)),
        return_exceptions=True,
    )
    assert answers.count(None) == 1
    errors = [answer for answer in answers if answer is not None]
    assert all(isinstance(error, SandboxConflictError) for error in errors), errors
    assert "paracle-sandbox-wanted" in ours()
    for backend in backends:
        await backend.close()
    assert "paracle-sandbox-wanted" not in ours()


async def test_a_cancelled_start_leaves_nothing(backend: DockerBackend) -> None:
    for pause in (0.0, 0.01, 0.05, 0.15, 0.3):
        start = asyncio.ensure_future(backend.create("cancelled", SandboxConfig(), {}))
        await asyncio.sleep(pause)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxCreationError):
            await start
            await backend.destroy("cancelled")
        assert "paracle-sandbox-cancelled" not in ours()


def test_an_owner_is_judged_by_more_than_its_number() -> None:
    me = Owner.of(os.getpid())
    assert me.is_alive and Owner.parse(str(me)) == me
    assert not Owner(me.machine, me.boot, me.namespace, me.pid, me.start + 1).is_alive
    assert not Owner(me.machine, "earlier", me.namespace, me.pid, me.start).is_alive
    assert Owner("other", "earlier", me.namespace, me.pid, me.start).is_alive
    assert Owner(me.machine, me.boot, "other", 1, 1).is_alive, "of another pid namespace"
    for text in ("", "a/b/c/d/e", "a/b/c/1", "a/b/c/1/2/3"):
        assert Owner.parse(text) is None
