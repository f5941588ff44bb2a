"""What the index tells beside its rows: which version came from which, the newest of all, and packs by the first digits
of a block's id."""

from __future__ import annotations

import struct
from typing import Final

from ..answers import VersionInfo
from ..uri import SessionUri
from .index import Index

Link = tuple[str, str | None, SessionUri]
"""A version: its bundle id, that of its parent, and its session."""

_KEY: Final = struct.Struct(">q")
_BY_AGE: Final = "version, created_ns, bundle_id"


def newest_rows(index: Index, limit: int, namespace: str | None, since_ns: int) -> tuple[list[VersionInfo], int]:
    """The newest versions of a namespace, or of all, that are no older than an instant, and how many more there are."""
    where, values = "WHERE created_ns >= ?", tuple[str | int, ...]((since_ns,))
    if namespace is not None:
        where, values = f"{where} AND namespace = ?", (*values, namespace)
    ((total,),) = index.select(f"SELECT count(*) FROM versions {where}", values)  # noqa: S608 - of constants
    rows = index.rows(f"{where} ORDER BY created_ns DESC, version DESC, bundle_id DESC LIMIT ?", (*values, limit))
    return rows, int(total) - len(rows)


def links(index: Index) -> list[Link]:
    """All versions, by session, oldest first."""
    uris: dict[tuple[str, str], SessionUri] = {}
    found: list[Link] = []
    for bundle_id, parent, *of in index.select(
        f"SELECT bundle_id, parent, namespace, name FROM versions ORDER BY namespace, name, {_BY_AGE}",  # noqa: S608
        (),
    ):
        uri = uris.get((of[0], of[1])) or uris.setdefault((of[0], of[1]), SessionUri(of[0], of[1]))
        found.append((bundle_id.hex(), None if parent is None else parent.hex(), uri))
    return found


def version_before(index: Index, row: VersionInfo) -> VersionInfo | None:
    """The next older version of its session that is there."""
    where = f"WHERE namespace = ? AND name = ? AND ({_BY_AGE}) < (?, ?, ?)"
    newest_first = "ORDER BY version DESC, created_ns DESC, bundle_id DESC LIMIT 1"
    own = (row.uri.namespace, row.uri.name, row.version, row.created_ns, bytes.fromhex(row.bundle_id))
    return next(iter(index.rows(f"{where} {newest_first}", own)), None)


def uris_with_earlier_ledgers(index: Index) -> list[SessionUri]:
    """The sessions of which a version before the newest ends in a ledger."""
    rows = index.select(
        "SELECT DISTINCT namespace, name FROM versions AS earlier WHERE unread_tokens > 0 AND EXISTS ("
        "SELECT 1 FROM versions AS later WHERE later.namespace = earlier.namespace AND later.name = earlier.name "
        "AND (later.version, later.created_ns, later.bundle_id) > "
        "(earlier.version, earlier.created_ns, earlier.bundle_id)) ORDER BY namespace, name",
        (),
    )
    return [SessionUri(namespace, name) for namespace, name in rows]


def packs_with_beginning(index: Index, digits: str) -> list[str]:
    """The packs that may have a block whose id begins with these hex digits."""
    ends = (_KEY.unpack(bytes.fromhex(digits[: 2 * _KEY.size].ljust(2 * _KEY.size, fill)))[0] for fill in "0f")
    rows = index.select(
        "SELECT DISTINCT name FROM blocks JOIN packs ON pack = number WHERE block BETWEEN ? AND ?", tuple(ends)
    )
    return [str(name) for (name,) in rows]
