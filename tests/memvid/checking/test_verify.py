"""Verify: what it finds of manifests, packs, small files and strangers, and what it leaves untold."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from torpor.memvid import errors
from torpor.memvid.checking import check, findings, packs
from torpor.memvid.format.records import Receipt, VerifyReport
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing import core
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.format_1_stores import case
from torpor.tests.memvid.store_making import OTHER_URI, URI, flip, manifest_path, meanwhile, pack_of, put, sleep, spoil


def codes(report: VerifyReport) -> list[str]:
    return [finding.code for finding in report.findings]


def whole(report: VerifyReport) -> list[tuple[int, int]]:
    """The versions that are not whole: number, and up to which token they are."""
    return [(one.version, one.whole_up_to) for one in report.damaged]


def second_copy(store: Store, receipt: Receipt, number: int = 0) -> Path:
    """Let the store have a block of a version in a second pack; the first one."""
    first = pack_of(store, receipt, number)
    good = first.read_bytes()
    spoil(store, receipt, number)
    sleep(store, receipt.token_count, uri=OTHER_URI)
    put(first, good)
    return first


@pytest.mark.parametrize("uri", [None, URI])
def test_a_block_in_pieces_that_a_wake_reads_is_not_lost(store: Store, uri: SessionUri | None) -> None:
    receipt = sleep(store, 700)
    other = making.in_pieces(store, receipt)
    report = store.verify(uri, deep=True)
    assert (codes(report), whole(report)) == (["corrupt_block"] * 2, [])
    other.unlink()
    assert whole(store.verify(uri, deep=True)) == [(1, 0)]


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_store_has_no_findings_and_the_report_says_what_was_read(store: Store, deep: bool) -> None:
    receipt = sleep(store, 700)
    sleep(store, 900, before=receipt)
    report = store.verify(deep=deep)
    assert (report.findings, report.damaged, report.ok) == ((), (), True)
    assert (report.bundles_checked, report.blocks_checked) == (2, 7)
    sizes = store.index.pack_sizes().values()
    assert (report.bytes_checked > 0.9 * sum(sizes)) == deep


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("one", [False, True])
def test_a_missing_pack_is_told_with_the_token_up_to_which_each_version_is_whole(
    store: Store, deep: bool, one: bool
) -> None:
    first = sleep(store, 300)
    second = sleep(store, 700, before=first)
    pack_of(store, second, 1).unlink()
    report = store.verify(URI if one else None, deep=deep)
    assert (codes(report), whole(report)) == (["block_missing"], [(2, 256)])
    (finding,) = report.findings
    assert finding.path == f"{store.path}/packs", "the manifest is sound"
    assert (finding.session, finding.version) == (str(URI), 2)
    assert "whole up to token 256" in finding.message
    assert f"torpor wake {URI}@2 --at 256" in finding.message
    assert report.damaged[0].blocks == tuple(entry.id for entry in second.entries[1:])


def test_a_version_without_tokens_that_lacks_its_record_is_whole_up_to_no_token_and_not_whole(store: Store) -> None:
    receipt = making.write(store, [making.state(0)], 0)
    pack_of(store, receipt).unlink()
    report = store.verify(deep=False)
    assert (codes(report), whole(report)) == (["block_missing"], [(1, 0)])
    with store.open_session(URI) as reader:
        with pytest.raises(errors.BlockMissing) as refused:
            making.contents(reader)
        assert (reader.whole_up_to(), reader.is_whole()) == (0, False)
    assert "--at" not in report.findings[0].message + refused.value.message, "no token to go on from"


def test_a_damaged_frame_is_found_by_a_deep_look_alone_and_harms_its_version(store: Store) -> None:
    receipt = sleep(store, 700)
    spoil(store, receipt, 1)
    assert store.verify(deep=False).ok
    for uri in (None, URI):
        report = store.verify(uri, deep=True)
        assert codes(report) == ["corrupt_block", "block_missing"]
        assert (whole(report), report.damaged[0].blocks) == ([(1, 256)], (receipt.entries[1].id,))
        assert report.findings[0].path == str(pack_of(store, receipt, 1))
        assert "torpor repair" in report.findings[0].message


def test_a_damaged_frame_with_a_sound_copy_elsewhere_is_a_finding_of_the_pack_alone(store: Store) -> None:
    receipt = sleep(store)
    first = second_copy(store, receipt)
    assert store.verify(deep=True).ok
    frame = making.frame_in(first, receipt.entries[0].id)
    flip(first, frame.offset + frame.head_bytes + 3)
    report = store.verify(deep=True)
    assert (codes(report), report.findings[0].path, report.damaged) == (["corrupt_block"], str(first), ())


def test_damaged_padding_is_a_finding_of_the_pack_alone(store: Store) -> None:
    receipt = sleep(store)
    pack = pack_of(store, receipt)
    frame = making.frame_in(pack, receipt.entries[-1].id)  # its last slot, a key of 8 bytes, ends in zeros
    flip(pack, frame.offset + frame.frame_bytes - 1)
    report = store.verify(deep=True)
    assert (codes(report), report.damaged) == (["corrupt_block"], ())


def test_a_manifest_that_says_other_than_the_index_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = sleep(store)
    row = store.index.find(URI)
    assert row is not None
    store.index.drop([receipt.bundle_id])
    store.index.add(dataclasses.replace(row, token_count=299))
    assert codes(store.verify(deep=False)) == ["index_mismatch"]


def test_a_stripped_version_without_keys_and_values_is_no_finding(store: Store) -> None:
    receipt = sleep(store, 700)
    making.mark_stripped(store, receipt)
    found = check.FoundBlocks()
    manifest = store._core.read_manifest(receipt.bundle_id)
    found.take(
        check.exhausted(packs.check_pack(store._core.folder, store.index.packs_of(receipt.entries[0].id)[0], deep=True))
    )
    end = receipt.entries[-1].id
    found.heads, found.full = dict(found.full), {end: found.full[end]}
    assert check.lack_of(manifest, found, is_stripped=True) is None
    assert check.lack_of(manifest, found, is_stripped=None) is None
    lack = check.lack_of(manifest, found, is_stripped=False)
    assert lack is not None
    assert [entry.id for entry in lack.blocks] == [entry.id for entry in receipt.entries[:-1]]
    found.heads, found.full = {**found.heads, **found.full}, {}
    lack = check.lack_of(manifest, found, is_stripped=True)
    assert lack is not None
    assert [entry.id for entry in lack.blocks] == [end], "the record at the end is needed whole"


def test_a_stripped_version_without_its_tokens_is_told_as_one(store: Store) -> None:
    receipt = sleep(store, 700)
    making.mark_stripped(store, receipt)
    pack_of(store, receipt).unlink()
    report = store.verify(deep=False)
    assert (whole(report), report.damaged[0].is_stripped) == ([(1, 0)], True)
    assert "is stripped" in report.findings[0].message
    assert "torpor wake" not in report.findings[0].message


def test_small_files_are_checked_with_the_store_and_not_with_a_session(store: Store) -> None:
    sleep(store)
    root = Path(store.path)
    good = {name: flip(root / name, 20) for name in ("marks.json", "store.json")}
    assert sorted(codes(store.verify(deep=False))) == ["corrupt_marks", "corrupt_store_file"]
    assert store.verify(URI, deep=True).ok
    for name, data in good.items():
        put(root / name, data)
    (root / "marks.json").unlink()
    assert codes(store.verify(deep=False)) == ["marks_lost"]


def test_a_damaged_copy_of_the_index_is_told_and_a_missing_one_is_not(store: Store) -> None:
    sleep(store)
    store.close()
    flip(Path(store.path, "index.sqlite"), 4100)
    with Store.open(store.path, writable=False) as reader:
        assert codes(reader.verify(deep=False)) == ["index_failed"]
    making.remove_index(Path(store.path))
    with Store.open(store.path, writable=False) as reader:
        assert reader.verify(deep=False).ok


def test_what_belongs_to_nobody_is_told(store: Store) -> None:
    sleep(store)
    strangers = [Path(store.path, name) for name in ("versions/notes.txt", "packs/ab.mvp", f"packs/{'a' * 64}.mvm")]
    for path in strangers:
        put(path, b"x")
    report = store.verify(deep=True)
    assert {(finding.code, finding.path) for finding in report.findings} == {
        ("unknown_file", str(path)) for path in strangers
    }


def test_damage_to_the_journal_and_turns_without_their_version_are_told(store: Store) -> None:
    receipt = sleep(store)
    store.acknowledge([making.turn(store, 5)])
    assert store.verify(deep=False).ok
    manifest = manifest_path(store, receipt.bundle_id)
    good = manifest.read_bytes()
    manifest.unlink()
    told = store.verify(deep=False)
    assert codes(told) == ["journal_waits", "bundle_missing"]
    assert all(str(manifest) in finding.message for finding in told.findings)
    put(manifest, good)
    journal = next(Path(store.path, "journal").iterdir())
    flip(journal, journal.stat().st_size // 2)
    assert "corrupt_journal" in codes(store.verify(deep=False))


def test_each_part_of_a_bundle_of_format_1_is_read(store: Store, tmp_path: Path) -> None:
    shutil.copytree(case("rival", tmp_path / "old") / "bundles", Path(store.path, "bundles"))
    store.close()
    with Store.open(store.path, writable=True) as again:
        assert again.verify(deep=True).ok
        (name,) = again._core.folder.list_packs()
        bundle = Path(store.path, name)
        for at in range(0, bundle.stat().st_size, 211):
            good = flip(bundle, at)
            assert [finding.path for finding in again.verify(deep=True).findings] == [str(bundle)], at
            put(bundle, good)


# --- while others change the store


def test_a_damaged_pack_that_is_removed_meanwhile_is_no_finding(store: Store) -> None:
    spoil(store, sleep(store, 700), 1)
    with meanwhile(check.Check, "tell", lambda: store.delete_session(URI)):
        assert store.verify(deep=True).findings == ()


@pytest.mark.parametrize("name", ["read_packs", "read_versions", "look_for_blocks", "tell"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_version_deleted_while_it_is_checked_is_no_finding(store: Store, name: str, deep: bool) -> None:
    sleep(store)
    sleep(store, uri=OTHER_URI, seed=3)
    with meanwhile(check.Check, name, lambda: store.delete_session(OTHER_URI)):
        assert store.verify(deep=deep).findings == ()


def test_beside_a_daemon_a_version_deleted_meanwhile_is_no_finding_and_a_missing_one_is(
    store: Store, store_path: Path
) -> None:
    lost = sleep(store)
    sleep(store, uri=OTHER_URI, seed=3)
    store._core.index.save(store._core.folder, always=True)
    with Store.open(store_path, writable=False) as reader:
        store.delete_session(OTHER_URI)
        assert reader.verify(deep=True).ok
    store._core.index.save(store._core.folder, always=True)
    with Store.open(store_path, writable=False) as reader:
        manifest_path(store, lost.bundle_id).unlink()
        assert codes(reader.verify(deep=True)) == ["bundle_missing"]


@pytest.mark.parametrize("after", [False, True])
def test_beside_a_daemon_versions_that_had_a_number_one_after_the_other_are_no_rivals(
    store: Store, store_path: Path, after: bool
) -> None:
    """The second one is deleted as well, while the reader enters it."""

    def begin_anew(seed: int) -> None:
        store.delete_session(URI)
        sleep(store, seed=seed)

    sleep(store, 10, uri=OTHER_URI)
    sleep(store, seed=1)
    with Store.open(store_path, writable=False) as reader:
        begin_anew(2)
        with meanwhile(core, "row_of", lambda: begin_anew(3), after=after):
            assert reader.verify(deep=False).findings == ()
        assert reader.verify(deep=False).findings == ()
        assert [row.bundle_id for row in reader.versions(URI)] == [making.id_of(store, URI)]
        assert reader.resolve_version(f"{URI}@1").bundle_id == making.id_of(store, URI)


def test_of_rivals_those_are_told_whose_manifests_are_there(store: Store) -> None:
    sleep(store)
    other = sleep(store, seed=2)
    rows = [dataclasses.replace(row, version=1) for row in store.versions(URI)]
    assert len(findings.findings_of_rivals(store._core, rows)) == 1
    manifest_path(store, other.bundle_id).unlink()
    assert findings.findings_of_rivals(store._core, rows) == []


def test_blocks_that_move_while_they_are_looked_for_are_found(store: Store) -> None:
    receipt = sleep(store, 700)
    ids = [entry.id for entry in receipt.entries]
    for uri in (None, URI):
        for deep in (False, True):
            ids.reverse()
            with meanwhile(
                check, "check_pack", lambda: making.copy_blocks(store, ids, removing=making.packs_of(store, receipt))
            ):
                assert store.verify(uri, deep=deep).findings == ()
    assert len(making.names(store.path)) == 2


# --- progress and steps


def test_progress_ends_at_the_whole(store: Store) -> None:
    sleep(store, 700)
    sleep(store, uri=OTHER_URI, seed=2)
    told: list[tuple[int, int]] = []
    store.verify(deep=True, on_progress=lambda done, total: told.append((done, total)))
    assert (told[-1][0], len(told)) == (told[-1][1], 2)


@pytest.mark.parametrize("uri", [None, URI])
def test_a_check_in_steps_tells_the_bytes_of_each_block_and_comes_to_the_same_end(
    store: Store, uri: SessionUri | None
) -> None:
    sleep(store, 700)
    sleep(store, uri=OTHER_URI, seed=2)
    steps, paced = store.verifying(uri, deep=True), list[int]()
    with pytest.raises(StopIteration) as end:  # noqa: PT012 - the steps end with their result
        while True:
            paced.append(next(steps))
    report = store.verify(uri, deep=True)
    assert end.value.value == report
    assert (len(paced), sum(paced)) == (report.blocks_checked, report.bytes_checked)


def test_a_check_that_is_given_up_holds_no_file(store: Store) -> None:
    sleep(store, 700)
    steps, before = store.verifying(URI, deep=True), len(os.listdir("/dev/fd"))
    next(steps)
    assert len(os.listdir("/dev/fd")) > before
    steps.close()
    assert len(os.listdir("/dev/fd")) == before


def test_a_session_that_is_not_there_is_refused(store: Store) -> None:
    with pytest.raises(errors.SessionNotFound):
        store.verify(URI, deep=False)
