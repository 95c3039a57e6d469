"""The assertions of checks. They are functions, because ``python -O`` removes ``assert``."""

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
    """The backend does not keep the contract. The message says where."""


def fail(why: str) -> NoReturn:
    """Fail the check."""
    raise CheckFailed(why)


def expect(condition: object, why: str) -> None:
    """Fail unless the condition is true."""
    if not condition:
        fail(why)


def equal(actual: object, expected: object, what: str = "") -> None:
    """Fail unless the two are equal."""
    if actual != expected:
        subject = f"{what}: " if what else ""
        fail(f"{subject}got {_shorten(actual)}, expected {_shorten(expected)}")


def contains(text: str, part: str) -> None:
    """Fail unless ``part`` is in the text."""
    expect(part in text, f"{part!r} is not in {_shorten(text)}")


async def raises(kind: type[Error], work: Awaitable[object]) -> Error:
    """Return the error that ``work`` raises. Fails if there is none; others pass through."""
    try:
        answer = await work
    except kind as error:
        return error
    fail(f"no {kind.__name__} was raised; the answer was {_shorten(answer)}")


async def eventually(look: Callable[[], Awaitable[Value]], why: str, seconds: float = 60) -> Value:
    """Return the first true result of ``look``, for changes that take the kernel some time."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not (answer := await look()):
        expect(clock() < deadline, f"{why} (waited {seconds:g} seconds)")
        await asyncio.sleep(_PAUSE_SECONDS)
    return answer


async def expect_output(
    chunks: AsyncIterator[tuple[str, bytes]], text: bytes, command: Command
) -> None:
    """Read until ``text`` has come, in any number of pieces. Any other output fails."""
    got = b""
    while len(got) < len(text):
        chunk = await anext(chunks, None)
        if chunk is None:
            fail(f"the output ended after {got!r}; the command: {await command.wait()}")
        got += chunk[1]
    equal(got, text, "output")


async def read_first_line(chunks: AsyncIterator[tuple[str, bytes]]) -> str:
    """Read chunks up to the end of a line."""
    got = b""
    while not got.endswith(b"\n"):
        got += (await anext(chunks))[1]
    return got.decode()


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
