"""What a store must hold: the promise that a fault is checked against.

A `World` is the set of facts that the owner of a store was told. A step of a scenario leads from one world to the
next; a crash inside it may leave the world before, the one after, or what lies between (the facts that they share,
and any of the others), never anything else. What leaves, leaves oldest version first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.memvid import IndexRow, SessionUri, Store
from torpor.memvid.errors import NoSpace
from torpor.memvid.format.ledger_tail import tail_of
from torpor.memvid.recovery.repair import LOST
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.faults.states import Seen, state_of

SIZES: Final = {"layers": 1, "heads": 1, "dim": 1}
"""Two slots of 512 bytes for a full span: a bundle has a few KiB, and hundreds of states a second can be checked."""

AFTERWARDS: Final = SessionUri("default", "afterwards")


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a session that wakes bit-exact."""

    uri: SessionUri
    number: int  # 0: whichever it got; where bundles cannot be read, theirs may be left out
    token_count: int
    seed: int = 0
    is_salvaged: bool = False  # full spans only, without the state at the end
    period: int = 0  # the KV's bytes repeat after so many, and so they can be compressed; 0: they cannot
    tail: int = 0  # tokens behind those in blocks
    is_optional: bool = False  # it may be there, for a while: what it holds other facts promise


@dataclass(frozen=True, slots=True)
class Mark:
    """A tag or a pin, or any other fact that `Scenario.observe` reports."""

    kind: str
    name: str
    value: object = None


World = frozenset[Version | Mark]


@dataclass(frozen=True, slots=True)
class Sees:
    """How a scenario's other facts are found: `files` in the folder as a fault left it, before anybody opens the store;
    `marks` in the open store; `finish` does what its owner does next (repairs once more) and says what it found then,
    and whatever the fault did, `finished` stands after it. `meanwhile` is what somebody does to the folder after that
    (puts an older file back), before the store is opened.
    `again` asks for the operation once more, at the very end, and raises Broken if that does not finish it.
    `is_whole` raises Broken for an operation that is half done. `loses_index`: somebody removes the index before each
    opening, for it is disposable. A delete that was cut off is then not ended where only the index tells of it, so
    `is_whole` is not asked.
    """

    marks: Callable[[Store], Iterable[Mark]] | None = None
    files: Callable[[Path], Iterable[Mark]] | None = None
    meanwhile: Callable[[Path], None] | None = None
    finish: Callable[[Store], Iterable[Mark]] | None = None
    finished: World = frozenset()
    again: Callable[[Store], None] | None = None
    is_whole: Callable[[Store], None] | None = None
    loses_index: bool = False


NOTHING_ELSE: Final = Sees()


