"""Whether a version that is to be imported belongs to the session that would get it.

Owns that question and its refusal: the versions that both were made from, as far as the store knows them, and where
those do not meet, the tokens. What an import is, `transfer` says.
"""

from __future__ import annotations

import contextlib

from ..checking.set_aside_versions import spans_of, tokens_in_common
from ..errors import BundleMissing, Corruption, NameTaken
from ..format.bundle import BundleFile
from ..format.manifest import Manifest
from ..format.records import IndexRow
from ..uri import SessionUri
from ..writing.core import StoreCore


def require_kin(core: StoreCore, file: BundleFile, imported: Manifest, uri: SessionUri) -> None:
    """Refuse to put a version among those of another session: it and the newest one there have to come from the same
    version, or one of them has to go on from all that the other has read."""
    newest = core.index.find(uri) or _newest_unlisted(core, uri)
    if newest is None:
        return
    names = {uri, imported.uri}
    line = _line(core, file.bundle_id, imported.parent, names)
    if not line.isdisjoint(_line(core, newest.bundle_id, newest.parent, names)):
        return
    if not _goes_on(core, file, imported, newest):
        raise NameTaken(
            f"{uri} is another session here: its history is not that of the file. Import the file under a name that "
            f"is free (`--as NAME`), or remove that session first (`torpor rm {uri}`).",
            session=str(uri),
            imported=str(imported.uri),
        )


def _newest_unlisted(core: StoreCore, uri: SessionUri) -> IndexRow | None:
    """The newest version of a session that has none but such as are set aside, missed or unreadable: they may be back
    any day."""
    stored = map(core.index.stored, reversed(core.index.bundles_of(uri)))
    return next((one.row for one in stored if one is not None and one.row is not None), None)


def _line(core: StoreCore, bundle_id: bytes, parent: bytes | None, names: set[SessionUri]) -> set[bytes]:
    """A bundle and what it was made from, back to the first that the store does not know, or that is of a session of
    another name: whose forks have no more in common than what they began with."""
    line = {bundle_id}
    while parent is not None and parent not in line:
        stored = core.index.stored(parent)
        row = stored.row if stored is not None else None
        if row is not None and row.uri not in names:
            break
        line.add(parent)
        parent = row.parent if row is not None else None
    return line


def _goes_on(core: StoreCore, file: BundleFile, imported: Manifest, newest: IndexRow) -> bool:
    """Whether one of both begins with all tokens of the other: a session that went on elsewhere, or an earlier version
    whose successors are gone. A newest version that cannot be read tells nothing."""
    with contextlib.suppress(Corruption, BundleMissing), core.open_reader(newest.bundle_id) as reader:
        mine, theirs = spans_of(imported), spans_of(reader.manifest)
        same = tokens_in_common(mine, theirs)
        mine, theirs = ([span for span in spans if span.end > same] for spans in (mine, theirs))
        if not mine or not theirs:
            return True
        if len(mine) > 1 < len(theirs):
            return False
        one, other = file.read_head(mine[0].id)[0].tokens, reader.read_header(theirs[0]).tokens
        return (len(mine) == 1 and other.startswith(one)) or (len(theirs) == 1 and one.startswith(other))
    return False
