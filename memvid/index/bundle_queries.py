"""What the index tells of bundles: which there are, who needs which, and what is unknown of them."""
# ruff: noqa: S608 - every statement is put together from constants of this module

from __future__ import annotations

from collections.abc import Mapping

from ..disk.paths import Stamp
from .connection import IndexConnection
from .rows import (
    ASIDE,
    BLOCK_KEY,
    COLUMNS,
    LIVE,
    MISSED,
    UNREADABLE,
    IndexedBundle,
    block_key,
    row_in,
    stamped,
)
from .schema import UNPROVEN, UNSEEN_KEY


class BundleQueries(IndexConnection):
    """Questions for bundles."""

    def bundle_ids(self) -> set[bytes]:
        return set(self._ids("SELECT bundle_id FROM bundles", ()))

    def marks_unseen(self) -> bool:
        """Whether this index was made while the marks could not be read, and they have not been asked since: they may
        name versions that it lacks."""
        return bool(self._select("SELECT 1 FROM meta WHERE key = ?", (UNSEEN_KEY,)))

    def knows(self, bundle_id: bytes) -> bool:
        return bool(self._select("SELECT 1 FROM bundles WHERE bundle_id = ?", (bundle_id,)))

    def refs_of(self, bundle_id: bytes) -> tuple[bytes, ...]:
        """The other bundles that a bundle's file needs. Never fewer, though it may be more while it is unsettled."""
        return tuple(
            self._ids(
                "SELECT refers_to FROM refs JOIN bundles USING (number) WHERE bundle_id = ? ORDER BY refers_to",
                (bundle_id,),
            )
        )

    def users_of(self, bundle_id: bytes) -> list[bytes]:
        return self._ids(
            "SELECT bundle_id FROM refs JOIN bundles USING (number) WHERE refers_to = ? ORDER BY bundle_id",
            (bundle_id,),
        )

    def holders_of(self, block_id: bytes) -> list[bytes]:
        """Versions of sessions whose files may hold this block: the caller proves it in the file's own directory."""
        return self._ids(
            f"SELECT bundle_id FROM blocks JOIN bundles USING (number) WHERE block = ? AND status = '{LIVE}' "
            "ORDER BY number",
            (block_key(block_id),),
        )

    def unsettled(self) -> set[bytes]:
        """The bundles whose files the index does not know as they are now; it covers whatever they may need."""
        return set(self._ids("SELECT bundle_id FROM bundles WHERE unsettled <> 0", ()))

    def unproven(self) -> list[bytes]:
        """The versions whose files are others than those that their rows were made from, and cannot be read."""
        return self._ids(
            f"SELECT bundle_id FROM bundles WHERE unsettled <> 0 AND unsettled = ? AND status = '{LIVE}'", (UNPROVEN,)
        )

    def storages(self) -> dict[bytes, bytes]:
        """What `IndexedBundle.storage` is by the rows of all versions, but for those that are unsettled."""
        return dict(
            self._select(f"SELECT bundle_id, storage FROM bundles WHERE status = '{LIVE}' AND unsettled = 0", ())
        )

    def of_other_files(self, stamps: Mapping[bytes, Stamp]) -> set[bytes]:
        """Those of the bundles, each given with the stamp of its file, whose rows were made from another file."""
        known = dict(self._select("SELECT bundle_id, stamp FROM bundles", ()))
        return {one for one, stamp in stamps.items() if known.get(one) != stamped(stamp)}

    def with_status(self, status: str) -> list[bytes]:
        """The bundles of a status other than LIVE: few, and asked for at every sleep."""
        return self._ids(f"SELECT bundle_id FROM bundles WHERE status <> '{LIVE}' AND status = ?", (status,))

    def unnumbered(self) -> int:
        """How many bundles there are that cannot be read and may have any number of any session."""
        ((count,),) = self._select(
            f"SELECT count(*) FROM bundles WHERE status <> '{LIVE}' AND status = ? AND namespace IS NULL", (UNREADABLE,)
        )
        return int(count)

    def needs_unknown(self) -> list[bytes]:
        """The bundles whose needs are unknown: they cannot be read, are missed, or were set aside so.
        While there is one, no file is removed for not being needed."""
        return [*self.unreadable_now(), *self.with_status(MISSED), *self.aside_untold()]

    def unreadable_now(self) -> list[bytes]:
        """The bundles whose files cannot be read, and no row tells what they need."""
        return [*self.with_status(UNREADABLE), *self.unproven()]

    def aside_untold(self) -> list[bytes]:
        """The versions that were set aside whose needs are unknown: only a manifest or a mark told of
        them, for every version that was read holds blocks or needs others."""
        return self._ids(
            f"SELECT bundle_id FROM bundles WHERE status <> '{LIVE}' AND status = ? "
            "AND NOT EXISTS (SELECT 1 FROM refs WHERE refs.number = bundles.number) "
            "AND NOT EXISTS (SELECT 1 FROM blocks WHERE blocks.number = bundles.number)",
            (ASIDE,),
        )

    def stored(self, bundle_id: bytes) -> IndexedBundle | None:
        """What the index says of a bundle, of its blocks only the first 8 bytes of each id, in order."""
        with self._lock:
            found = self._select(f"SELECT number, status, {COLUMNS} FROM bundles WHERE bundle_id = ?", (bundle_id,))
            if not found:
                return None
            number, status, *columns = found[0]
            refs = self.refs_of(bundle_id)
            found = self._select("SELECT block FROM blocks WHERE number = ? ORDER BY block", (number,))
        keys = [key for (key,) in found]
        with self._translated():
            row = None if columns[0] is None else row_in(tuple(columns), self.path)
        return IndexedBundle(bundle_id, status, row, refs, tuple(BLOCK_KEY.pack(key) for key in keys))

    def written_on(self, day: int) -> int:
        return self.written().get(day, 0)

    def written(self) -> dict[int, int]:
        return {int(day): int(size) for day, size in self._select("SELECT day, size_bytes FROM written", ())}
