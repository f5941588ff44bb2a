"""How likely each token of an answer was, and which others were likely in its place.

The logits are float32 before the log-sum-exp is taken: in half precision its error would reach tenths. They are read
and never written, so an answer is the same with and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..api.logprobs import LOWEST_LOGPROB, Likelihood, TokenLogprobs
from ..models.models import LoadedModel
from ..models.token_bytes import part_bytes

_ANCHOR: Final = "a"
"""Stands before a token while it is decoded: some tokenizers drop a blank that begins a text."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Logprobs:
    """Tells the log-probabilities of one answer. top: how many of the likeliest tokens are told for each."""

    def __init__(self, model: LoadedModel, top: int) -> None:
        self._model = model
        self._top = top
        self._anchor: Sequence[int] = model.encode_plain(_ANCHOR, opening=False)
        self._texts: dict[int, tuple[str, bytes | None]] = {}

    def of(self, logits: mx.array, token: int) -> TokenLogprobs:
        """For a token drawn from float32 logits `[vocabulary]`, evaluated, without NaN or positive infinity."""
        values = np.asarray(logits)
        logprobs = _normalised(values)
        top = tuple(self._likelihood(each, logprobs) for each in likeliest(values, self._top))
        own = self._likelihood(token, logprobs)
        return TokenLogprobs(own.token, own.text, own.logprob, own.part_bytes, top)

    def _likelihood(self, token: int, logprobs: NDArray[np.float64]) -> Likelihood:
        if token not in self._texts:
            text = self._text_of(token)
            self._texts[token] = text, part_bytes(self._model.tokenizer, token) if _REPLACEMENT in text else None
        text, part = self._texts[token]
        return Likelihood(token, text, min(0.0, max(LOWEST_LOGPROB, float(logprobs[token]))), part)

    def _text_of(self, token: int) -> str:
        model = self._model
        if token in model.end_tokens:
            return ""
        if (special := model.marks.special.get(token)) is not None:
            return special
        return model.decode([*self._anchor, token]).removeprefix(_ANCHOR)


def likeliest(values: NDArray[Any], count: int) -> list[int]:
    """The tokens with the highest of values `[vocabulary]`, the highest first, equal ones by the lower id; at most all
    of them."""
    count = min(count, len(values))
    if not count:
        return []
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)]
    tokens = np.concatenate((above, equal))
    order = np.lexsort((tokens, -values[tokens]))
    return [int(token) for token in tokens[order]]


def _normalised(values: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities `[vocabulary]` of float32 logits."""
    wide = values.astype(np.float64)
    highest = np.max(wide)
    logprobs: NDArray[np.float64] = wide - (highest + np.log(np.exp(wide - highest).sum()))
    return logprobs
