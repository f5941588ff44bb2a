"""Prune: drops what no rule keeps, in the order of a delete; what stays wakes to the bit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.answers import Lossy
from torpor.memvid.folder.journal import Journal
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.format.records import Receipt
from torpor.memvid.index.index import Index
from torpor.memvid.maintenance import pruning
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing import deletion
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import stores_cut_off
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    meanwhile,
    names,
    pack_of,
    reopened,
    require_awake,
    sleep,
    token_ids,
    write,
)

LAST = Retention(keep_last=1)


def four_versions(store: Store) -> list[Receipt]:
    """Each refers to the full spans of the one before; the first span lies in the first one's pack."""
    return making.sleep_each(store, 300, 400, 700, 800)


def versions(store: Store) -> list[int]:
    return [row.version for row in store.versions(URI)]


def kinds(store: Store) -> list[str]:
    """How many manifests and packs there are, by ending."""
    return sorted(name[-4:] for name in names(store.path))


def test_what_no_rule_keeps_goes_and_what_stays_wakes_to_the_bit(store: Store) -> None:
    receipts = four_versions(store)
    report = store.prune(LAST)
    assert versions(store) == [4]
    require_awake(store, 800)
    assert store.verify(deep=True).ok
    # the second version alone had nothing that the fourth needs
    assert [(action.kind, action.version) for action in report.actions] == [
        *(("remove", number) for number in (1, 2, 3)),
        ("remove", None),
    ]
    assert report.bytes_freed == sum(action.size_bytes for action in report.actions) > receipts[1].bytes_written
    assert kinds(store) == [".mvm", ".mvp", ".mvp", ".mvp"]
    store.delete_session(URI)
    assert kinds(store) == []


def test_a_retention_without_a_rule_drops_nothing(store: Store) -> None:
    four_versions(store)
    report = store.prune(Retention())
    assert (report.actions, report.bytes_freed) == ((), 0)
    assert versions(store) == [1, 2, 3, 4]


def test_tagged_and_pinned_versions_stay_and_the_report_says_why(store: Store) -> None:
    four_versions(store)
    store.tag(URI, 1, "first")
    store.pin(URI, 3)
    report = store.prune(LAST)
    assert versions(store) == [1, 3, 4]
    kept = {action.version: action.reason for action in report.actions if action.kind == "keep"}
    assert kept == {1: "it is tagged first", 3: "it is pinned"}
    require_awake(store, 300, version=1)


def test_a_version_that_is_tagged_while_a_prune_plans_stays(store: Store) -> None:
    four_versions(store)
    with meanwhile(pruning, "_steps", lambda: store.tag(URI, 2, "just-in-time")):
        store.prune(LAST)
    assert versions(store) == [2, 4]


def test_one_session_can_be_pruned_alone_and_all_of_them_at_once(store: Store) -> None:
    four_versions(store)
    sleep(store, 20, uri=OTHER_URI)
    sleep(store, 30, uri=OTHER_URI)
    store.prune(LAST, URI)
    assert versions(store) == [4]
    assert len(store.versions(OTHER_URI)) == 2
    store.prune(LAST)
    assert [row.block_tokens for row in store.versions(OTHER_URI)] == [30]
    with pytest.raises(errors.SessionNotFound):
        store.prune(LAST, SessionUri("default", "nobody"))


def test_a_dry_run_says_what_the_prune_then_does(store: Store, store_path: Path) -> None:
    four_versions(store)
    before = names(store_path)
    with Store.open(store_path, writable=False) as reader:
        planned = reader.prune(LAST, dry_run=True)
    assert (versions(store), names(store_path)) == ([1, 2, 3, 4], before)
    done = store.prune(LAST)
    assert (planned.dry_run, done.dry_run) == (True, False)
    assert (planned.actions, planned.bytes_freed) == (done.actions, done.bytes_freed)


