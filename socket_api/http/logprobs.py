"""The log-probabilities of an answer's text, in the shapes of OpenAI's APIs.

Told are those of the tokens of the text, also of a stop string at its end; none of thinking and of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...daemon.api.events import TokenEvent
from ...daemon.api.logprobs import Likelihood, TokenLogprobs

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Untold:
    """The log-probabilities that no event has told yet: a token whose text is held back comes with the next text, if it
    has not begun a mark."""

    def __init__(self) -> None:
        self._shown: list[TokenLogprobs] = []
        self._held_back: list[TokenLogprobs] = []

    def __bool__(self) -> bool:
        """Whether there are some."""
        return bool(self._shown or self._held_back)

    def add(self, event: TokenEvent) -> None:
        """Note those of a token of the text."""
        if event.channel != "text":
            self._held_back.clear()  # they were the beginning of the mark
            return
        if event.logprobs is not None and event.logprobs.text:
            self._held_back.append(event.logprobs)
        if event.text:
            self._shown += self._held_back
            self._held_back.clear()

    def take(self) -> list[TokenLogprobs]:
        """All of them; they count as told then."""
        told = self._shown + self._held_back
        self._shown, self._held_back = [], []
        return told


def each_of(told: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """As chats and responses have them: a list of tokens, each with the likeliest in its place."""
    return [{**_one(each), "top_logprobs": [_one(other) for other in each.top]} for each in told]


def _one(likelihood: Likelihood) -> dict[str, Any]:
    """bytes: null for a part of a character, whose bytes are not known."""
    text = likelihood.text
    known = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": likelihood.logprob, "bytes": known}


def columns_of(told: Sequence[TokenLogprobs], begins_at: int) -> Mapping[str, Any]:
    """As the older API has them: a list of each fact. The drawn token is always among the likeliest. begins_at: the
    characters of the text before them."""
    offsets = []
    for each in told:
        offsets.append(begins_at)
        begins_at += len(each.text)
    return {
        "tokens": [each.text for each in told],
        "token_logprobs": [each.logprob for each in told],
        # Of tokens with one text the likeliest counts.
        "top_logprobs": [{other.text: other.logprob for other in (each, *reversed(each.top))} for each in told],
        "text_offset": offsets,
    }
