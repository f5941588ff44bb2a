"""Telling an answer: what the APIs have in common.

Owns the shape of an event, of a call of a tool that takes a string, and of log-probabilities. Told are those of the
tokens that the text is made of: none of thinking, of calls, of a stop string, and of blanks that no client is shown. A
token of which the text has a part is told whole.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...daemon.api.events import ProgressEvent, TokenEvent
from ...daemon.api.logprobs import Likelihood, TokenLogprobs
from ...errors import TorporError
from .requests import CUSTOM
from .turns import Answered, Asking

_LINE_ENDS: Final = {each: f"\\u{each:04x}" for each in (0x85, 0x2028, 0x2029)}
"""Many clients end a line there, too, and an event is a line. JSON has escapes for them."""


class Telling(ABC):
    """How an API tells an answer. `asking` is set before anything is told. reasoning_tokens: those of thinking, so far.
    untold: the log-probabilities of an answer that is no stream; those of a stream are the API's own to note."""

    asking: Asking
    reasoning_tokens = 0

    def __init__(self) -> None:
        self.untold = Untold()

    def note(self, event: TokenEvent) -> None:
        """Note a token of an answer that is no stream."""
        self.untold.add(event)

    @abstractmethod
    def whole(self, answered: Answered) -> Mapping[str, Any]:
        """The body of an answer that is no stream."""

    @abstractmethod
    def opening(self) -> bytes:
        """The first events."""

    @abstractmethod
    def token(self, event: TokenEvent) -> bytes:
        """The events of one token; often none."""

    def progress(self, event: ProgressEvent) -> bytes:
        """The events of how far the reading is; none unless an API has such."""
        return b""

    @abstractmethod
    def silence(self) -> bytes:
        """An event that says nothing."""

    @abstractmethod
    def closing(self, answered: Answered) -> bytes:
        """The last events."""

    @abstractmethod
    def failure(self, error: TorporError) -> bytes:
        """The last events of an answer that failed."""


def event_bytes(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_LINE_ENDS)
    return f"{head}data: {text}\n\n".encode()


# --- tools that take a string


def takes_string(told_as: str) -> bool:
    """Whether it is such a tool whose calls are told as this."""
    return told_as.partition(":")[0] == CUSTOM


def string_of(arguments: Mapping[str, Any]) -> str:
    """The string of a call; all of its arguments as JSON, where a model has given others."""
    text = arguments.get("input")
    is_alone = isinstance(text, str) and len(arguments) == 1
    return str(text) if is_alone else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


# --- log-probabilities


_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Told:
    """A token of the text. offset: the character of the text, from 0, with which or in which it begins."""

    likelihood: TokenLogprobs
    offset: int


