"""T7: long histories of everything that a store is asked, with faults, beside a dictionary of its versions.

The model is a world (`faults/worlds.py`): the versions that were acknowledged, each with the blocks that it must have,
and the marks. Each operation says what it adds and what it takes. Any of them may be killed at any call, or refused by
the system; then the world before or the one after must be found, or what lies between. `DamagedStore` also damages
files and takes them away, goes on, and puts them back (`faults/damage.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torpor.memvid.disk import durable
from torpor.memvid.errors import StoreError
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance import strip_plan
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.maintenance.strip_plan import RoomPolicy
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.reader import BundleReader
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.coins import require_coins
from torpor.tests.memvid.faults import scenarios, worlds
from torpor.tests.memvid.faults.damage import HOWS, Damage, Ward, files_of, strike
from torpor.tests.memvid.faults.moments import EAGER
from torpor.tests.memvid.faults.pairs import Fault, Killed, Striker, close_all_but, open_descriptors
from torpor.tests.memvid.faults.shim import Shim, repeatable
from torpor.tests.memvid.faults.worlds import (
    INDEX,
    Allowed,
    Mark,
    Version,
    World,
    observe,
    require_right,
    take_marks_away,
    versions_of,
)

MEMORY: Final = Path("/dev/shm")
URIS: Final = [SessionUri("work", name) for name in "abcd"]
_POLICIES: Final = (RepackPolicy(), EAGER, dataclasses.replace(EAGER, cold_after_seconds=0))
_MOST_VERSIONS: Final = 14
STEPS: Counter[str] = Counter()
"""Steps taken, by operation, of all histories of this process."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is asked of a store: what it adds, what it takes, and (is_choosy) whether it may leave some of that."""

    name: str
    run: Callable[[Store], object]
    adds: Iterable[Version | Mark] = ()
    removes: Iterable[Version | Mark] = ()
    is_choosy: bool = False


def marks_of(store: Store) -> list[Mark]:
    """Those of versions that are there."""
    return [mark for mark in scenarios.marks_of(store) if mark.value is not None]


SEES: Final = worlds.Sees(marks=marks_of)

_uris = st.sampled_from(URIS)
_faults = st.one_of(
    st.none(), st.none(), st.builds(Fault, st.sampled_from(["kill", "error"]), st.integers(min_value=1, max_value=160))
)


