"""How sizes and counts are written for people."""

from __future__ import annotations

import pytest
from torpor.memvid.units import format_plural


@pytest.mark.parametrize(("count", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1200, "1,200 tokens")])
def test_a_noun_agrees_with_its_count(count: int, text: str) -> None:
    assert format_plural(count, "token") == text
