"""Tests of SandboxManager: limits, lifecycles, idleness, and no leaks."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from paracle_sandbox import (
    BackendUnavailableError,
    Command,
    DockerConnectionError,
    Sandbox,
    SandboxCleanupError,
    SandboxConfig,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxLimitError,
    SandboxManager,
    SandboxNotFoundError,
    SandboxSettings,
    Settings,
    load_settings,
)
from paracle_sandbox.backends import registry
from paracle_sandbox.backends.registry import explain, get_backend
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.testing.fake import FakeBackend


class WatchedBackend(FakeBackend):
    """A backend that counts what is alive, and can be made slow or made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[str] = set()
        self.peak = 0
        self.create_gate: asyncio.Event | None = None
        self.destroy_gate: asyncio.Event | None = None
        self.refuse_create = False
        self.refuse_destroy = False
        self.closed = 0

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        if self.create_gate is not None:
            await self.create_gate.wait()
        if self.refuse_create:
            raise SandboxCreationError("refused", sandbox_id)
        await super().create(sandbox_id, config, labels)
        self.alive.add(sandbox_id)
        self.peak = max(self.peak, len(self.alive))

    async def destroy(self, sandbox_id: str) -> None:
        if self.destroy_gate is not None:
            await self.destroy_gate.wait()
        if self.refuse_destroy:
            raise SandboxCleanupError("refused", sandbox_id)
        await super().destroy(sandbox_id)
        self.alive.discard(sandbox_id)

    async def close(self) -> None:
        self.closed += 1
        await super().close()


@pytest.fixture
async def backend() -> AsyncIterator[WatchedBackend]:
    backend = WatchedBackend()
    yield backend
    backend.refuse_destroy = False
    backend.destroy_gate = None
    for sandbox_id in list(backend.alive):
        await backend.destroy(sandbox_id)
    await backend.close()


def managed(
    backend: WatchedBackend, limit: int = 2, cleanup_interval: float = 300
) -> SandboxManager:
    return SandboxManager(
        limit, cleanup_interval=cleanup_interval, backend=backend, settings=Settings()
    )


async def wait_until(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


async def test_created_sandboxes_are_tracked_until_destroyed(backend: WatchedBackend) -> None:
    async with managed(backend) as manager:
        sandbox = await manager.create(SandboxConfig())
        assert sandbox.is_running
        assert manager.active_sandboxes == {sandbox.sandbox_id: sandbox}
        assert await manager.get(sandbox.sandbox_id) is sandbox
        assert await manager.get_sandbox(sandbox.sandbox_id) is sandbox
        await manager.destroy(sandbox.sandbox_id)
        assert manager.active_sandboxes == {}
        assert await manager.get(sandbox.sandbox_id) is None
        await manager.destroy(sandbox.sandbox_id)
        assert not backend.alive


async def test_over_the_limit_creation_raises_at_once(backend: WatchedBackend) -> None:
    async with managed(backend, 2) as manager:
        first, _ = await manager.create(), await manager.create()
        with pytest.raises(SandboxLimitError) as caught:
            await manager.create()
        assert str(caught.value) == "Maximum number of sandboxes (2) reached"
        assert isinstance(caught.value, SandboxError)
        await manager.destroy(first.sandbox_id)
        await manager.create()


async def test_the_limit_holds_for_creations_under_way(backend: WatchedBackend) -> None:
    backend.create_gate = asyncio.Event()
    async with managed(backend, 2) as manager:
        attempts = [asyncio.create_task(manager.create()) for _ in range(5)]
        await wait_until(lambda: sum(task.done() for task in attempts) == 3)
        backend.create_gate.set()
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Sandbox] * 2 + [SandboxLimitError] * 3
        assert backend.peak == 2


