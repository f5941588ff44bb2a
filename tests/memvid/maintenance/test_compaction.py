"""A compaction changes where bytes lie and nothing else: plans as values, then stores, readers and forks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import BLOCK_TOKENS, CompactionPolicy, Receipt, SessionUri, Store
from torpor.memvid.disk.budget import Budget, utc_day
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.errors import InvalidPolicy, NoSpace, SessionNotFound, StoreError, StoreIoError
from torpor.memvid.format.bundle import FrameFile
from torpor.memvid.format.records import IndexRow, MaintenanceReport
from torpor.memvid.index.index import Index
from torpor.memvid.maintenance import compaction
from torpor.memvid.maintenance.compaction_plan import FileView, Step, choose_holders, plan_compaction
from torpor.memvid.writing import deletion
from torpor.memvid.writing.rewriting import Contents, Prepared, prepared
from torpor.tests.memvid import store_making
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    expected,
    flip,
    meanwhile,
    reopened,
    sleep,
    token_ids,
)

FEW = CompactionPolicy(max_holders=3)
STEP_TOKENS = 300


# --- plans as values


class World:
    """A session's files as values: sleeps add to it, steps change it, and each is checked."""

    def __init__(self, policy: CompactionPolicy) -> None:
        self.policy = policy
        self.files: dict[bytes, FileView] = {}
        self.newest = b""
        self.tokens = 0
        self.spans: list[bytes] = []
        self.bytes_slept = self.bytes_copied = self.most_holders = 0

    def sleep(self, tokens: int) -> None:
        """A version with `tokens` more; a token takes a byte and the rest of a file 20."""
        number = len(self.files) + 1
        self.tokens += tokens
        me = _id("version", number)
        before = self.files[self.newest].places if self.newest else {}
        places = {span: before[span] for span in self.spans}
        frames = {}
        for index in range(len(self.spans), self.tokens // BLOCK_TOKENS):
            frames[_id("span", index)] = BLOCK_TOKENS
            self.spans.append(_id("span", index))
        frames[_id("rest", number)] = 1 + self.tokens % BLOCK_TOKENS
        places.update(dict.fromkeys(frames, me))
        row = IndexRow(URI, number, me, None, b"", self.tokens, 0, 0, 0, "", ())
        self.files[me] = FileView(me, "", row, False, frames, places, 20, exclusive=True, users_known=True)
        self.newest = me
        self.bytes_slept += self.files[me].file_bytes

    def plan(self) -> tuple[Step, ...]:
        return plan_compaction(self.files[self.newest], self.files, self.policy)

    def compact(self, *, checked: bool) -> None:
        if self.holders > self.policy.max_holders:
            for step in self.plan():
                self.take(step, checked=checked)
        self.most_holders = max(self.most_holders, self.holders)

    @property
    def holders(self) -> int:
        return len(set(self.files[self.newest].places.values()) - {self.newest})

    def take(self, step: Step, *, checked: bool = True) -> None:
        if step.kind == "remove":
            del self.files[step.file.bundle_id]
        else:
            now = self.files[step.file.bundle_id]
            frames = {block: self.files[source].frames[block] for block, source in step.frames}
            places = {block: now.bundle_id if block in frames else step.holders[block] for block in now.places}
            self.files[now.bundle_id] = dataclasses.replace(now, frames=frames, places=places)
            self.bytes_copied += self.files[now.bundle_id].file_bytes
        if checked:
            self.require_sound()

    def require_sound(self) -> None:
        for file in self.files.values():
            for block, place in file.places.items():
                assert block in self.files[place].frames, "a version looks for a block where it is not"


def _id(*what: object) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=32).digest()


@pytest.mark.one_in(2)
def test_a_thousand_small_sleeps_copy_less_than_three_times_what_they_slept() -> None:
    world = World(CompactionPolicy())
    for _ in range(1000):
        world.sleep(200)
        world.compact(checked=False)
    world.require_sound()
    assert world.most_holders <= 24
    assert world.bytes_copied <= 3 * world.bytes_slept
    held = Counter(block for file in world.files.values() for block in file.frames)
    assert set(held.values()) == {1}, "no byte lies twice"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("most", [1, 2, 4, 24])
