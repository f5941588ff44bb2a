"""Two memories differ where their tokens do, by nothing else, and each fact beside them is told."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.api.difference import Difference, FactDiffers
from torpor.daemon.views import difference as module
from torpor.daemon.views.difference import Side, difference_of, side_of
from torpor.daemon.views.roles import ROOT, TEXT_MAP
from torpor.daemon.views.stored import SAMPLING
from torpor.daemon.views.words import Words
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI


class Tokenizer:
    """A token for each character; token 0 is a control token. shift: of the ids of another one."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return "".join("<|end|>" if token == self.shift else chr(token - self.shift) for token in tokens)


WORDS: dict[str | None, Words | None] = {
    "plain": Words(Tokenizer(), {0: "<|end|>"}, {}, 1 << 20),
    "shifted": Words(Tokenizer(7), {7: "<|end|>"}, {}, 1 << 20),
    "lost": None,
}


def side(text: str, *, tokenizer: str = "plain", session: Mapping[str, Any] | None = None, **facts: Any) -> Side:
    shift = 7 if tokenizer == "shifted" else 0
    ledger = array("I", (shift + (0 if each == "|" else ord(each)) for each in text))
    identity = {"tokenizer": tokenizer, "weights": tokenizer}
    made = Side(
        "a",
        1,
        "ab" * 32,
        "m",
        (),
        False,
        len(ledger),
        identity,
        session or {},
        (),
        lambda start, end: ledger[start:end],
    )
    return replace(made, **facts)


def differ(one: Side, other: Side, *, by_token: bool = False) -> Difference:
    return difference_of(one, other, lambda part, _: WORDS[part], by_token=by_token)


def test_where_two_ledgers_part_is_told_with_both_texts_the_cause_and_the_lines() -> None:
    said = "user\nIs it late?|assistant\nYes.|user\n"
    found = differ(side(f"{said}It is 10:15.\nGo.|"), side(f"{said}It is 11:30.\nGo.|"))
    at = len(said) + len("It is 1")
    assert (found.common_tokens, found.one.differs_at, found.other.differs_at, found.cause) == (at, at, at, "clock")
    assert (found.one.text, found.other.text) == ("\nIt is 10:15.\nGo.<|end|>", "\nIt is 11:30.\nGo.<|end|>")
    assert found.lines == (
        "@@ -1,5 +1,5 @@",
        " user",
        " Is it late?<|end|>assistant",
        " Yes.<|end|>user",
        "-It is 10:15.",
        "+It is 11:30.",
        " Go.<|end|>",
    )
    assert (found.lines_added, found.lines_removed, found.lines_left_out, found.left_out_tokens) == (1, 1, 0, 0)
    by_token = differ(side("abcd"), side("abxd"), by_token=True)
    assert [line for line in by_token.lines if line[0] in "+-"] == ["-     99  'c'", "+    120  'x'"]


def test_where_one_goes_on_behind_the_other_both_have_the_text_before_it() -> None:
    found = differ(side("Once upon a time"), side("Once upon a time there was"))
    assert (found.one.text, found.other.text) == ("n a time", "n a time there was")
    same = differ(side("Once upon"), side("Once upon"))
    assert (same.one.text, same.other.text) == (None, None)


@given(st.text("ab|\n", max_size=40), st.text("ab|\n", max_size=40), st.text("ab|\n", max_size=40))
def test_what_is_in_common_is_the_longest_beginning_of_both(begin: str, one: str, other: str) -> None:
    found = differ(side(begin + one), side(begin + other))
    pairs = enumerate(zip(begin + one, begin + other, strict=False))
    common = next((at for at, (a, b) in pairs if a != b), min(len(begin + one), len(begin + other)))
    assert found.common_tokens == common
    assert found.one.differs_at == (common if common < len(begin + one) else None)
    assert found.other.differs_at == (common if common < len(begin + other) else None)
    assert found.is_none == (one == other)
    assert (found.lines == ()) == (one == other)
    assert (found.cause is None) == (None in (found.one.differs_at, found.other.differs_at))


def test_of_two_tokenizers_the_texts_are_compared_and_without_one_of_them_nothing_is_guessed() -> None:
    one, other = side("Hello\nworld"), side("Hello\nthere", tokenizer="shifted")
    found = differ(one, other)
    assert (found.by_text, found.common_tokens, found.one.differs_at, found.no_text) == (True, 6, 6, None)
    assert (found.one.text, found.other.text) == ("Hello\nworld", "Hello\nthere")
    assert [line for line in found.lines if line[0] in "+-"] == ["-world", "+there"]
    assert FactDiffers("identity", "weights", "plain", "shifted") in found.facts
    unknown = differ(one, replace(other, identity={"tokenizer": "lost"}))
    assert (unknown.common_tokens, unknown.lines, unknown.one.text) == (0, (), None)
    assert unknown.no_text is not None
    assert "is not at hand" in unknown.no_text


