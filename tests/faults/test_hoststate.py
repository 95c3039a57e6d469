"""The witness of all fault tests is shown able to see each kind of thing that it must find."""

from __future__ import annotations

import os
import subprocess

import pytest
from hoststate import HostState, Place, clean_since

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making leftovers needs root: sudo")


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def left(place, before):
    return "\n".join(HostState.take(place).left_since(before))


async def test_nothing_left_is_clean(place):
    before = HostState.take(place)
    await clean_since(before, place, within=0)


def test_a_process_is_seen_by_its_uid_and_by_its_parent(place):
    before = HostState.take(place)
    with subprocess.Popen(["sleep", "60"], user=place.uids[7]) as sleeper:
        try:
            named = left(place, before)
            assert str(sleeper.pid) in named and "sleep" in named
            assert list(place.processes()) == [(sleeper.pid, list(place.processes())[0][1])]
        finally:
            sleeper.kill()
    assert left(place, before) == ""


def test_a_cgroup_a_record_and_descriptors_are_seen(place):
    before = HostState.take(place)
    hierarchy = "pids" if os.path.isdir("/sys/fs/cgroup/pids") else ""
    group = f"/sys/fs/cgroup/{hierarchy}/paracle-sandbox/{place.cgroup_name}99"
    os.makedirs(group)
    (place.state / "some.json").write_text("{}")
    files = [open("/dev/null") for _ in range(5)]
    try:
        named = left(place, before)
        assert f"{place.cgroup_name}99" in named and "some.json" in named and "+5" in named
        assert "/dev/null" in named
    finally:
        os.rmdir(group)
        for file in files:
            file.close()
    (place.state / "some.json").unlink()
    assert left(place, before) == ""


def test_a_mount_and_namespaces_are_seen(place):
    before = HostState.take(place)
    with subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", f"mount -t tmpfs x {place.temp}; exec sleep 60"]
    ) as holder:
        try:
            named = left(place, before)
            while "'sleep 60" not in named:  # the shell has executed the program
                named = left(place, before)
            assert "namespace net:[" in named
            assert "mount " not in named, "a mount in another namespace is not one of ours"
            subprocess.run(["mount", "-t", "tmpfs", "x", place.temp], check=True)
            assert f"{place.temp}" in left(place, before)
        finally:
            holder.kill()
            subprocess.run(["umount", place.temp], check=True)
    assert left(place, before) == ""


async def test_what_stays_is_named_after_the_time_is_up(place):
    before = HostState.take(place)
    (place.state / "stays.json").write_text("{}")
    with pytest.raises(AssertionError, match=r"stays\.json"):
        await clean_since(before, place, within=0.1)
    await clean_since(before, place, within=0.1, but_records=True)
    (place.state / "root-0").mkdir()
    with pytest.raises(AssertionError, match="root-0"):
        await clean_since(before, place, within=0.1, but_records=True)
