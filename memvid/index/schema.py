"""The tables of the index, and the tests for a missing, foreign or damaged index."""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
from typing import Any, Final

from ..limits import MAX_INDEX_BYTES
from .page_sums import PAGE_BYTES, PageSums
from .rows import LIVE

SCHEMA_VERSION: Final = 9
OLD_VERSION: Final = 8
"""That of an index which is read once more, to make the new one: its rows had a column `seal` beside ours."""
APPLICATION_ID: Final = 0x54505249  # "TPRI"
META: Final = "SELECT value FROM meta WHERE key = ?"
FILE_KEY: Final = "file"
"""The key of `meta` under which the log says which file it goes with."""
COUNT_NAME: Final = re.compile(r"rewrites\.([0-9]{1,15})", re.ASCII)
SCHEMA: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE bundles (
    number INTEGER PRIMARY KEY, status TEXT NOT NULL, unsettled INTEGER NOT NULL, namespace TEXT, name TEXT,
    version INTEGER, bundle_id BLOB NOT NULL UNIQUE, parent BLOB, identity_digest BLOB, token_count INTEGER,
    bundle_bytes INTEGER, logical_bytes INTEGER, created_ns INTEGER, model TEXT, labels TEXT,
    salvaged_tokens INTEGER, salvaged_of INTEGER, unread_tokens INTEGER, lossy_bits INTEGER, lossy_tokens INTEGER,
    stamp BLOB, storage BLOB NOT NULL
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
_OLD_SCHEMA: Final = SCHEMA.replace("storage BLOB NOT NULL", "storage BLOB NOT NULL,\n    seal BLOB NOT NULL")

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


def require_ours(connection: sqlite3.Connection, store_uuid: str, sums: PageSums | None) -> None:
    """Refuse an index that is not ours, or not what was written. `sums` are those of its file, if they are right."""
    if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
        raise IndexUnusable("it is not an index of Torpor")
    if version_of(connection) not in (SCHEMA_VERSION, OLD_VERSION):
        raise IndexUnusable("it has another schema version")
    if connection.execute("PRAGMA page_size").fetchone() != (PAGE_BYTES,):
        raise IndexUnusable("it has pages of another size")
    if connection.execute("PRAGMA page_count").fetchone() > (MAX_INDEX_BYTES // PAGE_BYTES,):
        raise IndexUnusable(f"it says that it has more than {MAX_INDEX_BYTES} bytes")
    require_schema(connection)
    if connection.execute("SELECT value FROM meta WHERE key = 'store_uuid'").fetchone() != (store_uuid,):
        raise IndexUnusable("it belongs to another store")
    if sums is None:
        raise IndexUnusable("it is not what was written")
    if sums.has_log and connection.execute(META, (FILE_KEY,)).fetchone() != (sums.file_id,):
        raise IndexUnusable("its log was written over another file")


def version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def require_schema(connection: sqlite3.Connection) -> None:
    """Refuse other tables than ours before any of them is asked: a view in a table's place may compute for ever."""
    schema = _OLD_SCHEMA if version_of(connection) == OLD_VERSION else SCHEMA
    if _schema_of(connection) != _expected_schema(schema):
        raise IndexUnusable("it has other tables than an index of Torpor")


def _schema_of(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    found = connection.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master LIMIT 64")
    return sorted(found, key=repr)  # in a damaged one there may be bytes instead of text


@functools.cache
def _expected_schema(schema: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in schema.split(";"):
            connection.execute(statement)
        return _schema_of(connection)