def test_an_awake_session_whose_parent_was_pruned_can_sleep_whole(store: Store) -> None:
    """What it would have referred to may be gone: a typed refusal, upon which all of it is written."""
    second = four_versions(store)[1]
    store.prune(LAST)
    with pytest.raises(errors.Corruption):
        sleep(store, 500, before=second)
    assert sleep(store, 500).version == 5
    require_awake(store, 500)


def test_a_prune_that_is_cut_off_has_dropped_only_what_no_rule_keeps_and_another_one_does_the_rest(
    store: Store, tmp_path: Path
) -> None:
    four_versions(store)
    sleep(store, 20, uri=OTHER_URI, seed=2)
    with reopened(store) as store:
        for again in stores_cut_off(store, tmp_path / "cut", lambda: store.prune(LAST)):
            assert versions(again)[-1] == 4
            assert again.opening.unreadable == ()
            require_awake(again, 800)
            again.prune(LAST)
            assert versions(again) == [4]
            require_awake(again, 800)
            require_awake(again, 20, uri=OTHER_URI, seed=2)
            assert again.verify(deep=True).ok


def test_many_sessions_are_pruned_in_steps_that_never_split_one(store: Store) -> None:
    uris = [SessionUri("default", f"agent{number}") for number in range(5)]
    for uri in uris:
        for tokens in (5, 6, 7):
            sleep(store, tokens, uri=uri)
    with (
        mock.patch.object(pruning, "_STEP_VERSIONS", 3),
        mock.patch.object(deletion, "drop_versions", side_effect=deletion.drop_versions) as dropped,
    ):
        report = store.prune(LAST)
    assert [len(call.args[1]) for call in dropped.call_args_list] == [4, 4, 2]
    assert all([row.block_tokens for row in store.versions(uri)] == [7] for uri in uris)
    assert report.bytes_freed == sum(action.size_bytes for action in report.actions)


def test_a_store_that_reads_beside_sees_every_version_or_none(store: Store, store_path: Path) -> None:
    """What it listed before wakes whole or is not found, and nothing is called damage."""
    four_versions(store)
    found = {}
    with Store.open(store_path, writable=False) as reader:
        rows = reader.versions(URI)
        store.prune(LAST)
        for row in rows:
            with contextlib.suppress(errors.SessionNotFound), reader.open_session(URI, row.version) as opened:
                found[row.version] = len(opened.tokens()) // 4
        assert reader.verify(deep=True).findings == ()
    assert found == {4: 800}


def test_what_turns_in_the_journal_stand_behind_stays(store: Store) -> None:
    base = four_versions(store)[1]
    store.acknowledge([replace(making.turn(store, 5), base=base.bundle_id, held=400)])
    store.prune(LAST)
    assert versions(store) == [2, 4]


def test_a_prune_takes_no_room(store: Store) -> None:
    four_versions(store)
    full = errors.NoSpace("full")
    with mock.patch("torpor.memvid.disk.durable.TempFile.append", making.refusing(full)):
        store.prune(LAST)
    assert versions(store) == [4]
    with reopened(store) as again:
        assert versions(again) == [4]


# --- what cannot be woken


def lose_pack(store: Store, receipt: Receipt) -> None:
    pack_of(store, receipt, -1).unlink()


def lose_manifest(store: Store, receipt: Receipt) -> None:
    making.manifest_path(store, receipt.bundle_id).unlink()


def damage_manifest(store: Store, receipt: Receipt) -> None:
    making.flip(making.manifest_path(store, receipt.bundle_id), 100)


def damage_pack(store: Store, receipt: Receipt) -> None:
    making.flip(pack_of(store, receipt, -1), 20)


HURTS = [lose_pack, lose_manifest, damage_manifest, damage_pack]
Hurt = Callable[[Store, Receipt], None]


