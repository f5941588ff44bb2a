"""Sessions and their versions: found by name, listed, opened."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..answers import Finding, VersionInfo
from ..checking.promised import require_same_as_row
from ..disk.clock import now_ns
from ..disk.paths import Closing, undoing
from ..errors import BundleMissing, InvalidUri, SessionNotFound, StoreError
from ..folder.marks import Marks, findings_of_missing
from ..folder.versions import (
    ambiguous,
    ambiguous_id,
    describe_versions,
    other_session,
    select_version,
    step_back,
    way_to_any_moment,
)
from ..format.blocks import BlockEntry
from ..format.manifest import Manifest
from ..format.records import OpenReport, VersionKey
from ..index.queries import version_before
from ..uri import PLACE_MARK, Reference, SessionUri, not_found, parse_reference, parse_version_reference
from ..writing.core import StoreCore

if TYPE_CHECKING:
    from ..writing.reader import BundleReader

_MISSING_TOLD: Final = 8


@dataclass(frozen=True, slots=True)
class Named:
    """What a text names in a store. row: of the version; None for the session as it stands. token: a place in it, the
    number of its first tokens that are meant; None for its end."""

    text: str
    uri: SessionUri
    row: VersionInfo | None
    token: int | None

    def place(self, at_token: int | None) -> int | None:
        """The place that is meant: the one named, or a request's own `at_token`. Raises InvalidUri: there are both."""
        if self.token is not None and at_token is not None:
            raise InvalidUri(
                f"{self.text} names a place, and so does at_token, {at_token}; name one.",
                field="session",
                value=self.text,
            )
        return at_token if self.token is None else self.token

    def require_whole(self) -> Named:
        """Refuse a place, for what takes a version whole. Raises InvalidUri."""
        if self.token is not None:
            whole = self.text.rpartition(PLACE_MARK)[0]
            raise InvalidUri(
                f"{self.text} names the place at token {self.token}, and only a whole version can be taken here: "
                f"{whole}. `torpor fork {self.text} NAME` makes a session that ends at the place.",
                field="session",
                value=self.text,
            )
        return self

    def place_in(self, token_count: int) -> int | None:
        """The place, in a ledger of so many tokens. Raises InvalidUri: it has fewer."""
        if self.token is not None and self.token > token_count:
            raise InvalidUri(
                f"{self.text} names the place at token {self.token}, and there are {token_count} tokens; give a place "
                f"from 1 to {token_count}, or none for the end.",
                field="session",
                value=self.text,
            )
        return self.token


