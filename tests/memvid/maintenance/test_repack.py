"""Repack: what nothing needs leaves the disk, blocks come to lie in few packs, and no moment of it loses a byte."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid.disk.budget import Budget
from torpor.memvid.errors import BlockMissing, NoSpace, StoreIoError
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.marks import Marks
from torpor.memvid.format.records import Receipt
from torpor.memvid.maintenance import repack as repacking
from torpor.memvid.maintenance.repack_plan import CLEARING, RepackPolicy, Step
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.needs import Needs
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import stores_cut_off
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, names, pack_of, packs_of, require_awake, sleep

FEW = RepackPolicy(max_packs=3)


def sleeps(store: Store, count: int, *, uri: SessionUri = URI, seed: int = 0) -> list[Receipt]:
    """Versions of one session, each 256 tokens longer than the last."""
    return making.sleep_each(store, *(256 * number for number in range(1, count + 1)), uri=uri, seed=seed)


def require_all(store: Store, count: int, *, uri: SessionUri = URI, seed: int = 0) -> None:
    for number in range(1, count + 1):
        require_awake(store, 256 * number, uri=uri, version=number, seed=seed)


def kinds(report: Any) -> list[str]:
    return sorted(action.kind for action in report.actions)


def left_by_a_delete(store: Store, receipt: Receipt) -> list[Path]:
    """The packs of `receipt`, as a delete leaves them that cannot unlink them."""
    kept = {path: path.read_bytes() for path in packs_of(store, receipt)}
    store.delete_session(receipt.uri)
    for path, data in kept.items():
        path.write_bytes(data)
    store._core.look_again()
    return list(kept)


def test_packs_that_nothing_needs_go_and_the_figures_tell(store: Store) -> None:
    sleep(store)
    gone = sleep(store, uri=OTHER_URI, seed=1)
    (pack,) = left_by_a_delete(store, gone)
    size = pack.stat().st_size
    before = names(store.path)
    with Store.open(store.path, writable=False) as beside:
        plan = beside.repack(dry_run=True)
    assert names(store.path) == before
    report = store.repack()
    assert [(action.kind, action.path, action.size_bytes) for action in report.actions] == [("remove", str(pack), size)]
    assert (plan.actions, plan.bytes_freed) == (report.actions, report.bytes_freed)
    assert (report.bytes_freed, report.bytes_written, report.problems) == (size, 0, ())
    require_awake(store, 300)
    assert store.repack().actions == ()


def test_a_pack_that_is_mostly_unneeded_is_written_anew_with_its_blocks_alone(store: Store) -> None:
    first = sleep(store, 300)
    sleep(store, 600, before=first)
    store.delete_version(URI, 1)  # its tail and state; the first span is the next version's too
    before = sum(path.stat().st_size for path in Path(store.path, "packs").iterdir())
    report = store.repack(policy=CLEARING)
    after = sum(path.stat().st_size for path in Path(store.path, "packs").iterdir())
    assert kinds(report) == ["rewrite"]
    assert before - after == report.bytes_freed - report.bytes_written > 0
    assert {entry.id for entry in first.entries[1:]} & making.all_blocks(store) == set()
    require_awake(store, 600)
    with making.reopened(store, anew=True) as store:
        require_awake(store, 600)


def test_a_session_of_many_packs_comes_to_lie_in_few_in_the_order_of_a_wake(store: Store) -> None:
    made = sleeps(store, 5)
    assert len(packs_of(store, made[-1])) == 5
    report = store.repack(policy=FEW)
    assert kinds(report) == ["rewrite"]
    (pack,) = packs_of(store, made[-1])
    with repacking.open_frames(store._core.folder, str(pack.relative_to(store.path))) as file:
        assert list(file.frames)[: len(made[-1].entries)] == [entry.id for entry in made[-1].entries]
    require_all(store, 5)
    assert store.repack(policy=FEW).actions == ()
    with making.reopened(store, anew=True) as store:
        require_all(store, 5)


def test_a_repack_of_one_session_leaves_the_packs_of_others(store: Store) -> None:
    sleeps(store, 5)
    others = sleeps(store, 5, uri=OTHER_URI, seed=1)
    before = set(packs_of(store, others[-1]))
    store.repack(URI, policy=FEW)
    assert set(packs_of(store, others[-1])) == before
    require_all(store, 5)
    require_all(store, 5, uri=OTHER_URI, seed=1)


def test_what_forks_share_is_not_joined(store: Store) -> None:
    base = sleep(store, 1280)
    forks = making.sleep_each(store, *(1280 + 256 * number for number in range(1, 5)), uri=FORK_URI, before=base)
    shared = packs_of(store, base)
    report = store.repack(policy=RepackPolicy(max_packs=1))
    assert kinds(report) == ["rewrite"]
    assert packs_of(store, base) == shared
    assert len(packs_of(store, forks[-1])) == 2
    require_awake(store, 1280)
    require_awake(store, 1280 + 4 * 256, uri=FORK_URI)


def test_a_sleep_that_refers_to_a_block_meanwhile_keeps_it(store: Store) -> None:
    """The block is dead when the repack looks, and needed when it would go."""
    gone = sleep(store, 512, uri=OTHER_URI)
    assert left_by_a_delete(store, gone)

    def again() -> None:
        sleep(store, 512, uri=FORK_URI)

    with making.meanwhile(repacking, "plan_repack", again, after=True):
        store.repack()
    require_awake(store, 512, uri=FORK_URI)


def test_a_sleep_that_refers_to_what_a_rewrite_leaves_out_keeps_the_old_pack(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 512, uri=OTHER_URI)
    store.delete_session(URI)
    pack = pack_of(store, first)

    def again() -> None:
        sleep(store, 600, uri=FORK_URI)

    with making.meanwhile(repacking.PackWriter, "finish", again):
        store.repack(policy=CLEARING)
    assert pack.exists()
    require_awake(store, 600, uri=FORK_URI)
    store.repack(policy=CLEARING)
    require_awake(store, 600, uri=FORK_URI)
    require_awake(store, 512, uri=OTHER_URI)


def test_a_manifest_that_goes_missing_meanwhile_stops_every_removal(store: Store) -> None:
    sleeps(store, 5)
    lost = sleep(store, uri=OTHER_URI, seed=1)
    store.tag(OTHER_URI, 1, "kept")
    path = making.manifest_path(store, lost.bundle_id)
    with store.open_session(URI, 5):
        store.delete_version(URI, 5)  # a dead pack
    before = names(store.path)
    good = path.read_bytes()
    with making.meanwhile(repacking, "plan_repack", path.unlink, after=True):
        report = store.repack(policy=FEW)
    assert [finding.path for finding in report.problems] == [str(path)]
    making.put(path, good)
    assert names(store.path) == before
    assert Marks.load(store._core.folder).tagged(OTHER_URI, "kept") == lost.bundle_id
    require_awake(store, 300, uri=OTHER_URI, seed=1)


def test_a_new_pack_does_not_bring_back_what_was_deleted_meanwhile(store: Store) -> None:
    made = sleeps(store, 5)
    with making.meanwhile(repacking.PackWriter, "finish", lambda: store.delete_session(URI)):
        store.repack(policy=FEW)
    assert making.all_blocks(store).isdisjoint(entry.id for entry in made[-1].entries)
    assert names(store.path) == set()


def test_a_block_that_lies_twice_is_proven_before_its_other_copy_goes(store: Store) -> None:
    twice = sleep(store, 512)
    pack = pack_of(store, twice)
    copy = pack.read_bytes()
    store.repack(policy=FEW)
    sleep(store, 512 + 256, before=twice)
    store.repack(policy=RepackPolicy(max_packs=1))
    assert not pack.exists()
    making.put(pack, copy)
    (new,) = packs_of(store, twice)
    report = store.repack()
    assert [(action.kind, action.path) for action in report.actions] == [("remove", str(pack))]
    making.put(pack, copy)
    making.spoil(store, twice, 0)  # the new copy: the old one is needed
    report = store.repack()
    assert report.problems
    require_awake(store, 512, version=1)
    require_awake(store, 768)
    assert new != pack


@pytest.mark.parametrize("version", [1, 2])
def test_a_pack_whose_other_copies_are_all_damaged_stays_as_it_is(store: Store, version: int) -> None:
    first = sleep(store, 600)
    pack = pack_of(store, first)
    copy = pack.read_bytes()
    sleep(store, 900, before=first)
    store.repack(policy=RepackPolicy(max_packs=1))
    making.spoil(store, first, *range(4))
    making.put(pack, copy)
    if version == 2:
        store.strip(URI, 1)  # so that of this pack only a part is needed
    store.repack()
    store.repack()
    assert version == 2 or pack.read_bytes() == copy
    with store.open_session(URI, version) as reader:
        reader.read_slot(reader.entries[0], 0)


@pytest.mark.parametrize("proven", [False, True])
def test_a_copy_is_proven_in_the_file_that_has_its_name_when_the_other_goes(store: Store, proven: bool) -> None:
    """Another file, which is damaged, comes in its place. proven: between the proof and the removal."""
    receipt = sleep(store, 300)
    first = pack_of(store, receipt)
    home, other = sorted([first, making.copy_pack(store, first)], reverse=True)
    block = receipt.entries[0].id
    assert store._core.find_sound(block, but_for=[f"packs/{other.name}"]), "it stays open"
    if proven:
        with making.meanwhile(repacking._Repack, "_commit", lambda: making.swap_spoilt(store, home, block)):
            store.repack()
    else:
        making.swap_spoilt(store, home, block)
        store.repack()
    require_awake(store, 300)


def test_a_pack_with_a_damaged_needed_block_is_told_and_left(store: Store) -> None:
    made = sleeps(store, 5)
    bad = pack_of(store, made[0])
    making.spoil(store, made[0], 0)
    data = bad.read_bytes()
    report = store.repack(policy=FEW)
    assert [finding.path for finding in report.problems] == [str(bad)]
    assert bad.read_bytes() == data
    assert len(packs_of(store, made[-1])) == 2
    report = store.repack(policy=RepackPolicy(max_packs=1))  # one sound pack is left beside it: nothing to join
    assert ([finding.path for finding in report.problems], report.actions) == ([str(bad)], ())
    making.spoil(store, made[0], 0)  # as it was
    require_all(store, 5)


def test_a_damaged_block_that_nothing_needs_does_not_keep_its_pack(store: Store) -> None:
    made = [sleep(store, 300)]
    made.append(sleep(store, 600, before=made[0]))
    making.spoil(store, made[0], 1)
    store.delete_version(URI, 1)
    assert store.repack(policy=CLEARING).problems == ()
    require_awake(store, 600)


def test_an_unreadable_pack_is_told_and_left(store: Store) -> None:
    pack = pack_of(store, sleep(store))
    making.flip(pack, 3)
    with making.reopened(store, anew=True) as store:
        report = store.repack()
        assert [finding.path for finding in report.problems] == [str(pack)]
        assert pack.exists()
        pack.unlink()
        assert store.repack().problems == (), "it was moved away by hand"


def test_strips_of_versions_that_are_gone_go_and_others_stay(store: Store) -> None:
    first, second = sleep(store), sleep(store, 400)
    store.strip(URI)
    store._core.index.forget_in_file(store._core.folder, [first.bundle_id])
    making.manifest_path(store, first.bundle_id).unlink()
    with making.reopened(store, anew=True) as store:
        assert store.opening.unreadable == ()
        report = store.repack()
        assert "unmark" in kinds(report)
        assert Marks.load(store._core.folder).bundle_ids == {second.bundle_id}


def test_leftovers_of_unfinished_writes_go(store: Store) -> None:
    Path(store.path, "damaged").mkdir(mode=0o700)
    for top in ("", "versions", "packs", "damaged"):
        making.put(Path(store.path, top, "0123456789abcdef.tmp"), b"torn")
    assert store.repack(dry_run=True).bytes_freed == 16
    assert store.repack().bytes_freed == 16
    assert names(store.path) == set()


def test_what_a_client_handed_over_and_nobody_took_goes_after_a_day(store: Store) -> None:
    incoming = Path(store.path, "incoming")
    incoming.mkdir(mode=0o700)
    for name, hours in (("a" * 64 + ".mvb", 25), ("b" * 64 + ".mvb", 23), ("notes.txt", 25)):
        making.put(incoming / name, b"12345")
        os.utime(incoming / name, (time.time() - hours * 3600,) * 2)
    assert store.repack(dry_run=True).bytes_freed == store.repack().bytes_freed == 5
    assert sorted(path.name[0] for path in incoming.iterdir()) == ["b", "n"]


def test_cold_packs_are_compressed_once_and_warm_ones_never(store: Store) -> None:
    receipt = making.sleep_planes(store, URI, compressed=False)
    (pack,) = packs_of(store, receipt)
    assert store.repack(policy=RepackPolicy(cold_after_seconds=3600)).actions == ()
    report = store.repack(policy=RepackPolicy(cold_after_seconds=0))
    assert kinds(report) == ["recompress"]
    assert packs_of(store, receipt) != [pack]
    assert report.bytes_written < report.bytes_freed
    with store.open_session(URI) as reader:
        assert bytes(reader.read_slot(reader.entries[0], 0)) == making.PLANES_BYTES[0]
    assert store.repack(policy=RepackPolicy(cold_after_seconds=0)).actions == ()
    sleep(store, uri=OTHER_URI)  # nothing in it shrinks
    assert store.repack(policy=RepackPolicy(cold_after_seconds=0)).actions == ()


def test_a_full_disk_ends_a_repack_and_leaves_the_store_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps(store, 5)
    before = names(store.path)
    monkeypatch.setattr(repacking.PackWriter, "finish", making.refusing(NoSpace("No room.")))
    report = store.repack(policy=FEW)
    assert [finding.code for finding in report.problems] == [NoSpace.code]
    assert names(store.path) == before
    require_all(store, 5)


def test_half_of_the_days_budget_is_left_to_sleeps(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        sleeps(store, 5)
    with Store.open(store_path, writable=True, budget=Budget(max_bytes_per_day=1000)) as store:
        report = store.repack(policy=FEW)
        assert [finding.code for finding in report.problems] == ["budget_exceeded"]
        require_all(store, 5)


def test_a_repack_can_be_stopped_between_steps_and_finished_later(store: Store) -> None:
    sleeps(store, 5)
    sleeps(store, 5, uri=OTHER_URI, seed=1)
    calls = itertools.count(1)
    report = store.repack(policy=FEW, should_stop=lambda: next(calls) > 1)
    assert kinds(report) == ["rewrite"]
    assert kinds(store.repack(policy=FEW)) == ["rewrite"]
    require_all(store, 5)
    require_all(store, 5, uri=OTHER_URI, seed=1)


def prepare(store: Store) -> None:
    """A store in which a repack has all kinds of things to do."""
    sleeps(store, 5)
    made = sleep(store, 300, uri=OTHER_URI, seed=1)
    sleep(store, 600, uri=OTHER_URI, seed=1, before=made)
    store.delete_version(OTHER_URI, 1)
    sleep(store, uri=FORK_URI, seed=2)
    with store.open_session(FORK_URI):
        store.delete_session(FORK_URI)


def require_prepared(store: Store) -> None:
    require_all(store, 5)
    require_awake(store, 600, uri=OTHER_URI, seed=1)


@pytest.mark.one_in(1)
def test_a_repack_that_is_cut_off_leaves_a_sound_store_and_the_next_one_finishes(store: Store, tmp_path: Path) -> None:
    prepare(store)
    policy = RepackPolicy(max_packs=3, max_unneeded=0)
    for again in stores_cut_off(store, tmp_path / "cut", lambda: store.repack(policy=policy)):
        assert again.opening.unreadable == ()
        require_prepared(again)
        again.repack(policy=policy)
        require_prepared(again)
        assert again.repack(policy=policy).actions == ()
        assert len(names(again.path)) == 6 + 3  # manifests and packs


def test_a_pack_that_the_system_does_not_remove_is_told_and_goes_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps(store, 5)
    with monkeypatch.context() as patched:
        patched.setattr(StoreFolder, "remove", making.refusing(StoreIoError("The system refused.")))
        report = store.repack(policy=FEW)
    assert [finding.code for finding in report.problems] == [StoreIoError.code]
    require_all(store, 5)
    assert kinds(store.repack(policy=FEW)) == ["remove"] * 5
    require_all(store, 5)


@pytest.mark.parametrize("what", ["repack", "forget", "beside"])
def test_a_version_that_is_deleted_behind_the_look_is_not_missing(store: Store, what: str) -> None:
    """By another thread, or by a daemon beside this process."""
    sleeps(store, 5)
    for uri in (OTHER_URI, FORK_URI):
        sleep(store, uri=uri, seed=2)
    at = 2 if what == "forget" else 1  # the first look of a forget is its delete's, and nothing comes between
    delete = making.meanwhile(Needs, "now", lambda: store.delete_session(OTHER_URI), at=at)
    with Store.open(store.path, writable=False) as beside, delete:
        if what == "forget":
            report = store.forget(FORK_URI)
        else:
            report = (beside if what == "beside" else store).repack(policy=FEW, dry_run=what == "beside")
    assert (report.problems, "rewrite" in kinds(report)) == ((), what != "forget")


def test_turns_that_a_daemon_has_covered_meanwhile_tell_a_dry_run_of_no_missing_version(store: Store) -> None:
    sleep(store)
    store.acknowledge([making.turn(store, 5)])
    with Store.open(store.path, writable=False) as beside:
        sleep(store, 600)
        store.delete_version(URI, 1)
        assert beside.repack(dry_run=True).problems == ()


def test_a_lost_block_is_still_lost_and_nothing_else(store: Store) -> None:
    made = sleeps(store, 5)
    pack = pack_of(store, made[1])
    data = pack.read_bytes()
    pack.unlink()
    store.repack(policy=RepackPolicy(max_packs=2))
    with pytest.raises(BlockMissing):
        require_awake(store, 1280)
    making.put(pack, data)
    require_all(store, 5)


def test_small_packs_are_written_together_but_for_a_damaged_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    uris = [SessionUri("default", f"s{number}") for number in range(6)]
    receipts = [sleep(store, 600, uri=uri, seed=seed) for seed, uri in enumerate(uris)]
    for receipt in receipts[:5]:
        making.mark_stripped(store, receipt)
    damaged = pack_of(store, receipts[2])
    making.flip(damaged, making.frame_in(damaged, receipts[2].entries[0].id).offset + 40)
    asked, real = list[int](), repacking.needed_now
    monkeypatch.setattr(repacking, "needed_now", lambda *of, **how: asked.append(1) or real(*of, **how))
    report = store.repack(policy=CLEARING)
    assert {problem.path for problem in report.problems} == {str(damaged)}
    assert [action.kind for action in report.actions] == ["rewrite"] * 4
    assert len(asked) <= 5, "at the look and the end, for the four twice, and for the damaged one alone"
    assert damaged.exists()
    require_awake(store, 600, uri=uris[5], seed=5)
    for number in (0, 1, 3, 4):
        assert making.ledger(store, uris[number]) == making.token_ids(0, 600, number)
        assert store.index.packs_of(receipts[number].entries[0].id) == []


def test_where_some_of_the_small_packs_find_room_what_they_replace_goes(store: Store) -> None:
    for seed in range(5):
        making.mark_stripped(store, sleep(store, 600, uri=SessionUri("default", f"s{seed}"), seed=seed))
    pack_bytes = store.repack(policy=CLEARING, dry_run=True).bytes_written // 5
    day_bytes = 2 * (sum(store.index.written().values()) + 5 * pack_bytes // 2)  # a repack has half of it
    store._core.account.budget = Budget(max_bytes_per_day=day_bytes)
    report = store.repack(policy=CLEARING)
    assert [action.kind for action in report.actions] == ["rewrite"] * 2
    assert {problem.code for problem in report.problems} == {"budget_exceeded"}


@pytest.mark.parametrize("how", ["import", "sleep"])
def test_a_copy_of_which_the_header_alone_was_read_takes_no_pack_away(store: Store, tmp_path: Path, how: str) -> None:
    """A stripped block lies in two packs, and one copy is damaged; while they are repacked a version comes that needs
    its keys and values, and finds them sound in the other one."""
    wanted, other = sleep(store, 512, seed=1), sleep(store, 256, uri=OTHER_URI, seed=9)
    store.export_session(URI, None, tmp_path / "exported")
    sound = pack_of(store, wanted)
    joined = making.copy_blocks(store, [entry.id for entry in (*other.entries, *wanted.entries)])
    making.mark_stripped(store, wanted)
    making.spoil_frame(joined, making.frame_in(joined, wanted.entries[0].id))
    store = making.reopened(store)
    real, uri = repacking._Repack._try, URI if how == "import" else FORK_URI
    done: list[Receipt] = []

    def attempt(self: repacking._Repack, step: Step) -> set[str]:
        if not done and any(pack.name.endswith(sound.name) for pack in step.olds):
            done.append(
                store.import_file(tmp_path / "exported") if how == "import" else sleep(store, 512, uri=uri, seed=1)
            )
        return real(self, step)

    with mock.patch.object(repacking._Repack, "_try", attempt):
        store.repack()
    assert done
    require_awake(store, 512, uri=uri, seed=1)
    store.close()
