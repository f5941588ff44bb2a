"""Chooses the stored blocks that a sleep reads again before it refers to them.

A block was sound when it was written, woken or scrubbed, and may be damaged on the disk since. While its session is
awake, the state is in memory too; later, a version that refers to a damaged block never wakes. So a sleep spends a
moment on reading those that were not read for long, and writes damaged ones again from memory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ...memvid.format.blocks import BlockEntry
from ...memvid.limits import MIB

REREAD_AFTER_S: Final = 3600.0
"""Seconds for which a read block counts as sound. An hour is a small share of a disk's damage in a year."""

REREAD_BYTES: Final = 64 * MIB
"""Bytes that one sleep reads again: some hundredths of a second from memory, some tenths from a disk. The next sleep
goes on with the blocks unread for longest."""


class LastRead:
    """When each stored block of a session was last found sound, in seconds of the Unix clock."""

    def __init__(self) -> None:
        self._at: dict[bytes, float] = {}

    def note(self, blocks: Iterable[BlockEntry]) -> None:
        """Note blocks that have just been read."""
        now = time.time()
        self._at.update((block.id, now) for block in blocks)

    def keep(self, blocks: Iterable[BlockEntry], reused: Collection[bytes]) -> None:
        """Set the session's blocks; all but the `reused` ones have just been read or written."""
        now = time.time()
        self._at = {block.id: self._at.get(block.id, 0.0) if block.id in reused else now for block in blocks}

    def doubted(self, blocks: Sequence[BlockEntry], scrubbed_s: float) -> tuple[BlockEntry, ...]:
        """The blocks to read again, unread for longest first. scrubbed_s: when the scrub last read all of them."""
        now = time.time()
        read_at = {block.id: max(self._at.get(block.id, 0.0), scrubbed_s) for block in blocks}
        stale = [block for block in blocks if not 0 <= now - read_at[block.id] < REREAD_AFTER_S]
        blocks_to_read, room = [], REREAD_BYTES
        for block in sorted(stale, key=lambda block: read_at[block.id]):
            if block.raw_bytes <= room:
                blocks_to_read.append(block)
                room -= block.raw_bytes
        return tuple(blocks_to_read)
