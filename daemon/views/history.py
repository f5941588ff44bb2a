"""The history of sessions, as the files tell it: which version came from which, how, and what it added.

The index has the parents of versions, a fork's and a fold's too. Their manifests have the rest, and only those of the
versions to show are read. A stand-in goes by itself, so a parent may be gone: what names it went on from the version
before it that is left, or, the oldest of its session, came from what its manifest names, or else began.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from ...errors import TorporError
from ...memvid.access.sessions import Named
from ...memvid.answers import Finding, ShownVersion, VersionInfo
from ...memvid.disk.paths import Closing
from ...memvid.errors import StoreError
from ...memvid.format.manifest import Manifest
from ...memvid.index.queries import Link, links, newest_rows, version_before
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ..api.history import HistoryEntry, HistoryResult, Way
from ..api.session import Origin
from .ledgers import PlainLedger, common_tokens
from .stored import origin_of, provenance_in
from .trees import BRANCH, branches_in, fork_head_in

_MOST_PROBLEMS: Final = 1000

_MOST_OPEN: Final = 16
"""Versions at a time."""

_MOST_LOOKED_INTO: Final = 500
"""Sessions without their first version whose manifest is read for what they came from; of more, those that were made
last."""


def history_of(
    store: Store, named: Sequence[Named], *, namespace: str | None = None, since_ns: int = 0, limit: int
) -> HistoryResult:
    """The newest versions of some sessions and their kin, or of all; fields as of `HistoryRequest`. It tells nothing of
    other namespaces than the one that is named. Works on a damaged store. Raises InvalidUri: a name has a place."""
    unread = store.unreadable()
    if named:
        kin = store.index.rows_of(_Kin(store).of([each.require_whole() for each in named])).values()
        wanted = [row for row in kin if row.created_ns >= since_ns and namespace in (None, row.uri.namespace)]
        rows = sorted(wanted, key=_age)[:limit]
        left_out = len(wanted) - len(rows)
    else:
        rows, left_out = newest_rows(store.index, limit, namespace, since_ns)
    with _Readers(store) as readers:
        page = _Page(store, readers, rows, namespace)
        entries = tuple(in_order(page.entries()))
    return HistoryResult(entries, left_out, problems=(*page.problems, *unread)[:_MOST_PROBLEMS])


def in_order(entries: Iterable[HistoryEntry]) -> list[HistoryEntry]:
    """The newest first, and each behind all that came from it, whatever the clock said."""
    by_id = {each.bundle_id: each for each in entries}
    ahead = dict.fromkeys(by_id, 0)  # of each, how many that came from it are still to come
    for each in by_id.values():
        if each.follows in ahead:
            ahead[each.follows] += 1
    ready = [(_age(each), each.bundle_id) for each in by_id.values() if not ahead[each.bundle_id]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        entry = by_id[heapq.heappop(ready)[1]]
        ordered.append(entry)
        if entry.follows in ahead:
            ahead[entry.follows] -= 1
            if not ahead[entry.follows]:
                heapq.heappush(ready, (_age(by_id[entry.follows]), entry.follows))
    return ordered


def _age(row: VersionInfo) -> tuple[int, int, str]:
    return -row.created_ns, -row.version, row.bundle_id


class _Readers(Closing):
    """Opens versions, and keeps the last ones open: most are compared with the one before them, which comes next."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: OrderedDict[str, BundleReader] = OrderedDict()

    def of(self, row: VersionInfo) -> BundleReader:
        """Good for the next few calls. Raises StoreError."""
        reader = self._open.pop(row.bundle_id, None) or self._store.open_session(row.uri, row.bundle_id)
        self._open[row.bundle_id] = reader
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return reader

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class _Page:
    """Makes entries of rows. problems: manifests of these that cannot be read."""

    def __init__(self, store: Store, readers: _Readers, rows: Sequence[VersionInfo], namespace: str | None) -> None:
        self.problems: list[Finding] = []
        self._store = store
        self._readers = readers
        self._rows = rows
        self._namespace = namespace
        self._parents = store.index.rows_of({row.parent for row in rows if row.parent is not None})
        self._trees: dict[str, Origin] = {}  # of a branch of a tree: what it was forked from
        self._sizes: dict[str, int] = {}

    def entries(self) -> list[HistoryEntry]:
        """In the order of the rows: a tree's root is younger than its branches, so it comes before them."""
        return [self._hidden(self._entry(row)) for row in self._rows]

    def _entry(self, row: VersionInfo) -> HistoryEntry:
        manifest = self._manifest(row)
        kept = {} if manifest is None else manifest.session
        self._note_tree(row, kept)
        left = self._store.earlier(row) if self._is_cut(row) else None
        if left is not None:
            self._parents[left.bundle_id] = left
            row = replace(row, parent=left.bundle_id)
        parent = self._parents.get(row.parent or "")
        way, origin = self._origin(row, kept) or (self._way(row, parent, has_manifest=manifest is not None), None)
        way = "went_on" if left is not None else way
        common = back_at = None
        if parent is not None and way in ("went_on", "went_back"):
            common = self._common(row, parent)
            if way == "went_back" or common not in (None, parent.token_count):
                way, back_at = "went_back", common
        marks = self._store.marks_to_show(row.uri).of(row.bundle_id)
        shown = ShownVersion(**vars(row), tags=marks.tags, pinned=marks.pinned, stripped=marks.stripped)
        return HistoryEntry(
            **vars(shown),
            way=way,
            origin=origin,
            parent_version=parent.version if parent is not None and parent.session == row.session else None,
            back_at=back_at,
            added_tokens=_added(row, way, origin, parent) if common is None else row.token_count - common,
            branches=self._sizes.get(row.bundle_id, 0),
        )

    def _common(self, row: VersionInfo, parent: VersionInfo) -> int | None:
        """How many first tokens a version has of another; None where they cannot be read."""
        with contextlib.suppress(StoreError):
            one, other = (PlainLedger.of_version(self._readers.of(each)) for each in (row, parent))
            common = common_tokens(one, other)
            return None if one.problems or other.problems else common
        return None

    def _manifest(self, row: VersionInfo) -> Manifest | None:
        try:
            return self._readers.of(row).manifest
        except StoreError as error:
            path = str(error.details.get("path", ""))
            self.problems.append(Finding(path, error.code, error.message, row.session, row.version))
            return None

    def _is_cut(self, row: VersionInfo) -> bool:
        return row.version > 1 and row.parent is not None and row.parent not in self._parents

    def _note_tree(self, row: VersionInfo, kept: Mapping[str, Any]) -> None:
        """Note where the branches of a tree come from."""
        with contextlib.suppress(ValueError):
            places = [origin_of(row, 0)]
            for each in branches_in(kept):
                self._trees[each.bundle_id] = places[each.parent]
                places.append(Origin(str(each.uri), each.version, each.bundle_id, 0))
            self._sizes[row.bundle_id] = len(places) - 1

    def _origin(self, row: VersionInfo, kept: Mapping[str, Any]) -> tuple[Way, Origin] | None:
        if BRANCH in kept and row.bundle_id in self._trees:
            return "branched", replace(self._trees[row.bundle_id], tokens=fork_head_in(kept))
        told = _told_origin(kept)
        is_own = told is not None and row.parent in (None, told[1].bundle_id)  # else it may be an earlier version's
        return told if is_own or self._is_oldest_left(row) else None

    def _way(self, row: VersionInfo, parent: VersionInfo | None, *, has_manifest: bool) -> Way:
        """How a version came about that is no fork, fold or branch by its manifest."""
        if not has_manifest and (parent is None or parent.session != row.session):
            return "unknown"
        if row.parent is None or self._is_oldest_left(row):
            return "began"
        if parent is None:
            return "imported" if row.version == 1 else "cut_off"
        if parent.session != row.session:
            return "imported"
        if row.lossy is not None and parent.lossy != row.lossy and parent.token_count == row.token_count:
            return "quantized"
        return "went_on" if parent.version == row.version - 1 else "went_back"

    def _is_oldest_left(self, row: VersionInfo) -> bool:
        return self._is_cut(row) and version_before(self._store.index, row) is None

    def _hidden(self, entry: HistoryEntry) -> HistoryEntry:
        """Without what it says of another namespace."""
        if self._namespace is None:
            return entry
        origin, parent = entry.origin, self._parents.get(entry.parent or "")
        is_own = parent is not None and parent.uri.namespace == self._namespace
        knows = origin is None or SessionUri.parse(origin.session).namespace == self._namespace
        return replace(entry, parent=entry.parent if is_own else None, origin=origin if knows else None)


