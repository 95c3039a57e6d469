"""Tests of what prevents native sandboxes: facts are given to it, and a filter is measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paracle_sandbox
from paracle_sandbox.backends.native.obstacles import (
    container_kind,
    covered_in_proc,
    find,
    refused_calls,
    remedy_for,
)
from paracle_sandbox.backends.native.profiles import apparmor_profile, main
from paracle_sandbox.jail.filters import container_profile, policy
from paracle_sandbox.jail.filters.syscalls import NUMBERS

SOURCES = str(Path(paracle_sandbox.__file__).parents[1])
# id, parent, device, root, mount point, options - kind, source, options
PROC = "20 1 0:5 / /proc rw,nosuid - proc proc rw\n"
BINFMT = "21 20 0:6 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n"
MASKED = "22 20 0:7 /null /proc/kcore rw - devtmpfs udev rw\n"
READ_ONLY = "23 20 0:5 /sys /proc/sys ro - proc proc rw\n"
ANOTHER = "30 1 0:8 / /dev/.lxc/proc rw - proc proc rw\n"


@pytest.mark.parametrize(
    ("mounts", "covered"),
    [
        ("", []),
        (PROC, []),
        (PROC + BINFMT, []),
        (PROC + MASKED, ["/proc/kcore"]),
        (PROC + BINFMT + READ_ONLY + MASKED, ["/proc/sys", "/proc/kcore"]),
        (PROC + MASKED + ANOTHER, []),
    ],
    ids=["none", "whole", "for mounts", "masked", "both", "another is whole"],
)
def test_what_is_covered_in_proc(mounts: str, covered: list[str]) -> None:
    assert covered_in_proc(mounts) == covered


_PROGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
from paracle_sandbox.backends.native.obstacles import refused_calls
from paracle_sandbox.jail import kernel
from paracle_sandbox.jail.filters import seccomp
before = refused_calls(False)
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(seccomp.program())
print(before, refused_calls(False))
"""


def test_a_filter_is_told_from_a_kernel_that_refuses() -> None:
    """Only a filter refuses these calls. They have no effect and every user may make them."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _PROGRAM, SOURCES], capture_output=True, text=True, check=True
    )
    calls = ["unshare", "setns", "mount", "umount2", "mount_setattr"]
    assert done.stdout.strip() == f"[] {calls}"


def test_calls_are_tried_only_under_a_filter() -> None:
    def never(_: bool) -> list[str]:
        raise AssertionError("tried")

    for mode, refused in (("0", never), ("2", refused_calls), ("2", lambda _: [])):
        status = f"Name:\tx\nSeccomp:\t{mode}\nSeccomp_filters:\t1\n"
        assert find(1000, lambda path: status if path.endswith("status") else "", refused) == []


def test_ubuntus_restriction_is_not_switched_off_for_all_programs() -> None:
    text = remedy_for(["kernel.apparmor_restrict_unprivileged_userns is 1"], 1000, "")
    assert "profiles apparmor" in text and "apparmor_parser" in text
    assert "sysctl" not in text


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("docker", ["docker run --security-opt seccomp=", "systempaths=unconfined"]),
        ("podman", ["podman run --security-opt seccomp=", "unmask=ALL"]),
        ("kubernetes", ["profiles pod", "procMount: Unmasked", "hostUsers: false"]),
        ("incus", ["security.nesting=true"]),
        ("", ["RestrictNamespaces=", "systempaths=unconfined"]),
    ],
)
def test_a_filter_has_a_remedy_of_whoever_sets_it(container: str, words: list[str]) -> None:
    text = remedy_for(["a seccomp filter refuses unshare"], 1000, container)
    assert all(word in text for word in words), text
    assert ("docker run" in text) == (container == "docker")
    assert "paracle sandbox health" not in text
    named = re.findall(r"(?:docs|deploy)/\S+(.{0,34})", text)
    assert all("in the source of Paracle Sandbox" in after for after in named), "no wheel has it"


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        (
            "40 1 8:1 /var/lib/kubelet/pods/u/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw",
            "kubernetes",
        ),
        (f"{PROC}41 20 0:9 /proc/uptime /proc/uptime rw - fuse.lxcfs lxcfs rw", "incus"),
        (PROC + MASKED, "docker"),
        (f"{PROC}42 1 8:1 /var/lib/docker/c/hosts /etc/hosts rw - ext4 /dev/sda1 rw", "docker"),
        (PROC + BINFMT, ""),
    ],
)
def test_what_kind_of_container_it_is(mounts: str, kind: str) -> None:
    assert container_kind(lambda _: mounts) == kind


def test_what_the_machine_forbids_comes_before_the_container() -> None:
    causes = ["a seccomp filter refuses unshare", "user.max_user_namespaces is 0"]
    text = remedy_for(causes, 1000, "docker")
    assert 0 < text.index("sysctl user.max_user_namespaces=10000") < text.index("docker run")


def test_the_apparmor_profile_names_the_programs_it_is_for() -> None:
    text = apparmor_profile(["/opt/p/bin/paracle", "/opt/p/bin/python3.12"])
    paths = "/{opt/p/bin/paracle,opt/p/bin/python3.12}"  # the parser wants the slash first
    head = f'profile paracle-sandbox "{paths}" flags=(unconfined) {{'
    assert f"\n{head}\n" in text and "\n  userns,\n" in text
    assert text.count("{") == text.count("}")
    assert '"/opt/a b\\{c/paracle"' in apparmor_profile(["/opt/a b{c/paracle"])


def test_the_seccomp_profile_that_is_shipped_is_that_of_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path(__file__).resolve().parents[2] / "deploy/containers/paracle-seccomp.json"
    assert json.loads(file.read_text()) == container_profile.profile(), "make seccomp"
    assert main(["seccomp"]) == 0
    assert capsys.readouterr().out == file.read_text()
    assert main(["pod"]) == 0
    assert capsys.readouterr().out == file.with_name("pod.yaml").read_text()


def test_the_seccomp_profile_knows_its_calls_and_none_of_the_machines() -> None:
    allowed = {name for group in container_profile.profile()["syscalls"] for name in group["names"]}
    assert allowed <= {*NUMBERS["x86_64"], *NUMBERS["aarch64"]}
    machine = {*policy.names({"": policy.DENIED["the machine"]}), "bpf", "perf_event_open"}
    machine -= {"sethostname", "modify_ldt"}
    assert not allowed & (
        machine | {"open_by_handle_at", "io_uring_setup", "keyctl", "userfaultfd"}
    )
