"""The figures of keys and values, head by head, added up piece by piece: pure arithmetic over numpy arrays.

Notation: x_t is one head's vector of token t, with D elements, t one of n tokens; |x| is its Euclidean length, mu the
mean of all x_t, and a sum goes over all tokens that are held. Everything is added up in float64.

- `rms`: r_t = |x_t| / sqrt(D). Its mean and its maximum over the tokens, and the first position of the maximum.
- `coherence.consecutive`: the mean of cos(x_t, x_t+1) over the tokens t whose next one is held too, neither all zeros.
- `coherence.with_mean`: the mean of cos(x_t, mu) over the tokens that are not all zeros.
- `spectrum`: with the eigenvalues e_i of the covariance sum((x_t - mu)(x_t - mu)^T) / n and p_i = e_i / sum(e), the
  entropy H = -sum(p_i ln p_i) in nats, and the effective rank exp(H), which is 1 to D.
- `outliers`: sigma is the standard deviation of all n * D elements; an outlier is an element with |x| > 6 sigma. Their
  count, their share of n * D, the channel that has most of them (the first of several), and how many it has.

A head that holds NaN or infinity has no figures. Nor has a head a figure that its tokens do not define: `Undefined`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

OUTLIER_SIGMAS: Final = 6.0
# Digits of a figure: the last bits depend on the order in which a library adds up.
DIGITS: Final = 6
# A variance below this share of the mean square is only rounding.
_NO_VARIANCE: Final = 1e-13
# OpenBLAS computes a product of 64 x 64 x 64 on the calling thread.
_TILE: Final = 64

NOT_FINITE: Final = "it holds NaN or infinity"
NO_TOKENS: Final = "it holds no tokens"
NO_ELEMENTS: Final = "its vectors have no elements"

Numbers = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(slots=True)
class Undefined:
    """Which figures are null in which heads, and why."""

    _heads: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def note(self, figure: str, head: int, why: str) -> None:
        """Say that a figure of a head is null."""
        self._heads.setdefault((figure, why), []).append(head)

    def to_list(self) -> list[dict[str, Any]]:
        """As plain data, in a fixed order."""
        return [{"figure": figure, "heads": heads, "why": why} for (figure, why), heads in sorted(self._heads.items())]


def rounded(value: float) -> float:
    """A figure, rounded for the document."""
    return float(f"{value:.{DIGITS}g}")


def sums_bytes(heads: int, dim: int) -> int:
    return heads * 8 * (dim * dim + 4 * dim)


class HeadSums:
    """First pass: all sums. Pieces come in the order of their positions.

    Memory: for each head D * D + 4 * D numbers; nothing grows with the tokens.
    """

    def __init__(self, heads: int, dim: int) -> None:
        self.heads, self.dim, self.count = heads, dim, 0
        self.first_token: int | None = None
        self.is_finite = np.ones(heads, dtype=bool)
        self.sums: Numbers = np.zeros((heads, dim))
        self.squares: Numbers = np.zeros(heads)
        self.rms_sum: Numbers = np.zeros(heads)
        self.rms_max: Numbers = np.full(heads, -1.0)
        self.rms_max_at: Positions = np.full(heads, -1, dtype=np.int64)
        self.pairs = np.zeros(heads, dtype=np.int64)
        self.pair_cosines: Numbers = np.zeros(heads)
        self.directed = np.zeros(heads, dtype=np.int64)
        self.directions: Numbers = np.zeros((heads, dim))
        self._products: Numbers = np.zeros((heads, dim, dim))
        self._last: tuple[int, Numbers] | None = None

    def add(self, values: NDArray[np.float32], positions: Positions) -> None:
        """Take in the vectors `[heads, tokens, dim]` of the tokens at these positions."""
        if self.first_token is None and len(positions):
            self.first_token = int(positions[0])
        self.count += len(positions)
        if not values.size:
            return
        vectors = values.astype(np.float64)
        finite = np.isfinite(vectors).all(axis=(1, 2))
        self.is_finite &= finite
        vectors[~finite] = 0.0
        squares = np.einsum("htd,htd->ht", vectors, vectors)
        rms = np.sqrt(squares / self.dim)
        self._add_norms(rms, positions)
        self.sums += vectors.sum(axis=1)
        self.squares += squares.sum(axis=1)
        self._add_directions(vectors, squares, positions)
        _add_outer_products(self._products, vectors)

    def _add_norms(self, rms: Numbers, positions: Positions) -> None:
        self.rms_sum += rms.sum(axis=1)
        at = rms.argmax(axis=1)
        highest = rms[np.arange(self.heads), at]
        larger = highest > self.rms_max
        self.rms_max[larger] = highest[larger]
        self.rms_max_at[larger] = positions[at[larger]]

    def _add_directions(self, vectors: Numbers, squares: Numbers, positions: Positions) -> None:
        lengths = np.sqrt(squares)[..., None]
        units = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
        self.directions += units.sum(axis=1)
        self.directed += (lengths[..., 0] > 0).sum(axis=1)
        joined, at = units, positions
        if self._last is not None:
            joined = np.concatenate([self._last[1][:, None], units], axis=1)
            at = np.concatenate([[self._last[0]], positions])
        self._last = int(positions[-1]), units[:, -1].copy()
        first, second = joined[:, :-1], joined[:, 1:]
        counted = (np.diff(at) == 1) & first.any(axis=2) & second.any(axis=2)
        self.pairs += counted.sum(axis=1)
        self.pair_cosines += np.where(counted, np.einsum("htd,htd->ht", first, second), 0.0).sum(axis=1)

    @property
    def sigma(self) -> Numbers:
        """The standard deviation of each head's elements."""
        elements = max(1, self.count * self.dim)
        mean = self.sums.sum(axis=1) / elements
        variance = np.maximum(self.squares / elements - mean**2, 0.0)
        variance[variance <= _NO_VARIANCE * self.squares / elements] = 0.0
        return np.asarray(np.sqrt(variance), dtype=np.float64)

    def covariance(self, head: int) -> Numbers:
        """The covariance `[dim, dim]` of one head's vectors."""
        mean = self.sums[head] / self.count
        upper = np.triu(self._products[head])
        products = upper + np.triu(upper, 1).T
        return np.asarray(products / self.count - np.outer(mean, mean), dtype=np.float64)


