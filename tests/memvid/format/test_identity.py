"""Identity: order does not matter, every part does, and what differs is named."""

from __future__ import annotations

import pytest
from torpor.memvid.errors import InvalidDraft
from torpor.memvid.format.identity import Identity


def test_digest_does_not_depend_on_the_order_of_parts() -> None:
    one, two = Identity((("a", "1"), ("b", "2"))), Identity((("b", "2"), ("a", "1")))
    assert one == two
    assert one.digest == two.digest
    assert len(one.digest) == 32


def test_digest_is_pinned_to_its_definition() -> None:
    """A changed encoding would orphan every session on every disk."""
    assert Identity((("a", "1"),)).digest.hex() == "1c36e7618e3645f6a29a6b80c26cfdeb2fc78f39ca1e2dd738cc58d64f303fc9"


@pytest.mark.parametrize("parts", [(("a", "2"),), (("b", "1"),), (("a", "1"), ("b", "1")), (("a1", ""),)])
def test_any_other_part_or_value_gives_another_digest(parts: tuple[tuple[str, str], ...]) -> None:
    assert Identity(parts).digest != Identity((("a", "1"),)).digest


def test_mismatch_names_every_part_that_differs() -> None:
    stored = Identity((("adapter", "x"), ("dtype", "float32"), ("weights", "w")))
    live = Identity((("dtype", "bfloat16"), ("template", "t"), ("weights", "w")))
    assert stored.mismatched_fields(live) == [
        {"field": "adapter", "stored": "x", "live": None},
        {"field": "dtype", "stored": "float32", "live": "bfloat16"},
        {"field": "template", "stored": None, "live": "t"},
    ]
    assert stored.mismatched_fields(stored) == []


@pytest.mark.parametrize(
    "parts",
    [
        (),
        tuple((str(number), "") for number in range(65)),
        (("a", "x" * 4097),),
        (("", "x"),),
        (("a", "1"), ("a", "2")),
        (("a", 1),),
    ],
)
def test_an_identity_outside_its_limits_is_refused(parts: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(InvalidDraft):
        Identity(parts)
