"""The sums that must come out even: of a store's usage, and of the blocks of its sessions."""

from __future__ import annotations

from pathlib import Path

from torpor.memvid.answers import UsageReport
from torpor.memvid.errors import StoreError
from torpor.memvid.maintenance.needers import Places
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import URI


def require_even(store: Store, report: UsageReport) -> None:
    """Both splits add up, to what is on the disk."""
    assert report.file_bytes == (
        report.version_bytes
        + report.pack_bytes
        + report.damaged_bytes
        + report.incoming_bytes
        + report.index_bytes
        + report.temp_bytes
        + report.journal_bytes
        + report.other_bytes
    )
    places = report.version_bytes + report.pack_bytes
    assert report.file_bytes == report.stored_bytes + report.rest_bytes
    assert report.stored_bytes == report.shared_bytes + sum(one.alone_bytes for one in report.sessions)
    assert places == report.stored_bytes + report.unneeded_bytes + report.unreadable_bytes
    assert all(one.stored_bytes == one.shared_bytes + one.alone_bytes for one in report.sessions)
    assert report.shared_bytes <= sum(one.shared_bytes for one in report.sessions)
    assert report.shared_bytes >= sum(part.size_bytes for part in report.shared_by)
    assert all(part.session_count >= len(part.sessions) > 1 for part in report.shared_by)
    assert report.file_bytes == sum(path.stat().st_size for path in Path(store.path).rglob("*") if path.is_file())


def places(store: Store, uri: SessionUri = URI, version: int | None = None, *, deep: bool = False) -> Places:
    with store.open_session(uri, version) as reader:
        return store.places_of(reader, deep=deep)


def stored_bytes(found: Places) -> int:
    return found.beside_bytes + sum(each.stored_bytes for each in found.blocks)


def shared_bytes(found: Places) -> int:
    shared = [each for each in found.blocks if len(found.needers.sessions(each.entry.id)) > 1]
    return found.beside_shared_bytes + sum(each.stored_bytes for each in shared)


def require_coins(store: Store, *, is_sound: bool) -> None:
    """The usage comes out even, and of each session with one version the blocks have the bytes that it tells. is_sound:
    no file is damaged or missing."""
    usage = store.usage()
    require_even(store, usage)
    for told in usage.sessions:
        if told.versions != 1:
            continue
        try:
            found = places(store, SessionUri.parse(told.session))
        except StoreError:
            assert not is_sound
            continue
        assert (stored_bytes(found), shared_bytes(found)) == (told.stored_bytes, told.shared_bytes), told.session
        assert is_sound <= all(each.condition in ("whole", "stripped") for each in found.blocks)
