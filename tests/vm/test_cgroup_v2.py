"""The native backend on a kernel that has cgroup v2 and no v1, as root and as an ordinary user."""

from __future__ import annotations

import json
import re

import pytest
from cgroup_witness import MARK
from machine import Account, VmResult, VmUnavailableError, prepare, run_in_vm

import engines

NATIVE_TESTS = ("tests/conformance/test_native.py",)
PYTEST = (
    "env",
    "PARACLE_TEST_LOOP_SECONDS=4",
    "python3",
    "-m",
    "pytest",
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
)
WITNESS = ("python3", "tests/vm/cgroup_witness.py")

BUILD_SECONDS = 600
SUITE_SECONDS = 900

pytestmark = pytest.mark.timeout(BUILD_SECONDS + SUITE_SECONDS)

# Each proves in one boot what the backend builds on. This one also shows that the witness reports
# nothing when nothing is limited, and that a leaked process neither keeps the machine up nor
# changes the exit code.
ROOT_PROBE = """
set -e
python3 tests/vm/cgroup_witness.py sleep 1
truncate -s 512M /var/volume && mkfs.btrfs -q /var/volume && mount -o loop /var/volume /mnt
btrfs quota enable /mnt && btrfs -q subvolume create /mnt/box && btrfs qgroup limit 8M /mnt/box
head -c 32M /dev/zero >/mnt/box/file 2>/dev/null && echo QUOTA-MISSING || echo quota-kept
setsid sleep 1000 &
exit 7
"""
USER_PROBE = """
set -e
python3 -c 'import paracle_sandbox.config, pydantic; print("imports-work")'
unshare --user --map-root-user --mount --pid --fork --mount-proc sh -c 'echo shell-is-$$'
scope=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)
box=${scope%/*}/box
echo +memory +pids >"${scope%/*}/cgroup.subtree_control" && mkdir "$box"
echo 48M >"$box/memory.max"
python3 tests/vm/cgroup_witness.py sh -c \
    'echo $$ >"$0/cgroup.procs"; sleep 1; exec python3 -c "bytearray(200 << 20)"' "$box"
"""


@pytest.fixture(scope="module", autouse=True)
def parts() -> None:
    """Builds the machine once, or says why it cannot be had."""
    try:
        prepare()
    except VmUnavailableError as error:
        engines.missing("vm", f"{error}; scripts/vm_tools.sh (root on Debian) makes it")


def witness_report(result: VmResult) -> dict[str, dict[str, object]]:
    lines = [line for line in result.output.splitlines() if line.startswith(MARK)]
    assert lines, result.output
    report: dict[str, dict[str, object]] = json.loads(lines[-1][len(MARK) :])
    return report


@pytest.mark.parametrize("account", ["root", "tester"])
def test_native_backend_on_cgroup_v2(account: Account) -> None:
    result = run_in_vm([*WITNESS, *PYTEST, *NATIVE_TESTS], SUITE_SECONDS, account)
    assert result.exit_code == 0, result.output
    passed = re.search(r"\b(\d+) passed\b", result.output)
    assert passed is not None and int(passed.group(1)) > 0, result.output
    report = witness_report(result)
    assert report["layout"] == {"cgroup2": ["/sys/fs/cgroup"], "cgroup": []}
    assert report["limited"], "no sandbox was ever held by a cgroup v2 memory limit"
    print(f"{account}: {passed.group(0)} with limited cgroups")


def test_root_has_btrfs_with_quotas() -> None:
    result = run_in_vm(ROOT_PROBE, 120)
    assert result.exit_code == 7, result.output
    assert "quota-kept" in result.output.splitlines()
    assert witness_report(result)["limited"] == {}


def test_user_has_namespaces_and_a_cgroup_of_its_own() -> None:
    result = run_in_vm(USER_PROBE, 120, "tester")
    assert result.exit_code == 128 + 9, result.output  # killed by the kernel at 48 MB
    assert {"imports-work", "shell-is-1"} <= set(result.output.splitlines())
    limited = witness_report(result)["limited"]
    assert [path.rsplit("/", 1)[1] for path in limited] == ["box"]


def test_a_clock_that_jumps_changes_no_deadline() -> None:
    """R20: an hour forward under a running program, two hours back before a deadline, and one
    under an idle sandbox.

    The machine is not suspended and resumed: the kernel stops all processes and CLOCK_MONOTONIC
    meanwhile, and afterwards a process sees its wall clock jump forward, which is the first of
    these. What more there is to it, drivers and firmware, is not ours."""
    environment = "PARACLE_STOCK=0 PARACLE_TEMPLATE_BUILD=0 PYTHONPATH=src"
    result = run_in_vm(f"{environment} python3 tests/vm/clock_jumps.py", 300)
    assert result.exit_code == 0, result.output
    assert [w for w in result.output.split() if w in ("forward", "backward", "idle")] == [
        "forward", "backward", "idle",
    ]  # fmt: skip


def test_a_machine_that_does_not_end_is_killed() -> None:
    with pytest.raises(TimeoutError, match="ran longer than 4 s"):
        run_in_vm("sleep 1000", 4)
