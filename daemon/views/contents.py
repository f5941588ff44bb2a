"""What a ledger says: a page of its tokens with their roles and their text.

Two steps, for they wait for different things: `page_of` reads a version's blocks, `told` gives the page its text, by
whatever tokenizer there is.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from ...memvid.answers import Finding, VersionInfo
from ...memvid.errors import StoreError
from ...memvid.format.manifest import Manifest
from ...memvid.store import Store
from ...memvid.writing.reader import BundleReader
from ..api.contents import Contents, Passage
from ..api.limits import MAX_PAGE_TOKENS
from .roles import TEXT, RoleSpan, role_spans
from .words import TOKENIZER

_LEAD_TOKENS: Final = 8
"""Before a page: how a token is written may depend on those before it."""

_MOST_BACK: Final = 4
"""Tokens that a page gives back where its last character is not whole: UTF-8 has at most four bytes."""

_MOST_VALUES: Final = 20_000
_MOST_ITEMS: Final = 1_000
_MOST_CHARS: Final = 4_096
"""Of a manifest that is shown: values in all, items of one list or map, characters of one text."""

Decode = Callable[[Sequence[int]], str]
Opens = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Span:
    """Which tokens of a ledger are asked for, at most `most` of them. end: None for its end. tokens: each with its
    text."""

    start: int = 0
    end: int | None = None
    most: int = MAX_PAGE_TOKENS
    tokens: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A page without its text. tokenizer: the part of the identity; None if nothing tells it. lead: the tokens before
    it, some of them."""

    contents: Contents
    tokenizer: str | None
    lead: Sequence[int]
    tokens: Sequence[int]
    spans: Sequence[RoleSpan]
    each: bool


def page_of(store: Store, row: VersionInfo, span: Span) -> Page:
    """A page of a stored version. Raises the errors of a manifest that is missing or damaged."""
    with store.open_session(row.uri, row.bundle_id) as reader:
        manifest = reader.manifest
        start, end, stop = _bounds(span, manifest.token_count)
        problems: list[Finding] = []
        tokens = tokens_of(reader, start, end, problems)
        if problems:  # as many as are there; else nothing, up to behind what is damaged
            end = start + len(tokens) if tokens else _behind_gap(reader, start, end)
            problems = [] if tokens else problems
        page = Contents(
            session=row.session,
            version=row.version,
            bundle_id=row.bundle_id,
            parent=row.parent,
            model=row.model,
            labels=row.labels,
            created_ns=row.created_ns,
            token_count=manifest.token_count,
            unread_tokens=manifest.unread_tokens,
            lossy=row.lossy,
            changed=False,
            has_roles=False,
            start=start,
            end=end,
            following=end if end < stop else None,
            problems=tuple(problems),
        )
        spans = role_spans(manifest.session, manifest.token_count)
        part = dict(manifest.identity.parts).get(TOKENIZER)
        lead = tokens_of(reader, max(0, start - _LEAD_TOKENS), start, [])
        return _page(page, part, lead, tokens, spans, span)


def page_of_ledger(
    facts: Contents, tokenizer: str | None, ledger: Sequence[int], session: Mapping[str, Any], span: Span
) -> Page:
    """A page of a ledger in memory. facts: of its session; their span counts nothing. session: as of a session map."""
    start, end, stop = _bounds(span, len(ledger))
    page = replace(facts, start=start, end=end, following=end if end < stop else None)
    lead, spans = ledger[max(0, start - _LEAD_TOKENS) : start], role_spans(session, len(ledger))
    return _page(page, tokenizer, lead, ledger[start:end], spans, span)