def _told_origin(kept: Mapping[str, Any]) -> tuple[Way, Origin] | None:
    """What a session was forked or folded from, as each of its session maps tells."""
    with contextlib.suppress(ValueError):
        told = provenance_in(kept)
        if told.forked_from is not None:
            return "forked", told.forked_from
        if told.folded_from is not None:
            return "folded", told.folded_from
    return None


def _added(row: VersionInfo, way: Way, origin: Origin | None, parent: VersionInfo | None) -> int | None:
    if way in ("began", "folded"):
        return row.token_count
    if origin is not None:
        return row.token_count - origin.tokens
    return None if parent is None else row.token_count - parent.token_count


class _Kin:
    """The versions of sessions, of what they came from, and of all sessions that came from them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parents: dict[str, str | None] = {}
        self._versions = defaultdict[SessionUri, list[str]](list)
        self._heirs = defaultdict[str, set[SessionUri]](set)
        for link in links(store.index):
            self._enter(link)
        self._unread = self._without_first()
        made_last = sorted(store.index.rows_of(self._unread).values(), key=_age)
        for row in made_last[:_MOST_LOOKED_INTO]:
            self._look_into(row)

    def of(self, named: Iterable[Named]) -> set[str]:
        """Their bundle ids; of a version, it and what it came from."""
        found = {each.row.bundle_id for each in named if each.row is not None}
        waiting = {each.uri for each in named if each.row is None}
        for uri in {each.uri for each in named}:
            name, _, number = uri.name.rpartition(".")
            if name and number.isdigit():  # it may be a branch of that one's tree
                self._enter_tree(SessionUri(uri.namespace, name))
        seen = set(waiting)
        while waiting:
            uri = waiting.pop()
            self._enter_tree(uri)
            found.update(self._versions.get(uri, ()))
            heirs = {heir for each in self._versions.get(uri, ()) for heir in self._heirs.get(each, ())} - seen
            seen |= heirs
            waiting |= heirs
        for each in list(found):
            before = self._before(each)
            while before is not None and before not in found:
                found.add(before)
                before = self._before(before)
        return found

    def _enter(self, link: Link) -> None:
        bundle_id, parent, uri = link
        self._parents[bundle_id] = parent
        self._versions[uri].append(bundle_id)
        if parent is not None:
            self._heirs[parent].add(uri)

    def _without_first(self) -> set[str]:
        """The oldest versions that name a parent that is gone. Others that do came from the one before them."""
        oldest = set()
        for ids in self._versions.values():
            for before, each in pairwise([None, *ids]):
                if each is None or (parent := self._parents[each]) is None or parent in self._parents:
                    continue
                if before is None:
                    oldest.add(each)
                self._parents[each] = before
        return oldest

    def _before(self, bundle_id: str) -> str | None:
        if bundle_id in self._unread:
            self._look_into(self._store.index.rows_of([bundle_id])[bundle_id])
        return self._parents[bundle_id]

    def _look_into(self, row: VersionInfo) -> None:
        """Enter what the oldest version of a session came from; where that is gone, a later one of the same session."""
        self._unread.discard(row.bundle_id)
        with contextlib.suppress(TorporError, ValueError), self._store.open_session(row.uri, row.bundle_id) as reader:
            if (told := _told_origin(reader.manifest.session)) is None:
                return
            origin = told[1]
            there = {
                each.version: each.bundle_id for each in self._store.index.versions(SessionUri.parse(origin.session))
            }
            later = next((each for number, each in there.items() if number > origin.version), None)
            left = None if origin.version in there else later
            before = origin.bundle_id if origin.bundle_id in self._parents else left
            if before is not None:
                self._parents[row.bundle_id] = before
                self._heirs[before].add(row.uri)

    def _enter_tree(self, uri: SessionUri) -> None:
        """Where a session was kept as a tree, its branches come from its first version."""
        if SessionUri(uri.namespace, f"{uri.name}.1") not in self._versions:
            return
        first = self._versions.get(uri, [""])[0]
        with contextlib.suppress(StoreError, ValueError), self._store.open_session(uri, first) as reader:
            for each in branches_in(reader.manifest.session):
                if each.bundle_id in self._parents:
                    self._parents[each.bundle_id] = first
                    self._heirs[first].add(each.uri)
