"""Which versions a version comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.errors import AmbiguousVersion
from torpor.memvid.folder.versions import lineage_of
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, manifest_path, put, reopened, require_awake, sleep


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


def test_of_two_versions_with_one_number_neither_is_taken_for_the_other(store_path: Path) -> None:
    """A manifest is put back whose number was given again after the index was lost: what is asked for by the id of the
    older one, or by the number, is never done to the younger one."""
    store = Store.open(store_path, writable=True)
    sleep(store, 20)
    older = sleep(store, 30, seed=1)
    path = manifest_path(store, older.bundle_id)
    good = path.read_bytes()
    path.unlink()
    store = reopened(store, anew=True)
    younger = sleep(store, 40, seed=2)
    assert younger.version == older.version == 2
    put(path, good)
    store = reopened(store)
    for text in ("agent@2", f"agent@{older.bundle_id.hex()}", f"agent@{younger.bundle_id.hex()[:12]}"):
        with pytest.raises(AmbiguousVersion, match="has 2 versions with the number 2") as refusal:
            store.resolve_version(text)
        assert set(refusal.value.details["candidates"]) == {f"{URI}@{one.bundle_id.hex()}" for one in (older, younger)}
    (told,) = store.verify(deep=True).findings
    assert told.code == "ambiguous_version"
    assert store.verify(URI, deep=False).findings == (told,)
    manifest_path(store, younger.bundle_id).unlink()
    store = reopened(store, anew=True)
    assert store.verify(deep=True).findings == ()
    require_awake(store, 30, version=2, seed=1)
    store.close()
