"""Proves by the digest of a message that a text is its words."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from .results import DIGEST_BYTES
from .transcripts import Turn

_STRIPPED: Final = ("", "\n", " ", "\n\n")
"""What templates mostly strip from the end of words, for older text maps, which have no blanks."""


class WordsProof:
    """Tells whether a text that comes in pieces is the words of a message. A template may have stripped blanks around
    them. It takes time in proportion to the text."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._begun = False
        self._before, self._behind = "", ""  # blanks of the text
        self._core = blake3(f"{turn.role}\0".encode())
        self._knows = turn.role == "assistant" or any(turn.blanks)
        if self._knows and turn.role != "assistant":  # the digest of an answer is of its words alone
            self._core.update(turn.blanks[0].encode())

    def push(self, text: str) -> None:
        """More of the text."""
        if not self._begun:
            core = text.lstrip()
            self._before += text[: len(text) - len(core)]
            if not core:
                return
            self._begun, text = True, core
            if not self._knows:
                self._core.update(self._before.encode())
        text = self._behind + text
        core = text.rstrip()
        self._behind = text[len(core) :]
        self._core.update(core.encode("utf-8", "surrogatepass"))

    def proven_with(self) -> tuple[str, str] | None:
        """The blanks that, around the text, make it the words of the message; None if none do."""
        before, behind = self._turn.blanks
        if self._turn.role == "assistant":
            return (before, behind) if self._is_with("") else None
        if self._knows:
            return (before, behind) if self._is_with(behind) else None
        own = self._behind if self._begun else self._before
        stripped = next((each for each in _STRIPPED if self._is_with(own + each)), None)
        return None if stripped is None else (self._before, self._behind + stripped)

    def _is_with(self, blanks: str) -> bool:
        hashed = self._core.copy()
        hashed.update(blanks.encode())
        return hashed.digest(DIGEST_BYTES) == self._turn.digest