class SoundStore(RuleBasedStateMachine):
    """A store that is never damaged: everything that was acknowledged is there, at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-", dir=MEMORY if MEMORY.is_dir() else None))
        self.path = self.folder / "store"
        self.times = contextlib.ExitStack()
        self.times.enter_context(repeatable(seed=5))
        self.world: World = frozenset()
        self.turns: dict[SessionUri, Version] = {}  # the version that an opening makes of the journal
        self.readers: list[tuple[Version, BundleReader]] = []
        self.read: dict[object, Version] = {}
        self.old_index: bytes | None = None
        self.store = Store.open(self.path, writable=True)

    @property
    def is_sound(self) -> bool:
        return True

    def teardown(self) -> None:
        self.close_readers()
        self.store.close()
        self.times.close()
        shutil.rmtree(self.folder)

    # --- doing

    def do(self, operation: Operation, fault: Fault | None = None) -> bool:
        """Ask the store for something, which may be cut off or refused; whether it was done. Then look."""
        STEPS[operation.name] += 1
        removes, adds = frozenset(operation.removes), frozenset(operation.adds)
        before, after = self.world, (self.world - removes) | adds
        if not self.strike(lambda: operation.run(self.store), fault) or not self.store.writable:
            self.reopen(Allowed(before, after), {one.uri for one in removes | adds if isinstance(one, Version)})
            return False
        self.look(Allowed(before, after) if operation.is_choosy else Allowed(after, after))
        return True

    def strike(self, run: Callable[[], object], fault: Fault | None) -> bool:
        """Run something under a fault; whether it went through. Without one it must."""
        if fault is None:
            run()
            return True
        self.close_readers()
        striker, descriptors = Striker(self.path, [fault]), open_descriptors()
        with Shim(striker):
            try:
                run()
            except (StoreError, Killed):
                pass
            else:
                return not striker.is_dead
        if striker.is_dead:
            self.kill()
            close_all_but(descriptors)
        return False

    def kill(self) -> None:
        """The process is no more: nothing is written at its end."""
        self.close_readers()
        with Shim(Striker(self.path, [], is_dead=True)), contextlib.suppress(Killed):
            self.store.close()
        self.store._core._closed = True  # its descriptors go with the process, and are not closed again
        durable._WRITTEN.clear()  # so do the names of what it was writing

    def reopen(self, allowed: Allowed, touched: Container[SessionUri] = ()) -> None:
        """The process ends, and the next one begins: what the journal has becomes versions. touched: sessions whose
        turns a version may have taken the place of, or which may be gone."""
        self.close_readers()
        self.store.close()
        turned = frozenset(self.turns.values())
        sure = frozenset(one for one in turned if one.uri not in touched)
        self.turns.clear()
        self.store = Store.open(self.path, writable=True)
        self.look(Allowed(allowed.before | sure, allowed.after | turned))

    def look(self, allowed: Allowed) -> None:
        """What is there now must be allowed; it is the world then."""
        found = observe(self.store, allowed.before | allowed.after, SEES, self.read)
        worlds.require_allowed(found, allowed)
        self.world = found

    def sleep_now(self, store: Store, version: Version, before: Any = None) -> None:
        worlds.sleep(store, version, before)
        self.turns.pop(version.uri, None)

    def next_number(self, uri: SessionUri) -> int:
        return max((one.number for one in versions_of(self.world, uri)), default=0) + 1

    def gone_with(self, versions: Iterable[Version]) -> set[Version | Mark]:
        """These versions and their marks."""
        gone = {(one.uri, one.number) for one in versions}
        marks = {
            mark
            for mark in self.world
            if isinstance(mark, Mark) and any(_is_mark_of(mark, uri, number) for uri, number in gone)
        }
        return {*versions, *marks}

    def pick(self, which: int) -> Version | None:
        versions = sorted((one for one in self.world if isinstance(one, Version)), key=str)
        return versions[which % len(versions)] if versions else None

    def close_readers(self) -> None:
        while self.readers:
            self.readers.pop()[1].close()

    # --- sleeping

    @rule(uri=_uris, count=st.integers(1, 800), seed=st.integers(0, 3), fault=_faults)
    def sleep_new(self, uri: SessionUri, count: int, seed: int, fault: Fault | None) -> None:
        if len(self.world) < _MOST_VERSIONS:
            version = Version(uri, self.next_number(uri), count, seed, period=16 * (seed == 3))
            self.do(Operation("sleep_new", lambda store: self.sleep_now(store, version), [version]), fault)

    @rule(which=st.integers(0, 99), uri=st.one_of(st.none(), _uris), more=st.integers(1, 300), fault=_faults)
    def sleep_on(self, which: int, uri: SessionUri | None, more: int, fault: Fault | None) -> None:
        """After a version of the session, or as a fork of it."""
        base = self.pick(which)
        if base is None or base.is_stripped or base.tail or len(self.world) >= _MOST_VERSIONS or not self.is_it(base):
            return
        to = uri or base.uri
        count = base.token_count // 256 * 256 + more
        version = Version(to, self.next_number(to), count, base.seed, base.period)

        def run(store: Store) -> None:
            with store.open_session(base.uri, base.number) as before:
                self.sleep_now(store, version, before)

        self.do(Operation("sleep_on", run, [version]), fault)

    @rule(uri=_uris, more=st.integers(1, 40), fault=_faults)
    def say(self, uri: SessionUri, more: int, fault: Fault | None) -> None:
        """A turn is acknowledged behind the newest version."""
        versions = versions_of(self.world, uri)
        if not versions or versions[-1].tail or versions[-1].is_stripped or len(self.world) >= _MOST_VERSIONS:
            return
        base = versions[-1]
        made = dataclasses.replace(base, number=base.number + 1, tail=more)
        STEPS["say"] += 1
        before = self.turns.get(uri)
        if not self.is_sound:
            return
        record = making.turn(self.store, more, uri=uri, seed=base.seed)  # type: ignore[arg-type]
        if self.strike(lambda: self.store.acknowledge([record]), fault):
            self.turns[uri] = made
        else:
            self.turns.pop(uri, None)
            self.reopen(Allowed(self.world, self.world | {one for one in (made, before) if one}))

    # --- letting go

    @rule(uri=_uris, fault=_faults)
    def delete(self, uri: SessionUri, fault: Fault | None) -> None:
        gone = versions_of(self.world, uri)
        if gone:
            self.let_go("delete", lambda store: store.delete_session(uri), uri, gone, fault)

    @rule(uri=_uris, fault=_faults)
    def forget(self, uri: SessionUri, fault: Fault | None) -> None:
        gone = versions_of(self.world, uri)
        if gone:
            self.let_go("forget", lambda store: store.forget(uri), uri, gone, fault)

    def let_go(
        self, name: str, run: Callable[[Store], object], uri: SessionUri, gone: list[Version], fault: Fault | None
    ) -> None:
        if self.do(Operation(name, run, removes=self.gone_with(gone)), fault):
            self.turns.pop(uri, None)

    @rule(which=st.integers(0, 99), fault=_faults)
    def delete_version(self, which: int, fault: Fault | None) -> None:
        version = self.pick(which)
        if version is None or version.uri in self.turns:
            return
        gone = self.gone_with([version])
        self.do(
            Operation("delete_version", lambda store: store.delete_version(version.uri, version.number), removes=gone),
            fault,
        )

    @rule(uri=st.one_of(st.none(), _uris), last=st.integers(1, 2), fault=_faults)
    def prune(self, uri: SessionUri | None, last: int, fault: Fault | None) -> None:
        kept = {mark for mark in self.world if isinstance(mark, Mark)}
        gone: set[Version | Mark] = set()
        for each in URIS if uri is None else [uri]:
            older = versions_of(self.world, each)[:-last]
            gone.update(one for one in older if not any(_is_mark_of(mark, one.uri, one.number) for mark in kept))
        if uri is None or versions_of(self.world, uri):
            has_tails = any(isinstance(one, Version) and one.tail for one in self.world)
            is_choosy = has_tails or bool(self.turns)  # these keep the version behind which they stand
            run = lambda store: store.prune(Retention(keep_last=last), uri)  # noqa: E731
            self.do(Operation("prune", run, (), gone, is_choosy), fault)

    @rule(uri=_uris, fault=_faults)
    def strip(self, uri: SessionUri, fault: Fault | None) -> None:
        gone = versions_of(self.world, uri)
        if gone and uri not in self.turns:
            adds = [dataclasses.replace(one, whole=0, is_stripped=True) for one in gone]
            self.do(Operation("strip", lambda store: store.strip(uri), adds, set(gone) - set(adds)), fault)

    @rule(busy=_uris, strip_named=st.booleans(), part=st.floats(0, 1), fault=_faults)
    def make_room(self, busy: SessionUri, strip_named: bool, part: float, fault: Fault | None) -> None:
        """The store comes within a budget, and a session in use stays as it is: so do versions with a mark."""
        marks = [mark for mark in self.world if isinstance(mark, Mark)]
        facts = [one for one in self.world if isinstance(one, Version) and one.uri not in (busy, *self.turns)]
        free = [one for one in facts if not any(_is_mark_of(mark, one.uri, one.number) for mark in marks)]
        adds = {dataclasses.replace(one, whole=0, is_stripped=True) for one in free}
        policy = RoomPolicy(strip_named=strip_named)

        def run(store: Store) -> None:
            with mock.patch.object(strip_plan, "RECENT_NS", 0):  # all was used a moment ago
                store.make_room(int(part * store.held_bytes), policy, lambda: [busy])

        self.do(Operation("make_room", run, adds, set(free) - adds, is_choosy=True), fault)

    # --- marks

    @rule(which=st.integers(0, 99), tag=st.sampled_from(["x", "y"]), fault=_faults)
    def tag(self, which: int, tag: str, fault: Fault | None) -> None:
        version = self.pick(which)
        if version is None:
            return
        mark = Mark("tag", f"{version.uri}:{tag}", version.number)
        old = {one for one in self.world if isinstance(one, Mark) and one.name == mark.name} - {mark}
        self.do(
            Operation("tag", lambda store: store.tag(version.uri, version.number, tag, move=True), [mark], old), fault
        )

    @rule(which=st.integers(0, 99), fault=_faults)
    def pin_or_unpin(self, which: int, fault: Fault | None) -> None:
        version = self.pick(which)
        if version is None:
            return
        mark = Mark("pin", str(version.uri), version.number)
        if mark in self.world:
            self.do(
                Operation(
                    "unpin",
                    lambda store: store.unpin(version.uri, making.id_of(store, version.uri, version.number)),
                    removes=[mark],
                ),
                fault,
            )
        else:
            self.do(Operation("pin", lambda store: store.pin(version.uri, version.number), [mark]), fault)

    # --- keeping in order

    @rule(policy=st.sampled_from(_POLICIES), uri=st.one_of(st.none(), _uris), fault=_faults)
    def repack(self, policy: RepackPolicy, uri: SessionUri | None, fault: Fault | None) -> None:
        if uri is None or versions_of(self.world, uri):
            self.do(Operation("repack", lambda store: store.repack(uri, policy=policy)), fault)

    @rule(fault=_faults)
    def repair(self, fault: Fault | None) -> None:
        self.do(Operation("repair", lambda store: store.repair()), fault)

    @rule(fault=_faults)
    def back_up(self, fault: Fault | None) -> None:
        """What is in the store is in its backup then."""
        target = self.folder / "backup"
        if self.do(Operation("backup", lambda store: store.backup(target)), fault):
            whole = [one for one in self.world if isinstance(one, Version) and one.whole is None]
            with Store.open(target, writable=False) as copy:
                for version in whole:
                    if any(row.version == version.number for row in copy.versions(version.uri)):
                        with contextlib.suppress(StoreError):  # another one of that number may be there from before
                            copy.open_session(version.uri, version.number).close()
        shutil.rmtree(target, ignore_errors=True)

    @rule(which=st.integers(0, 99), to=_uris, fault=_faults)
    def export_and_import(self, which: int, to: SessionUri, fault: Fault | None) -> None:
        version = self.pick(which)
        if version is None or version.whole is not None or versions_of(self.world, to) or to in self.turns:
            return
        if not self.is_it(version):
            return
        file = self.folder / "exported"
        try:
            self.store.export_session(version.uri, version.number, file)
        except StoreError:
            self.require_refusal()
            return
        copy = dataclasses.replace(version, uri=to, number=1)
        self.do(Operation("import", lambda store: store.import_file(file, as_uri=to), [copy]), fault)
        file.unlink()

    def require_refusal(self) -> None:
        raise AssertionError("a sound store refuses nothing")

    def is_it(self, version: Version) -> bool:
        """Whether the version of that number is the one that the model takes it for."""
        return True

    @precondition(lambda self: self.is_sound)
    @rule()
    def verify(self) -> None:
        STEPS["verify"] += 1
        worlds.require_clean(self.store, self.path, worlds.NOTHING_ELSE, deep=True)

    # --- the process, its readers and its index

    @rule(is_crash=st.booleans())
    def close_and_open(self, is_crash: bool) -> None:
        STEPS["reopen"] += 1
        self.close_readers()
        if is_crash:
            self.kill()
        self.reopen(Allowed(self.world, self.world))

    @rule(how=st.sampled_from(["lost", "old", "torn", "kept"]))
    def change_index(self, how: str) -> None:
        STEPS[f"index {how}"] += 1
        file = self.path / INDEX
        self.close_readers()
        self.store.close()
        if how == "lost":
            file.unlink(missing_ok=True)
        elif how == "old" and self.old_index is not None:
            making.put(file, self.old_index)
        elif how == "torn" and file.exists():
            making.put(file, file.read_bytes()[: file.stat().st_size // 2])
        elif how == "kept" and file.exists():
            self.old_index = file.read_bytes()
        self.after_index_changed()

    def after_index_changed(self) -> None:
        """An index of before a delete tells of versions that are gone. They are told as missing; so it is removed."""
        with Store.open(self.path, writable=False) as store:
            there = store._core.folder.list_versions()
            ghosts = store.index.bundle_ids() - there
            assert all(any(one in told.path for told in store.opening.unreadable) for one in ghosts)
        if ghosts:
            (self.path / INDEX).unlink()
            self.old_index = None
        self.reopen(Allowed(self.world, self.world))

    @precondition(lambda self: self.is_sound)
    @rule(which=st.integers(0, 99))
    def open_reader(self, which: int) -> None:
        version = self.pick(which)
        if version is not None and len(self.readers) < 3:
            self.readers.append((version, self.store.open_session(version.uri, version.number)))

    @rule()
    def read_on(self) -> None:
        """An open reader reads what it had when it was opened, whatever was asked since."""
        STEPS["read_on"] += 1
        for version, reader in self.readers:
            if version.whole is None:
                assert making.contents(reader) == making.expected(  # type: ignore[arg-type]
                    version.token_count, seed=version.seed, period=version.period, layers=1, heads=1, dim=1
                )

    @precondition(lambda self: self.is_sound)
    @rule()
    def read_beside(self) -> None:
        STEPS["read_beside"] += 1
        with Store.open(self.path, writable=False) as beside:
            found = observe(beside, self.world, SEES)
            worlds.require_allowed(found, Allowed(self.world, self.world))

    @invariant()
    def nothing_is_pinned_that_nobody_reads(self) -> None:
        assert len(self.store._core.pins._held) == len(self.readers)

    @invariant()
    def its_coins_add_up(self) -> None:
        """The sums of what it holds are the disk, to the byte."""
        require_coins(self.store, is_sound=self.is_sound)


def _is_mark_of(mark: Mark, uri: SessionUri, number: int) -> bool:
    return mark.value == number and (mark.name == str(uri) or mark.name.startswith(f"{uri}:"))


class DamagedStore(SoundStore):
    """Files are damaged or missing for a while. While they are, versions are refused, and nothing gives wrong bytes;
    once they are back, all that was not let go of is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.ward: Ward | None = None
        self.came: World = frozenset()  # what may have come since
        self.may_go: World = frozenset()

    def teardown(self) -> None:
        try:
            if self.ward is not None:
                self.put_back()
        finally:
            super().teardown()

    @property
    def is_sound(self) -> bool:
        return self.ward is None

    def require_refusal(self) -> None:
        if self.ward is None:
            super().require_refusal()

    def is_it(self, version: Version) -> bool:
        if self.ward is not None:
            try:
                require_right(self.store, version)
            except (worlds.Broken, StoreError):
                return False
        return True

    @precondition(lambda self: self.ward is None)
    @rule(places=st.lists(st.tuples(st.integers(0, 99), st.sampled_from(HOWS)), min_size=1, max_size=3))
    def damage(self, places: list[tuple[int, str]]) -> None:
        STEPS["damage"] += 1
        self.reopen(Allowed(self.world, self.world))
        damages: list[Damage] = []
        for which, how in places:
            names = [name for name in files_of(self.path) if name not in (INDEX, *(one.name for one in damages))]
            if names:
                damages.append(strike(self.path, names[which % len(names)], how))
        self.ward, self.came, self.may_go = Ward(self.path, damages), frozenset(), frozenset()

    def do(self, operation: Operation, fault: Fault | None = None) -> bool:
        if self.ward is None:
            return super().do(operation, fault)
        STEPS[f"{operation.name} while damaged"] += 1
        self.came |= frozenset(operation.adds) | _anyhow(operation.adds)
        if operation.name in ("strip", "make_room"):  # what came since goes with the others
            self.came |= {dataclasses.replace(one, whole=0, is_stripped=True) for one in _versions_in(self.came)}
        keys = {(one.uri, one.number) for one in operation.removes if isinstance(one, Version)}
        is_by_rule = operation.name in ("prune", "make_room")  # numbers may be used twice by now
        uris = {uri for uri, _ in keys} if is_by_rule else set()
        self.may_go |= frozenset(operation.removes) | frozenset(
            one for one in self.world if isinstance(one, Version) and ((one.uri, one.number) in keys or one.uri in uris)
        )
        with contextlib.suppress(StoreError):
            self.strike(lambda: operation.run(self.store), fault)
        if not self.store.writable or fault is not None:
            self.reopen(Allowed(self.world, self.world))
        self.require_nothing_wrong()
        return False

    def sleep_now(self, store: Store, version: Version, before: Any = None) -> None:
        if self.ward is None:
            return super().sleep_now(store, version, before)
        receipt = worlds.sleep(store, dataclasses.replace(version, number=0), before)
        self.world |= {dataclasses.replace(version, number=receipt.version)}  # acknowledged, and so it must stay
        self.turns.pop(version.uri, None)
        return None

    def reopen(self, allowed: Allowed, touched: Container[SessionUri] = ()) -> None:
        if self.ward is None:
            super().reopen(allowed, touched)
            return
        self.close_readers()
        self.store.close()
        self.store = Store.open(self.path, writable=True)
        self.came |= frozenset(self.turns.values()) | _anyhow(self.turns.values())
        self.turns.clear()
        self.ward.look(self.store)

    def after_index_changed(self) -> None:
        if self.ward is None:
            super().after_index_changed()
        else:
            self.reopen(Allowed(self.world, self.world))

    def require_nothing_wrong(self) -> None:
        """A number that was given twice is one of its two versions: it was lost, and the index that told of it too."""
        by_number: dict[tuple[SessionUri, int], list[Version]] = {}
        for fact in sorted((one for one in self.world - self.may_go if isinstance(one, Version)), key=str):
            by_number.setdefault((fact.uri, fact.number), []).append(fact)
        for same in by_number.values():
            assert self.ward is not None
            assert len(same) == 1 or self.ward.unknown or self.ward.unread, same
            with contextlib.suppress(StoreError):
                self.require_one_right(same)

    def require_one_right(self, same: list[Version]) -> None:
        for fact in same[:-1]:
            with contextlib.suppress(worlds.Broken):
                require_right(self.store, fact)
                return
        require_right(self.store, same[-1])

    @precondition(lambda self: self.ward is not None)
    @rule()
    def put_back(self) -> None:
        STEPS["put_back"] += 1
        assert self.ward is not None
        self.reopen(Allowed(self.world, self.world))
        self.store.close()
        self.ward.put_back()
        if self.may_go:
            take_marks_away(self.path)  # those that were away during a delete
        self.store = Store.open(self.path, writable=True)
        before = frozenset(one for one in self.world | self.came if isinstance(one, Version))
        sure = frozenset(one for one in self.world - self.may_go if isinstance(one, Version))
        self.ward.require_whole(self.store, Allowed(before, sure))
        self.store.close()
        shutil.rmtree(self.path)  # what was deleted and put back is there again: the model has no word for that
        self.ward, self.world, self.old_index = None, frozenset(), None
        self.turns.clear()
        self.store = Store.open(self.path, writable=True)


def _versions_in(facts: Iterable[Version | Mark]) -> Iterator[Version]:
    return (one for one in facts if isinstance(one, Version))


def _anyhow(facts: Iterable[Version | Mark]) -> World:
    """The versions among these under any number."""
    return frozenset(dataclasses.replace(one, number=0) for one in _versions_in(facts))


# --- the tests


def run_machine(machine: type[RuleBasedStateMachine], histories: int, length: int, *, fixed: bool = True) -> int:
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
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )
    return STEPS.total() - before


HEAVY_STEPS = int(os.environ.get("TORPOR_MACHINE_STEPS", "20000"))
SHARE: dict[type[RuleBasedStateMachine], int] = {SoundStore: 30, DamagedStore: 30}
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


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", SHARE)
def test_the_coins_of_a_store_add_up_to_the_disk_after_200_histories(machine: type[RuleBasedStateMachine]) -> None:
    """They do behind each step of the others, too (`its_coins_add_up`)."""
    steps = run_machine(machine, 200, 30, fixed=False)
    print(f"{machine.__name__}: {steps} steps")
    assert steps >= 10 * 200
