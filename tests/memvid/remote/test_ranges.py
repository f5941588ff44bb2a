"""Which requests bring parts of an object: each byte that is asked for once, in order, and none too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.remote.ranges import Fetch, fetches

SIZE = 40
SPANS = st.lists(st.tuples(st.integers(0, SIZE + 5), st.integers(0, SIZE)), max_size=8)


def test_neighbors_come_together_and_long_parts_in_pieces() -> None:
    assert list(fetches([(0, 3), (3, 2), (9, 1)], 8)) == [
        Fetch(0, 5, [(0, 0, 3), (1, 3, 5)]),
        Fetch(9, 10, [(2, 9, 10)]),
    ]
    assert list(fetches([(0, 20)], 8)) == [
        Fetch(0, 8, [(0, 0, 8)]),
        Fetch(8, 16, [(0, 8, 16)]),
        Fetch(16, 20, [(0, 16, 20)]),
    ]
    assert list(fetches([(5, 0)], 8)) == []


@given(SPANS, st.integers(1, 16))
def test_the_shares_put_together_are_what_was_asked_for(spans: list[tuple[int, int]], most: int) -> None:
    data = bytes(range(SIZE))
    parts = [b""] * len(spans)
    last = 0
    for fetch in fetches(spans, most):
        assert 0 < fetch.end - fetch.first <= most
        assert [first for _, first, _ in fetch.shares] == [fetch.first, *(end for _, _, end in fetch.shares[:-1])]
        assert fetch.shares[-1][2] == fetch.end
        for part, first, end in fetch.shares:
            assert part >= last
            last = part
            parts[part] += data[first:end]
    assert parts == [data[first : first + size] for first, size in spans]