def _add_outer_products(products: Numbers, vectors: Numbers) -> None:
    """Add sum(x_t x_t^T) of vectors `[heads, tokens, dim]` to the upper triangle, tile by tile, of `[heads, dim, dim]`.

    numpy's BLAS takes all processors for larger products. Beside other work (an engine that generates) its threads wait
    for each other: 60 times slower on two cores than these tiles, which it computes on this thread.
    """
    _, count, dim = vectors.shape
    for start in range(0, count, _TILE):
        part = vectors[:, start : start + _TILE]
        for row in range(0, dim, _TILE):
            turned = part[:, :, row : row + _TILE].transpose(0, 2, 1)
            for column in range(row, dim, _TILE):
                tile = turned @ part[:, :, column : column + _TILE]
                products[:, row : row + _TILE, column : column + _TILE] += tile


class HeadOutliers:
    """Second pass: the counts that need the whole. Memory: D numbers a head."""

    def __init__(self, sums: HeadSums) -> None:
        self.sigma = sums.sigma
        self.by_channel = np.zeros((sums.heads, sums.dim), dtype=np.int64)

    def add(self, values: NDArray[np.float32]) -> None:
        """Take in the same pieces as in the first pass."""
        if not values.size:
            return
        found = values.astype(np.float64)
        self.by_channel += (np.abs(found) > OUTLIER_SIGMAS * self.sigma[:, None, None]).sum(axis=1)


