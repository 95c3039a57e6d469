"""What an image brings along for us: nothing of it is believed, and the host sees none of it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import oracles
import pytest
from container_fixtures import Make
from test_image_files import docker

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.labels import MANAGED, SESSION, sandbox_info
from paracle_sandbox.backends.machine.process_isolation import read_posture
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.sandbox.sandbox import Sandbox

ON_EACH = pytest.mark.parametrize("engine", ["docker", "gvisor", "podman"])
MARK = f"paracle-hostile-{os.urandom(4).hex()}"
# Everything that a recipe can ask the engine to do by itself, and labels that are ours to set.
RECIPE = f"""\
FROM paracle/sandbox:latest
USER root
RUN mkdir /evil && touch /evil/__init__.py \
    && echo "print('{MARK} started'); raise SystemExit(7)" >/evil/sitecustomize.py \
    && cp /evil/sitecustomize.py /evil/startup.py && cp /evil/sitecustomize.py /evil/json.py \
    && cp /bin/sh /evil/root-shell && chmod 4755 /evil/root-shell
ENV PYTHONPATH=/evil PYTHONSTARTUP=/evil/startup.py PYTHONHOME=/evil LD_PRELOAD=/evil/none.so \
    PATH=/evil:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
LABEL paracle.managed=false paracle.sandbox_id=spoofed paracle.session=spoofed \
    paracle.backend=spoofed paracle.owner=1:1:spoofed paracle.config=spoofed paracle.labels=spoofed
HEALTHCHECK --interval=1s --retries=1 CMD exec sleep 1000 {MARK}
ONBUILD RUN false
STOPSIGNAL SIGWINCH
EXPOSE 1-9999
VOLUME /evil/volume
ENTRYPOINT ["/bin/sh", "-c", "exec sleep 1000 {MARK}"]
CMD ["{MARK}"]
"""


def built(engine: str, recipe: str, **files: bytes) -> str:
    """The name of a new image."""
    engines.require(engine)
    context, name = io.BytesIO(), f"paracle-test/hostile:{os.urandom(4).hex()}"
    with tarfile.open(fileobj=context, mode="w") as tar:
        for path, content in {"Dockerfile": recipe.encode(), **files}.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    docker(engine, "build", "-q", "-t", name, "-", stdin=context.getvalue())
    return name


@pytest.fixture
def image(engine: str) -> Iterator[str]:
    name = built(engine, RECIPE)
    yield name
    docker(engine, "rmi", name)


def commands_with(word: str) -> list[str]:
    """Of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if word in line]


@ON_EACH
@pytest.mark.case("M11")
async def test_what_an_image_asks_for_is_not_done(
    engine: str, image: str, make: Make, backend: DockerBackend
) -> None:
    sandbox = await make(SandboxConfig(base_image=image))
    name = f"paracle-sandbox-{sandbox.sandbox_id}"
    said = await backend.engine.inspect(name)
    config, host = said["Config"], said["HostConfig"]
    assert config["User"] == "1000:1000" and host["ReadonlyRootfs"]
    assert not host["PublishAllPorts"] and not host["PortBindings"]
    assert (config.get("Healthcheck") or {}).get("Test") in (["NONE"], None)
    assert "Health" not in said["State"] or not said["State"]["Health"].get("Log")
    assert MARK not in " ".join(config["Entrypoint"]) and not config["Cmd"]
    # Our labels are ours, and so the sandbox is known for what it is.
    labels = config["Labels"]
    assert labels[MANAGED] == "true" and labels[SESSION] == backend.session
    assert "spoofed" not in {labels[key] for key in labels if key != "paracle.labels"}, labels
    infos = [info for info in await backend.list_sandboxes() if info.owner_pid == os.getpid()]
    assert [info.sandbox_id for info in infos] == [sandbox.sandbox_id]
    assert infos[0].labels == {} and infos[0].config is not None
    # The kernel has no process of the image's own making, and ours is nobody's root.
    assert commands_with(MARK) == []
    if engine != "gvisor":
        posture = read_posture(backend.init_pid(sandbox.sandbox_id))
        assert 0 not in posture.uids[:1] or engine == "podman"
    # It is usable, and what is set-user-ID inside is not that.
    whoami = await sandbox.execute("/evil/root-shell -p -c 'id -u'; echo done")
    assert whoami["stdout"].split()[0] == "1000", whoami
    assert (await sandbox.execute("env -i /usr/bin/env true"))["exit_code"] == 0


