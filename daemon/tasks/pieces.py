"""Work on the event loop that grows with the number of sessions is done in pieces, so that no stream waits. Not on
another thread: Python runs one thread at a time, and a long one keeps the engine and the loop waiting. A piece takes a
millisecond or two; other work runs between pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import closing
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]

SESSIONS_AT_ONCE: Final = 64
"""Sessions in one piece."""

NAMES_AT_ONCE: Final = 256
"""Sessions in a piece that needs only their names."""

_PAUSE_S: Final = 0.001
"""The pause behind a piece, in which the engine gets the interpreter."""

_UNDER_WAY: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def in_pieces(pieces: Pieces[Result]) -> Result:
    """The result of a generator that yields behind each piece. A loop does one piece of all such work at a time, except
    first pieces: most work has only one."""
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