def test_without_a_tokenizer_ids_are_compared() -> None:
    found = differ(side("abc", tokenizer="lost"), side("abd", tokenizer="lost"))
    assert (found.common_tokens, found.by_text, found.one.text, found.cause) == (2, False, None, None)
    assert [line for line in found.lines if line[0] in "+-"] == ["-99", "+100"]


def test_what_differs_beside_the_tokens_is_told_fact_by_fact() -> None:
    tools = [{"name": "find", "description": "x" * 300}, {"name": "read"}]
    changed = [{"name": "find", "description": "x" * 290 + "y" * 10}, {"name": "write"}]
    one = {SAMPLING: {"seed": 1, "top_k": 5}, "system": "Be brief.", ROOT: json.dumps({"tools": tools})}
    said = {TEXT_MAP: {"system": "Be long."}, SAMPLING: {"seed": 1, "top_k": 6}}
    found = differ(
        side("a", session=one, labels=("x", "y")),
        side("a", session={**said, ROOT: json.dumps({"tools": changed, "arguments": {"think": True}})}),
    )
    told = {(fact.kind, fact.name): (fact.one, fact.other) for fact in found.facts}
    find = told.pop(("tools", "find"))
    assert told == {
        ("sampling", "top_k"): ("5", "6"),
        ("system", "text"): ("Be brief.", "Be long."),
        ("tools", "read"): ('{"name": "read"}', None),
        ("tools", "write"): (None, '{"name": "write"}'),
        ("template", "think"): (None, "true"),
        ("labels", "labels"): ("x y", None),
    }
    assert (find[0] or "").endswith('xxxxxxxxxx", "name": "find"}')
    assert (find[1] or "").startswith("…x")
    assert found.is_none


def test_a_long_diff_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPARED_TOKENS", 1000)
    monkeypatch.setattr(module, "_COMPARED_LINES", 40)
    monkeypatch.setattr(module, "_MOST_LINES", 30)
    monkeypatch.setattr(module, "_MOST_CHARS", 9)
    found = differ(side("a" * 20 + "\nx" * 600), side("b" * 20 + "\ny" * 600))
    assert (len(found.lines), found.lines[1], found.left_out_tokens) == (30, "-aaaaaaaa…", 2 * (1220 - 1000))
    assert found.lines_added == found.lines_removed == 40
    assert found.lines_left_out == (1 + 80 - 30) + 2 * (491 - 40)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "opened", writable=True) as store:
        yield store


def test_two_versions_are_read_from_behind_the_blocks_that_both_have(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = making.sleep(opened, 6000)
    making.sleep(opened, 6400, before=first)
    making.sleep(opened, 6300, uri=OTHER_URI, seed=0, before=first)
    monkeypatch.setitem(WORDS, None, None)
    rows = [opened.resolve_version(text) for text in ("agent@2", "other", "agent@1")]
    with opened.open_bundle(rows[0].bundle_id) as one, opened.open_bundle(rows[1].bundle_id) as other:
        sides = [side_of(one, rows[0], None), side_of(other, rows[1], None)]
        asked: list[int] = []
        watched = replace(sides[0], read=lambda start, end: asked.append(start) or sides[0].read(start, end))  # type: ignore[func-returns-value]
        found = differ(watched, sides[1])
        assert min(asked) == 6144 - module.MESSAGE_TOKENS
        assert (found.common_tokens, found.one.differs_at, found.other.differs_at) == (6300, 6300, None)
        assert found.common_blocks == 24
        assert (found.one.alone_blocks, found.other.alone_blocks) == (2, 2)
        up_to = differ(side_of(one, rows[0], 6100), sides[1])
        assert (up_to.one.token_count, up_to.one.differs_at, up_to.other.differs_at) == (6100, None, 6100)


def test_a_side_that_cannot_be_read_whole_is_compared_as_far_as_it_can_be(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = making.sleep(opened, 300)
    making.sleep(opened, 700, before=first)
    monkeypatch.setitem(WORDS, None, None)
    rows = [opened.resolve_version(text) for text in ("agent@1", "agent@2")]
    with (
        making.away(making.pack_of(opened, first)),
        opened.open_bundle(rows[0].bundle_id) as one,
        opened.open_bundle(rows[1].bundle_id) as other,
    ):
        found = differ(side_of(one, rows[0], None), side_of(other, rows[1], None))
    assert [problem.code for problem in found.problems] == ["block_missing"] * 2
    assert "Tokens 0 to 256 of version 1" in found.problems[0].message
    assert found.common_tokens == 256
