"""Verify: reports what it finds, raises nothing, changes nothing."""

from __future__ import annotations

from pathlib import Path

from store_making import OTHER_URI, URI, bundle_path, sleep
from torpor.memvid import Store


def test_a_sound_store_has_no_findings(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, before=first)
    sleep(store, 20, uri=OTHER_URI)
    shallow, deep = store.verify(deep=False), store.verify(deep=True)
    assert shallow.ok
    assert deep.ok
    assert (deep.bundles_checked, deep.blocks_checked) == (3, 4 + 2 + 2)
    assert shallow.bytes_checked < deep.bytes_checked


def test_only_a_deep_verify_sees_a_damaged_payload(store: Store) -> None:
    receipt = sleep(store, 600)
    file = bundle_path(store, receipt.bundle_id)
    data = bytearray(file.read_bytes())
    data[receipt.entries[1].offset + receipt.entries[1].head_bytes] ^= 1
    file.write_bytes(data)
    assert store.verify(deep=False).ok
    report = store.verify(deep=True)
    assert [(finding.code, finding.path) for finding in report.findings] == [("corrupt_block", str(file))]
    assert file.read_bytes() == data


def test_every_damaged_bundle_is_reported(store: Store) -> None:
    for number in range(3):
        file = bundle_path(store, sleep(store, 20 + number).bundle_id)
        file.write_bytes(file.read_bytes()[:-1])
    assert [finding.code for finding in store.verify(deep=True).findings] == ["truncated"] * 3


def test_one_session_is_verified_with_the_ancestors_it_needs(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    file = bundle_path(store, first.bundle_id)
    data = bytearray(file.read_bytes())
    data[first.entries[0].offset + first.entries[0].head_bytes] ^= 1
    file.write_bytes(data)
    assert store.verify(OTHER_URI, deep=False).ok
    assert {finding.code for finding in store.verify(OTHER_URI, deep=True).findings} == {"corrupt_block"}
    assert {finding.code for finding in store.verify(URI, deep=True).findings} == {"corrupt_block"}


def test_a_stranger_s_file_is_reported_and_left(store: Store) -> None:
    sleep(store, 20)
    stranger = Path(store.path) / "bundles" / "notes.txt"
    stranger.write_text("mine")
    report = store.verify(deep=False)
    assert [(finding.code, finding.path) for finding in report.findings] == [("unknown_file", str(stranger))]
    assert stranger.read_text() == "mine"


def test_progress_ends_at_the_whole(store: Store) -> None:
    sleep(store, 20)
    sleep(store, 300)
    steps: list[tuple[int, int]] = []
    store.verify(deep=True, on_progress=lambda done, total: steps.append((done, total)))
    assert len(steps) == 2
    assert steps[-1][0] == steps[-1][1]
