"""A server of another name: over TLS by the client's own list, and with a pool that has quotas."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from incus_fixtures import CONFIG
from incus_private import PrivateServer, private_server

import engines
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import instance_name
from paracle_sandbox.backends.machine.owner import Owner
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.conformance import FEATURES, all_checks, run_check

pytestmark = pytest.mark.timeout(300)
POOL = "with-quotas"


@pytest.fixture(scope="module")
def private() -> Iterator[PrivateServer]:
    with private_server() as server:
        yield server


@pytest.fixture
def local(private: PrivateServer, tmp_path: Path) -> Settings:
    return Settings(
        incus_socket=private.socket,
        incus_warm=0,
        state_dir=str(tmp_path / "state"),
        data_dir=str(tmp_path / "data"),
        incus_conf=str(tmp_path / "client"),
    )


@pytest.fixture
def far(private: PrivateServer, local: Settings) -> Settings:
    """The same server as another machine has it, added by the client that users have."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    private.incus("config", "set", "core.https_address", address)
    token = private.incus("config", "trust", "add", "paracle-test", "-q").strip().splitlines()[-1]
    conf = Path(local.incus_conf or "")
    words = ("remote", "add", "work", f"https://{address}", "--token", token)
    private.incus(*words, "--accept-certificate", conf=conf)
    return replace(local, incus_socket="/nowhere", incus_remote="work")


async def test_a_named_remote(private: PrivateServer, far: Settings) -> None:
    """Everything goes over TLS, the exec stream too; files and cgroups are not taken for ours."""
    backend = IncusBackend(far)
    assert backend.server.remote.address.startswith("https://127.0.0.1:")
    assert not backend.server.remote.shares_our_files
    async with Sandbox(backend, "far-away", CONFIG) as sandbox:
        text = "x" * (3 << 20)
        await sandbox.write_file("large", text)
        assert await sandbox.run_command("wc -c < large") == f"{len(text)}\n"
        assert [info.sandbox_id for info in await backend.list_sandboxes()] == ["far-away"]
        assert "far-away" in private.incus("list", "-f", "json")
        assert (await backend.usage("far-away")).processes > 0
    # An image may be of such a server too, which ours is asked to trust as we do.
    alias = await backend.server.get(f"/1.0/images/aliases/{engines.INCUS_IMAGE}")
    public = {"public": True}
    await backend.server.change("PATCH", f"/1.0/images/{alias['target']}", public)
    pulled = SandboxConfig(base_image=f"work:{engines.INCUS_IMAGE}")
    async with Sandbox(backend, "far-image", pulled) as sandbox:
        assert await sandbox.run_command("echo pulled") == "pulled\n"
    await backend.close()


async def test_a_remote_that_does_not_let_us(private: PrivateServer, far: Settings) -> None:
    """Another certificate than ours is trusted, or than the stored one is shown."""
    conf = Path(far.incus_conf or "")
    listed = private.incus("config", "trust", "list", "-c", "f", "-f", "csv").split()
    for fingerprint in listed:
        private.incus("config", "trust", "remove", fingerprint)
    error = await _refusal(far)
    assert error.step == "permission" and "incus config trust add" in str(error)
    assert "incus remote add work https://127.0.0.1:" in str(error)
    shutil.copy(conf / "client.crt", conf / "servercerts/work.crt")
    error = await _refusal(far)
    assert error.step == "certificate" and "another certificate" in str(error)
    (conf / "client.key").unlink()
    error = await _refusal(far)
    assert error.step == "certificate" and "incus remote add work" in str(error)
    private.incus("config", "unset", "core.https_address")
    shutil.copy(private.cache / "incus/server.key", conf / "client.key")
    shutil.copy(private.cache / "incus/server.crt", conf / "client.crt")
    error = await _refusal(far)
    assert error.step == "server" and "no server answers at https://127.0.0.1:" in str(error)


async def _refusal(settings: Settings) -> BackendUnavailableError:
    backend = IncusBackend(settings)
    try:
        with pytest.raises(BackendUnavailableError) as caught:
            await backend.create("refused", CONFIG, {})
        return caught.value
    finally:
        await backend.close()


async def test_a_project_that_forbids(private: PrivateServer, local: Settings) -> None:
    """The project of a remote is the one that is used, and what it lacks is named."""
    options = ("features.images=false", "restricted=true")
    private.incus("project", "create", "locked", *(word for one in options for word in ("-c", one)))
    conf = Path(local.incus_conf or "")
    conf.mkdir()
    (conf / "config.yml").write_text("remotes:\n  local:\n    addr: unix://\n    project: locked\n")
    error = await _refusal(local)
    assert error.step == "project" and "incus project set locked" in str(error)
    allow = ("restricted.containers.lowlevel=allow", "restricted.devices.disk=allow")
    private.incus("project", "set", "locked", *allow)
    backend = IncusBackend(local)
    async with Sandbox(backend, "in-a-project", CONFIG) as sandbox:
        assert await sandbox.run_command("echo allowed") == "allowed\n"
        listed = private.incus("list", "--project", "locked", "-c", "n", "-f", "csv").split()
        assert listed == [instance_name("in-a-project")]
    await backend.close()


@pytest.fixture(scope="module")
def pool(private: PrivateServer) -> str:
    private.incus("storage", "create", POOL, "btrfs", "size=3GiB")
    return f"/1.0/storage-pools/{POOL}/volumes/custom"


@pytest.fixture
async def quotas(private: PrivateServer, local: Settings, pool: str) -> AsyncIterator[IncusBackend]:
    backend = IncusBackend(replace(local, incus_pool=POOL))
    yield backend
    await backend.close()
    volumes = private.incus("storage", "volume", "list", POOL, "type=custom", "-f", "csv")
    assert volumes.strip() == "", "a volume is left"


async def test_a_pool_with_quotas_limits_the_disk(quotas: IncusBackend, pool: str) -> None:
    """The workspace is a volume of the pool, and no store of ours is mounted."""
    wanted = {"limits.too_much_disk", "limits.disk_is_not_memory"}
    checks = [check for check in all_checks() if check.name in wanted]
    assert len(checks) == len(wanted), sorted(check.name for check in all_checks())
    async with Sandbox(quotas, "on-a-volume", CONFIG) as sandbox:
        found = await quotas.instances.find(instance_name(sandbox.sandbox_id))
        assert found is not None
        disk = found["expanded_devices"]["workspace"]
        assert disk["pool"] == found["expanded_devices"]["root"]["pool"] == POOL
        volume = await quotas.server.get(f"{pool}/{disk['source']}")
        assert volume["config"]["size"] == f"{CONFIG.disk_mb}MiB"
        assert not list(Path(quotas.settings.state_dir).glob("store-*"))
    for check in checks:
        await run_check(check, quotas, frozenset(FEATURES), CONFIG)


async def test_volumes_of_dead_owners_are_swept(quotas: IncusBackend, pool: str) -> None:
    async with Sandbox(quotas, "alive", CONFIG):
        [volume] = await quotas.server.get(f"{pool}?recursion=1")
        owner = Owner.parse(volume["config"]["user.paracle.owner"])
        assert owner is not None and owner.is_alive
        dead = str(replace(owner, start=owner.start + 1))
        config = {"size": "256MiB", "user.paracle.owner": dead}
        await quotas.server.change("POST", pool, {"name": "paracle-left", "config": config})
        await quotas.sweep()
        left = await quotas.server.get(f"{pool}?recursion=1")
        assert [one["name"] for one in left] == [volume["name"]]
