"""What a store must hold: the promise that a fault is checked against.

A `World` is the set of facts that the owner of a store was told. A step of a scenario leads from one world to the
next; a crash inside it may leave the world before, the one after, or what lies between (the facts that they share,
and any of the others), never anything else. Of a session that leaves, the newest version leaves last.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.memvid.answers import Finding, VersionInfo
from torpor.memvid.errors import NoSpace, StoreError
from torpor.memvid.folder.folder import manifest_name
from torpor.memvid.folder.marks import Marks
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.frame_files import open_frames
from torpor.memvid.writing.reader import BundleReader
from torpor.memvid.writing.removal import needed_now
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.faults.states import Seen, state_of

SIZES: Final = {"layers": 1, "heads": 1, "dim": 1}
"""Two slots of 512 bytes for a full span: a pack has a few KiB, and hundreds of states a second can be checked."""

AFTERWARDS: Final = SessionUri("default", "afterwards")
INDEX: Final = "index.sqlite"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a session that wakes bit-exact, or does so up to token `whole`."""

    uri: SessionUri
    number: int
    token_count: int
    seed: int = 0
    period: int = 0  # the KV's bytes repeat after so many, and so they can be compressed; 0: they cannot
    tail: int = 0  # tokens behind those in blocks
    whole: int | None = None  # only so many of its first tokens must have keys and values
    is_stripped: bool = False  # its ledger is there all the same
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
    `marks` in the open store. `finish` does what its owner does next (repairs once more). `again` asks for the
    operation once more, at the very end, and raises Broken if that does not finish it. `is_damaged`: there is damage
    that no operation mends, so `verify` has something to say. `is_gradual`: what is refused may have done a part of its
    work. `has_others`: versions that are no facts are looked at by `marks` alone. `loses_index`: somebody removes the
    index before each opening, for it is disposable.
    """

    marks: Callable[[Store], Iterable[Mark]] | None = None
    files: Callable[[Path], Iterable[Mark]] | None = None
    finish: Callable[[Store], None] | None = None
    again: Callable[[Store], None] | None = None
    is_damaged: bool = False
    is_gradual: bool = False
    has_others: bool = False
    loses_index: bool = False


NOTHING_ELSE: Final = Sees()


class Broken(AssertionError):
    """A store that is not what it promises to be. `lost` says that an acknowledged fact is gone."""

    def __init__(self, text: str, *, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


class Renumbered(Broken):
    """A version got another number than it should have."""


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
    unsure: set[Version | Mark] = field(default_factory=set)
    is_early: bool = False
    marks_stay: bool = False
    """Whether a report said that marks of what was deleted found no room to go: their owner takes them away later."""

    def hear(self, problems: Iterable[Finding]) -> None:
        self.marks_stay |= any(problem.path.endswith("/marks.json") for problem in problems)

    @property
    def allowed(self) -> Allowed:
        """What may be found now."""
        return self.events[-1] if self.events else Allowed(self.world, self.world)

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
        is_gradual: bool = False,
    ) -> Iterator[set[Version | Mark]]:
        """An operation on `store` that its owner is told of when it is done, or that it was refused. Gives a set for
        what the operation said that it may have left undone. `is_outside`: nothing in the store is written.
        `is_gradual`: where there is no room, a part of it may be done.
        """
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
            if (
                isinstance(error, NoSpace) and self.world <= after and not is_gradual
            ):  # a sleep: the store says that it is as it was
                self._tell(self.world)
            raise
        self.world = after
        self._tell(after)

    def sleep(self, store: Store, version: Version, before: Any = None) -> Any:
        """The commonest step: one sleep that the world then holds."""
        with self.step(store, adds=[version]):
            return sleep(store, version, before)

    def delete(self, store: Store, uri: SessionUri) -> None:
        gone = versions_of(self.world, uri)
        with self.step(store, removes=gone) as unsure:
            report = store.delete_session(uri)
            self.hear(report.problems)
            if store.unreadable():  # a manifest that cannot be read may be the session's
                unsure.update(gone)


def versions_of(world: World, uri: SessionUri) -> list[Version]:
    """Oldest first."""
    found = [fact for fact in world if isinstance(fact, Version) and fact.uri == uri]
    return sorted(found, key=lambda fact: fact.number)


def sleep(store: Store, version: Version, before: Any = None) -> Any:
    """Put a small session to sleep after `before` (a receipt, or an open reader), reusing its full spans."""
    sizes = {**SIZES, "period": version.period}
    receipt = making.sleep(
        store,  # type: ignore[arg-type]
        version.token_count,
        uri=version.uri,
        seed=version.seed,
        before=before,
        unread=version.tail,
        **sizes,
    )
    if version.number not in (0, receipt.version):
        raise Renumbered(f"{version.uri} got version {receipt.version}, not {version.number}")
    return receipt


@functools.cache
def _expected(fact: Version) -> list[list[bytes]]:
    if not fact.token_count:
        return []
    return making.expected(fact.token_count, seed=fact.seed, period=fact.period, **SIZES)


def observe(store: Store, candidates: World, sees: Sees, read: dict[object, Version] | None = None) -> World:
    """The facts that a store shows: every version that it lists, woken and compared byte by byte. read: what was read
    of the same files before, which is not read again."""
    known = sorted((fact for fact in candidates if isinstance(fact, Version)), key=_exactness)
    found: set[Version | Mark] = set(sees.marks(store)) if sees.marks else set()
    for latest in store.iter_sessions():
        stripped = store.marks_to_show(latest.uri).stripped
        for row in store.versions(latest.uri):
            those = [one for one in known if _may_be(one, row) and one not in found]
            if row.bundle_id in stripped:  # its keys and values may be there still: the next repack lets them go
                those = [one for one in those if one.is_stripped] or those
            if not those and sees.has_others:
                continue
            files = _files_of(store, row) if read is not None else None
            fact = read.get(files) if read else None
            if fact not in those:
                fact = _seen_as(store, row, those)
            if read is not None:
                read[files] = fact
            found.add(fact)
    return frozenset(found)


def _exactness(fact: Version) -> tuple[bool, int, str]:
    """The facts that say most come first: of a whole version, of one with its ledger, of one that lacks some of it."""
    return not fact.number, 0 if fact.whole is None else 1 if fact.is_stripped else 2, str(fact)


def _files_of(store: Store, row: VersionInfo) -> object:
    """A version's files as they are, and where the index says that its blocks are."""
    core = store._core
    places = core.index.packs_with(core.needs.of(row.bundle_id))
    status = {name: core.folder.status_of(name) for name in (manifest_name(row.bundle_id), *places)}
    stamps = sorted((name, one and (one.st_ino, one.st_size, one.st_mtime_ns)) for name, one in status.items())
    return row, tuple(stamps), tuple(sorted((name, tuple(sorted(blocks))) for name, blocks in places.items()))