class Sessions(Closing):
    """An open store, asked for sessions."""

    def __init__(self, core: StoreCore, opening: OpenReport) -> None:
        self.path = core.path
        self.uuid = core.folder.uuid
        self.index = core.index
        self.opening = opening
        self._core = core

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._core.has_lock

    def open_session(self, uri: SessionUri, version: VersionKey | None = None) -> BundleReader:
        """Open a version of a session, the latest if none is named, once its manifest is proven to be the one promised.

        Raises:
            SessionNotFound, BundleMissing, Truncated, TrailingData, CorruptBundle, BundleMismatch, OwnerMismatch,
            VersionMismatch, ParentMismatch, IndexMismatch, UnsupportedFormat, UnsafePath
            JournalWaits: the latest version lacks turns that were acknowledged.
        """
        self._core.require_open()
        if version is None:
            self._core.journal.require_settled(uri)
        row = self.find_session(uri, version)
        if row is None:
            raise self._not_found(uri, version)
        try:
            reader = self.open_bundle(row.bundle_id)
        except BundleMissing:
            if not self._core.still_known([row.bundle_id]):
                raise self._not_found(uri, version, but=row) from None
            raise
        with undoing(reader.close):
            require_same_as_row(row, uri, reader.manifest, reader.path)
        return reader

    def note_use(self, bundle_id: str) -> None:
        """A version is used now, and no new one tells of it."""
        self._core.index.note_use(bundle_id, now_ns())

    def open_bundle(self, bundle_id: str) -> BundleReader:
        """Open a version by its bundle id, of any owner: for inspection. The bundle id is still recomputed. Raises
        BundleMissing."""
        return self._core.open_reader(bundle_id)

    def resolve(self, text: str, also: Collection[SessionUri] = ()) -> SessionUri:
        """The session of the store, or of `also`, that `text` means: a URI, NAMESPACE/NAME, or a bare NAME of the
        default namespace. One that has only turns in the journal counts.

        Raises:
            InvalidUri
            SessionNotFound: with suggestions from its namespace.
        """
        wanted = parse_reference(text)
        if wanted in also or self.can_be_deleted(wanted):
            return wanted
        error = self._unknown(wanted, {*also, *self.index.near(wanted)})
        if self.find_session(wanted) is not None:  # its manifest was put back
            return wanted
        raise error

    def find_session(self, uri: SessionUri, version: VersionKey | None = None) -> VersionInfo | None:
        """The row of a version, the latest if none is named, also of one that was put back a moment ago."""
        self._core.look_if_changed()
        return self.index.find(uri, version)

    def can_be_deleted(self, uri: SessionUri) -> bool:
        """Whether there is anything of a session: a version, turns, or a tag or a pin of a version that is missing."""
        return self.find_session(uri) is not None or self._core.journal.has(uri) or bool(self._missing(uri))

    def _missing(self, uri: SessionUri) -> list[Finding]:
        """The versions of a session that only a tag or a pin tells of."""
        return findings_of_missing(self._core.folder, self.index.knows, uri)

    def versions(self, uri: SessionUri) -> list[VersionInfo]:
        """All versions of a session, oldest first, with what was put back a moment ago."""
        self._core.look_if_changed()
        return self.index.versions(uri)

    def iter_sessions(self) -> Iterator[VersionInfo]:
        """The latest version of each session, by URI."""
        for page in self.index.iter_listed(None, 100):
            yield from (row for row, _ in page)

    def earlier(self, row: VersionInfo) -> VersionInfo | None:
        """The version that one goes on from: its parent. Where that is gone, as a daemon's stand-in goes by itself, the
        one before it that is left, if it begins with that one's blocks."""
        if row.parent is None:
            return None
        parent = self.index.rows_of([row.parent]).get(row.parent)
        return parent or self._left_before(row)

    def _left_before(self, row: VersionInfo) -> VersionInfo | None:
        before = version_before(self.index, row)
        if before is None or before.token_count > row.token_count:
            return None
        with (
            contextlib.suppress(StoreError),
            self.open_session(row.uri, row.bundle_id) as later,
            self.open_session(before.uri, before.bundle_id) as reader,
        ):
            whole = _spans(reader.manifest)[:-1]  # the last one may have grown since
            return before if _spans(later.manifest)[: len(whole)] == whole else None
        return None

    def count_packs(self, entries: Iterable[BlockEntry]) -> int:
        """How many packs a wake of these blocks may open, by the index."""
        self._core.require_open()
        return len(self.index.packs_with([entry.id for entry in entries]))

    def unreadable(self) -> list[Finding]:
        """The manifests that cannot be read and that the index does not know. Nothing tells whose they are, so each may
        be the newest version of a session. They are tried again. One that was put back is a version of its session from
        now on."""
        self._core.require_open()
        return self._core.read_again()

    def resolve_version(self, text: str, *, look: bool = False) -> VersionInfo:
        """The one version that `text` means: a session as `resolve` reads it, with what `parse_version_reference` takes
        behind it, or the digits of a bundle id; without a version the latest. A place is refused. look: as of `named`.

        Raises:
            InvalidUri, AmbiguousVersion, SessionNotFound
            CorruptMarks, MarksLost: only for a tag.
        """
        named = self.named(text, look=look).require_whole()
        return named.row or self.require_session(named.uri, None)

    def named(self, text: str, also: Collection[SessionUri] = (), *, look: bool = False) -> Named:
        """What `text` names; it may have a place. also: as of `resolve`. look: nothing that is there is changed by it,
        so steps back may lead into the session that the named one was forked from. Raises as `resolve_version`."""
        reference = parse_version_reference(text)
        uri, row = self._session_of(reference, also)
        if row is None and (reference.selector is not None or reference.back):
            row = self._version_of(uri, reference)
        if row is not None and reference.back:
            row = step_back(row, reference.back, self.earlier)
            if row.uri != uri and not look:
                raise other_session(text, row)
        return Named(text, uri if row is None else row.uri, row, reference.token)

    def session_of(self, text: str, also: Collection[SessionUri] = ()) -> SessionUri:
        """The session that `text` names, or whose version it names, without a look at versions. Raises as `named`."""
        return self._session_of(parse_version_reference(text), also)[0]

    def _session_of(self, reference: Reference, also: Collection[SessionUri]) -> tuple[SessionUri, VersionInfo | None]:
        """The session of a reference, and the version that the digits of an id name alone."""
        digits, namespace = reference.id_alone, reference.namespace
        if digits is None:
            return self.resolve(reference.session, also), None
        try:
            if reference.selector is None:
                return self.resolve(reference.session, also), None
        except SessionNotFound:
            pass
        self._core.look_if_changed()
        found = self.index.rows_of(self.index.bundle_ids(digits))
        rows = [found[each] for each in sorted(found) if namespace in (None, found[each].uri.namespace)]
        if len(rows) > 1:
            raise ambiguous_id(digits, rows)
        if not rows:
            where = "" if namespace is None else f" of {namespace}"
            raise SessionNotFound(
                f"There is no session and no version{where} whose bundle id begins with {digits}. List what there is "
                "with `torpor ls`; `torpor show NAME` has the ids.",
                session=digits,
                suggestions=[],
            )
        return rows[0].uri, rows[0]

    def _version_of(self, uri: SessionUri, reference: Reference) -> VersionInfo:
        """The version that a reference starts from, of a session that it names."""
        selector = reference.selector
        if selector is None:
            return self.require_session(uri, None)
        folder = self._core.folder
        marks = Marks.load(folder) if selector.tag is not None else Marks(folder.uuid)
        return select_version(uri, self.index.versions(uri), marks, selector)

    def require_numbered(self, row: VersionInfo) -> VersionInfo:
        """Refuse a version that its number does not mean, for who goes on by the number. Raises AmbiguousVersion."""
        rivals = [each for each in self.index.versions(row.uri) if each.version == row.version]
        if rivals[-1:] not in ([], [row]):  # the number means the youngest
            raise ambiguous(row.uri, str(row.version), rivals)
        return row

    def require_session(self, uri: SessionUri, version: VersionKey | None = None) -> VersionInfo:
        """The row of a version, of the newest if none is named.

        Raises:
            SessionNotFound
            JournalWaits: all that there is of the session are turns that could not be made a version.
        """
        row = self.find_session(uri, version)
        if row is None:
            raise self._not_found(uri, version)
        return row

    def _not_found(
        self, uri: SessionUri, version: VersionKey | None, but: VersionInfo | None = None
    ) -> SessionNotFound:
        """The error for a session or version that is not there; `but`: its last row, from an index that is too old.
        Raises JournalWaits."""
        rows = [row for row in self.index.versions(uri) if not but]
        versions = [row.version for row in rows]
        if not versions and self._core.journal.has(uri):
            self._core.journal.require_settled(uri)
            return SessionNotFound(
                f"{uri} has turns in the journal alone, and no version yet. `torpor save {uri}` makes one; where no "
                "daemon runs, `torpor ensure` does.",
                session=str(uri),
                suggestions=[],
            )
        if not versions and (missing := self._missing(uri)):
            message = " ".join(finding.message for finding in missing[:_MISSING_TOLD])
            path = missing[0].path
            return SessionNotFound(message, path=path, session=str(uri), version=version, suggestions=[])
        if not versions:
            return self._unknown(uri, (near for near in self.index.near(uri) if near != uri))
        way = way_to_any_moment(uri, rows, below=version) if isinstance(version, int) else ""
        return SessionNotFound(
            f"{uri} has no version {version}; it has {describe_versions(versions)}.{way}",
            session=str(uri),
            version=version,
            suggestions=[str(uri)],
        )

    def _unknown(self, uri: SessionUri, known: Iterable[SessionUri]) -> SessionNotFound:
        """The error for a session of which nothing tells. One of the manifests that cannot be read may be its."""
        error, unreadable = not_found(uri, known), self.unreadable()
        if not unreadable:
            return error
        more = f" {len(unreadable) - 1} more cannot be read: `torpor ls` names all." if len(unreadable) > 1 else ""
        return SessionNotFound(
            f"{error.message} A manifest cannot be read, and may be its: {unreadable[0].message}{more}",
            path=unreadable[0].path,
            **error.details,
        )


def _spans(manifest: Manifest) -> list[bytes]:
    return [entry.id for entry in manifest.blocks if entry.kind == "span"]