def figures_of(sums: HeadSums, outliers: HeadOutliers) -> dict[str, Any]:
    """All figures of one array as plain data: lists of one value a head, null where there is none."""
    undefined = Undefined()
    problem = NO_TOKENS if not sums.count else NO_ELEMENTS if not sums.dim else None
    problems = [problem or (None if finite else NOT_FINITE) for finite in sums.is_finite]
    groups: dict[str, dict[str, list[Any]]] = {}
    for head, why in enumerate(problems):
        for group, (names, compute) in _GROUPS.items():
            figures = {} if why else compute(sums, outliers, head, undefined)
            if why:
                undefined.note(group, head, why)
            for name in names:
                groups.setdefault(group, {}).setdefault(name, []).append(figures.get(name))
    empty: dict[str, Any] = {group: {name: [] for name in names} for group, (names, _) in _GROUPS.items()}
    return {**empty, **groups, "undefined": undefined.to_list()}


def _rms(sums: HeadSums, _outliers: HeadOutliers, head: int, _undefined: Undefined) -> dict[str, Any]:
    return {
        "mean": rounded(sums.rms_sum[head] / sums.count),
        "max": rounded(sums.rms_max[head]),
        "max_at": int(sums.rms_max_at[head]),
    }


def _coherence(sums: HeadSums, _outliers: HeadOutliers, head: int, undefined: Undefined) -> dict[str, Any]:
    consecutive = with_mean = None
    if sums.pairs[head]:
        consecutive = rounded(sums.pair_cosines[head] / sums.pairs[head])
    else:
        undefined.note("coherence.consecutive", head, "no two tokens that follow each other are both other than zero")
    mean = sums.sums[head] / sums.count
    length = math.sqrt(float(mean @ mean))
    if length**2 > _NO_VARIANCE * sums.squares[head] / sums.count:
        with_mean = rounded(float(sums.directions[head] @ mean) / (length * sums.directed[head]))
    else:
        undefined.note("coherence.with_mean", head, "the mean of its vectors is zero")
    return {"consecutive": consecutive, "with_mean": with_mean}


def _spectrum(sums: HeadSums, _outliers: HeadOutliers, head: int, undefined: Undefined) -> dict[str, Any]:
    covariance = sums.covariance(head)
    if np.trace(covariance) <= _NO_VARIANCE * sums.squares[head] / sums.count:
        undefined.note("spectrum", head, "its vectors do not vary")
        return {}
    values = np.maximum(np.linalg.eigvalsh(covariance), 0.0)
    shares = values[values > 0] / values.sum()
    entropy = max(0.0, float(-(shares * np.log(shares)).sum()))
    return {"entropy_nats": rounded(entropy), "effective_rank": rounded(math.exp(entropy))}


def _outliers(sums: HeadSums, outliers: HeadOutliers, head: int, undefined: Undefined) -> dict[str, Any]:
    sigma = float(outliers.sigma[head])
    if not sigma:
        undefined.note("outliers", head, "its elements do not vary")
        return {"sigma": 0.0}
    by_channel = outliers.by_channel[head]
    count = int(by_channel.sum())
    channel = int(by_channel.argmax()) if count else None
    if channel is None:
        undefined.note("outliers.channel", head, "it has no outliers")
    return {
        "sigma": rounded(sigma),
        "count": count,
        "share": rounded(count / (sums.count * sums.dim)),
        "channel": channel,
        "channel_count": int(by_channel[channel]) if channel is not None else 0,
    }


_GROUPS: Final[dict[str, tuple[Sequence[str], Callable[[HeadSums, HeadOutliers, int, Undefined], dict[str, Any]]]]] = {
    "rms": (("mean", "max", "max_at"), _rms),
    "coherence": (("consecutive", "with_mean"), _coherence),
    "spectrum": (("entropy_nats", "effective_rank"), _spectrum),
    "outliers": (("sigma", "count", "share", "channel", "channel_count"), _outliers),
}


