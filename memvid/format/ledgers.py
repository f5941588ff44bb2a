"""The common prefix of two versions' ledgers: block by block, and token by token where the blocks differ.

Two versions may hold the same tokens in different blocks: a partial block changes its id when a token is added. Heads
are read only from the first differing block to the first differing token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .blocks import TOKEN_BYTES, BlockEntry
from .manifest import Manifest

ReadTokens = Callable[[BlockEntry], bytes | None]
"""The tokens of a span; None if they cannot be read."""


@dataclass(frozen=True, slots=True)
class Common:
    """The length of a common prefix in tokens: `least` to `most`, which differ if blocks cannot be read."""

    least: int
    most: int


def ledger_tokens(manifest: Manifest) -> int:
    """All tokens of a version, those without blocks too."""
    return manifest.ledger_tokens


def in_common(one: Manifest, read_one: ReadTokens, other: Manifest, read_other: ReadTokens) -> Common:
    """The common prefix of two ledgers. Raises the errors of reading."""
    same = _in_same_blocks(one, other)
    mine, theirs = _pieces(one, same, read_one), _pieces(other, same, read_other)
    left, right = b"", b""
    while True:
        found = left or next(mine, b""), right or next(theirs, b"")
        if b"" in found:
            return Common(same, same)
        if found[0] is None or found[1] is None:
            return Common(same, min(ledger_tokens(one), ledger_tokens(other)))
        count = _same_tokens(found[0], found[1])
        same += count
        left, right = found[0][count * TOKEN_BYTES :], found[1][count * TOKEN_BYTES :]
        if left and right:
            return Common(same, same)


def _in_same_blocks(one: Manifest, other: Manifest) -> int:
    same = 0
    for mine, theirs in zip(_spans(one), _spans(other), strict=False):
        if mine.id != theirs.id:
            break
        same = mine.end
    return same


def _spans(manifest: Manifest) -> Iterator[BlockEntry]:
    return (entry for entry in manifest.blocks if entry.kind == "span")


def _pieces(manifest: Manifest, start: int, read: ReadTokens) -> Iterator[bytes | None]:
    yield from (read(entry) for entry in _spans(manifest) if entry.end > start)
    yield manifest.tail


def _same_tokens(one: bytes, other: bytes) -> int:
    pairs = zip(memoryview(one).cast("I"), memoryview(other).cast("I"), strict=False)
    shorter = min(len(one), len(other)) // TOKEN_BYTES
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)
