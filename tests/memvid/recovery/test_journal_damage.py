"""T5 for the journal: a store is opened with every bit of its journal flipped, every cut, and records out of place.

A damaged record costs its own turn at most, and that is told. In full it is minutes; `make test` does a share.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from torpor.memvid.folder import journal
from torpor.memvid.folder.store_file import load_store_uuid, open_existing_root
from torpor.memvid.format.journal import END_BYTES, HEADER_BYTES, JournalRecord, Key, scan
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import URI, ledger, sleep, token_ids, turn
from torpor.tests.shares import share

NEW, SLEPT, BACK, GONE = (SessionUri("work", name) for name in ("new", "slept", "back", "gone"))
SEEDS: Final = {URI: 0, NEW: 1, SLEPT: 2, BACK: 3, GONE: 4}
COUNTS: Final = {URI: 29, NEW: 9, SLEPT: 26, BACK: 12}
"""How many tokens each session has at the end. SLEPT has them in a version that covers its turns; BACK was put to sleep
with fewer than its turns had; GONE never slept, and was deleted."""

ONE_IN: Final = 307
"""Of the bits and cuts, a share tries every so-manieth."""


@dataclass
class Made:
    """A store as a SIGKILL leaves it, with turns in its journal. acknowledged: of each session, the counts of tokens
    that were acknowledged, oldest first. files: the journal behind each step."""

    path: Path
    acknowledged: dict[SessionUri, list[int]] = field(default_factory=dict)
    files: list[bytes] = field(default_factory=list)
    slept: list[dict[SessionUri, int]] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        return self.path / "journal" / journal.TURNS_FILE

    @property
    def data(self) -> bytes:
        return self.files[-1]

    def records(self) -> list[tuple[int, int, JournalRecord]]:
        """Where each record begins and ends."""
        root = open_existing_root(str(self.path))
        key = Key.read(self.data[:HEADER_BYTES], load_store_uuid(root, str(self.path)))
        found = scan(lambda start, count: self.data[start : start + count], len(self.data), key)
        return [(one.place, one.end, JournalRecord.decode(one.payload)) for one in found if one.payload]


def _history(store: Store, made: Made) -> Iterator[None]:
    def say(uri: SessionUri, tail: int) -> None:
        row = store.find_session(uri)
        store.acknowledge([turn(store, tail, uri=uri, seed=SEEDS[uri])])
        made.acknowledged.setdefault(uri, []).append((row.block_tokens if row else 0) + tail)

    def put(uri: SessionUri, count: int) -> None:
        sleep(store, count, uri=uri, seed=SEEDS[uri], layers=1, heads=1, dim=1)
        made.acknowledged.setdefault(uri, []).append(count)

    for uri in (URI, SLEPT, BACK):
        put(uri, 20)
    for uri, tail in ((URI, 3), (NEW, 4), (SLEPT, 6), (GONE, 5), (BACK, 7)):
        say(uri, tail)
        yield
    put(SLEPT, 26)
    yield
    store.delete_session(GONE)
    yield
    put(BACK, 12)
    yield
    for uri, tail in ((URI, 6), (NEW, 9), (URI, 9)):
        say(uri, tail)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("journal")
    made = Made(folder / "made")
    with pytest.MonkeyPatch.context() as patch, Store.open(folder / "store", writable=True) as store:
        patch.setattr(journal, "_STEP_BYTES", 8)  # little room behind the records, for each of its bits is tried
        patch.setattr(journal, "_MOST_STEP_BYTES", 0)
        for _ in _history(store, made):
            made.files.append((folder / "store" / "journal" / journal.TURNS_FILE).read_bytes())
            made.slept.append({row.uri: row.block_tokens for row in store.iter_sessions()})
        shutil.copytree(folder / "store", made.path, ignore=shutil.ignore_patterns("lock"))
    return made


def opened(made: Made, data: bytes, work: Path) -> tuple[dict[SessionUri, int], int]:
    """How many tokens each session has in a store that opens with this journal, and how much damage is told. The tokens
    are its own, and the next opening finds the same."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made.path, work)
    (work / "journal" / journal.TURNS_FILE).write_bytes(data)
    with Store.open(work, writable=True) as store:
        found, told = _counts(store), len(store.opening.journal)
    with Store.open(work, writable=True) as store:
        assert _counts(store) == found
        assert store.acknowledged() == []
    return found, told


def _counts(store: Store) -> dict[SessionUri, int]:
    return {row.uri: _count(store, row.uri) for row in store.iter_sessions()}


