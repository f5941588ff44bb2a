"""Texts and turns of a chat to tokens, on a thread of their own: neither the event loop nor the engine waits for a
tokenizer or a template.

Owns what is turned into text and when; `chat_template.py` has the words of a turn. A text that cannot fit, however well
it is tokenised, is refused before that work is done.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from ...memvid.units import format_plural
from ..errors import ContextOverflow, TemplateUnusable
from ..models import chat_template
from ..models.chat_template import Message
from ..models.models import LoadedModel
from .sessions import Session
from .why import Words

# NFC makes a text at most 3.5 times shorter in UTF-8 (iota with dialytika and tonos; Hangul: 3 times).
_NFC_SHRINKS_AT_MOST = 4

# Stands for somebody's words while a template is rendered, with a number of fixed width: nothing that one strips or
# moves.
_MARK = "torporwordsplaceholder2b6e"
_MARKS = re.compile(f"({_MARK}[0-9]{{8}})")
# What sets an assistant's thinking apart. Templates look for it, and it ends no turn, so it is left where it stands.
_THINKING = re.compile("(</?think>)")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a ledger messages are to be read. held: tokens before them; last: the one just before, None where a
    conversation begins with them; turn_open: whether they are inside an assistant's turn, which has to be closed."""

    held: int
    last: int | None
    turn_open: bool


