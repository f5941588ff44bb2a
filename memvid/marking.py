"""Tagging and pinning versions: changes of the store's marks, one at a time.

Owns the rule that a mark is given to a version that stands in the index at that moment, and that a change is on disk
before anyone is told. What marks are is in marks.py.
"""

from __future__ import annotations

from .core import StoreCore
from .errors import MarksLost, SessionNotFound
from .marks import Marks
from .records import IndexRow
from .uri import SessionUri


def tag(core: StoreCore, uri: SessionUri, version: int | None, name: str, *, move: bool) -> IndexRow:
    with core.committing():
        row = _require_version(core, uri, version)
        marks = _marks_to_change(core, lost_is_none=move)
        marks.tag(uri, row.bundle_id, row.version, name, move=move).save(core.folder)
        return row


def untag(core: StoreCore, uri: SessionUri, name: str) -> None:
    with core.committing():
        Marks.load(core.folder).untag(uri, name).save(core.folder)


def pin(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    with core.committing():
        row = _require_version(core, uri, version)
        Marks.load(core.folder).pin(uri, row.bundle_id, row.version).save(core.folder)
        return row


def unpin(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    with core.committing():
        row = _require_version(core, uri, version)
        Marks.load(core.folder).unpin(uri, row.bundle_id).save(core.folder)
        return row


def _marks_to_change(core: StoreCore, *, lost_is_none: bool) -> Marks:
    """The marks; none where they are lost and that is said to be all right: the tag is taken from whoever had it."""
    try:
        return Marks.load(core.folder)
    except MarksLost:
        if not lost_is_none:
            raise
        return Marks(core.folder.uuid)


def _require_version(core: StoreCore, uri: SessionUri, version: int | None) -> IndexRow:
    row = core.index.find(uri, version)
    if row is None:  # the caller has looked before: it went in between
        raise SessionNotFound(f"{uri} has no such version any more.", session=str(uri), version=version, suggestions=[])
    return row
