"""A place beyond the end is refused, wherever a text names one."""

from __future__ import annotations

import pytest
from torpor.memvid.access.sessions import Named
from torpor.memvid.errors import InvalidUri
from torpor.memvid.uri import SessionUri


def test_a_place_beyond_the_end_is_refused() -> None:
    named = Named("a:8", SessionUri("default", "a"), None, 8)
    assert named.place_in(8) == 8
    with pytest.raises(InvalidUri, match="from 1 to 7"):
        named.place_in(7)
