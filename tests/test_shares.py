"""Each case of a test that is shared out is done at one of as many commits; a test that is not, at each of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torpor.tests import shares


class Item:
    """What is asked of a collected case."""

    def __init__(self, nodeid: str, one_in: int | None) -> None:
        self.nodeid = nodeid
        self._one_in = one_in
        self.marks: list[Any] = []

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "one_in"
        return None if self._one_in is None else pytest.Mark(name, (self._one_in,), {}, _ispytest=True)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def done_at(share: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(shares, "share", lambda: share)
    items: list[Any] = [Item(f"test.py::test_of_kinds_t11[{kind}]", 3) for kind in "abcdefg"]
    items += [Item("test.py::test_one_qc1_is", 2), Item("test.py::test_another", None), Item("test.py::test_plain", 2)]
    shares.leave_to_other_commits(items)
    assert all(item.marks in ([], ["heavy"]) for item in items)
    return [item.nodeid for item in items if not item.marks]


def test_each_case_is_done_at_one_of_as_many_commits_and_without_an_id_a_quarter_as_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = [done_at(share, monkeypatch) for share in range(40, 184)]
    counts = Counter(name for names in done for name in names)
    assert counts.pop("test.py::test_another") == 144
    assert counts.pop("test.py::test_one_qc1_is") == 12
    assert counts.pop("test.py::test_plain") == 3
    assert set(counts.values()) == {8}
    assert len(counts) == 7
    assert all(sum("of_kinds" in name for name in names) in (0, 1) for names in done)
