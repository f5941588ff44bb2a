"""Which of several futures is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..api.branching import Measure, perplexity_of
from ..engine.guiding import Guide


def measured(by: Measure, parent: Guide, attempt: Guide) -> float | None:
    """The measure of an attempt, forked from a parent; None where it has none."""
    if by == "perplexity":
        perplexity = perplexity_of(attempt.mean_logprob)
        return perplexity if math.isfinite(perplexity) else None
    count = attempt.measured - parent.measured
    return (attempt.logprob_sum - parent.logprob_sum) / count if by == "mean_logprob" and count else None


def ranked(cut_off: Sequence[bool], by: Measure, measures: Sequence[float | None]) -> list[int]:
    """The places of attempts, the best first: behind those that are whole come those that were cut off, and among
    either those without a measure come last. Equal ones keep their order."""
    sign = 1.0 if by == "perplexity" else -1.0

    def key(at: int) -> tuple[bool, bool, float]:
        measure = measures[at]
        return cut_off[at], measure is None, 0.0 if measure is None else sign * measure

    return sorted(range(len(measures)), key=key)
