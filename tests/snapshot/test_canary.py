"""How far logits may differ from those that were kept: so much and no more, of so many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from torpor.snapshot import canary
from torpor.snapshot.canary import Expectation, agree, tolerance_of
from torpor.snapshot.errors import CanaryFailed

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary.mx, "default_device", lambda: mx.Device(mx.cpu))


def verdict(then: np.ndarray, at: int, by: float, compute_dtype: str = "float32", device: str = "cpu") -> str:
    """Of logits of which one is other than what was kept."""
    now = then.copy()
    now[at] += by
    kept = Expectation(then.astype("<f4").tobytes(), exact=False, device=device)
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


def test_float32_of_a_gpu_may_differ_as_float16_does_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX multiplies float32 in TF32 there."""
    sure = np.array([0.0, *[-20.0] * 299])
    assert verdict(sure, 1, 0.2, device="cuda") == "within_tolerance"
    with pytest.raises(CanaryFailed):
        verdict(sure, 1, 0.3, device="cuda")
    monkeypatch.setattr(canary.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert verdict(sure, 1, 0.2) == "within_tolerance"
    assert [tolerance_of(each) for each in ("float32", "float32+bfloat16", "float8")] == [0.25, 0.25, 0.0]


def test_the_256_most_probable_tokens_are_compared_and_no_others() -> None:
    falling = -0.1 * np.arange(300)
    for at in (1, 100, 255):
        with pytest.raises(CanaryFailed):
            verdict(falling, at, 0.5)
    assert verdict(falling, 256, 0.5) == "within_tolerance"
