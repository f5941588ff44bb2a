"""A record is a dataclass: its equality, digest and text, which are written once, are those that a dataclass has."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, dataclass

import pytest
from torpor.records import Record, Result, as_map


class Inner(Result):
    name: str
    counts: tuple[int, ...] = ()


class Outer(Result):
    inner: Inner | None
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] | None = None


def outer() -> Outer:
    return Outer(Inner("a", (1, 2)), (Inner("b"),), {"c": Inner("d")})


def test_equality_digest_and_text_are_those_of_a_dataclass() -> None:
    @dataclass(frozen=True)
    class Plain:
        name: str
        counts: tuple[int, ...] = ()

    assert outer() == outer()
    assert Inner("a") != Inner("a", (1,))
    assert Inner("a") != Plain("a")
    assert len({Inner("a"), Inner("a"), Inner("b")}) == 2
    assert repr(Inner("a", (1,))) == repr(Plain("a", (1,))).rpartition(".")[2].replace("Plain", "Inner")
    with pytest.raises(FrozenInstanceError):
        Inner("a").name = "b"  # type: ignore[misc]


def test_a_map_of_a_record_is_that_of_a_dataclass() -> None:
    assert as_map(outer()) == asdict(outer())
    assert as_map([outer()]) == [asdict(outer())]
    assert not isinstance(as_map(outer())["named"]["c"], Record)
