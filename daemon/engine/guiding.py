"""What a branch changes in the model's logits before it draws, and what it measures of the tokens that it commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from ..api.logprobs import LOWEST_LOGPROB
from ..models.grammars import Allowed, require_some

Bias = Mapping[int, float | None]
"""What is added to the logits of tokens; None: the token is never drawn."""


@dataclass(slots=True)
class Guide:
    """bias, steer: what is added before a draw; forks inherit `bias` alone. replaced: logits in place of the model's,
    for one step. measured: tokens committed; logprob_sum: of their log-probabilities, in nats."""

    bias: Bias = field(default_factory=dict)
    steer: Bias = field(default_factory=dict)
    replaced: mx.array | None = None
    measured: int = 0
    logprob_sum: float = 0.0

    def forked(self) -> Guide:
        """That of a child."""
        return replace(self, steer={})

    def head(self, logits: mx.array) -> mx.array:
        """The logits `[vocabulary]` that count, for those of the model."""
        return logits if self.replaced is None else self.replaced

    def steered(self, logits: mx.array, allowed: Allowed | None) -> tuple[mx.array, Allowed | None]:
        """The logits to draw from, and which tokens may be drawn. Raises InvalidConstraint: none may."""
        head, changes = self.head(logits), (self.bias, self.steer)
        if not any(changes):
            return head, allowed
        added = np.zeros(head.shape[-1], np.float32)
        for token, bias in (each for change in changes for each in change.items()):
            if bias is None:
                allowed = np.ones(head.shape[-1], np.bool_) if allowed is None else allowed
                allowed[token] = False
            else:
                added[token] += bias
        if allowed is not None:
            require_some(allowed)
        return head + mx.array(added), allowed

    def commit(self, head: mx.array, token: int) -> None:
        """Measure a token that was committed. head: the logits before it."""
        self.replaced = None
        self.measured += 1
        self.logprob_sum += logprob_of(head, token)

    @property
    def mean_logprob(self) -> float | None:
        """Of the tokens committed, in nats; None without one."""
        return min(0.0, self.logprob_sum / self.measured) if self.measured else None


def logprob_of(logits: mx.array, token: int) -> float:
    """The log-probability of a token by float32 logits `[vocabulary]`, in nats; `LOWEST_LOGPROB` stands for less."""
    return max(LOWEST_LOGPROB, float(np.asarray(logits[token] - mx.logsumexp(logits))))
