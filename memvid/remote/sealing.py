"""A small object of a remote: BLAKE3-256 of the rest, then the rest."""

from __future__ import annotations

from blake3 import blake3

from ..format.sealing import DIGEST_BYTES


def seal(encoded: bytes) -> bytes:
    return blake3(encoded).digest() + encoded


def unseal(data: bytes) -> bytes | None:
    """What was sealed; None: it is damaged."""
    encoded = data[DIGEST_BYTES:]
    return encoded if blake3(encoded).digest() == data[:DIGEST_BYTES] else None
