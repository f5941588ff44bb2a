"""Usage: two splits of the same sum, and each session's part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torpor.memvid.answers import SessionUsage, UsageReport
from torpor.memvid.maintenance import usage
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.frame_files import open_frames
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.coins import require_even
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, flip, manifest_path, pack_of, put, sleep, turn


def of(report: UsageReport, uri: SessionUri) -> SessionUsage:
    return next(one for one in report.sessions if one.session == str(uri))


def size(path: Path) -> int:
    return path.stat().st_size


def rewritten(store: Store, name: str, *, stripped: bool) -> Path:
    """Write a pack's blocks into a second one: all of them, or the headers of all but the record at the end."""
    with open_frames(store._core.folder, name) as file:
        *others, last = file.frames
    return making.copy_blocks(store, [last, *reversed(others)], stripped=others if stripped else ())


def test_an_empty_store_has_files_and_no_sessions(store: Store) -> None:
    report = store.usage()
    require_even(store, report)
    assert (report.sessions, report.version_bytes, report.pack_bytes, report.problems) == ((), 0, 0, ())
    assert report.journal_bytes == 0


def test_a_session_alone_has_all_of_its_files(store: Store) -> None:
    receipt = sleep(store, 700)
    report = store.usage()
    require_even(store, report)
    mine = of(report, URI)
    assert mine.alone_bytes == mine.stored_bytes == receipt.bytes_written == report.version_bytes + report.pack_bytes
    assert (mine.versions, mine.token_count, mine.logical_bytes) == (1, 700, receipt.logical_bytes)
    assert (mine.shared_bytes, mine.stripped_versions, report.unneeded_bytes) == (0, 0, 0)
    assert report.written_today_bytes > 0
    assert report.free_bytes > 0


def test_some_sessions_together_share_only_what_others_need_too(store: Store) -> None:
    zeroth = sleep(store, 300, uri=SessionUri("work", "third"))
    first = sleep(store, 700, before=zeroth)
    sleep(store, 600, uri=FORK_URI, before=first)
    report, both = store.usage_together({URI, FORK_URI})
    logical = sum(of(report, uri).logical_bytes for uri in (URI, FORK_URI))
    assert (both.sessions, both.logical_bytes) == (tuple(sorted(map(str, (URI, FORK_URI)))), logical)
    assert both.stored_bytes == both.shared_bytes + both.alone_bytes
    assert both.alone_bytes > of(report, URI).alone_bytes + of(report, FORK_URI).alone_bytes
    held = store.held_bytes
    store.delete_session(FORK_URI)
    store.delete_session(URI)
    store.repack()
    assert held - store.held_bytes == both.alone_bytes
    _, all_of_it = store.usage_together({URI, FORK_URI, SessionUri("work", "third")})
    assert (all_of_it.sessions, all_of_it.shared_bytes) == (("torpor://work/third",), 0)


def test_frames_that_two_sessions_need_are_shared_and_count_once(store: Store) -> None:
    first = sleep(store, 700)
    second = sleep(store, 600, uri=FORK_URI, before=first)
    report = store.usage()
    require_even(store, report)
    frames = [making.frame_in(pack_of(store, first), entry.id).frame_bytes for entry in first.entries]
    rest = size(pack_of(store, first)) - sum(frames)
    assert report.shared_bytes == of(report, URI).shared_bytes == of(report, FORK_URI).shared_bytes
    assert report.shared_bytes == sum(frames[:2]) + rest
    assert of(report, URI).alone_bytes == sum(frames[2:]) + size(manifest_path(store, first.bundle_id))
    assert of(report, FORK_URI).alone_bytes == second.bytes_written


def test_what_is_shared_is_told_by_who_shares_it(store: Store) -> None:
    base = sleep(store, 700)
    fork = sleep(store, 900, uri=FORK_URI, before=base)
    sleep(store, 950, uri=OTHER_URI, before=fork)
    report = store.usage()
    require_even(store, report)
    assert report.shared_bytes == sum(part.size_bytes for part in report.shared_by)
    of_all, of_two = report.shared_by
    assert (set(of_all.sessions), of_all.session_count) == ({str(URI), str(FORK_URI), str(OTHER_URI)}, 3)
    assert (set(of_two.sessions), of_two.session_count) == ({str(FORK_URI), str(OTHER_URI)}, 2)
    assert of_all.size_bytes == of(report, URI).shared_bytes
    assert of_all.sessions[0] == max(report.sessions, key=lambda one: one.stored_bytes).session
    chosen, _ = store.usage_together({URI})
    assert chosen.shared_by == (replace(of_all, sessions=chosen.shared_by[0].sessions),)
    assert chosen.shared_by[0].sessions[0] == str(URI)


