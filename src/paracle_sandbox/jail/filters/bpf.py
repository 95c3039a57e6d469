"""Classic BPF as seccomp takes it: the few instructions that a filter needs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LOAD = 0x20  # 32-bit word at an absolute offset of struct seccomp_data
AND = 0x54
JUMP = 0x05
JUMP_EQUAL = 0x15
JUMP_AT_LEAST = 0x35
RETURN = 0x06

NUMBER_OFFSET = 0
ARCHITECTURE_OFFSET = 4
MAX_BRANCH = 255
MAX_INSTRUCTIONS = 4096

RETURN_ALLOW = 0x7FFF0000
RETURN_ERRNO = 0x00050000
RETURN_KILL_PROCESS = 0x80000000

_ENCODING = struct.Struct("=HBBI")  # struct sock_filter
INSTRUCTION_BYTES = _ENCODING.size


class Instruction(NamedTuple):
    code: int
    k: int
    jump_true: int = 0
    jump_false: int = 0
    note: str = ""


def argument_offset(index: int, *, high: bool = False) -> int:
    """The offset of a word of an argument. Both architectures are little-endian."""
    return 16 + 8 * index + (4 if high else 0)


def encode(program: Iterable[Instruction]) -> bytes:
    return b"".join(
        _ENCODING.pack(each.code, each.jump_true, each.jump_false, each.k) for each in program
    )


def decode(program: bytes) -> list[Instruction]:
    return [
        Instruction(code, k, jump_true, jump_false)
        for code, jump_true, jump_false, k in _ENCODING.iter_unpack(program)
    ]


def listing(program: Sequence[Instruction]) -> str:
    """The program for a reader, with jump targets as line numbers."""
    lines = []
    for index, each in enumerate(program):
        note = f"; {each.note}" if each.note else ""
        lines.append(f"{index:4} {_spell(index, each):<32}{note}".rstrip())
    return "\n".join(lines) + "\n"


def _spell(index: int, each: Instruction) -> str:
    following = index + 1
    if each.code == LOAD:
        return f"load  [{each.k}]"
    if each.code == AND:
        return f"and   {each.k:#x}"
    if each.code == JUMP:
        return f"jump  {following + each.k}"
    if each.code == RETURN:
        return f"ret   {_spell_return(each.k)}"
    test = {JUMP_EQUAL: "==", JUMP_AT_LEAST: ">="}[each.code]
    value = f"{each.k}" if each.k < 1024 else f"{each.k:#x}"
    return f"if {test} {value} {following + each.jump_true} else {following + each.jump_false}"


def _spell_return(k: int) -> str:
    known = {RETURN_ALLOW: "ALLOW", RETURN_KILL_PROCESS: "KILL_PROCESS"}
    return known.get(k) or f"ERRNO {k & 0xFFFF}"
