"""The blocks of a version and who needs things of a store, as records: their sums, their bounds, and whom they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.daemon.api.blocks import Stretch
from torpor.daemon.views import blocks as of_blocks
from torpor.daemon.views import who as of_who
from torpor.daemon.views.blocks import blocks_of
from torpor.daemon.views.ledgers import Present, present_in_files
from torpor.daemon.views.who import who_needs
from torpor.memvid.errors import AmbiguousVersion, BundleMismatch, NothingNamed
from torpor.memvid.format.manifest import LOSSY
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, flip, manifest_path, pack_of, sleep, turn


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", writable=True) as opened:
        yield opened


def whole(store: Store) -> Present:
    return Present.of_version(store.require_session(URI))


def test_the_sums_of_a_view_are_those_of_its_rows_and_of_the_usage(store: Store) -> None:
    first = sleep(store, 700)
    sleep(store, 600, uri=FORK_URI, before=first)
    found = blocks_of(store, whole(store))
    usage = {one.session: one for one in store.usage().sessions}[str(URI)]
    assert (found.logical_bytes, found.stored_bytes, found.shared_bytes, found.alone_bytes) == (
        *(usage.logical_bytes, usage.stored_bytes, usage.shared_bytes, usage.alone_bytes),
    )
    assert found.stored_bytes == found.beside_bytes + sum(each.stored_bytes for each in found.blocks)
    assert [(each.start, each.tokens, each.sessions_needing, each.versions_needing) for each in found.blocks] == [
        *((0, 256, 2, 2), (256, 256, 2, 2), (512, 188, 1, 1), (700, 0, 1, 1)),
    ]
    assert {(each.resident, each.read_ns, each.lossy_bits) for each in found.blocks} == {(None, None, None)}
    assert {each.pack for each in found.blocks} == {pack_of(store, first).stem}


def test_turns_behind_a_version_and_tokens_without_state_are_counted(store: Store) -> None:
    sleep(store, 600, unread=30)
    store.acknowledge([turn(store, 50)])
    found = blocks_of(store, present_in_files(store, URI))
    assert (found.token_count, found.unread_tokens, found.common_tokens) == (630, 30, 630)
    assert found.rest == (Stretch(600, 630, "ledger"), Stretch(630, 650, "journal"))


def test_a_block_was_read_back_when_a_version_with_it_was_woken(store: Store) -> None:
    first = sleep(store, 300)
    fork = sleep(store, 290, uri=FORK_URI, before=first)
    store.note_use(fork.bundle_id)
    used = store.require_session(FORK_URI).used_ns
    found = blocks_of(store, whole(store))
    assert [each.read_ns for each in found.blocks] == [used, None, None]


def test_the_blocks_of_the_lossy_tokens_alone_are_lossy(store: Store) -> None:
    making.write(store, making.drafts(700), 700, session={"model": "demo", LOSSY: {"bits": 4, "tokens": 300}})
    found = blocks_of(store, whole(store))
    assert [each.lossy_bits for each in found.blocks] == [4, 4, None, None]


def test_more_blocks_than_a_view_tells_are_counted_and_in_its_sums(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 700)
    found = blocks_of(store, whole(store))
    monkeypatch.setattr(of_blocks, "MAX_BLOCKS_TOLD", 3)
    cut = blocks_of(store, whole(store))
    assert (len(cut.blocks), cut.blocks_left_out, cut.stored_bytes) == (3, 1, found.stored_bytes)


def test_what_a_session_has_left_behind_is_no_part_of_it_and_in_no_sum(store: Store) -> None:
    sleep(store, 700)
    all_of_it = blocks_of(store, whole(store))
    found = blocks_of(store, replace(whole(store), common=300, end=320), spans=[(0, 700, "user")])
    assert [(each.start, each.tokens, each.holds) for each in found.blocks] == [
        (0, 256, {"user": 256}),
        (256, 256, {"user": 44}),
    ]
    assert (found.token_count, found.common_tokens, found.rest) == (700, 300, (Stretch(300, 320, "memory"),))
    assert found.logical_bytes == sum(each.logical_bytes for each in found.blocks) < all_of_it.logical_bytes
    assert found.stored_bytes == found.beside_bytes + sum(each.stored_bytes for each in found.blocks)


def test_thoughts_are_where_the_marks_of_the_model_stand() -> None:
    tokens = [1, 7, 8, 2, 9, 7, 7, 8, 3, 9, 7, 8, 5]
    assert list(of_blocks._between(tokens, (7, 8), (9,))) == [(1, 5), (6, 10), (10, 13)]


# --- who


def test_a_block_a_version_and_a_pack_are_found_by_id_and_by_path(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sleep(store, 700)
    fork = sleep(store, 600, uri=FORK_URI, before=first)
    store.pin(URI, 1)
    store.acknowledge([turn(store, 5, uri=FORK_URI)])
    block, pack = first.entries[0].id.hex(), pack_of(store, first)
    found = who_needs(store, block[:9].upper())
    assert (found.kind, found.id, found.path, found.blocks, found.unneeded_bytes) == ("block", block, str(pack), 1, 0)
    assert [(each.session, each.version, each.blocks, each.pinned, each.journal) for each in found.needers] == [
        (str(URI), 1, 1, True, False),
        (str(FORK_URI), 1, 1, False, True),
    ]
    monkeypatch.chdir(pack.parents[2])
    for text in (pack.stem[:8], str(pack), f"packs/{pack.name}", f"./store/packs/{pack.name}", pack.name):
        assert (who_needs(store, text).kind, who_needs(store, text).blocks) == ("pack", 4)
    for text in (fork.bundle_id, str(manifest_path(store, fork.bundle_id)), f"{fork.bundle_id}.mvm"):
        found = who_needs(store, text)
        assert (found.kind, found.id, [each.blocks for each in found.needers]) == ("version", fork.bundle_id, [2, 4])
        usage = {one.session: one for one in store.usage().sessions}[str(FORK_URI)]
        manifest = manifest_path(store, fork.bundle_id).stat().st_size
        own = [making.frame_in(pack_of(store, fork, 2), each.id).frame_bytes for each in fork.entries[2:]]
        assert found.needers[1].alone_bytes == manifest + sum(own) < usage.alone_bytes


def test_what_no_version_needs_is_found_and_said_to_be_unneeded(store: Store) -> None:
    first = sleep(store, 700)
    sleep(store, 600, uri=FORK_URI, before=first)
    pack, block = pack_of(store, first), first.entries[2].id.hex()
    store.delete_session(URI)
    found = who_needs(store, block[:10])
    assert (found.kind, found.path, found.needers, found.problems) == ("block", str(pack), (), ())
    assert found.unneeded_bytes == found.stored_bytes > 0
    assert who_needs(store, str(pack)).unneeded_bytes < who_needs(store, str(pack)).stored_bytes


def test_a_block_that_no_pack_has_is_still_needed(store: Store) -> None:
    first = sleep(store, 700)
    with making.away(pack_of(store, first)):
        found = who_needs(store, first.entries[0].id.hex()[:12])
        assert (found.path, found.stored_bytes, len(found.needers)) == ("", 0, 1)


def test_while_a_manifest_is_damaged_the_answer_is_not_complete_and_says_so(store: Store) -> None:
    first = sleep(store, 700)
    flip(manifest_path(store, first.bundle_id), 200)
    with Store.open(store.path, writable=False) as beside:
        found = who_needs(beside, first.entries[0].id.hex())
        assert (found.needers, [each.code for each in found.problems]) == ((), ["bundle_mismatch"])
        with pytest.raises(BundleMismatch):
            who_needs(beside, first.bundle_id)


@pytest.mark.parametrize("text", ["deadbeef", "store.json", "/etc/passwd", "../x", "abc", "", "packs/"])
def test_what_names_nothing_of_the_store_is_refused(store: Store, text: str) -> None:
    sleep(store, 300)
    with pytest.raises(NothingNamed):
        who_needs(store, text)


def test_digits_that_begin_several_ids_list_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = sleep(store, 300), sleep(store, 300, uri=OTHER_URI, seed=3)
    monkeypatch.setattr("torpor.memvid.maintenance.who.MIN_ID_DIGITS", 0)
    with pytest.raises(AmbiguousVersion) as refusal:
        who_needs(store, "")
    told = refusal.value.details["candidates"]
    assert {f"version {each.bundle_id}" for each in (first, other)} < set(told)
    assert len(told) == 2 + 2 + 2 * 3


def test_more_versions_than_are_told_are_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sleep(store, 300)
    sleep(store, 300, uri=FORK_URI, before=first)
    monkeypatch.setattr(of_who, "MAX_NEEDERS_TOLD", 1)
    found = who_needs(store, first.entries[0].id.hex())
    assert (len(found.needers), found.needers_left_out) == (1, 1)
