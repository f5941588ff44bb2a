"""Whatever is done to a store in whatever order, it holds what a dictionary of its versions holds (T7).

A machine of Hypothesis drives a real store through everything that it can do, and beside it a model that is a plain
dictionary: sleeps, forks, deletes, prunes, forgets, marks, compactions, repairs, imports, readers that stay open, a
second store that reads beside, clocks that jump, indexes that are lost or old, calls that fail and processes that end
at any call. `DamagedStore` changes bytes of bundle files too.

`make test` takes a bounded share with a fixed seed, `make test-all` at least 20,000 steps. A million, by night:

    TORPOR_MACHINE_STEPS=1000000 .venv/bin/python -m pytest -q -s tests/memvid/test_state_machine.py -m heavy
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, run_state_machine_as_test
from torpor.memvid import (
    BLOCK_TOKENS,
    BlockDraft,
    BlockEntry,
    BundleReader,
    CompactionPolicy,
    Receipt,
    SessionUri,
    SlotDraft,
    SlotSpec,
    Store,
    errors,
)
from torpor.memvid.folder.retention import EARLIEST_NS, Retention
from torpor.memvid.format.bundle import BundleFile, FrameFile
from torpor.memvid.format.layout import aligned
from torpor.memvid.format.records import Action, Finding, IndexRow, MaintenanceReport
from torpor.memvid.index.index import Index
from torpor.memvid.index.unknown_references import UNREADABLE_CODE
from torpor.memvid.recovery.repair import LOST
from torpor.tests.memvid import machine_mutants, store_making
from torpor.tests.memvid.store_making import IDENTITY, raw_bytes, token_ids

URIS = tuple(SessionUri("default", name) for name in ("agent", "fork", "other"))
TAGS = ("first", "second")
DAY_NS = 24 * 3600 * 10**9
YEAR_NS = 365 * DAY_NS
START_NS = 1_790_000_000 * 10**9
MAX_VERSIONS = 14
MEMORY = Path("/dev/shm")

any_number = st.integers(0, 255)
any_uri = st.sampled_from(URIS)


# --- what a session holds, as values


@dataclass(frozen=True, slots=True)
class Content:
    """A session as pairs (seed, tokens) of its spans, and the seed of the record at its end, if there is one."""

    spans: tuple[tuple[int, int], ...]
    state: int | None

    @property
    def token_count(self) -> int:
        return sum(count for _, count in self.spans)

    @property
    def full(self) -> int:
        """How many spans a next version may reuse."""
        return sum(count == BLOCK_TOKENS for _, count in self.spans)

    def drafts(self, first: int = 0) -> list[BlockDraft]:
        blocks = [
            _span(seed, number * BLOCK_TOKENS, count)
            for number, (seed, count) in enumerate(self.spans)
            if number >= first
        ]
        return blocks if self.state is None else [*blocks, store_making.state(self.token_count, seed=self.state)]

    def tokens(self) -> bytes:
        return b"".join(_span(seed, at * BLOCK_TOKENS, count).tokens for at, (seed, count) in enumerate(self.spans))

    def raw(self) -> list[list[bytes]]:
        return [[b"".join(slot.buffers) for slot in block.slots] for block in self.drafts()]


@functools.lru_cache(maxsize=4096)
def _span(seed: int, start: int, count: int) -> BlockDraft:
    """One slot of `count` bytes for keys and one for values; those of odd seeds compress."""
    slots = []
    for part in "kv":
        spec = SlotSpec(f"0.{part}", f"kv.{part}/1", "uint8", (1, count, 1))
        piece = raw_bytes(2 if seed % 2 else count, seed, part, start)
        slots.append(SlotDraft(spec, [memoryview((piece * count)[:count])]))
    return BlockDraft("span", start, token_ids(start, count, seed), slots)


@dataclass(frozen=True, slots=True)
class Version:
    """A version as the model knows it; `blocks` are its entries without the bundles that hold them."""

    uri: SessionUri
    number: int
    bundle_id: bytes
    parent: bytes | None
    created_ns: int
    content: Content
    blocks: tuple[BlockEntry, ...]


@dataclass(slots=True)
class Model:
    """All that a store should hold."""

    versions: dict[bytes, Version] = field(default_factory=dict)
    tags: dict[SessionUri, dict[str, bytes]] = field(default_factory=dict)
    pins: dict[SessionUri, set[bytes]] = field(default_factory=dict)

    def of(self, uri: SessionUri) -> list[Version]:
        return sorted((one for one in self.versions.values() if one.uri == uri), key=lambda one: one.number)

    def marked(self, version: Version) -> bool:
        return (
            version.bundle_id in self.pins.get(version.uri, ())
            or version.bundle_id in self.tags.get(version.uri, {}).values()
        )

    def live_marks(self, uri: SessionUri) -> tuple[dict[str, bytes], set[bytes]]:
        """The marks that name versions which are there."""
        tags = {tag: one for tag, one in self.tags.get(uri, {}).items() if one in self.versions}
        return tags, self.pins.get(uri, set()) & self.versions.keys()

    def unmark(self, uri: SessionUri) -> None:
        self.tags.pop(uri, None)
        self.pins.pop(uri, None)

    def dropped_by(self, retention: Retention, uri: SessionUri | None, now_ns: int) -> set[bytes]:
        """What a prune takes: told by the documents, not by the code."""
        return {one.bundle_id for each in URIS if uri in (None, each) for one in self._dropped(each, retention, now_ns)}

    def _dropped(self, uri: SessionUri, retention: Retention, now_ns: int) -> Iterator[Version]:
        versions = self.of(uri)
        dates: list[int | None] = []
        for one in versions:
            believed = EARLIEST_NS <= one.created_ns <= now_ns
            before = max((date for date in dates if date is not None), default=0)
            dates.append(max(one.created_ns, before) if believed else None)
        newest_ns = max((date for date in dates if date is not None), default=0)
        for number, (one, date) in enumerate(zip(versions, dates, strict=True)):
            kept = one is versions[-1] or self.marked(one)
            kept |= retention.keep_last is not None and number >= len(versions) - retention.keep_last
            if retention.keep_days is not None:
                kept |= date is None or date >= newest_ns - retention.keep_days * DAY_NS
            if not kept and not retention.keeps_all:
                yield one


# --- the world: a clock, and calls that fail


@dataclass(frozen=True, slots=True)
class CutOff:
    """An operation that may fail: the version that it may add, and those that it may take; `ends`: the session too."""

    work: Callable[[], object]
    uri: SessionUri
    content: Content | None = None
    may_go: Sequence[bytes] = ()
    ends: bool = False


class Crash(BaseException):
    """The process ends at this call, and does nothing after it."""


class Clock:
    """Time goes on by a second at each look, and jumps when it is told to."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def time_ns(self) -> int:
        self.now_ns += 10**9
        return self.now_ns


class Faults:
    """Lets the n-th call that changes a disk fail: with one error, with errors from there on, or by a crash."""

    CALLS = ("writev", "pwrite", "write", "rename", "link", "unlink", "fsync", "mkdir", "ftruncate")

    def __init__(self) -> None:
        self._left: int | None = None
        self._mode = ""
        self._errno = errno.EIO
        self.hit = False

    @contextlib.contextmanager
    def armed(self, after: int, mode: str, number: int) -> Iterator[None]:
        self._left, self._mode, self._errno, self.hit = after, mode, number, False
        try:
            yield
        finally:
            self._left = None

    def step(self, failure: Callable[[], BaseException]) -> None:
        if self._left is None:
            return
        if self._left > 0:
            self._left -= 1
            return
        if self.hit and self._mode == "once":
            return
        self.hit = True
        raise Crash if self._mode == "crash" else failure()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.CALLS:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))
        name_file = Index._name_file

        def naming(index: Index) -> bool:
            if any(file for *_, file in index._connection.execute("PRAGMA database_list")):  # not one in memory
                self.step(lambda: sqlite3.OperationalError("disk I/O error"))
            return name_file(index)

        patch.setattr(Index, "_name_file", naming)

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.step(lambda: OSError(self._errno, os.strerror(self._errno)))
            return call(*args, **kwargs)

        return wrapper


