"""The one-time codes by which a page of a browser gets the token of its user, so that no address ever has the token."""

from __future__ import annotations

import secrets
import time
from typing import Final

from ..tokens import digest_of

CODE_LASTS_S: Final = 120.0
MAX_CODES: Final = 4
"""Given out at a time for a token; its oldest makes room."""


class Codes:
    """Codes that are given for a token once. Of both only the digests stay in memory."""

    def __init__(self) -> None:
        self._given: dict[bytes, tuple[bytes, float]] = {}

    def make(self, token: bytes) -> str:
        """A code for a token, by its digest."""
        own = [given for given, (of, _) in self._given.items() if of == token]
        for oldest in own[: max(0, len(own) + 1 - MAX_CODES)]:
            del self._given[oldest]
        code = secrets.token_urlsafe(24)
        self._given[digest_of(code)] = token, time.monotonic() + CODE_LASTS_S
        return code

    def take(self, code: str) -> bytes | None:
        """The digest of the token of a code, which is used up; None for one that is unknown, used or too old."""
        token, lasts_until = self._given.pop(digest_of(code), (None, 0.0))
        return token if time.monotonic() < lasts_until else None
