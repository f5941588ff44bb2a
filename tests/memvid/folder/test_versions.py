"""Which versions a version comes from, and which one a text means where two have one number."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.errors import AmbiguousVersion, SessionNotFound
from torpor.memvid.folder.versions import lineage_of
from torpor.memvid.format.records import Receipt
from torpor.memvid.operations import set_mark
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, require_awake, sleep


def test_a_lineage_goes_back_along_the_parents_past_versions_that_were_left(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 20)
        second = sleep(store, 40, before=first)
        third = sleep(store, 30, before=first)
        rows = store.versions(URI)
    lines = [lineage_of(rows, row) for row in rows]
    ids = [receipt.bundle_id for receipt in (first, second, third)]
    assert lines == [(ids[0],), (ids[1], ids[0]), (ids[2], ids[0])]
    assert lineage_of(rows[2:], rows[2]) == (ids[2], ids[0])  # its parent was pruned, and is told


def test_a_version_that_is_gone_is_told_with_the_way_to_its_tokens(store: Store) -> None:
    first = sleep(store, 300, unread=20)
    sleep(store, 1400, before=first)
    assert len(store.drop_stand_ins(URI).actions) == 1
    way = f"`torpor wake {URI} --at TOKEN` gives any moment of version 2, up to token 1,400."
    for name in ("agent@1", "agent~1"):
        with pytest.raises(SessionNotFound) as refused:
            store.resolve_version(name)
        assert refused.value.message.endswith(way)
    with pytest.raises(SessionNotFound) as refused:
        store.open_session(URI, 1)
    assert refused.value.message.endswith(way)
    for name in ("agent@3", "agent@nothing", "agent~2"):
        with pytest.raises(SessionNotFound) as refused:
            store.resolve_version(name)
        assert way not in refused.value.message or name == "agent~2"


@pytest.fixture
def two(store: Store) -> tuple[Receipt, Receipt]:
    return making.rivals(store)


def test_of_two_versions_with_one_number_neither_is_taken_for_the_other(store: Store, two: tuple[Receipt, ...]) -> None:
    with pytest.raises(AmbiguousVersion, match="has 2 versions with the number 2") as refusal:
        store.resolve_version("agent@2")
    assert refusal.value.details["candidates"] == [f"{URI}@{one.bundle_id}" for one in two]
    for one in two:
        assert store.resolve_version(f"agent@{one.bundle_id[:8]}").bundle_id == one.bundle_id
        store.tag(URI, one.bundle_id, f"of-{one.token_count}")
        assert store.resolve_version(f"agent@of-{one.token_count}").bundle_id == one.bundle_id
        with store.open_session(URI, one.bundle_id) as reader:
            assert reader.bundle_id == one.bundle_id
    with pytest.raises(SessionNotFound, match=f"has no version {'00' * 32}"):
        store.open_session(URI, "00" * 32)


def test_two_versions_with_one_number_are_told_with_how_to_part_them(store: Store, two: tuple[Receipt, ...]) -> None:
    (told,) = store.verify(deep=True).findings
    assert store.verify(URI, deep=False).findings == store.repair().problems == (told,)
    assert told.code == "ambiguous_version"
    for one in two:
        assert f"{URI}@{one.bundle_id[:12]}" in told.message
    assert f"`torpor export {URI}@ID FILE`" in told.message
    assert f"`torpor rm {URI}@ID`" in told.message


@pytest.mark.parametrize("kept", [0, 1])
def test_one_of_two_versions_with_one_number_is_exported_and_deleted_alone(
    store: Store, two: tuple[Receipt, ...], tmp_path: Path, kept: int
) -> None:
    stays, goes = two[kept], two[1 - kept]
    file = store.export_session(URI, goes.bundle_id, tmp_path / "kept.mvb").path
    set_mark(store, f"agent@{stays.bundle_id}", tag="good")
    set_mark(store, f"agent@{goes.bundle_id}", pinned=True)
    assert store.delete_version(URI, goes.bundle_id).versions_deleted == 1
    assert store.marks(URI).bundle_ids == {stays.bundle_id}
    assert [row.bundle_id for row in store.versions(URI)][1:] == [stays.bundle_id]
    assert store.verify(deep=True).findings == store.repair().problems == ()
    store.repack()
    for uri, one in ((URI, stays), (OTHER_URI, goes)):
        if one is goes:
            store.import_file(file, as_uri=OTHER_URI)
        require_awake(store, one.token_count, uri=uri, seed=2 if one is two[1] else 0)


def test_a_strip_of_one_of_two_versions_with_one_number_leaves_the_other(
    store: Store, two: tuple[Receipt, ...]
) -> None:
    store.strip(URI, two[0].bundle_id)
    assert store.marks(URI).stripped == {two[0].bundle_id}
    require_awake(store, 900, seed=2)


def test_who_goes_on_by_a_number_is_refused_the_version_that_it_does_not_mean(
    store: Store, two: tuple[Receipt, ...]
) -> None:
    older, younger = (store.require_session(URI, one.bundle_id) for one in two)
    first = store.require_session(URI, 1)
    assert [store.require_numbered(row) for row in (first, younger)] == [first, younger]
    with pytest.raises(AmbiguousVersion, match="has 2 versions with the number 2"):
        store.require_numbered(older)