def test_of_many_parts_and_sharers_the_largest_are_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_PARTS", 1)
    monkeypatch.setattr(usage, "MOST_NAMED", 2)
    base = sleep(store, 700)
    fork = sleep(store, 900, uri=FORK_URI, before=base)
    sleep(store, 950, uri=OTHER_URI, before=fork)
    (part,) = store.usage().shared_by
    assert (len(part.sessions), part.session_count) == (2, 3)


def test_second_copies_and_what_no_version_needs_are_unneeded(store: Store) -> None:
    receipt = sleep(store, 700)
    name = store.index.packs_of(receipt.entries[0].id)[0]
    rewritten(store, name, stripped=False)
    report = store.usage()
    require_even(store, report)
    packs = [size(path) for path in Path(store.path, "packs").iterdir()]
    assert (report.unneeded_bytes, of(report, URI).alone_bytes + report.unneeded_bytes) == (
        min(packs),
        sum(packs) + report.version_bytes,
    )


def test_of_a_stripped_version_headers_count_and_the_rest_is_unneeded(store: Store) -> None:
    """Those in the pack that a repack keeps: the one with headers alone."""
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    other = rewritten(store, f"packs/{pack.name}", stripped=True)
    frames = [making.frame_in(pack, entry.id) for entry in receipt.entries]
    making.mark_stripped(store, receipt)
    report = store.usage()
    require_even(store, report)
    assert of(report, URI).stripped_versions == 1
    assert report.unneeded_bytes == size(pack)
    other.unlink()
    report = store.usage()
    require_even(store, report)
    assert report.unneeded_bytes == sum(each.frame_bytes - each.head_bytes for each in frames[:-1])


def test_what_cannot_be_read_is_told_and_missing_versions_count(store: Store) -> None:
    first = sleep(store, 300)
    second = sleep(store, 300, uri=OTHER_URI, seed=2)
    third = sleep(store, 300, uri=FORK_URI, seed=3)
    flip(pack_of(store, first), -1)
    flip(manifest_path(store, second.bundle_id), 100)
    manifest_path(store, third.bundle_id).unlink()
    report = store.usage()
    require_even(store, report)
    assert sorted(finding.code for finding in report.problems) == [
        "bundle_mismatch",
        "bundle_missing",
        "corrupt_bundle",
    ]
    assert report.unreadable_bytes == size(pack_of(store, first)) + size(manifest_path(store, second.bundle_id))
    assert [one.versions for one in report.sessions] == [1, 1, 1]


def test_all_other_places_count(store: Store) -> None:
    sleep(store)
    store.acknowledge([turn(store, 5)])
    root = Path(store.path)
    for folder in ("damaged", "incoming"):
        (root / folder).mkdir(mode=0o700)
        put(root / folder / "x", b"x" * 100)
    put(root / "0123456789abcdef.tmp", b"x" * 20)
    put(root / "packs" / "0123456789abcdef.tmp", b"x" * 30)
    put(root / "versions" / "0123456789abcdef.tmp", b"x" * 50)
    put(root / "versions" / "note", b"x" * 7)
    report = store.usage()
    require_even(store, report)
    assert (report.damaged_bytes, report.incoming_bytes, report.temp_bytes) == (100, 100, 100)
    assert report.journal_bytes == size(root / "journal" / "turns.mvj")
    small = [root / name for name in ("store.json", "lock", "marks.json")]
    assert report.other_bytes == 7 + sum(map(size, small))


def test_beside_a_daemon_a_version_deleted_meanwhile_is_left_out(store: Store) -> None:
    sleep(store)
    sleep(store, uri=OTHER_URI, seed=2)
    store._core.index.save(store._core.folder, always=True)
    with Store.open(store.path, writable=False) as reader:
        with making.meanwhile(
            type(reader._core.index), "all_rows", lambda: store.delete_session(OTHER_URI), after=True
        ):
            report = reader.usage()
        assert ([one.session for one in report.sessions], report.problems) == ([str(URI)], ())


def test_what_a_session_has_written_includes_what_a_stand_in_wrote(store: Store) -> None:
    stand_in = sleep(store, 1024, unread=10)
    stand_in_bytes = size(manifest_path(store, stand_in.bundle_id))
    sleep(store, 1034, before=stand_in)
    assert len(store.drop_stand_ins(URI).actions) == 1
    report = store.usage()
    told = of(report, URI)
    assert told.versions == 1
    ((listed, written_bytes),) = next(store.index.iter_listed(None, 10))
    assert (listed.version, written_bytes) == (2, told.stored_bytes + report.unneeded_bytes + stand_in_bytes)
