"""How two memories differ: in their tokens and text, in their blocks, and in what stands beside them.

Where both have one tokenizer, tokens are compared, from behind the blocks that both have; else the texts.
"""

from __future__ import annotations

import difflib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, Final

from ...memvid.answers import Finding, VersionInfo
from ...memvid.format.blocks import BlockEntry
from ...memvid.writing.reader import BundleReader
from ..api.difference import Compared, Difference, FactDiffers, Kind
from .contents import tokens_of
from .ledgers import begin_alike, tokens_in_common_blocks
from .roles import ROOT, TEXT_MAP
from .stored import BACKEND, SAMPLING
from .why import BEFORE_TOKENS, BEHIND_TOKENS, MESSAGE_TOKENS, Detokenizer, explain
from .words import TOKENIZER, Words, why_no_words

_COMPARED_TOKENS: Final = 32_768
"""Of each side behind the place where they part: what the diff is made of."""

_COMPARED_LINES: Final = 4_000
"""Of each side: to compare lines takes time that may grow as their square."""

_MOST_LINES: Final = 2_000
"""Of a diff that is told."""

_MOST_CHARS: Final = 2_000
"""Of one line of it."""

_FACT_CHARS: Final = 160
_MOST_FACTS: Final = 200
_CONTEXT_LINES: Final = 3
_CONTEXT_TOKENS: Final = 256
"""Before the place, in which the lines of context are looked for."""

_DECODED_AT_ONCE: Final = 4_096

FindWords = Callable[[str | None, str], Words | None]
"""The tokenizer of a part of an identity, for a model of that name."""


@dataclass(frozen=True, eq=False)
class Side:
    """A ledger to compare. count: its tokens, or those up to a place. session: the session map. read: its tokens from
    one place to another, as far as they can be read."""

    name: str
    version: int | None
    bundle_id: str | None
    model: str
    labels: Sequence[str]
    changed: bool
    count: int
    identity: Mapping[str, str]
    session: Mapping[str, Any]
    entries: Sequence[BlockEntry]
    read: Callable[[int, int], array[int]]
    problems: list[Finding] = field(default_factory=list)


def side_of(reader: BundleReader, row: VersionInfo, token: int | None) -> Side:
    """A stored version, up to a place; it is read while its reader is open."""
    manifest, problems = reader.manifest, list[Finding]()
    return Side(
        name=row.session,
        version=row.version,
        bundle_id=row.bundle_id,
        model=row.model,
        labels=row.labels,
        changed=False,
        count=min(manifest.token_count, token or manifest.token_count),
        identity=dict(manifest.identity.parts),
        session=manifest.session,
        entries=reader.entries,
        read=lambda start, end: tokens_of(reader, start, end, problems),
        problems=problems,
    )


def difference_of(one: Side, other: Side, find: FindWords, *, by_token: bool = False) -> Difference:
    """How two memories differ. by_token: the diff is one of tokens, and not of lines of text."""
    words = [find(side.identity.get(TOKENIZER), side.model) for side in (one, other)]
    known = [each for each in words if each is not None]
    same = one.identity.get(TOKENIZER) == other.identity.get(TOKENIZER)
    if same:
        parted = _parted_tokens(one, other, words[0], by_token=by_token)
    else:
        parted = _parted_texts(one, other, known[0], known[1]) if len(known) == 2 else _UNKNOWN
    lines, uncompared = _diff(one, other, parted.lines)
    alone, common = _blocks(one, other)
    told = [line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}…" for line in lines[:_MOST_LINES]]
    model = next((side.model for side, each in zip((one, other), words, strict=True) if each is None), None)
    return Difference(
        one=_compared(one, parted, 0, alone[0]),
        other=_compared(other, parted, 1, alone[1]),
        by_text=not same,
        common_tokens=parted.places[0],
        cause=parted.cause,
        common_blocks=len(common),
        common_bytes=sum(common),
        facts=tuple(islice(_facts(one, other), _MOST_FACTS)),
        lines=tuple(told),
        lines_added=sum(line.startswith("+") for line in lines),
        lines_removed=sum(line.startswith("-") for line in lines),
        lines_left_out=len(lines) - len(told) + uncompared,
        left_out_tokens=parted.left_out_tokens,
        no_text=None if model is None else why_no_words(model),
        problems=(*one.problems, *other.problems),
    )


