"""Work on the event loop that grows with the number of sessions is done in pieces, so that no stream waits for it.

Not on another thread: Python runs one thread at a time, and one that computes for long keeps the engine and the loop
waiting at each turn. A piece takes a millisecond or two; behind each the others have their time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import closing
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]

SESSIONS_AT_ONCE: Final = 32
"""How many sessions are looked at in one piece."""

NAMES_AT_ONCE: Final = 256
"""How many there are in a piece that looks at names alone."""

_PAUSE_S: Final = 0.001
"""Behind a piece; the engine gets the interpreter within it."""

_UNDER_WAY: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def in_pieces(pieces: Pieces[Result]) -> Result:
    """The result of a generator that yields behind each piece. Of all such work on a loop one piece is done at a time,
    but for the first of each: most of it has no other."""
    loop = asyncio.get_running_loop()
    under_way = _UNDER_WAY.setdefault(loop, asyncio.Lock())
    with closing(pieces):
        try:
            next(pieces)
            while True:
                async with under_way:
                    await asyncio.sleep(_PAUSE_S)
                    next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result
