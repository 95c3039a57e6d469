"""Hostile code against gVisor: the rows of ``tests/hostile`` whose oracle is on the host.

With which number a call is refused is not asked here: it is a call to gVisor's own kernel, and
ends there. What the host sees meanwhile is in test_gvisor_rows. Of what uses up all it can, the
host sees cgroup, volume and the end of every process; how many there are inside it asks the kernel
of the sandbox (sentry.py).
"""

from __future__ import annotations

import pytest
import test_gvisor_rows
from hostile_rows import hostile_tests

pytestmark = pytest.mark.usefixtures("scenes")

_DUMPABLE = "gVisor lets programs of one user look into each other, the guest included"
_ROWS = "answered by gVisor's own kernel; what the host sees is in test_gvisor_rows"
_NUMBERS = "refused by gVisor's own kernel, with another number"
_HOST_PROC = "asks the host's /proc, where the processes inside are not; see test_gvisor_rows"
_IMAGE = "the root is the image's, and the engine writes a resolv.conf without the host's"
_NOT_HERE = "a row that is not gVisor's"
DIFFERENT = {
    "test_orders_of_earlier_sandboxes_are_not_in_the_memory_of_later_ones": "no sandbox is a fork"
    " of another's memory: each has a kernel that was started for it",
    # What uses up all it can.
    "test_a_fork_bomb_stays_below_its_limit_and_leaves_no_survivor": "it leaves the kernel inside"
    " no time to tell how many there are; what the host counts is in test_gvisor_rows",
    "test_a_bomb_that_fails_is_told_its_limit": "gVisor refuses by a ulimit, which counts nothing",
    "test_orphans_are_reaped_while_their_ancestor_runs": _NOT_HERE,
    "test_zombies_count_and_go_with_their_parent": _NOT_HERE,
    "test_the_first_process_cannot_be_ended_or_stopped_from_inside": _NOT_HERE,
    "test_a_guest_that_is_stopped_all_the_same_does_not_block_the_manager": _NOT_HERE,
    "test_kernel_objects_are_bounded_or_charged": _NOT_HERE,
    "test_large_pipes_meet_a_limit": _NOT_HERE,
    "test_what_sockets_hold_is_bounded": _NOT_HERE,
    "test_swap_adds_nothing": _NOT_HERE,
    "test_a_parent_that_waits_uninterruptibly_is_killed": _NOT_HERE,
    "test_allocating_punching_and_syncing_stay_within_the_limit": _NOT_HERE,
    "test_locked_directories_and_flags_do_not_outlive_the_sandbox": _NOT_HERE,
    "test_a_tower_of_fifty_thousand_goes_with_its_sandbox": "gVisor holds each directory open, and"
    " can hold no more long before",
    "test_descriptors_are_bounded_also_those_in_flight": "those in flight are memory of gVisor, and"
    " what it opens for them on the host is bounded by the engine's own limit",
    # The channel, and what can be written.
    "test_descriptors_of_the_manager_do_not_leak": _NOT_HERE,
    "test_the_channel_of_the_guest_cannot_be_opened": _DUMPABLE,
    "test_no_program_forges_the_end_of_another": _DUMPABLE,
    "test_guest_and_keepers_are_closed_to_programs": _DUMPABLE,
    "test_the_guest_cannot_be_replaced": _HOST_PROC,
    "test_a_killed_keeper_is_no_success": "gVisor lets a program kill the guest: the sandbox ends",
    "test_storms_of_signals_at_guest_and_keepers": "the same; see test_gvisor_rows",
    "test_everything_that_can_be_written": "/dev and /proc have files that take writes to no end",
    "test_the_network_cannot_be_changed": "it is gVisor's own, inside; the host's is not touched",
    # What there is to learn.
    "test_no_secret_of_the_manager_in_any_memory": _HOST_PROC,
    "test_kernel_internals_are_masked": "/proc/cmdline is gVisor's own, and made up",
    "test_no_devices_but_the_handful": "nodes may be made, and lead nowhere; see test_gvisor_rows",
    "test_names_of_the_machine_are_made_up": _IMAGE,
    "test_no_credentials_or_sockets_to_be_found": _IMAGE,
    "test_settings_and_figures_of_the_kernel_are_documented": "its kernel's are made up",
    "test_the_root_of_the_host_is_not_shown": _IMAGE,
    # Calls.
    "test_calls_are_refused": _ROWS,
    "test_a_program_started_by_a_program_is_refused_too": _ROWS,
    "test_no_key_outlives_its_sandbox": _ROWS,
    "test_only_ordinary_sockets": _ROWS,
    "test_socketpair_has_no_other_family": _NUMBERS,
    "test_no_hidden_memory": _NUMBERS,
    "test_leases_and_notifications_on_shared_files_are_refused": _NUMBERS,
    "test_process_controls_are_refused": _NUMBERS,
    "test_the_32_bit_door_is_shut": _NUMBERS,
    "test_nobody_inside_sees_who_opens_a_shared_file": "a leak of native that is not one here",
    "test_locks_carry_no_message_to_another_sandbox": "a leak of native that is not one here",
    # Privileges.
    "test_posture_of_every_thread": _HOST_PROC,
    "test_the_kernel_takes_programs_first_when_memory_ends": _HOST_PROC,
    "test_uids_are_one_per_sandbox": "all containers are uid 1000, as specified",
    "test_no_new_namespaces": _ROWS,
    "test_no_way_into_another_namespace": _ROWS,
    "test_flags_of_every_mount": _HOST_PROC,
    "test_file_capabilities_cannot_be_set": _NUMBERS,
    "test_nobody_changes_who_they_are": _NUMBERS,
    "test_personality_cannot_be_changed": _NUMBERS,
    "test_a_filter_of_their_own_loosens_nothing": "a new user namespace is gVisor's own as well",
    "test_cgroups_are_out_of_reach": "there are some, of gVisor's own, made up",
    "test_the_root_cannot_be_left": _IMAGE,
    # Terminals and IPC.
    "test_nothing_is_typed_into_a_terminal": "a /dev/tty without a terminal answers EIO there",
    "test_there_is_no_controlling_terminal": "the same",
    "test_a_terminal_of_the_host_is_never_theirs": _HOST_PROC,
    "test_one_sandbox_does_not_use_up_the_terminals_of_all": "terminals are gVisor's own",
    "test_ipc_is_not_shared": "System V IPC is gVisor's own, one per sandbox",
    "test_a_crash_does_not_start_the_hosts_core_handler": _HOST_PROC,
}


@pytest.fixture
def engine() -> str:
    return "gvisor"


globals().update(hostile_tests(DIFFERENT))


# Those of the catalogue that block a release and name gVisor, or all.
BLOCKING = (
    "A01 A02 A06 A07 B01 B02 C01 C02 D01 D02 E01 E02 F01 F05 F06 F07 F11 G01 G02 G05 H01 H02 I01"
    " I02 I03 I04 I05 J01 J02 J03 J04 J05 K03 L01 L02 L03 L04 L06 M01 M03 M04 M05 M06"
)


def test_no_row_that_blocks_a_release_is_left_out() -> None:
    tests = [*globals().values(), *vars(test_gvisor_rows).values()]
    marks = [mark for test in tests if callable(test) for mark in getattr(test, "pytestmark", ())]
    rows = {row for mark in marks if mark.name == "case" for row in mark.args}
    assert set(BLOCKING.split()) - rows == set()
