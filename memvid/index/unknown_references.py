"""The bundles whose needs are unknown, and why no file is removed or compacted while there is one.

Owns what is told of each: what it is, and what ends it. Which ones they are the index says (`Index.needs_unknown`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import BundleMissing, StoreError
from ..folder.folder import StoreFolder
from ..format.bundle import BundleFile
from ..format.records import Finding, IndexRow
from .absent import AbsentNotes
from .index import Index

UNREADABLE_CODE: Final = "unreadable_bundle"


def find_unknown_needs(folder: StoreFolder, index: Index) -> list[Finding]:
    """What keeps every file from being removed or compacted; nothing where what every bundle needs is known."""
    return [
        *(unreadable_finding(folder, index, bundle_id) for bundle_id in index.unreadable_now()),
        *find_told(folder, index),
    ]


def find_told(folder: StoreFolder, index: Index) -> list[Finding]:
    """As `find_unknown_needs`, of versions that only a manifest or a mark tells of: missed, or set aside."""
    aside, untold = index.given_up(), sorted(index.aside_untold())
    return [
        *(missed_finding(folder.bundle_path(one), row) for one, row in sorted(index.missed().items())),
        *(untold_finding(folder.bundle_path(one), aside[one]) for one in untold if one in aside),
    ]


def unreadable_finding(folder: StoreFolder, index: Index, bundle_id: bytes, why: str = "") -> Finding:
    """why: the reason, where it is known; else the file is opened again to learn it."""
    path = folder.bundle_path(bundle_id)
    why = (why or _why(folder, bundle_id)).rstrip(".").replace(path, "it", 1)
    stored = index.stored(bundle_id)
    row = stored.row if stored is not None else None
    whose = f"version {row.version} of {row.uri}" if row is not None else "its version is unknown"
    end = f", or give it up: remove its session (`torpor rm {row.uri}`)" if row is not None else ""
    message = (
        f"{path} cannot be read ({whose}): {why}. Its needs are unknown, so no file is removed or compacted. "
        f"Put the file back from a backup, or let `torpor repair` see to it{end}."
    )
    return Finding(path, UNREADABLE_CODE, message)


def _why(folder: StoreFolder, bundle_id: bytes) -> str:
    try:
        BundleFile(*folder.open_bundle(bundle_id), bundle_id).close()
    except StoreError as error:
        return error.message
    return "it could not be read when the store was opened, and can be now; the next opening takes it up"


def untold_finding(path: str, row: IndexRow) -> Finding:
    """What to tell of a version that is set aside, and was never read since its index was made."""
    message = (
        f"{path} is set aside: version {row.version} of {row.uri} could not be read when the index was made anew. "
        "Its needs are unknown, so no file is removed or compacted. `torpor repair` brings it back where all of it is "
        "sound somewhere, quarantine included. Else put the file back from a backup and start the daemon again, or "
        f"import it; or give it up: remove the session (`torpor rm {row.uri}`; `torpor forget` where nothing "
        "else is left of it), or all that is set aside (`torpor gc --quarantine`)."
    )
    return Finding(path, UNREADABLE_CODE, message)


def missed_finding(path: str, row: IndexRow) -> Finding:
    message = (
        f"{path} is missing: version {row.version} of {row.uri}, which has a tag or a pin, cannot be woken, and "
        "only its marks tell of it. Its needs are unknown, so no file is removed or compacted. Put the file back from "
        f"a backup and start the daemon again, or import it; or give it up: take its tags (`torpor untag`) and its pin "
        f"(`torpor unpin {row.uri}@{row.version}`) away, or remove the session (`torpor rm`; `torpor forget` where "
        "nothing else is left of it)."
    )
    return Finding(path, BundleMissing.code, message)


def find_lost_notes(folder: StoreFolder, index: Index) -> list[Finding]:
    """The notes of versions without a file that cannot be read, and of which no row tells either."""
    notes = AbsentNotes(folder.root_fd, folder.path)
    try:
        _, unread = notes.load()
    except StoreError as error:
        return [Finding(notes.path, error.code, error.message)]
    return [lost_note_finding(notes.path_of(one), unread[one]) for one in sorted(lost_among(index, unread))]


def lost_among(index: Index, unread: Mapping[bytes, str]) -> set[bytes]:
    """Those of the versions whose notes cannot be read of which no row tells either."""
    return unread.keys() - index.given_up().keys() - index.rows_of(unread).keys()


def lost_note_finding(path: str, why: str) -> Finding:
    message = (
        "This note told of a version that has no file, and the index does not know it either. Make it readable, or put "
        f"it back from a backup; or remove it, where that version may be forgotten. {why}"
    )
    return Finding(path, UNREADABLE_CODE, message)