def _compared(side: Side, parted: _Parted, which: int, alone: Sequence[int]) -> Compared:
    place = parted.places[which]
    return Compared(
        session=side.name,
        version=side.version,
        bundle_id=side.bundle_id,
        model=side.model,
        changed=side.changed,
        token_count=side.count,
        differs_at=place if place < side.count else None,
        text=parted.around[which],
        alone_blocks=len(alone),
        alone_bytes=sum(alone),
    )


# --- where they part


@dataclass(frozen=True)
class _Parted:
    """places: the first token of each that the other has not; its count where there is none. around: the text there.
    lines: of each, from a little before on. left_out_tokens: those that no line has."""

    places: tuple[int, int]
    around: tuple[str | None, str | None]
    cause: str | None
    lines: tuple[list[str], list[str]]
    left_out_tokens: int


_UNKNOWN: Final = _Parted((0, 0), (None, None), None, ([], []), 0)
"""Of two tokenizers that are not both at hand."""


def _parted_tokens(one: Side, other: Side, words: Words | None, *, by_token: bool) -> _Parted:
    """Where two ledgers of one tokenizer part."""
    same_to = tokens_in_common_blocks(one, other)
    begin = max(0, same_to - MESSAGE_TOKENS)
    ledgers = [side.read(begin, side.count) for side in (one, other)]
    at = begin_alike(*ledgers)
    around: tuple[str | None, str | None] = (None, None)
    cause: str | None = None
    if words is not None and at < min(map(len, ledgers)):
        told = explain(ledgers[0], ledgers[1], at, Detokenizer(words.decode, frozenset(words.controls)))
        around, cause = (told.expected_text, told.found_text), told.cause
    elif words is not None:
        around = _around(ledgers, (at, at), (words, words))
    tails = [ledger[max(0, at - _CONTEXT_TOKENS) : at + _COMPARED_TOKENS] for ledger in ledgers]
    lines = _lines_of(tails[0], words, by_token=by_token), _lines_of(tails[1], words, by_token=by_token)
    left_out = sum(max(0, len(ledger) - at - _COMPARED_TOKENS) for ledger in ledgers)
    place = max(begin + at, same_to)  # where what both have cannot be read, it is the same for all that
    return _Parted((place, place), around, cause, lines, left_out)


def _around(
    ledgers: Sequence[Sequence[int]], places: tuple[int, int], words: tuple[Words, Words]
) -> tuple[str | None, str | None]:
    """The texts around the place where two ledgers part; None where neither goes on behind it."""
    if all(at >= len(ledger) for ledger, at in zip(ledgers, places, strict=True)):
        return None, None
    one, other = (
        each.decode(ledger[max(0, at - BEFORE_TOKENS) : at + BEHIND_TOKENS])
        for ledger, at, each in zip(ledgers, places, words, strict=True)
    )
    return one, other


def _parted_texts(one: Side, other: Side, of_one: Words, of_other: Words) -> _Parted:
    """The same of two tokenizers, by their texts."""
    ledgers = one.read(0, one.count), other.read(0, other.count)
    texts = ["".join(_text_in_pieces(*each)) for each in zip(ledgers, (of_one, of_other), strict=True)]
    at = begin_alike(*texts)
    places = _token_at(ledgers[0], of_one, at), _token_at(ledgers[1], of_other, at)
    around = _around(ledgers, places, (of_one, of_other))
    begin = texts[0].rfind("\n", 0, max(0, at - _CONTEXT_TOKENS)) + 1
    tails = [text[begin : at + _COMPARED_TOKENS].split("\n") for text in texts]
    ends = [_token_at(*each, at + _COMPARED_TOKENS) for each in zip(ledgers, (of_one, of_other), strict=True)]
    left_out = sum(len(ledger) - end for ledger, end in zip(ledgers, ends, strict=True))
    return _Parted(places, around, None, (tails[0], tails[1]), left_out)


def _text_in_pieces(ledger: Sequence[int], words: Words) -> Iterator[str]:
    for at in range(0, len(ledger), _DECODED_AT_ONCE):
        yield words.decode(ledger[at : at + _DECODED_AT_ONCE])


