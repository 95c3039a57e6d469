"""What cannot be had is said in plain words, with the remedy; and what is the user's stays so."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from incus_fixtures import CONFIG, Make, of_image

import engines
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.errors import creation_error
from paracle_sandbox.backends.incus.labels import instance_name
from paracle_sandbox.backends.incus.network import nic_for
from paracle_sandbox.backends.incus.server import Refused
from paracle_sandbox.backends.incus.vm import IncusMachineBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError, SandboxCreationError
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings, load_settings


async def refusal(backend: IncusBackend, config: SandboxConfig = CONFIG) -> SandboxCreationError:
    try:
        with pytest.raises(SandboxCreationError) as caught:
            await backend.create("refused", config, {})
        return caught.value
    finally:
        await backend.close()


async def test_no_server(tmp_path: Path) -> None:
    error = await refusal(IncusBackend(Settings(incus_socket=str(tmp_path / "none"))))
    assert isinstance(error, BackendUnavailableError) and error.step == "server"
    for word in ("no server answers", "incus admin init", "INCUS_SOCKET", "SANDBOX_MODE=native"):
        assert word in str(error)


async def test_permission_denied(settings: Settings) -> None:
    """A user who is in none of the server's groups."""
    backend = IncusBackend(settings)
    await backend.server.get("/1.0")  # it is there, and everything is imported
    await backend.close()
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
    try:
        with pytest.raises(BackendUnavailableError) as caught:
            await backend.server.get("/1.0")
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        await backend.close()
    assert caught.value.step == "permission"
    assert "Permission denied" in str(caught.value)
    assert "adduser $USER incus-admin" in str(caught.value)


async def test_no_such_remote(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="incus remote add nowhere"):
        IncusBackend(Settings(incus_remote="nowhere", incus_conf=str(tmp_path)))


async def test_no_image(settings: Settings) -> None:
    error = await refusal(IncusBackend(settings), SandboxConfig(base_image="no-such-image"))
    assert error.step == "image" and "incus image list" in str(error)
    missing = SandboxConfig(base_image="paracle/sandbox:ml")
    error = await refusal(IncusBackend(settings), missing)
    assert "paracle image build --incus ml" in str(error)
    for name in ("0123456789abcdef", "elsewhere:debian/12"):
        error = await refusal(IncusBackend(settings), SandboxConfig(base_image=name))
        assert error.step == "image" and name in str(error)


@pytest.mark.parametrize("name", ["--privileged", "../../etc", "a;rm -rf", "img\n", "x" * 300])
def test_image_names_are_names(name: str) -> None:
    with pytest.raises(ValueError, match="image"):
        SandboxConfig(base_image=name)


@pytest.fixture
async def empty_server(tmp_path: Path) -> AsyncIterator[str]:
    """Answers as a server does that was never initialised: there is nothing on it."""
    metadata = {
        "/1.0": {"environment": {}},
        "/1.0/images/aliases/paracle-test-base": {"target": "0" * 64},
        "/1.0/profiles/default": {"devices": {}},
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode().partition("?")[0]
        answer = {"type": "sync", "status_code": 200, "metadata": metadata.get(path, [])}
        body = json.dumps(answer).encode()
        length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + length.encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "sock"):
        yield str(tmp_path / "sock")


async def test_no_network_to_use(empty_server: str, tmp_path: Path) -> None:
    settings = Settings(incus_socket=empty_server, state_dir=str(tmp_path / "state"))
    backend = IncusBackend(settings)
    with pytest.raises(BackendUnavailableError, match="incus network create incusbr0") as caught:
        await nic_for(backend.server, SandboxConfig(network_mode="bridge"))
    assert caught.value.step == "network"
    await backend.close()


async def test_no_storage_pool(empty_server: str, tmp_path: Path) -> None:
    settings = Settings(incus_socket=empty_server, state_dir=str(tmp_path / "state"))
    error = await refusal(IncusBackend(settings))
    assert isinstance(error, BackendUnavailableError) and error.step == "storage pool"
    assert "incus storage create default" in str(error)


async def test_not_the_storage_pool_that_is_wanted(settings: Settings) -> None:
    error = await refusal(IncusBackend(replace(settings, incus_pool="nowhere")))
    assert isinstance(error, BackendUnavailableError) and error.step == "storage pool"
    assert "incus storage create nowhere" in str(error) and "INCUS_SANDBOX_POOL" in str(error)


async def test_a_machine_that_cannot_have_virtual_machines(settings: Settings) -> None:
    """The real answer of the server on a machine without the parts; told apart from the rest."""
    backend = IncusMachineBackend(settings)
    drivers = (await backend.server.get("/1.0"))["environment"]["driver"]
    if "qemu" in drivers:
        await backend.close()
        pytest.skip("this machine can start virtual machines")
    error = await refusal(backend)
    assert isinstance(error, BackendUnavailableError) and error.step == "virtual machines"
    assert "cannot start virtual machines" in str(error) and "SANDBOX_MODE=incus" in str(error)
    assert any(piece in str(error) for piece in ("vhost_vsock", "KVM", "QEMU")), str(error)
    asking = IncusMachineBackend(settings)
    health = await asking.health()
    await asking.close()
    assert not health.available and health.backend == "incus-vm"
    assert "cannot start virtual machines" in health.detail


async def test_no_network_but_none(settings: Settings) -> None:
    host = of_image(SandboxConfig(network_mode="host"))
    assert "bridge" in str(await refusal(IncusBackend(settings), host))