@pytest.mark.case("M11")
async def test_a_foreign_container_is_not_taken_for_ours(
    engine: str, image: str, backend: DockerBackend
) -> None:
    """Somebody else runs an image with our labels: it is neither listed nor swept."""
    name = f"foreign-{os.urandom(4).hex()}"
    label = ["--label", f"{MANAGED}=true", "--label", f"paracle.backend={backend.name}"]
    docker(engine, "run", "-d", "--name", name, *label, "--entrypoint", "sleep", "--env",
           "PYTHONHOME=", image, "600")  # fmt: skip
    try:
        (found,) = [c for c in await backend._containers() if f"/{name}" in c["Names"]]
        assert sandbox_info(found) is None
        await backend.sweep()
        await backend.destroy("spoofed")
        assert docker(engine, "inspect", "-f", "{{.State.Running}}", name) == "true\n"
    finally:
        docker(engine, "rm", "-f", name)


PATTERN = Path("/proc/sys/kernel/core_pattern")
LOOK = """
stat -f -c 'proc is %T' /proc; test -c /dev/null && echo 'null is a device'
{ echo c >/proc/sysrq-trigger && echo WROTE sysrq-trigger; } 2>/dev/null
echo '|/evil' >/dev/null; echo '|/evil' >/proc/sys/kernel/core_pattern && echo WROTE core_pattern
echo changed >CANARY && echo WROTE CANARY; cat CANARY
for path in /proc/kcore /proc/keys /proc/timer_list; do
    if head -c 100 $path 2>/dev/null | grep -q .; then echo "READ $path"; fi
done
"""


@ON_EACH
@pytest.mark.parametrize("place", ["dev/null", "dev", "proc", "sys"])
@pytest.mark.case("G04", "I13", "M11")
async def test_an_image_with_links_where_the_kernels_files_are(
    engine: str, place: str, backend: DockerBackend, tmp_path: Path
) -> None:
    """CVE-2025-31133, -52565, -52881, CVE-2019-19921: the runtime follows a link when it hides a
    path or writes to /proc. Refused, or without a consequence."""
    canary = oracles.Canary(tmp_path / "canary")
    tmp_path.chmod(0o755)
    target = {"dev/null": "/proc/sys/kernel/core_pattern"}.get(place, str(tmp_path))
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(place)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)
    recipe = "FROM paracle/sandbox:latest\nADD layer.tar /\n"
    name = built(engine, recipe, **{"layer.tar": layer.getvalue()})
    pattern, mounts = PATTERN.read_text(), oracles.mountinfo()
    said = ""
    try:
        sandbox = Sandbox(backend, f"links-{os.urandom(4).hex()}", SandboxConfig(base_image=name))
        async with sandbox:
            said = (await sandbox.execute(LOOK.replace("CANARY", str(canary.path))))["stdout"]
    except SandboxCreationError:
        pass
    else:
        assert "proc is proc" in said and "null is a device" in said, said
        assert "WROTE" not in said and "READ" not in said and canary.secret not in said, said
    finally:
        docker(engine, "rmi", name)
    assert PATTERN.read_text() == pattern
    canary.assert_intact()
    assert not [line for line in oracles.mountinfo() if str(tmp_path) in line]
    assert len(oracles.mountinfo()) <= len(mounts) + 8
