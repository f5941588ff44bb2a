"""Whether an imported version belongs to the session that would get it, and may become its newest.

Owns these questions and their refusals. Two versions are kin if they come from a common version that the store knows,
or if the tokens of one begin with all tokens of the other.
"""

from __future__ import annotations

import contextlib

from ..errors import BundleMissing, Corruption, NameTaken
from ..format.bundle import BundleFile
from ..format.ledgers import in_common, ledger_tokens
from ..format.manifest import Manifest
from ..format.records import IndexRow
from ..uri import SessionUri
from ..writing.core import StoreCore


def require_kin(core: StoreCore, file: BundleFile, imported: Manifest, uri: SessionUri) -> None:
    """Refuse to put a version among those of another session. It and the newest one there must come from a common
    version, or one must go on from all tokens of the other."""
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


def require_successor(core: StoreCore, file: BundleFile, imported: Manifest, uri: SessionUri) -> None:
    """Refuse to put a version on top of a newest one unless it begins with all tokens of that one: the rest would be
    missing from the next wake, and the next prune would drop it."""
    newest = core.index.find(uri)
    if newest is None or _tokens_in_common(core, file, imported, newest) == newest.ledger_tokens:
        return
    raise NameTaken(
        f"The file does not go on from version {newest.version} of {uri}, or that one cannot be read: as the newest "
        "version it would hide tokens of it. Import the file under a name that is free (`--as NAME`).",
        session=str(uri),
        imported=str(imported.uri),
    )


def require_no_takeover(core: StoreCore, file: BundleFile, imported: Manifest) -> None:
    """As `require_successor`, of a version that keeps its number, if that makes it the newest. Anybody can write a
    number and a parent into a file; one whose id the store knows was a version here before."""
    newest = core.index.find(imported.uri)
    if newest is not None and imported.version > newest.version and not core.index.knows(file.bundle_id):
        require_successor(core, file, imported, imported.uri)


def _newest_unlisted(core: StoreCore, uri: SessionUri) -> IndexRow | None:
    """The newest version of a session whose versions are all set aside, missed or unreadable: they may come back any
    day."""
    stored = map(core.index.stored, reversed(core.index.bundles_of(uri)))
    return next((one.row for one in stored if one is not None and one.row is not None), None)


def _line(core: StoreCore, bundle_id: bytes, parent: bytes | None, names: set[SessionUri]) -> set[bytes]:
    """A bundle and its ancestors, back to the first that the store does not know or that has another session's name:
    forks of that one share only their beginning."""
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
    """Whether one begins with all tokens of the other: the session went on elsewhere, or this is an earlier version and
    its successors are gone."""
    shorter = min(ledger_tokens(imported), newest.ledger_tokens)
    return _tokens_in_common(core, file, imported, newest) == shorter


def _tokens_in_common(core: StoreCore, file: BundleFile, imported: Manifest, newest: IndexRow) -> int | None:
    """How many tokens both begin with; None if the newest version cannot be read."""
    with contextlib.suppress(Corruption, BundleMissing), core.open_reader(newest.bundle_id) as reader:
        return in_common(
            imported,
            lambda entry: file.read_head(entry.id)[0].tokens,
            reader.manifest,
            lambda entry: reader.read_header(entry).tokens,
        ).least
    return None
