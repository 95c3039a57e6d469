"""What checks say: plain functions rather than ``assert``, which ``python -O`` would remove."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NoReturn, TypeVar

from ...sandbox.command import Command

Error = TypeVar("Error", bound=BaseException)
Value = TypeVar("Value")

_SHOWN = 400
_PAUSE_SECONDS = 0.02


class CheckFailed(AssertionError):
    """The backend does not keep the contract; the message says where."""


def fail(why: str) -> NoReturn:
    raise CheckFailed(why)


def expect(condition: object, why: str) -> None:
    if not condition:
        fail(why)


def equal(actual: object, expected: object, what: str = "") -> None:
    if actual != expected:
        subject = f"{what}: " if what else ""
        fail(f"{subject}got {_short(actual)}, expected {_short(expected)}")


def contains(text: str, part: str) -> None:
    expect(part in text, f"{part!r} is not in {_short(text)}")


async def raises(kind: type[Error], work: Awaitable[object]) -> Error:
    """The error, which must be of that kind; another one passes through."""
    try:
        answer = await work
    except kind as error:
        return error
    fail(f"no {kind.__name__} was raised; the answer was {_short(answer)}")


async def eventually(look: Callable[[], Awaitable[Value]], why: str, seconds: float = 60) -> Value:
    """What ``look`` answers as soon as that is true; for what the kernel does in its own time."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not (answer := await look()):
        expect(clock() < deadline, f"{why} (waited {seconds:g} seconds)")
        await asyncio.sleep(_PAUSE_SECONDS)
    return answer


async def heard(chunks: AsyncIterator[tuple[str, bytes]], text: bytes, command: Command) -> None:
    """Read until ``text`` has come, in however many pieces; anything else fails."""
    got = b""
    while len(got) < len(text):
        chunk = await anext(chunks, None)
        if chunk is None:
            fail(f"the output ended after {got!r}; the command: {await command.wait()}")
        got += chunk[1]
    equal(got, text, "output")


async def first_line(chunks: AsyncIterator[tuple[str, bytes]]) -> str:
    got = b""
    while not got.endswith(b"\n"):
        got += (await anext(chunks))[1]
    return got.decode()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
