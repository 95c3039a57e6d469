"""Native sandboxes in containers: what is documented works, and what cannot work says why and what
to do. A remedy is followed as it is printed, and then there is no second error."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_image import CONTAINERS, Agent

import engines

pytestmark = pytest.mark.timeout(600)

FILTER = "a seccomp filter refuses unshare, setns, mount, umount2 and mount_setattr"
COVERED = "are covered, so that the kernel allows no new /proc"
READ_ONLY = "the cgroup file system is read-only"
PROFILE = ["--security-opt", "seccomp=paracle-seccomp.json"]
OPEN = ["--security-opt", "seccomp=unconfined"]
LOOP = Path("/dev/loop-control")
AS_USER = ["--user", "1000:1000"]
AS_ROOT = ["--user", "0"]
RIGHTS = ["--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"]


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        (AS_ROOT, [FILTER, "root lacks CAP_SYS_ADMIN and CAP_NET_ADMIN", READ_ONLY]),
        (AS_USER, [FILTER, COVERED]),
        ([*AS_USER, *OPEN], [COVERED]),
        ([*AS_USER, "--security-opt", "systempaths=unconfined"], [FILTER]),
        ([*AS_ROOT, *RIGHTS], ["a seccomp filter refuses pivot_root", READ_ONLY]),
        ([*AS_ROOT, *RIGHTS, *PROFILE], [READ_ONLY]),
        ([*AS_ROOT, *OPEN, "--cap-add", "SYS_ADMIN"], ["root lacks CAP_NET_ADMIN", READ_ONLY]),
    ],
    ids=["root", "user", "user, no filter", "user, whole proc", "root, rights", "root, cgroups",
         "root, half the rights"],
)  # fmt: skip
def test_all_that_is_in_the_way_is_said_at_once(
    agent: Agent, options: Sequence[str], causes: list[str]
) -> None:
    ran = agent.run(options, "paracle sandbox execute --backend native agent.py; echo $?;"
                             "paracle sandbox health --backend native >&2")  # fmt: skip
    assert ran.stdout == "3\n", ran.stdout + ran.stderr
    said = " ".join(ran.stderr.split())
    error, _, health = said.partition("Sandbox Health Check")
    for cause in (FILTER, "pivot_root", COVERED, READ_ONLY, "CAP_SYS_ADMIN", "CAP_NET_ADMIN"):
        named = cause in error.partition(" Start the container")[0]
        assert named == any(cause in one for one in causes), (cause, error)
    assert all(cause in error for cause in causes), error
    assert "paracle sandbox health" not in error + health, "it led here"


@pytest.mark.parametrize("options", [AS_ROOT, AS_USER], ids=["root", "user"])
def test_the_remedy_that_is_printed_is_one(agent: Agent, options: Sequence[str]) -> None:
    said = " ".join(agent.execute(options).stderr.split())
    remedies = re.findall(r"docker run (.+?)(?: \(|\. )", said)
    assert len(remedies) == (2 if options is AS_ROOT else 1), said
    for remedy in remedies:
        words = shlex.split(remedy)
        ran = agent.execute([*([] if "--user" in words else options), *words])
        assert (ran.code, ran.stdout) == (0, "42\n"), (remedy, ran.stderr)


def documented(repository: Path) -> list[str]:
    page = (repository / "docs/containers.md").read_text()
    return re.findall(r"^docker run .+$", page, re.MULTILINE)


def test_the_documented_lines_work(agent: Agent, repository: Path) -> None:
    lines = documented(repository)
    assert len(lines) == 2
    for line in lines:
        ran = agent.line(line)
        assert (ran.code, ran.stdout) == (0, "42\n"), (line, ran.stderr)
        words = shlex.split(line)
        layers = agent.layers([w for w in words[2 : words.index("my-agent")] if w != "--rm"])
        missing = {name for name, in_force in layers.items() if not in_force}
        expected = {"disk limit apart from memory", "bridge network available"}
        expected |= set() if "--cap-add" in line else {"memory limit", "cpu limit"}
        assert missing == expected, line


WATCHES = """
import ctypes
libc, made = ctypes.CDLL(None), 0
while made < 100 and libc.inotify_init1(0) >= 0:
    made += 1
