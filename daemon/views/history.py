"""The history of sessions, as the files tell it: which version came from which, how, and what it added.

The index has the parents of versions, a fork's and a fold's too. Their manifests have the rest, and only those of the
versions to show are read.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...memvid.access.sessions import Named
from ...memvid.answers import Finding, ShownVersion, VersionInfo
from ...memvid.errors import StoreError
from ...memvid.index.lineage import Link, links, newest_rows
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.history import HistoryEntry, HistoryResult, Way
from ..api.session import Origin
from .stored import origin_of, provenance_in
from .trees import BRANCH, branches_in, fork_head_in

_MOST_PROBLEMS: Final = 1000


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
    page = _Page(store, rows, namespace)
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


class _Page:
    """Makes entries of rows. problems: manifests of these that cannot be read."""

    def __init__(self, store: Store, rows: Sequence[VersionInfo], namespace: str | None) -> None:
        self.problems: list[Finding] = []
        self._store = store
        self._rows = rows
        self._namespace = namespace
        self._parents = store.index.rows_of({row.parent for row in rows if row.parent is not None})
        self._trees: dict[str, Origin] = {}  # of a branch of a tree: what it was forked from
        self._sizes: dict[str, int] = {}

    def entries(self) -> list[HistoryEntry]:
        """In the order of the rows: a tree's root is younger than its branches, so it comes before them."""
        return [self._hidden(self._entry(row)) for row in self._rows]

    def _entry(self, row: VersionInfo) -> HistoryEntry:
        kept = self._session_map(row)
        self._note_tree(row, kept or {})
        parent = self._parents.get(row.parent or "")
        origin = self._origin(row, kept or {})
        way = origin[0] if origin else _way(row, parent, has_manifest=kept is not None)
        marks = self._store.marks_to_show(row.uri).of(row.bundle_id)
        shown = ShownVersion(**vars(row), tags=marks.tags, pinned=marks.pinned, stripped=marks.stripped)
        return HistoryEntry(
            **vars(shown),
            way=way,
            origin=origin[1] if origin else None,
            parent_version=parent.version if parent is not None and parent.session == row.session else None,
            added_tokens=_added(row, way, origin[1] if origin else None, parent),
            branches=self._sizes.get(row.bundle_id, 0),
        )

    def _session_map(self, row: VersionInfo) -> Mapping[str, Any] | None:
        try:
            with self._store.open_session(row.uri, row.bundle_id) as reader:
                return reader.manifest.session
        except StoreError as error:
            path = str(error.details.get("path", ""))
            self.problems.append(Finding(path, error.code, error.message, row.session, row.version))
            return None

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
        with contextlib.suppress(ValueError):
            told = provenance_in(kept)
            ways: tuple[tuple[Way, Origin | None], ...] = (("forked", told.forked_from), ("folded", told.folded_from))
            for way, origin in ways:
                if origin is not None and row.parent in (None, origin.bundle_id):  # else it is an earlier version's
                    return way, origin
        return None

    def _hidden(self, entry: HistoryEntry) -> HistoryEntry:
        """Without what it says of another namespace."""
        if self._namespace is None:
            return entry
        origin, parent = entry.origin, self._parents.get(entry.parent or "")
        is_own = parent is not None and parent.uri.namespace == self._namespace
        knows = origin is None or SessionUri.parse(origin.session).namespace == self._namespace
        return replace(entry, parent=entry.parent if is_own else None, origin=origin if knows else None)


def _way(row: VersionInfo, parent: VersionInfo | None, *, has_manifest: bool) -> Way:
    """How a version came about that is no fork, fold or branch by its manifest."""
    if not has_manifest and (parent is None or parent.session != row.session):
        return "unknown"
    if row.parent is None:
        return "began"
    if parent is None:
        return "imported" if row.version == 1 else "cut_off"
    if parent.session != row.session:
        return "imported"
    if row.lossy is not None and parent.lossy != row.lossy and parent.token_count == row.token_count:
        return "quantized"
    return "went_on" if parent.version == row.version - 1 else "went_back"


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
            before = self._parents.get(each)
            while before is not None and before in self._parents and before not in found:
                found.add(before)
                before = self._parents[before]
        return found

    def _enter(self, link: Link) -> None:
        bundle_id, parent, uri = link
        self._parents[bundle_id] = parent
        self._versions[uri].append(bundle_id)
        if parent is not None:
            self._heirs[parent].add(uri)

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