def told(page: Page, decode: Decode | None, why_not: str = "") -> Contents:
    """The page with its text. decode: by the tokenizer of its identity; None without one, and why_not says why."""
    contents = replace(page.contents, tokens=tuple(page.tokens) if page.each or decode is None else ())
    if decode is None:
        passages = tuple(_passages(page, len(page.tokens), lambda _start, _end: None))
        return replace(contents, passages=passages, no_text=why_not)
    count = _whole_characters(page, decode)
    if count < len(page.tokens):
        contents = replace(contents, end=contents.start + count, following=contents.start + count)

    def text(start: int, end: int) -> str:
        before = [*page.lead, *page.tokens[:start]][-_LEAD_TOKENS:]
        return _behind(before, page.tokens[start:end], decode)

    contents = replace(contents, passages=tuple(_passages(page, count, text)))
    if not page.each:
        return contents
    texts = tuple(_each(page.lead, page.tokens[:count], decode))
    return replace(contents, tokens=contents.tokens[:count], token_texts=texts)


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a passage: its role, and its words as they stand in the text."""

    role: str
    words: str


def apart(passage: Passage, tokens: Sequence[int], said: Sequence[Said], decode: Decode, opens: Opens) -> list[Passage]:
    """A passage of several messages as one for each: a message begins with the first control token behind the words
    before it that opens something. As it is, if that is not between its words and those. tokens: of the passage. opens:
    whether a token is such a one."""
    text, cuts, at = passage.text or "", list[tuple[int, int]](), 0
    places = _places(tokens, decode, opens)
    if "".join(part for _, part in places) != text or not all(each.words for each in said):
        return [passage]
    chars = list(accumulate((len(part) for _, part in places), initial=0))
    for before, behind in pairwise(said):
        ends = text.find(before.words, at) + len(before.words)
        begins = text.find(behind.words, ends)
        cut = next((number for number, char in enumerate(chars[:-1]) if ends <= char < begins and number), None)
        if ends < len(before.words) or cut is None:
            return [passage]
        cuts.append((places[cut][0], chars[cut]))
        at = ends
    if text.find(said[-1].words, at) < 0:
        return [passage]
    bounds = [(0, 0), *cuts, (len(tokens), len(text))]
    roles = [said[0].role if "tools" not in passage.role.split("+") else f"tools+{said[0].role}"]
    roles += [each.role for each in said[1:]]
    first = passage.start
    return [
        Passage(first + one[0], first + two[0], role, first + one[0], first + two[0], text[one[1] : two[1]])
        for role, (one, two) in zip(roles, pairwise(bounds), strict=True)
    ]


def _places(tokens: Sequence[int], decode: Decode, opens: Opens) -> list[tuple[int, str]]:
    """The text from the first token on, and from each that opens something, with its place."""
    starts = [0, *(at for at, token in enumerate(tokens) if at and opens(token))]
    return [(one, decode(tokens[one:two])) for one, two in pairwise([*starts, len(tokens)])]


def manifest_text(manifest: Manifest) -> str:
    """A manifest as JSON. Long texts and lists are cut, and say how much was."""
    blocks = [
        {"id": entry.id.hex(), "kind": entry.kind, "start": entry.start, "tokens": entry.token_count}
        | {"raw_bytes": entry.raw_bytes}
        for entry in manifest.blocks[: _MOST_ITEMS + 1]
    ]
    left = len(manifest.blocks) - _MOST_ITEMS
    values = _Shown()
    document = {
        "uri": str(manifest.uri),
        "version": manifest.version,
        "parent": manifest.parent,
        "created_ns": manifest.created_ns,
        "block_tokens": manifest.block_tokens,
        "unread_tokens": manifest.unread_tokens,
        "identity": dict(manifest.identity.parts),
        "environment": dict(manifest.environment),
        "session": values.of(manifest.session),
        "blocks": blocks[:_MOST_ITEMS],
        **({"blocks_left_out": left} if left > 0 else {}),
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


# --- tokens


def _bounds(span: Span, token_count: int) -> tuple[int, int, int]:
    """Where the page begins and ends, and where what was asked for ends."""
    stop = token_count if span.end is None else min(span.end, token_count)
    start = min(span.start, stop)
    return start, min(stop, start + span.most), stop


def _page(
    page: Contents,
    tokenizer: str | None,
    lead: Sequence[int],
    tokens: Sequence[int],
    spans: Sequence[RoleSpan],
    span: Span,
) -> Page:
    return Page(replace(page, has_roles=bool(spans)), tokenizer, lead, tokens, spans, span.tokens)


def tokens_of(reader: BundleReader, start: int, end: int, problems: list[Finding]) -> array[int]:
    """Tokens of a version, up to the first that cannot be read; what is wrong there goes to `problems`."""
    found, manifest = array("I"), reader.manifest
    for entry in reader.entries:
        if entry.kind != "span" or entry.end <= start or entry.start >= end:
            continue
        try:
            ids = array("I", reader.read_header(entry).tokens)
        except StoreError as error:
            problems.append(_finding(error, reader, entry.start, entry.end))
            return found
        found += ids[max(0, start - entry.start) : end - entry.start]
    if end > manifest.block_tokens:
        tail = array("I", manifest.tail)
        found += tail[max(0, start - manifest.block_tokens) : end - manifest.block_tokens]
    return found


def _behind_gap(reader: BundleReader, start: int, end: int) -> int:
    """The end of the block that cannot be read, at most of the page."""
    ends = (entry.end for entry in reader.entries if entry.kind == "span" and entry.end > start)
    return min(next(ends, end), end)


def _finding(error: StoreError, reader: BundleReader, start: int, end: int) -> Finding:
    owner = reader.manifest
    message = f"Tokens {start} to {end} of version {owner.version} of {owner.uri} cannot be read. {error.message}"
    return Finding(reader.path, error.code, message, str(owner.uri), owner.version)


# --- text


def _passages(page: Page, count: int, text: Callable[[int, int], str | None]) -> Iterator[Passage]:
    """The passages of the first tokens of a page. text: of some of them, by their places in it."""
    start = page.contents.start
    end = start + count
    for begins, ends, role in page.spans or ((0, page.contents.token_count, TEXT),):
        first, last = max(begins, start), min(ends, end)
        if first < last:
            yield Passage(first, last, role, begins, ends, text(first - start, last - start))


def _whole_characters(page: Page, decode: Decode) -> int:
    """How many tokens of a page end with a whole character, where others follow."""
    count = len(page.tokens)
    if page.contents.following is None or count <= _MOST_BACK:
        return count
    for end in range(count, count - _MOST_BACK, -1):
        if not decode(page.tokens[max(0, end - _LEAD_TOKENS) : end]).endswith("\N{REPLACEMENT CHARACTER}"):
            return end
    return count  # the bytes are no text


def _behind(before: Sequence[int], tokens: Sequence[int], decode: Decode) -> str:
    """The text of tokens behind others."""
    known, whole = decode(before), decode([*before, *tokens])
    return whole[len(known) :] if whole.startswith(known) else decode(tokens)


def _each(lead: Sequence[int], tokens: Sequence[int], decode: Decode) -> Iterator[str]:
    """The text of each token. A character of several tokens is told with the last of them."""
    ids = [*lead, *tokens]
    begin, done = max(0, len(lead) - _LEAD_TOKENS), len(lead)
    for at in range(len(lead), len(ids)):
        known, whole = decode(ids[begin:done]), decode(ids[begin : at + 1])
        is_last = at + 1 == len(ids)
        if whole.endswith("\N{REPLACEMENT CHARACTER}") and at - done < _MOST_BACK and not is_last:
            yield ""
            continue
        yield whole[len(known) :] if whole.startswith(known) else decode(ids[done : at + 1])
        begin, done = done, at + 1


class _Shown:
    """Values of a session map for a reader: bounded, and bytes as hex."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, value: Any) -> Any:
        self._left -= 1
        if isinstance(value, Mapping):
            shown = {str(name)[:_MOST_CHARS]: self.of(each) for name, each in self._some(list(value.items()))}
            return shown | ({"left out": len(value) - len(shown)} if len(shown) < len(value) else {})
        if isinstance(value, list | tuple):
            items = [self.of(each) for each in self._some(value)]
            return [*items, f"… {len(value) - len(items)} more"] if len(items) < len(value) else items
        if isinstance(value, bytes):
            return value.hex() if len(value) <= 64 else f"{value[:32].hex()}… ({len(value)} bytes)"
        if isinstance(value, str) and len(value) > _MOST_CHARS:
            return f"{value[:_MOST_CHARS]}… ({len(value)} characters)"
        return value

    def _some(self, values: Sequence[Any]) -> Iterator[Any]:
        for each in values[:_MOST_ITEMS]:
            if self._left <= 0:
                return
            yield each
