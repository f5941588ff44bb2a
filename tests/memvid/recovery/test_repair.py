"""Repair: from what is left to a sound store, nothing deleted, nothing that was sound made worse (P4)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from blake3 import blake3
from torpor.memvid import SessionUri, Store, errors
from torpor.memvid.checking import scanning
from torpor.memvid.disk.budget import Budget
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.folder import quarantine
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.bundle import FrameFile
from torpor.memvid.format.layout import aligned
from torpor.memvid.format.records import Finding, MaintenanceReport
from torpor.memvid.format.salvaged import SALVAGED_FROM, Salvaged
from torpor.memvid.index.index import Index
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.memvid.recovery import reindexing, repair, survey
from torpor.memvid.recovery.repair import CHANGED, LOST
from torpor.memvid.recovery.repair_steps import RepairSteps
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.rewriting import Contents, prepared
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    Receipt,
    adopt,
    contents,
    expected,
    meanwhile,
    put,
    reopened,
    require_awake,
    sleep,
    state,
    write,
)

Damage = Callable[[bytearray], None]
State = dict[tuple[SessionUri, int], list[list[bytes]]]
THIRD_URI = SessionUri("default", "third")


class Killed(BaseException):
    """Stands for a SIGKILL: no handler of ours may catch it."""


def make(path: Path) -> dict[str, bytes]:
    """A session of two versions, a fork of it, one whose first session is deleted, and one alone."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, 300)
        second = sleep(store, 600, before=first)
        fork = sleep(store, 700, uri=OTHER_URI, before=second)
        gone = sleep(store, 600, uri=THIRD_URI, seed=5)
        heir = sleep(store, 700, uri=SessionUri("default", "heir"), seed=5, before=gone)
        alone = sleep(store, 20, uri=SessionUri("default", "alone"), seed=6)
        store.delete_session(THIRD_URI)
    named = {"first": first, "second": second, "fork": fork, "gone": gone, "heir": heir, "alone": alone}
    return {name: receipt.bundle_id for name, receipt in named.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    path = tmp_path_factory.mktemp("original") / "store"
    return path, make(path)


@pytest.fixture
def made(original: tuple[Path, dict[str, bytes]], store_path: Path) -> dict[str, bytes]:
    shutil.copytree(original[0], store_path)
    return original[1]


def file_of(path: Path, bundle_id: bytes) -> Path:
    name = bundle_id.hex()
    (found,) = (path / "bundles" / name[:2]).glob(f"{name}.mv[br]")
    return found


def change(file: Path, damage: Damage) -> bytes:
    """Damage a file in place; its bytes after that."""
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    return bytes(data)


def wakeable(store: Store) -> State:
    """Every version that can be woken to its last byte."""
    found: State = {}
    for row in store.index.all_rows():
        with contextlib.suppress(errors.StoreError), store.open_session(row.uri, row.version) as reader:
            found[row.uri, row.version] = contents(reader)
    return found


def quarantined(path: Path) -> list[bytes]:
    return sorted(file.read_bytes() for file in (path / "quarantine").iterdir())


def files_of(path: Path) -> dict[str, bytes]:
    """Every file of the store but the index and what tells no content."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.startswith(("index.", "lock", "rewrites."))
    }


def require_repaired(path: Path, damaged: list[bytes]) -> MaintenanceReport:
    """Repair a store, and everything that a repair promises."""
    with Store.open(path, writable=True) as store:
        promised = {(row.uri, row.version) for row in store.index.all_rows()}
        before = wakeable(store)
        untouched = files_of(path)
        planned = store.repair(dry_run=True)
        assert files_of(path) == untouched
        report = store.repair()
        assert [(step.kind, step.path) for step in planned.actions] == [
            (step.kind, step.path) for step in report.actions
        ]
        assert planned.problems == report.problems
        after = wakeable(store)
        for key, blocks in before.items():
            assert after[key] == blocks, key
        for uri, version in promised - after.keys():
            told = [problem.message for problem in report.problems if problem.code == LOST]
            assert any(f"ersion {version} of {uri}" in message for message in told), (uri, version, told)
        require_told_for_good(store, report)
    kept = quarantined(path)
    assert all(data in kept for data in damaged)
    assert len(kept) == len(set(kept))
    assert set(kept) <= set(untouched.values())
    left = files_of(path)
    rewritten = {os.path.relpath(step.path, path) for step in report.actions if step.kind == "rewrite"}
    for name, data in untouched.items():
        assert left.get(name) == data or data in kept or name in rewritten, name
    with Store.open(path, writable=True) as store:
        assert wakeable(store) == after
        require_told_for_good(store, report)
    return report


def require_told_for_good(store: Store, *reports: MaintenanceReport) -> None:
    """Nothing is wrong but that versions are set aside, which each look tells of anew, in the same words."""
    findings = store.verify(deep=True).findings
    told = {problem.path for report in reports for problem in report.problems if _is_loss(problem)}
    assert {(finding.path, finding.code) for finding in findings} == {(path, LOST) for path in told}
    assert store.verify(deep=False).findings == findings
    for dry_run in (True, False):
        again = store.repair(dry_run=dry_run)
        assert (again.actions, again.problems) == ((), findings)
    for finding in findings:
        assert "torpor gc --quarantine" in finding.message


def _is_loss(problem: Finding) -> bool:
    """Of a file of which nobody can tell whose it is, nothing is told any more once it is set aside."""
    return problem.code == LOST and problem.message.startswith("Version")


def flip_at(position: int) -> Damage:
    def damage(data: bytearray) -> None:
        data[position] ^= 0x10

    return damage


def cut_to(size_bytes: int) -> Damage:
    def damage(data: bytearray) -> None:
        del data[size_bytes:]

    return damage


def zero(start: int, end: int) -> Damage:
    def damage(data: bytearray) -> None:
        data[start:end] = bytes(len(data[start:end]))

    return damage


NAMES = ("first", "second", "fork", "gone", "heir", "alone")


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97, 1])
def test_threat_2_one_flipped_bit_anywhere_is_repaired_and_nothing_else_is_worse(
    made: dict[str, bytes], store_path: Path, name: str, where: float
) -> None:
    file = file_of(store_path, made[name])
    position = int(where * (file.stat().st_size - 1))
    require_repaired(store_path, [change(file, flip_at(position))])


def paddings_of(file: Path, bundle_id: bytes) -> list[int]:
    """The places of all bytes behind payloads that mean nothing."""
    places = []
    with contextlib.closing(FrameFile(os.open(file, os.O_RDONLY), str(file), bundle_id)) as opened:
        for frame in opened.frames.values():
            _, head = opened.read_head(frame.id)
            for offset, stored in zip(head.payload_offsets, head.stored, strict=True):
                end = frame.offset + offset + stored.stored_bytes
                places += range(end, aligned(end))
    return places


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_damage_in_padding_costs_no_version_though_it_is_in_every_frame(
    made: dict[str, bytes], store_path: Path, name: str
) -> None:
    """A wake does not read it, so what a repair makes of it must be the same version."""
    file = file_of(store_path, made[name])
    places = paddings_of(file, made[name])
    assert len(places) > 50

    def damage(data: bytearray) -> None:
        for place in places:
            data[place] = 0xFF

    report = require_repaired(store_path, [change(file, damage)])
    assert report.problems == ()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.99])
def test_threat_1_a_file_that_was_cut_off_is_repaired(
    made: dict[str, bytes], store_path: Path, name: str, kept: float
) -> None:
    file = file_of(store_path, made[name])
    require_repaired(store_path, [change(file, cut_to(int(kept * file.stat().st_size)))])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [(0, 64), (0, 4096), (4096, 8192), (-4096, None), (-136, None), (0, None)])
def test_threat_3_zeroed_parts_are_repaired(
    made: dict[str, bytes], store_path: Path, name: str, part: tuple[int, int | None]
) -> None:
    file = file_of(store_path, made[name])
    size_bytes = file.stat().st_size
    start = part[0] % size_bytes if part[0] < 0 else part[0]
    end = size_bytes if part[1] is None else part[1]
    before = file.read_bytes()
    after = change(file, zero(start, end))
    require_repaired(store_path, [after] if before != after else [])


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_missing_takes_nothing_else_with_it(made: dict[str, bytes], store_path: Path, name: str) -> None:
    file_of(store_path, made[name]).unlink()
    with Store.open(store_path, writable=True) as store:
        doomed = {(row.uri, row.version) for row in store.index.all_rows()} - wakeable(store).keys()
    report = None
    with Store.open(store_path, writable=True) as store:
        report = store.repair()
        require_told_for_good(store, report)
        left = wakeable(store)
    assert report is not None
    assert not doomed & left.keys()
    assert len([problem for problem in report.problems if problem.code == LOST]) == len(doomed)


# --- what each kind of damage leads to


def damage_frame(path: Path, bundle_id: bytes, number: int) -> None:
    """Flip a bit in the last payload of a file's frame."""
    with contextlib.closing(FrameFile(os.open(file_of(path, bundle_id), os.O_RDONLY), "", bundle_id)) as file:
        frame = file.directory.frames[number]
        payload = file.read_head(frame.id)[1].payload_offsets[-1]
    change(file_of(path, bundle_id), flip_at(frame.offset + payload))


def kinds(report: MaintenanceReport) -> list[str]:
    return [action.kind for action in report.actions]


def test_the_sound_beginning_of_a_lost_version_becomes_the_next_one(store: Store, store_path: Path) -> None:
    lost = sleep(store, 600)
    damage_frame(store_path, lost.bundle_id, 2)
    report = store.repair()
    assert kinds(report) == ["salvage", "quarantine"]
    (problem,) = report.problems
    assert (problem.code, "600 tokens the first 512 are in a new version, 88 are gone" in problem.message) == (
        LOST,
        True,
    )
    (row,) = store.versions(URI)
    assert (row.version, row.token_count, row.parent) == (2, 512, lost.bundle_id)
    with store.open_session(URI) as reader:
        assert contents(reader) == expected(600)[:2]
        assert reader.manifest.environment[SALVAGED_FROM] == lost.bundle_id.hex()
        assert [entry.kind for entry in reader.entries] == ["span", "span"]
        assert reader.manifest.session["model"] == "demo"
    require_told_for_good(store, report)


SAVED = ["salvage", "quarantine"]
LOSSES = {  # tokens, seed and whether the one before is reused; version and frame; actions; versions left; what is told
    "a lost state record costs no token": ([(600, 0, False)], [(0, 3)], SAVED, [(2, 600)], ""),
    "an older version begins the same way": (
        *([(300, 0, False), (600, 0, True)], [(1, 0)], ["quarantine"], [(1, 300)]),
        "the first 300 are in another version, 300 are gone",
    ),
    "a later version has the tokens in another block": (
        *([(40, 0, False), (42, 0, False), (43, 0, False)], [(1, 0)], ["quarantine"], [(1, 40), (3, 43)]),
        "of its 42 tokens the first 42 are in another version, 0 are gone",
    ),
    "the rest of an old version never becomes the newest": (
        *([(600, 0, False), (20, 3, False)], [(0, 2)], ["quarantine"], [(2, 20)], ""),
    ),
    "of two the longer beginning is saved": (
        *([(600, 0, False), (400, 2, False)], [(0, 2), (1, 1)], [*SAVED, "quarantine"], [(3, 512)], ""),
    ),
    "the first block is lost": (
        *([(600, 0, False)], [(0, 0)], ["quarantine"], [], "no other version has any, 600 are gone"),
    ),
}


@pytest.mark.parametrize(("slept", "damaged", "actions", "left", "told"), LOSSES.values(), ids=LOSSES)
def test_what_is_saved_of_lost_versions_and_what_is_told(
    store: Store,
    store_path: Path,
    slept: list[tuple[int, int, bool]],
    damaged: list[tuple[int, int]],
    actions: list[str],
    left: list[tuple[int, int]],
    told: str,
) -> None:
    receipts: list[Receipt] = []
    for tokens, seed, reuses in slept:
        receipts.append(sleep(store, tokens, seed=seed, before=receipts[-1] if reuses else None))
    for version, frame in damaged:
        damage_frame(store_path, receipts[version].bundle_id, frame)
    assert told in store.repair(dry_run=True).problems[0].message
    report = store.repair()
    assert (kinds(report), told in report.problems[0].message) == (actions, True)
    assert [(row.version, row.token_count) for row in store.versions(URI)] == left
    require_told_for_good(store, report)


def test_tokens_that_nobody_can_read_any_more_are_told_as_gone_at_most(store: Store, store_path: Path) -> None:
    lost = sleep(store, 42)
    sleep(store, 43)
    with contextlib.closing(FrameFile(os.open(file_of(store_path, lost.bundle_id), os.O_RDONLY), "", None)) as file:
        head = file.directory.frames[0].offset + 20
    change(file_of(store_path, lost.bundle_id), flip_at(head))
    report = store.repair()
    assert "is lost: of its 42 tokens up to 42 are gone" in report.problems[0].message
    require_told_for_good(store, report)


@pytest.mark.parametrize("part", ["header", "directory", "trailer", "all three", "version number"])
def test_a_version_whose_frames_and_manifest_are_good_is_whole_again_under_its_own_id(
    store: Store, store_path: Path, part: str
) -> None:
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    file = file_of(store_path, second.bundle_id)
    with contextlib.closing(FrameFile(os.open(file, os.O_RDONLY), "", second.bundle_id)) as opened:
        directory = opened.trailer.directory_offset

    def damage(data: bytearray) -> None:
        if part in ("header", "all three"):
            data[20] ^= 1
        if part in ("directory", "all three"):
            data[directory + 40] ^= 1
        if part in ("trailer", "all three"):
            data[-100] ^= 1
        if part == "version number":
            data[8] ^= 2

    damaged = change(file, damage)
    report = require_repaired_open(store, store_path, damaged)
    assert kinds(report) == ["quarantine", "rewrite"]
    assert report.problems == ()
    assert [row.bundle_id for row in store.versions(URI)] == [first.bundle_id, second.bundle_id]
    require_awake(store, 600)


def require_repaired_open(store: Store, path: Path, damaged: bytes) -> MaintenanceReport:
    report = store.repair()
    assert quarantined(path) == [damaged]
    require_told_for_good(store, report)
    return report


@pytest.fixture
def twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[Receipt, Receipt]:
    """The same blocks in two files."""
    one = sleep(store, 600)
    with monkeypatch.context() as patched:
        patched.setattr(Index, "holders_of", lambda *_: [])
        two = sleep(store, 600, uri=OTHER_URI)
    assert two.blocks_new == 4
    return one, two


def test_a_block_that_another_file_holds_too_is_put_back(
    store: Store, store_path: Path, twice: tuple[Receipt, Receipt]
) -> None:
    damage_frame(store_path, twice[0].bundle_id, 1)
    damage_frame(store_path, twice[1].bundle_id, 2)
    report = store.repair()
    assert (kinds(report), report.problems) == (["quarantine", "rewrite"] * 2, ())
    require_awake(store, 600)
    require_awake(store, 600, uri=OTHER_URI)
    assert store.verify(deep=True).ok


def test_a_version_is_led_to_another_file_when_the_one_it_needs_is_gone(
    store: Store, store_path: Path, twice: tuple[Receipt, Receipt]
) -> None:
    heir = sleep(store, 700, uri=THIRD_URI, before=twice[0])
    file_of(store_path, twice[0].bundle_id).unlink()
    report = store.repair()
    assert kinds(report) == ["rewrite", "index"]
    assert [row.bundle_id for row in store.versions(THIRD_URI)] == [heir.bundle_id]
    require_awake(store, 700, uri=THIRD_URI)
    assert store.versions(URI) == []


def test_a_bundle_that_nobody_can_tell_the_owner_of_goes_to_quarantine(store: Store, store_path: Path) -> None:
    lost = sleep(store, 20)
    store.close()
    damaged = change(file_of(store_path, lost.bundle_id), cut_to(100))
    with reopened(store, anew=True) as again:
        assert len(again.index.with_status("unreadable")) == 1
        report = again.repair()
        assert kinds(report) == ["quarantine"]
        assert quarantined(store_path) == [damaged]
        assert again.index.with_status("unreadable") == []
        assert again.verify(deep=True).ok


def test_a_retired_file_that_only_a_lost_version_needed_is_not_left_for_the_next_opening_to_remove(
    store: Store, store_path: Path
) -> None:
    gone = sleep(store, 600)
    heir = sleep(store, 700, uri=OTHER_URI, before=gone)
    store.delete_session(URI)
    retired = file_of(store_path, gone.bundle_id).read_bytes()
    manifest_damaged = change(file_of(store_path, heir.bundle_id), zero(-2000 % heir.bytes_written, heir.bytes_written))
    assert kinds(store.repair()) == ["quarantine", "quarantine"]
    assert quarantined(store_path) == sorted([retired, manifest_damaged])


def test_a_rival_goes_to_quarantine(store: Store, store_path: Path) -> None:
    old = sleep(store, 20)
    backup = file_of(store_path, old.bundle_id).read_bytes()
    place = file_of(store_path, old.bundle_id)
    store.delete_session(URI)
    sleep(store, 30, seed=2)
    store.close()
    put(place, backup)
    with Store.open(store_path, writable=True) as again:
        assert not again.verify(deep=True).ok
        assert kinds(again.repair()) == ["quarantine"]
        assert quarantined(store_path) == [backup]
        require_awake(again, 30, seed=2)
        assert again.verify(deep=True).ok


def test_damaged_marks_go_to_quarantine(store: Store, store_path: Path) -> None:
    sleep(store, 20)
    store.tag(URI, 1, "kept")
    damaged = change(store_path / "marks.json", flip_at(30))
    store._core.folder.write_store_file(marked=False)  # as a store whose marks are older than that
    with pytest.raises(errors.CorruptMarks):
        store.marks(URI)
    planned, report = store.repair(dry_run=True), store.repair()
    assert planned.problems == report.problems
    assert kinds(report) == ["quarantine"]
    place = f"{store_path}/quarantine/marks.json.1"
    (lost,) = report.problems
    assert (lost.code, f"{place} is what was set aside of it: damaged" in lost.message) == ("marks_lost", True)
    assert quarantined(store_path) == [damaged]
    with pytest.raises(errors.MarksLost, match=f"{place} is what was set aside of it: damaged"):  # so no prune takes it
        store.marks(URI)
    again = store.repair()
    assert (again.actions, [problem.code for problem in again.problems]) == ((), ["marks_lost"])


def test_marks_that_lie_in_quarantine_whole_are_named_with_the_way_back(store: Store, store_path: Path) -> None:
    sleep(store, 20)
    store.tag(URI, 1, "kept")
    marks, whole = store_path / "marks.json", store_path / "quarantine" / "marks.json.1"
    shutil.copy2(marks, whole)
    change(marks, flip_at(30))
    for _ in range(2):
        (problem,) = store.repair().problems
        assert (problem.code, f"{whole} is whole: move it back to {marks}." in problem.message) == ("marks_lost", True)
    whole.rename(marks)
    assert store.marks(URI).tags.keys() == {"kept"}
    assert store.verify(deep=True).ok


def test_strangers_and_what_cannot_be_judged_are_left_and_told(store: Store, store_path: Path) -> None:
    first = sleep(store, 300)
    sleep(store, 600, uri=OTHER_URI, before=first)
    stranger = store_path / "bundles" / first.bundle_id.hex()[:2] / "note.txt"
    stranger.write_text("mine")
    os.link(file_of(store_path, first.bundle_id), store_path.parent / "second name")  # refused: a hard link
    before = files_of(store_path)
    report = store.repair()
    assert report.actions == ()
    assert {problem.code for problem in report.problems} - {"bundle_missing"} == {"unknown_file", "unsafe_path"}
    assert files_of(store_path) == before
    (store_path.parent / "second name").unlink()
    require_awake(store, 600, uri=OTHER_URI)


def test_a_file_of_a_later_version_is_not_touched(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 20)
    file = file_of(store_path, receipt.bundle_id)

    def later(data: bytearray) -> None:
        data[8] = 2
        data[32:64] = blake3(bytes(data[:32])).digest()

    change(file, later)
    before = files_of(store_path)
    report = store.repair()
    assert (report.actions, [problem.code for problem in report.problems]) == ((), ["unsupported_format"])
    assert files_of(store_path) == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cut_off", [1, 40, 4000])
@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_a_file_with_a_damaged_version_number_and_a_cut_end_is_saved_from_and_set_aside(
    store: Store, store_path: Path, bit: int, cut_off: int
) -> None:
    receipt = sleep(store, 600)

    def damage(data: bytearray) -> None:
        data[8 + bit // 8] ^= 1 << bit % 8
        del data[-cut_off:]

    damaged = change(file_of(store_path, receipt.bundle_id), damage)
    report = require_repaired_open(store, store_path, damaged)
    with_manifest = cut_off < 400
    assert kinds(report) == (["quarantine", "rewrite"] if with_manifest else ["quarantine"])
    assert [problem.code for problem in report.problems] == ([] if with_manifest else ["version_lost"])
    assert [row.token_count for row in store.versions(URI)] == ([600] if with_manifest else [])


def test_an_index_that_says_something_else_is_made_anew(store: Store) -> None:
    receipt = sleep(store, 300)
    store.index._connection.execute("UPDATE bundles SET token_count = 7")
    with pytest.raises(errors.StoreError):
        store.open_session(URI)
    assert kinds(store.rebuild_index(dry_run=True)) == ["index"]
    assert kinds(store.repair()) == ["index"]
    require_awake(store, 300)
    assert receipt.version == 1


def test_rebuild_index_tells_the_differences_and_mends_them(store: Store) -> None:
    sleep(store, 300)
    assert store.rebuild_index(dry_run=True).actions == ()
    store.index._connection.execute("DELETE FROM blocks")
    planned = store.rebuild_index(dry_run=True)
    assert (kinds(planned), planned.dry_run) == (["index"], True)
    report = store.rebuild_index()
    assert report.actions == planned.actions
    assert store.rebuild_index(dry_run=True).actions == ()
    require_awake(store, 300)


def test_a_sleep_a_delete_and_a_compaction_wait_for_no_reading_of_bundles_and_the_new_index_has_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them while the first bundle is being read: before the lock is taken, for else they would never end."""
    first = sleep(store, 300)
    adopted = sleep(store, 600, before=first)
    sleep(store, 100, uri=OTHER_URI, seed=2)
    real, inside, done = scanning._read_bundle, [], []

    def others() -> None:
        sleep(store, 200, uri=THIRD_URI, seed=3)
        store.delete_session(OTHER_URI)
        adopt(store, adopted)
        done.append(True)

    def read_bundle(folder: StoreFolder, bundle_id: bytes) -> Any:
        if store._core._writing._is_owned():  # type: ignore[attr-defined]
            inside.append(bundle_id)
        read = real(folder, bundle_id)
        if bundle_id == max(store.index.bundle_ids()) and not done:
            thread = threading.Thread(target=others)
            thread.start()
            thread.join(30)
            assert done
        return read

    monkeypatch.setattr(scanning, "_read_bundle", read_bundle)
    assert store.rebuild_index().problems == ()
    assert len(inside) <= 2 * 2  # for the plan and for the index: what is new, and what was written anew
    assert [row.uri for row in store.iter_sessions()] == [URI, THIRD_URI]
    assert adopted.bundle_id not in store.index.users_of(first.bundle_id)
    assert store.rebuild_index(dry_run=True).actions == ()
    require_awake(store, 600)
    require_awake(store, 200, uri=THIRD_URI, seed=3)
    assert store.verify(deep=True).ok


def test_a_file_that_somebody_has_open_waits_for_the_next_repair(store: Store, store_path: Path) -> None:
    first = sleep(store, 300)
    second = sleep(store, 600, uri=OTHER_URI, before=first)
    damage_frame(store_path, first.bundle_id, 1)
    with store.open_session(OTHER_URI) as reader:
        report = store.repair()
        assert [problem.code for problem in report.problems] == [CHANGED]
        assert contents(reader) == expected(600)
    report = store.repair()
    assert [problem.code for problem in report.problems] == [LOST]
    require_told_for_good(store, report)
    require_awake(store, 600, uri=OTHER_URI)
    assert second.version == 1


def test_what_lies_in_quarantine_is_never_overwritten(store: Store, store_path: Path) -> None:
    lost = sleep(store, 20)
    other = sleep(store, 600, uri=OTHER_URI)
    inside = store_path / "quarantine"
    earlier = [inside / f"{receipt.bundle_id.hex()}.mvb.1" for receipt in (lost, other)]
    for file in earlier:
        put(file, b"earlier")
    change(file_of(store_path, lost.bundle_id), cut_to(100))
    change(file_of(store_path, other.bundle_id), flip_at(-10))
    assert kinds(store.repair()) == ["quarantine", "rewrite", "quarantine"]
    assert [file.read_bytes() for file in earlier] == [b"earlier"] * 2
    assert sorted(file.name[-2:] for file in inside.iterdir()) == [".1", ".1", ".2", ".2"]


def test_an_index_that_missed_the_end_of_a_mending_reads_the_file_again(
    store: Store, store_path: Path, twice: tuple[Receipt, Receipt]
) -> None:
    heir = sleep(store, 700, uri=THIRD_URI, before=twice[0])
    file_of(store_path, twice[0].bundle_id).unlink()
    with mock.patch.object(Index, "finish_rewrite", side_effect=Killed), pytest.raises(Killed):
        store.repair()
    with reopened(store) as again:
        assert heir.bundle_id.hex() not in str(again.rebuild_index(dry_run=True).actions)
        require_awake(again, 700, uri=THIRD_URI)


# --- versions that were set aside, and come back


def chain(store: Store, *lengths: int) -> list[Receipt]:
    """Versions of one session, each of which reuses the blocks of the one before."""
    made: list[Receipt] = []
    for length in lengths:
        made.append(sleep(store, length, before=made[-1] if made else None))
    return made


def set_aside_with_all_its_blocks_back(store: Store, store_path: Path) -> list[Receipt]:
    """Two versions in a closed store, both set aside for want of a file that is back since."""
    versions = chain(store, 600, 900)
    file = file_of(store_path, versions[0].bundle_id)
    away = store_path.parent / "not mounted"
    file.rename(away)
    store.repair()
    store.close()
    away.rename(file)
    return versions


def versions_of(store: Store) -> list[tuple[int, bytes]]:
    return [(row.version, row.bundle_id) for row in store.versions(URI)]


def come_back(store_path: Path, versions: list[Receipt]) -> MaintenanceReport:
    """Repair a reopened store, and require that the session is whole again, with nothing left to do."""
    with Store.open(store_path, writable=True) as store:
        report = store.repair()
        assert report.problems == ()
        assert versions_of(store) == [(one.version, one.bundle_id) for one in versions]
        require_awake(store, versions[-1].token_count)
        assert store.verify(deep=True).findings == ()
        assert store.repair().actions == ()
    with Store.open(store_path, writable=True) as store:
        require_awake(store, versions[-1].token_count)
    return report


@pytest.mark.parametrize("new_index", [False, True])
def test_a_session_is_whole_again_once_a_missing_file_is_put_back(
    store: Store, store_path: Path, new_index: bool
) -> None:
    versions = chain(store, 600, 900, 1200)
    file = file_of(store_path, versions[0].bundle_id)
    away = store_path.parent / "not mounted"
    file.rename(away)
    report = store.repair()
    assert kinds(report) == ["quarantine", "quarantine", "index"]
    assert str(file) in report.problems[0].message  # how it comes back
    assert store.versions(URI) == []
    require_told_for_good(store, report)
    store.close()
    if new_index:
        with reopened(store, anew=True) as again:
            told = [finding.message for finding in again.verify(deep=False).findings]
        assert [str(file) in one for one in told] == [True] * 3
    away.rename(file)
    assert kinds(come_back(store_path, versions)) == ["restore", "restore"]
    assert list((store_path / "quarantine").iterdir()) == []


@pytest.mark.parametrize("given_up", [False, True])
def test_one_repair_is_enough_where_a_file_is_put_back_in_an_open_store(
    store: Store, store_path: Path, given_up: bool
) -> None:
    """The store knows the version as one that is set aside, or not at all, until the repair enters it; what was saved
    of it gives way in the same run."""
    lost = sleep(store, 1000)
    good = file_of(store_path, lost.bundle_id).read_bytes()
    damage_frame(store_path, lost.bundle_id, 3)
    assert kinds(store.repair()) == ["salvage", "quarantine"]
    if given_up:
        store.empty_quarantine()
    put_back(store_path, lost.bundle_id, good)
    planned = store.repair(dry_run=True)
    report = store.repair()
    for one in (planned, report):
        assert kinds(one) == ["restore", "remove", "quarantine"]
        assert [action.version for action in one.actions] == [1, None, 2]
        assert one.problems == ()
    assert "Its file was put back" in report.actions[0].reason
    assert versions_of(store) == [(1, lost.bundle_id)]
    require_awake(store, 1000)
    assert store.verify(deep=True).findings == ()
    assert store.repair().actions == ()


def test_the_index_tells_what_was_saved_also_when_it_is_made_anew(store: Store, store_path: Path) -> None:
    lost = sleep(store, 1000)
    damage_frame(store_path, lost.bundle_id, 3)
    store.repair()
    sleep(store, 20, uri=OTHER_URI, seed=3)
    store.close()
    for new_index in (False, True):
        if new_index:
            (store_path / "index.sqlite").unlink()
        with Store.open(store_path, writable=True) as again:
            assert {row.uri: row.salvaged for row in again.iter_sessions()} == {
                URI: Salvaged(768, 1000),
                OTHER_URI: None,
            }


MEANWHILE: dict[str, tuple[Callable[[Store, Path], object], list[tuple[int, int]]]] = {
    "deleted": (lambda store, place: store.delete_session(URI), []),
    "taken away": (lambda store, place: place.unlink(), [(2, 768)]),
    "slept": (lambda store, place: sleep(store, 1100), [(1, 1000), (2, 768), (3, 1100)]),
}


@pytest.mark.parametrize(("act", "left"), MEANWHILE.values(), ids=MEANWHILE)
def test_a_file_that_was_put_back_is_entered_only_if_it_is_so_still(
    store: Store, store_path: Path, act: Callable[[Store, Path], object], left: list[tuple[int, int]]
) -> None:
    lost = sleep(store, 1000)
    good = file_of(store_path, lost.bundle_id).read_bytes()
    damage_frame(store_path, lost.bundle_id, 3)
    store.repair()
    place = put_back(store_path, lost.bundle_id, good)
    with meanwhile(RepairSteps, "take_back", lambda: act(store, place)):
        report = store.repair()
    assert {problem.code for problem in report.problems} <= {CHANGED}
    assert [(row.version, row.token_count) for row in store.versions(URI)] == left


def test_what_names_a_version_that_is_set_aside_is_told_so_and_what_to_do(store: Store, store_path: Path) -> None:
    versions = chain(store, 600, 900)
    sleep(store, 20, uri=OTHER_URI, seed=3)
    file_of(store_path, versions[0].bundle_id).unlink()
    store.repair()
    store.close()
    with Store.open(store_path, writable=False) as reader:
        asked: list[Callable[[], object]] = [
            lambda: reader.open_session(URI),
            lambda: reader.open_session(URI, 2),
            lambda: reader.resolve(URI.name),
            lambda: reader.resolve(str(URI)),
            lambda: reader.resolve_version(f"{URI.name}@2"),
            lambda: reader.verify(URI, deep=False),
        ]
        for ask in asked:
            with pytest.raises(errors.SessionNotFound) as raised:
                ask()
            assert raised.value.details["set_aside"] == [1, 2]
            assert "ersions 1 and 2 of torpor://default/agent are set aside" in raised.value.message
            assert "torpor verify" in raised.value.message
        with pytest.raises(errors.SessionNotFound, match="There is no session"):
            reader.resolve("nobody")
    with Store.open(store_path, writable=True) as again:
        again.empty_quarantine()
        with pytest.raises(errors.SessionNotFound, match="There is no session"):
            again.resolve(URI.name)


def test_an_earlier_version_that_is_set_aside_is_told_where_it_is_named(store: Store, store_path: Path) -> None:
    lost = sleep(store, 600)
    sleep(store, 20, seed=3)
    file_of(store_path, lost.bundle_id).unlink()
    store.repair()
    for ask in (lambda: store.open_session(URI, 1), lambda: store.resolve_version(f"{URI.name}@1")):
        with pytest.raises(errors.SessionNotFound, match=r"ersion 1 of .* is set aside"):
            ask()
    with pytest.raises(errors.SessionNotFound, match="has no version 7; it has version 2"):
        store.open_session(URI, 7)
    (finding,) = store.verify(URI, deep=False).findings
    assert finding.code == LOST


def test_a_version_whose_blocks_are_all_there_again_is_told_to_be_brought_back_by_a_repair(
    store: Store, store_path: Path
) -> None:
    versions = set_aside_with_all_its_blocks_back(store, store_path)
    with Store.open(store_path, writable=True) as again:
        (finding,) = again.verify(deep=True).findings
        assert finding.message.startswith("Version 2 of torpor://default/agent is lost")
        assert "until the store is repaired again" in finding.message
    come_back(store_path, versions)


def swap(first: Path, second: Path) -> None:
    swapped = first.with_suffix(".swapped")
    first.rename(swapped)
    second.rename(first)
    swapped.rename(second)


def require_version(store: Store, version: int, token_count: int, seed: int = 0) -> None:
    with store.open_session(URI, version) as reader:
        assert contents(reader) == expected(token_count, seed=seed)


def with_new_index(store: Store) -> Store:
    store.close()
    (Path(store.path) / "index.sqlite").unlink()
    return Store.open(store.path, writable=True)


@pytest.mark.parametrize("new_index", ["never", "before", "between"])
@pytest.mark.parametrize("marked", [False, True])
def test_files_that_were_swapped_are_under_their_own_names_after_two_repairs(
    store: Store, store_path: Path, new_index: str, marked: bool
) -> None:
    one = sleep(store, 600)
    two = sleep(store, 500, uri=OTHER_URI, seed=4)
    if marked:
        store.tag(URI, 1, "kept")
    first, second = file_of(store_path, one.bundle_id), file_of(store_path, two.bundle_id)
    bytes_of = {first: first.read_bytes(), second: second.read_bytes()}
    swap(first, second)
    if new_index == "before":
        store = with_new_index(store)
        assert store.gc().actions == ()
    report = store.repair()
    assert [problem.code for problem in report.problems] == [LOST] * 2
    for problem in report.problems:
        assert problem.message.startswith("Version 1 of torpor://default/")
        assert "backup" not in problem.message
        assert "until the store is repaired again" in problem.message
    assert sorted(finding.path for finding in store.verify(deep=True).findings) == sorted(map(str, bytes_of))
    if new_index == "between":
        store = with_new_index(store)
    assert kinds(store.repair()) == ["restore", "restore"]
    require_awake(store, 600)
    require_awake(store, 500, uri=OTHER_URI, seed=4)
    assert {file: file.read_bytes() for file in bytes_of} == bytes_of
    assert list((store_path / "quarantine").iterdir()) == []
    assert store.verify(deep=True).ok
    assert store.repair().actions == ()
    store.close()


@pytest.mark.parametrize("new_index", [False, True])
def test_a_file_under_a_name_that_nobody_knows_is_under_its_own_after_two_repairs_and_told_as_what_it_is(
    store: Store, store_path: Path, new_index: bool
) -> None:
    file = file_of(store_path, sleep(store, 600).bundle_id)
    found = store_path / "bundles" / "ab" / f"{'ab' * 32}.mvb"
    found.parent.mkdir(mode=0o700, exist_ok=True)
    file.rename(found)
    if new_index:
        store = with_new_index(store)
    told = {problem.path: problem.message for problem in store.repair().problems}
    assert told.keys() == {str(file), str(found)}
    assert told[str(found)] == (
        f"{found} is version 1 of {URI}, whole, under the name of a bundle of unknown owner. "
        "The next repair (`torpor repair`) gives it its own."
    )
    assert "until the store is repaired again" in told[str(file)]
    assert sleep(store, 300, seed=3).version == 2
    assert kinds(store.repair()) == ["restore"]
    require_version(store, 1, 600)
    assert store.verify(deep=True).ok
    store.close()


def test_a_copy_under_a_name_that_nobody_knows_is_told_as_a_copy_and_nothing_else_changes(
    store: Store, store_path: Path
) -> None:
    file = file_of(store_path, sleep(store, 600).bundle_id)
    copy = store_path / "bundles" / "ab" / f"{'ab' * 32}.mvb"
    copy.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy2(file, copy)
    store = with_new_index(store)
    (problem,) = store.repair().problems
    assert problem.message == (f"{copy} is version 1 of {URI}, whole, under the name of a bundle of unknown owner.")
    require_awake(store, 600)
    assert store.verify(deep=True).ok
    assert store.repair().actions == ()
    store.close()


@pytest.mark.parametrize("new_index", [False, True])
def test_a_version_whose_file_bears_the_name_of_a_deleted_one_that_others_need_comes_back_and_that_one_does_not(
    store: Store, store_path: Path, new_index: bool
) -> None:
    one = sleep(store, 600)
    two = sleep(store, 500, uri=OTHER_URI, seed=4)
    heir = sleep(store, 900, uri=THIRD_URI, before=one)
    swap(file_of(store_path, one.bundle_id), file_of(store_path, two.bundle_id))
    store.delete_session(URI)
    if new_index:
        store = with_new_index(store)
    store.repair()
    store.repair()
    assert [row.bundle_id for row in store.index.all_rows()] == [two.bundle_id, heir.bundle_id]
    require_awake(store, 500, uri=OTHER_URI, seed=4)
    require_awake(store, 900, uri=THIRD_URI)
    assert store.verify(deep=True).ok
    store.close()


@pytest.mark.parametrize("new_index", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_version_in_quarantine_is_not_forgotten_for_a_wrong_file_in_its_place(
    store: Store, store_path: Path, new_index: bool, other: bool
) -> None:
    base = sleep(store, 600, uri=OTHER_URI, seed=1)
    version = sleep(store, 900, seed=1)
    alone = file_of(store_path, sleep(store, 400, uri=THIRD_URI, seed=6).bundle_id)
    needed, file = file_of(store_path, base.bundle_id), file_of(store_path, version.bundle_id)
    sound, size = needed.read_bytes(), file.stat().st_size
    damage_frame(store_path, base.bundle_id, 0)
    store.repair()
    assert not file.exists()
    put(file, alone.read_bytes() if other else bytes(size))
    if new_index:
        store = with_new_index(store)
    told = {problem.path: problem.message for problem in store.repair().problems}
    assert told[str(file)].startswith(f"Version 1 of {URI} is lost: of its 900 tokens")
    assert str(needed) in told[str(file)]
    assert store.gc().actions == ()
    assert sleep(store, 100, seed=7).version == 2
    put(needed, sound)
    with reopened(store) as again:
        assert kinds(again.repair()) == ["restore"]
        require_version(again, 1, 900, seed=1)
        require_awake(again, 600, uri=OTHER_URI, seed=1)
        assert again.verify(deep=True).ok


@pytest.mark.parametrize("new_index", [False, True])
def test_a_version_whose_damaged_copy_in_quarantine_tells_what_it_is_comes_back_from_there(
    store: Store, store_path: Path, new_index: bool
) -> None:
    file = file_of(store_path, sleep(store, 900).bundle_id)
    change(file, flip_at(20))
    assert kinds(store.repair()) == ["quarantine", "rewrite"]
    file.write_bytes(bytes(file.stat().st_size))
    if new_index:
        store = with_new_index(store)
    store.repair()
    assert sleep(store, 100, seed=7).version == 2
    store.close()
    store = Store.open(store_path, writable=True)
    for finding in store.opening.unreadable:
        assert "`torpor repair` brings it back" in finding.message
    assert len(store.opening.unreadable) == new_index
    store.repair()
    require_version(store, 1, 900)
    assert store.verify(deep=True).ok
    store.close()


def test_a_version_that_only_marks_tell_of_is_told_by_a_repair_as_by_a_verify(store: Store, store_path: Path) -> None:
    missed = sleep(store, 300)
    store.tag(URI, 1, "kept")
    store.close()
    file_of(store_path, missed.bundle_id).unlink()
    with reopened(store, anew=True) as again:
        findings = again.verify(deep=True).findings
        assert [finding.code for finding in findings] == ["bundle_missing"]
        for dry_run in (True, False):
            assert again.repair(dry_run=dry_run).problems == findings


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_version_does_not_come_back_before_one_that_it_looks_into(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, is_reversed: bool
) -> None:
    versions = chain(store, 600, 900, 1200)
    file = file_of(store_path, versions[0].bundle_id)
    away = store_path.parent / "not mounted"
    file.rename(away)
    store.repair()
    store.close()
    away.rename(file)
    stamp_of_name, given_up = quarantine.stamp_of_name, Index.given_up

    def changed(folder: StoreFolder, name: str) -> object:
        return None if name.startswith(versions[1].bundle_id.hex()) else stamp_of_name(folder, name)

    def turned(index: Index) -> dict[bytes, Any]:
        return dict(reversed(given_up(index).items())) if is_reversed else given_up(index)

    with Store.open(store_path, writable=True) as again, monkeypatch.context() as patched:
        patched.setattr(quarantine, "stamp_of_name", changed)
        patched.setattr(Index, "given_up", turned)
        report = again.repair()
        assert {problem.code for problem in report.problems} == {CHANGED}
        assert kinds(report) == []
        assert [row.version for row in again.versions(URI)] == [1]
    assert kinds(come_back(store_path, versions)) == ["restore", "restore"]


def test_what_was_saved_of_a_version_gives_way_to_it_when_it_is_whole_again(store: Store, store_path: Path) -> None:
    versions = chain(store, 300, 600, 900)
    file = file_of(store_path, versions[1].bundle_id)  # has the blocks from token 256 on
    away = store_path.parent / "not mounted"
    damage_frame(store_path, versions[0].bundle_id, 1)
    file.rename(away)
    report = store.repair()
    assert kinds(report) == ["salvage", "quarantine", "quarantine", "index"]
    assert [row.version for row in store.versions(URI)] == [4]
    store.close()
    away.rename(file)
    with Store.open(store_path, writable=True) as again:
        assert set(kinds(again.repair())) == {"restore", "quarantine"}
        assert [row.version for row in again.versions(URI)] == [2, 3]
        require_awake(again, 900)
        lost = tuple(problem for problem in report.problems if "ersion 1 of" in problem.message)
        require_told_for_good(again, dataclasses.replace(report, problems=lost))
        assert len(lost) == 1
        assert sleep(again, 20, seed=9).version == 5


def test_what_somebody_has_marked_stays_when_the_version_that_it_was_saved_from_is_back(
    store: Store, store_path: Path
) -> None:
    lost = sleep(store, 600)
    good = file_of(store_path, lost.bundle_id).read_bytes()
    damage_frame(store_path, lost.bundle_id, 2)
    store.repair()
    store.pin(URI, 2)
    place = store_path / "bundles" / lost.bundle_id.hex()[:2] / f"{lost.bundle_id.hex()}.mvb"
    store.close()
    put(place, good)
    with Store.open(store_path, writable=True) as again:
        again.repair()
        assert [row.version for row in again.versions(URI)] == [1, 2]


def test_a_version_in_quarantine_comes_back_when_its_blocks_are_imported(store: Store, store_path: Path) -> None:
    lost = sleep(store, 600)
    exported = store_path.parent / "exported.mvb"
    store.export_session(URI, None, exported)
    damage_frame(store_path, lost.bundle_id, 0)
    assert kinds(store.repair()) == ["quarantine"]
    store.import_file(exported, as_uri=OTHER_URI)
    store.close()
    assert kinds(come_back(store_path, [lost])) == ["restore"]


def test_an_import_brings_a_version_back_that_was_set_aside(store: Store, store_path: Path) -> None:
    lost = sleep(store, 600)
    exported = store_path.parent / "exported.mvb"
    store.export_session(URI, None, exported)
    damage_frame(store_path, lost.bundle_id, 0)
    store.repair()
    assert store.import_file(exported).bundle_id == lost.bundle_id
    assert versions_of(store) == [(1, lost.bundle_id)]
    require_awake(store, 600)
    assert (store.repair().actions, store.verify(deep=True).findings) == ((), ())


def test_blocks_in_quarantine_make_up_for_those_that_are_damaged_since(
    store: Store, store_path: Path, twice: tuple[Receipt, Receipt]
) -> None:
    damage_frame(store_path, twice[0].bundle_id, 0)
    damage_frame(store_path, twice[1].bundle_id, 0)
    assert kinds(store.repair()) == ["quarantine", "quarantine"]
    third = sleep(store, 600, uri=THIRD_URI)
    damage_frame(store_path, third.bundle_id, 2)
    report = store.repair()  # block 2 is in quarantine, twice
    assert report.problems == ()
    assert sorted(kinds(report)) == ["quarantine", "restore", "restore", "rewrite"]
    for uri in (URI, OTHER_URI, THIRD_URI):
        require_awake(store, 600, uri=uri)
    assert (store.repair().actions, store.verify(deep=True).findings) == ((), ())


@pytest.mark.parametrize("gone", [True, False])
def test_an_earlier_copy_in_quarantine_makes_up_for_a_file_that_is_lost_since(
    store: Store, store_path: Path, gone: bool
) -> None:
    receipt = sleep(store, 600)
    file = file_of(store_path, receipt.bundle_id)
    change(file, flip_at(-10))
    assert kinds(store.repair()) == ["quarantine", "rewrite"]  # the copy has every frame, and the manifest
    file.unlink() if gone else change(file, cut_to(100))
    assert kinds(store.repair()) == (["restore"] if gone else ["quarantine", "rewrite"])
    require_awake(store, 600)
    assert (store.repair().actions, store.verify(deep=True).findings) == ((), ())


def test_a_retired_file_in_quarantine_is_no_version_for_who_tells_of_losses_either(
    store: Store, store_path: Path
) -> None:
    alone = sleep(store, 300)
    file = file_of(store_path, alone.bundle_id)
    good = file.read_bytes()
    file.write_bytes(bytes(len(good)))
    told = store.repair().problems
    assert [one.code for one in told] == [LOST]
    (store_path / "quarantine" / f"{alone.bundle_id.hex()}.mvr.1").write_bytes(good)
    again = store.repair()
    assert again.actions == ()
    assert again.problems == store.verify(deep=True).findings == told


def test_t7_a_file_whose_blocks_a_retired_one_has_too_is_not_asked_for_by_who_tells_of_losses(
    store: Store, store_path: Path
) -> None:
    """Verify named it, and a repair did not: the model found that."""
    same = sleep(store, 256, uri=OTHER_URI)
    sleep(store, 300, uri=THIRD_URI, before=same)
    store.delete_session(OTHER_URI)
    first = sleep(store, 256)
    second = sleep(store, 512, before=first)
    sleep(store, 800, before=second)
    for gone in (first, second):
        file_of(store_path, gone.bundle_id).unlink()
    store.repair()
    told = store.verify(deep=True).findings
    assert told == store.repair().problems
    (message,) = (one.message for one in told if "Version 3" in one.message)
    assert second.bundle_id.hex() in message
    assert first.bundle_id.hex() not in message


def test_emptying_the_quarantine_gives_up_what_lies_there_and_all_that_was_kept_for_it(
    store: Store, store_path: Path
) -> None:
    missing = sleep(store, 600, uri=OTHER_URI)
    sleep(store, 1200, before=sleep(store, 900, uri=THIRD_URI, before=missing))
    store.tag(URI, 1, "good")
    store.delete_session(THIRD_URI)
    file_of(store_path, missing.bundle_id).unlink()
    store.repair()
    note = store_path / "quarantine" / "note.txt"
    note.write_text("mine")
    assert store.gc().actions == ()
    planned = store.empty_quarantine(dry_run=True)
    assert [(one.kind, one.session) for one in planned.actions] == [("remove", URI), ("index", OTHER_URI)]
    assert len(quarantined(store_path)) == 2
    report = store.empty_quarantine()
    assert sorted(kinds(report)) == ["index", "remove", "remove", "unmark"]
    assert report.bytes_freed == sum(action.size_bytes for action in report.actions)
    assert quarantined(store_path) == [b"mine"]
    assert list(store_path.glob("bundles/*/*.mv?")) == []
    assert not store.marks(URI)
    assert sleep(store, 20).version == 1
    assert store.empty_quarantine().actions == ()


# --- what a repair writes


def test_what_is_saved_of_several_versions_is_written_once(store: Store, store_path: Path) -> None:
    base = sleep(store, 2560)
    uris = [SessionUri("default", f"heir-{number}") for number in range(4)]
    heirs = [sleep(store, 2900, uri=uri, before=base, seed=number) for number, uri in enumerate(uris)]
    for heir in heirs:
        damage_frame(store_path, heir.bundle_id, 0)
    damage_frame(store_path, base.bundle_id, 10)
    planned = store.repair(dry_run=True)
    report = store.repair()
    assert kinds(report) == ["salvage"] * 5 + ["quarantine"] * 5
    assert planned.bytes_written == report.bytes_written
    assert report.bytes_written < 2 * base.bytes_written
    for uri in uris:
        assert [row.token_count for row in store.versions(uri)] == [2560]
    require_told_for_good(store, report)


def test_a_repair_counts_for_the_day_and_is_refused_by_no_budget(store: Store, store_path: Path) -> None:
    lost = sleep(store, 600)
    damage_frame(store_path, lost.bundle_id, 2)
    store.close()
    with Store.open(store_path, writable=True, budget=Budget(max_bytes_per_day=1, max_store_bytes=1)) as again:
        before = again.usage().written_today_bytes
        report = again.repair()
        assert kinds(report) == ["salvage", "quarantine"]
        assert again.usage().written_today_bytes - before == report.bytes_written > 0


# --- a live and a retired file of one bundle


def twin_with_more(store: Store, store_path: Path) -> tuple[Receipt, Receipt, bytes]:
    """A version, deleted since, whose retired file holds what its live file did not: the fork, and that live file."""
    first = sleep(store, 512)
    second = sleep(store, 1024, before=first)
    backup = file_of(store_path, second.bundle_id).read_bytes()
    adopt(store, second)
    fork = sleep(store, 1280, uri=OTHER_URI, before=second)
    assert {entry.bundle_id for entry in fork.entries[:4]} == {second.bundle_id}
    store.delete_session(URI)
    return second, fork, backup


def damages(data: bytes) -> list[bytes]:
    return [
        b"",
        data[:1000],
        data[:-1],
        data[:500] + bytes([data[500] ^ 1]) + data[501:],
        data[:-1] + bytes([data[-1] ^ 1]),
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reopening", [True, False])
@pytest.mark.parametrize("damage", [None, 0, 1, 2, 3, 4])
def test_a_version_put_back_beside_its_retired_file_costs_nobody_a_block(
    store: Store, store_path: Path, damage: int | None, reopening: bool
) -> None:
    second, fork, backup = twin_with_more(store, store_path)
    place = put_back(store_path, second.bundle_id, backup if damage is None else damages(backup)[damage])
    if reopening:
        store.close()
        store = Store.open(store_path, writable=True)
    require_awake(store, 1280, uri=OTHER_URI)
    with Store.open(store_path, writable=False) as beside:
        require_awake(beside, 1280, uri=OTHER_URI)
    assert "twin_file" in [finding.code for finding in store.verify(deep=True).findings]
    store.repair()
    require_awake(store, 1280, uri=OTHER_URI)
    assert store.verify(deep=True).findings == ()
    assert store.repair().actions == ()
    if damage is None:
        require_awake(store, 1024)
    with reopened(store) as again:
        require_awake(again, 1280, uri=OTHER_URI)
        assert again.verify(deep=True).ok
        assert fork.version == 1
        assert place.exists() == bool(again.versions(URI))


@pytest.mark.parametrize("how", ["delete_session", "forget"])
@pytest.mark.parametrize("damage", [None, 0, 3, 4])
def test_a_delete_beside_a_retired_file_leaves_what_others_need_of_both(
    store: Store, store_path: Path, damage: int | None, how: str
) -> None:
    second, _, backup = twin_with_more(store, store_path)
    put_back(store_path, second.bundle_id, backup)
    store.close()
    store = Store.open(store_path, writable=True)
    extra = sleep(store, 1024, uri=THIRD_URI, before=sleep(store, 900, uri=THIRD_URI, seed=0))
    if damage is not None:
        put_back(store_path, second.bundle_id, damages(backup)[damage])
    getattr(store, how)(URI)
    assert [name for name in os.listdir(file_of(store_path, second.bundle_id).parent) if name.endswith(".mvb")].count(
        f"{second.bundle_id.hex()}.mvb"
    ) == 0
    require_awake(store, 1280, uri=OTHER_URI)
    if damage is None:
        require_awake(store, 1024, uri=THIRD_URI)
        assert store.verify(deep=True).ok
    assert extra.version == 2
    store.close()


def test_a_retired_file_that_cannot_be_judged_is_left_beside_the_live_one(store: Store, store_path: Path) -> None:
    second, _, backup = twin_with_more(store, store_path)
    retired = file_of(store_path, second.bundle_id)
    put_back(store_path, second.bundle_id, backup)
    os.link(retired, store_path.parent / "second name")
    with reopened(store) as again:
        before = files_of(store_path)
        report = again.repair()
        assert report.actions == ()
        assert {problem.code for problem in report.problems} >= {"unsafe_path"}
        assert files_of(store_path) == before
        (store_path.parent / "second name").unlink()
        again.repair()
        require_awake(again, 1280, uri=OTHER_URI)
        assert again.verify(deep=True).ok


def test_a_retired_file_that_has_nothing_of_its_own_goes_when_the_store_is_opened(
    store: Store, store_path: Path
) -> None:
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    backup = file_of(store_path, first.bundle_id).read_bytes()
    store.delete_session(URI)
    retired = file_of(store_path, first.bundle_id)
    put_back(store_path, first.bundle_id, backup)
    with reopened(store) as again:
        assert not retired.exists()
        require_awake(again, 600)
        require_awake(again, 700, uri=OTHER_URI)
        assert again.verify(deep=True).ok


def test_a_sound_retired_frame_is_not_given_up_for_a_damaged_live_one(store: Store, store_path: Path) -> None:
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    backup = bytearray(file_of(store_path, first.bundle_id).read_bytes())
    store.delete_session(URI)
    backup[3000] ^= 1
    place = put_back(store_path, first.bundle_id, bytes(backup))
    with reopened(store) as again:
        assert place.with_suffix(".mvr").exists()
        again.repair()
        require_awake(again, 600)
        require_awake(again, 700, uri=OTHER_URI)
        assert again.verify(deep=True).ok


# --- what others do while a repair looks


def while_looking(work: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Let `work` happen once, between a repair's look at the store and its first step."""
    return meanwhile(repair, "take_survey", work, after=True)


@pytest.mark.parametrize("how", ["delete_session", "forget"])
def test_a_session_that_is_deleted_while_a_repair_looks_does_not_come_back(
    store: Store, store_path: Path, how: str
) -> None:
    sleep(store, 256)  # has the first block of the other session
    lost = sleep(store, 600, uri=OTHER_URI)
    damage_frame(store_path, lost.bundle_id, 0)
    with while_looking(lambda: getattr(store, how)(OTHER_URI)):
        report = store.repair()
    assert (kinds(report), report.problems) == ([], ())
    assert store.versions(OTHER_URI) == []
    assert store.repair().actions == ()


def test_a_file_that_goes_while_a_repair_looks_is_told_as_no_loss(store: Store, store_path: Path) -> None:
    lost = sleep(store, 300)
    file_of(store_path, lost.bundle_id).unlink()
    with while_looking(lambda: store.delete_session(URI)):
        report = store.repair()
    assert (kinds(report), report.problems) == ([], ())


@pytest.mark.parametrize("ended", [True, False])
def test_what_is_saved_does_not_become_newer_than_a_sleep_beside_the_repair(
    store: Store, store_path: Path, ended: bool
) -> None:
    lost = sleep(store, 600)
    damage_frame(store_path, lost.bundle_id, 2)
    with contextlib.ExitStack() as stack:

        def work() -> None:
            if ended:
                sleep(store, 20, seed=3)
            else:
                stack.enter_context(store._core.next_version(URI))

        with while_looking(work):
            report = store.repair()
    assert "salvage" not in kinds(report)
    assert CHANGED in {problem.code for problem in report.problems}
    assert [row.bundle_id for row in store.versions(URI) if row.version == 1] == [lost.bundle_id]
    if ended:
        require_awake(store, 20, seed=3)


def test_a_version_whose_blocks_are_written_anew_while_a_repair_looks_is_not_given_up(
    store: Store, store_path: Path
) -> None:
    lost = sleep(store, 600)
    damage_frame(store_path, lost.bundle_id, 0)
    with while_looking(lambda: sleep(store, 256, uri=OTHER_URI)):
        assert [problem.code for problem in store.repair().problems] == [CHANGED]
    assert kinds(store.repair()) == ["quarantine", "rewrite"]
    require_awake(store, 600)


def test_a_file_that_is_put_back_in_place_while_a_repair_looks_stays(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 600)
    file = file_of(store_path, receipt.bundle_id)
    good = file.read_bytes()
    damage_frame(store_path, receipt.bundle_id, 0)
    with while_looking(lambda: file.write_bytes(good)):  # the same inode
        assert [problem.code for problem in store.repair().problems] == [CHANGED]
    require_awake(store, 600)


def test_a_file_that_is_put_back_in_place_while_a_repair_reads_it_is_read_again(store: Store, store_path: Path) -> None:
    receipt = sleep(store, 600)
    file = file_of(store_path, receipt.bundle_id)
    good = file.read_bytes()
    damage_frame(store_path, receipt.bundle_id, 0)
    with meanwhile(FrameFile, "check_payloads", lambda: file.write_bytes(good), at=2):  # behind the damaged frame
        report = store.repair()
    assert (kinds(report), report.problems) == ([], ())
    require_awake(store, 600)


def test_a_rival_stays_where_the_version_it_yielded_to_goes_meanwhile(store: Store, store_path: Path) -> None:
    old = sleep(store, 20)
    place = file_of(store_path, old.bundle_id)
    backup = place.read_bytes()
    store.delete_session(URI)
    newer = sleep(store, 30, seed=2)
    store.close()
    put(place, backup)
    with Store.open(store_path, writable=True) as again:
        with while_looking(lambda: again.index.drop([newer.bundle_id])):
            assert [problem.code for problem in again.repair().problems] == [CHANGED]
        assert place.read_bytes() == backup


def compacts_beside(monkeypatch: pytest.MonkeyPatch, store: Store, after: bytes) -> None:
    """Once a repair has read this file, a compaction that began before it comes to its end."""
    real, done = survey._examine, []

    def examine(core: StoreCore, target: survey.Target) -> survey.FileState:
        found = real(core, target)
        if target.bundle_id == after and not done:
            done.append(True)
            assert store.compact(URI, policy=CompactionPolicy(max_holders=1)).actions
        return found

    monkeypatch.setattr(survey, "_examine", examine)


def branched(store_path: Path) -> Store:
    """Versions 1 and 2, another state at the end of 2, and a newest one into which a compaction takes all blocks, whose
    file a repair reads before all others."""
    for _ in range(100):
        store = Store.open(store_path, writable=True)
        _, second = chain(store, 600, 900)
        spans = tuple(entry for entry in second.entries if entry.kind == "span")
        write(store, [state(900, seed=99)], 900, parent=second.bundle_id, reused=spans)
        newest = sleep(store, 1800, before=second)
        if newest.bundle_id == min(row.bundle_id for row in store.index.all_rows()):
            return store
        store.close()
        shutil.rmtree(store_path)
    raise AssertionError("a file's name comes before three others' more often than that")


@pytest.mark.parametrize("looks", ["many", "one", "one, and what is asked under the lock"])
def test_a_compaction_beside_a_repair_makes_no_sound_version_a_lost_one(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    with branched(store_path) as store:
        before, everything = versions_of(store), wakeable(store)
        with monkeypatch.context() as patched:
            if looks != "many":
                patched.setattr(survey, "LOOKS", 1)
            if "asked" in looks:
                patched.setattr(survey, "_is_as_seen", lambda core, target, seen: True)
            compacts_beside(patched, store, before[-1][1])
            report = store.repair()
        assert kinds(report) == []
        assert {problem.code for problem in report.problems} == ({CHANGED} if "asked" in looks else set())
        assert (versions_of(store), store.index.given_up()) == (before, {})
        assert wakeable(store) == everything
        assert store.repair().actions == ()
        assert store.verify(deep=True).findings == ()
    assert not list((store_path / "quarantine").iterdir())


def test_a_sleep_beside_a_repair_keeps_the_frames_of_a_file_that_was_to_leave(store: Store, store_path: Path) -> None:
    lost = sleep(store, 1000)
    good = file_of(store_path, lost.bundle_id).read_bytes()
    damage_frame(store_path, lost.bundle_id, 3)
    store.repair()  # the first 768 tokens become version 2
    saved = store.versions(URI)[-1]
    with contextlib.closing(store._core.open_bundle(saved.bundle_id)) as file:
        frames = [(entry.id, entry.bundle_id) for entry in file.entries if entry.bundle_id is not None]
    with prepared(store._core, saved.bundle_id, Contents(frames, {})) as fresh:  # as a compaction does
        assert fresh.commit()
    store.gc()
    sleep(store, 300, uri=OTHER_URI)  # the first block is needed whatever becomes of version 2
    store.close()
    put_back(store_path, lost.bundle_id, good)
    with Store.open(store_path, writable=True) as run_beside:
        with meanwhile(RepairSteps, "set_aside", lambda: sleep(run_beside, 800, uri=THIRD_URI)):  # refers to all three
            report = run_beside.repair()
        assert [problem.code for problem in report.problems] == [CHANGED]
        assert run_beside.verify(deep=True).findings == ()
        for uri, length in ((OTHER_URI, 300), (THIRD_URI, 800)):
            require_awake(run_beside, length, uri=uri)
        assert kinds(run_beside.repair()) == ["quarantine"]
        for uri, length in ((URI, 1000), (OTHER_URI, 300), (THIRD_URI, 800)):
            require_awake(run_beside, length, uri=uri)
        assert run_beside.verify(deep=True).findings == ()


@pytest.mark.parametrize("dry_run", [False, True])
def test_versions_that_come_and_go_beside_a_repair_are_no_fault_of_the_index(store: Store, dry_run: bool) -> None:
    sleep(store, 20)
    sleep(store, 30, uri=OTHER_URI)

    def come_and_go() -> None:
        store.delete_session(OTHER_URI)
        sleep(store, 40, uri=THIRD_URI)

    with (
        meanwhile(reindexing, "_contents", come_and_go),  # the folder was listed, and the index was not asked yet
        mock.patch.object(reindexing, "rebuild", None),  # not made anew
    ):
        report = store.repair(dry_run=dry_run)
    assert (report.actions, report.problems) == ((), ())
    require_awake(store, 40, uri=THIRD_URI)


# --- an index that does not take what a repair does


def shelved(store: Store, store_path: Path) -> tuple[Receipt, bytes]:
    """A tagged second version that is lost, of whose frames others need some; and what its file was."""
    _, lost = chain(store, 300, 900)
    sleep(store, 600, uri=OTHER_URI)
    store.tag(URI, 2, "release")
    good = file_of(store_path, lost.bundle_id).read_bytes()
    damage_frame(store_path, lost.bundle_id, 1)
    return lost, good


def require_remembered(store_path: Path, lost: Receipt, good: bytes) -> None:
    """The version that was set aside keeps number, tag and needs, and is whole again once its file is put back."""
    with Store.open(store_path, writable=True) as again:
        again.repair()
        assert set(again.index.given_up()) == {lost.bundle_id}
        assert again.gc().problems == ()
        assert again.repair().actions == ()
        told = again.verify(deep=True).findings
        assert [finding.path for finding in told] == [again._core.folder.bundle_path(lost.bundle_id)], "it waits"
        number = sleep(again, 40, seed=4).version
        assert number > max(row.version for row in again.index.given_up().values())
    put_back(store_path, lost.bundle_id, good)
    with Store.open(store_path, writable=True) as again:
        assert again.resolve_version(f"{URI}@release").bundle_id == lost.bundle_id
        with again.open_session(URI, 2) as reader:
            assert contents(reader) == expected(900)


def place_of(store_path: Path, bundle_id: bytes) -> Path:
    return store_path / "bundles" / bundle_id.hex()[:2] / f"{bundle_id.hex()}.mvb"


def put_back(store_path: Path, bundle_id: bytes, data: bytes) -> Path:
    place = place_of(store_path, bundle_id)
    put(place, data)
    return place


@pytest.mark.parametrize(("owner", "step"), [(Index, "set_aside"), (quarantine, "move_bundle")])
@pytest.mark.parametrize("failure", [Killed, errors.NoSpace, errors.DurabilityLost])
def test_a_version_is_remembered_whatever_ends_the_repair_that_sets_it_aside(
    store: Store, store_path: Path, owner: object, step: str, failure: type[BaseException]
) -> None:
    lost, good = shelved(store, store_path)
    ended = mock.Mock(side_effect=failure("It ends here."))
    with meanwhile(owner, step, ended, after=step == "move_bundle"), pytest.raises(failure):
        store.repair()
    store.close()
    require_remembered(store_path, lost, good)


def test_what_a_repair_sets_aside_is_in_the_index_s_file_though_a_delete_has_left_that_behind(
    store: Store, store_path: Path
) -> None:
    lost, good = shelved(store, store_path)
    sleep(store, 40, uri=THIRD_URI, seed=8)
    store.index.go_on_in_memory()  # as a delete does for which the file takes no change
    store.delete_session(THIRD_URI)
    store.repair()
    assert not store.index.file_is_behind
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        assert {row.uri for row in again.index.all_rows()} == {URI, OTHER_URI}
        assert set(again.index.given_up()) == {lost.bundle_id}
    require_remembered(store_path, lost, good)


def test_a_repair_does_nothing_beside_an_index_that_cannot_have_its_file_again(store: Store, store_path: Path) -> None:
    shelved(store, store_path)
    store.index.go_on_in_memory()
    before = files_of(store_path)
    with mock.patch.object(Index, "return_to_file", side_effect=errors.NoSpace("There is no room.", path="index")):
        with pytest.raises(errors.NoSpace):
            store.repair()
        assert store.repair(dry_run=True).actions
        assert files_of(store_path) == before
    assert store.repair().actions


def test_an_index_left_behind_in_the_middle_of_a_repair_has_its_file_again_before_a_version_is_set_aside(
    store: Store, store_path: Path
) -> None:
    lost, good = shelved(store, store_path)
    with while_looking(lambda: store.index.go_on_in_memory()):
        store.repair()
    assert not store.index.file_is_behind
    store.close()
    require_remembered(store_path, lost, good)


def test_what_a_delete_on_a_full_disk_has_emptied_is_no_damage_and_does_not_come_back(
    store: Store, store_path: Path
) -> None:
    sleep(store, 40)
    gone = sleep(store, 40, uri=OTHER_URI, seed=2)
    refusals, drop = iter([errors.NoSpace("There is no room.")] * 2), Index.drop

    def refuse_twice(index: Index, bundle_ids: list[bytes]) -> None:
        for refusal in refusals:
            raise refusal
        drop(index, bundle_ids)

    with mock.patch.object(Index, "drop", refuse_twice):
        store.delete_session(OTHER_URI)
    assert file_of(store_path, gone.bundle_id).stat().st_size == 0
    assert (store.repair(dry_run=True).actions, store.repair().actions) == ((), ())
    with reopened(store) as again:
        assert [row.uri for row in again.iter_sessions()] == [URI]
        assert again.verify(deep=True).findings == ()
    assert quarantined(store_path) == []


# --- killed between any two steps


STEPS = (
    (StoreFolder, "replace"), (StoreFolder, "put_beside"), (StoreFolder, "publish"), (Index, "begin_rewrite"),
    (Index, "finish_rewrite"), (Index, "add"), (Index, "drop"), (Index, "reconcile"), (TempFile, "publish"),
    (os, "rename"), (os, "fsync"),
)  # fmt: skip


def damage_much(path: Path, made: dict[str, bytes]) -> None:
    damage_frame(path, made["second"], 1)  # the fork needs the block before, and loses its own beginning
    damage_frame(path, made["gone"], 1)  # a retired file that the heir needs
    change(file_of(path, made["alone"]), flip_at(-100))
    (path / "marks.json").write_text("{}")
    (path / "marks.json").chmod(0o600)


def test_who_reads_beside_a_repair_misses_nothing_at_any_step(
    made: dict[str, bytes], store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store opened for reading before the repair, and one opened at each of its steps, wake all that was sound."""
    damage_much(store_path, made)
    looked, looking_now = 0, False

    def look() -> None:
        for reader in (before, None):
            with contextlib.nullcontext(reader) if reader else Store.open(store_path, writable=False) as opened:
                for (uri, version), blocks in intact.items():
                    with opened.open_session(uri, version) as session:
                        assert contents(session) == blocks

    def looking(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal looked, looking_now
            if not looking_now:
                looked, looking_now = looked + 1, True
                look()
                looking_now = False
            return real(*args, **kwargs)

        return call

    with Store.open(store_path, writable=True) as store, Store.open(store_path, writable=False) as before:
        intact = wakeable(store)
        with monkeypatch.context() as patched:
            for owner, name in STEPS:
                if owner is not os:
                    patched.setattr(owner, name, looking(getattr(owner, name)))
            store.repair()
        assert wakeable(store).items() >= intact.items()
    assert looked > 10


def test_a_dry_run_of_a_store_opened_for_reading_tells_the_same(made: dict[str, bytes], store_path: Path) -> None:
    damage_much(store_path, made)
    with Store.open(store_path, writable=False) as reader:
        planned = reader.repair(dry_run=True)
        with pytest.raises(errors.ReadOnlyStore):
            reader.repair()
    with Store.open(store_path, writable=True) as store:
        report = store.repair()
    assert (report.actions, report.problems) == (planned.actions, planned.problems)
