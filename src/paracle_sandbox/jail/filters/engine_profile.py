"""The same policy as a seccomp profile for Docker, Podman and other OCI engines.

The engines' library (libseccomp) compares an argument under a mask with one value, and takes no
rule that names an argument twice. So every set of values is cut into blocks, a block being all
words that agree on the bits of a mask, and each path through a rule's tree that ends in ALLOW
becomes one entry per block. The other paths are left to the default: arguments that our own
filter answers with EPERM or EINVAL get ENOSYS from these engines. Spelling them out would be five
times as long and slow the start of each container.

    python3 -m paracle_sandbox.jail.filters.engine_profile     prints the profile
"""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from . import policy
from .rules import RULES, Check, Verdict

if TYPE_CHECKING:
    from .rules import Tree

_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")


class Block(NamedTuple):
    """The words w for which w & mask == value."""

    mask: int
    value: int


def profile() -> dict[str, Any]:
    """Unknown calls get the default, ENOSYS. No sub-architectures: x32 and i386 are killed."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [{"architecture": name, "subArchitectures": []} for name in _ARCHITECTURES],
        "syscalls": [
            {"names": policy.names(policy.ALLOWED), "action": "SCMP_ACT_ALLOW"},
            {
                "names": policy.names(policy.DENIED),
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": errno.EPERM,
            },
            # By name, though it is the default: Docker 20.10 does not read defaultErrnoRet.
            {
                "names": policy.names(policy.ABSENT),
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": errno.ENOSYS,
            },
            {"names": policy.names(policy.IGNORED), "action": "SCMP_ACT_ERRNO", "errnoRet": 0},
            *(entry for name, tree in RULES.items() for entry in _conditional(name, tree)),
        ],
    }


def text() -> str:
    """The profile as JSON, one entry a line."""
    form = profile()
    entries = ",\n".join("  " + json.dumps(entry) for entry in form.pop("syscalls"))
    head = json.dumps(form)
    return f'{head[:-1]}, "syscalls": [\n{entries}\n]}}\n'


def _conditional(name: str, tree: Tree) -> Iterator[dict[str, Any]]:
    for conditions in _allowing(tree, {}):
        for blocks in itertools.product(*conditions.values()):
            arguments = [
                {"index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value}
                for index, (mask, value) in zip(conditions, blocks, strict=True)
            ]
            yield {"names": [name], "action": "SCMP_ACT_ALLOW", "args": arguments}


_Conditions = dict[int, list[Block]]


def _allowing(tree: Tree, conditions: _Conditions) -> Iterator[_Conditions]:
    """The conditions of each path through the tree that ends in ALLOW."""
    if isinstance(tree, Verdict):
        if tree is Verdict.ALLOW:
            yield conditions
        return
    tested: set[int] = set()
    for case in tree.cases:
        values = set(case.values.values())
        tested |= values
        yield from _allowing(case.then, _narrow(conditions, tree, inside(tree.mask, values)))
    if any(case.then is not Verdict.ALLOW for case in tree.cases):
        rest = inside(tree.mask, tested, invert=True)
        conditions = _narrow(conditions, tree, rest)
    # Else what is not asked here is only whether the call is allowed for another reason as well.
    yield from _allowing(tree.otherwise, conditions)


def _narrow(conditions: _Conditions, check: Check, blocks: list[Block]) -> _Conditions:
    if check.high:
        blocks = [Block(block.mask << 32, block.value << 32) for block in blocks]
    known = conditions.get(check.argument, [Block(0, 0)])
    common = [
        Block(one.mask | two.mask, one.value | two.value)
        for one in known
        for two in blocks
        if not (one.value ^ two.value) & one.mask & two.mask
    ]
    return {**conditions, check.argument: common}


def inside(mask: int, values: Collection[int], invert: bool = False) -> list[Block]:
    """Blocks that cover the words whose bits under the mask are, or are not, a given value."""
    bits = [1 << position for position in reversed(range(32)) if mask >> position & 1]
    return list(_split(Block(0, 0), bits, set(values), invert))


def _split(block: Block, bits: list[int], values: set[int], invert: bool) -> Iterator[Block]:
    """Halve on the highest bit until a half has all of its values in the set, or none."""
    if len(values) in (0, 1 << len(bits)):
        if bool(values) != invert:
            yield block
        return
    bit, *rest = bits
    for side in (0, bit):
        half = Block(block.mask | bit, block.value | side)
        yield from _split(half, rest, {value for value in values if value & bit == side}, invert)


if __name__ == "__main__":
    print(text(), end="")