print(made)
"""


def test_a_sandbox_in_a_container_has_a_share_of_its_users_watches(
    agent: Agent, repository: Path
) -> None:
    """As an ordinary user: as root there is a user for each sandbox."""
    line = next(one for one in documented(repository) if "--user 1000" in one)
    words = shlex.split(line)
    options = [word for word in words[2 : words.index("my-agent")] if word != "--rm"]
    program = f"printf %s {shlex.quote(WATCHES)} > /tmp/watches.py"
    ran = agent.run(options, f"{program}; paracle sandbox execute --backend native /tmp/watches.py")
    assert (ran.code, ran.stdout) == (0, "16\n"), ran.stderr


def test_the_packages_are_in_the_image(agent: Agent, repository: Path) -> None:
    """A container of one command would end before it had installed them, and the next again."""
    (as_user, as_root) = documented(repository)
    for line in (as_user, as_root):
        with agent.running("import requests; print(requests.__name__)"):
            ran = agent.line(line)
        assert (ran.code, ran.stdout, ran.stderr) == (0, "requests\n", ""), line
    page = (repository / "docs/containers.md").read_text()
    assert (CONTAINERS / "Dockerfile").read_text().count("\nRUN paracle template build") == 2
    assert "\nRUN paracle template build default\n" in page


def test_podman_names_its_own_options_and_they_work(agent: Agent) -> None:
    """Its filter lets namespaces be made, and then refuses what is done in them."""
    engines.require("podman")
    with agent.passed_on_to_podman():
        said = " ".join(agent.execute_on_podman(AS_USER).stderr.split())
        assert COVERED in said and "a seccomp filter refuses sethostname" in said, said
        (remedy,) = re.findall(r"podman run (.+?) \(", said)
        assert "unmask=ALL" in remedy
        ran = agent.execute_on_podman([*AS_USER, *shlex.split(remedy)])
        assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr


def of_the_page(repository: Path, pattern: str) -> list[str]:
    """What the page names in this sentence."""
    page = (repository / "docs/containers.md").read_text()
    (sentence,) = re.findall(pattern, page, re.MULTILINE)
    return re.findall(r"`([^`]+)`", sentence)


def only_capabilities(names: Sequence[str]) -> list[str]:
    return ["--cap-drop", "ALL", *(word for name in names for word in ("--cap-add", name))]


def test_root_needs_the_capabilities_of_the_page_and_no_others(
    agent: Agent, repository: Path
) -> None:
    names = of_the_page(repository, r"capabilities it needs (.+)\.$")
    assert len(names) == 6
    as_root = next(line for line in documented(repository) if "--user 0" in line)
    ran = agent.line(as_root.replace("--rm", shlex.join(only_capabilities(names))))
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr


@pytest.mark.parametrize("has_all", [True, False], ids=["Docker's capabilities", "the page's"])
def test_the_disk_option_of_the_page(agent: Agent, repository: Path, has_all: bool) -> None:
    if "btrfs" not in Path("/proc/filesystems").read_text() or not LOOP.exists():
        pytest.skip("a kernel without btrfs or loop devices: modprobe btrfs loop")
    (options, further) = of_the_page(repository, r"For a disk limit apart from memory add\n(.+)$")
    names = of_the_page(repository, r"capabilities it needs (.+)\.$")
    capabilities = [] if has_all else only_capabilities([*names, further])
    as_root = next(line for line in documented(repository) if "--user 0" in line)
    words = shlex.split(as_root)
    given = [*words[3 : words.index("my-agent")], *shlex.split(options), *capabilities]
    assert agent.layers(given)["disk limit apart from memory"]


def test_root_goes_on_without_writable_control_groups(agent: Agent) -> None:
    """If it says so: a container's root has no CAP_SYS_RESOURCE for the limits that take their
    place."""
    options = [*AS_ROOT, *RIGHTS, *PROFILE, "--security-opt", "apparmor=unconfined"]
    ran = agent.run(
        options,
        "paracle sandbox execute --backend native --allow-degraded cgroup agent.py",
    )
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr


def test_the_profiles_come_out_of_the_installed_package(agent: Agent) -> None:
    module = "python3 -m paracle_sandbox.backends.native.profiles"
    assert agent.run(AS_USER, f"{module} seccomp").stdout == agent.profile.read_text()
    assert agent.run(AS_USER, f"{module} pod").stdout == (CONTAINERS / "pod.yaml").read_text()
    written = agent.run(AS_USER, f"{module} apparmor")
    command = agent.run(AS_USER, "command -v paracle").stdout.strip()
    assert f'profile paracle-sandbox "{command}" flags=(unconfined) {{' in written.stdout


def of_compose() -> list[str]:
    service: dict[str, Any] = yaml.safe_load((CONTAINERS / "docker-compose.yml").read_text())
    (agent,) = service["services"].values()
    options = [
        "--user",
        agent["user"],
        "--memory",
        agent["mem_limit"],
        "--cpus",
        str(agent["cpus"]),
    ]
    for option, key in (("--security-opt", "security_opt"), ("--cap-drop", "cap_drop")):
        options += [word for value in agent[key] for word in (option, value)]
    return options


def of_the_dev_container() -> list[str]:
    described = json.loads((CONTAINERS / "devcontainer.json").read_text())
    folder = "${localWorkspaceFolder}/.devcontainer/"
    options = [word.replace(folder, "") for word in described["runArgs"]]
    return ["--user", described["containerUser"], *options]


def of_the_pod() -> list[str]:
    """What the fields mean to Docker. The user namespace of the pod is left out."""
    spec = yaml.safe_load((CONTAINERS / "pod.yaml").read_text())["spec"]
    pod, own = spec["securityContext"], spec["containers"][0]["securityContext"]
    assert pod["seccompProfile"] == {
        "type": "Localhost",
        "localhostProfile": "paracle-seccomp.json",
    }
    assert (own["procMount"], spec["hostUsers"]) == ("Unmasked", False)
    assert pod["appArmorProfile"] == {"type": "Unconfined"}
    assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
    return [
        "--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", *PROFILE,
        "--security-opt", "systempaths=unconfined", "--security-opt", "apparmor=unconfined",
    ]  # fmt: skip


@pytest.mark.parametrize("options", [of_compose, of_the_dev_container, of_the_pod])
def test_the_examples_have_what_is_needed(agent: Agent, options: Any) -> None:
    ran = agent.execute(options())
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr


def with_the_engine() -> list[str]:
    """As a user who may speak to it."""
    group = engines.SOCKET.stat().st_gid
    return ["-v", f"{engines.SOCKET}:/var/run/docker.sock", "--user", f"1000:{group}"]


def test_auto_takes_the_engine_where_a_filter_forbids_namespaces(agent: Agent) -> None:
    ran = agent.execute(with_the_engine(), backend="auto")
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr
    said = " ".join(ran.stderr.split())
    assert f"SANDBOX_MODE=auto is using docker; not native: {FILTER}" in said


def test_auto_takes_the_engine_where_root_lacks_rights(agent: Agent) -> None:
    options = ["-v", f"{engines.SOCKET}:/var/run/docker.sock", *AS_ROOT]
    ran = agent.execute(options, backend="auto")
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr
    said = " ".join(ran.stderr.split())
    assert "SANDBOX_MODE=auto is using docker; not native:" in said
    assert "root lacks CAP_SYS_ADMIN and CAP_NET_ADMIN" in said


def test_auto_takes_the_engine_where_only_a_trial_shows_the_filter(agent: Agent) -> None:
    """Podman's filter lets an ordinary user make namespaces, and not name the host in them."""
    engines.require("podman")
    with agent.passed_on_to_podman():
        options = [*with_the_engine(), "--security-opt", "unmask=ALL"]
        ran = agent.execute_on_podman(options, backend="auto")
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr
    said = " ".join(ran.stderr.split())
    assert "SANDBOX_MODE=auto is using docker; not native: a seccomp filter refuses" in said
    assert "sethostname" in said


def test_auto_takes_native_where_that_works(agent: Agent) -> None:
    ran = agent.execute([*of_the_dev_container(), *with_the_engine()], backend="auto")
    assert (ran.code, ran.stdout) == (0, "42\n"), ran.stderr
    assert "SANDBOX_MODE" not in ran.stderr
