"""The operations under test. A new one is a function and a line in SCENARIOS; every sweep then takes it up.

Those that keep a store in order, or carry sessions between stores, are in `upkeep.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Final
from unittest import mock

from torpor.memvid.errors import NoSpace
from torpor.memvid.folder.folder import manifest_name
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.faults import turns, upkeep
from torpor.tests.memvid.faults.beginnings import FIRST, FORK, SECOND, Scenario, four_versions, two_versions_and_a_fork
from torpor.tests.memvid.faults.shim import by_hand
from torpor.tests.memvid.faults.worlds import INDEX, Mark, Sees, Tape, Version, World, sleep, versions_of
from torpor.tests.memvid.store_making import OTHER_URI, URI, id_of

THIRD: Final = SessionUri("work", "third")
_SMALL: Final = [Version(SessionUri("work", f"small.{number}"), 1, 4 + number, seed=number) for number in range(5)]


def one_session(path: Path) -> World:
    with Store.open(path, writable=True) as store:
        sleep(store, FIRST)
    return frozenset({FIRST})


def a_fork_alone(path: Path) -> World:
    """The fork is left, its blocks in packs that were written for others."""
    two_versions_and_a_fork(path)
    with Store.open(path, writable=True) as store:
        store.delete_session(URI)
    return frozenset({FORK})


def leftovers(path: Path) -> World:
    """What crashes leave: a temporary file, a version and its pack that the index does not know, a pack that nothing
    needs."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        third = sleep(store, Version(THIRD, 1, 30, seed=8))
    (path / INDEX).rename(path / "older")
    with Store.open(path, writable=True) as store:
        sleep(store, SECOND, first)
    (path / "older").replace(path / INDEX)
    (path / manifest_name(third.bundle_id)).unlink()
    (path / INDEX).unlink()
    (path / "packs" / f"{'0' * 15}f.tmp").write_bytes(b"half a pack")
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
    """One with a tail of its own, and one without, which is a manifest alone."""
    with Store.open(path, writable=True) as store:
        with store.open_session(URI) as before:
            tape.sleep(store, Version(THIRD, 1, 600), before)
        tape.sleep(store, Version(SessionUri("work", "fourth"), 1, SECOND.token_count))


def delete(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        tape.delete(store, URI)


def delete_fork(path: Path, tape: Tape) -> None:
    """It needs no room: see `errnos.deletes_when_full`."""
    with Store.open(path, writable=True) as store:
        tape.delete(store, OTHER_URI)


def delete_version(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        for number in (2, 4):
            with tape.step(store, removes=[one for one in versions_of(tape.world, URI) if one.number == number]):
                store.delete_version(URI, number)
        tape.sleep(store, Version(URI, 4, 40, seed=3))


def recover(path: Path, tape: Tape) -> None:
    Store.open(path, writable=True).close()


def lose_index(path: Path, tape: Tape) -> None:
    """The index is lost, made anew, and then has something to forget: the old one must not come back."""
    with by_hand():
        os.unlink(path / INDEX)
    with Store.open(path, writable=True) as store:
        tape.delete(store, URI)
        tape.sleep(store, Version(URI, 1, 40, seed=3))


def many_changes(path: Path, tape: Tape) -> None:
    """So many that the index's file is written between them, and then tells of what goes."""
    with Store.open(path, writable=True) as store:
        for version in _SMALL:
            tape.sleep(store, version)
        for version in _SMALL[:3]:
            tape.delete(store, version.uri)
        for version in _SMALL[:2]:
            tape.sleep(store, version)
        tape.delete(store, _SMALL[0].uri)


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


def prune(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        store.pin(URI, 2)
        gone = [one for one in versions_of(tape.world, URI) if one.number in (1, 3)]
        with tape.step(store, removes=gone):
            store.prune(Retention(keep_last=1), URI)


def stand_ins(path: Path, tape: Tape) -> None:
    """Versions that end in a ledger alone go behind a later one that begins with their tokens; not before. What they
    say is asked for once their blocks are flushed, as write behind does."""
    short, long = Version(URI, 2, 516, tail=20), Version(URI, 3, 516, tail=30)
    write = Store.write_bundle

    def asking(store: Store, draft: VersionDraft) -> Receipt:
        return write(store, dataclasses.replace(draft, session=lambda: draft.session))

    with mock.patch.object(Store, "write_bundle", asking), Store.open(path, writable=True) as store:
        with store.open_session(URI) as first:
            before = tape.sleep(store, short, first)
        with tape.step(store):
            store.drop_stand_ins(URI)
        before = tape.sleep(store, long, before)
        tape.sleep(store, Version(URI, 4, 780), before)
        with tape.step(store, removes=[short, long]):
            store.drop_stand_ins(URI)


def marks(path: Path, tape: Tape) -> None:
    """Tags and a pin come, move and go; a delete takes those of its session with it."""
    tag, pin = Mark("tag", f"{URI}:kept", 1), Mark("pin", str(URI), 2)
    moved, other = Mark("tag", f"{URI}:kept", 2), Mark("tag", f"{OTHER_URI}:kept", 1)
    with Store.open(path, writable=True) as store:
        with tape.step(store, adds=[tag]):
            store.tag(URI, 1, "kept")
        with tape.step(store, adds=[pin]):
            store.pin(URI, 2)
        with tape.step(store, adds=[moved], removes=[tag]):
            store.tag(URI, 2, "kept", move=True)
        with tape.step(store, removes=[pin]):
            store.unpin(URI, id_of(store, URI, 2))
        with tape.step(store, removes=[moved]):
            store.untag(URI, "kept")
        with tape.step(store, adds=[other]):
            store.tag(OTHER_URI, 1, "kept")
        with tape.step(store, removes=[FORK, other]):
            tape.hear(store.delete_session(OTHER_URI).problems)


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
        Scenario("delete_fork", a_fork_alone, delete_fork),
        Scenario("delete_version", four_versions, delete_version),
        Scenario("lose_index", two_versions_and_a_fork, lose_index),
        Scenario("recover", leftovers, recover),
        Scenario("many_changes", one_session, many_changes),
        Scenario("prune", four_versions, prune),
        Scenario("stand_ins", one_session, stand_ins),
        Scenario("marks", two_versions_and_a_fork, marks, Sees(marks=marks_of)),
        Scenario("refused", one_session, refused),
        *upkeep.SCENARIOS,
        *turns.SCENARIOS,
        Scenario("a_life", None, a_life),
    )
}
