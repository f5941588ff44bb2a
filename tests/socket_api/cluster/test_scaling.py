"""How many replicas there are to be."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torpor.socket_api.cluster.scaling import MEMORY, wanted, wanted_by_ray


@pytest.mark.parametrize(
    ("requests", "shares", "replicas"),
    [
        (0, [], 1),
        (4, [0.1, 0.1], 1),
        (5, [0.1], 2),
        (17, [0.1], 5),
        (0, [0.8], 1),
        (1, [0.9], 2),
        (0, [0.7, 0.7, 0.7], 3),
        (0, [0.2, 0.2, 0.2], 1),
    ],
)
def test_requests_or_memory_ask_for_more(requests: float, shares: Sequence[float], replicas: int) -> None:
    assert wanted(requests, shares) == replicas


def test_ray_asks_with_its_own_figures() -> None:
    context = SimpleNamespace(total_num_requests=9.0, aggregated_metrics={MEMORY: {"a": 0.9, "b": 0.9}})
    assert wanted_by_ray(context) == (3, {})
    assert wanted_by_ray(SimpleNamespace(total_num_requests=0.0, aggregated_metrics=None)) == (1, {})
