"""What the index tells of sessions and their versions."""
# ruff: noqa: S608 - every statement is put together from constants of this module

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from ..format.records import IndexRow
from ..limits import MAX_VERSION
from ..uri import SessionUri
from .connection import IndexConnection
from .rows import ASIDE, COLUMNS, LIVE, MISSED, UNREADABLE, row_in

_PAGE_ROWS: Final = 100
_ASKED_AT_ONCE: Final = 500
_NEAR: Final = 200


class SessionQueries(IndexConnection):
    """Questions for sessions."""

    def find(self, uri: SessionUri, version: int | None = None) -> IndexRow | None:
        """A version of a session, the latest if none is named; None if there is none."""
        where = f"status = '{LIVE}' AND namespace = ? AND name = ?"
        values: tuple[Any, ...] = (uri.namespace, uri.name)
        if version is not None:
            if not 1 <= version <= MAX_VERSION:
                return None  # nor does SQLite take every number
            where, values = where + " AND version = ?", (*values, version)
        rows = self._rows(f"WHERE {where} ORDER BY version DESC LIMIT 1", values)
        return rows[0] if rows else None

    def versions(self, uri: SessionUri) -> list[IndexRow]:
        return self._rows(
            f"WHERE status = '{LIVE}' AND namespace = ? AND name = ? ORDER BY version", (uri.namespace, uri.name)
        )

    def iter_latest(self) -> Iterator[IndexRow]:
        """The latest version of each session, in the order of their URIs. What comes or goes meanwhile: as of
        `iter_listed`."""
        for page in self.iter_listed(None, _PAGE_ROWS):
            yield from (row for row, _ in page)

    def iter_listed(self, namespace: str | None, page_rows: int) -> Iterator[list[tuple[IndexRow, int]]]:
        """The latest version of each session of a namespace, or of all, with the bytes of the files of all its
        versions, in the order of their URIs: page by page, each fetched when it is asked for.

        A session that comes or goes meanwhile is seen or not; no other one is missed or told twice.
        """
        within, after = ("", ()) if namespace is None else ("namespace = ? AND ", (namespace,)), ("", "")
        while True:
            found = self._select(  # with max(), the columns of its row
                f"SELECT {COLUMNS}, max(version), sum(bundle_bytes) FROM bundles WHERE status = '{LIVE}' AND "
                f"{within[0]}(namespace, name) > (?, ?) GROUP BY namespace, name ORDER BY namespace, name LIMIT ?",
                (*within[1], *after, page_rows),
            )
            rows = self._as_rows(columns[:-2] for columns in found)
            yield list(zip(rows, (int(columns[-1]) for columns in found), strict=True))
            if len(rows) < page_rows:
                return
            after = (rows[-1].uri.namespace, rows[-1].uri.name)

    def uris(self) -> list[SessionUri]:
        """All sessions, in order: for suggestions."""
        return [uri for page in self.iter_uris(_PAGE_ROWS) for uri in page]

    def iter_uris(self, page_rows: int) -> Iterator[list[SessionUri]]:
        """All sessions, in order, in pages: as `iter_listed`, and much less work than their rows."""
        after = ("", "")
        while True:
            found = self._select(
                f"SELECT DISTINCT namespace, name FROM bundles WHERE status = '{LIVE}' AND (namespace, name) > (?, ?) "
                "ORDER BY namespace, name LIMIT ?",
                (*after, page_rows),
            )
            yield [SessionUri(namespace, name) for namespace, name in found]
            if len(found) < page_rows:
                return
            after = found[-1]

    def near(self, uri: SessionUri) -> list[SessionUri]:
        """Sessions of its namespace whose names stand beside this one in the order of names, some hundred: for
        suggestions."""
        found: list[tuple[str]] = []
        for side, order in (("<", "DESC"), (">=", "ASC")):
            found += self._select(
                f"SELECT DISTINCT name FROM bundles WHERE namespace = ? AND name {side} ? AND status = '{LIVE}' "
                f"ORDER BY name {order} LIMIT {_NEAR}",
                (uri.namespace, uri.name),
            )
        return [SessionUri(uri.namespace, name) for (name,) in found]

    def all_rows(self) -> list[IndexRow]:
        return self._rows(f"WHERE status = '{LIVE}' ORDER BY namespace, name, version", ())

    def rows_of(self, bundle_ids: Iterable[bytes]) -> dict[bytes, IndexRow]:
        """The rows of those of the bundles that are versions of a session."""
        found: dict[bytes, IndexRow] = {}
        wanted = list(bundle_ids)
        for at in range(0, len(wanted), _ASKED_AT_ONCE):
            some = wanted[at : at + _ASKED_AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self._rows(f"WHERE status = '{LIVE}' AND bundle_id IN ({marks})", tuple(some))
            found.update((row.bundle_id, row) for row in rows)
        return found

    def missed(self) -> dict[bytes, IndexRow]:
        """The versions that only their marks tell of, by bundle: see MISSED."""
        return self._rows_no_versions(MISSED)

    def given_up(self) -> dict[bytes, IndexRow]:
        """The versions that were set aside, by bundle: see ASIDE."""
        return self._rows_no_versions(ASIDE)

    def unreadable(self) -> dict[bytes, IndexRow]:
        """The bundles that cannot be read but whose owner is known: see UNREADABLE."""
        return self._rows_no_versions(UNREADABLE)

    def _rows_no_versions(self, status: str) -> dict[bytes, IndexRow]:
        rows = self._rows(f"WHERE status <> '{LIVE}' AND status = ? AND namespace IS NOT NULL", (status,))
        return {row.bundle_id: row for row in rows}

    def last_number(self, uri: SessionUri) -> int:
        """The highest version number that a session has given, also to what is no version at present; 0 for none."""
        found = [
            self._select(
                f"SELECT max(version) FROM bundles WHERE {which} AND namespace = ? AND name = ?",
                (uri.namespace, uri.name),
            )
            for which in (f"status = '{LIVE}'", f"status <> '{LIVE}'")  # each by an index of its own
        ]
        return max(int(number or 0) for ((number,),) in found)

    def bundles_numbered(self, uri: SessionUri, version: int) -> set[bytes]:
        """The bundles that a session has given a version number to, whatever became of them."""
        return set(
            self._ids(
                "SELECT bundle_id FROM bundles WHERE namespace = ? AND name = ? AND version = ?",
                (uri.namespace, uri.name, version),
            )
        )

    def totals(self) -> tuple[int, int, int]:
        """How many sessions, how many versions, and the bytes of the versions' files."""
        ((versions, file_bytes),) = self._select(
            f"SELECT count(*), ifnull(sum(bundle_bytes), 0) FROM bundles WHERE status = '{LIVE}'", ()
        )
        ((sessions,),) = self._select(
            f"SELECT count(*) FROM (SELECT DISTINCT namespace, name FROM bundles WHERE status = '{LIVE}')", ()
        )
        return int(sessions), int(versions), int(file_bytes)

    def bundles_of(self, uri: SessionUri) -> list[bytes]:
        """Every bundle of a session whatever its status, oldest version first, a version's rivals before it."""
        return self._ids(
            "SELECT bundle_id FROM bundles WHERE namespace = ? AND name = ? ORDER BY version, status DESC, bundle_id",
            (uri.namespace, uri.name),
        )

    def numbers_of(self, uri: SessionUri) -> list[int]:
        """The version numbers that a session has given to what it still has, set aside or missed ones included."""
        found = self._select(
            "SELECT DISTINCT version FROM bundles WHERE namespace = ? AND name = ? ORDER BY version",
            (uri.namespace, uri.name),
        )
        return [int(number) for (number,) in found]

    def _rows(self, tail: str, values: tuple[Any, ...]) -> list[IndexRow]:
        return self._as_rows(self._select(f"SELECT {COLUMNS} FROM bundles {tail}", values))

    def _as_rows(self, found: Iterable[tuple[Any, ...]]) -> list[IndexRow]:
        with self._translated():
            return [row_in(columns, self.path) for columns in found]
