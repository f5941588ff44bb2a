"""Texts and turns of a chat to tokens, on a thread of their own: neither the event loop nor the engine waits for a
tokenizer or a template.

Owns what is turned into text and when; `turns.py` has the words of a turn. A text that cannot fit, however well it is
tokenised, is refused before that work is done.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..memvid.sizes import format_plural
from . import turns
from .errors import ContextOverflow
from .models import LoadedModel
from .sessions import Session

# NFC makes a text at most 3.5 times shorter in UTF-8 (iota with dialytika and tonos; Hangul: 3 times).
_NFC_SHRINKS_AT_MOST = 4

# Stand for a message's and the system's words while a template is rendered: nothing that one strips or moves.
_MESSAGE = "torpormessageplaceholder2b6e"
_SYSTEM = "torporsystemplaceholder5d0a"

Result = TypeVar("Result")


class Encoder:
    """Turns text into the tokens of a session's model. Its callers hold the session alone (`sessions.Turns`)."""

    def __init__(self) -> None:
        # One: a tokenizer has settings that a call may change, so no two calls may be at one tokenizer.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torpor-text")
        self._most_bytes: dict[str, int | None] = {}

    async def text(self, live: Session, text: str) -> list[int]:
        """The tokens of a text that continues the ledger.

        Raises:
            ContextOverflow: the text is too long to fit, however it is tokenised.
        """
        model, held = live.model, len(live.state.tokens)

        def encode() -> list[int]:
            self._require_could_fit(model, text, held=held)
            return model.encode_plain(text, opening=not held)

        return await self._aside(encode)

    async def turn(self, live: Session, message: Mapping[str, str]) -> list[int]:
        """The tokens of a new turn alone; those of earlier turns are in the ledger as they were read and sampled.

        Raises:
            TemplateUnusable: the model has no template, or one that refuses the message.
            ContextOverflow: the turn is too long to fit, however it is tokenised.
        """
        # What is asked of the session is asked here: a thread may still be at work when a cancelled request lets go.
        model, held, system, turn_open = live.model, len(live.state.tokens), live.system, live.turn_open
        last = live.state.tokens[-1] if held else None

        def rendered(message: Mapping[str, str], system: str | None) -> str:
            if last is None or system is not None:
                return turns.first_turn(model.render, message, system=system)
            end_text = str(model.tokenizer.decode([last])) if last in model.end_tokens else ""
            return turns.next_turn(model.render, message, turn_open=turn_open, end_text=end_text)

        def render_and_encode() -> list[int]:
            text = rendered(message, system)
            self._require_could_fit(model, text, held=held)
            if not (model.holds_control(message["content"]) or model.holds_control(system or "")):
                # A template writes the first token itself, so none is added.
                return model.encode(text, opening=False)
            # Somebody's words spell a control token. Only the template's own are obeyed.
            words = {_MESSAGE: message["content"], _SYSTEM: system or ""}
            marked = rendered({**message, "content": _MESSAGE}, None if system is None else _SYSTEM)
            return _encode_around(model, marked, words)

        return await self._aside(render_and_encode)

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
            raise ContextOverflow(
                f"The text has {format_plural(size_bytes, 'byte')}, which are {format_plural(least, 'token')} or more, "
                f"and the session holds {held}, but the context of model {model.name!r} ends at "
                f"{model.context_tokens}. Give a shorter text.",
                token_count=held,
                wanted_tokens=least,
                context_tokens=model.context_tokens,
            )

    def _most_bytes_of(self, model: LoadedModel) -> int | None:
        if model.name not in self._most_bytes:
            backend = getattr(model.tokenizer, "backend_tokenizer", None)
            described = json.loads(backend.to_str()) if backend is not None else {}
            self._most_bytes[model.name] = most_bytes_per_token(described)
        return self._most_bytes[model.name]


def _encode_around(model: LoadedModel, marked: str, words: Mapping[str, str]) -> list[int]:
    """The tokens of a template's text, and of the words that stand in it where their marks are, which are plain."""
    tokens: list[int] = []
    for piece in re.split(f"({'|'.join(words)})", marked):
        if piece in words:
            tokens += model.encode_plain(words[piece], opening=False)
        elif piece:
            tokens += model.encode(piece, opening=False)
    return tokens


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