@pytest.mark.parametrize("seed", range(3))
def test_holders_are_bounded_whatever_is_slept_and_every_step_leaves_all_versions_whole(seed: int, most: int) -> None:
    world, drawn = World(CompactionPolicy(max_holders=most)), random.Random(seed)
    for _ in range(60):
        world.sleep(drawn.choice([1, 20, 200, 300, 3000]))
        world.compact(checked=True)
    assert world.most_holders <= most


@pytest.mark.one_in(3)
def test_copying_grows_with_the_logarithm_of_the_number_of_sleeps() -> None:
    """Ten times the sleeps; were everything copied at each compaction, the factor would be ten times as large."""
    factors = []
    for count in (40, 400):
        world = World(CompactionPolicy(max_holders=4))
        for _ in range(count):
            world.sleep(BLOCK_TOKENS)
            world.compact(checked=False)
        factors.append(world.bytes_copied / world.bytes_slept)
    assert factors[1] <= 3 * factors[0]


@pytest.mark.parametrize(
    ("own", "held", "most", "adopted"),
    [
        (1, [1, 1, 1], 3, []),
        (1, [1, 1, 1, 1], 3, [3, 2, 1, 0]),
        (1, [4, 3, 2, 1], 3, [3, 2, 1, 0]),
        (1, [100, 3, 2, 1], 3, [3, 2, 1]),
        (1, [1, 1, 1, 100], 3, [3, 2, 1, 0]),  # one has to go, and then the small ones are cheap
        (1, [300, 1, 200, 100], 3, [3]),
    ],
)
def test_the_newest_holders_are_adopted_while_they_are_not_larger_than_what_was(
    own: int, held: list[int], most: int, adopted: list[int]
) -> None:
    named = [(bytes([number]), size) for number, size in enumerate(held)]
    assert choose_holders(own, named, most) == tuple(bytes([number]) for number in adopted)


def test_a_plan_that_was_cut_off_anywhere_is_finished_by_the_next() -> None:
    def slept() -> World:
        world = World(CompactionPolicy(max_holders=3))
        for _ in range(12):
            world.sleep(300)
        return world

    total = len(slept().plan())
    assert total > 5
    for done in range(total):
        world = slept()
        for step in world.plan()[:done]:
            world.take(step)
        for step in world.plan():
            world.take(step)
        assert not world.plan()
        held = Counter(block for file in world.files.values() for block in file.frames)
        assert set(held.values()) == {1}


def test_files_that_need_each_other_are_led_in_a_circle() -> None:
    """Two old versions each hold what the other needs, and the newest has both: neither may lose its block first."""
    world = World(CompactionPolicy(max_holders=3))
    for _ in range(3):
        world.sleep(BLOCK_TOKENS)
    one, two, newest = (_id("version", number) for number in (1, 2, 3))
    first, second = _id("span", 0), _id("span", 1)

    def change(bundle_id: bytes, frames: dict[bytes, int], **places: Any) -> None:
        file = world.files[bundle_id]
        world.files[bundle_id] = dataclasses.replace(
            file, frames={**file.frames, **frames}, places={**file.places, **places["places"]}
        )

    change(one, {}, places={first: one, second: two})
    change(two, {}, places={first: one, second: two})
    change(newest, {first: 256, second: 256}, places={first: newest, second: newest})
    for step in world.plan():
        world.take(step)
    assert first not in world.files[one].frames
    assert second not in world.files[two].frames


