"""How many replicas there are to be, where Ray may start more: by requests that are under way or wait, and by the
memory of awake sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

MEMORY: Final = "memory"
"""The figure of a replica: the share of its memory for sessions that awake ones take."""

REQUESTS_EACH: Final = 4
"""Requests that one replica has at a time, before there is to be another: they decode in one round."""

FULL: Final = 0.8
"""The share of memory from which there is to be another: above it sessions sleep for others."""


def wanted(requests: float, shares: Sequence[float]) -> int:
    """The number of replicas. requests: under way and waiting, of all. shares: of memory, of each replica."""
    return max(1, ceil(requests / REQUESTS_EACH), ceil(sum(shares) / FULL))


def wanted_by_ray(context: Any) -> tuple[int, dict[str, Any]]:
    """The same as Ray asks for it; Ray holds it between the fewest and the most."""
    shares = (context.aggregated_metrics or {}).get(MEMORY, {})
    return wanted(context.total_num_requests, list(shares.values())), {}