STEPS: Counter[str] = Counter()
"""Steps taken, by rule, of all histories of this process."""


def rule(**drawn: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule of Hypothesis that is counted."""

    def counted(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, *args: Any, **values: Any) -> None:
            STEPS[function.__name__] += 1
            within, self.failed = self.failed, True  # what is wrong is told once, and not again by the teardown
            function(self, *args, **values)
            self.failed = within

        return stateful.rule(**drawn)(wrapper)

    return counted


# --- the machine


class SoundStore(RuleBasedStateMachine):
    """A store that is never damaged: everything that was acknowledged is there, at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-", dir=MEMORY if MEMORY.is_dir() else None))
        self.path = self.folder / "store"
        self.patch = pytest.MonkeyPatch()
        self.clock, self.faults = Clock(), Faults()
        self.patch.setattr(time, "time_ns", self.clock.time_ns)
        self.faults.patch(self.patch)
        self.store = Store.open(self.path, writable=True)
        self.model = Model()
        self.given_up: dict[bytes, Version] = {}  # what a repair has set aside
        self.saved_from: dict[bytes, bytes] = {}  # by what a repair made of it
        self.readers: list[tuple[Version, BundleReader, bool]] = []
        self.beside: list[tuple[dict[bytes, Version], Store]] = []
        self.receipts: list[tuple[Version, Receipt]] = []
        self.exports: list[tuple[Version, Path]] = []
        self.old_index: dict[str, bytes] | None = None
        self.exported = 0
        self.failed = False

    def teardown(self) -> None:
        try:
            self.close_readers()
            if self.failed:
                return
            self.check_all()
            self.store.close()
            self.store = Store.open(self.path, writable=True)
            self.check_all()
        finally:
            self.patch.undo()
            for _, store in self.beside:
                store.close()
            self.store.close()
            shutil.rmtree(self.folder)

    # --- sleeping

    def slept(self, uri: SessionUri, content: Content, receipt: Receipt) -> Version:
        row = self.store.find_session(uri, receipt.version)
        assert row is not None
        assert row.bundle_id == receipt.bundle_id
        assert all(one.number < receipt.version for one in self.model.of(uri)), "a version number was given twice"
        assert receipt.blocks_new + receipt.blocks_reused == len(receipt.entries)
        return self.entered(content, receipt, row.created_ns)

    def entered(self, content: Content, receipt: Receipt, created_ns: int) -> Version:
        version = Version(
            receipt.uri,
            receipt.version,
            receipt.bundle_id,
            receipt.parent,
            created_ns,
            content,
            tuple(entry.held_by(None) for entry in receipt.entries),
        )
        self.model.versions[receipt.bundle_id] = version
        self.given_up.pop(receipt.bundle_id, None)
        self.receipts = [*self.receipts[-20:], (version, receipt)]
        return version

    def write(
        self,
        uri: SessionUri,
        content: Content,
        *,
        before: Receipt | None = None,
        reused: int = 0,
        compressed: bool = False,
    ) -> Receipt:
        return self.store.write_bundle(
            uri=uri,
            identity=IDENTITY,
            parent=before.bundle_id if before else None,
            reused=before.entries[:reused] if before else (),
            blocks=content.drafts(reused),
            session={"model": "demo"},
            token_count=content.token_count,
            compressed=compressed,
        )

    def has_room(self) -> bool:
        return len(self.model.versions) < MAX_VERSIONS

    @initialize(counts=st.lists(st.integers(0, 3 * BLOCK_TOKENS), max_size=4))
    def begin(self, counts: list[int]) -> None:
        """A session with a few versions, each a beginning of the next one or not."""
        before: Receipt | None = None
        for number, count in enumerate(counts):
            full, rest = divmod(count, BLOCK_TOKENS)
            content = Content(((number // 2, BLOCK_TOKENS),) * full + ((number, rest),) * bool(rest), number)
            reused = 0
            while (
                before
                and reused < min(full, self.receipts[-1][0].content.full)
                and (content.spans[reused] == self.receipts[-1][0].content.spans[reused])
            ):
                reused += 1
            before = self.write(URIS[0], content, before=before, reused=reused, compressed=bool(number % 2))
            self.slept(URIS[0], content, before)

    @precondition(has_room)
    @rule(
        uri=any_uri,
        seed=st.integers(0, 5),
        full=st.integers(0, 3),
        rest=st.sampled_from([0, 1, 40]),
        compressed=st.booleans(),
    )
    def sleep_new(self, uri: SessionUri, seed: int, full: int, rest: int, compressed: bool) -> None:
        spans = tuple([(seed, BLOCK_TOKENS)] * full + [(seed, rest)] * bool(rest))
        content = Content(spans, seed)
        self.slept(uri, content, self.write(uri, content, compressed=compressed))

    @precondition(lambda self: self.receipts and self.has_room())
    @rule(
        which=any_number,
        to=st.none() | any_uri,
        keep=st.integers(0, 4),
        more=st.integers(0, 2),
        rest=st.sampled_from([0, 3, 100]),
        seed=st.integers(0, 5),
        compressed=st.booleans(),
    )
    def sleep_delta(
        self, which: int, to: SessionUri | None, keep: int, more: int, rest: int, seed: int, compressed: bool
    ) -> None:
        """The next version of a session, or a fork; `keep`: how many of the last spans are not reused."""
        before, receipt = self.receipts[-1 - which % len(self.receipts)]
        reused = max(before.content.full - keep // 2, 0)
        spans = before.content.spans[:reused] + ((seed, BLOCK_TOKENS),) * more + ((seed, rest),) * bool(rest)
        content, uri = Content(spans, seed), to or before.uri
        try:
            written = self.write(uri, content, before=receipt, reused=reused, compressed=compressed)
        except (errors.BundleMissing, errors.BlockMissing):
            assert before.bundle_id not in self.model.versions, "the parent is there"
            return
        self.slept(uri, content, written)

    @precondition(lambda self: self.receipts and self.has_room())
    @rule(
        count=st.integers(1, 4),
        more=st.integers(0, 1),
        seed=st.integers(0, 5),
        years=st.sampled_from([0, 0, 0, -30, -1, 1, 30]),
    )
    def sleep_on(self, count: int, more: int, seed: int, years: int) -> None:
        """The session that slept last sleeps again and again, under a clock that may be wrong meanwhile."""
        self.clock.now_ns = max(self.clock.now_ns + years * YEAR_NS, 0)
        for number in range(count):
            self.sleep_delta(which=0, to=None, keep=0, more=more, rest=7 + number, seed=seed, compressed=bool(seed % 2))
        self.clock.now_ns = max(self.clock.now_ns - years * YEAR_NS, START_NS if years < 0 else 0)

    @precondition(lambda self: self.model.versions and self.has_room())
    @rule(which=any_number, uri=any_uri)
    def sleep_whole(self, which: int, uri: SessionUri) -> None:
        """What a version holds is slept again, nothing reused: every block is found by its id."""
        version = self.pick(which)
        held = self.frames_of(self.path.glob("bundles/??/*.mvb"))
        receipt = self.write(uri, version.content)
        assert receipt.blocks_new == sum(entry.id not in held for entry in version.blocks)
        self.slept(uri, version.content, receipt)

    # --- what is set aside

    def require_told(self, findings: Sequence[Finding]) -> None:
        """What is wrong with the store is that versions are set aside, each of which is told of until it is back."""
        assert {finding.code for finding in findings} <= {LOST}, findings
        told = {bytes.fromhex(Path(finding.path).stem) for finding in findings}
        wanted = self.given_up.keys() - self.gave_way()
        assert len(told) == len(findings)
        assert wanted <= told
        assert not any(map(self.is_whole_in_quarantine, told - wanted)), (
            "one that gave way says so, while it can be read"
        )

    def is_whole_in_quarantine(self, bundle_id: bytes) -> bool:
        for path in self.path.glob(f"quarantine/{bundle_id.hex()}.mvb.*"):
            with contextlib.suppress(errors.StoreError):
                BundleFile(os.open(path, os.O_RDONLY), str(path), bundle_id).close()
                return True
        return bundle_id not in self.given_up

    def gave_way(self) -> set[bytes]:
        """What was saved of versions that are back."""
        return {one for one, source in self.saved_from.items() if source in self.model.versions}

    def let_go(self, uri: SessionUri) -> None:
        """A session is deleted, and what is set aside of it."""
        self.given_up = {bundle_id: one for bundle_id, one in self.given_up.items() if one.uri != uri}

    # --- waking

    def pick(self, which: int) -> Version:
        """Some version, the same for the same number."""
        versions = sorted(self.model.versions.values(), key=lambda one: (one.uri, one.number))
        return versions[which % len(versions)]

    def require_right(self, reader: BundleReader, version: Version) -> None:
        manifest = reader.manifest
        facts = manifest.uri, manifest.version, manifest.parent, manifest.token_count, reader.bundle_id
        wanted = version.uri, version.number, version.parent, version.content.token_count, version.bundle_id
        assert facts == wanted
        assert reader.tokens() == version.content.tokens()
        assert store_making.contents(reader) == version.content.raw()

    def require_awake(self, version: Version, store: Store | None = None) -> None:
        with (store or self.store).open_session(version.uri, version.number) as reader:
            self.require_right(reader, version)

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number)
    def wake(self, which: int) -> None:
        self.require_awake(self.pick(which))

    @precondition(lambda self: self.model.versions)
    @rule(uri=any_uri)
    def wake_latest(self, uri: SessionUri) -> None:
        versions = self.model.of(uri)
        if not versions:
            with pytest.raises(errors.SessionNotFound):
                self.store.open_session(uri)
            return
        with self.store.open_session(uri) as reader:
            self.require_right(reader, versions[-1])

    @precondition(lambda self: self.model.versions and len(self.readers) < 4)
    @rule(which=any_number, beside=st.booleans())
    def open_reader(self, which: int, beside: bool) -> None:
        version, store = self.pick(which), self.store
        beside = beside and bool(self.beside)
        if beside:
            known, store = self.beside[which % len(self.beside)]
            if version.bundle_id not in known:
                return
        self.readers.append((version, store.open_session(version.uri, version.number), beside))

    @precondition(lambda self: self.readers)
    @rule(which=any_number, close=st.booleans())
    def read_on(self, which: int, close: bool) -> None:
        """A reader that was opened steps ago still gives every byte; one of another program, unless a delete came."""
        at = which % len(self.readers)
        version, reader, beside = self.readers[at]
        gone = version.bundle_id not in self.model.versions
        with contextlib.suppress(errors.Corruption) if beside and gone else contextlib.nullcontext():
            self.require_right(reader, version)
        if close:
            del self.readers[at]
            reader.close()

    def close_readers(self) -> None:
        for _, reader, _ in self.readers:
            reader.close()
        self.readers.clear()

    @precondition(lambda self: self.model.versions)
    @rule()
    def open_beside(self) -> None:
        """Another program opens the store for reading, and keeps it."""
        if len(self.beside) >= 2:
            self.close_readers()  # what they have not opened yet they cannot open through a store that is closed
            self.beside.pop(0)[1].close()
        store = Store.open(self.path, writable=False)
        self.beside.append((dict(self.model.versions), store))
        rows = {row.bundle_id for uri in URIS for row in store.versions(uri)}
        assert rows == self.model.versions.keys()

    @precondition(lambda self: self.beside)
    @rule(which=any_number)
    def wake_beside(self, which: int) -> None:
        """What the other program saw it still wakes, unless it is gone; then it is told so."""
        known, store = self.beside[which % len(self.beside)]
        if not known:
            return
        version = sorted(known.values(), key=lambda one: (one.uri, one.number))[which % len(known)]
        gone = version.bundle_id not in self.model.versions
        with contextlib.suppress(errors.SessionNotFound, errors.Corruption) if gone else contextlib.nullcontext():
            self.require_awake(version, store)

    # --- leaving

    def session(self, which: int) -> SessionUri:
        """Some session that is there: those of the most versions first."""
        there = sorted((uri for uri in URIS if self.model.of(uri)), key=lambda uri: -len(self.model.of(uri)))
        return there[which % len(there)]

    @precondition(lambda self: self.model.versions and self.has_room())
    @rule(
        which=any_number,
        uri=any_uri,
        keep=st.integers(0, 4),
        how=st.sampled_from(["delete", "forget", "prune"]),
        then=st.sampled_from(["gc", "compact", "forget", "rebuild", "sleep", "nothing"]),
    )
    def fork_and_leave(self, which: int, uri: SessionUri, keep: int, how: str, then: str) -> None:
        """A fork of a session that then goes, whole or but for its newest version, and what may follow."""
        origin = self.session(which)
        at = next((at for at, (one, _) in enumerate(reversed(self.receipts)) if one.uri == origin), None)
        if at is None or uri == origin:
            return
        self.sleep_delta(at, uri, keep, 0, 3, which % 6, which)
        if how == "delete":
            self.delete(which, True)
        elif how == "forget":
            self.forget(origin)
        else:
            self.prune(which, 1, None)
        if then == "gc":
            self.gc()
        elif then == "compact":
            self.compact(None, 1, 0, None, None)
        elif then == "rebuild":
            self.rebuild_index()
        elif then == "forget":
            self.forget(origin)
        elif then == "sleep" and self.has_room():
            self.sleep_on(2, 1, which % 6, 0)

    @precondition(lambda self: self.receipts and self.has_room())
    @rule(
        more=st.integers(0, 1),
        seed=st.integers(0, 5),
        then=st.sampled_from(["old index", "cut off", "cut off", "nothing"]),
        after=st.integers(0, 60),
    )
    def fold(self, more: int, seed: int, then: str, after: int) -> None:
        """Many sleeps become few files; that may be cut off, or the index that was there before may come back."""
        self.sleep_on(3, more, seed, 0)
        if then == "cut off":
            self.fail(after, "crash", errno.EIO, "compact", 0, URIS[0])
            return
        if then == "old index":
            self.copy_index()
        self.compact(None, 1, 0, None, None)
        assert self.store.rebuild_index(dry_run=True).actions == (), "the index says what the bundles say"
        if then == "old index":
            self.lose_index("old", 0, False)

    @precondition(lambda self: self.receipts and len(self.readers) < 4 and self.has_room())
    @rule(uri=any_uri, which=any_number, then=st.sampled_from(["gc", "compact", "sleep", "nothing"]))
    def read_while_it_leaves(self, uri: SessionUri, which: int, then: str) -> None:
        """A fork is open, nothing of it read yet, while it and the session that holds its blocks go."""
        before = self.receipts[-1][0]
        if before.bundle_id not in self.model.versions or not before.content.full or uri == before.uri:
            return
        self.sleep_delta(0, uri, 0, 0, 3, which % 6, which)
        fork = self.model.of(uri)[-1]
        self.readers.append((fork, self.store.open_session(uri, fork.number), False))
        for one in (before.uri, uri):
            self.store.delete_session(one)
            self.lost(version.bundle_id for version in self.model.of(one))
            self.model.unmark(one)
            self.let_go(one)
        if then == "sleep":
            self.sleep_new(uri, which % 6, 1, 1, which)
        elif then == "gc" and self.model.versions:
            self.gc()
        elif then == "compact" and self.model.versions:
            self.compact(None, 1, 0, None, None)
        self.read_on(len(self.readers) - 1, True)

    @precondition(lambda self: self.receipts and self.has_room())
    @rule(
        slept=st.sampled_from([-30, -1, 0, 1]),
        passed=st.sampled_from([-1, 0, 1, 3]),
        last=st.none() | st.integers(1, 2),
        days=st.sampled_from([0.001, 400]),
    )
    def prune_by_age(self, slept: int, passed: int, last: int | None, days: float) -> None:
        """A session sleeps at times that may be wrong, and its old versions are pruned years later, or before."""
        self.sleep_on(2, 0, 1, slept)
        self.sleep_on(2, 0, 2, 0)
        self.clock_jumps(passed)
        self.prune(None, last, days)

    @precondition(lambda self: self.receipts and self.has_room())
    @rule(what=st.sampled_from(["delete", "prune", "forget"]), which=any_number, after=st.integers(0, 12))
    def leave_cut_off(self, what: str, which: int, after: int) -> None:
        """A session of several versions is on its way out when the process ends."""
        self.sleep_on(3, 1, which % 6, 0)
        self.fail(after, "crash", errno.EIO, what, which & ~1, self.receipts[-1][0].uri)

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number, pinned=st.booleans(), last=st.integers(1, 2))
    def mark_and_prune(self, which: int, pinned: bool, last: int) -> None:
        """The oldest version of a session is marked, then all but the last ones are pruned."""
        uri = self.session(which)
        oldest = self.model.of(uri)[0]
        number = sorted(self.model.versions.values(), key=lambda one: (one.uri, one.number)).index(oldest)
        if pinned:
            self.pin(number, True)
        else:
            self.tag(number, TAGS[which % 2], True)
        self.prune(which, last, None)

    @precondition(lambda self: self.model.versions and self.has_room())
    @rule(which=any_number, gone=st.booleans(), twice=st.booleans())
    def export_and_import(self, which: int, gone: bool, twice: bool) -> None:
        """A version comes back to where its session was deleted, or where another one has its name by now."""
        version = self.pick(which)
        self.export(which, False)
        self.store.delete_session(version.uri)
        self.lost(one.bundle_id for one in self.model.of(version.uri))
        self.model.unmark(version.uri)
        self.let_go(version.uri)
        if not gone:
            for _ in range(version.number):
                if self.has_room():
                    self.sleep_new(version.uri, which % 6, 1, 1, which)
        for _ in range(1 + twice):
            self.import_file(0, None)

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number, there=st.booleans())
    def delete(self, which: int, there: bool) -> None:
        uri = self.session(which) if there else URIS[which % len(URIS)]
        waiting = {bundle_id for bundle_id, one in self.given_up.items() if one.uri == uri}
        if not self.model.of(uri) and not waiting:
            with pytest.raises(errors.SessionNotFound):
                self.store.delete_session(uri)
            return
        self.store.delete_session(uri)
        assert not any(row.uri == uri for row in self.store.index.given_up().values())
        self.lost(one.bundle_id for one in self.model.of(uri))
        self.model.unmark(uri)
        assert not self.store.marks(uri), "marks of a session stayed that is gone"
        self.let_go(uri)

    def lost(self, bundle_ids: Iterable[bytes]) -> None:
        for bundle_id in list(bundle_ids):
            del self.model.versions[bundle_id]

    @precondition(lambda self: self.model.versions)
    @rule(which=st.none() | any_number, last=st.none() | st.integers(1, 3), days=st.sampled_from([None, 0.001, 400]))
    def prune(self, which: int | None, last: int | None, days: float | None) -> None:
        uri = None if which is None else self.session(which)
        retention = Retention(last, days)
        wanted = self.model.dropped_by(retention, uri, self.clock.now_ns)
        planned = self.store.prune(retention, uri, dry_run=True)
        report = self.store.prune(retention, uri)
        self.require_ok(report)
        assert sum(action.kind in ("retire", "remove") and action.version is not None for action in report.actions) == (
            len(wanted)
        )
        assert len(planned.actions) >= len(wanted)
        self.lost(wanted)

    @precondition(lambda self: self.model.versions)
    @rule(uri=any_uri)
    def forget(self, uri: SessionUri) -> None:
        known = bool(self.model.of(uri))
        try:
            report = self.store.forget(uri)
        except errors.SessionNotFound:
            assert not known
            return
        self.lost(one.bundle_id for one in self.model.of(uri))
        self.model.unmark(uri)
        codes = {problem.code for problem in report.problems}
        allowed = {"still_open"} if self.readers else set()
        if self.given_up or any(self.path.glob("quarantine/*")):
            allowed.add("cannot_be_told")  # what a repair set aside may be anybody's
        if any(row.uri != uri for row in self.store.index.given_up().values()):
            allowed.add("not_forgotten")  # and another session may need it
        if self.store.index.aside_untold():
            allowed.add(UNREADABLE_CODE)  # and nobody knows what that one needs
        assert codes <= allowed
        self.let_go(uri)
        if not codes:
            self.require_only_needed_frames()

    def require_only_needed_frames(self) -> None:
        """Nothing is in any bundle file but what a version that is there names."""
        needed = {entry.id for one in self.model.versions.values() for entry in one.blocks}
        assert self.frames_of(self.path.glob("bundles/??/*.mv?")) <= needed, "a frame stayed that nothing needs"

    def frames_of(self, paths: Iterable[Path]) -> set[bytes]:
        """The blocks in bundle files."""
        found: set[bytes] = set()
        for path in paths:
            with contextlib.closing(FrameFile(os.open(path, os.O_RDONLY), str(path), bytes.fromhex(path.stem))) as file:
                found.update(file.frames)
        return found

    # --- marks

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number, tag=st.sampled_from(TAGS), move=st.booleans())
    def tag(self, which: int, tag: str, move: bool) -> None:
        version = self.pick(which)
        try:
            self.store.tag(version.uri, version.number, tag, move=move)
        except errors.TagTaken:
            assert not move
            assert self.model.tags[version.uri][tag] != version.bundle_id
            return
        self.model.tags.setdefault(version.uri, {})[tag] = version.bundle_id

    @precondition(lambda self: self.model.versions)
    @rule(uri=any_uri, tag=st.sampled_from(TAGS))
    def untag(self, uri: SessionUri, tag: str) -> None:
        live, _ = self.model.live_marks(uri)
        try:
            self.store.untag(uri, tag)
        except errors.MarkNotFound:
            assert tag not in live
        self.model.tags.get(uri, {}).pop(tag, None)

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number, pinned=st.booleans())
    def pin(self, which: int, pinned: bool) -> None:
        version = self.pick(which)
        pins = self.model.pins.setdefault(version.uri, set())
        if pinned:
            self.store.pin(version.uri, version.number)
            pins.add(version.bundle_id)
            return
        try:
            self.store.unpin(version.uri, version.number)
        except errors.MarkNotFound:
            assert version.bundle_id not in pins
        pins.discard(version.bundle_id)

    # --- upkeep

    @precondition(lambda self: self.model.versions)
    @rule()
    def gc(self) -> None:
        self.require_ok(self.store.gc())
        assert all(action.kind == "keep" for action in self.store.gc().actions)
        if not self.readers and not self.store.index.aside_untold():
            for path in self.path.glob("bundles/??/*.mvr"):
                assert self.store.index.users_of(bytes.fromhex(path.stem)), "a retired file stayed that nobody uses"

    @precondition(lambda self: self.model.versions)
    @rule(
        uri=st.none() | any_uri,
        holders=st.integers(1, 3),
        ratio=st.sampled_from([0, 0.25, 0.9]),
        cold=st.sampled_from([None, None, 0, 1000]),
        stop_after=st.none() | st.integers(0, 5),
    )
    def compact(
        self, uri: SessionUri | None, holders: int, ratio: float, cold: float | None, stop_after: int | None
    ) -> None:
        if uri is not None and not self.model.of(uri):
            return
        policy = CompactionPolicy(holders, ratio, cold)
        asked = iter(range(stop_after)) if stop_after is not None else None
        report = self.store.compact(
            uri, policy=policy, should_stop=lambda: asked is not None and next(asked, None) is None
        )
        self.require_ok(report)
        if stop_after is None and not self.readers:
            self.require_settled(lambda: self.store.compact(uri, policy=policy))

    def require_ok(self, report: MaintenanceReport) -> None:
        """All was done; but beside a version that is set aside with a damaged file, whose needs are unknown
        since the index was lost, nothing is removed, and that is told."""
        allowed = {UNREADABLE_CODE} if self.store.index.aside_untold() else set()
        assert {problem.code for problem in report.problems} <= allowed, report.problems

    def require_settled(self, again: Callable[[], MaintenanceReport]) -> None:
        """An operation that is done again and again comes to an end."""
        for _ in range(4):
            report = again()
            self.require_ok(report)
            if not report.actions:
                return
        raise AssertionError(f"it never is done: {report.actions}")

    @precondition(lambda self: self.model.versions)
    @rule(dry_run=st.booleans())
    def repair(self, dry_run: bool) -> None:
        """There is nothing to repair, but that blocks which a version had lost may have been written again since."""
        report = self.store.repair(dry_run=dry_run)
        assert all(action.kind == "restore" or self.gives_way(action) for action in report.actions), report.actions
        if report.actions and not dry_run:
            self.take_what_is_left(set(self.model.versions), {})
            report = self.store.repair()
        if not report.actions:
            self.require_told(report.problems)
        assert dry_run or not report.actions

    def gives_way(self, action: Action) -> bool:
        """Whether it sets aside what was saved of a version that is back."""
        assert action.session is not None
        saved = next((one for one in self.model.of(action.session) if one.number == action.version), None)
        return action.kind == "quarantine" and saved is not None and saved.bundle_id in self.saved_from

    def take_what_is_left(self, whole: set[bytes], beginnings: dict[SessionUri, tuple[BlockEntry, ...]]) -> None:
        raise AssertionError("a store that was never damaged has nothing to repair")

    @precondition(lambda self: self.model.versions)
    @rule()
    def rebuild_index(self) -> None:
        planned = self.store.rebuild_index(dry_run=True)
        self.require_ok(planned)
        assert planned.actions == (), "the index says what the bundles say"
        self.require_ok(self.store.rebuild_index())

    @precondition(lambda self: self.model.versions)
    @rule(deep=st.booleans())
    def verify(self, deep: bool) -> None:
        self.require_told(self.store.verify(deep=deep).findings)

    @precondition(lambda self: self.model.versions)
    @rule()
    def usage(self) -> None:
        usage = self.store.usage()
        assert usage.problems == ()
        assert usage.file_bytes == sum(
            (
                usage.live_bytes,
                usage.retired_bytes,
                usage.unreadable_bytes,
                usage.quarantine_bytes,
                usage.incoming_bytes,
                usage.index_bytes,
                usage.temp_bytes,
                usage.journal_bytes,
                usage.other_bytes,
            )
        )
        needed = sum(one.exclusive_bytes for one in usage.sessions) + usage.shared_bytes + usage.unneeded_bytes
        assert usage.live_bytes + usage.retired_bytes == needed

    # --- export and import

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number, beside=st.booleans())
    def export(self, which: int, beside: bool) -> None:
        version, store = self.pick(which), self.store
        if beside and self.beside:
            known, store = self.beside[which % len(self.beside)]
            if version.bundle_id not in known:
                return
        self.exported += 1
        target = self.folder / f"{self.exported}.mvb"
        store.export_session(version.uri, version.number, target)
        for _, path in self.exports[3:]:
            path.unlink()
        self.exports = [(version, target), *self.exports[:3]]

    @precondition(lambda self: self.exports and self.has_room())
    @rule(which=any_number, to=st.none() | any_uri)
    def import_file(self, which: int, to: SessionUri | None) -> None:
        version, path = self.exports[which % len(self.exports)]
        try:
            receipt = self.store.import_file(path, as_uri=to)
        except errors.NameTaken:
            assert self.is_in_use(to or version.uri)
        else:
            self.imported(version, receipt, to)

    def imported(self, version: Version, receipt: Receipt, to: SessionUri | None) -> None:
        to = None if to == version.uri else to  # a name that is its own is none
        taken = {one.number: one for one in self.model.of(to or version.uri)}
        if to is None and version.bundle_id in self.model.versions:
            assert (receipt.bundle_id, receipt.bytes_written) == (version.bundle_id, 0)
        elif to is None and receipt.bundle_id == version.bundle_id:
            assert version.number not in taken
            self.entered(version.content, receipt, version.created_ns)
            self.marks_as_they_are(version.uri)
        elif receipt.bundle_id in self.model.versions:  # an earlier import has made this very version
            assert (receipt.parent, receipt.bytes_written) == (version.bundle_id, 0)
            assert self.model.versions[receipt.bundle_id].content == version.content
            assert self.model.versions[receipt.bundle_id].uri == (to or version.uri)
        else:
            assert receipt.parent == version.bundle_id
            assert to is not None
            assert not self.is_in_use(to)
            self.slept(to, version.content, receipt)

    def is_in_use(self, uri: SessionUri) -> bool:
        """Whether a session has a version, or had one that a repair has set aside."""
        return bool(self.model.of(uri)) or any(one.uri == uri for one in self.given_up.values())

    def marks_as_they_are(self, uri: SessionUri) -> None:
        """A version that came back may have marks that were left of it, if no gc took them."""
        marks = self.store.marks(uri)
        self.model.tags[uri], self.model.pins[uri] = dict(marks.tags), set(marks.pins)

    @precondition(lambda self: self.exports)
    @rule(which=any_number)
    def import_elsewhere(self, which: int) -> None:
        """An exported file is a version in another store, and the export of that is the same file again."""
        version, path = self.exports[which % len(self.exports)]
        again = self.folder / "again.mvb"
        with Store.open(self.folder / "elsewhere", writable=True) as store:
            receipt = store.import_file(path, as_uri=None)
            assert (receipt.bundle_id, receipt.version) == (version.bundle_id, version.number)
            self.require_awake(version, store)
            store.export_session(version.uri, version.number, again)
            store.delete_session(version.uri)
        again.unlink()

    # --- time, opening, old indexes

    @rule(years=st.integers(-30, 30))
    def clock_jumps(self, years: int) -> None:
        self.clock.now_ns = max(self.clock.now_ns + years * YEAR_NS, 0)

    def reopen(self, *, crash: bool = False) -> None:
        self.close_readers()
        if crash:
            kept = self.index_files()
            self.store.close()
            self.put_index(kept)  # no process that ends writes its log into the file
        else:
            self.store.close()
        self.store = Store.open(self.path, writable=True)
        self.require_nothing_amiss()
        assert self.store.rebuild_index(dry_run=True).actions == (), "the index says what the bundles say"

    def require_nothing_amiss(self) -> None:
        """Nothing is amiss, whatever became of the index."""
        assert self.store.index.missed() == {}
        assert {finding.path for finding in self.store.opening.unreadable} == {
            str(self.path / "bundles" / one.hex()[:2] / f"{one.hex()}.mvb") for one in self.store.index.aside_untold()
        }

    @invariant()
    def what_is_set_aside_outlives_the_index(self) -> None:
        """Though its file may be nowhere."""
        assert self.given_up.keys() - self.gave_way() <= self.store.index.given_up().keys()

    @precondition(lambda self: self.model.versions)
    @rule(crash=st.booleans())
    def close_and_open(self, crash: bool) -> None:
        behind = self.store.index.file_is_behind  # after a failure it lived in memory
        self.reopen(crash=crash)
        assert behind or self.store.opening.index_rebuilt is None
        assert behind or self.store.opening.rows_added == 0

    def index_files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.path.glob("index.*") if not path.name.endswith("-shm")}

    def put_index(self, files: dict[str, bytes]) -> None:
        for path in self.path.glob("index.*"):
            path.unlink()
        for name, data in files.items():
            (self.path / name).write_bytes(data)
            (self.path / name).chmod(0o600)

    @precondition(lambda self: self.model.versions)
    @rule()
    def copy_index(self) -> None:
        self.old_index = self.index_files()

    @precondition(lambda self: self.model.versions)
    @rule(
        how=st.sampled_from(["gone", "cut", "flipped", "old", "older sums"]),
        where=st.integers(0, 2**20),
        crash=st.booleans(),
    )
    def lose_index(self, how: str, where: int, crash: bool) -> None:
        """The index is lost, damaged, or an old copy; the bundles are the truth."""
        self.close_readers()
        kept = self.index_files()
        self.store.close()
        if crash:
            self.put_index(kept)
        files = self.index_files()
        file = self.path / "index.sqlite"
        data = bytearray(file.read_bytes()) if file.exists() else bytearray()
        if not data:
            pass  # it lived in memory
        elif how == "gone":
            file.unlink()
        elif how == "cut":
            os.truncate(file, where % len(data))
        elif how == "flipped":
            data[where % len(data)] ^= 1 << where % 8
            file.write_bytes(data)
        elif self.old_index is not None and not self.old_is_ghostly():
            self.put_index(
                self.old_index if how == "old" else {**files, "index.sqlite": self.old_index["index.sqlite"]}
            )
        self.store = Store.open(self.path, writable=True)
        self.require_nothing_amiss()

    def old_is_ghostly(self) -> bool:
        """Whether the old copy has versions whose files are gone since: nobody can tell those from a loss."""
        folder = self.folder / "ghost"
        if folder.exists():
            shutil.rmtree(folder)
        assert self.old_index is not None
        folder.mkdir()
        for name, data in self.old_index.items():
            (folder / name).write_bytes(data)
        with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as connection:
            try:
                known = {bytes(one) for (one,) in connection.execute("SELECT bundle_id FROM bundles")}
            except sqlite3.DatabaseError:
                return True
        return not known <= self.model.versions.keys()

    # --- faults

    @precondition(lambda self: self.model.versions)
    @rule(
        after=st.integers(0, 40),
        mode=st.sampled_from(["crash", "crash", "once", "from there on"]),
        number=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EACCES]),
        what=st.sampled_from(
            ["sleep", "delta", "delete", "prune", "forget", "gc", "compact", "cold", "tag", "rebuild", "import", "open"]
        ),
        which=any_number,
        uri=any_uri,
    )
    def fail(self, after: int, mode: str, number: int, what: str, which: int, uri: SessionUri) -> None:
        """One of the operations is cut off: what was acknowledged before is there, and what it was to change is as it
        was or as it was to be."""
        if what == "open":
            self.fail_to_open(after, mode, number)
            return
        cut = self.cut_off(what, which, uri)
        if cut is None:
            return
        with self.faults.armed(after, mode, number), contextlib.suppress(errors.StoreError, Crash):
            cut.work()
        if self.faults.hit and mode == "crash":
            self.reopen(crash=True)
        elif not self.store._core.writable:
            self.reopen(crash=bool(which % 2))
        elif self.faults.hit and (
            cut.may_go or which % 3 == 0
        ):  # a delete without its rows is settled by the next opening
            self.reopen()
        self.settle(cut)

    def cut_off(self, what: str, which: int, uri: SessionUri) -> CutOff | None:
        """An operation with what it may change."""
        if what == "sleep":
            content = Content(((which % 6, BLOCK_TOKENS), (1, 5)), 1)
            return CutOff(lambda: self.write(uri, content, compressed=bool(which % 2)), uri, content)
        if what == "delta" and self.receipts:
            before, receipt = self.receipts[which % len(self.receipts)]
            full = before.content.full
            longer = Content((*before.content.spans[:full], (which % 6, BLOCK_TOKENS)), 2)
            return CutOff(lambda: self.write(uri, longer, before=receipt, reused=full), uri, longer)
        if what == "import" and self.exports:
            version, path = self.exports[which % len(self.exports)]
            return CutOff(lambda: self.store.import_file(path, as_uri=uri), uri, version.content)
        if what == "tag" and self.model.versions:
            one = self.pick(which)
            return CutOff(lambda: self.store.tag(one.uri, one.number, TAGS[0], move=True), one.uri)
        return self.leaving(what, which, uri) or self.upkeep(what, which, uri)

    def leaving(self, what: str, which: int, uri: SessionUri) -> CutOff | None:
        all_of_it = [one.bundle_id for one in self.model.of(uri)]
        if what == "delete":
            return CutOff(lambda: self.store.delete_session(uri), uri, None, all_of_it, ends=True)
        if what == "forget":
            return CutOff(lambda: self.store.forget(uri), uri, None, all_of_it, ends=True)
        if what == "prune":
            retention = Retention(keep_last=1 + which % 2)
            dropped = self.model.dropped_by(retention, None, self.clock.now_ns)
            return CutOff(lambda: self.store.prune(retention), uri, None, list(dropped))
        return None

    def upkeep(self, what: str, which: int, uri: SessionUri) -> CutOff | None:
        if what in ("compact", "cold"):
            policy = CompactionPolicy(1 + which % 2, 0, 0 if what == "cold" else None)
            return CutOff(lambda: self.store.compact(policy=policy), uri)
        work = {"gc": self.store.gc, "rebuild": self.store.rebuild_index}.get(what)
        return CutOff(work, uri) if work is not None else None

    def fail_to_open(self, after: int, mode: str, number: int) -> None:
        self.close_readers()
        self.store.close()
        with self.faults.armed(after, mode, number), contextlib.suppress(errors.StoreError, Crash):
            self.store = Store.open(self.path, writable=True)
        if self.faults.hit:
            self.store.close()
            self.let_go_of_lock()
            self.store = Store.open(self.path, writable=True)
        self.require_nothing_amiss()

    def let_go_of_lock(self) -> None:
        """What the end of the process does to the descriptors that it has open in the store."""
        folders = [store._core.folder for _, store in self.beside]
        beside = {fd for folder in folders for fd in (folder.root_fd, folder.bundles_fd)}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(f"{self.path}/lock") and int(name) not in beside:
                    os.close(int(name))

    def settle(self, cut: CutOff) -> None:
        """Take what the store has as it is, where an operation that was cut off leaves a choice."""
        rows = {row.bundle_id: row for uri in URIS for row in self.store.versions(uri)}
        gone = self.model.versions.keys() - rows.keys()
        assert gone <= set(cut.may_go), "a version is gone that nobody wanted to be rid of"
        for uri in URIS:
            leaving = [one.bundle_id in gone for one in self.model.of(uri) if one.bundle_id in cut.may_go]
            assert leaving == sorted(leaving, reverse=True), "the oldest versions go first"
        new = [row for bundle_id, row in rows.items() if bundle_id not in self.model.versions]
        assert len(new) <= (cut.content is not None)
        for row in new:
            assert cut.content is not None
            assert row.uri == cut.uri
            with self.store.open_session(row.uri, row.version) as reader:
                entries = tuple(entry.held_by(None) for entry in reader.entries)
            self.model.versions[row.bundle_id] = Version(
                row.uri, row.version, row.bundle_id, row.parent, row.created_ns, cut.content, entries
            )
        self.lost(gone)
        if cut.may_go or cut.ends:  # with its last version goes what is set aside of a session, which may be all of it
            known = self.store.index.given_up()
            self.given_up = {key: one for key, one in self.given_up.items() if key in known or one.uri != cut.uri}
        self.marks_as_they_are(cut.uri)

    # --- what holds at every moment

    @invariant()
    def the_rows_are_the_versions(self) -> None:
        rows = {
            row.bundle_id: (row.uri, row.version, row.parent, row.token_count)
            for row in (row for uri in URIS for row in self.store.versions(uri))
        }
        assert rows == {
            one.bundle_id: (one.uri, one.number, one.parent, one.content.token_count)
            for one in self.model.versions.values()
        }
        latest = {row.uri: row.version for row in self.store.iter_sessions()}
        assert latest == {uri: self.model.of(uri)[-1].number for uri in URIS if self.model.of(uri)}

    @invariant()
    def every_block_is_where_its_version_looks_for_it(self) -> None:
        core = self.store._core
        frames: dict[bytes, set[bytes]] = {}
        for bundle_id in self.model.versions:
            with contextlib.closing(core.open_bundle(bundle_id)) as file:
                assert file.path.endswith(".mvb")
                frames[bundle_id] = set(file.frames)
                entries = file.entries
            for holder in {entry.bundle_id for entry in entries} - frames.keys():
                assert holder is not None
                with contextlib.closing(core.open_frames(holder)) as held:
                    frames[holder] = set(held.frames)
            assert all(entry.id in frames[entry.bundle_id or b""] for entry in entries)
            needed = {entry.bundle_id for entry in entries} - {bundle_id}
            assert needed <= set(self.store.index.refs_of(bundle_id)), "the index does not know what it needs"

    @invariant()
    def nothing_is_pinned_that_nobody_reads(self) -> None:
        if not self.readers:
            assert self.store.statistics().bundles_pinned == 0
        assert self.store.writable

    @invariant()
    def the_marks_are_those_that_were_given(self) -> None:
        for uri in URIS:
            marks = self.store.marks(uri)
            tags = {tag: one for tag, one in marks.tags.items() if one in self.model.versions}
            assert (tags, marks.pins & self.model.versions.keys()) == self.model.live_marks(uri)

    def check_all(self) -> None:
        """Every byte of every version, and that the store finds nothing wrong with itself."""
        for version in self.model.versions.values():
            self.require_awake(version)
        self.require_told(self.store.verify(deep=True).findings)
        with Store.open(self.path, writable=False) as beside:
            self.require_told(beside.verify(deep=False).findings)
            for version in self.model.versions.values():
                self.require_awake(version, beside)
        self.the_rows_are_the_versions()
        assert self.store.rebuild_index(dry_run=True).actions == (), "the index says what the bundles say"