def test_nobody_is_led_to_a_file_that_has_lost_the_block_since_the_newest_version_was_read() -> None:
    """Least of all that file itself: it would name itself as the holder of what it has not got."""
    world = World(CompactionPolicy(max_holders=3, min_dead_ratio=0))
    for _ in range(3):
        world.sleep(BLOCK_TOKENS)
    one, newest, other = _id("version", 1), _id("version", 3), _id("other", 1)
    first = _id("span", 0)
    assert world.files[newest].places[first] == one
    before = world.files[one]
    world.files[other] = dataclasses.replace(before, bundle_id=other, row=None, retired=True, places={})
    world.files[one] = dataclasses.replace(
        before,
        frames={block: size for block, size in before.frames.items() if block != first},
        places={**before.places, first: other},
    )
    for step in world.plan():
        assert step.file.bundle_id not in step.holders.values()
        assert step.holders.get(first) != one


def test_a_file_whose_users_are_not_all_known_loses_nothing() -> None:
    world = World(CompactionPolicy(max_holders=3, min_dead_ratio=0))
    for _ in range(8):
        world.sleep(300)
    for one, file in world.files.items():
        world.files[one] = dataclasses.replace(file, users_known=False)
    before = {one: set(file.frames) for one, file in world.files.items()}
    for step in world.plan():
        world.take(step)
    assert all(before[one] <= file.frames.keys() for one, file in world.files.items())


@pytest.mark.parametrize(
    "values",
    [
        {"max_holders": 0},
        {"max_holders": 1.5},
        {"max_holders": True},
        {"min_dead_ratio": -0.1},
        {"min_dead_ratio": 1},
        {"min_dead_ratio": float("nan")},
        {"cold_after_seconds": -1},
        {"cold_after_seconds": float("inf")},
        {"cold_after_seconds": "1"},
    ],
)
def test_a_policy_of_numbers_that_mean_nothing_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        CompactionPolicy(**values)
    assert caught.value.details["field"] in values


# --- stores


def sleeps(
    store: Store, count: int, *, uri: SessionUri = URI, before: Receipt | None = None, seed: int = 0
) -> list[Receipt]:
    """So many versions, each STEP_TOKENS longer than the one before."""
    receipts = []
    for _ in range(count):
        tokens = (before.token_count if before else 0) + STEP_TOKENS
        before = sleep(store, tokens, uri=uri, before=before, seed=seed)
        receipts.append(before)
    return receipts


def require_exact(store: Store, receipts: Sequence[Receipt]) -> None:
    """Every version, byte for byte; the whole store deeply verified; and the index as one made anew."""
    for receipt in receipts:
        with store.open_session(receipt.uri, receipt.version) as reader:
            assert reader.bundle_id == receipt.bundle_id
            assert reader.tokens() == token_ids(0, receipt.token_count)
            assert [entry.id for entry in reader.entries] == [entry.id for entry in receipt.entries]
            assert contents(reader) == expected(receipt.token_count)
    assert store.verify(deep=True).findings == ()
    if store.writable:
        report = store.rebuild_index(dry_run=True)
        assert (report.actions, report.problems) == ((), ())


def holders_of(store: Store, receipt: Receipt) -> set[bytes]:
    """The other files that a wake opens."""
    with store.open_session(receipt.uri, receipt.version) as reader:
        return {entry.bundle_id for entry in reader.entries if entry.bundle_id} - {receipt.bundle_id}


def frames_in(store: Store) -> Counter[bytes]:
    """How many files of the store have a frame of each block."""
    found: Counter[bytes] = Counter()
    for path in sorted(Path(store.path).glob("bundles/*/*.mv?")):
        with contextlib.closing(FrameFile(os.open(path, os.O_RDONLY), str(path), None)) as file:
            found.update(list(file.frames))
    return found


def size_of(store: Store) -> int:
    return sum(path.stat().st_size for path in Path(store.path).glob("bundles/*/*.mv?"))