def _count(store: Store, uri: SessionUri) -> int:
    found = ledger(store, uri)
    assert found == token_ids(0, len(found) // 4, SEEDS[uri]), f"{uri} has tokens that are not its own"
    return len(found) // 4


def hit_by(made: Made, damaged: Iterable[int]) -> set[SessionUri]:
    """The sessions whose last record has a damaged byte."""
    last = {record.uri: range(start, end) for start, end, record in made.records()}
    damaged = set(damaged)
    return {uri for uri, place in last.items() if not damaged.isdisjoint(place)}


def require_no_other_lost(made: Made, found: dict[SessionUri, int], hit: set[SessionUri], what: object) -> None:
    """Each session is at its end, but those that are hit may be at what was acknowledged before it."""
    for uri, count in COUNTS.items():
        if uri not in hit:
            assert found.get(uri) == count, (what, uri)
        else:
            before = [0, *made.acknowledged[uri][:-1]] if uri in (URI, NEW) else [count]
            assert found.get(uri, 0) in (*before, count), (what, uri)
    assert found.keys() <= COUNTS.keys(), f"{what}: a deleted session is back"


def require_flips_told(made: Made, work: Path, bits: Iterable[int]) -> int:
    tried = 0
    for bit in bits:
        data = bytearray(made.data)
        data[bit // 8] ^= 1 << bit % 8
        found, told = opened(made, bytes(data), work)
        assert told, f"bit {bit} is flipped, and nobody is told"
        require_no_other_lost(made, found, hit_by(made, [bit // 8]), bit)
        tried += 1
    print(f"{tried} bits of a journal of {len(made.data)} bytes")
    return tried


def require_cuts_told(made: Made, work: Path, sizes: Iterable[int]) -> int:
    """Each cut, and the same with zeros in the place of the end, as a filesystem leaves what was never written: where a
    record ends, that is an earlier journal. In the zeros behind the last record nothing is cut off."""
    ends, tried = [end for _, end, _ in made.records()], 0
    untold = {made.data[:end].ljust(len(made.data), b"\0") for end in (HEADER_BYTES, *ends)}
    untold |= {made.data[:size] for size in range(ends[-1] + END_BYTES - 7, len(made.data))}
    for size in sizes:
        for data in (made.data[:size], made.data[:size].ljust(len(made.data), b"\0")):
            found, told = opened(made, data, work)
            hit = hit_by(made, range(size, ends[-1]))
            assert told or data in untold, f"cut at {size} of {len(made.data)}, and nobody is told"
            require_no_other_lost(made, found, hit, size)
            tried += 1
    print(f"{tried} cuts of a journal of {len(made.data)} bytes")
    return tried


@pytest.mark.one_in(1)
def test_t5_a_flipped_bit_of_a_journal_costs_the_turn_in_which_it_lies_at_most_and_is_told(
    made: Made, tmp_path: Path
) -> None:
    assert require_flips_told(made, tmp_path / "work", range(share() % ONE_IN, 8 * len(made.data), ONE_IN)) > 40


@pytest.mark.one_in(1)
def test_t5_a_cut_of_a_journal_costs_the_turns_behind_it_at_most_and_is_told(made: Made, tmp_path: Path) -> None:
    sizes = range(share() % ONE_IN, len(made.data), ONE_IN)
    places = {place + more for start, end, _ in made.records()[-2:] for place in (start, end) for more in (-1, 0, 1)}
    assert require_cuts_told(made, tmp_path / "work", sorted({0, HEADER_BYTES, *sizes, *places})) > 30


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_t5_in_full_every_bit_of_a_journal(made: Made, tmp_path: Path) -> None:
    assert require_flips_told(made, tmp_path / "work", range(8 * len(made.data))) >= 10_000


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_t5_in_full_every_cut_of_a_journal(made: Made, tmp_path: Path) -> None:
    assert require_cuts_told(made, tmp_path / "work", range(len(made.data))) >= 2_500


@pytest.mark.one_in(1)
def test_t5_a_void_record_that_is_damaged_brings_nothing_back_and_is_told(made: Made, tmp_path: Path) -> None:
    """A covered, a deleted and a taken back one: an eighth of the bits of its mark, and one of each part behind it."""
    tried = 0
    for start, end, record in made.records():
        if record.uri in (SLEPT, BACK, GONE):
            assert made.data[start : start + 4] == b"VOID"
            mark = range(8 * start + share() % 8, 8 * start + 32, 8)
            bits = [*mark, *(8 * byte for byte in (start + 5, start + 9, start + 20, end - 9))]
            tried += require_flips_told(made, tmp_path / "work", bits)
    assert tried == 3 * 8


@pytest.mark.one_in(1)
def test_t5_records_in_another_order_or_place_do_not_count_and_are_told(made: Made, tmp_path: Path) -> None:
    """Every two neighbours changed, each record but the last left out (without that it is an earlier journal), and each
    played again at the end."""
    records = made.records()
    parts = [made.data[start:end] for start, end, _ in records]
    head, rest = made.data[:HEADER_BYTES], made.data[records[-1][1] :]
    numbers = range(len(parts) - 1)
    changed = [(parts[:one] + parts[one + 1 :], one) for one in numbers]
    changed += [([*parts[:one], parts[one + 1], parts[one], *parts[one + 2 :]], one) for one in numbers]
    changed += [([*parts, part], len(parts)) for part in parts]
    for other, first in changed:
        found, told = opened(made, head + b"".join(other) + rest, tmp_path / "work")
        assert told, first
        require_no_other_lost(made, found, {record.uri for _, _, record in records[first:]}, first)
    assert len(changed) == 3 * len(parts) - 2 == 22


@pytest.mark.one_in(1)
def test_an_earlier_journal_in_the_place_of_the_newer_one_costs_what_came_later_and_no_version(
    made: Made, tmp_path: Path
) -> None:
    """It cannot be told from the newer one. What is in versions stays, and no session has tokens that are not its own;
    of what was deleted only a session that never slept can come back."""
    for at, (data, told_then) in enumerate(itertools.zip_longest(made.files, made.slept)):
        found, _ = opened(made, data, tmp_path / "work")
        assert found.get(GONE) in (None, 5)
        assert found[SLEPT] == 26
        assert found[BACK] == 12
        assert found[URI] in made.acknowledged[URI]
        assert found[URI] >= told_then.get(URI, 0)
        assert found.get(NEW, 0) in (0, *made.acknowledged[NEW]), at


def test_a_journal_of_another_store_with_the_same_sessions_changes_none_and_is_told(made: Made, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other", writable=True) as store:
        other = Made(tmp_path / "other")
        for _ in _history(store, other):
            data = other.journal.read_bytes()
    found, told = opened(made, data, tmp_path / "work")
    assert told
    assert found == {URI: 20, SLEPT: 26, BACK: 12}
    assert any(path.read_bytes() == data for path in (tmp_path / "work" / "damaged").iterdir())
