"""Tests of the requests of the Incus backends, and of how they read responses.

They need no server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paracle_sandbox.backends.incus.errors import creation_error, guest_error, no_machines
from paracle_sandbox.backends.incus.image_build import download_command
from paracle_sandbox.backends.incus.images import alias_of
from paracle_sandbox.backends.incus.labels import (
    instance_name,
    owner_keys,
    owner_of,
    sandbox_info,
    sandbox_keys,
)
from paracle_sandbox.backends.incus.remotes import Remotes, read_remotes
from paracle_sandbox.backends.incus.server import Refused
from paracle_sandbox.backends.incus.spec import (
    CONTAINER,
    MACHINE,
    Place,
    confinement,
    exec_body,
    instance_body,
    sandbox_change,
    state_change,
)
from paracle_sandbox.backends.incus.usage import usage_of
from paracle_sandbox.backends.machine.owner import Owner
from paracle_sandbox.backends.registry import get_backend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    BackendUnavailableError,
    SandboxCreationError,
)
from paracle_sandbox.service.errors import classify, status_of
from paracle_sandbox.settings import Settings, load_settings

SOURCE = {"type": "image", "fingerprint": "ab" * 32}
CONFIG = SandboxConfig(cpu_cores=2.5, memory_mb=768, disk_mb=512, max_processes=40)
# The fields of InstancesPost, InstanceExecPost and InstanceStatePut in the API's documentation.
INSTANCE_FIELDS = {"name", "type", "ephemeral", "profiles", "source", "config", "devices"}
EXEC_FIELDS = {
    "command", "environment", "wait-for-websocket", "interactive", "user", "group", "cwd",
}  # fmt: skip
STATE_FIELDS = {"action", "force", "timeout", "stateful"}


def test_the_body_of_a_virtual_machine() -> None:
    """It has exactly what the API documents for a machine, and nothing that belongs to a
    container."""
    body = instance_body("paracle-x", SOURCE, Place(MACHINE, "default"), CONFIG)
    assert set(body) == INSTANCE_FIELDS
    assert body == {
        "name": "paracle-x",
        "type": "virtual-machine",
        "ephemeral": True,
        "profiles": [],
        "source": SOURCE,
        "config": {
            "boot.autostart": "false",
            "security.secureboot": "false",
            "security.guestapi": "false",
            "limits.memory": "768MiB",
            # A machine can only have whole processors.
            "limits.cpu": "3",
        },
        "devices": {"root": {"type": "disk", "path": "/", "pool": "default"}},
    }
    assert confinement(CONFIG, Place(MACHINE, "default"))["max_processes"] == 40
    # According to the documentation, a folder of the host is shifted for containers only.
    shared = Place(MACHINE, "default", home={"source": "/somewhere"})
    disk = instance_body("paracle-x", SOURCE, shared, CONFIG)["devices"]["workspace"]
    assert disk == {"type": "disk", "path": "/.paracle", "source": "/somewhere"}
    of_pool = Place(CONTAINER, "default", home={"pool": "default", "source": "volume"})
    assert "shift" not in sandbox_change(CONFIG, of_pool)["devices"]["workspace"]


def test_the_body_of_a_container() -> None:
    place = Place(CONTAINER, "pool", home={"source": "/somewhere"})
    body = instance_body("paracle-x", SOURCE, place, CONFIG)
    assert set(body) == INSTANCE_FIELDS and body["type"] == "container"
    assert body["config"] == {
        "boot.autostart": "false",
        "security.privileged": "false",
        "security.nesting": "false",
        "security.guestapi": "false",
        "security.idmap.isolated": "true",
        "raw.lxc": "lxc.init.cmd = /bin/sleep 2147483647",
        "limits.memory": "768MiB",
        "limits.memory.enforce": "hard",
        "limits.memory.swap": "false",
        "limits.cpu.allowance": "250ms/100ms",
        "limits.processes": "43",
    }
    assert body["devices"] == {
        "root": {"type": "disk", "path": "/", "pool": "pool"},
        "workspace": {"type": "disk", "path": "/.paracle", "source": "/somewhere", "shift": "true"},
    }
    assert all(isinstance(value, str) for value in body["config"].values())
    # An instance that is kept ready becomes the same.
    ready, change = instance_body("w", SOURCE, place), sandbox_change(CONFIG, place)
    assert {**ready["config"], **change["config"]} == body["config"]
    assert change["devices"] == body["devices"]


def test_the_other_bodies() -> None:
    assert set(exec_body()) == EXEC_FIELDS
    assert exec_body()["wait-for-websocket"] is True and exec_body()["interactive"] is False
    assert set(state_change("stop")) == STATE_FIELDS and state_change("stop")["force"] is True


def test_type_vm_means_virtual_machines() -> None:
    assert get_backend("incus", Settings()).name == "incus"
    assert get_backend("incus-vm", Settings()).name == "incus-vm"
    vm = load_settings({"INCUS_SANDBOX_TYPE": "vm", "SANDBOX_MODE": "incus"})
    assert get_backend(None, vm).name == "incus-vm"


REMOTES = """\
default-remote: local
remotes:
  images:
    addr: https://images.example
    protocol: simplestreams
    public: true
  work:
    addr: https://server.example:8443
    auth_type: tls
    project: default
    protocol: incus
    public: false
  "local":
    addr: unix://