def test_every_version_is_what_it_was_and_a_wake_opens_few_files(store: Store) -> None:
    receipts = sleeps(store, 12)
    assert len(holders_of(store, receipts[-1])) == 11
    report = store.compact(URI, policy=FEW)
    assert report.ok
    assert {action.kind for action in report.actions} == {"rewrite"}
    assert len(holders_of(store, receipts[-1])) <= FEW.max_holders
    require_exact(store, receipts)
    assert set(frames_in(store).values()) == {1}, "no byte lies twice"
    assert store.compact(policy=FEW).actions == ()


@pytest.mark.one_in(2)
def test_compactions_between_sleeps_keep_the_number_of_files_low(store: Store) -> None:
    receipts: list[Receipt] = []
    for _ in range(20):
        receipts += sleeps(store, 1, before=receipts[-1] if receipts else None)
        report = store.compact(URI, policy=FEW)
        assert report.ok
        assert len(holders_of(store, receipts[-1])) <= FEW.max_holders
    require_exact(store, receipts)
    assert set(frames_in(store).values()) == {1}


def test_a_session_with_few_files_is_left_alone(store: Store) -> None:
    sleeps(store, 4)
    before = {path: path.stat().st_ino for path in Path(store.path).glob("bundles/*/*")}
    assert store.compact(policy=FEW) == MaintenanceReport("compact", False, (), 0, 0, ())
    assert {path: path.stat().st_ino for path in Path(store.path).glob("bundles/*/*")} == before


def test_a_session_that_is_not_there_is_an_error(store: Store) -> None:
    with pytest.raises(SessionNotFound):
        store.compact(URI)


def test_a_session_that_was_woken_at_an_earlier_version_and_went_on_is_compacted_whole(store: Store) -> None:
    receipts = sleeps(store, 8)
    receipts += [sleep(store, tokens, before=receipts[3]) for tokens in (1300, 1700)]
    receipts += sleeps(store, 5, before=receipts[-1])
    assert store.compact(policy=FEW).ok
    assert len(holders_of(store, receipts[-1])) <= FEW.max_holders
    require_exact(store, receipts)


def test_a_dry_run_tells_the_same_steps_and_changes_nothing(store: Store, store_path: Path) -> None:
    sleeps(store, 8)
    before = {path: path.stat().st_ino for path in Path(store.path).glob("bundles/*/*")}
    told = store.compact(policy=FEW, dry_run=True)
    with Store.open(store_path, writable=False) as other:
        assert other.compact(policy=FEW, dry_run=True).actions == told.actions
    assert told.dry_run
    assert {path: path.stat().st_ino for path in Path(store.path).glob("bundles/*/*")} == before
    done = store.compact(policy=FEW)
    assert [(one.kind, one.path, one.version) for one in told.actions] == [
        (one.kind, one.path, one.version) for one in done.actions
    ]
    assert told.actions


def test_whoever_wants_it_to_stop_stops_it_between_two_steps(store: Store) -> None:
    receipts = sleeps(store, 8)
    asked = iter([False, False, True])
    report = store.compact(policy=FEW, should_stop=lambda: next(asked, True))
    assert len(report.actions) <= 2
    require_exact(store, receipts)
    assert store.compact(policy=FEW).ok
    require_exact(store, receipts)
    assert set(frames_in(store).values()) == {1}


# --- readers and sleeps beside it


def test_open_readers_go_on_with_the_right_bytes(store: Store, store_path: Path) -> None:
    receipts = sleeps(store, 8)
    with Store.open(store_path, writable=False) as other:
        readers = [
            (receipt, opened.open_session(URI, receipt.version)) for receipt in receipts for opened in (store, other)
        ]
        for receipt, reader in readers:
            reader.read_slot(reader.entries[0], 0)
            assert reader.manifest.version == receipt.version
        store.compact(policy=FEW)
        for receipt, reader in readers:
            assert contents(reader) == expected(receipt.token_count)
            reader.close()
        store.compact(policy=FEW)
        for receipt in receipts:
            with other.open_session(URI, receipt.version) as reader:
                assert contents(reader) == expected(receipt.token_count)
    require_exact(store, receipts)
    assert set(frames_in(store).values()) == {1}


