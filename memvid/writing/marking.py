"""Tagging and pinning versions: changes of the store's marks, one at a time.

Owns two rules: a mark needs a version with a row and a file at that moment, and a change is on disk before it is
reported. marks.py defines marks.

A mark can also be removed from a missed version. Once its last mark is gone, the version is missed no more.
"""

from __future__ import annotations

import contextlib

from ..errors import PUT_BACK, BundleMissing, MarksLost, NoSpace, SessionNotFound, StoreIoError
from ..folder.marks import Marks
from ..format.layout import LIVE_SUFFIX
from ..format.records import IndexRow
from ..uri import SessionUri
from .core import StoreCore


def tag(core: StoreCore, uri: SessionUri, version: int | None, name: str, *, move: bool) -> IndexRow:
    with core.committing():
        row = _require_version_with_file(core, uri, version)
        marks = _marks_to_change(core, lost_is_none=move)
        marks = marks.tag(uri, row.bundle_id, row.version, name, move=move)
        marks.save(core.folder)
        _end_missing(core, marks)
        return row


def untag(core: StoreCore, uri: SessionUri, name: str) -> None:
    with core.committing():
        marks = Marks.load(core.folder).untag(uri, name)
        marks.save(core.folder)
        _end_missing(core, marks)


def pin(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    with core.committing():
        row = _require_version_with_file(core, uri, version)
        Marks.load(core.folder).pin(uri, row.bundle_id, row.version).save(core.folder)
        return row


def unpin(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    with core.committing():
        row = version_or_missed(core, uri, version) or _require_version(core, uri, version)
        marks = Marks.load(core.folder).unpin(uri, row.bundle_id)
        marks.save(core.folder)
        _end_missing(core, marks)
        return row


def version_or_missed(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow | None:
    """A version of a session, the latest if none is named, or a missed one with this number."""
    missed = (row for row in core.index.missed().values() if (row.uri, row.version) == (uri, version))
    return core.index.find(uri, version) or next(missed, None)


def _end_missing(core: StoreCore, marks: Marks) -> None:
    """Drop missed versions without a mark; if the index takes no change, the next opening does it. The marks are on
    disk by now, so no error here may say that the change was refused."""
    with contextlib.suppress(NoSpace, StoreIoError):
        ended = [bundle_id for bundle_id in core.index.missed() if not marks.of(bundle_id)]
        if ended:
            core.index.drop(ended)


def _marks_to_change(core: StoreCore, *, lost_is_none: bool) -> Marks:
    """The marks; none if they are lost and `move` accepts that: the tag is taken from the version that had it."""
    try:
        return Marks.load(core.folder)
    except MarksLost:
        if not lost_is_none:
            raise
        return Marks(core.folder.uuid)


def _require_version_with_file(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    """Refuse a mark on a version without a file: it keeps nothing. And if the index loses the row too, the mark alone
    names the version but not its needs: then no file can be removed any more."""
    row = _require_version(core, uri, version)
    if core.folder.suffix_of(row.bundle_id) != LIVE_SUFFIX:
        path = core.folder.bundle_path(row.bundle_id)
        raise BundleMissing(
            f"Version {row.version} of {uri} has no file ({path}), so it is not marked. {PUT_BACK}",
            bundle_id=row.bundle_id.hex(),
            path=path,
        )
    return row


def _require_version(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    row = core.index.find(uri, version)
    if row is None:  # it went since the caller looked
        raise SessionNotFound(f"{uri} has no such version any more.", session=str(uri), version=version, suggestions=[])
    return row
