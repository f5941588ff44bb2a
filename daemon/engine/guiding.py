"""What is added to the model's logits before a draw, and what a branch measures of the tokens that it commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..api.logprobs import LOWEST_LOGPROB
from ..api.sampling import TokenBias
from ..errors import InvalidLogits
from ..models.grammars import Allowed, require_some


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """What is added to the logits of some tokens, each named once. It never changes: many branches may share it.

    tokens: int64 `[n]`; added: float32 `[n]`, minus infinity for a token that is never drawn."""

    tokens: NDArray[np.int64]
    added: NDArray[np.float32]

    @classmethod
    def of(cls, biases: Iterable[TokenBias]) -> Bias:
        """From a list of biases, of which the last one of a token counts."""
        by_token = {each.token: -np.inf if each.bias is None else each.bias for each in biases}
        return cls(np.array(list(by_token), np.int64), np.array(list(by_token.values()), np.float32))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return self.tokens.nbytes + self.added.nbytes


NO_BIAS: Final = Bias.of(())


def biased(logits: mx.array, allowed: Allowed | None, biases: Iterable[Bias]) -> tuple[mx.array, Allowed | None]:
    """The logits `[vocabulary]` to draw from, and which tokens may be drawn. Raises InvalidConstraint: none may."""
    biases = [each for each in biases if each]
    if not biases:
        return logits, allowed
    added = np.zeros(logits.shape[-1], np.float32)
    for each in biases:
        is_barred = np.isneginf(each.added)
        added[each.tokens[~is_barred]] += each.added[~is_barred]
        if is_barred.any():
            allowed = np.ones(logits.shape[-1], np.bool_) if allowed is None else allowed.copy()
            allowed[each.tokens[is_barred]] = False
    if allowed is not None:
        require_some(allowed)
    return logits + mx.array(added), allowed


@dataclass(slots=True)
class Guide:
    """answer_at: the place in the ledger where what the branch and its ancestors have committed begins: at the root, or
    behind what was read last. steer: what is added before a draw; forks do not inherit it. replaced: logits in place of
    the model's, for one step. measured: tokens committed; logprob_sum: of their log-probabilities, in nats."""

    answer_at: int = 0
    steer: Bias = NO_BIAS
    replaced: mx.array | None = None
    measured: int = 0
    logprob_sum: float = 0.0

    def forked(self) -> Guide:
        """That of a child."""
        return replace(self, steer=NO_BIAS)

    def given(self) -> Iterator[Bias | mx.array]:
        """What has memory of its own in it. Other branches may have the same."""
        yield self.steer
        if self.replaced is not None:
            yield self.replaced

    def head(self, logits: mx.array) -> mx.array:
        """The logits `[vocabulary]` that count, for those of the model."""
        return logits if self.replaced is None else self.replaced

    def commit(self, head: mx.array, token: int) -> None:
        """Measure a token that was committed. head: the logits before it."""
        self.replaced = None
        self.measured += 1
        self.logprob_sum += logprob_of(head, token)

    @property
    def mean_logprob(self) -> float | None:
        """Of the tokens committed, in nats; None without one."""
        return min(0.0, self.logprob_sum / self.measured) if self.measured else None


def logits_of(data: bytes, vocabulary: int) -> NDArray[np.float32]:
    """Logits from their bytes. Raises InvalidLogits: no token can be drawn from these."""
    wrong = None
    values = np.frombuffer(data[: len(data) // 4 * 4], "<f4")
    if len(data) != 4 * vocabulary:
        wrong = f"they have {len(data)} bytes, and {4 * vocabulary} are those of {vocabulary} float32 numbers"
    elif np.isnan(values).any() or np.isposinf(values).any():
        wrong = "one of them is NaN or infinity"
    elif np.isneginf(values).all():
        wrong = "all of them are minus infinity, so no token could be drawn"
    if wrong is not None:
        raise InvalidLogits(f"These logits cannot be drawn from: {wrong}.", vocabulary=vocabulary)
    return values.astype(np.float32)


def logprob_of(logits: mx.array, token: int) -> float:
    """The log-probability of a token by float32 logits `[vocabulary]`, in nats; `LOWEST_LOGPROB` stands for less."""
    values = np.asarray(logits)
    highest = values.max()
    logprob = float(values[token] - highest) - float(np.log(np.exp(values - highest).sum(dtype=np.float64)))
    return max(LOWEST_LOGPROB, logprob)
