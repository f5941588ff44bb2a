"""Strip: the ledger stays, keys and values go, and nobody else loses any."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.answers import MaintenanceReport
from torpor.memvid.disk.clock import now_ns
from torpor.memvid.errors import BlockMissing, BudgetExceeded
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.manifest import UNNAMED
from torpor.memvid.maintenance import strip_plan, stripping
from torpor.memvid.maintenance.repack_plan import CLEARING
from torpor.memvid.maintenance.strip_plan import RoomPolicy
from torpor.memvid.store import Receipt, Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing import sleeping
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import stores_cut_off
from torpor.tests.memvid.store_making import (
    FORK_URI,
    URI,
    drafts,
    ledger,
    reopened,
    require_awake,
    sleep,
    state,
    token_ids,
    turn,
    write,
)


def packs_bytes(store: Store) -> int:
    return sum(path.stat().st_size for path in Path(store.path, "packs").iterdir())


def require_stripped(store: Store, token_count: int, *, version: int | None = None, whole: int = 0) -> None:
    with store.open_session(URI, version) as reader:
        assert reader.tokens() == token_ids(0, token_count)
        assert reader.whole_up_to() == whole
        with pytest.raises(BlockMissing):
            reader.read_slot(next(entry for entry in reader.entries if entry.start == whole), 0)
        reader.read_slot(reader.entries[-1], 0)  # the record of the last position stays


def test_a_stripped_version_keeps_its_ledger_and_its_id_and_its_bytes_leave_the_disk(store: Store) -> None:
    receipt = sleep(store, 600)
    store.tag(URI, 1, "kept")
    before = packs_bytes(store)
    plan = store.strip(URI, dry_run=True)
    assert packs_bytes(store) == before
    report = store.strip(URI)
    assert (
        [action.kind for action in plan.actions] == [action.kind for action in report.actions] == ["strip", "rewrite"]
    )
    assert report.bytes_freed == plan.bytes_freed == before
    assert packs_bytes(store) < before / 2
    assert store.versions(URI)[0].bundle_id == receipt.bundle_id
    assert store.resolve_version(f"{URI}@kept").bundle_id == receipt.bundle_id
    require_stripped(store, 600)
    with reopened(store, anew=True) as store:
        require_stripped(store, 600)
        assert store.repack(policy=CLEARING).actions == ()


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_strip_says_where_tokens_are_in_no_pack_now(store: Store, dry_run: bool) -> None:
    receipt = sleep(store, 600)
    pack = making.pack_of(store, receipt)
    pack.rename(pack.with_suffix(".away"))
    assert [problem.code for problem in store.strip(URI, dry_run=dry_run).problems] == ["block_missing"]
    pack.with_suffix(".away").rename(pack)
    assert store.strip(URI, dry_run=dry_run).problems == ()


def test_blocks_that_other_versions_and_sessions_need_stay(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 900, before=first)
    sleep(store, 512, uri=FORK_URI)
    store.strip(URI, 1)
    require_stripped(store, 600, version=1, whole=512)
    require_awake(store, 900)
    require_awake(store, 512, uri=FORK_URI)
    store.strip(URI, 2)
    require_stripped(store, 900, whole=512)
    require_awake(store, 512, uri=FORK_URI)
    store.delete_session(FORK_URI)
    store.repack(policy=CLEARING)
    require_stripped(store, 900)
    require_stripped(store, 600, version=1)


def test_a_stripped_version_whose_blocks_come_back_is_whole(store: Store) -> None:
    first = sleep(store, 512)
    store.strip(URI)
    sleep(store, 512)  # the tokens were read again
    require_awake(store, 512, version=1)
    require_awake(store, 512)
    assert store.strip(URI, 1).problems == ()
    store.repack(policy=CLEARING)
    require_awake(store, 512, version=1)
    for entry in store.open_bundle(first.bundle_id).entries:  # no header lies beside a whole block
        assert len(store.index.packs_of(entry.id, stripped=True)) == 1


def test_stripping_twice_changes_nothing(store: Store) -> None:
    sleep(store, 512)
    store.strip(URI)
    before = making.names(store.path)
    report = store.strip(URI)
    assert (report.bytes_freed, report.bytes_written, report.problems) == (0, 0, ())
    assert making.names(store.path) == before


@pytest.mark.parametrize("cut", [False, True], ids=["running", "reopened"])
def test_turns_behind_a_version_become_a_version_first(store: Store, cut: bool) -> None:
    sleep(store, 512)
    sleep(store, 512, uri=making.OTHER_URI, seed=1)
    store.acknowledge([turn(store, 20)])
    store.strip(URI)
    if cut:
        store = reopened(store)
    assert len(store.versions(URI)) == 2
    assert ledger(store) == token_ids(0, 532)
    with store.open_session(URI) as reader:
        assert reader.whole_up_to() == 0  # all of the session was asked for
    require_awake(store, 512, uri=making.OTHER_URI, seed=1)
    store.close()


def test_turns_of_a_fork_behind_a_version_keep_the_blocks(store: Store) -> None:
    base = sleep(store, 512)
    record = turn(store, 20)
    store.acknowledge([type(record)(FORK_URI, record.session, None, base.bundle_id, 512, None)])
    store.strip(URI)
    assert ledger(store, FORK_URI) == token_ids(0, 532)
    with store.open_session(FORK_URI) as reader:
        assert reader.whole_up_to() == 512
    assert store.acknowledged() == []


def test_turns_that_come_behind_a_stripped_version_keep_what_is_there(store: Store) -> None:
    """As earlier versions acknowledged some. A mark is set, and the bytes are not gone yet."""
    sleep(store, 512)
    with contextlib.suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patched:
        patched.setattr(stripping, "repack_packs", making.refusing(KeyboardInterrupt))
        store.strip(URI)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "_require_kept", lambda *_, **__: None)
        store.acknowledge([turn(store, 20)])
    store.repack(policy=CLEARING)
    with reopened(store) as store:
        assert ledger(store) == token_ids(0, 532)
        with store.open_session(URI) as reader:
            assert reader.whole_up_to() == 512


def test_a_strip_that_is_cut_off_leaves_a_version_whole_or_stripped_and_another_one_finishes(
    store: Store, tmp_path: Path
) -> None:
    sleep(store, 900, before=sleep(store, 600))
    for again in stores_cut_off(store, tmp_path / "cut", lambda: store.strip(URI, 1)):
        require_awake(again, 900)
        is_stripped = again.marks(URI).stripped != frozenset()
        again.repack(policy=CLEARING)
        if not is_stripped:
            require_awake(again, 600, version=1)
            again.strip(URI, 1)
        require_awake(again, 900)
        require_stripped(again, 600, version=1, whole=512)


def require_bytes_told(store: Store) -> int:
    """The index tells of what is on the disk, but for a byte that each division by pack may lose; how much that is."""
    on_disk = packs_bytes(store) + sum(path.stat().st_size for path in Path(store.path, "versions").iterdir())
    assert on_disk - 8 < sum(row.bundle_bytes for row in store.versions(URI)) <= on_disk
    return on_disk


def test_the_index_tells_what_a_strip_has_left_also_a_new_index_and_beside_a_daemon(store: Store) -> None:
    making.sleep_each(store, 600, 900, 1400)
    wrote = require_bytes_told(store)
    with reopened(store) as store:  # the copy of the index is as of now
        store.strip(URI, 1)
        assert require_bytes_told(store) > wrote * 3 / 4, "the versions behind it need its full blocks"
        store.strip(URI)
        assert require_bytes_told(store) < wrote / 4
        with Store.open(store.path, writable=False) as beside:
            require_bytes_told(beside)
    with reopened(store, anew=True) as store:
        require_bytes_told(store)


def test_a_strip_leaves_the_bytes_that_a_fork_needs_as_they_are(store: Store) -> None:
    receipt = sleep(store, 512)
    sleep(store, 700, uri=FORK_URI, before=receipt)
    wrote = store.versions(URI)[0].bundle_bytes
    for dry_run in (True, False):
        report = store.strip(URI, dry_run=dry_run)
        (action,) = (each for each in report.actions if each.kind == "strip")
        assert action.reason == "Its tokens and text stay, and keys and values of 2 blocks that others need."
    assert wrote * 3 / 4 < store.versions(URI)[0].bundle_bytes <= wrote


# --- room


def sleep_unnamed(
    store: Store, name: str, days_ago: float, *, unnamed: bool = True, tokens: int = 600, **how: Any
) -> Receipt:
    at_ns = now_ns() - int(days_ago * 24 * 3600 * 10**9)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sleeping, "now_ns", lambda: at_ns)
        session = {"model": "demo", "labels": [], **({UNNAMED: True} if unnamed else {})}
        seed = how.pop("seed", sum(map(ord, name)))
        return write(store, drafts(tokens, seed=seed), tokens, uri=SessionUri("default", name), session=session, **how)


@pytest.fixture
def crowded(store: Store) -> Store:
    """Five sessions that nobody named, the later ones used later; the newest a moment ago."""
    for number, days_ago in enumerate((9, 7, 5, 3, 0)):
        sleep_unnamed(store, f"s{number}", days_ago)
    return store


def _nobody() -> tuple[SessionUri, ...]:
    return ()


def make_room(store: Store, most_bytes: int, policy: RoomPolicy = RoomPolicy()) -> MaintenanceReport:
    return store.make_room(most_bytes, policy, _nobody)


def stripped_in(store: Store) -> list[str]:
    return [uri.name for page in store.index.iter_uris(9) for uri in page if store.marks(uri).stripped]


def test_room_is_made_by_the_head_of_the_plan_and_no_more_is_stripped_than_is_needed(crowded: Store) -> None:
    plan, before = crowded.plan_room(), crowded.held_bytes
    assert [action.session for action in plan.actions] == [f"torpor://default/s{number}" for number in range(5)]
    assert [action.kind for action in plan.actions] == [*["strip"] * 4, "keep"]
    assert plan.actions[4].reason.endswith("last used 0 minutes ago; it stays for an hour behind that")
    most = before - plan.actions[0].size_bytes - 1
    report = make_room(crowded, most)
    assert [each for each in report.actions if each.kind == "strip"] == list(plan.actions[:2])
    assert (stripped_in(crowded), crowded.held_bytes <= most) == (["s0", "s1"], True)
    assert crowded.plan_room().actions == plan.actions[2:]
    assert make_room(crowded, most).actions == ()
    with Store.open(crowded.path, writable=False) as beside:
        assert beside.plan_room().actions == plan.actions[2:]


def test_a_plan_says_that_no_more_versions_may_be_stripped(crowded: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowded.plan_room().problems == ()
    for module in (strip_plan, stripping):
        monkeypatch.setattr(module, "MAX_STRIPS", 2)
    plan = crowded.plan_room()
    assert [(each.kind, each.session) for each in plan.actions] == [
        *(("strip", "torpor://default/s0"), ("strip", "torpor://default/s1"))
    ]
    (told,) = plan.problems
    assert (told.code, "`torpor prune --keep-last 1`" in told.message) == ("limit_exceeded", True)


def test_what_nothing_needs_goes_before_anything_is_stripped(crowded: Store) -> None:
    for name in ("s0", "s4"):  # a fork needs a part of what they wrote
        with crowded.open_session(SessionUri("default", name)) as reader:
            first, parent = reader.entries[:1], reader.bundle_id
        write(crowded, [state(256)], 256, uri=SessionUri("default", f"fork-{name}"), reused=first, parent=parent)
        crowded.delete_session(SessionUri("default", name))
    report = make_room(crowded, crowded.held_bytes - 1)
    assert {action.kind for action in report.actions} == {"rewrite"}
    assert stripped_in(crowded) == []


def test_what_comes_to_stay_meanwhile_stays(crowded: Store) -> None:
    """A tag, or a use, between the plan and the strip."""

    def busy() -> list[SessionUri]:
        asked.append(len(asked))
        if len(asked) == 1:
            return []
        crowded.tag(SessionUri("default", "s0"), 1, "kept")
        return [SessionUri("default", "s1")]

    asked: list[int] = []
    crowded.make_room(0, RoomPolicy(), busy)
    assert stripped_in(crowded) == ["s2", "s3"]


def test_nothing_is_stripped_in_vain(crowded: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = making.pack_of(crowded, sleep_unnamed(crowded, "x", 2))
    manifest = next(Path(crowded.path, "versions").iterdir())
    manifest.rename(manifest.with_suffix(".away"))  # so what it needs is not known, and no pack may go
    report = make_room(crowded, 0)
    assert ([problem.code for problem in report.problems], report.actions) == (["bundle_missing"], ())
    manifest.with_suffix(".away").rename(manifest)
    with monkeypatch.context() as patched:
        patched.setattr(stripping, "repack_packs", lambda *_, **__: True)  # no room for the packs without
        make_room(crowded, crowded.held_bytes - 1)
    assert stripped_in(crowded) == ["s0"]
    assert pack.exists()


def test_a_damaged_pack_keeps_no_other_one_from_going(crowded: Store) -> None:
    spoilt = making.pack_of(crowded, sleep_unnamed(crowded, "s9", 0))
    making.flip(spoilt, -40)
    report = make_room(crowded, 0)
    assert [problem.path for problem in report.problems] == [str(spoilt)]
    assert stripped_in(crowded) == ["s0", "s1", "s2", "s3"]
    assert crowded.held_bytes < 4 * spoilt.stat().st_size


@pytest.mark.parametrize(("looks", "marked", "gone"), [(1, 0, 0), (2, 2, 0), (3, 2, 1)])
def test_what_has_to_stop_ends_at_its_next_step_and_the_next_one_lets_go_what_it_marked(
    crowded: Store, monkeypatch: pytest.MonkeyPatch, looks: int, marked: int, gone: int
) -> None:
    monkeypatch.setattr(stripping, "_AT_ONCE", 2)
    answers = iter([*[False] * looks, *[True] * 9])
    before, freed = crowded.held_bytes, crowded.plan_room().actions[0].size_bytes
    crowded.make_room(0, RoomPolicy(), _nobody, should_stop=lambda: next(answers))
    assert (len(stripped_in(crowded)), (before - crowded.held_bytes) // freed) == (marked, gone)
    make_room(crowded, before - 2 * freed)
    assert len(stripped_in(crowded)) == 2


def test_nothing_goes_for_what_could_not_fit(crowded: Store) -> None:
    before = crowded.held_bytes
    freed = sum(action.size_bytes for action in crowded.plan_room().actions)
    for or_nothing, names in ((before - freed - 1, []), (before - freed, ["s0", "s1", "s2", "s3"])):
        crowded.make_room(0, RoomPolicy(), _nobody, or_nothing=or_nothing)
        assert stripped_in(crowded) == names


def fill(store: Store, most_bytes: int) -> None:
    """Sleep until the store has no room for one token more."""
    store._core.account.hold_to(most_bytes)
    for count in (300, 50, 1):
        with contextlib.suppress(BudgetExceeded):
            for number in itertools.count():
                uri = SessionUri("default", f"z{count}-{number}")
                write(store, drafts(count, seed=1000 * count + number), count, uri=uri)


@contextlib.contextmanager
def held_at_each_file(store: Store) -> Iterator[list[int]]:
    """The bytes of the store when each new file has its name."""
    held = list[int]()
    publish = StoreFolder.publish

    def noting(folder: StoreFolder, *how: Any, **more: Any) -> Any:
        told = publish(folder, *how, **more)
        held.append(folder.held_bytes())
        return told

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreFolder, "publish", noting)
        yield held


def test_a_store_that_sleeps_have_filled_holds_its_budget_at_each_moment_while_room_is_made(crowded: Store) -> None:
    fill(crowded, most := crowded.held_bytes * 5 // 4)
    with held_at_each_file(crowded) as held:
        report = make_room(crowded, most // 2)
    assert stripped_in(crowded) == ["s0", "s1", "s2", "s3"]
    assert (len(held), report.problems) == (4, ())
    assert max(held) <= most


def test_a_pack_that_cannot_lie_beside_its_new_one_stays_and_others_make_room(crowded: Store) -> None:
    """A kept fork needs nearly all of it."""
    receipt = sleep_unnamed(crowded, "a", 20, tokens=2600)
    with crowded.open_session(SessionUri("default", "a")) as reader:
        shared = reader.entries[:9]
    fork = SessionUri("default", "fork")
    write(crowded, [state(shared[-1].end)], shared[-1].end, uri=fork, reused=shared, parent=receipt.bundle_id)
    crowded.tag(fork, 1, "kept")
    fill(crowded, most := crowded.held_bytes * 5 // 4)
    with held_at_each_file(crowded) as held:
        report = make_room(crowded, most * 2 // 3)
    assert [problem.code for problem in report.problems] == ["budget_exceeded"]
    assert stripped_in(crowded) == ["a", "s0", "s1", "s2", "s3"]
    assert max(held) <= most
    assert crowded.verify(fork, deep=True).ok


@pytest.mark.one_in(1)
def test_room_that_is_cut_off_leaves_versions_whole_or_stripped_and_another_one_goes_on(
    crowded: Store, tmp_path: Path
) -> None:
    most = crowded.held_bytes // 2
    for again in stores_cut_off(crowded, tmp_path / "cut", lambda: make_room(crowded, most)):
        assert again.verify(deep=True).ok
        make_room(again, most)
        assert again.held_bytes <= most
        assert "s4" not in stripped_in(again)
        for uri in (each for page in again.index.iter_uris(9) for each in page):
            with again.open_session(uri) as reader:
                assert len(reader.tokens()) == 4 * 600


def test_sessions_that_nobody_used_for_long_are_told_and_a_use_is_remembered(crowded: Store, store_path: Path) -> None:
    day = now_ns() // (24 * 3600 * 10**9)
    for ago in range(9):
        crowded.index.add_written(day - ago, 1)
    assert [each.name for each in crowded.unused(RoomPolicy(delete_after_days=6), ())] == ["s0", "s1"]
    (told,) = [
        action for action in crowded.plan_room(RoomPolicy(delete_after_days=8)).actions if action.kind == "remove"
    ]
    assert (told.session, told.reason) == (
        "torpor://default/s0",
        "nobody named it, and the store was in use on 9 days without it",
    )
    crowded.note_use(used := crowded.find_session(SessionUri("default", "s0")).bundle_id)
    crowded.index.note_use(used, now_ns() - 8 * 24 * 3600 * 10**9)  # by a clock that is behind
    with reopened(crowded) as store:
        assert [each.name for each in store.unused(RoomPolicy(delete_after_days=6), ())] == ["s1"]
        strips = [action.session for action in store.plan_room().actions if action.kind == "strip"]
        assert strips == [f"torpor://default/s{number}" for number in (1, 2, 3)]


def test_an_import_is_a_use(crowded: Store, store_path: Path, tmp_path: Path) -> None:
    crowded.export_session(SessionUri("default", "s0"), None, tmp_path / "s0.mvb")
    crowded.delete_session(SessionUri("default", "s0"))
    crowded.import_file(tmp_path / "s0.mvb")
    assert crowded.plan_room().actions[0].session == "torpor://default/s1"
