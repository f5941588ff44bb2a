"""Ledgers side by side: how many first tokens they have in common. So it tells what a session holds at present: of the
version that it went on from as much as it still has, and what came since.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Protocol, Self

from ...memvid.answers import Finding, VersionInfo
from ...memvid.errors import StoreError
from ...memvid.format.blocks import TOKEN_BYTES, BlockEntry
from ...memvid.format.journal import JournalRecord
from ...memvid.format.manifest import tail_in
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ..api.blocks import RestPlace, Stretch
from .contents import tokens_of

_COMPARED_AT_ONCE: Final = 4_096


class Ledger(Protocol):
    """count: its tokens. entries: blocks that hold first ones of them, in their order. read: its tokens from one place
    to another, up to the first that cannot be read."""

    @property
    def count(self) -> int: ...
    @property
    def entries(self) -> Sequence[BlockEntry]: ...
    @property
    def read(self) -> Callable[[int, int], array[int]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainLedger:
    """As `Ledger`. problems: what could not be read of it."""

    count: int
    entries: Sequence[BlockEntry]
    read: Callable[[int, int], array[int]]
    problems: list[Finding] = field(default_factory=list)

    @classmethod
    def of_version(cls, reader: BundleReader) -> Self:
        """It is read while its reader is open."""
        problems = list[Finding]()
        return cls(
            reader.manifest.token_count,
            reader.entries,
            lambda start, end: tokens_of(reader, start, end, problems),
            problems,
        )


def common_tokens(one: Ledger, other: Ledger) -> int:
    """How many first tokens two ledgers of one tokenizer have in common, as far as both can be read."""
    at, most = tokens_in_common_blocks(one, other), min(one.count, other.count)
    while at < most:
        end = min(most, at + _COMPARED_AT_ONCE)
        alike = begin_alike(one.read(at, end), other.read(at, end))
        at += alike
        if at < end:
            break
    return at


def tokens_in_common_blocks(one: Ledger, other: Ledger) -> int:
    """How many first tokens stand in blocks that both have."""
    same = takewhile(lambda pair: pair[0].id == pair[1].id, zip(_spans(one), _spans(other), strict=False))
    return min([one.count, other.count, max((entry.end for entry, _ in same), default=0)])


def _spans(ledger: Ledger) -> list[BlockEntry]:
    return [entry for entry in ledger.entries if entry.kind == "span"]


def begin_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How far two ledgers, or texts, begin alike: by halves, for they are compared faster whole than one by one."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


# --- what a session holds


@dataclass(frozen=True, slots=True)
class Present:
    """What a session holds at present, or what a version of it holds.

    row: the version that it goes on from. common: how many first tokens of that it has. in_journal: where what the
    journal has of it ends. end: all its tokens.
    """

    row: VersionInfo
    common: int
    in_journal: int
    end: int

    @classmethod
    def of_version(cls, row: VersionInfo) -> Self:
        return cls(row, row.token_count, 0, row.token_count)

    @classmethod
    def of_ledger(cls, store: Store, row: VersionInfo, ledger: Ledger, in_journal: int) -> Self:
        """A ledger that goes on from a version. Raises the errors of a manifest that is missing or damaged."""
        with store.open_session(row.uri, row.bundle_id) as reader:
            common = common_tokens(ledger, PlainLedger.of_version(reader))
        return cls(row, common, in_journal, ledger.count)

    def needs(self, block: BlockEntry) -> bool:
        """Whether it has something of a block of the version."""
        return block.start < self.common or block.end <= self.common

    def stretches(self) -> Iterator[Stretch]:
        """What has no block of the version, in the order of the ledger."""
        at = min(self.row.block_tokens, self.common)
        ends: dict[RestPlace, int] = {
            "ledger": self.common,
            "journal": min(self.in_journal, self.end),
            "memory": self.end,
        }
        for place, end in ends.items():
            if end > at:
                yield Stretch(at, end, place)
                at = end


def present_in_files(store: Store, uri: SessionUri) -> Present:
    """What the files have of a session: its newest version, or what the journal has since. Raises SessionNotFound,
    JournalWaits, and the errors of a damaged manifest."""
    newest, turns = store.require_session(uri), _turns_of(store, uri)
    if turns is None:
        return Present.of_version(newest)
    row, held, tail = _row_of(store, turns.base, newest), turns.held, array("I", tail_in(turns.session))
    with store.open_session(row.uri, row.bundle_id) as reader:
        entries = [entry for entry in reader.entries if entry.end <= held and row.bundle_id == turns.base]
    ledger = PlainLedger(
        held + len(tail),
        entries,
        lambda start, end: tail[start - held : end - held] if start >= held else array("I"),
    )
    return Present.of_ledger(store, row, ledger, ledger.count)


def present_awake(store: Store, newest: VersionInfo, base: str | None, ledger: Ledger) -> Present:
    """What an awake session holds. newest: its newest version. base: the bundle id of the one that it goes on from; one
    that is gone counts as the newest. Raises the errors of a damaged manifest."""
    turns = _turns_of(store, newest.uri)
    in_journal = 0 if turns is None else turns.held + len(tail_in(turns.session)) // TOKEN_BYTES
    return Present.of_ledger(store, _row_of(store, base, newest), ledger, in_journal)


def _turns_of(store: Store, uri: SessionUri) -> JournalRecord | None:
    with contextlib.suppress(StoreError):  # a damaged journal is told of elsewhere
        return store.acknowledged_turns(uri)
    return None


def _row_of(store: Store, bundle_id: str | None, newest: VersionInfo) -> VersionInfo:
    return newest if bundle_id is None else store.index.rows_of([bundle_id]).get(bundle_id, newest)
