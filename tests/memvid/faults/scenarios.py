"""The operations under test. A new one is a function and a line in SCENARIOS; every sweep then takes it up.

Those that keep a store in order, or carry sessions between stores, are in `upkeep.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, Final
from unittest import mock

from torpor.memvid import Receipt, SessionUri, Store
from torpor.memvid.errors import NoSpace
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.tests.memvid.faults import turns, upkeep
from torpor.tests.memvid.faults.beginnings import FIRST, FORK, SECOND, Scenario, two_versions_and_a_fork
from torpor.tests.memvid.faults.shim import by_hand
from torpor.tests.memvid.faults.worlds import Broken, Mark, Sees, Tape, Version, World, sleep
from torpor.tests.memvid.store_making import OTHER_URI, URI, bundle_path

THIRD: Final = SessionUri("work", "third")


def one_session(path: Path) -> World:
    with Store.open(path, writable=True) as store:
        sleep(store, FIRST)
    return frozenset({FIRST})


def a_deleted_holder(path: Path) -> World:
    """The fork alone, its blocks in retired files."""
    two_versions_and_a_fork(path)
    with Store.open(path, writable=True) as store:
        store.delete_session(URI)
    return frozenset({FORK})


def leftovers(path: Path) -> World:
    """What crashes leave: a temporary file, a bundle without a row, a retired file that nothing needs with its row."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        third = sleep(store, Version(THIRD, 1, 30, seed=8))
    shutil.copy(path / "index.sqlite", path / "older")
    with Store.open(path, writable=True) as store:
        sleep(store, SECOND, first)
    (path / "older").replace(path / "index.sqlite")
    name = third.bundle_id.hex()
    live = path / "bundles" / name[:2] / f"{name}.mvb"
    live.rename(live.with_suffix(".mvr"))
    (path / "bundles" / f"{'0' * 15}f.tmp").write_bytes(b"half a bundle")
    return frozenset({FIRST, SECOND})