class ElementFigures:
    """The figures of an array without tokens: two passes over its elements, in pieces of any size.

    `rms` is sqrt(sum(x^2) / N) of its N elements, `max_abs` the largest |x|, `max_at` the first index of it in
    row-major order; sigma and outliers are as those of a head.
    """

    def __init__(self) -> None:
        self._count = self._outliers = 0
        self._sum = self._squares = 0.0
        self._highest, self._highest_at = -1.0, -1
        self._is_finite = True

    def add(self, values: NDArray[Any]) -> None:
        """First pass."""
        if not values.size:
            return
        found = np.abs(values.astype(np.float64))
        self._is_finite &= bool(np.isfinite(found).all())
        at = int(np.argmax(found))
        if self._is_finite and found[at] > self._highest:
            self._highest, self._highest_at = float(found[at]), self._count + at
        self._count += values.size
        if self._is_finite:
            self._sum += float(values.astype(np.float64).sum())
            self._squares += float((found**2).sum())

    @property
    def _sigma(self) -> float:
        mean = self._sum / self._count
        variance = self._squares / self._count - mean**2
        return math.sqrt(variance) if variance > _NO_VARIANCE * self._squares / self._count else 0.0

    def count_outliers(self, values: NDArray[Any]) -> None:
        """Second pass."""
        if values.size and self._is_finite:
            self._outliers += int((np.abs(values.astype(np.float64)) > OUTLIER_SIGMAS * self._sigma).sum())

    def to_map(self) -> dict[str, Any]:
        """As plain data, null where a figure is not defined."""
        why = "it is empty" if not self._count else None if self._is_finite else NOT_FINITE
        found: dict[str, Any] = {"rms": None, "max_abs": None, "max_at": None}
        outliers: dict[str, Any] = {"sigma": None, "count": None, "share": None}
        undefined = [{"figure": "all", "why": why}] if why else []
        if not why:
            found = {
                "rms": rounded(math.sqrt(self._squares / self._count)),
                "max_abs": rounded(self._highest),
                "max_at": self._highest_at,
            }
            sigma = self._sigma
            outliers["sigma"] = rounded(sigma)
            if sigma:
                outliers |= {"count": self._outliers, "share": rounded(self._outliers / self._count)}
            else:
                undefined.append({"figure": "outliers", "why": "its elements do not vary"})
        return {**found, "outliers": outliers, "undefined": undefined}


@dataclass(slots=True)
class Difference:
    """How far an array is from its parent's, over the elements that were compared.

    `max_abs` is max|x - p|, `relative_l2` is |x - p| / |p| of all of them together.
    """

    _squares: float = 0.0
    _parent_squares: float = 0.0
    _max_abs: float = 0.0
    _is_finite: bool = True
    _why: str | None = None

    def add(self, values: NDArray[Any], parents: NDArray[Any]) -> None:
        """Take in elements of both, of one shape."""
        if not values.size:
            return
        parent = parents.astype(np.float64)
        with np.errstate(invalid="ignore"):
            away = values.astype(np.float64) - parent
        self._is_finite &= bool(np.isfinite(away).all())
        if self._is_finite:
            self._max_abs = max(self._max_abs, float(np.abs(away).max()))
            self._squares += float((away**2).sum())
            self._parent_squares += float((parent**2).sum())

    def refuse(self, why: str) -> None:
        self._why = why

    def to_map(self) -> dict[str, Any]:
        """As plain data; nothing compared is no difference."""
        why = self._why or (None if self._is_finite else NOT_FINITE)
        if why:
            return {"max_abs": None, "relative_l2": None, "why": why}
        told: dict[str, Any] = {"max_abs": rounded(self._max_abs), "relative_l2": None, "why": None}
        if not self._squares:
            told["relative_l2"] = 0.0
        elif self._parent_squares:
            told["relative_l2"] = rounded(math.sqrt(self._squares / self._parent_squares))
        else:
            told["why"] = "the parent's are all zero"
        return told
