"""The system call filter: compiled once from the policy table, installed in each sandbox.

The program checks the architecture (another one is killed: its numbers mean other calls),
refuses the x32 half of x86-64, finds the call by binary search over runs of numbers with one
fate, and jumps to a routine where the fate hangs on arguments. Since 5.11 the kernel works out
beforehand which numbers are allowed whatever the arguments, so most calls never run it.

    python3 -m paracle_sandbox.jail.filters.seccomp aarch64     prints the filter for a reader
"""

from __future__ import annotations

import ctypes
import errno
import sys
from typing import TYPE_CHECKING, NamedTuple

from ..kernel import in_memory
from . import bpf, policy, syscalls
from .bpf import Instruction
from .rules import FULL, RULES, Verdict

AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

_RETURNS = {
    Verdict.ALLOW: bpf.RETURN_ALLOW,
    Verdict.DENY: bpf.RETURN_ERRNO | errno.EPERM,
    Verdict.ABSENT: bpf.RETURN_ERRNO | errno.ENOSYS,
    Verdict.INVALID: bpf.RETURN_ERRNO | errno.EINVAL,
    Verdict.IGNORE: bpf.RETURN_ERRNO,
}

_SET_MODE_FILTER = 1
_ALL_THREADS = 1


class _Span(NamedTuple):
    """A run of call numbers with one fate: a verdict, or the name of the rule that decides."""

    first: int
    fate: Verdict | str
    names: tuple[str, ...]


class _ToRoutine(NamedTuple):
    rule: str


if TYPE_CHECKING:  # before Python 3.10 this cannot be evaluated
    from .rules import Tree

    _Item = Instruction | _ToRoutine


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def program(architecture: str | None = None) -> bytes:
    """The filter for an architecture, this machine's by default, ready for `install`."""
    return bpf.encode(instructions(architecture or syscalls.architecture()))


def install(code: bytes) -> None:
    """Put this process under a compiled filter, for good. no_new_privs must have been set."""
    buffer = in_memory(code)
    described = _Filter(len(code) // bpf.INSTRUCTION_BYTES, ctypes.addressof(buffer))
    address = ctypes.addressof(described)
    thread = syscalls.invoke("seccomp", _SET_MODE_FILTER, _ALL_THREADS, address)
    if thread:  # not an error to the kernel: that thread has another filter, and kept it
        raise OSError(errno.EBUSY, f"seccomp: thread {thread} could not be put under the filter")


def instructions(architecture: str) -> list[Instruction]:
    table = policy.table()
    numbers = syscalls.NUMBERS[architecture]
    routines = {name: _routine(tree) for name, tree in RULES.items() if name in numbers}
    items = [*_prologue(architecture), *_search(_spans(numbers, table))]
    result = _link(items, routines)
    if len(result) > bpf.MAX_INSTRUCTIONS:
        raise ValueError(f"{len(result)} instructions are more than the kernel takes")
    return result


def _prologue(architecture: str) -> list[Instruction]:
    code = [
        Instruction(bpf.LOAD, bpf.ARCHITECTURE_OFFSET, note="architecture"),
        Instruction(bpf.JUMP_EQUAL, AUDIT_ARCHITECTURE[architecture], 1, 0, architecture),
        Instruction(bpf.RETURN, bpf.RETURN_KILL_PROCESS),
        Instruction(bpf.LOAD, bpf.NUMBER_OFFSET, note="call number"),
    ]
    if architecture == "x86_64":
        code.append(Instruction(bpf.JUMP_AT_LEAST, X32_BIT, 0, 1, "x32"))
        code.append(_return(Verdict.ABSENT))
    return code


def _spans(numbers: dict[str, int], table: dict[str, Tree]) -> list[_Span]:
    by_number = {number: name for name, number in numbers.items()}
    spans: list[_Span] = []
    for number in range(max(by_number) + 2):
        name = by_number.get(number)
        tree = table[name] if name else Verdict.ABSENT
        fate = tree if isinstance(tree, Verdict) else name or ""
        known = (name,) if name else ()
        if spans and spans[-1].fate == fate:
            spans[-1] = spans[-1]._replace(names=spans[-1].names + known)
        else:
            spans.append(_Span(number, fate, known))
    return spans


def _search(spans: list[_Span]) -> list[_Item]:
    """A balanced tree of comparisons. The last span has no upper end: it is what is unknown."""
    if len(spans) == 1:
        fate = spans[0].fate
        note = " ".join(spans[0].names) or "unknown"
        return [_return(fate, note) if isinstance(fate, Verdict) else _ToRoutine(fate)]
    middle = len(spans) // 2
    below, above = _search(spans[:middle]), _search(spans[middle:])
    first = spans[middle].first
    if len(below) <= bpf.MAX_BRANCH:
        return [Instruction(bpf.JUMP_AT_LEAST, first, len(below), 0), *below, *above]
    far = Instruction(bpf.JUMP, len(below))
    return [Instruction(bpf.JUMP_AT_LEAST, first, 0, 1), far, *below, *above]


def _routine(tree: Tree) -> list[Instruction]:
    """Load, mask, compare with each value; then the code of `otherwise`, then of each case."""
    if isinstance(tree, Verdict):
        return [_return(tree)]
    note = f"argument {tree.argument}{', upper word' if tree.high else ''}"
    offset = bpf.argument_offset(tree.argument, high=tree.high)
    code = [Instruction(bpf.LOAD, offset, note=note)]
    if tree.mask != FULL:
        code.append(Instruction(bpf.AND, tree.mask))
    bodies = [_routine(tree.otherwise)]
    distance = sum(len(case.values) for case in tree.cases) + len(bodies[0]) - 1
    for case in tree.cases:
        for name, value in case.values.items():
            if distance > bpf.MAX_BRANCH:
                raise ValueError(f"the rule for {name} is too long for one jump")
            code.append(Instruction(bpf.JUMP_EQUAL, value, distance, 0, name))
            distance -= 1
        bodies.append(_routine(case.then))
        distance += len(bodies[-1])
    return code + [each for body in bodies for each in body]


def _link(items: list[_Item], routines: dict[str, list[Instruction]]) -> list[Instruction]:
    """Put the routines behind the search and point the jumps at them."""
    starts, end = {}, len(items)
    for name, routine in routines.items():
        starts[name] = end
        end += len(routine)
    linked = [
        Instruction(bpf.JUMP, starts[item.rule] - index - 1, note=item.rule)
        if isinstance(item, _ToRoutine)
        else item
        for index, item in enumerate(items)
    ]
    for name, (head, *rest) in routines.items():
        linked += [head._replace(note=f"{name}: {head.note}"), *rest]
    return linked


def _return(verdict: Verdict, note: str = "") -> Instruction:
    return Instruction(bpf.RETURN, _RETURNS[verdict], note=note)


if __name__ == "__main__":
    print(bpf.listing(instructions((sys.argv[1:] or [syscalls.architecture()])[0])), end="")
