"""Versions whose ledger goes on behind their blocks: how many tokens are there without any state.

The layers above write them, and read them again; the store counts them, so that no reader takes the ledger for a
shorter one.
"""

from __future__ import annotations

from typing import Final

from .blocks import TOKEN_BYTES
from .manifest import Manifest

UNREAD: Final = "unread"
"""The entry of the session map that has them, in that version alone: a map in which `tokens` are uint32, as bytes."""


def unread_of(manifest: Manifest) -> int:
    """How many tokens follow those that a version has blocks of; whatever else stands there, others wrote."""
    return len(tail_of(manifest)) // TOKEN_BYTES


def tail_of(manifest: Manifest) -> bytes:
    """The tokens behind a version's blocks: whole uint32, as bytes."""
    told = manifest.session.get(UNREAD)
    tokens = told.get("tokens") if isinstance(told, dict) else None
    return tokens[: len(tokens) // TOKEN_BYTES * TOKEN_BYTES] if isinstance(tokens, bytes) else b""
