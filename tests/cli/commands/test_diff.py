"""Where two memories part, `torpor diff` shows what both say there apart from what each says behind it."""

from __future__ import annotations

import pytest
from torpor.cli.commands.diff import _texts, _where
from torpor.daemon.api.difference import Compared, Difference


def side(text: str | None, count: int, differs_at: int | None) -> Compared:
    return Compared("torpor://default/a", 1, None, "demo", False, count, differs_at, text, 0, 0)


def difference(one: Compared, other: Compared, common: int) -> Difference:
    return Difference(one, other, False, common, None, 0, 0, (), (), 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("one", "other", "common", "told"),
    [
        (
            side(" north. It goes", 2180, 2178),
            side(" north. It waits for", 2300, 2178),
            2178,
            ["both … ' north. It '", "- 'goes'", "+ 'waits for' …"],
        ),
        (side("Hi.", 3, None), side("Hi. You", 5, 3), 3, ["both 'Hi.'", "+ ' You'"]),
        (side("a", 1, 0), side("b", 1, 0), 0, ["- 'a'", "+ 'b'"]),
        (side(None, 1, 0), side(None, 1, 0), 0, []),
    ],
)
def test_the_common_beginning_stands_apart_and_ends_that_are_cut_say_so(
    one: Compared, other: Compared, common: int, told: list[str]
) -> None:
    assert [f"{sign} {text}" for sign, _, text in _texts(difference(one, other, common))] == told


def test_a_place_has_its_thousands_apart() -> None:
    assert _where(difference(side("a", 3000, 2178), side("b", 3000, 2178), 2178)) == "at token 2,178"