def test_one_limit_with_two_names() -> None:
    assert SandboxManager().max_concurrent == SandboxManager().max_sandboxes == 10
    assert SandboxManager(5).max_sandboxes == 5
    assert SandboxManager(max_concurrent=5).max_concurrent == 5
    assert SandboxManager(max_sandboxes=7).max_concurrent == 7
    with pytest.raises(ValueError, match="one limit"):
        SandboxManager(5, max_sandboxes=7)
    for limit in (0, -1):
        with pytest.raises(ValueError, match="max_concurrent must be at least one"):
            SandboxManager(limit)
    wrong: list[Any] = [2.5, "3"]
    for limit in wrong:
        with pytest.raises(TypeError, match="max_sandboxes must be an int"):
            SandboxManager(max_sandboxes=limit)


def test_times_that_are_none_are_refused() -> None:
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="cleanup_interval"):
            SandboxManager(cleanup_interval=seconds)
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="idle_timeout"):
            SandboxManager(idle_timeout=seconds)
    wrong: Any = "5"
    with pytest.raises(TypeError, match="idle_timeout must be a number"):
        SandboxManager(idle_timeout=wrong)
    with pytest.raises(TypeError, match="cleanup_interval must be a number"):
        SandboxManager(cleanup_interval=wrong)
    assert SandboxManager(idle_timeout=0).idle_timeout == 0


async def test_an_id_that_is_none_is_refused_and_never_replaced(backend: WatchedBackend) -> None:
    wrong: Any = 5
    async with managed(backend) as manager:
        with pytest.raises(TypeError, match="sandbox id must be a str"):
            await manager.create(sandbox_id=wrong)
        with pytest.raises(SandboxCreationError, match="Not a sandbox id: ''"):
            await manager.create(sandbox_id="")
        assert backend.created == []
        await manager.create()
        await manager.create()


async def test_a_failed_creation_frees_its_slot(backend: WatchedBackend) -> None:
    async with managed(backend, 1) as manager:
        backend.refuse_create = True
        for _ in range(3):
            with pytest.raises(SandboxCreationError, match="refused"):
                await manager.create()
        backend.refuse_create = False
        await manager.create()


async def test_a_cancelled_creation_frees_its_slot(backend: WatchedBackend) -> None:
    backend.create_gate = asyncio.Event()
    async with managed(backend, 1) as manager:
        attempt = asyncio.create_task(manager.create())
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        backend.create_gate.set()
        await manager.create()
        assert len(backend.alive) == 1


