"""Pages of a long listing: in order, and without keeping the event loop."""

from __future__ import annotations

import asyncio
import random

from paracle_sandbox.results import FileInfo
from paracle_sandbox.service.routes.files import _SORTED_AT_ONCE, _page


def listing(size: int) -> list[FileInfo]:
    numbers = list(range(size))
    random.Random(7).shuffle(numbers)
    return [
        {"name": "", "path": f"{n:08}", "kind": "file", "size": 0, "mode": 0, "modified": 0.0}
        for n in numbers
    ]


async def test_a_page_is_what_sorting_all_would_give() -> None:
    size = 2 * _SORTED_AT_ONCE + 7
    for entries in (listing(0), listing(3), listing(size)):
        whole = sorted(entry["path"] for entry in entries)
        for offset, limit in ((0, 10), (1, 1), (_SORTED_AT_ONCE - 1, 5), (size - 3, 10), (size, 5)):
            page = await _page(entries, offset, limit)
            assert [entry["path"] for entry in page] == whole[offset : offset + limit]


async def test_others_have_their_turn_while_a_long_listing_is_sorted() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(others())
    size = 10 * _SORTED_AT_ONCE
    await _page(listing(size), size - 10, 10)
    other.cancel()
    assert turns >= 18, "one for each part that is sorted, and for each as many that are merged"
