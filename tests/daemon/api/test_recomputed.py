"""What a session says of what was computed again is what was written, or nothing that anybody believes."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.api.recomputed import Recomputed

TOLD = Recomputed(3, 512, 88, True)


def test_it_is_kept_as_it_is() -> None:
    assert Recomputed.from_map(TOLD.to_map()) == TOLD
    assert Recomputed.from_map(None) is None
    assert "damaged" not in TOLD.to_map(), "as it was kept before there was another reason"
    chosen = Recomputed(3, 512, 88, True, damaged=False)
    assert Recomputed.from_map(chosen.to_map()) == chosen


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"version": True},
        {"start": -1},
        {"tokens": 0},
        {"tokens": 2**40},
        {"same_logits": 1},
        {"start": "512"},
        {"damaged": 0},
        {"more": 1},
    ],
)
def test_what_nobody_wrote_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="recomputed"):
        Recomputed.from_map({**TOLD.to_map(), **change})


@pytest.mark.parametrize("stored", [[], "x", {"version": 1}])
def test_other_shapes_are_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="recomputed"):
        Recomputed.from_map(stored)