def _may_be(fact: Version, row: VersionInfo) -> bool:
    is_it = fact.uri == row.uri and fact.number in (0, row.version)
    return is_it and (fact.token_count, fact.tail) == (row.block_tokens, row.unread_tokens)


def _seen_as(store: Store, row: VersionInfo, candidates: list[Version]) -> Version:
    """The fact that a row is. Raises what the last of them is not: Broken, StoreError."""
    if not candidates:
        tokens = f"{row.block_tokens} and {row.unread_tokens} tokens"
        raise Broken(f"version {row.version} of {row.uri} with {tokens} was never promised")
    for fact in candidates:
        try:
            require_right(store, fact, row)
            return fact
        except (Broken, StoreError):
            if fact is candidates[-1]:
                raise
    raise AssertionError


def require_right(store: Store, fact: Version, row: VersionInfo | None = None) -> None:
    """What must be there is exact; what may be missing is exact, or refused. row: which it is, where two versions of a
    session have one number, as when a deleted one was put back by hand."""
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(store.open_session(fact.uri, row.version if row else fact.number))
        if row is not None and reader.bundle_id != row.bundle_id:
            reader = stack.enter_context(store.open_bundle(row.bundle_id))
        if reader.manifest.tail != making.token_ids(fact.token_count, fact.tail, fact.seed):
            raise Broken(f"the tokens behind the blocks of {fact} are not those that were acknowledged")
        if fact.whole is None or fact.is_stripped:
            require_ledger(reader, fact)
        for entry, expected in zip(reader.entries, _expected(fact), strict=True):
            try:
                found = making.read_block(reader, entry)
            except StoreError:
                if fact.whole is None or entry.end <= fact.whole:
                    raise
                continue
            if found != expected:
                raise Broken(f"the state of {fact} is not the one that was put to sleep", lost=True)


def require_ledger(reader: BundleReader, fact: Version) -> None:
    if reader.tokens() != making.token_ids(0, fact.token_count, fact.seed):
        raise Broken(f"the tokens of {fact} are not those that were put to sleep", lost=True)


