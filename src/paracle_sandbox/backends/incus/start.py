"""Why a guest did not start, from the last thing that was said in its place."""

from __future__ import annotations

import re

from ...errors import SandboxCreationError

# Of jail/instance/confine_instance.py.
_FAILED = re.compile(r"paracle-step (?P<step>[^:]+): (?P<why>.*)")


def guest_error(last_words: str, image: str) -> SandboxCreationError:
    if match := _FAILED.search(last_words):
        return SandboxCreationError(
            f"The sandbox could not be made: {match['step']}: {match['why']}. Nothing was started.",
            step=match["step"],
        )
    if "python3" in last_words and ("not found" in last_words.lower() or "No such" in last_words):
        return no_python(image)
    return SandboxCreationError(
        f"The instance ended before its guest was there: {last_words or 'it said nothing'}. Does "
        f"the image {image} have python3 (3.10 or newer)?",
        step="guest",
    )


def no_python(image: str) -> SandboxCreationError:
    return SandboxCreationError(
        f"The image {image} has no python3. Choose one that has it, or build ours with: "
        "paracle image build --incus",
        step="image",
    )
