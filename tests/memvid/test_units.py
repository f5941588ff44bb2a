"""How sizes and counts are written for people."""

from __future__ import annotations

import pytest
from torpor.memvid.checking.set_aside_versions import loss_message
from torpor.memvid.format.ledgers import Common
from torpor.memvid.units import format_plural
from torpor.memvid.uri import SessionUri


@pytest.mark.parametrize(("count", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1200, "1,200 tokens")])
def test_a_noun_agrees_with_its_count(count: int, text: str) -> None:
    assert format_plural(count, "token") == text


@pytest.mark.parametrize("held", [None, Common(0, 0), Common(0, 1)])
def test_a_lost_version_of_one_token_is_told_as_that(held: Common | None) -> None:
    message = loss_message(SessionUri("default", "s"), 1, 1, ["/s/bundles/x.mvb"], held)
    assert "1 token" in message
    assert "1 tokens" not in message