def require_allowed(found: World, allowed: Allowed) -> None:
    lost = _required(allowed.before & allowed.after) - found
    if lost:
        raise Broken(f"lost what was promised: {sorted(map(str, lost))}", lost=True)
    extra = found - (allowed.before | allowed.after)
    if extra:
        raise Broken(f"came back, or was never promised: {sorted(map(str, extra))}", lost=True)
    for uri in {fact.uri for fact in allowed.before if isinstance(fact, Version)}:
        leaving = versions_of(allowed.before, uri)
        is_whole_session = not leaving[-1].is_optional and not versions_of(allowed.after, uri)
        if is_whole_session and leaving[-1] not in found and (older := versions_of(found & allowed.before, uri)):
            raise Broken(f"{leaving[-1]} left before {older[0]}")


def _required(world: World) -> World:
    return frozenset(fact for fact in world if not (isinstance(fact, Version) and fact.is_optional))


_SEEN: Final = Seen[World]()


def check(path: Path, allowed: Allowed, *, thorough: bool, sees: Sees = NOTHING_ELSE) -> None:
    """Open a store after a fault, as a daemon would, and require all that it promises. Raises Broken, StoreError.

    One that was opened in a state which was checked before is closed and, if `thorough`, opened once more.
    """
    lose_index(path, sees)
    once = set(sees.files(path)) if sees.files else set()
    with Store.open(path, writable=True) as store:
        if sees.finish is not None:
            sees.finish(store)
        elif store.opening.unreadable:
            raise Broken(f"opening reports {store.opening.unreadable[0].message}", lost=True)
        state = state_of(store)
        checked_for = state, allowed.before | allowed.after, thorough, sees
        seen = None if thorough and sees.again else _SEEN.find(checked_for)
        found = observe(store, allowed.before | allowed.after, sees) if seen is None else seen
        require_allowed(found | once, allowed)
        if seen is None:
            require_clean(store, path, sees, deep=thorough)
            after = require_usable(store, found) if thorough else found
    if thorough and seen is None:
        lose_index(path, sees)
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


def take_marks_away(path: Path) -> None:
    """Marks may name what was deleted, as when they found no room to go, or were put back: their owner takes them away,
    as an opening advises."""
    with Store.open(path, writable=True) as store:
        folder = store._core.folder
        there = folder.list_versions()
        for uri, marks in Marks.load(folder).sessions.items():
            for tag, bundle_id in marks.tags.items():
                if bundle_id not in there:
                    store.untag(uri, tag)
            for bundle_id in marks.pins - there:
                store.unpin(uri, bundle_id)


def lose_index(path: Path, sees: Sees) -> None:
    if sees.loses_index:
        (path / INDEX).unlink(missing_ok=True)


def require_clean(store: Store, path: Path, sees: Sees, *, deep: bool) -> None:
    """Nothing half done stays: no temporary file; after a repack no pack that nothing needs, and no mark of nothing;
    nothing that verify minds. What a client that died left in `incoming` is a repack's, a day later."""
    names = [name for name in path.rglob("*.tmp") if name.parent.name != "incoming"]
    if names:
        raise Broken(f"a temporary file stayed: {[name.name for name in names]}")
    report = store.repack()
    if report.problems and not sees.is_damaged:
        raise Broken(f"a repack finds {report.problems[0].code}: {report.problems[0].message}")
    require_only_needed(store)
    if not sees.is_damaged:
        for finding in store.verify(deep=deep).findings:
            raise Broken(f"verify finds {finding.code}: {finding.message}")


def require_only_needed(store: Store) -> None:
    needed = needed_now(store._core)
    for name in store._core.folder.list_packs() if not needed.unknown else ():
        with contextlib.suppress(StoreError), open_frames(store._core.folder, name) as file:
            if needed.blocks.isdisjoint([*file.frames, *file.heads]):
                raise Broken(f"{name} stayed, and nothing needs it")


def require_usable(store: Store, found: World) -> World:
    """The next sleeps work: a new session, and the next version of each that is there."""
    added: set[Version | Mark] = set()
    uris = {fact.uri for fact in found if isinstance(fact, Version)} | {AFTERWARDS}
    for uri in sorted(uris):
        row = store.find_session(uri)
        last = row.version if row else 0
        version = Version(uri, last + 1, 20 + last, seed=9)
        sleep(store, version)
        require_right(store, version)
        added.add(version)
    return found | added
