"""The tables of the index, and the tests for a missing, foreign or damaged index."""
# ruff: noqa: S608 - every statement is put together from constants of this module

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
from typing import Any, Final

from ..limits import MAX_INDEX_BYTES, MAX_NAME_CHARS
from .index_seals import FILE_KEY, BrokenSeal, require_sealed
from .page_sums import PAGE_BYTES, PageSums
from .rows import ASIDE, LIVE, MISSED, SEALED, SHADOWED, UNREADABLE

SCHEMA_VERSION: Final = 8
_STATUSES: Final = ", ".join(f"'{status}'" for status in (LIVE, UNREADABLE, SHADOWED, MISSED, ASIDE))
APPLICATION_ID: Final = 0x54505249  # "TPRI"
META: Final = "SELECT value FROM meta WHERE key = ?"
COUNT_NAME: Final = re.compile(r"rewrites\.([0-9]{1,15})", re.ASCII)
SCHEMA: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE bundles (
    number INTEGER PRIMARY KEY, status TEXT NOT NULL, unsettled INTEGER NOT NULL, namespace TEXT, name TEXT,
    version INTEGER, bundle_id BLOB NOT NULL UNIQUE, parent BLOB, identity_digest BLOB, token_count INTEGER,
    bundle_bytes INTEGER, logical_bytes INTEGER, created_ns INTEGER, model TEXT, labels TEXT,
    salvaged_tokens INTEGER, salvaged_of INTEGER, unread_tokens INTEGER, lossy_bits INTEGER, lossy_tokens INTEGER,
    stamp BLOB, storage BLOB NOT NULL,
    seal BLOB NOT NULL
);
CREATE UNIQUE INDEX one_live_version ON bundles (namespace, name, version) WHERE status = '{LIVE}';
CREATE INDEX by_name ON bundles (name, status);
CREATE INDEX by_status ON bundles (status) WHERE status <> '{LIVE}';
CREATE INDEX by_unsettled ON bundles (bundle_id) WHERE unsettled <> 0;
CREATE TABLE refs (number INTEGER NOT NULL, refers_to BLOB NOT NULL, PRIMARY KEY (number, refers_to)) WITHOUT ROWID;
CREATE INDEX referrers ON refs (refers_to);
CREATE TABLE blocks (block INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (block, number)) WITHOUT ROWID;
CREATE INDEX blocks_of ON blocks (number);
CREATE TABLE written (day INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL);
"""
_INTEGERS: Final = ("version", "token_count", "bundle_bytes", "logical_bytes", "created_ns", "unread_tokens")
_INTEGERS_OR_NOTHING: Final = ("salvaged_tokens", "salvaged_of", "lossy_bits", "lossy_tokens")
_NO_ID: Final = "typeof({0}) <> 'blob' OR length({0}) <> 32"
_NO_NAME: Final = (
    f"typeof({{0}}) <> 'text' OR length({{0}}) NOT BETWEEN 1 AND {MAX_NAME_CHARS} "
    "OR {0} GLOB '*[^A-Za-z0-9._-]*' OR {0} GLOB '[._-]*'"
)
_NONSENSE: Final = (
    f"SELECT 1 FROM bundles WHERE {_NO_ID.format('bundle_id')} "
    f"OR status NOT IN ({_STATUSES}) OR (status <> '{UNREADABLE}' OR namespace IS NOT NULL) AND ("
    + " OR ".join(
        [
            *(f"typeof({column}) <> 'integer'" for column in _INTEGERS),
            *(f"typeof({column}) NOT IN ('integer', 'null')" for column in _INTEGERS_OR_NOTHING),
            *(_NO_NAME.format(column) for column in ("namespace", "name")),
            f"parent IS NOT NULL AND ({_NO_ID.format('parent')})",
            _NO_ID.format("identity_digest"),
            "typeof(model) <> 'text'",
            "typeof(labels) <> 'text' OR labels <> '[]' AND labels NOT GLOB '[[]\"*\"]'",
        ]
    )
    + ") LIMIT 1",
    f"SELECT 1 FROM refs WHERE {_NO_ID.format('refers_to')} LIMIT 1",
    f"SELECT 1 FROM bundles WHERE typeof(stamp) <> 'null' AND ({_NO_ID.format('stamp')}) LIMIT 1",
)
"""What no index of ours holds; what `row_in` and `id_of` refuse when they meet it, asked of all rows at once."""

COVERED: Final = 1
UNPROVEN: Final = 2
"""The value of an unsettled row: its references cover the needs of the file, or these are unknown."""
UNSEEN_KEY: Final = "marks_unseen"
UNSEEN: Final = "yes"


class IndexUnusable(Exception):
    """The index cannot be believed; the message says why. Never leaves memvid: the store builds a new one."""


class IndexContradicted(IndexUnusable):
    """What a whole index says cannot be brought into agreement with the bundles."""


def count_of(connection: sqlite3.Connection) -> int:
    """How many rewrites an index has seen begin."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'rewrites'").fetchone()
    if found is None or not COUNT_NAME.fullmatch(f"rewrites.{found[0]}"):
        raise IndexUnusable("it does not say how many rewrites it has seen")
    return int(found[0])


def require_ours(
    connection: sqlite3.Connection, store_uuid: str, sums: PageSums | None, *, has_log: bool
) -> PageSums | None:
    """Refuse an index that is not ours, or not what was written.

    `sums` are those of its file, if they are right; given back if they are enough to believe it with its log.
    """
    if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
        raise IndexUnusable("it is not an index of Torpor")
    if connection.execute("PRAGMA user_version").fetchone() != (SCHEMA_VERSION,):
        raise IndexUnusable("it has another schema version")
    if connection.execute("PRAGMA page_size").fetchone() != (PAGE_BYTES,):
        raise IndexUnusable("it has pages of another size")
    if connection.execute("PRAGMA page_count").fetchone() > (MAX_INDEX_BYTES // PAGE_BYTES,):
        raise IndexUnusable(f"it says that it has more than {MAX_INDEX_BYTES} bytes")
    require_schema(connection)
    if connection.execute("SELECT value FROM meta WHERE key = 'store_uuid'").fetchone() != (store_uuid,):
        raise IndexUnusable("it belongs to another store")
    if sums is not None and (not has_log or connection.execute(META, (FILE_KEY,)).fetchone() == (sums.file_id,)):
        return sums
    try:
        require_sealed(connection, SEALED)
    except BrokenSeal as broken:
        raise IndexUnusable(str(broken)) from broken
    if any(connection.execute(question).fetchone() for question in _NONSENSE):
        raise IndexUnusable("it holds a row that is not valid")
    return None


def require_schema(connection: sqlite3.Connection) -> None:
    """Refuse other tables than ours before any of them is asked: a view in a table's place may compute for ever."""
    if _schema_of(connection) != _expected_schema():
        raise IndexUnusable("it has other tables than an index of Torpor")


def _schema_of(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    found = connection.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master LIMIT 64")
    return sorted(found, key=repr)  # in a damaged one there may be bytes instead of text


@functools.cache
def _expected_schema() -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        return _schema_of(connection)