aliases:
  work: list
"""


def test_remotes_are_those_of_the_client(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(REMOTES)
    assert set(read_remotes(REMOTES)) == {"images", "work", "local"}
    remotes = Remotes(Settings(incus_conf=str(tmp_path), incus_dir="/some/where"))
    work = remotes.get("work")
    assert (work.address, work.socket_path) == ("https://server.example:8443", None)
    assert not work.shares_our_files
    with pytest.raises(BackendUnavailableError, match="incus remote add work"):
        work.certificates()
    assert (work.project, remotes.get("local").project) == ("default", "")
    assert remotes.get("images").address == "https://images.example"
    # A client that was never used knows it, too.
    fresh = Remotes(Settings(incus_conf=str(tmp_path / "none")))
    assert fresh.get("images").protocol == "simplestreams"
    assert remotes.get("local").socket_path == "/some/where/unix.socket"
    with pytest.raises(BackendUnavailableError, match="no Incus remote 'other'"):
        remotes.get("other")


def test_our_images_have_aliases_of_their_own() -> None:
    assert alias_of("paracle/sandbox:latest") == alias_of("paracle/sandbox") == "paracle/sandbox"
    assert alias_of("paracle/sandbox:ml") == "paracle/sandbox/ml"
    assert alias_of("images:debian/12/cloud") == "images:debian/12/cloud"


def test_refusals_say_what_to_do() -> None:
    def error(text: str) -> SandboxCreationError:
        return creation_error(Refused(400, text), "id", "image")

    for said in ("Image not provided for instance creation", "Image not found",
                 "Failed getting remote image info: no such host"):  # fmt: skip
        assert error(said).step == "image"
    text = 'Failed creating instance record: Instance type "virtual-machine" is not supported on'
    vm = error(f"{text} this server: vhost_vsock kernel module not loaded")
    assert isinstance(vm, BackendUnavailableError) and "modprobe vhost_vsock" in str(vm)
    assert "KVM support is missing" in str(no_machines("KVM support is missing (no /dev/kvm)"))
    assert error("Storage pool not found").step == "storage pool"
    kind = 'Requested image\'s type "container" doesn\'t match instance type "virtual-machine"'
    assert "of another kind" in str(error(kind))
    assert error("something else").step == "instance"


def test_a_guest_that_did_not_start() -> None:
    error = guest_error("noise\nparacle-step proc: [Errno 1] Operation not permitted", "image")
    assert error.step == "proc" and "Operation not permitted" in str(error)
    missing = guest_error('exec: "python3": executable not found', "image")
    assert "has no python3" in str(missing) and missing.step == "image"
    assert (status_of(missing), classify(missing).retryable) == (400, False)
    assert guest_error("", "image").step == "guest"


def test_only_our_own_instances_are_ours() -> None:
    owner = Owner.of(1)
    keys = {**owner_keys("incus", "s", owner), **sandbox_keys("a_b", CONFIG, {"purpose": "x"})}
    name = instance_name("a_b")
    assert len(name) <= 63 and name.replace("-", "").isalnum() and name[0].isalpha()
    instance = {"name": name, "config": keys, "status": "Running"}
    info = sandbox_info(instance, "incus")
    assert info is not None and info.labels == {"purpose": "x"} and info.state == "running"
    # A copy of an instance has the keys, but not the name; a machine is another backend's.
    assert sandbox_info({**instance, "name": "copy"}, "incus") is None
    assert owner_of({**instance, "name": "copy"}, "incus") is None
    assert sandbox_info(instance, "incus-vm") is None
    assert owner_of({"name": "theirs", "config": {}}, "incus") is None


def test_figures_of_a_server_elsewhere() -> None:
    state = {
        "pid": 4,
        "cpu": {"usage": 2_500_000_000},
        "memory": {"usage": 10, "usage_peak": 30},
        "processes": 5,
        "network": {
            "lo": {"counters": {"bytes_received": 9, "bytes_sent": 9}},
            "eth0": {"counters": {"bytes_received": 1, "bytes_sent": 2}},
        },
    }
    usage = usage_of(state)
    assert (usage.cpu_seconds, usage.memory_peak_bytes, usage.processes) == (2.5, 30, 5)
    assert (usage.network_rx_bytes, usage.network_tx_bytes) == (1, 2)


def test_packages_come_as_wheels_for_the_image() -> None:
    command = download_command(Path("list"), Path("to"), "3.11", "aarch64")
    assert "--only-binary" in command and "manylinux2014_aarch64" in command
    assert command[command.index("--python-version") + 1] == "3.11"


def test_without_aiohttp_the_install_line_is_named() -> None:
    code = """
import asyncio, sys
sys.modules["aiohttp"] = None
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.settings import Settings
async def main():
    print((await IncusBackend(Settings(incus_socket="/nowhere")).health()).detail)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install '.[incus]'" in done.stdout, done
