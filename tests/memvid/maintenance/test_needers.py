"""Where blocks lie and who needs them: the same bytes as in the usage, and each fault of a file where it is."""

from __future__ import annotations

from torpor.memvid.answers import UsageReport
from torpor.memvid.maintenance.needers import Places
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.coins import places, shared_bytes, stored_bytes
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, flip, frame_in, manifest_path, pack_of, sleep


def require_as_used(found: Places, usage: UsageReport, uri: SessionUri) -> None:
    """A session of one version has in its blocks what the usage tells of it."""
    told = next(one for one in usage.sessions if one.session == str(uri))
    assert (stored_bytes(found), shared_bytes(found)) == (told.stored_bytes, told.shared_bytes)


def test_the_blocks_of_sessions_that_share_add_up_to_what_the_usage_tells(store: Store) -> None:
    first = sleep(store, 700)
    sleep(store, 600, uri=FORK_URI, before=first)
    sleep(store, 300, uri=OTHER_URI, seed=2)
    usage = store.usage()
    for uri in (URI, FORK_URI, OTHER_URI):
        require_as_used(places(store, uri), usage, uri)
    found = places(store)
    assert [len(found.needers.of[each.entry.id]) for each in found.blocks] == [2, 2, 1, 1]
    assert [(each.condition, each.codec) for each in found.blocks] == [("whole", "raw")] * 4
    assert found.needers.sessions(found.blocks[0].entry.id) == {str(URI), str(FORK_URI)}
    assert (found.needers.unknown, found.problems) == ((), ())


def test_versions_of_one_session_need_its_blocks_alone(store: Store) -> None:
    sleep(store, 900, before=sleep(store, 700))
    found = places(store)
    assert [len(found.needers.of[each.entry.id]) for each in found.blocks] == [2, 2, 1, 1, 1]
    assert shared_bytes(found) == 0


def test_of_a_stripped_version_the_headers_are_stored_and_of_a_block_that_another_needs_all(store: Store) -> None:
    first = sleep(store, 700)
    making.mark_stripped(store, first)
    require_as_used(places(store), store.usage(), URI)
    frames = [frame_in(pack_of(store, first), entry.id) for entry in first.entries]
    heads = [frame.head_bytes for frame in frames[:-1]]
    assert [each.stored_bytes for each in places(store).blocks] == [*heads, frames[-1].frame_bytes]
    store.repack()
    assert [each.condition for each in places(store).blocks] == ["stripped"] * 3 + ["whole"]


def test_a_pack_that_is_missing_damaged_or_wrong_in_a_byte_is_told_of_its_blocks_alone(store: Store) -> None:
    first = sleep(store, 700)
    sleep(store, 900, before=first)
    pack = pack_of(store, first)
    with making.away(pack):
        assert [each.condition for each in places(store).blocks] == ["missing"] * 2 + ["whole"] * 3
    frame = frame_in(pack, first.entries[1].id)
    flip(pack, frame.offset + frame.head_bytes + 3)
    assert {each.condition for each in places(store).blocks} == {"whole"}, "no payload is read"
    found = places(store, deep=True)
    assert [each.condition for each in found.blocks] == ["whole", "damaged", "whole", "whole", "whole"]
    assert [(each.code, each.path) for each in found.problems] == [("corrupt_block", str(pack))]
    flip(pack, frame.offset + frame.head_bytes + 3)
    flip(pack, frame.offset + 130)
    assert [each.condition for each in places(store).blocks] == ["whole", "damaged", "whole", "whole", "whole"]


def test_while_a_manifest_cannot_be_read_or_is_missing_the_answer_says_that_it_may_not_be_all(store: Store) -> None:
    first = sleep(store, 700)
    fork = sleep(store, 600, uri=FORK_URI, before=first)
    path = manifest_path(store, fork.bundle_id)
    with making.away(path):
        (told,) = places(store).needers.unknown
        assert (told.code, told.session) == ("bundle_missing", str(FORK_URI))
    flip(path, 200)
    with Store.open(store.path, writable=False) as beside:
        found = places(beside)
    assert [len(found.needers.of[each.entry.id]) for each in found.blocks] == [1] * 4
    assert [(each.code, each.path) for each in found.needers.unknown] == [("bundle_mismatch", str(path))]


def test_a_manifest_that_is_damaged_while_the_store_is_open_needs_its_blocks_still_in_both(store: Store) -> None:
    first = sleep(store, 700)
    fork = sleep(store, 600, uri=FORK_URI, before=first)
    store.strip(FORK_URI)
    before = store.usage().sessions[1]
    flip(manifest_path(store, fork.bundle_id), 200)
    usage = store.usage()
    require_as_used(places(store), usage, URI)
    assert usage.sessions[1].shared_bytes == before.shared_bytes > 0
    assert [each.path for each in usage.problems] == [str(manifest_path(store, fork.bundle_id))]
