"""Hostile code against gVisor: the rows of ``tests/hostile`` whose oracle is on the host.

Which calls are refused, and with which number, is not asked here: they are calls to gVisor's own
kernel, and end there.
"""

from __future__ import annotations

import pytest
from hostile_rows import hostile_tests

MODULES = (
    "control_channel", "disk", "filesystem", "memory", "network_none", "output", "processes",
    "time",
)  # fmt: skip
_DUMPABLE = "gVisor lets programs of one user look into each other, the guest included"
DIFFERENT = {
    "test_the_channel_of_the_guest_cannot_be_opened": _DUMPABLE,
    "test_no_program_forges_the_end_of_another": _DUMPABLE,
    "test_the_guest_cannot_be_replaced": "asks the host's /proc, where gVisor's processes are not",
    "test_a_killed_keeper_is_no_success": "gVisor lets a program kill the guest: the sandbox ends",
    "test_everything_that_can_be_written": "/dev and /proc have files that take writes to no end",
    "test_the_network_cannot_be_changed": "it is gVisor's own, inside; the host's is not touched",
    "test_the_heartbeat_of_a_neighbour_does_notice": "a control of the measurement on native",
    "test_a_fork_bomb_stays_below_its_limit_and_leaves_no_survivor": "the limit is a ulimit, which"
    " the host does not see; conformance shows that it holds",
}


@pytest.fixture
def engine() -> str:
    return "gvisor"


globals().update(hostile_tests(DIFFERENT, MODULES))