class Untold:
    """The log-probabilities that no event has told yet. A text does not come token by token: what may begin a mark, a
    stop string or a character comes later, or never. So a token is told once its bytes are found in the text."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        self._waiting: deque[TokenLogprobs] = deque()
        self._left = b""  # of a token of which the text has a part
        self._chars = 0  # of the text so far

    def add(self, event: TokenEvent) -> None:
        """Note an event of an answer."""
        if event.channel == "reasoning" or event.call is not None:
            self._waiting.clear()  # they were a mark, or the call
            self._left = b""
            return
        if event.logprobs is not None and event.logprobs.text:
            self._waiting.append(event.logprobs)
        if event.text:
            self._find(event.text)

    def take(self) -> list[Told]:
        """All of them; they count as told then."""
        tokens, self._told = self._told, []
        return tokens

    def _find(self, text: str) -> None:
        """Find the tokens of what comes next of the text, in time that its length and theirs bound."""
        whole, done, chars = text.encode(), 0, self._chars
        if not self._goes_on(whole):
            self._drop_hidden(whole)
        while done < len(whole) and (self._left or self._waiting):
            token = None if self._left else self._waiting.popleft()
            own = self._left if token is None else _bytes_of(token)
            shared = _shared(own, whole, done)
            if token is not None and (shared is not None or _is_part(own)):
                self._told.append(Told(token, chars - _is_within(whole, done)))
            own_size, size = shared or (len(own), 0)
            self._left = own[own_size:]
            chars += _count_begun(whole[done : done + size])
            done += size
        self._chars += len(text)

    def _goes_on(self, text: bytes) -> bool:
        """Whether the text goes on where it stopped, or behind blanks. What waits behind it may begin a stop string,
        and have the same words. A text that is no more than the beginning of a hidden mark, as "<", is taken for it: no
        event tells that a mark has passed."""
        waiting = b"".join((self._left, *map(_bytes_of, self._waiting)))
        return waiting.find(text, 0, _count_blanks(waiting) + len(text)) >= 0

    def _drop_hidden(self, text: bytes) -> None:
        """Drop what waits before the text, and within it, and is not shown: a mark may have the words of the text
        behind it. So the text is looked for from its end."""
        rest: deque[TokenLogprobs] = deque()
        end, is_behind = len(text), True
        for token in reversed(self._waiting):
            own = _bytes_of(token)
            size = _shared_ending(own, text, end, is_cut=is_behind)
            end, is_behind = end - size, is_behind and not size
            if size or is_behind or _is_part(own):
                rest.appendleft(token)
            elif not end:
                break
        self._waiting = rest
        if not text.endswith(self._left, 0, end):
            self._left = b""


def each_of(tokens: Sequence[Told]) -> list[dict[str, Any]]:
    """As chats and responses have them: a list of tokens, each with the likeliest in its place."""
    likelihoods = [each.likelihood for each in tokens]
    return [{**_one(each), "top_logprobs": [_one(other) for other in each.top]} for each in likelihoods]


def _one(likelihood: Likelihood) -> dict[str, Any]:
    """bytes: null where nobody knows those of a part of a character."""
    is_known = likelihood.part_bytes is not None or _REPLACEMENT not in likelihood.text
    values = list(_bytes_of(likelihood)) if is_known else None
    return {"token": _name(likelihood), "logprob": likelihood.logprob, "bytes": values}


def columns_of(tokens: Sequence[Told]) -> Mapping[str, Any]:
    """As the older API has them: a list of each fact. The drawn token is always among the likeliest."""
    likelihoods = [each.likelihood for each in tokens]
    return {
        "tokens": [_name(each, "bytes:") for each in likelihoods],
        "token_logprobs": [each.logprob for each in likelihoods],
        # Of tokens with one text the likeliest counts.
        "top_logprobs": [
            {_name(other, "bytes:"): other.logprob for other in (each, *reversed(each.top))} for each in likelihoods
        ],
        "text_offset": [each.offset for each in tokens],
    }


def _name(likelihood: Likelihood, before: str = "") -> str:
    """The text of a token, or, as the APIs tell a part of a character, its bytes as escapes. before: stands before
    those."""
    part = likelihood.part_bytes
    return likelihood.text if part is None else before + "".join(f"\\x{byte:02x}" for byte in part)


def _bytes_of(likelihood: Likelihood) -> bytes:
    return likelihood.text.encode() if likelihood.part_bytes is None else likelihood.part_bytes


def _is_part(own: bytes) -> bool:
    """Whether a token's bytes are no whole characters."""
    return own.decode(errors="ignore").encode() != own


def _count_begun(text: bytes) -> int:
    """How many characters begin in a piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in text)


def _is_within(text: bytes, at: int) -> bool:
    """Whether a place in UTF-8 is within a character."""
    return text[at] & 0xC0 == 0x80


def _shared(own: bytes, text: bytes, at: int) -> tuple[int, int] | None:
    """How many bytes of a token, and of a text from a place on, the two share from their beginnings. None: the text
    goes on without the token. A text may lack blanks before a word, and has replacement characters for broken bytes."""
    rest = text[at : at + len(own)]
    for skipped in range(_count_blanks(own) + 1):
        size = min(len(own) - skipped, len(rest))
        if size and own.startswith(rest[:size], skipped):
            return skipped + size, size
    shown = _as_shown(own)
    return (len(own), len(shown)) if text.startswith(shown, at) else None


def _shared_ending(own: bytes, text: bytes, end: int, *, is_cut: bool) -> int:
    """How many bytes before a place a text has of a token that ends there. 0: it has none. is_cut: whether the text may
    have no more than the token's beginning."""
    forms = [own[skipped:] for skipped in range(_count_blanks(own) + 1)] + [_as_shown(own)]
    if is_cut:
        forms += [begins[:size] for begins in (own, own.lstrip()) for size in range(len(begins) - 1, 0, -1)]
    return next((len(form) for form in forms if form and text.endswith(form, 0, end)), 0)


def _count_blanks(own: bytes) -> int:
    """How many blanks these bytes begin with."""
    return len(own) - len(own.lstrip())


def _as_shown(own: bytes) -> bytes:
    """The bytes of a token as a text has them, with replacement characters for broken ones."""
    return own.decode(errors="replace").encode()
