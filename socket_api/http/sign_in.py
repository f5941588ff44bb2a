"""The one-time codes by which a page of a browser gets the token of its user, so that no address ever has the token."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Final

CODE_LASTS_S: Final = 120.0
MAX_CODES: Final = 16
"""Given out at a time; the oldest makes room."""


class Codes:
    """Codes that are given for a token once. Only their digests stay in memory."""

    def __init__(self) -> None:
        self._given: dict[bytes, tuple[str, float]] = {}

    def make(self, namespace: str) -> str:
        """A code for the token of a namespace."""
        while len(self._given) >= MAX_CODES:
            del self._given[next(iter(self._given))]
        code = secrets.token_urlsafe(24)
        self._given[_digest(code)] = namespace, time.monotonic() + CODE_LASTS_S
        return code

    def take(self, code: str) -> str | None:
        """The namespace of a code, which is used up; None for one that is unknown, used or too old."""
        namespace, lasts_until = self._given.pop(_digest(code), (None, 0.0))
        return namespace if time.monotonic() < lasts_until else None


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest()