@pytest.mark.parametrize("hurt", HURTS)
@pytest.mark.parametrize("rule", [LAST, Retention(keep_days=1)], ids=["last", "days"])
def test_a_newest_version_that_cannot_be_woken_costs_no_other_one(store: Store, hurt: Hurt, rule: Retention) -> None:
    day_ns = 24 * 60 * 60 * 10**9
    now_ns = time.time_ns()
    for number, tokens in enumerate((100, 200, 300)):
        with mock.patch.object(time, "time_ns", lambda at=now_ns - (3 - number) * 10 * day_ns: at):
            newest = sleep(store, tokens, seed=number)
    hurt(store, newest)
    planned = store.prune(rule, dry_run=True)
    report = store.prune(rule)
    assert versions(store) == [2, 3]
    assert [one.version for one in report.actions if one.session == str(URI)] == [1]
    path = str(making.manifest_path(store, newest.bundle_id))
    assert {one.path for one in report.problems} == {path}
    assert "cannot be woken" in report.problems[0].message
    assert planned.actions == report.actions
    assert planned.problems == report.problems
    unknown = hurt in (lose_manifest, damage_manifest)
    assert len(report.problems) == 1 + unknown, "while needs are unknown no pack goes, and that is told"
    require_awake(store, 200, version=2, seed=1)


def test_a_stripped_newest_version_counts_as_one_that_can_be_woken(store: Store) -> None:
    sleep(store, 100)
    newest = sleep(store, 200, seed=1)
    store.strip(URI, newest.version)
    assert store._core.missing_of([newest.entries[0].id]) == {newest.entries[0].id}
    report = store.prune(LAST)
    assert (versions(store), report.problems) == ([2], ())


@pytest.mark.parametrize("what", ["header", "end"])
def test_a_stripped_newest_version_whose_tokens_are_lost_costs_no_whole_one(store: Store, what: str) -> None:
    sleep(store, 100)
    newest = sleep(store, 300, seed=1)
    block = newest.entries[0 if what == "header" else -1]
    if what == "header":
        store.strip(URI, newest.version)
    else:  # its end record is needed whole
        making.mark_stripped(store, newest)
    for name in store.index.packs_of(block.id, stripped=True):
        Path(store.path, name).unlink()
    report = store.prune(LAST)
    assert versions(store) == [1, 2]
    assert [problem.code for problem in report.problems] == ["block_missing"]


@pytest.mark.parametrize("only", [URI, None], ids=["one session", "all"])
def test_a_version_that_cannot_be_woken_is_told_also_where_nothing_goes(store: Store, only: SessionUri | None) -> None:
    sleep(store, 100)
    store.pin(URI, 1)
    lost = sleep(store, 200, seed=1)
    lose_manifest(store, lost)
    for dry_run in (True, False):
        report = store.prune(LAST, only, dry_run=dry_run)
        assert versions(store) == [1, 2]
        assert [(one.code, one.path) for one in report.problems] == [
            ("bundle_missing", str(making.manifest_path(store, lost.bundle_id)))
        ]


@pytest.mark.parametrize("hurt", HURTS)
def test_of_a_session_whose_versions_can_all_not_be_woken_a_prune_drops_nothing(store: Store, hurt: Hurt) -> None:
    for number in range(4):
        hurt(store, sleep(store, 100 + number, seed=number))
    report = store.prune(LAST)
    assert versions(store) == [1, 2, 3, 4]
    assert report.actions == ()
    assert len(report.problems) == 4


@pytest.mark.parametrize("hurt", [lose_manifest, damage_manifest])
def test_an_unreadable_version_that_no_rule_keeps_is_dropped_and_no_problem(store: Store, hurt: Hurt) -> None:
    hurt(store, four_versions(store)[1])
    with reopened(store) as again:
        plan, report = again.prune(LAST, dry_run=True), again.prune(LAST)
        assert versions(again) == [4]
    assert (plan.actions, plan.bytes_freed) == (report.actions, report.bytes_freed)
    assert (plan.problems, report.problems) == ((), ())
    with reopened(again) as again:
        assert again.opening.unreadable == ()


