"""The bytes of tokens that are no whole characters, by their names in the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = tuple(sorted(set(range(0x100)) - set(_PRINTABLE)))

BYTE_SYMBOLS: Final[Mapping[str, int]] = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)},
}
"""The bytes by their characters in byte-level vocabularies: printable ones as they are, others from U+0100."""

_FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")


def part_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token that decoding alone shows as no whole characters. None: its name does not tell them."""
    name = tokenizer.convert_ids_to_tokens(token) or ""
    if (fallback := _FALLBACK.fullmatch(name)) is not None:
        return bytes.fromhex(fallback[1])
    symbols = [BYTE_SYMBOLS[each] for each in name if each in BYTE_SYMBOLS]
    return bytes(symbols) if symbols and len(symbols) == len(name) else None
