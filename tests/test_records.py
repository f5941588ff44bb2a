"""A record is a dataclass: its equality, digest and text, which are written once, are those that a dataclass has."""

from __future__ import annotations

from dataclasses import KW_ONLY, FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

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


class Placed(Record):
    first: int
    _: KW_ONLY
    second: int = 2
    third: list[int] = field(default_factory=list)


class Later(Placed):
    fourth: int = 4


def test_it_is_made_as_a_dataclass_is() -> None:
    made = Later(1, 5, second=3)
    assert vars(made) == {"first": 1, "second": 3, "third": [], "fourth": 5}
    assert list(vars(made)) == [each.name for each in fields(Later)], "whatever was given first"
    assert replace(made, third=[6]) == Later(1, second=3, third=[6], fourth=5)
    assert Placed(1).third is not Placed(1).third
    wrong: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
        ((), {}, "missing 1 required argument: 'first'"),
        ((1, 2, 3), {}, "takes 3 positional arguments but 4 were given"),
        ((1,), {"first": 1}, "got multiple values for argument 'first'"),
        ((1,), {"fifth": 1}, "got an unexpected keyword argument 'fifth'"),
        ((), {"second": 1, "fifth": 1}, "got an unexpected keyword argument 'fifth'"),
    ]
    for values, named, told in wrong:
        with pytest.raises(TypeError, match=rf"^Later\.__init__\(\) {told}$"):
            Later(*values, **named)
    with pytest.raises(FrozenInstanceError):
        del made.fourth


def test_a_map_of_a_record_is_that_of_a_dataclass() -> None:
    assert as_map(outer()) == asdict(outer())
    assert as_map([outer()]) == [asdict(outer())]
    assert not isinstance(as_map(outer())["named"]["c"], Record)