def test_a_pack_that_is_put_back_makes_its_version_count_again(store: Store) -> None:
    sleep(store, 100)
    newest = sleep(store, 200, seed=1)
    pack = pack_of(store, newest)
    good = pack.read_bytes()
    pack.unlink()
    store._core.look_again()
    making.put(pack, good)
    assert store.prune(LAST).problems == ()
    assert versions(store) == [2]


def test_a_version_deleted_while_a_prune_looks_at_it_is_no_problem(store: Store) -> None:
    sleep(store, 100)
    sleep(store, 200, seed=1)
    with meanwhile(pruning, "_problem", lambda: store.delete_session(URI)):
        assert store.prune(LAST).problems == ()
    assert store.find_session(URI) is None


def test_what_cannot_be_woken_does_not_count_in_the_second_look_either(store: Store) -> None:
    """The version that was to stay leaves while the prune is about to drop the ones before it."""
    receipts = [sleep(store, 100 + number, seed=number) for number in range(3)]
    lose_manifest(store, receipts[-1])
    with meanwhile(pruning, "_steps", lambda: store.delete_version(URI, 2)):
        store.prune(LAST)
    assert versions(store) == [1, 3]


def test_a_failure_of_the_system_is_no_reason_to_keep_or_drop_anything(store: Store) -> None:
    sleep(store, 512, before=sleep(store, 256))
    for dry_run in (True, False):
        with (
            mock.patch.object(StoreCore, "read_manifest", side_effect=errors.StoreIoError("It could not be read.")),
            pytest.raises(errors.StoreIoError),
        ):
            store.prune(LAST, URI, dry_run=dry_run)
    assert versions(store) == [1, 2]


# --- versions that end in a ledger alone


def stand_in_and_more(store: Store, tokens: int, **more: Any) -> list[Receipt]:
    """A version, one whose ledger goes on behind its blocks, and one with so many tokens."""
    first = sleep(store, 300)
    second = sleep(store, 516, before=first, unread=20)
    return [first, second, sleep(store, tokens, before=second, **more)]


def test_a_stand_in_goes_once_a_later_version_begins_with_all_of_its_tokens(store: Store) -> None:
    stand_in_and_more(store, 536)
    packs = kinds(store).count(".mvp")
    report = store.drop_stand_ins(URI)
    assert versions(store) == [1, 3]
    assert [(action.kind, action.version) for action in report.actions] == [("remove", 2)]
    assert kinds(store).count(".mvp") == packs, "packs go with the next repack"
    require_awake(store, 536)
    assert store.verify(deep=True).ok
    assert store.drop_stand_ins(URI).actions == ()


def test_the_first_version_of_a_fork_stays_though_it_is_a_stand_in(store: Store) -> None:
    """It alone tells which version of which session the fork goes on from."""
    source = sleep(store, 516, uri=OTHER_URI, unread=20)
    first = sleep(store, 516, before=source, unread=20)
    sleep(store, 536, before=first)
    assert store.drop_stand_ins(URI).actions == ()
    assert store.named(f"{URI.name}~2", look=True).row == store.require_session(OTHER_URI)


def test_a_ledger_without_blocks_takes_the_packs_of_a_stand_in_with_it(store: Store) -> None:
    other = sleep(store, 300, uri=OTHER_URI)
    sleep(store, 556, unread=20)
    write(store, [], 0, session={"model": "demo", UNREAD: {"tokens": token_ids(0, 576)}})
    assert kinds(store).count(".mvp") == 2
    report = store.drop_stand_ins(URI)
    assert (versions(store), kinds(store).count(".mvp")) == ([2], 1)
    assert report.bytes_freed > other.bytes_written
    assert store.verify(deep=True).ok


STAND_INS = {  # the versions behind a stand-in, of tokens that go on behind it or are others; those that stay
    "a shorter one": ([(535, {})], [1, 2, 3]),
    "other tokens": ([(536, {"seed": 3})], [1, 2, 3]),
    "a shorter stand-in": ([(516, {"unread": 19})], [1, 2, 3]),
    "a branch": ([(300, {"seed": 0})], [1, 2, 3]),
    "a longer stand-in": ([(516, {"unread": 21})], [1, 3]),
    "the next one, though the newest went another way": ([(536, {}), (300, {"seed": 5})], [1, 3, 4]),
}