def create(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        tape.sleep(store, FIRST)


def sleep_new(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        tape.sleep(store, Version(THIRD, 1, 300, seed=7))


def sleep_delta(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store, store.open_session(URI) as before:
        tape.sleep(store, Version(URI, 3, 790), before)


def fork(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store, store.open_session(URI) as before:
        tape.sleep(store, Version(THIRD, 1, 600), before)


def delete(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        tape.delete(store, URI)


def delete_fork(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        tape.delete(store, OTHER_URI)


def recover(path: Path, tape: Tape) -> None:
    Store.open(path, writable=True).close()


def rebuild(path: Path, tape: Tape) -> None:
    """The index is lost, made anew, and then has something to forget: the old one must not come back."""
    with by_hand():
        os.unlink(path / "index.sqlite")
    with Store.open(path, writable=True) as store:
        tape.delete(store, URI)
        tape.sleep(store, Version(URI, 1, 40, seed=3))


def rebuild_on_a_full_disk(path: Path, tape: Tape) -> None:
    """The index is not sound, and there is no room for a new one: it is kept in memory, and deleting still works."""
    with by_hand():
        os.unlink(path / "index.sqlite")
    with upkeep.no_room_for_an_index(), Store.open(path, writable=True) as store:
        tape.delete(store, URI)
        tape.delete(store, OTHER_URI)


def refused(path: Path, tape: Tape) -> None:
    """The index takes no row: the sleep is refused, and the next one gets the version number instead."""
    with Store.open(path, writable=True) as store:
        add = store.index.add

        def refuse(*args: object) -> None:
            store.index.add = add  # type: ignore[method-assign]
            raise NoSpace("No room for the index.")

        store.index.add = refuse  # type: ignore[method-assign]
        with contextlib.suppress(NoSpace):
            tape.sleep(store, Version(URI, 2, 50, seed=5))
        tape.sleep(store, Version(URI, 2, 30, seed=6))


def many_versions(path: Path) -> World:
    """Four versions in four files, the last needing all of them, and a fork of the second."""
    counts = (260, 516, 772, 1028)
    receipts: list[Receipt] = []
    facts: set[Version | Mark] = set()
    with Store.open(path, writable=True) as store:
        for number, count in enumerate(counts, start=1):
            version = Version(URI, number, count)
            receipts.append(sleep(store, version, receipts[-1] if receipts else None))
            facts.add(version)
        sleep(store, FORK, receipts[1])
    return frozenset({*facts, FORK})


def compact(path: Path, tape: Tape) -> None:
    """Files are written anew; what they were needed for goes afterwards."""
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            store.compact(URI, policy=CompactionPolicy(max_holders=1, min_dead_ratio=0.0))
        tape.delete(store, OTHER_URI)
        with tape.step(store):
            store.compact(URI, policy=CompactionPolicy(max_holders=1, min_dead_ratio=0.0, cold_after_seconds=0))


def a_backup_of_the_index(path: Path) -> World:
    """Four versions in four files, and beside the store its index as it is now."""
    world = many_versions(path) - {FORK}
    with Store.open(path, writable=True) as store:
        store.delete_session(FORK.uri)
    shutil.copy(path / "index.sqlite", path.parent / "index.backup")
    return world


def put_index_back(path: Path) -> None:
    """The index of before, which says of each file where its blocks lay then."""
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        (path / name).unlink(missing_ok=True)
    shutil.copy(path.parent / "index.backup", path / "index.sqlite")


def fold(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        _fold(store, tape)


def _fold(store: Store, tape: Tape) -> None:
    with tape.step(store):
        report = store.compact(URI, policy=CompactionPolicy(max_holders=1, min_dead_ratio=0.0))
        if not report.problems and not report.actions:
            raise Broken("no file was written anew, and nothing says why")


_THIRD: Final = Version(URI, 3, 772)
_LAST: Final = Version(URI, 4, 30, seed=3)


def a_pinned_version(path: Path) -> World:
    """Three versions in three files, the second one pinned. Beside the store stands where its file lies, and a backup
    of the index."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        second = sleep(store, SECOND, first)
        sleep(store, _THIRD, second)
        store.pin(URI, SECOND.number)
        file = bundle_path(store, second.bundle_id)
    (path.parent / "pinned").write_text(str(file.relative_to(path)))
    shutil.copy(path / "index.sqlite", path.parent / "index.backup")
    return frozenset({FIRST, SECOND, _THIRD})


def fold_and_sleep(path: Path, tape: Tape) -> None:
    """The pinned version is led to the third one's file, which a prune is to take (`prune_without_a_file`)."""
    gone = [fact for fact in tape.world if isinstance(fact, Version) and fact != SECOND]
    with Store.open(path, writable=True) as store:
        _fold(store, tape)
        with tape.step(store, adds=[_LAST], removes=gone):
            sleep(store, _LAST)


def prune_beside_a_backup(path: Path) -> None:
    """As `prune_without_a_file`, and the index is an old one: that it is, only the count of rewrites tells."""
    put_index_back(path)
    prune_without_a_file(path)


def prune_without_a_file(path: Path) -> None:
    """A file is not there for a while, and meanwhile there is a prune: what it needs, only the index tells."""
    file, elsewhere = path / (path.parent / "pinned").read_text(), path.parent / "elsewhere"
    file.rename(elsewhere)
    with Store.open(path, writable=True) as store:
        if store.find_session(URI, _LAST.number):
            store.prune(Retention(keep_last=1), URI)
    elsewhere.rename(file)


def prune(path: Path, tape: Tape) -> None:
    removed = [fact for fact in tape.world if isinstance(fact, Version) and fact.uri == URI and fact.number < 4]
    with Store.open(path, writable=True) as store, tape.step(store, removes=removed):
        store.prune(Retention(keep_last=1), URI)


def stand_ins(path: Path, tape: Tape) -> None:
    """Versions that end in a ledger alone go behind a later one that begins with their tokens; not before. What they
    say is asked for once their blocks are flushed, as write behind does."""
    short, long = Version(URI, 2, 516, tail=20), Version(URI, 3, 516, tail=30)
    write = Store.write_bundle

    def asking(store: Store, *, session: Any, **how: Any) -> Receipt:
        return write(store, session=lambda: session, **how)

    with mock.patch.object(Store, "write_bundle", asking), Store.open(path, writable=True) as store:
        with store.open_session(URI) as first:
            before = tape.sleep(store, short, first)
        with tape.step(store):
            store.drop_stand_ins(URI)
        before = tape.sleep(store, long, before)
        tape.sleep(store, Version(URI, 4, 780), before)
        with tape.step(store, removes=[short, long]):
            store.drop_stand_ins(URI)


_GROUP: Final = [SessionUri("work", name) for name in ("root", "root.1", "root.2")]
_IN_GROUP: Final = [Version(uri, 1, 30 + at, seed=at) for at, uri in enumerate(_GROUP)]


def group(path: Path, tape: Tape) -> None:
    """New sessions that count together: one group is given up half done, the next one is finished."""
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            store.begin_group(_GROUP)
            sleep(store, _IN_GROUP[2])
            store.end_group()
        _finish_group(store, tape)


def _finish_group(store: Store, tape: Tape) -> None:
    root, *others = _IN_GROUP
    with tape.step(store, adds=_IN_GROUP):
        store.begin_group(_GROUP)
        for version in (*others, root):
            sleep(store, version)
    with tape.step(store):
        store.end_group()


def group_that_loses_its_root(path: Path, tape: Tape) -> None:
    """The group's file is gone for good before its first session may go: beside the file the others would go too."""
    with Store.open(path, writable=True) as store:
        _finish_group(store, tape)
        tape.delete(store, _GROUP[0])


def whole_group(store: Store) -> None:
    there = [uri.name for uri in _GROUP if store.find_session(uri) is not None]
    if 0 < len(there) < len(_GROUP):
        raise Broken(f"of a group only {there} are there")


def forget(path: Path, tape: Tape) -> None:
    """The versions go as in a delete; then the files that the fork needs are written anew, and so is the index."""
    with Store.open(path, writable=True) as store, tape.step(store, removes=[FIRST, SECOND]):
        store.forget(URI)


def marks(path: Path, tape: Tape) -> None:
    """Tags and a pin come, move and go; a delete takes those of its session with it."""
    tag, pin = Mark("tag", f"{URI}:kept", 1), Mark("pin", str(URI), 2)
    moved = Mark("tag", f"{URI}:kept", 2)
    with Store.open(path, writable=True) as store:
        with tape.step(store, adds=[tag]):
            store.tag(URI, 1, "kept")
        with tape.step(store, adds=[pin]):
            store.pin(URI, 2)
        with tape.step(store, adds=[moved], removes=[tag]):
            store.tag(URI, 2, "kept", move=True)
        with tape.step(store, removes=[pin]):
            store.unpin(URI, 2)
        with tape.step(store, removes=[moved]):
            store.untag(URI, "kept")


def marks_of(store: Store) -> list[Mark]:
    found = []
    for row in store.iter_sessions():
        numbers = {version.bundle_id: version.version for version in store.versions(row.uri)}
        held = store.marks(row.uri)
        found += [Mark("tag", f"{row.uri}:{name}", numbers.get(bundle)) for name, bundle in held.tags.items()]
        found += [Mark("pin", str(row.uri), numbers.get(bundle)) for bundle in held.pins]
    return found


def a_life(path: Path, tape: Tape) -> None:
    """Sleeps, a fork, deletes and a name used again, in one store object and then in the next."""
    with Store.open(path, writable=True) as store:
        first = tape.sleep(store, FIRST)
        second = tape.sleep(store, SECOND, first)
        tape.sleep(store, FORK, second)
        tape.delete(store, URI)
        tape.sleep(store, Version(URI, 1, 30, seed=2))
    with Store.open(path, writable=True) as store:
        tape.sleep(store, Version(URI, 2, 40, seed=2))
        tape.delete(store, OTHER_URI)
        tape.delete(store, URI)


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario("create", None, create),
        Scenario("sleep_new", one_session, sleep_new),
        Scenario("sleep_delta", two_versions_and_a_fork, sleep_delta),
        Scenario("fork", two_versions_and_a_fork, fork),
        Scenario("delete", two_versions_and_a_fork, delete),
        Scenario("delete_fork", a_deleted_holder, delete_fork),
        Scenario("rebuild", two_versions_and_a_fork, rebuild),
        Scenario("recover", leftovers, recover),
        Scenario("rebuild_on_a_full_disk", two_versions_and_a_fork, rebuild_on_a_full_disk),
        Scenario("compact", many_versions, compact),
        Scenario("fold_and_put_the_index_back", a_backup_of_the_index, fold, Sees(meanwhile=put_index_back)),
        Scenario("fold_and_miss_a_file", a_pinned_version, fold_and_sleep, Sees(meanwhile=prune_without_a_file)),
        Scenario("fold_and_lose_the_count", a_pinned_version, fold_and_sleep, Sees(meanwhile=prune_beside_a_backup)),
        Scenario("prune", many_versions, prune),
        Scenario("stand_ins", one_session, stand_ins),
        Scenario("group", one_session, group, Sees(is_whole=whole_group)),
        Scenario("group_that_loses_its_root", one_session, group_that_loses_its_root),
        Scenario("forget", two_versions_and_a_fork, forget),
        Scenario("marks", two_versions_and_a_fork, marks, Sees(marks=marks_of)),
        Scenario("refused", one_session, refused),
        *upkeep.SCENARIOS,
        *turns.SCENARIOS,
        Scenario("a_life", None, a_life),
    )
}
