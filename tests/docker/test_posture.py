"""What a container is given, asked of the engine and of the kernel: exactly that, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import oracles
import pytest
from container_fixtures import Make

from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.spec import seccomp_profile
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox

WRITES = """
import os
for top, names, files in os.walk("/sys/fs/cgroup"):
    for name in files:
        try:
            with open(os.path.join(top, name), "w") as file:
                file.write("1")
            print("WROTE", top, name)
        except OSError:
            pass
print(open("/proc/self/cgroup").read())
"""


@pytest.mark.case("I01", "I12", "O07", "M11")
async def test_what_the_engine_was_asked_for(sandbox: Sandbox, backend: DockerBackend) -> None:
    said = await backend.engine.inspect(f"paracle-sandbox-{sandbox.sandbox_id}")
    host, config = said["HostConfig"], said["Config"]
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["Test"] == ["NONE"]
    assert host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges", f"seccomp={seccomp_profile()}"]
    assert host["ReadonlyRootfs"] and host["AutoRemove"]
    assert host["RestartPolicy"]["Name"] == "no" and host["LogConfig"]["Type"] == "none"
    assert host["Memory"] == host["MemorySwap"] == 512 << 20
    assert host["PidsLimit"] == 256 and host["CpuQuota"] == host["CpuPeriod"] == 100_000
    assert host["NetworkMode"] == "none" and host["IpcMode"] == "private"
    assert not host["Binds"] and not host["Devices"] and not host["PidMode"] and not host["UTSMode"]
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware"} <= set(host["MaskedPaths"])


@pytest.mark.case("I12", "G09")
async def test_its_cgroup_can_be_read_at_most(sandbox: Sandbox, backend: DockerBackend) -> None:
    said = (await sandbox.run_code(WRITES))["stdout"]
    assert "WROTE" not in said
    lines = [line for line in said.splitlines() if line]
    assert lines and all(line.split(":", 2)[2] == "/" for line in lines), said
    usage = await backend.usage(sandbox.sandbox_id)
    assert usage.processes >= 1


@pytest.mark.case("G05")
async def test_devices(sandbox: Sandbox) -> None:
    names = set((await sandbox.run_command("ls /dev; ls -A /dev/mqueue")).split())
    names -= {"core"}  # a link to a file that is hidden, which some engines make
    assert names == {
        "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin",
        "stdout", "stderr", "mqueue",
    }  # fmt: skip
    assert (await sandbox.execute("mknod /tmp/x c 1 3"))["exit_code"] != 0


@pytest.mark.case("B08")
async def test_there_is_no_swap(sandbox: Sandbox, backend: DockerBackend) -> None:
    group = Path(backend._owned[sandbox.sandbox_id].cgroups["memory"])
    both = group / "memory.memsw.limit_in_bytes"
    if both.exists():
        assert int(both.read_text()) == 512 << 20
    else:
        assert (group / "memory.swap.max").read_text().strip() == "0"


async def test_more_cores_than_the_machine_has_are_all_of_them(make: Make) -> None:
    sandbox = await make(SandboxConfig(cpu_cores=16.0))
    assert await sandbox.run_command("echo works") == "works\n"


async def test_root_may_be_writable_in_its_own_places_only(make: Make) -> None:
    sandbox = await make(SandboxConfig(read_only_filesystem=False))
    script = 'for d in /home /opt /srv /mnt; do echo x >"$d/file" || exit 1; done; echo x >/etc/x'
    result = await sandbox.execute(script)
    assert result["exit_code"] != 0 and "/etc/x" in result["stderr"]
    assert result["stderr"].count("\n") == 1, "the four could be written to"


async def test_the_volume_is_gone_when_the_backend_is(backend: DockerBackend, make: Make) -> None:
    await make()
    store = await backend.store.get()
    assert store is not None and os.path.ismount(store.path)
    assert any(store.path in line for line in oracles.mountinfo())


async def test_the_shipped_profile_is_the_policy() -> None:
    """After a change of the table: make seccomp."""
    import subprocess
    import sys

    import paracle_sandbox

    package = Path(paracle_sandbox.__file__).parent
    program = [sys.executable, "-m", "paracle_sandbox.jail.filters.engine_profile"]
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    made = subprocess.run(program, capture_output=True, text=True, check=True, env=env).stdout
    assert made == (package / "backends/docker/seccomp.json").read_text()