async def test_ids(backend: WatchedBackend) -> None:
    ids = [new_sandbox_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(len(i) == 26 and set(i) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for i in ids)
    async with managed(backend) as manager:
        sandbox = await manager.create(sandbox_id="mine")
        assert sandbox.sandbox_id == "mine"
        with pytest.raises(SandboxConflictError, match="mine exists already"):
            await manager.create(sandbox_id="mine")
        assert backend.alive == {"mine"}
        for bad in ("../etc", "a/b", "", "x" * 65, "-rf", "a\n", "é"):
            if bad:
                with pytest.raises(SandboxCreationError, match="Not a sandbox id"):
                    await manager.create(sandbox_id=bad)
        await manager.create()


async def test_an_id_that_another_process_has_is_left_alone(backend: WatchedBackend) -> None:
    theirs, ours = managed(backend), managed(backend)
    await theirs.create(sandbox_id="shared")
    with pytest.raises(SandboxConflictError):
        await ours.create(sandbox_id="shared")
    await ours.close()
    assert backend.alive == {"shared"}
    await theirs.close()


async def test_managed_sandbox_is_gone_however_the_block_ends(backend: WatchedBackend) -> None:
    async with managed(backend) as manager:
        async with manager.managed_sandbox(SandboxConfig()) as sandbox:
            assert (await sandbox.execute("echo hi"))["stdout"] == "hi\n"
        assert not backend.alive
        with pytest.raises(ZeroDivisionError):
            async with manager.managed_sandbox():
                raise ZeroDivisionError
        assert not backend.alive
        assert not manager.active_sandboxes


async def test_cancellation_waits_for_the_removal(backend: WatchedBackend) -> None:
    backend.destroy_gate = asyncio.Event()
    inside = asyncio.Event()

    async def use() -> None:
        async with manager.managed_sandbox():
            inside.set()
            await asyncio.Event().wait()

    async with managed(backend) as manager:
        user = asyncio.create_task(use())
        await inside.wait()
        user.cancel()
        await asyncio.sleep(0.01)
        user.cancel()  # a second time, and still nothing may stay
        await asyncio.sleep(0.01)
        assert not user.done()
        backend.destroy_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await user
        assert not backend.alive


async def test_what_cannot_be_removed_stays_listed_and_can_be_tried_again(
    backend: WatchedBackend,
) -> None:
    manager = managed(backend, 1)
    sandbox = await manager.create()
    backend.refuse_destroy = True
    for _ in range(2):
        with pytest.raises(SandboxCleanupError):
            await manager.destroy(sandbox.sandbox_id)
        assert sandbox.sandbox_id in manager.active_sandboxes
        with pytest.raises(SandboxLimitError):
            await manager.create()
    with pytest.raises(SandboxCleanupError):
        await manager.close()
    backend.refuse_destroy = False
    await manager.close()
    assert not backend.alive


async def test_a_slot_is_free_only_when_the_sandbox_is_gone(backend: WatchedBackend) -> None:
    backend.destroy_gate = asyncio.Event()
    async with managed(backend, 1) as manager:
        sandbox = await manager.create()
        removals = [asyncio.create_task(manager.destroy(sandbox.sandbox_id)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(SandboxLimitError):
            await manager.create()
        backend.destroy_gate.set()
        await asyncio.gather(*removals)
        await manager.create()
        assert backend.peak == 1


async def test_waiting_for_room_is_in_turn(backend: WatchedBackend) -> None:
    async with managed(backend, 1) as manager:
        first = await manager.create()
        order: list[int] = []

        async def wait(number: int) -> None:
            sandbox = await manager.create_when_free()
            order.append(number)
            await manager.destroy(sandbox.sandbox_id)

        waiters = [asyncio.create_task(wait(number)) for number in range(4)]
        await asyncio.sleep(0.01)
        waiters[1].cancel()
        await manager.destroy(first.sandbox_id)
        await asyncio.gather(*waiters, return_exceptions=True)
        assert order == [0, 2, 3]
        assert backend.peak == 1
        await manager.create()


async def test_a_slot_handed_to_a_cancelled_waiter_is_passed_on(backend: WatchedBackend) -> None:
    async with managed(backend, 1) as manager:
        first = await manager.create()
        waiter = asyncio.create_task(manager.create_when_free())
        await asyncio.sleep(0.01)
        removal = asyncio.create_task(manager.destroy(first.sandbox_id))
        removal.add_done_callback(lambda _: waiter.cancel())
        await removal
        await asyncio.gather(waiter, return_exceptions=True)
        await manager.cleanup()
        await manager.create()


def test_the_older_module_of_errors() -> None:
    from paracle_sandbox import errors, exceptions

    own = {n: kind for n, kind in vars(errors).items() if isinstance(kind, type)}
    assert {n: getattr(exceptions, n) for n in own} == own
    assert {*own, "SandboxResourceError"} == set(exceptions.__all__)
    assert exceptions.SandboxResourceError is errors.ResourceLimitError


async def test_the_older_names(backend: WatchedBackend) -> None:
    async with managed(backend, 3) as manager:
        sandbox_id = await manager.create_sandbox(SandboxSettings(memory_limit="1g"))
        sandbox = await manager.get_sandbox(sandbox_id)
        assert sandbox.config.memory_mb == 1024
        assert manager._sandboxes == {sandbox_id: sandbox}
        assert set(manager._last_used) == {sandbox_id}
        # The commands of the manager itself follow one another.
        await sandbox.run_command("cd /tmp")
        assert await sandbox.run_command("pwd") == "/tmp\n"
        await manager._cleanup_idle_sandboxes()
        assert sandbox_id in manager._sandboxes
        manager._last_used[sandbox_id] = 0
        await manager._cleanup_idle_sandboxes()
        assert not manager._sandboxes and not backend.alive
        sandbox_id = await manager.create_sandbox()
        await manager.delete_sandbox(sandbox_id)
        with pytest.raises(KeyError, match="Sandbox .* not found"):
            await manager.get_sandbox(sandbox_id)
        with pytest.raises(SandboxNotFoundError) as caught:
            await manager.get_sandbox("nobody")
        assert str(caught.value) == "Sandbox nobody not found"
        with pytest.raises(SandboxCreationError, match="copy_to"):
            await manager.create_sandbox(volume_bindings={"/srv/data": "/data"})
        await manager.create_sandbox()
        await manager.create_sandbox()
        await manager.cleanup()
        assert not backend.alive
        await manager.create()


async def test_without_a_config_the_settings_decide(backend: WatchedBackend) -> None:
    settings = load_settings({"PARACLE_SANDBOX_DEFAULT_MEMORY_MB": "256"})
    async with SandboxManager(backend=backend, settings=settings) as manager:
        assert (await manager.create()).config.memory_mb == 256


async def test_stats_speak_both_vocabularies(backend: WatchedBackend) -> None:
    async with managed(backend, 4) as manager:
        sandbox = await manager.create()
        async with manager.sandbox_operation(sandbox.sandbox_id) as same:
            assert same is sandbox
            stats = await manager.get_stats()
        assert stats["total_sandboxes"] == 1
        assert stats["max_concurrent"] == stats["max_sandboxes"] == 4
        assert stats["utilization"] == 0.25
        assert stats["active_operations"] == 1
        assert (stats["idle_timeout"], stats["cleanup_interval"]) == (3600, 300)
        assert stats["is_shutting_down"] is False
        assert stats["sandboxes"][sandbox.sandbox_id]["memory_limit_mb"] == 512  # type: ignore[typeddict-item]
        await backend.destroy(sandbox.sandbox_id)
        assert "error" in (await manager.get_stats())["sandboxes"][sandbox.sandbox_id]


async def test_idle_sandboxes_are_removed_but_never_one_in_use(backend: WatchedBackend) -> None:
    async with managed(backend, 3, cleanup_interval=0.02) as manager:
        idle, operated, working = [await manager.create() for _ in range(3)]
        async with manager.sandbox_operation(operated.sandbox_id):
            work = asyncio.create_task(working.execute("sleep 0.3; echo done"))
            await wait_until(lambda: working.in_use)
            manager.idle_timeout = 0.05
            await wait_until(lambda: idle.sandbox_id not in backend.alive)
            assert (await work)["stdout"] == "done\n"
            assert operated.sandbox_id in manager.active_sandboxes
        await wait_until(lambda: not backend.alive)
        assert not manager.active_sandboxes
        again = await manager.create()
        await wait_until(lambda: again.sandbox_id not in backend.alive)


async def test_a_short_idle_timeout_is_kept_without_a_short_cleanup_interval(
    backend: WatchedBackend,
) -> None:
    """The usual interval of 300 seconds would keep a sandbox that long."""
    async with SandboxManager(
        backend=backend, settings=Settings(), idle_timeout=0.2, cleanup_interval=300
    ) as manager:
        await manager.create()
        await wait_until(lambda: not backend.alive)


async def test_auto_that_takes_docker_has_its_idle_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def passed_over(_: Settings) -> str:
        return "not here"

    monkeypatch.setattr(
        registry,
        "PROBLEMS",
        {"native": passed_over, "docker": lambda _: None, "incus": passed_over},
    )
    async with SandboxManager(settings=Settings()) as manager:
        assert (manager.backend.name, manager.idle_timeout) == ("docker", 900)
    async with SandboxManager(settings=Settings(), idle_timeout=None) as manager:
        assert (manager.backend.name, manager.idle_timeout) == ("docker", None)


async def test_no_idle_timeout_means_for_ever(backend: WatchedBackend) -> None:
    manager = SandboxManager(backend=backend, settings=Settings(), idle_timeout=None)
    async with manager:
        await manager.create()
        manager.start_cleanup_task()
        assert backend.alive


async def test_close_is_idempotent_and_final(backend: WatchedBackend) -> None:
    manager = managed(backend)
    await manager.create()
    await manager.close()
    await manager.close()
    assert not backend.alive
    assert backend.closed == 0  # the caller's backend
    with pytest.raises(SandboxError, match="closed"):
        await manager.create()


async def test_close_waits_for_a_creation_under_way(backend: WatchedBackend) -> None:
    backend.create_gate = asyncio.Event()
    manager = managed(backend)
    attempt = asyncio.create_task(manager.create())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(manager.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    backend.create_gate.set()
    with pytest.raises(SandboxError, match="closed meanwhile"):
        await attempt
    await closing
    assert not backend.alive


def test_one_manager_serves_one_event_loop_after_the_other() -> None:
    """This also holds when the previous loop ended without closing anything."""
    manager = SandboxManager(2, backend="fake", settings=Settings())

    async def use(leave: bool) -> None:
        async with manager.managed_sandbox() as sandbox:
            assert (await sandbox.execute("echo hi"))["stdout"] == "hi\n"
        if leave:
            await manager.create()

    asyncio.run(use(False))
    asyncio.run(use(True))
    asyncio.run(use(False))
    asyncio.run(manager.close())
    assert not manager.active_sandboxes


def test_a_sandbox_whose_event_loop_has_ended_says_so() -> None:
    """It does not wait for a response that no task would read."""
    manager = SandboxManager(backend="fake", settings=Settings())

    async def begin() -> tuple[Sandbox, Command]:
        sandbox = await manager.create()
        return sandbox, await sandbox.start_command("sleep 60")

    async def go_on(sandbox: Sandbox, command: Command) -> None:
        for late in (sandbox.execute("echo hi"), sandbox.read_file("x"), command.wait()):
            with pytest.raises(SandboxExecutionError, match="event loop"):
                await asyncio.wait_for(late, 10)
        assert command.poll() is not None
        assert not sandbox.is_running and not sandbox.in_use
        await manager.close()

    asyncio.run(go_on(*asyncio.run(begin())))
    assert not manager.active_sandboxes


def test_backends_by_name() -> None:
    settings = Settings()
    assert get_backend("fake", settings).name == "fake"
    assert get_backend("fake", settings) is not get_backend("fake", settings)
    assert get_backend(None, load_settings({"SANDBOX_MODE": "fake"})).name == "fake"
    with pytest.raises(BackendUnavailableError, match=r"no backend 'qemu'; known are auto, native"):
        get_backend("qemu", settings)
    for name, real in (("docker", "docker"), ("local", "docker"), ("gvisor", "gvisor")):
        assert get_backend(name, settings).name == real
    for name in ("incus-vm", "remote", "daytona"):
        assert get_backend(name, settings).name == name
    as_machines = load_settings({"INCUS_SANDBOX_TYPE": "vm"})
    assert get_backend("incus", as_machines).name == "incus-vm"


async def test_a_missing_backend_is_reported_by_create() -> None:
    settings = load_settings({"DOCKER_HOST": "unix:///nowhere/docker.sock"})
    manager = SandboxManager(1, backend="docker", settings=settings)
    for _ in range(2):
        with pytest.raises(DockerConnectionError, match="Docker not available"):
            await manager.create()
    await manager.close()


async def test_explain_names_the_candidates_of_auto_and_all_others() -> None:
    healths = await explain(Settings())
    names = [health.backend for health in healths]
    assert names[:4] == ["remote", "native", "docker", "incus"]
    assert sorted(names[4:]) == ["daytona", "gvisor", "incus-vm"]
    assert all(health.available or health.detail for health in healths)


def test_what_was_set_for_containers_holds_for_them_alone() -> None:
    env = {"DOCKER_SANDBOX_TIMEOUT": "60", "DOCKER_SANDBOX_IMAGE": "mine:1"}
    settings = load_settings(env)
    assert SandboxManager(backend="docker", settings=settings).idle_timeout == 60
    assert SandboxManager(backend="native", settings=settings).idle_timeout == 3600
    assert SandboxManager(backend="docker", settings=Settings()).idle_timeout == 900
    assert SandboxManager(idle_timeout=5, backend="docker", settings=settings).idle_timeout == 5
    assert settings.default_config("docker").base_image == "mine:1"
    assert settings.default_config("native").base_image == "paracle/sandbox:latest"