Beginning = tuple[tuple[BlockEntry, ...], int]
"""The first blocks of a version, and its number."""


class DamagedStore(SoundStore):
    """The same, but now and then bytes of bundle files change: that is found, no wrong byte is ever woken, and a repair
    leaves a sound store in which everything is that was whole."""

    @precondition(lambda self: self.model.versions)
    @rule(
        places=st.lists(st.tuples(any_number, st.integers(0, 2**24)), min_size=1, max_size=3),
        how=st.sampled_from(["flip", "zero", "cut", "remove", "padding"]),
        closed=st.booleans(),
    )
    def damage(self, places: list[tuple[int, int]], how: str, closed: bool) -> None:
        self.repaired_after(lambda: [self.change(which, where, how) for which, where in places], closed)

    @precondition(lambda self: self.model.versions)
    @rule(which=any_number, frames=st.lists(any_number, min_size=1, max_size=3), closed=st.booleans())
    def damage_session(self, which: int, frames: list[int], closed: bool) -> None:
        """The newest versions of a session lose a block each."""
        versions = self.model.of(self.session(which))[::-1]
        pairs = list(zip(versions, frames, strict=False))
        self.repaired_after(lambda: [self.harm_frame(version, number) for version, number in pairs], closed)

    def harm_frame(self, version: Version, number: int) -> None:
        path = self.path / "bundles" / version.bundle_id.hex()[:2] / f"{version.bundle_id.hex()}.mvb"
        with contextlib.closing(FrameFile(os.open(path, os.O_RDONLY), str(path), version.bundle_id)) as file:
            if not file.directory.frames:
                return
            frame = file.directory.frames[number % len(file.directory.frames)]
        data = bytearray(path.read_bytes())
        data[frame.offset + 40] ^= 1  # the digest of its head
        path.write_bytes(data)

    def repaired_after(self, damage: Callable[[], object], closed: bool) -> None:
        self.close_readers()
        while self.beside:
            self.beside.pop()[1].close()
        if closed:
            self.store.close()
        before = self.live_files()
        damage()
        changed = self.live_files() != before  # two changes may undo each other
        if closed:
            self.store = Store.open(self.path, writable=True)
        whole = {version.bundle_id for version in self.model.versions.values() if self.is_whole(version)}
        mendable, beginnings = self.what_can_be_saved()
        found = self.store.verify(deep=True)
        if len(whole) < len(self.model.versions) or changed:
            assert any(finding.code != LOST for finding in found.findings), "the damage was not found"
        planned = self.store.repair(dry_run=True)
        report = self.store.repair()
        STEPS["repaired"] += bool(report.actions)
        assert bool(planned.actions) == bool(report.actions)
        if any(finding.code != LOST for finding in found.findings):
            assert report.actions
        self.take_what_is_left(whole | mendable, beginnings)
        findings = self.store.verify(deep=True).findings
        self.require_told(findings)
        again = self.store.repair()
        assert again.actions == ()
        assert again.problems == findings, f"{again.problems}\n{findings}"
        if closed:
            self.reopen()

    def live_files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.path.glob("bundles/??/*.mvb")}

    def change(self, which: int, where: int, how: str) -> None:
        """Damage one file."""
        files = sorted(self.path.glob("bundles/??/*.mv?"))
        path = files[which % len(files)] if files else self.path
        if not files or (how == "remove" and path.suffix == ".mvr"):
            return
        data = bytearray(path.read_bytes())
        at = where % max(len(data), 1)
        if how == "remove":
            path.unlink()
            return
        if how == "flip" and data:
            data[at] ^= 1 << where % 8
        elif how == "zero":
            data[at : at + 100] = bytes(len(data[at : at + 100]))
        elif how == "padding":
            for at in paddings(path)[where % 3 :: 3]:
                data[at] ^= 1 << where % 8
        elif how == "cut":
            del data[at:]
        path.write_bytes(data)  # the same inode: bytes rotted

    def is_whole(self, version: Version) -> bool:
        """Whether every byte of a version is right. Raises if one is wrong, or if the refusal is not one of ours."""
        try:
            self.require_awake(version)
        except errors.StoreError:
            return False
        return True

    def what_can_be_saved(self) -> tuple[set[bytes], dict[SessionUri, Beginning]]:
        """The versions all of whose blocks are sound in some file; and for each session the longest beginning of a
        version that is newer than all those. Of files only that can be opened, and not in quarantine: a repair finds
        more."""
        sound, manifests = set(), {}
        for path in self.path.glob("bundles/??/*.mv?"):
            with contextlib.suppress(errors.StoreError):
                bundle_id = bytes.fromhex(path.stem)
                with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), bundle_id)) as file:
                    manifests[bundle_id] = file.manifest
                    for block_id in file.frames:
                        with contextlib.suppress(errors.StoreError):
                            file.check_payloads(block_id)
                            sound.add(block_id)
        mendable, beginnings = set(), {}
        for uri in URIS:
            for version in reversed(self.model.of(uri)):
                if version.bundle_id not in manifests:
                    break  # nobody knows whether that one stands
                found = list(itertools.takewhile(lambda entry: entry.id in sound, version.blocks))
                if len(found) == len(version.blocks):
                    mendable.add(version.bundle_id)
                    break
                spans = tuple(entry for entry in found if entry.kind == "span")
                if spans and (uri not in beginnings or spans[-1].end > beginnings[uri][0][-1].end):
                    beginnings[uri] = spans, version.number
        return mendable, beginnings

    def take_what_is_left(self, whole: set[bytes], beginnings: dict[SessionUri, Beginning]) -> None:
        """A version that was whole stays, or it gave way to the one that it was saved from; one that was lost earlier
        may be back."""
        rows = {row.bundle_id: row for uri in URIS for row in self.store.versions(uri)}
        for bundle_id in whole - rows.keys():
            assert self.saved_from.get(bundle_id) in rows, "the repair cost a version that was whole"
        known = dict(self.model.versions)
        gone = known.keys() - rows.keys()
        self.given_up.update((bundle_id, known[bundle_id]) for bundle_id in gone)
        self.lost(gone)
        for row in rows.values():
            if row.bundle_id in self.given_up:
                STEPS["brought back"] += 1
                self.model.versions[row.bundle_id] = self.given_up.pop(row.bundle_id)
                self.marks_as_they_are(row.uri)
            elif row.bundle_id not in known:
                self.salvaged(row, [one for one in self.given_up.values() if one.uri == row.uri])
        for version in self.model.versions.values():
            self.require_awake(version)
        for uri, (blocks, number) in beginnings.items():
            assert any(
                one.blocks[: len(blocks)] == blocks
                or (one.bundle_id not in known and one.content.token_count >= blocks[-1].end)
                or (one.bundle_id in known and one.number > number)  # mended from the quarantine
                for one in self.model.of(uri)
            ), "less was saved than could be"

    def salvaged(self, row: IndexRow, lost: list[Version]) -> None:
        """A version that a repair made is the beginning of one that was lost."""
        STEPS["salvaged"] += 1
        origin = next(one for one in lost if one.bundle_id == row.parent)
        self.saved_from[row.bundle_id] = origin.bundle_id
        assert origin.bundle_id not in self.model.versions
        with self.store.open_session(row.uri, row.version) as reader:
            entries = tuple(entry.held_by(None) for entry in reader.entries)
        assert entries == origin.blocks[: len(entries)]
        content = Content(origin.content.spans[: len(entries)], None)
        self.model.versions[row.bundle_id] = Version(
            row.uri, row.version, row.bundle_id, row.parent, row.created_ns, content, entries
        )


