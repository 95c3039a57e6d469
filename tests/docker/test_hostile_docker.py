"""Hostile code against containers: every row of ``tests/hostile`` that can be had here."""

from __future__ import annotations

import pytest
from hostile_rows import hostile_tests

pytestmark = pytest.mark.usefixtures("scenes")

# Tests that say what only native does, and why it is otherwise here.
DIFFERENT = {
    "test_no_credentials_or_sockets_to_be_found": "an image has a /etc/shadow, of its own",
    "test_no_devices_but_the_handful": "there is a /dev/mqueue, hidden; see test_posture",
    "test_names_of_the_machine_are_made_up": "the engine writes a resolv.conf, without the host's",
    "test_cgroups_are_out_of_reach": "its own cgroup can be seen, read-only; see test_posture",
    "test_the_root_of_the_host_is_not_shown": "the root is the image's",
    "test_the_root_cannot_be_left": "the same; what it tries is refused in test_no_mounts",
    "test_nobody_inside_sees_who_opens_a_shared_file": "a leak of native that is not one here",
    "test_locks_carry_no_message_to_another_sandbox": "a leak of native that is not one here",
    "test_descriptors_of_the_manager_do_not_leak": "starts spawners, of which there is none here",
    "test_settings_and_figures_of_the_kernel_are_documented": "the engine shows more of /sys",
    "test_x32_numbers_are_unknown": "the engines' library kills for them",
    "test_the_kernel_takes_programs_first_when_memory_ends": "the guest's score is 500, not 0",
    "test_uids_are_one_per_sandbox": "all containers are uid 1000, as specified",
    "test_flags_of_every_mount": "the engine mounts the image without nosuid; see no_new_privs",
    "test_nobody_changes_who_they_are": "there is no user namespace whose maps it looks at",
    "test_the_heartbeat_of_a_neighbour_does_notice": "a control of the measurement on native",
    "test_a_crash_does_not_start_the_hosts_core_handler": "counts the processes of a native stock",
    "test_one_sandbox_does_not_use_up_the_terminals_of_all": "the engine mounts /dev/pts",
    "test_what_sockets_hold_is_bounded": "the engine sets no such limit on cgroup v1",
}

globals().update(hostile_tests(DIFFERENT))