@pytest.mark.parametrize(("more", "left"), STAND_INS.values(), ids=STAND_INS)
def test_a_stand_in_goes_where_a_later_version_has_its_tokens_alone(
    store: Store, more: list[tuple[int, dict[str, Any]]], left: list[int]
) -> None:
    second = sleep(store, 516, before=sleep(store, 300), unread=20)
    for tokens, how in more:
        sleep(store, tokens, before=None if "seed" in how else second, **how)
    store.drop_stand_ins(URI)
    assert versions(store) == left


def test_many_stand_ins_that_nothing_covers_take_a_few_openings_each(store: Store) -> None:
    for seed in range(8):
        sleep(store, 20, seed=seed, unread=2)
    with mock.patch.object(StoreCore, "read_manifest", autospec=True, side_effect=StoreCore.read_manifest) as opened:
        assert store.drop_stand_ins(URI).actions == ()
    assert 8 <= opened.call_count <= 6 * 8


def lose_what_both_have(store: Store, receipts: list[Receipt]) -> None:
    pack_of(store, receipts[0]).unlink()


def strip_the_later(store: Store, receipts: list[Receipt]) -> None:
    making.mark_stripped(store, receipts[2])


KEPT: dict[str, Callable[[Store, list[Receipt]], object]] = {
    "a mark": lambda store, _: store.tag(URI, 2, "mine"),
    "the later one lacks a block that both have": lose_what_both_have,
    "the later one is stripped, and it is not": strip_the_later,
    **{f"{hurt.__name__} of the later one": lambda store, made, hurt=hurt: hurt(store, made[2]) for hurt in HURTS},
}


@pytest.mark.parametrize("why", KEPT)
def test_a_stand_in_stays_with_a_mark_and_where_the_later_version_is_no_full_one(store: Store, why: str) -> None:
    receipts = stand_in_and_more(store, 536)
    before = {path: path.read_bytes() for path in (*Path(store.path).rglob("*.mv?"), Path(store.path, "marks.json"))}
    KEPT[why](store, receipts)
    assert store.drop_stand_ins(URI).actions == ()
    for path, data in before.items():
        making.put(path, data)
    store.drop_stand_ins(URI)
    assert versions(store) == [1, 3]


def test_whole_versions_and_a_stripped_stand_in_of_a_stripped_one(store: Store) -> None:
    receipts = stand_in_and_more(store, 536)
    making.mark_stripped(store, receipts[2])
    making.mark_stripped(store, receipts[1])
    store.drop_stand_ins(URI)
    assert versions(store) == [1, 3], "they have what it has"
    assert store.drop_stand_ins(URI).actions == ()


def test_a_stand_in_that_turns_stand_behind_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receipts = stand_in_and_more(store, 536)
    monkeypatch.setattr(Journal, "bases", lambda _journal: {URI: receipts[1].bundle_id})
    assert store.drop_stand_ins(URI).actions == ()


def test_a_fork_of_a_stand_in_keeps_all_that_it_has(store: Store) -> None:
    receipts = stand_in_and_more(store, 536)
    sleep(store, 600, uri=OTHER_URI, before=receipts[1])
    store.drop_stand_ins(URI)
    require_awake(store, 600, uri=OTHER_URI)
    assert store.verify(deep=True).ok


def test_a_lossy_version_takes_the_place_of_no_exact_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_and_more(store, 536)
    rows = store.index.versions(URI)
    lossy = [*rows[:-1], replace(rows[-1], lossy=Lossy(8, 256))]
    monkeypatch.setattr(Index, "versions", lambda _index, _uri: lossy)
    monkeypatch.setattr(pruning, "require_same_as_row", lambda *_: None)
    assert store.drop_stand_ins(URI).actions == ()
