"""A ledger is told page by page, and the pages together are what the model saw, whatever is missing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.contents import Contents, Passage
from torpor.daemon.views.contents import Page, Said, Span, apart, manifest_text, page_of, page_of_ledger, told
from torpor.daemon.views.roles import TEXT_MAP, TURN_LINE
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import URI

TEXT = "Ein Würfel 🎲 fällt. " * 9
BYTES = list(TEXT.encode())
FACTS = Contents("torpor://default/a", 1, "ab" * 32, None, "m", (), 1, len(BYTES), 0, None, False, False, 0, 0, None)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "opened", writable=True) as store:
        yield store


def decode(tokens: Sequence[int]) -> str:
    """A tokenizer with a token for each byte."""
    return bytes(tokens).decode(errors="replace")


def turns(*ends: tuple[int, int]) -> dict[str, object]:
    return {TEXT_MAP: {"version": 3, "turns": b"".join(TURN_LINE.pack(role, end, bytes(16)) for role, end in ends)}}


def pages(turn: Callable[[Span], Contents], span: Span) -> Iterator[Contents]:
    page = turn(span)
    yield page
    while page.following is not None:
        page = turn(Span(page.following, span.end, span.most, span.tokens))
        yield page


@pytest.mark.parametrize("most", [1, 2, 5, 7, 64, 1000])
def test_the_pages_together_are_the_text_and_so_are_its_tokens(most: int) -> None:
    session = turns((1, 25), (2, 26), (1, 75))

    def turn(span: Span) -> Contents:
        return told(page_of_ledger(FACTS, "t", BYTES, session, span), decode)

    found = list(pages(turn, Span(most=most, tokens=True)))
    assert [token for page in found for token in page.tokens] == BYTES
    if most > 4:  # a page that holds less than a character cannot end with a whole one
        assert "".join(passage.text or "" for page in found for passage in page.passages) == TEXT
        assert "".join(text for page in found for text in page.token_texts) == TEXT
    of_roles = {(each.role_start, each.role_end, each.role) for page in found for each in page.passages}
    assert of_roles == {(0, 25, "user"), (25, 26, "assistant"), (26, 75, "user"), (75, len(BYTES), "text")}


def test_without_a_tokenizer_its_ids_are_told_and_why() -> None:
    page = told(page_of_ledger(FACTS, "t", BYTES, {}, Span(3, 9)), None, "It is not here.")
    assert (page.tokens, page.token_texts, page.no_text) == (tuple(BYTES[3:9]), (), "It is not here.")
    assert [(each.start, each.end, each.role, each.text) for each in page.passages] == [(3, 9, "text", None)]
    assert (page.has_roles, page.following) == (False, None)


def test_bytes_that_are_no_text_end_no_page_early() -> None:
    page = told(page_of_ledger(FACTS, "t", [0xFF] * 20, {}, Span(most=10)), decode)
    assert (page.end, page.following, page.passages[0].text) == (10, 10, "\N{REPLACEMENT CHARACTER}" * 10)


def ids_of(page: Page) -> list[int]:
    return list(told(page, None).tokens)


def test_a_version_is_told_from_its_blocks_and_the_end_behind_them(opened: Store) -> None:
    making.sleep(opened, 600, unread=5)
    row = opened.resolve_version("agent")
    ledger = [*struct.unpack("<605I", making.token_ids(0, 605))]
    for span in (Span(), Span(250, 260), Span(599), Span(601, 604), Span(300, most=2), Span(700)):
        page = page_of(opened, row, span)
        stop = min(605, span.end or 605)
        assert ids_of(page) == ledger[span.start : min(stop, span.start + span.most)]
        assert list(page.lead) == ledger[max(0, page.contents.start - 8) : page.contents.start]
    assert page_of(opened, row, Span()).contents.unread_tokens == 5


def test_tokens_that_cannot_be_read_are_named_and_the_rest_is_told(opened: Store) -> None:
    first = making.sleep(opened, 600)
    making.sleep(opened, 700, before=first)
    row = opened.resolve_version("agent")
    ledger = [*struct.unpack("<700I", making.token_ids(0, 700))]
    with making.away(making.pack_of(opened, first)):
        found = list(pages(lambda span: told(page_of(opened, row, span), None), Span()))
        assert told(page_of(opened, row, Span()), decode).end == 256
    assert [(page.start, page.end, len(page.tokens)) for page in found] == [(0, 256, 0), (256, 512, 0), (512, 700, 188)]
    assert list(found[-1].tokens) == ledger[512:]
    for page in found[:2]:
        (problem,) = page.problems
        assert problem.message.startswith(f"Tokens {page.start} to {page.end} of version 2 of {URI} cannot be read.")
    assert found[-1].problems == ()


def test_a_manifest_is_shown_within_bounds(opened: Store) -> None:
    session = {"model": "m", "long": "x" * 5000, "many": list(range(2000)), "bytes": bytes(100), UNREAD: None}
    receipt = making.write(opened, making.drafts(300), 300, session=session)
    with opened.open_bundle(receipt.bundle_id) as reader:
        shown = json.loads(manifest_text(reader.manifest))
    assert (shown["uri"], shown["version"], shown["block_tokens"]) == (str(URI), 1, 300)
    assert [block["start"] for block in shown["blocks"]] == [0, 256, 300]
    assert shown["session"]["long"] == "x" * 4096 + "… (5000 characters)"
    assert shown["session"]["many"][-1] == "… 1000 more"
    assert shown["session"]["bytes"] == "00" * 32 + "… (100 bytes)"


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ((("system", "Be brief."), ("user", "Hi")), ["<s>Be brief.|\n", "<u>Hi|\n"]),
        ((("system", "Be brief."), ("user", "Hi there")), None),  # these are not its words
        ((("system", "Be"), ("user", "brief.")), None),  # nothing opens a message between them
        ((("system", "Be brief."), ("user", "")), None),
    ],
)
def test_messages_part_where_one_is_opened_between_the_words_of_two(said: Any, parts: list[str] | None) -> None:
    text = "<s>Be brief.|\n<u>Hi|\n"
    whole = Passage(100, 100 + len(text), "tools+system+user", 100, 100 + len(text), text)
    told = apart(whole, list(text.encode()), [Said(*each) for each in said], decode, lambda token: token == ord("<"))
    if parts is None:
        assert told == [whole]
        return
    at = 100 + len(parts[0])
    assert told == [
        Passage(100, at, "tools+system", 100, at, parts[0]),
        Passage(at, whole.end, "user", at, whole.end, parts[1]),
    ]