def paddings(path: Path) -> list[int]:
    """The places in a bundle file that are behind payloads and mean nothing; none where it cannot be read."""
    places: list[int] = []
    bundle_id = bytes.fromhex(path.stem)
    with (
        contextlib.suppress(errors.StoreError),
        contextlib.closing(FrameFile(os.open(path, os.O_RDONLY), str(path), bundle_id)) as file,
    ):
        for frame in file.directory.frames:
            _, head = file.read_head(frame.id)
            for offset, stored in zip(head.payload_offsets, head.stored, strict=True):
                end = frame.offset + offset + stored.stored_bytes
                places += range(end, aligned(end))
    return places


# --- the tests


def run_machine(
    machine: type[RuleBasedStateMachine], histories: int, length: int, *, fixed: bool = True, shrinking: bool = True
) -> int:
    """Run histories of at most `length` rules each; returns the steps taken."""
    before = STEPS.total()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=length,
            derandomize=fixed,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if shrinking else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )
    return STEPS.total() - before


HEAVY_STEPS = int(os.environ.get("TORPOR_MACHINE_STEPS", "20000"))
SHARE: dict[type[RuleBasedStateMachine], int] = {SoundStore: 30, DamagedStore: 15}
"""Histories of the bounded run."""
SHARE_LENGTH = 40


