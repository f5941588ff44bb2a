"""Which versions a version comes from."""

from __future__ import annotations

from pathlib import Path

from torpor.memvid.folder.versions import lineage_of
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, sleep


def test_a_lineage_goes_back_along_the_parents_past_versions_that_were_left(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 20)
        second = sleep(store, 40, before=first)
        third = sleep(store, 30, before=first)
        rows = store.versions(URI)
    lines = [lineage_of(rows, row) for row in rows]
    ids = [receipt.bundle_id.hex() for receipt in (first, second, third)]
    assert lines == [(ids[0],), (ids[1], ids[0]), (ids[2], ids[0])]
    assert lineage_of(rows[2:], rows[2]) == (ids[2], ids[0])  # its parent was pruned, and is told
