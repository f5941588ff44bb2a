"""Tags and pins."""

from __future__ import annotations

from ..errors import CorruptMarks, MarksLost, UnsafePath, UnsupportedFormat
from ..folder.marks import Marks, SessionMarks
from ..format.records import IndexRow
from ..uri import SessionUri
from ..writing import marking
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
        self._require_session(uri, version)
        return marking.tag(self._core, uri, version, tag, move=move)

    def untag(self, uri: SessionUri, tag: str) -> None:
        """Take a tag away, also from a version that is deleted or missed.

        Raises:
            InvalidTag, MarkNotFound, CorruptMarks, NoSpace, StoreIoError, ReadOnlyStore, LockLost, DurabilityLost
        """
        marking.untag(self._core, uri, tag)

    def pin(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Keep a version, the latest if none is named, against any retention. Raises as `tag` does."""
        self._require_session(uri, version)
        return marking.pin(self._core, uri, version)

    def unpin(self, uri: SessionUri, version: int | None) -> IndexRow:
        """Give a version back to the retention, also a missed one. Raises MarkNotFound, and as `tag` does."""
        self._core.require_open()
        if marking.version_or_missed(self._core, uri, version) is None:
            raise self._not_found(uri, version)
        return marking.unpin(self._core, uri, version)

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
