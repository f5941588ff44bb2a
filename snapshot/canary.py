"""Whether a state that was put back computes the same as the slept one.

The canary is the logits of one token run on the state. If the whole state is cut by token, it is the last token, run
again on the state before it: its logits are kept anyway. Else the last token is run once more, behind itself, on a
state that is then put back; those logits are kept beside the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import mlx.core as mx
import numpy as np

from .errors import CanaryFailed

Verdict = Literal["same_bits", "within_tolerance", "not_run"]

COMPARED_TOKENS: Final = 256
"""Tokens whose log-probabilities are compared if bits may differ: the most probable ones of the kept logits."""

TOLERANCE: Final = {"float32": 0.01, "float16": 0.25, "bfloat16": 0.25}
"""The largest difference of a log-probability that another device, library or processor may make, by compute dtype.
Half precision keeps 8 or 11 bits of a logit of some tens. A state that is wrong is off by whole units."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The kept canary. logits: float32 `[vocabulary]`; exact: whether the same bits must come again, because the same
    environment reads the token in a call of the same size; device: what computed it, as its backend says."""

    logits: bytes
    exact: bool
    device: str = "cpu"


def tolerance_of(compute_dtype: str, device: str = "cpu") -> float:
    """The tolerance between this device and another one. compute_dtype: one, or several with `+` between; the least
    counts. Where one of both is a GPU, float32 has that of float16: MLX multiplies in TF32 there, which keeps 11 bits.
    """
    on_gpu = device != "cpu" or mx.default_device() != mx.Device(mx.cpu)
    names = ("float16" if on_gpu and name == "float32" else name for name in compute_dtype.split("+"))
    return min(TOLERANCE.get(name, 0.0) for name in names)


def agree(expected: Expectation, found: mx.array, *, compute_dtype: str, position: int) -> Verdict:
    """Compare the canary's logits, float32 `[vocabulary]` and evaluated, with the kept ones. Raises CanaryFailed: they
    do not agree; the state is not to be used."""
    then, now = np.frombuffer(expected.logits, dtype="<f4"), np.asarray(found)
    if then.tobytes() == now.tobytes():
        return "same_bits"
    difference = _difference(then, now)
    tolerance = 0.0 if expected.exact else tolerance_of(compute_dtype, expected.device)
    if not difference <= tolerance:  # also for NaN
        raise CanaryFailed(
            f"The state at token {position} was put back, and does not compute what it did before it slept: a "
            f"log-probability differs by {difference:.3g}, where {tolerance:.3g} is allowed. Nothing was woken. "
            "Wake an earlier version; `torpor verify --deep` reads all stored bytes, `torpor doctor` looks at the "
            "machine.",
            difference=float(difference),
            tolerance=tolerance,
            position=position,
        )
    return "within_tolerance"


def _difference(then: np.ndarray, now: np.ndarray) -> float:
    """The largest difference of a log-probability among the tokens that were most probable."""
    if not (np.isfinite(then.max()) and np.isfinite(now.max())):
        return float("nan")
    most = np.argsort(then)[-COMPARED_TOKENS:]
    most = most[np.isfinite(then[most])]
    return float(np.max(np.abs(_log_probabilities(then)[most] - _log_probabilities(now)[most])))


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    highest = np.max(wide)
    with np.errstate(over="ignore"):
        return np.asarray(wide - highest - np.log(np.exp(wide - highest).sum()))
