"""Versions whose ledger goes on behind their blocks: the number of tokens without any state.

The layers above write and read them; the store counts them, so that no reader takes the ledger to be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .blocks import TOKEN_BYTES
from .manifest import Manifest

UNREAD: Final = "unread"
"""The entry of the session map that holds them, in that version alone: a map; its `tokens` are uint32, as bytes."""


def unread_of(manifest: Manifest) -> int:
    """How many tokens follow the tokens in blocks; 0 if another program wrote something else there."""
    return len(tail_of(manifest)) // TOKEN_BYTES


def tail_of(manifest: Manifest) -> bytes:
    """The tokens behind a version's blocks: whole uint32, as bytes."""
    return tail_in(manifest.session)


def tail_in(session: Mapping[str, Any]) -> bytes:
    """As `tail_of`, of a session map."""
    told = session.get(UNREAD)
    tokens = told.get("tokens") if isinstance(told, dict) else None
    return tokens[: len(tokens) // TOKEN_BYTES * TOKEN_BYTES] if isinstance(tokens, bytes) else b""
