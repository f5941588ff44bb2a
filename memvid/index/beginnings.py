"""Packs by the first digits of a block's id."""

from __future__ import annotations

import struct
from typing import Final

from .index import Index

_KEY: Final = struct.Struct(">q")


def packs_with_beginning(index: Index, digits: str) -> list[str]:
    """The packs that may have a block whose id begins with these hex digits."""
    ends = (_KEY.unpack(bytes.fromhex(digits[: 2 * _KEY.size].ljust(2 * _KEY.size, fill)))[0] for fill in "0f")
    rows = index.select(
        "SELECT DISTINCT name FROM blocks JOIN packs ON pack = number WHERE block BETWEEN ? AND ?", tuple(ends)
    )
    return [str(name) for (name,) in rows]
