"""What a session says of what was computed again is what was written, or nothing that anybody believes."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.api.session import Recomputed
from torpor.daemon.sessions.origin import map_of_recomputed, recomputed_in

TOLD = Recomputed(3, 512, 88, True)


def test_it_is_kept_as_it_is() -> None:
    assert recomputed_in(map_of_recomputed(TOLD)) == TOLD
    assert recomputed_in(None) is None
    assert "damaged" not in map_of_recomputed(TOLD), "as it was kept before there was another reason"
    chosen = Recomputed(3, 512, 88, True, damaged=False)
    assert recomputed_in(map_of_recomputed(chosen)) == chosen


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
        recomputed_in({**map_of_recomputed(TOLD), **change})


@pytest.mark.parametrize("stored", [[], "x", {"version": 1}])
def test_other_shapes_are_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="recomputed"):
        recomputed_in(stored)
