"""Files of a store that rot, or are not there for a while, and are put back by hand.

Owns what may then be demanded. While a file is damaged or missing, no version gives wrong bytes, and only those that
need the file are refused. Once it is back, all is whole again, whatever the store was asked to do meanwhile. One
exception: a version whose manifest was missing, and of which no index told. The store cannot know what it needs. It is
whole then up to some token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torpor.memvid.errors import StoreError
from torpor.memvid.folder.folder import id_in
from torpor.memvid.store import Store
from torpor.memvid.writing.frame_files import open_frames
from torpor.tests.memvid.faults import worlds
from torpor.tests.memvid.faults.worlds import NOTHING_ELSE, Allowed, Broken, Mark, Sees, Version, World, observe

MISSING: Final = "missing"
HOWS: Final = (MISSING, "start", "middle", "end")


@dataclass(frozen=True, slots=True)
class Damage:
    """What became of a file of a store, what it held, and what it holds since; None: it is missing."""

    name: str
    how: str
    data: bytes
    left: bytes | None = None

    @property
    def is_missing_manifest(self) -> bool:
        return self.how == MISSING and self.name.endswith(".mvm")

    def undo(self, path: Path) -> None:
        """Put the file back, unless the store has another one in its place by now."""
        file = path / self.name
        if file.exists() and file.read_bytes() != self.left:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(self.data)
        file.chmod(0o600)


def files_of(path: Path) -> list[str]:
    """The files of a store that may be damaged: all but store.json, without which nothing opens, lock and journal."""
    if not (path / "store.json").exists():
        return []
    found = [file.relative_to(path).as_posix() for top in ("versions", "packs") for file in (path / top).rglob("*.mv?")]
    return sorted([*found, *(name for name in ("marks.json", "index.sqlite") if (path / name).exists())])


def place_of(how: str, size_bytes: int) -> int:
    """At which byte of a file a bit flips."""
    return {"start": 20, "middle": size_bytes // 2, "end": size_bytes - 10}[how]


def strike(path: Path, name: str, how: str) -> Damage:
    """Damage a file, or take it away."""
    file = path / name
    damage = Damage(name, how, file.read_bytes())
    if how == MISSING:
        file.unlink()
    else:
        data = bytearray(damage.data)
        data[place_of(how, len(data))] ^= 4
        file.write_bytes(data)
        damage = Damage(name, how, damage.data, bytes(data))
    return damage


@dataclass
class Ward:
    """Follows a store whose files are damaged, through its openings, until they are put back."""

    path: Path
    damages: Sequence[Damage]
    unknown: set[str] = dataclasses.field(default_factory=set)
    unread: set[str] = dataclasses.field(default_factory=set)
    """Versions whose manifests are damaged, and whose numbers nothing tells."""

    @property
    def lacks_manifests(self) -> bool:
        return any(damage.name.endswith(".mvm") for damage in self.damages)

    def look(self, store: Store) -> None:
        """Note of which versions an open store knows nothing. After each opening."""
        for damage in self.damages:
            if damage.name.endswith(".mvm") and not store.index.knows(id_in(damage.name)):
                (self.unknown if damage.is_missing_manifest else self.unread).add(id_in(damage.name))

    def require_told(self, store: Store, allowed: Allowed) -> set[Version]:
        """Which of the versions that must be there do not wake now; each is refused, and the store says why."""
        suffering = {
            fact for fact in allowed.before & allowed.after if isinstance(fact, Version) and not fact.is_optional
        }
        for fact in sorted(allowed.before | allowed.after, key=str):
            if isinstance(fact, Version):
                with contextlib.suppress(StoreError):
                    worlds.require_right(store, fact)
                    suffering.discard(fact)
        told = [*store.opening.unreadable, *store.verify(deep=True).findings]
        listed = [fact for fact in suffering if store.find_session(fact.uri, fact.number)]
        if listed and not told:
            raise Broken(f"nothing is told, and {listed[0]} does not wake", lost=True)
        return suffering

    def put_back(self) -> None:
        for damage in reversed(self.damages):  # the first one knows what the file was
            damage.undo(self.path)

    def require_whole(
        self,
        store: Store,
        allowed: Allowed,
        sees: Sees = NOTHING_ELSE,
        ever: World = frozenset(),
        once: World = frozenset(),
    ) -> World:
        """What a store must hold once all is back. ever: what it has held. Of a manifest that is put back it may have
        let go: its version is there again then, and its blocks perhaps not. once: what was found before it was opened.
        """
        if sees.finish is not None:
            sees.finish(store)
        elif store.opening.unreadable:
            raise Broken(f"with all back, {store.opening.unreadable[0].message}", lost=True)
        required = _relaxed(allowed.before & allowed.after, self._unknown_rows(store))
        others = (allowed.before | allowed.after) - (allowed.before & allowed.after)
        if self.lacks_manifests:
            others = _relaxed(others | (ever - allowed.before))
        found = observe(store, required | others, sees) | once
        lost = {fact for fact in required - found if not (isinstance(fact, Version) and fact.is_optional)}
        if lost:
            raise Broken(f"with all back, lost what was promised: {sorted(map(str, lost))}", lost=True)
        return found

    def _unknown_rows(self, store: Store) -> set[tuple[object, int]]:
        return {(row.uri, row.version) for row in store.index.rows_of(self.unknown).values()}

    def require_explained(self, store: Store, suffering: Iterable[Version]) -> None:
        """With all put back: those that did not wake need a file that was damaged."""
        core = store._core
        there = core.folder.list_packs()
        struck = {damage.name for damage in self.damages}
        for fact in suffering:
            row = store.find_session(fact.uri, fact.number)
            if row is None or any(id_in(name) == row.bundle_id for name in struck if name.endswith(".mvm")):
                continue
            needed = {entry.id for entry in core.read_manifest(row.bundle_id).blocks}
            for name in there - struck:
                with contextlib.suppress(StoreError), open_frames(core.folder, name) as file:
                    needed -= file.frames.keys()
            if not needed:
                raise Broken(f"{fact} did not wake, though it needs none of {sorted(struck)}", lost=True)


def _relaxed(world: World, only: set[tuple[object, int]] | None = None) -> World:
    """The same, but these versions, or all, need not be whole."""

    def relaxed(fact: Version | Mark) -> Version | Mark | None:
        version = fact if isinstance(fact, Version) else fact.value
        if not isinstance(version, Version) or (only is not None and (version.uri, version.number) not in only):
            return fact
        return dataclasses.replace(version, whole=0, is_stripped=False) if fact is version else None

    return frozenset(fact for fact in map(relaxed, world) if fact is not None)


def check_damaged(
    path: Path, allowed: Allowed, damages: Sequence[Damage], sees: Sees = NOTHING_ELSE, ever: World = frozenset()
) -> None:
    """Open a store with damaged files, let it tidy up, put them back, and require all. Raises Broken, StoreError."""
    ward = Ward(path, damages)
    with Store.open(path, writable=True) as store:
        ward.look(store)
        suffering = ward.require_told(store, allowed)
        with contextlib.suppress(StoreError):
            store.repack()
    ward.put_back()
    once = frozenset(sees.files(path)) if sees.files else frozenset()
    with Store.open(path, writable=True) as store:
        found = ward.require_whole(store, allowed, sees, ever, once) - once
        if not sees.is_damaged:
            ward.require_explained(store, suffering)
        is_damaged = dataclasses.replace(sees, is_damaged=sees.is_damaged or ward.lacks_manifests)
        worlds.require_clean(store, path, is_damaged, deep=False)
        after = worlds.require_usable(store, found)
    with Store.open(path, writable=True) as store:
        worlds.require_allowed(observe(store, after, sees), Allowed(after, after))