class Broken(AssertionError):
    """A store that is not what it promises to be. `lost` says that an acknowledged fact is gone."""

    def __init__(self, text: str, *, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


@dataclass(frozen=True, slots=True)
class Allowed:
    """The worlds that may be found: from `before` (acknowledged) to `after` (under way, or the same)."""

    before: World
    after: World


@dataclass
class Tape:
    """Follows a scenario's steps. `events` are the worlds allowed from the beginning and from each end of a step on;
    `on_event` hears of each. `is_early`: each step is told as done before it has begun, which a sweep must find."""

    world: World
    on_event: Callable[[Allowed], None] = lambda allowed: None
    on_failure: Callable[[Store, BaseException, bool], None] = lambda store, error, is_outside: None
    events: list[Allowed] = field(default_factory=list)
    unsure: set[Mark] = field(default_factory=set)
    is_early: bool = False

    def _tell(self, after: World) -> None:
        self.events.append(Allowed(self.world | self.unsure, after))
        self.on_event(self.events[-1])

    @contextlib.contextmanager
    def step(
        self,
        store: Store,
        *,
        adds: Iterable[Version | Mark] = (),
        removes: Iterable[Version | Mark] = (),
        is_outside: bool = False,
    ) -> Iterator[set[Mark]]:
        """An operation on `store` that its owner is told of when it is done, or that it was refused. Gives a set for
        what the operation said that it may have left undone. `is_outside`: nothing in the store is written."""
        after = (self.world - frozenset(removes)) | frozenset(adds)
        if self.is_early:
            self.world = after
        self._tell(after)
        if self.is_early:
            yield self.unsure
            return
        try:
            yield self.unsure
        except BaseException as error:
            self.on_failure(store, error, is_outside)
            if isinstance(error, NoSpace) and self.world <= after:  # a sleep: the store says that it is as it was
                self._tell(self.world)
            raise
        self.world = after
        self._tell(after)

    def sleep(self, store: Store, version: Version, before: Any = None) -> Any:
        """The commonest step: one sleep that the world then holds."""
        with self.step(store, adds=[version]):
            return sleep(store, version, before)

    def delete(self, store: Store, uri: SessionUri) -> None:
        with self.step(store, removes=[fact for fact in self.world if isinstance(fact, Version) and fact.uri == uri]):
            store.delete_session(uri)


def sleep(store: Store, version: Version, before: Any = None) -> Any:
    """Put a small session to sleep after `before` (a receipt, or an open reader), reusing its full spans."""
    sizes = {**SIZES, "period": version.period}
    receipt = making.sleep(
        store, version.token_count, uri=version.uri, seed=version.seed, before=before, unread=version.tail, **sizes
    )
    if version.number not in (0, receipt.version):
        raise Broken(f"{version.uri} got version {receipt.version}, not {version.number}")
    return receipt


@functools.cache
def _expected(fact: Version) -> list[list[bytes]]:
    if not fact.token_count:
        return []
    blocks = making.expected(fact.token_count, seed=fact.seed, period=fact.period, **SIZES)
    return blocks[:-1] if fact.is_salvaged else blocks


def observe(store: Store, candidates: World, sees: Sees) -> World:
    """The facts that a store shows: every version that it lists, woken and compared byte by byte."""
    known = [fact for fact in candidates if isinstance(fact, Version)]
    found: set[Version | Mark] = set(sees.marks(store)) if sees.marks else set()
    if sees.is_whole and not sees.loses_index:
        sees.is_whole(store)
    for latest in store.iter_sessions():
        for row in store.versions(latest.uri):
            fact = next((one for one in known if _may_be(one, row) and one not in found), None)
            if fact is None:
                tokens = f"{row.token_count} and {row.unread_tokens} tokens"
                raise Broken(f"version {row.version} of {row.uri} with {tokens} was never promised")
            require_bit_exact(store, fact, row.version)
            found.add(fact)
    return frozenset(found)


def _may_be(fact: Version, row: IndexRow) -> bool:
    is_it = fact.uri == row.uri and fact.number in (0, row.version)
    return is_it and (fact.token_count, fact.tail) == (row.token_count, row.unread_tokens)


def require_bit_exact(store: Store, fact: Version, number: int | None = None) -> None:
    with store.open_session(fact.uri, number or fact.number) as reader:
        if reader.tokens() != making.token_ids(0, fact.token_count, fact.seed):
            raise Broken(f"the tokens of {fact} are not those that were put to sleep")
        if tail_of(reader.manifest) != making.token_ids(fact.token_count, fact.tail, fact.seed):
            raise Broken(f"the tokens behind the blocks of {fact} are not those that were acknowledged")
        if making.contents(reader) != _expected(fact):
            raise Broken(f"the state of {fact} is not the one that was put to sleep")


def require_allowed(found: World, allowed: Allowed) -> None:
    lost = _required(allowed.before & allowed.after) - found
    if lost:
        raise Broken(f"lost what was promised: {sorted(map(str, lost))}", lost=True)
    extra = found - (allowed.before | allowed.after)
    if extra:
        raise Broken(f"came back, or was never promised: {sorted(map(str, extra))}", lost=True)
    leaving = {fact for fact in _required(allowed.before - allowed.after) if isinstance(fact, Version)}
    for gone in leaving - found:
        older = [fact for fact in leaving & found if fact.uri == gone.uri and fact.number < gone.number]
        if older:
            raise Broken(f"{gone} left before {older[0]}")


def _required(world: World) -> World:
    return frozenset(fact for fact in world if not (isinstance(fact, Version) and fact.is_optional))


_SEEN: Final = Seen[World]()


def check(path: Path, allowed: Allowed, *, thorough: bool, sees: Sees = NOTHING_ELSE) -> None:
    """Open a store after a fault, as a daemon would, and require all that it promises. Raises Broken, StoreError.

    One that was opened in a state which was checked before is closed and, if `thorough`, opened once more.
    """
    _lose_index(path, sees)
    once = set(sees.files(path)) if sees.files else set()
    if sees.meanwhile is not None:
        sees.meanwhile(path)
    _lose_index(path, sees)
    with Store.open(path, writable=True) as store:
        if sees.finish is not None:
            once.update(sees.finish(store))
            allowed = Allowed(allowed.before | sees.finished, allowed.after | sees.finished)
        elif store.opening.unreadable:
            raise Broken(f"opening reports {store.opening.unreadable[0].message}", lost=True)
        state = state_of(store)
        checked_for = state, allowed.before | allowed.after, thorough, sees
        seen = None if thorough and sees.again else _SEEN.find(checked_for)
        found = observe(store, allowed.before | allowed.after, sees) if seen is None else seen
        require_allowed(found | once, allowed)
        if seen is None:
            require_clean(store, path, deep=thorough)  # every block of every version was read above
            after = require_usable(store, found) if thorough else found
    if thorough and seen is None:
        _lose_index(path, sees)
        with Store.open(path, writable=False) as store:
            require_allowed(observe(store, after, sees), Allowed(after, after))
    if thorough:
        with Store.open(path, writable=True) as store:
            if seen is None:
                require_allowed(observe(store, after, sees), Allowed(after, after))
            elif state_of(store) != state:
                raise Broken("the next opening found the store in another state")
            if store.opening.index_rebuilt is not None and not sees.loses_index:
                raise Broken(f"the index had to be made again at the second open: {store.opening.index_rebuilt}")
            if sees.again is not None:
                sees.again(store)
    if seen is None:
        _SEEN.add(checked_for, found)


def _lose_index(path: Path, sees: Sees) -> None:
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm") if sees.loses_index else ():
        (path / name).unlink(missing_ok=True)


def require_clean(store: Store, path: Path, *, deep: bool) -> None:
    """Nothing half done stays: no temporary file, no holder that nothing needs, nothing that verify minds.

    What a client that died left in `incoming` is a gc's, a day later.
    """
    names = [name for name in path.rglob("*") if not name.is_dir()]
    if leftovers := [name.name for name in names if name.suffix == ".tmp" and name.parent.name != "incoming"]:
        raise Broken(f"a temporary file stayed: {leftovers}")
    needed = {one for user in store.index.bundle_ids() for one in store.index.refs_of(user)}
    if idle := [name.name for name in names if name.suffix == ".mvr" and bytes.fromhex(name.stem) not in needed]:
        raise Broken(f"retired files stayed that nothing needs: {idle}")
    require_refs_cover_files(store)
    for finding in store.verify(deep=deep).findings:
        if finding.code != LOST:  # what a repair has set aside; whether it is told of, the repair's scenario asks
            raise Broken(f"verify finds {finding.code}: {finding.message}")


def require_refs_cover_files(store: Store) -> None:
    """A removal believes the index's references: they name every bundle that a version's file has blocks in."""
    for latest in store.iter_sessions():
        for row in store.versions(latest.uri):
            with store.open_session(row.uri, row.version) as reader:
                missing = {entry.bundle_id for entry in reader.entries} - {row.bundle_id}
            missing -= set(store.index.refs_of(row.bundle_id))
            if missing:
                raise Broken(f"version {row.version} of {row.uri} needs bundles that the index does not name for it")


def require_usable(store: Store, found: World) -> World:
    """The next sleeps work: a new session, and the next version of each that is there."""
    added: set[Version | Mark] = set()
    uris = {fact.uri for fact in found if isinstance(fact, Version)} | {AFTERWARDS}
    for uri in sorted(uris):
        row = store.find_session(uri)
        last = row.version if row else 0
        version = Version(uri, last + 1, 20 + last, seed=9)
        sleep(store, version)
        require_bit_exact(store, version)
        added.add(version)
    return found | added