@pytest.mark.one_in(2)
@pytest.mark.parametrize("machine", SHARE)
def test_t7_a_store_holds_what_a_dictionary_of_its_versions_holds(machine: type[RuleBasedStateMachine]) -> None:
    steps = run_machine(machine, SHARE[machine], SHARE_LENGTH)
    print(f"{machine.__name__}: {steps} steps")
    assert steps >= 10 * SHARE[machine]


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", SHARE)
def test_t7_the_same_for_many_steps_and_other_ones_each_time(machine: type[RuleBasedStateMachine]) -> None:
    steps = 0
    while steps < HEAVY_STEPS:
        steps += run_machine(machine, 100, 60, fixed=False)
        print(f"{machine.__name__}: {steps} steps")


def test_t7_every_fault_that_is_planted_to_try_the_machine_fits_the_code() -> None:
    for mutant in machine_mutants.MUTANTS:
        (module,) = (machine_mutants.ROOT / "memvid").rglob(mutant.module)
        source = module.read_text()
        assert source.count(mutant.before) == 1, mutant.name
        compile(source.replace(mutant.before, mutant.after), mutant.name, "exec")


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mutant", machine_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_t7_the_machine_finds_a_planted_fault(mutant: machine_mutants.Mutant) -> None:
    found = machine_mutants.hunt(mutant, HEAVY_STEPS)
    print(found)
    assert found["found"], found


def search(name: str, most: int) -> dict[str, object]:
    """Look for a fault of the code that is imported, in the bounded run, then on until so many steps were taken."""
    machine = next(one for one in SHARE if one.__name__ == name)
    began = time.monotonic()
    seconds = 0.0
    in_share = True
    what: BaseException | None = None
    try:
        run_machine(machine, SHARE[machine], SHARE_LENGTH, shrinking=False)
        seconds, in_share = time.monotonic() - began, False
        while STEPS.total() < most:
            run_machine(machine, 100, 60, fixed=False, shrinking=False)
    except BaseException as failure:
        what = failure
    return {
        "found": what is not None,
        "in_share": what is not None and in_share,
        "steps": STEPS.total(),
        "seconds": round(time.monotonic() - began, 1),
        "share_seconds": round(seconds, 1),
        "as": f"{type(what).__name__}: {what}"[:200],
    }


if __name__ == "__main__":
    print(json.dumps(search(sys.argv[1], int(sys.argv[2]))))