class Encoder:
    """Turns text into the tokens of a session's model. Its callers hold the session alone (`sessions.Turns`).

    The event loop's, but for `close`.
    """

    def __init__(self) -> None:
        self._thread = _new_thread()
        self._most_bytes: dict[bytes, int | None] = {}  # by identity: a name may get another model

    async def text(self, live: Session, text: str) -> list[int]:
        """The tokens of a text that continues the ledger. Raises ContextOverflow: the text is too long to fit, however
        it is tokenised."""
        model, held = live.model, len(live.state.tokens)

        def encode() -> list[int]:
            self._require_could_fit(model, text, held=held)
            return model.encode_plain(text, opening=not held)

        return await self._aside(encode)

    async def plain(self, model: LoadedModel, text: str, *, opening: bool) -> list[int]:
        """The tokens of somebody's words. Raises ContextOverflow: as of `text`."""

        def encode() -> list[int]:
            self._require_could_fit(model, text, held=0)
            return model.encode_plain(text, opening=opening)

        return await self._aside(encode)

    async def messages(self, model: LoadedModel, messages: Sequence[Message], place: Place) -> list[int]:
        """The tokens of messages alone, up to where the assistant is to speak; those of earlier turns are in the ledger
        as they were read and sampled.

        Raises:
            TemplateUnusable: the model has no template, or one that refuses the messages.
            ContextOverflow: they are too long to fit, however they are tokenised.
        """

        def render_and_encode() -> list[int]:
            self._require_could_fit(model, _rendered(model, messages, place), held=place.held)
            return _encoded(model, messages, place)

        return await self._aside(render_and_encode)

    async def lengths(
        self, model: LoadedModel, messages: Sequence[Message], place: Place, ids: Sequence[int]
    ) -> Sequence[int]:
        """How many of the tokens of messages, `ids`, there are at the end of each: of an assistant's words up to their
        end token, of another message up to the end of the next such words, or all. Nothing, where that cannot be told,
        or the conversation could not be continued there token by token."""
        if not any(message["role"] == "assistant" for message in messages[:-1]):
            return ()
        return await self._aside(lambda: _lengths(model, messages, place, ids))

    async def with_words(self, model: LoadedModel, work: Callable[[Words], Result]) -> Result:
        """What some work makes of a model's words; no other work is at its tokenizer meanwhile."""

        def with_tokenizer() -> Result:
            vocabulary = model.tokenizer.get_vocab()
            controls = frozenset(vocabulary[text] for text in model.control_texts if text in vocabulary)
            return work(Words(lambda tokens: str(model.tokenizer.decode(list(tokens))), controls))

        return await self._aside(with_tokenizer)

    def let_go(self) -> None:
        """A model has left memory: end the thread, when what it has to do is done, and begin another.

        A tokenizer keeps the words that it has met, for each thread that asked, half a megabyte and more. The library
        frees that when the thread ends, and not with the tokenizer.
        """
        before, self._thread = self._thread, _new_thread()
        before.shutdown(wait=False)
        self._thread.submit(before.shutdown)  # first of all, so that still no two calls are at one tokenizer

    def close(self) -> None:
        """End the thread, when what it is at is done."""
        self._thread.shutdown(cancel_futures=True)

    async def _aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _require_could_fit(self, model: LoadedModel, text: str, *, held: int) -> None:
        most = self._most_bytes_of(model)
        size_bytes = len(text.encode("utf-8", "surrogatepass"))
        if most is not None and held + -(-size_bytes // most) > model.context_tokens:
            least = -(-size_bytes // most)
            fold = ", or fold the session into a smaller one (torpor fold)" if held else ""
            raise ContextOverflow(
                f"The text has {format_plural(size_bytes, 'byte')}, which are {format_plural(least, 'token')} or more, "
                f"and the session holds {held}, but the context of model {model.name!r} ends at "
                f"{model.context_tokens}. Give a shorter text{fold}.",
                token_count=held,
                wanted_tokens=least,
                at_least=True,  # of the text alone; how many were to be written behind it does not matter any more
                context_tokens=model.context_tokens,
            )

    def _most_bytes_of(self, model: LoadedModel) -> int | None:
        identity = model.identity.digest
        if identity not in self._most_bytes:
            backend = getattr(model.tokenizer, "backend_tokenizer", None)
            described = json.loads(backend.to_str()) if backend is not None else {}
            self._most_bytes[identity] = most_bytes_per_token(described)
        return self._most_bytes[identity]


def _new_thread() -> ThreadPoolExecutor:
    # One: a tokenizer has settings that a call may change, so no two calls may be at one tokenizer.
    return ThreadPoolExecutor(1, thread_name_prefix="torpor-text")


def _rendered(model: LoadedModel, messages: Sequence[Message], place: Place) -> str:
    if place.last is None:
        return chat_template.opening(model.render, messages)
    end_text = str(model.tokenizer.decode([place.last])) if place.last in model.end_tokens else ""
    return chat_template.continuation(model.render, messages, turn_open=place.turn_open, end_text=end_text)


def _encoded(model: LoadedModel, messages: Sequence[Message], place: Place) -> list[int]:
    # Where somebody's words spell a control token, only the template's own are obeyed.
    marked, words = _marked(messages, model.holds_control)
    # A template writes the first token itself, so none is added.
    text = _rendered(model, marked, place)
    return _encode_around(model, text, words) if words else model.encode(text, opening=False)


def _lengths(model: LoadedModel, messages: Sequence[Message], place: Place, ids: Sequence[int]) -> Sequence[int]:
    """`Encoder.lengths`: the end tokens that a template sets behind each message are counted, and found in `ids`."""
    names = [f"{_MARK}{at:08}" for at in range(len(messages))]
    named: list[Message] = [{**message, "content": name} for message, name in zip(messages, names, strict=True)]
    pieces = _MARKS.split(_rendered(model, named, place))
    if pieces[1::2] != names:
        return ()
    behind = [_end_tokens_in(model, piece) for piece in pieces[::2]]
    ends = [at + 1 for at, token in enumerate(ids) if token in model.end_tokens]
    if sum(behind) != len(ends):
        return ()
    before = list(accumulate(behind))
    own = [
        ends[before[at]] if message["role"] == "assistant" and behind[at + 1] else None
        for at, message in enumerate(messages)
    ]
    last = max((at for at, end in enumerate(own[:-1]) if end is not None), default=None)
    if last is None or not _goes_on_at(model, messages[last + 1 :], place, ids, own[last] or 0):
        return ()
    lengths = [len(ids)]
    for end in reversed(own[:-1]):
        lengths.append(lengths[-1] if end is None else end)
    return lengths[::-1]


def _end_tokens_in(model: LoadedModel, text: str) -> int:
    return sum(token in model.end_tokens for token in model.encode(text, opening=False)) if text else 0


def _goes_on_at(model: LoadedModel, messages: Sequence[Message], place: Place, ids: Sequence[int], length: int) -> bool:
    """Whether a conversation that is continued there with these messages has the same tokens."""
    try:
        return _encoded(model, messages, Place(place.held + length, ids[length - 1], turn_open=True)) == ids[length:]
    except TemplateUnusable:
        return False


def _encode_around(model: LoadedModel, marked: str, words: Mapping[str, str]) -> list[int]:
    """The tokens of a template's text, and of the words that stand in it where their marks are, which are plain."""
    tokens: list[int] = []
    for piece in _MARKS.split(marked):
        if piece in words:
            tokens += model.encode_plain(words[piece], opening=False)
        elif piece:
            tokens += model.encode(piece, opening=False)
    return tokens


def _marked(messages: Sequence[Message], holds_control: Callable[[str], bool]) -> tuple[list[Message], dict[str, str]]:
    """The messages with marks in the place of words that spell control tokens (or marks), and those words by mark."""
    words: dict[str, str] = {}

    def mark(text: str) -> str:
        core = text.strip()
        if not holds_control(core) and _MARK not in core:
            return text
        name = f"{_MARK}{len(words):08}"
        words[name] = core
        return text.replace(core, name)

    def marked(message: Message) -> Message:
        text = message["content"]
        if message["role"] != "assistant":
            return {**message, "content": mark(text)}
        parts = _THINKING.split(text)
        return {**message, "content": "".join(part if _THINKING.fullmatch(part) else mark(part) for part in parts)}

    return [marked(message) for message in messages], words


def most_bytes_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """How many bytes of a text one token can stand for at most; None when that is not certain.

    tokenizer: as a tokenizer.json describes it. It is certain of byte-level BPE, which keeps every byte: there is no
    unknown token that swallows a word, nothing that is stripped, replaced or cut off.
    """
    model = tokenizer.get("model") or {}
    normalizer = tokenizer.get("normalizer") or {}
    added = tokenizer.get("added_tokens") or []
    vocabulary = model.get("vocab") or {}
    steps = _steps(tokenizer.get("pre_tokenizer") or {})
    if (
        model.get("type") != "BPE"
        or normalizer.get("type", "NFC") != "NFC"
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or not all(_keeps_every_byte(step) for step in steps)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
        or not _byte_symbols().issubset(vocabulary)
    ):
        return None
    # A byte is one character of a byte-level token; an added token is written as it is.
    longest = max([len(token) for token in vocabulary] + [len(token["content"].encode()) for token in added])
    return longest * (_NFC_SHRINKS_AT_MOST if normalizer else 1)


def _steps(pre_tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        return [step for each in pre_tokenizer["pretokenizers"] for step in _steps(each)]
    return [pre_tokenizer]


def _keeps_every_byte(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Split":
        return step.get("behavior") != "Removed"
    return step.get("type") in ("ByteLevel", "Digits")


def _byte_symbols() -> set[str]:
    """The 256 characters that byte-level tokenizers write bytes as: printable ones as they are, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return {chr(code) for code in [*printable, *range(0x100, 0x100 + 256 - len(printable))]}
