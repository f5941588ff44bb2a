"""Proves by the digest of a message that a text is its words."""

from __future__ import annotations

from blake3 import blake3

from .results import DIGEST_BYTES
from .transcripts import Turn


class WordsProof:
    """Tells whether text that comes in pieces is the words of a message, in time that grows as the text does."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._blanks = turn, ""
        self._strips = turn.role == "assistant"
        self._begun = False
        self._hashed = blake3(f"{turn.role}\0".encode())

    def push(self, text: str) -> None:
        if self._strips:
            text = self._blanks + text if self._begun else text.lstrip()
            core = text.rstrip()
            self._blanks, text, self._begun = text[len(core) :], core, self._begun or bool(core)
        self._hashed.update(text.encode("utf-8", "surrogatepass"))

    def proven_with(self) -> str | None:
        """The blanks with which it is the words, as templates strip those: mostly none. None: it is not."""
        for blanks in ("",) if self._strips else ("", "\n", " ", "\n\n"):
            hashed = self._hashed.copy()
            hashed.update(blanks.encode())
            if hashed.digest(DIGEST_BYTES) == self._turn.digest:
                return blanks
        return None
