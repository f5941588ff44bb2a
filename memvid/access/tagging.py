"""Tags, pins and strips: changes of the store's marks, one at a time.

Owns two rules: a mark needs a version whose manifest is there at that moment, and a change is on disk before it is
reported. `folder/marks.py` defines marks.
"""

from __future__ import annotations

from ..answers import ShownVersion, VersionInfo
from ..errors import PUT_BACK, BundleMissing, MarksLost, SessionNotFound
from ..folder.marks import Marks, SessionMarks, VersionMarks, marks_in
from ..format.records import VersionKey
from ..uri import SessionUri, parse_version_reference
from .sessions import Sessions


class Tagging(Sessions):
    """An open store, asked for tags and pins."""

    def tag(self, uri: SessionUri, version: VersionKey | None, tag: str, *, move: bool = False) -> VersionInfo:
        """Let a tag name a version, the latest if none is named. `move` takes the tag from another version.

        Raises:
            BundleMissing: the version has no manifest.
            SessionNotFound, InvalidTag, TagTaken, LimitExceeded, CorruptMarks, MarksLost, NoSpace, StoreIoError
            ReadOnlyStore, LockLost, DurabilityLost
        """
        with self._core.committing():
            row = self._require_manifest(uri, version)
            marks = self._marks_to_change(lost_is_none=move)
            marks.tag(uri, row.bundle_id, tag, move=move).save(self._core.folder)
            return row

    def untag(self, uri: SessionUri, tag: str) -> None:
        """Take a tag away, also from a version that is not there any more.

        Raises:
            InvalidTag, MarkNotFound, CorruptMarks, MarksLost, NoSpace, StoreIoError, ReadOnlyStore, LockLost,
            DurabilityLost
        """
        with self._core.committing():
            Marks.load(self._core.folder).untag(uri, tag).save(self._core.folder)

    def pin(self, uri: SessionUri, version: VersionKey | None) -> VersionInfo:
        """Keep a version, the latest if none is named, against any retention. Raises as `tag` does."""
        with self._core.committing():
            row = self._require_manifest(uri, version)
            Marks.load(self._core.folder).pin(uri, row.bundle_id).save(self._core.folder)
            return row

    def resolve_pinned(self, text: str) -> tuple[SessionUri, str]:
        """The session and bundle that `text` means, as `resolve_version` does; also a pinned version that is missing,
        by digits of its id. Raises as `resolve_version`, CorruptMarks, MarksLost."""
        try:
            row = self.resolve_version(text)
            return row.uri, row.bundle_id
        except SessionNotFound:
            reference = parse_version_reference(text)
            selector = reference.selector
            if selector is None or selector.id_prefix is None or reference.back or reference.id_alone:
                raise
            uri, digits = self.resolve(reference.session), selector.id_prefix
            pins = [each for each in self.marks(uri).pins if each.startswith(digits)]
            if len(pins) != 1:
                raise
            return uri, pins[0]

    def unpin(self, uri: SessionUri, bundle_id: str) -> None:
        """Give a version back to the retention, also one that is not there any more. Raises as `untag` does."""
        with self._core.committing():
            Marks.load(self._core.folder).unpin(uri, bundle_id).save(self._core.folder)

    def marks(self, uri: SessionUri) -> SessionMarks:
        """A session's tags, pins and strips. Raises CorruptMarks, MarksLost, UnsupportedFormat, UnsafePath."""
        self._core.require_open()
        return Marks.load(self._core.folder).session(uri)

    def marks_to_show(self, uri: SessionUri) -> SessionMarks:
        """As `marks`; none if they cannot be read: the rest is shown all the same."""
        self._core.require_open()
        return (marks_in(self._core.folder) or Marks(self._core.folder.uuid)).session(uri)

    def versions_to_show(self, uri: SessionUri) -> tuple[ShownVersion, ...]:
        """All versions of a session, oldest first, with their marks as `marks_to_show` has them."""
        marks = self.marks_to_show(uri)
        return tuple(_shown(row, marks.of(row.bundle_id)) for row in self.versions(uri))

    def _marks_to_change(self, *, lost_is_none: bool) -> Marks:
        """The marks; none if they are lost and `move` accepts that: the tag is taken from the version that had it."""
        try:
            return Marks.load(self._core.folder)
        except MarksLost:
            if not lost_is_none:
                raise
            return Marks(self._core.folder.uuid)

    def _require_manifest(self, uri: SessionUri, version: VersionKey | None) -> VersionInfo:
        """Refuse a mark on a version without a manifest: it keeps nothing."""
        row = self.require_session(uri, version)
        if not self._core.folder.has_manifest(row.bundle_id):
            path = self._core.folder.manifest_path(row.bundle_id)
            raise BundleMissing(
                f"Version {row.version} of {uri} has no manifest ({path}), so it is not marked. {PUT_BACK}",
                bundle_id=row.bundle_id,
                path=path,
            )
        return row


def _shown(row: VersionInfo, marks: VersionMarks) -> ShownVersion:
    return ShownVersion(**vars(row), tags=marks.tags, pinned=marks.pinned, stripped=marks.stripped)