def test_a_read_only_store_reads_on_while_files_lose_their_frames(store: Store, store_path: Path) -> None:
    """Another process pins nothing here: its readers look again where a block went."""
    receipts = sleeps(store, 8)
    with Store.open(store_path, writable=False) as other:
        readers = [other.open_session(URI, receipt.version) for receipt in receipts]
        store.compact(policy=FEW)
        assert set(frames_in(store).values()) == {1}
        for receipt, reader in zip(receipts, readers, strict=True):
            assert contents(reader) == expected(receipt.token_count)
            reader.close()


@contextlib.contextmanager
def while_writing(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Do something while the so-many-th new file is being written: after the needs were asked, before the lock."""
    original, calls = compaction.prepared, itertools.count(1)

    @contextlib.contextmanager
    def acting(*args: Any, **options: Any) -> Iterator[Prepared]:
        with original(*args, **options) as fresh:
            if next(calls) == number:
                act()
            yield fresh

    with mock.patch.object(compaction, "prepared", acting):
        yield


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(1, 9))
def test_a_sleep_that_comes_between_keeps_what_it_refers_to(store: Store, number: int) -> None:
    """Another session finds the same blocks by their ids, in the files that are about to lose them."""
    receipts = sleeps(store, 8)
    forks: list[Receipt] = []
    with while_writing(number, lambda: forks.append(sleep(store, 2400, uri=OTHER_URI))):
        store.compact(policy=FEW)
    assert forks
    require_exact(store, [*receipts, *forks])
    store.compact(policy=FEW)
    require_exact(store, [*receipts, *forks])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(1, 9))
def test_the_session_itself_may_sleep_meanwhile(store: Store, number: int) -> None:
    receipts = sleeps(store, 8)
    with while_writing(number, lambda: receipts.extend(sleeps(store, 1, before=receipts[-1]))):
        store.compact(policy=FEW)
    require_exact(store, receipts)
    store.compact(policy=FEW)
    require_exact(store, receipts)
    assert len(holders_of(store, receipts[-1])) <= FEW.max_holders
    assert set(frames_in(store).values()) == {1}


def test_a_session_that_is_deleted_meanwhile_stays_deleted(store: Store) -> None:
    sleeps(store, 8)
    with while_writing(2, lambda: store.delete_session(URI)):
        assert store.compact(policy=FEW).ok
    assert store.versions(URI) == []
    store.gc()
    assert not list(Path(store.path).glob("bundles/*/*"))


def overtaking(store: Store, receipts: list[Receipt]) -> None:
    """The session sleeps on and is compacted by somebody else: every block that its newest version needs moves."""
    receipts.extend(sleeps(store, 4, before=receipts[-1]))
    assert store.compact(policy=CompactionPolicy(max_holders=1, min_dead_ratio=0)).bytes_written


def test_a_plan_that_another_compaction_has_overtaken_finds_no_damage(store: Store) -> None:
    """It takes frames from files that have lost them since they were looked at."""
    receipts = sleeps(store, 8)
    with meanwhile(compaction, "plan_compaction", lambda: overtaking(store, receipts), after=True):
        assert store.compact(policy=FEW).problems == ()
    require_exact(store, receipts)


def test_blocks_that_move_between_two_looks_of_a_compaction_are_no_damage(store: Store) -> None:
    """The file that was the newest is read, and the files that it names only when they have lost the blocks."""
    receipts = sleeps(store, 8)
    with meanwhile(compaction._Look, "_load_holders", lambda: overtaking(store, receipts)):
        assert store.compact(policy=FEW).problems == ()
    require_exact(store, receipts)


# --- forks, deletes, dead frames


@pytest.mark.one_in(2)
def test_compacted_forks_cost_one_base(store: Store) -> None:
    base = sleeps(store, 5)
    forks: list[Receipt] = []
    for number in range(20):
        uri = SessionUri("default", f"fork-{number}")
        fork: Receipt = base[-1]
        for step in range(5):
            tokens = 1500 + STEP_TOKENS * (step + 1)
            fork = sleep(store, tokens, uri=uri, before=fork)
        forks.append(fork)
    before = frames_in(store)
    assert store.compact(policy=FEW).ok
    assert frames_in(store).keys() == before.keys()
    assert set(frames_in(store).values()) == {1}
    require_exact(store, [*base, *forks])


def test_forks_of_different_content_leave_the_base_where_it_is(store: Store) -> None:
    base = sleeps(store, 5)
    inodes = {receipt.bundle_id: bundle_path(store, receipt.bundle_id).stat().st_ino for receipt in base}
    fork = sleep(store, 1800, uri=OTHER_URI, before=base[-1])
    fork = sleeps(store, 8, uri=OTHER_URI, before=fork)[-1]
    assert store.compact(OTHER_URI, policy=FEW).ok
    assert {one: bundle_path(store, one).stat().st_ino for one in inodes} == inodes
    shared = {receipt.bundle_id for receipt in base}
    assert len(holders_of(store, fork) - shared) <= FEW.max_holders
    require_exact(store, [*base, fork])


def test_a_deleted_session_keeps_only_the_blocks_that_a_fork_needs(store: Store) -> None:
    receipts = sleeps(store, 8)
    fork = sleep(store, 1200, uri=OTHER_URI, before=receipts[2])
    store.compact(policy=FEW)
    store.delete_session(URI)
    report = store.compact(policy=CompactionPolicy(min_dead_ratio=0))
    assert report.ok
    assert {action.kind for action in report.actions} <= {"strip", "remove"}
    with store.open_session(OTHER_URI) as reader:
        needed = {entry.id for entry in reader.entries}
    assert frames_in(store).keys() == needed
    for path in Path(store.path).glob("bundles/*/*.mvr"):
        assert b"temperature" not in path.read_bytes(), "nothing of the session that it was"
    require_exact(store, [fork])
    store.delete_session(OTHER_URI)
    assert not list(Path(store.path).glob("bundles/*/*"))


def retire_versions(store: Store, receipts: Sequence[Receipt]) -> None:
    """What a retention does with versions that nothing keeps."""
    core = store._core
    with core.committing():
        deletion.retire(core.folder, core.index, core.pins, [receipt.bundle_id for receipt in receipts])
        deletion.remove_unneeded(core.folder, core.index, core.pins)


@pytest.mark.parametrize("kept", [[0], [7], [3], [0, 7], [2, 5]])
def test_versions_that_are_dropped_after_a_compaction_leave_exactly_what_the_others_need(
    store: Store, kept: list[int]
) -> None:
    receipts = sleeps(store, 8)
    store.compact(policy=FEW)
    retire_versions(store, [receipt for number, receipt in enumerate(receipts) if number not in kept])
    left = [receipts[number] for number in kept]
    require_exact(store, left)
    assert store.compact(policy=CompactionPolicy(max_holders=3, min_dead_ratio=0)).ok
    assert frames_in(store) == Counter({entry.id for receipt in left for entry in receipt.entries})
    require_exact(store, left)


def test_dead_frames_that_are_a_small_part_of_a_file_stay(store: Store) -> None:
    receipts = sleeps(store, 8)
    store.compact(policy=FEW)
    retire_versions(store, receipts[:1])
    before = frames_in(store)
    store.compact(policy=CompactionPolicy(max_holders=3, min_dead_ratio=0.99))
    assert frames_in(store) == before


# --- damage and room


def test_a_damaged_block_is_reported_and_everything_else_is_compacted(store: Store) -> None:
    receipts = sleeps(store, 8)
    others = sleeps(store, 8, uri=OTHER_URI, seed=1)
    path = bundle_path(store, receipts[3].bundle_id)
    flip(path, 3000)
    sound = {finding.path for finding in store.verify(deep=True).findings}
    report = store.compact(policy=FEW)
    assert {problem.path for problem in report.problems}
    assert {finding.path for finding in store.verify(deep=True).findings} == sound, "no damage is carried on"
    assert len(holders_of(store, others[-1])) <= FEW.max_holders
    assert len(holders_of(store, receipts[-1])) <= FEW.max_holders + 1, "all but the damaged one were adopted"
    for receipt in (*receipts[:3], *others):
        with store.open_session(receipt.uri, receipt.version) as reader:
            assert contents(reader) == expected(receipt.token_count, seed=int(receipt in others))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", range(8))
def test_a_version_whose_file_is_gone_keeps_what_it_may_need_and_stops_nobody_else(store: Store, number: int) -> None:
    receipts = sleeps(store, 8)
    others = sleeps(store, 8, uri=OTHER_URI, seed=1)
    path = bundle_path(store, receipts[number].bundle_id)
    aside = path.rename(path.with_suffix(".aside"))
    report = store.compact(policy=FEW)
    assert {problem.code for problem in report.problems} == {"bundle_missing"}
    assert len(holders_of(store, others[-1])) <= FEW.max_holders
    assert set(frames_in(store).values()) == {1}, "nothing was copied that then has to stay where it was"
    aside.rename(path)
    require_exact(store, receipts)
    assert store.compact(policy=FEW).ok
    require_exact(store, receipts)
    assert len(holders_of(store, receipts[-1])) <= FEW.max_holders


def test_what_only_a_missing_version_may_need_is_not_copied_elsewhere(store: Store) -> None:
    """The first versions have been led to the fifth; one of them is gone when the tenth is compacted."""
    receipts = sleeps(store, 5)
    store.compact(policy=FEW)
    receipts += sleeps(store, 5, before=receipts[-1])
    path = bundle_path(store, receipts[1].bundle_id)
    aside = path.rename(path.with_suffix(".aside"))
    one = CompactionPolicy(max_holders=1)
    report = store.compact(policy=one)
    assert {problem.code for problem in report.problems} == {"bundle_missing"}
    assert holders_of(store, receipts[-1]) == {receipts[4].bundle_id}, "the others were adopted"
    assert set(frames_in(store).values()) == {1}
    aside.rename(path)
    require_exact(store, receipts)


def test_a_session_whose_newest_version_has_lost_a_block_is_reported_and_left(store: Store) -> None:
    """Some other program has put an older file back."""
    receipts = sleeps(store, 8)
    others = sleeps(store, 8, uri=OTHER_URI, seed=1)
    holder = receipts[3].bundle_id
    with contextlib.closing(store._core.open_bundle(holder)) as file:
        lost = next(iter(file.frames))
        kept = [(block, holder) for block in file.frames if block != lost]
        holders = {entry.id: entry.bundle_id for entry in file.entries if entry.bundle_id}
    other = receipts[0].bundle_id  # a lie: the block is nowhere
    with prepared(store._core, holder, Contents(kept, {**holders, lost: other})) as fresh, store._core.committing():
        fresh._replace_live()
    report = store.compact(policy=FEW)
    assert {problem.code for problem in report.problems} == {"block_missing"}
    assert len(holders_of(store, others[-1])) <= FEW.max_holders
    for receipt in receipts[:3]:
        with store.open_session(receipt.uri, receipt.version) as reader:
            assert contents(reader) == expected(receipt.token_count)


def test_where_a_bundle_cannot_be_read_nothing_is_compacted(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        receipts = sleeps(store, 8)
        bundle_path(store, receipts[5].bundle_id).write_bytes(b"nothing")
        (store_path / "index.sqlite").unlink()
    with Store.open(store_path, writable=True) as store:
        report = store.compact(policy=FEW)
        assert not report.ok
        assert report.actions == ()


@pytest.mark.parametrize("writes", [1, 3, 20, 30])
def test_a_full_disk_ends_it_and_leaves_everything_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    receipts = sleeps(store, 8)
    left = iter(range(writes))
    append = TempFile.append

    def filling(temp: TempFile, buffers: Any) -> None:
        if next(left, None) is None:
            raise NoSpace("full")
        append(temp, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(TempFile, "append", filling)
        report = store.compact(policy=FEW)
    assert [problem.code for problem in report.problems] == ["no_space"]
    require_exact(store, receipts)
    assert not list(Path(store.path).glob("bundles/*.tmp"))
    assert store.compact(policy=FEW).ok
    require_exact(store, receipts)


def test_the_days_budget_ends_it_before_it_writes_what_has_no_room(store_path: Path) -> None:
    """A daemon tries again and again: what is refused late would use up what others may write in a day."""
    with Store.open(store_path, writable=True) as store:
        receipts = sleeps(store, 8)
        written = store.index.written_on(utc_day(time.time_ns()))
    with Store.open(store_path, writable=True, budget=Budget(max_bytes_per_day=2 * written + 60_000)) as store:
        report = store.compact(policy=FEW)
        assert [problem.code for problem in report.problems] == ["budget_exceeded"]
        assert store.index.written_on(utc_day(time.time_ns())) == written
        require_exact(store, receipts)


# --- cold


def cold(seconds: float = 0.0) -> CompactionPolicy:
    return CompactionPolicy(cold_after_seconds=seconds)


def test_cold_files_are_compressed_once_and_read_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_making, "raw_bytes", lambda size, *salt: (repr(salt).encode() * size)[:size])
    receipts = sleeps(store, 3)
    before = size_of(store)
    report = store.compact(policy=cold())
    assert {action.kind for action in report.actions} == {"recompress"}
    assert size_of(store) < before / 2
    assert report.bytes_freed - report.bytes_written == before - size_of(store)
    require_exact(store, receipts)
    monkeypatch.setattr(compaction, "prepared", None)  # nothing is even written for a second look
    assert store.compact(policy=cold()).actions == ()


@pytest.mark.parametrize("refusal", [StoreIoError("read-only"), NoSpace("full")])
def test_an_index_that_cannot_be_told_of_a_new_file_is_a_problem_and_the_file_is_told_as_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, refusal: StoreError
) -> None:
    monkeypatch.setattr(store_making, "raw_bytes", lambda size, *salt: (repr(salt).encode() * size)[:size])
    receipts = sleeps(store, 3)
    before = size_of(store)
    with mock.patch.object(Index, "finish_rewrite", side_effect=refusal):
        report = store.compact(policy=cold())
    assert {problem.code for problem in report.problems} == {refusal.code}
    assert report.bytes_freed - report.bytes_written == before - size_of(store) > 0
    written = 1 if isinstance(refusal, NoSpace) else 3
    assert [action.kind for action in report.actions] == ["recompress"] * written
    with reopened(store) as again:
        require_exact(again, receipts)


def test_what_the_system_refuses_is_told_also_where_the_session_slept_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then what is damaged says nothing: it may have moved. A refusal is no less one."""
    receipts = sleeps(store, 8)

    def overtaken() -> None:
        overtaking(store, receipts)
        monkeypatch.setattr(compaction, "prepared", mock.Mock(side_effect=StoreIoError("read-only")))

    with meanwhile(compaction, "plan_compaction", overtaken, after=True):
        assert {problem.code for problem in store.compact(policy=FEW).problems} == {"store_io"}
    require_exact(store, receipts)


def test_what_does_not_shrink_stays_as_it_is(store: Store) -> None:
    sleeps(store, 3)
    before = {path: path.stat().st_ino for path in Path(store.path).glob("bundles/*/*")}
    assert store.compact(policy=cold()).actions == ()
    assert {path: path.stat().st_ino for path in Path(store.path).glob("bundles/*/*")} == before


def test_what_was_slept_a_moment_ago_stays_raw(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_making, "raw_bytes", lambda size, *salt: bytes(size))
    sleeps(store, 3)
    assert store.compact(policy=cold(3600.0)).actions == ()