async def test_nothing_of_the_users_is_used_or_changed(
    settings: Settings, backend: IncusBackend
) -> None:
    """It works beside an empty default profile, and leaves everything that is there as it is."""

    async def look() -> dict[str, object]:
        # Networks of other tests, which come and go, have such names.
        return {
            f"{kind} {one['name']}": {key: one[key] for key in one if key != "used_by"}
            for kind in ("profiles", "networks", "storage-pools", "projects")
            for one in await backend.server.get(f"/1.0/{kind}?recursion=1")
            if not str(one["name"]).startswith("pcl")
        }

    profile = await backend.server.get("/1.0/profiles/default")
    await backend.server.change("PUT", "/1.0/profiles/default", {"devices": {}, "config": {}})
    try:
        before = await look()
        fresh = IncusBackend(settings)
        async with Sandbox(fresh, f"without-profile-{os.getpid()}", CONFIG) as sandbox:
            assert await sandbox.run_command("echo works") == "works\n"
            found = await fresh.instances.find(instance_name(sandbox.sandbox_id))
            assert found is not None and found["profiles"] == []
            assert set(found["expanded_devices"]) <= {"root", "workspace"}
        await fresh.close()
        assert await look() == before
    finally:
        body = {"devices": profile["devices"], "config": profile["config"]}
        await backend.server.change("PUT", "/1.0/profiles/default", body)


@pytest.mark.case("O04", "O06")
async def test_the_instance_is_hardened(make: Make, backend: IncusBackend) -> None:
    """O06 and what the server says of it: unprivileged, ids of its own, no guest API."""
    sandbox = await make(SandboxConfig(cpu_cores=0.5, memory_mb=256, max_processes=64))
    found = await backend.instances.find(instance_name(sandbox.sandbox_id))
    assert found is not None
    config = found["expanded_config"]
    assert config["security.privileged"] == config["security.nesting"] == "false"
    assert config["security.guestapi"] == "false"
    assert config["security.idmap.isolated"] == "true"
    assert config["limits.cpu.allowance"] == "50ms/100ms"
    assert (config["limits.memory"], config["limits.memory.swap"]) == ("256MiB", "false")
    # What stays root beside the guest is neither limited nor told as the sandbox's.
    assert config["limits.processes"] == "67"
    state = await backend.instances.state(instance_name(sandbox.sandbox_id))
    assert (await backend.usage(sandbox.sandbox_id)).processes == state["processes"] - 3 >= 1
    shown = await sandbox.run_command("ls /dev; ls /dev/incus 2>&1; cat /proc/mounts")
    assert "incus" not in shown.split("/dev/incus")[0] and "/dev/incus " not in shown


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        "SANDBOX_MODE": "incus",
        "INCUS_SOCKET": engines.INCUS_SOCKET,
        "INCUS_REMOTE": "local",
        "INCUS_SANDBOX_IMAGE": engines.INCUS_IMAGE,
        "INCUS_SANDBOX_WARM": "0",
        "PARACLE_STATE_DIR": str(tmp_path / "state"),
        "PARACLE_DATA_DIR": str(tmp_path / "data"),
        **more,
    }


async def test_the_environment_says_it_all(backend: IncusBackend, tmp_path: Path) -> None:
    """Mode, image, limits, and how long an unused instance stays; nobody asks for its end."""
    limits = {"INCUS_SANDBOX_MEMORY": "256MiB", "INCUS_SANDBOX_CPU": "0.5"}
    settings = load_settings(environment(tmp_path, INCUS_SANDBOX_TIMEOUT="1", **limits))
    manager = SandboxManager(settings=settings, cleanup_interval=0.2)
    assert manager.idle_timeout == 1
    sandbox_id = (await manager.create()).sandbox_id
    name = instance_name(sandbox_id)
    async with manager.sandbox_operation(sandbox_id) as sandbox:  # so that it is not idle
        assert await sandbox.run_command("echo used") == "used\n"
        found = await backend.instances.find(name)
    assert found is not None
    config = found["expanded_config"]
    assert (config["limits.memory"], config["limits.cpu.allowance"]) == ("256MiB", "50ms/100ms")
    async with asyncio.timeout(60):
        while await backend.instances.find(name) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert not manager.active_sandboxes
    await manager.close()


async def test_type_vm_is_a_virtual_machine(backend: IncusBackend, tmp_path: Path) -> None:
    if "qemu" in (await backend.server.get("/1.0"))["environment"]["driver"]:
        pytest.skip("this machine can start virtual machines")
    settings = load_settings(environment(tmp_path, INCUS_SANDBOX_TYPE="vm"))
    manager = SandboxManager(settings=settings)
    with pytest.raises(BackendUnavailableError, match="cannot start virtual machines"):
        await manager.create()
    await manager.close()


async def test_idle_and_limits_come_from_the_settings() -> None:
    settings = load_settings(
        {
            "INCUS_SANDBOX_IMAGE": "clara-sandbox",
            "INCUS_SANDBOX_MEMORY": "768MiB",
            "INCUS_SANDBOX_CPU": "2",
            "INCUS_SANDBOX_TIMEOUT": "120",
        }
    )
    for name in ("incus", "incus-vm"):
        config = settings.default_config(name)
        assert (config.base_image, config.memory_mb, config.cpu_cores) == ("clara-sandbox", 768, 2)
        assert settings.idle_timeout(name) == 120
    assert settings.idle_timeout("native") is None


def test_an_older_firewall_is_named_with_its_remedy() -> None:
    said = (
        'Failed to start device "eth0": Failed to run: ip6tables -w -t filter -I x: exit status 1'
    )
    error = creation_error(Refused(400, said), "x", engines.INCUS_IMAGE)
    assert isinstance(error, BackendUnavailableError) and error.step == "network firewall"
    assert "apt install nftables" in error.message and "ip6tables -w" in error.message
