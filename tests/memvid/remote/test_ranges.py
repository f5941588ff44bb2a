"""Which requests bring parts of an object: each byte that is asked for once, in order, and none too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.remote.objects import Span
from torpor.memvid.remote.ranges import Fetch, fetches

SIZE = 40
SPANS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, SIZE + 5), st.integers(0, SIZE)), max_size=8)


def test_neighbors_come_together_and_long_parts_in_pieces() -> None:
    assert list(fetches([("a", 0, 3), ("a", 3, 2), ("a", 9, 1), ("b", 10, 1)], 8)) == [
        Fetch("a", 0, 5, [(0, 0, 3), (1, 3, 5)]),
        Fetch("a", 9, 10, [(2, 9, 10)]),
        Fetch("b", 10, 11, [(3, 10, 11)]),
    ]
    assert list(fetches([("a", 0, 20)], 8)) == [
        Fetch("a", 0, 8, [(0, 0, 8)]),
        Fetch("a", 8, 16, [(0, 8, 16)]),
        Fetch("a", 16, 20, [(0, 16, 20)]),
    ]
    assert list(fetches([("a", 5, 0)], 8)) == []


@given(SPANS, st.integers(1, 16))
def test_the_shares_put_together_are_what_was_asked_for(spans: list[Span], most: int) -> None:
    data = {"a": bytes(range(SIZE)), "b": bytes(range(SIZE, 2 * SIZE))}
    parts = [b""] * len(spans)
    last = 0
    for fetch in fetches(spans, most):
        assert 0 < fetch.end - fetch.first <= most
        assert [first for _, first, _ in fetch.shares] == [fetch.first, *(end for _, _, end in fetch.shares[:-1])]
        assert fetch.shares[-1][2] == fetch.end
        for part, first, end in fetch.shares:
            assert part >= last
            last = part
            parts[part] += data[fetch.key][first:end]
    assert parts == [data[key][first : first + size] for key, first, size in spans]
