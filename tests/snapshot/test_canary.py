"""How far logits may differ from those that were kept: so much and no more, of so many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from torpor.snapshot.canary import Expectation, agree
from torpor.snapshot.errors import CanaryFailed

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


def verdict(then: np.ndarray, at: int, by: float, compute_dtype: str = "float32") -> str:
    """Of logits of which one is other than what was kept."""
    now = then.copy()
    now[at] += by
    kept = Expectation(then.astype("<f4").tobytes(), exact=False)
    return agree(kept, mx.array(now.astype(np.float32)), compute_dtype=compute_dtype, position=1)


@pytest.mark.parametrize(
    ("compute_dtype", "tolerance"),
    [("float32", 0.01), ("float16", 0.25), ("bfloat16", 0.25), ("float32+bfloat16", 0.01), ("float8", 0.0)],
)
def test_a_log_probability_may_differ_by_the_tolerance_of_its_type_and_no_more(
    compute_dtype: str, tolerance: float
) -> None:
    sure = np.array([0.0, *[-20.0] * 299])  # so that the sum of all hardly changes
    if tolerance:
        assert verdict(sure, 1, 0.9 * tolerance, compute_dtype) == "within_tolerance"
    with pytest.raises(CanaryFailed) as refusal:
        verdict(sure, 1, 1.1 * tolerance + 1e-4, compute_dtype)
    assert refusal.value.tolerance == tolerance


def test_the_256_most_probable_tokens_are_compared_and_no_others() -> None:
    falling = -0.1 * np.arange(300)
    for at in (1, 100, 255):
        with pytest.raises(CanaryFailed):
            verdict(falling, at, 0.5)
    assert verdict(falling, 256, 0.5) == "within_tolerance"
