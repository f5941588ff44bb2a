"""Tags and pins: changes of the store's marks, one at a time.

Owns two rules: a mark needs a version with a row and a file at that moment, and a change is on disk before it is
reported. `folder/marks.py` defines marks.

A mark can also be removed from a missed version. Once its last mark is gone, the version is missed no more.
"""

from __future__ import annotations

import contextlib

from ..errors import (
    PUT_BACK,
    BundleMissing,
    CorruptMarks,
    MarksLost,
    NoSpace,
    StoreIoError,
    UnsafePath,
    UnsupportedFormat,
)
from ..folder.marks import Marks, SessionMarks
from ..format.layout import LIVE_SUFFIX
from ..format.records import IndexRow
from ..uri import SessionUri
from .sessions import Sessions


class Tagging(Sessions):
    """An open store, asked for tags and pins."""

    def tag(self, uri: SessionUri, version: int | None, tag: str, *, move: bool = False) -> IndexRow:
        """Let a tag name a version, the latest if none is named. `move` takes the tag from another version.

        Raises:
            BundleMissing: the version has no file.
            SessionNotFound, InvalidTag, TagTaken, LimitExceeded, CorruptMarks, NoSpace, StoreIoError
            ReadOnlyStore, LockLost, DurabilityLost
        """
        self.require_session(uri, version)
        with self._core.committing():
            row = self._require_version_with_file(uri, version)
            marks = self._marks_to_change(lost_is_none=move)
            self._save(marks.tag(uri, row.bundle_id, row.version, tag, move=move))
            return row

    def untag(self, uri: SessionUri, tag: str) -> None:
        """Take a tag away, also from a version that is deleted or missed.

        Raises:
            InvalidTag, MarkNotFound, CorruptMarks, NoSpace, StoreIoError, ReadOnlyStore, LockLost, DurabilityLost
        """
        with self._core.committing():
            self._save(Marks.load(self._core.folder).untag(uri, tag))

    def pin(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Keep a version, the latest if none is named, against any retention. Raises as `tag` does."""
        self.require_session(uri, version)
        with self._core.committing():
            row = self._require_version_with_file(uri, version)
            self._save(Marks.load(self._core.folder).pin(uri, row.bundle_id, row.version))
            return row

    def unpin(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Give a version back to the retention, also a missed one. Raises MarkNotFound, and as `tag` does."""
        self._version_or_missed(uri, version)
        with self._core.committing():
            row = self._version_or_missed(uri, version)
            self._save(Marks.load(self._core.folder).unpin(uri, row.bundle_id))
            return row

    def marks(self, uri: SessionUri) -> SessionMarks:
        """A session's tags and pins. Raises CorruptMarks, UnsupportedFormat, UnsafePath."""
        self._core.require_open()
        return Marks.load(self._core.folder).session(uri)

    def marks_to_show(self, uri: SessionUri) -> SessionMarks:
        """As `marks`; none if they cannot be read: the rest is shown all the same."""
        try:
            return self.marks(uri)
        except (CorruptMarks, MarksLost, UnsafePath, UnsupportedFormat):
            return SessionMarks()

    def _save(self, marks: Marks) -> None:
        """Save the marks, and drop missed versions without one; if the index takes no change, the next opening does it.
        The marks are on disk by then, so no error there may say that the change was refused."""
        marks.save(self._core.folder)
        with contextlib.suppress(NoSpace, StoreIoError):
            ended = [bundle_id for bundle_id in self.index.missed() if not marks.of(bundle_id)]
            if ended:
                self.index.drop(ended)

    def _marks_to_change(self, *, lost_is_none: bool) -> Marks:
        """The marks; none if they are lost and `move` accepts that: the tag is taken from the version that had it."""
        try:
            return Marks.load(self._core.folder)
        except MarksLost:
            if not lost_is_none:
                raise
            return Marks(self._core.folder.uuid)

    def _version_or_missed(self, uri: SessionUri, version: int | None) -> IndexRow:
        """A version of a session, the latest if none is named, or a missed one with this number."""
        missed = (row for row in self.index.missed().values() if (row.uri, row.version) == (uri, version))
        return self.find_session(uri, version) or next(missed, None) or self.require_session(uri, version)

    def _require_version_with_file(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Refuse a mark on a version without a file: it keeps nothing. And if the index loses the row too, the mark
        alone names the version but not its needs: then no file can be removed any more."""
        row = self.require_session(uri, version)
        if self._core.folder.suffix_of(row.bundle_id) != LIVE_SUFFIX:
            path = self._core.folder.bundle_path(row.bundle_id)
            raise BundleMissing(
                f"Version {row.version} of {uri} has no file ({path}), so it is not marked. {PUT_BACK}",
                bundle_id=row.bundle_id.hex(),
                path=path,
            )
        return row