def _token_at(ledger: Sequence[int], words: Words, char: int) -> int:
    """The first token whose text ends behind so many characters."""
    done = 0
    for at in range(0, len(ledger), _DECODED_AT_ONCE):
        piece = ledger[at : at + _DECODED_AT_ONCE]
        length = len(words.decode(piece))
        if done + length > char:
            low, high = 0, len(piece)
            while low < high:
                middle = (low + high) // 2
                low, high = (
                    (middle + 1, high) if done + len(words.decode(piece[: middle + 1])) <= char else (low, middle)
                )
            return at + low
        done += length
    return len(ledger)


# --- the diff


def _diff(one: Side, other: Side, sides: tuple[list[str], list[str]]) -> tuple[list[str], int]:
    """A unified diff of the lines of both, without its heading, and how many lines it has not compared."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))
    begin = max(0, alike - _CONTEXT_LINES)
    cut = [side[begin : begin + _COMPARED_LINES] for side in sides]
    lines = difflib.unified_diff(cut[0], cut[1], one.name, other.name, n=_CONTEXT_LINES, lineterm="")
    return list(lines)[2:], sum(len(side) - begin - len(kept) for side, kept in zip(sides, cut, strict=True))


def _lines_of(tokens: Sequence[int], words: Words | None, *, by_token: bool) -> list[str]:
    if words is None:
        return [str(token) for token in tokens]
    if by_token:
        return [f"{token:>7}  {words.decode([token])!r}" for token in tokens]
    return words.decode(tokens).split("\n")


# --- blocks and facts


def _blocks(one: Side, other: Side) -> tuple[tuple[list[int], list[int]], list[int]]:
    """The raw bytes of the blocks that each has alone, and of those in common."""
    sides = [{entry.id: entry.raw_bytes for entry in side.entries} for side in (one, other)]
    common = sides[0].keys() & sides[1].keys()
    alone = [[size for each, size in side.items() if each not in common] for side in sides]
    return (alone[0], alone[1]), [sides[0][each] for each in common]


def _facts(one: Side, other: Side) -> Iterator[FactDiffers]:
    """What differs beside the tokens."""
    yield from _of_kind("model", {"name": one.model}, {"name": other.model})
    yield from _of_kind("identity", one.identity, other.identity)
    for kind, key in (("backend", BACKEND), ("sampling", SAMPLING)):
        yield from _of_kind(kind, _map_in(one.session, key), _map_in(other.session, key))
    yield from _of_kind("system", {"text": _system(one)}, {"text": _system(other)})
    roots = [_root(side) for side in (one, other)]
    yield from _of_kind("tools", *(_tools(root) for root in roots))
    yield from _of_kind("template", *(_map_in(root, "arguments") for root in roots))
    yield from _of_kind("labels", {"labels": " ".join(one.labels) or None}, {"labels": " ".join(other.labels) or None})


def _of_kind(kind: Any, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[FactDiffers]:
    for name in sorted({*one, *other}):
        values = [_text(side.get(name)) for side in (one, other)]
        if values[0] != values[1]:
            known: Kind = kind
            yield FactDiffers(known, name[:_FACT_CHARS], *_parted(values[0], values[1]))


def _parted(one: str | None, other: str | None) -> tuple[str | None, str | None]:
    """Two values, of long ones where they differ."""
    start = 0
    if one is not None and other is not None and max(len(one), len(other)) > _FACT_CHARS:
        start = max(0, begin_alike(one, other) - _FACT_CHARS // 4)
    return _some(one, start), _some(other, start)


def _some(value: str | None, start: int) -> str | None:
    if value is None:
        return None
    shown = value[start : start + _FACT_CHARS]
    return f"{'…' if start else ''}{shown}{'…' if start + _FACT_CHARS < len(value) else ''}"


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=repr)


def _map_in(session: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = session.get(key)
    return {str(name): value for name, value in found.items()} if isinstance(found, Mapping) else {}


def _system(side: Side) -> str | None:
    said = _map_in(side.session, TEXT_MAP).get("system")
    text = side.session.get("system") or said
    return text if isinstance(text, str) else None


def _root(side: Side) -> Mapping[str, Any]:
    """What stands before the messages: tools and template arguments."""
    stored = side.session.get(ROOT)
    try:
        root = json.loads(stored) if isinstance(stored, str) else {}
    except (ValueError, RecursionError):
        root = {}
    return root if isinstance(root, dict) else {}


def _tools(root: Mapping[str, Any]) -> dict[str, Any]:
    tools = root.get("tools")
    return {
        str(tool.get("name")): tool for tool in (tools if isinstance(tools, list) else ()) if isinstance(tool, dict)
    }
