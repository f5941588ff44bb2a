"""Forget: afterwards nothing of a session is in the store's files but what is other sessions' too."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.errors import NoSpace, ReadOnlyStore, SessionNotFound
from torpor.memvid.folder.temps import Temps
from torpor.memvid.format.records import MaintenanceReport
from torpor.memvid.format.writer import BundleWriter
from torpor.memvid.index.index import Index
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid.secret_making import SECRET, TEXT, THIRD, adopt, fork, sleep_secret
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    Receipt,
    SessionUri,
    Store,
    bundle_path,
    contents,
    drafts,
    expected,
    flip,
    meanwhile,
    put,
    raw_bytes,
    reopened,
    require_awake,
    sleep,
    spoil,
    token_ids,
    turn,
    write,
)


def require_forked(store: Store, tokens: int, shared: int, uri: SessionUri = OTHER_URI, seed: int = 9) -> None:
    with store.open_session(uri) as reader:
        assert reader.tokens() == token_ids(0, shared, 7) + token_ids(shared, tokens - shared, seed)
        found = contents(reader)
        spans = shared // 256
        assert found[:spans] == expected(tokens, seed=7)[:spans]
        assert found[spans:] == expected(tokens, seed=seed)[spans:]


def payload(start: int, count: int, seed: int = 7) -> bytes:
    """Some raw bytes of a block: the values of one head of its first slot."""
    return raw_bytes(2 * count * 4 * 2, seed, "0.k", start, count)[:64]


def found_in(path: Path, *needles: bytes) -> list[str]:
    """Every file below a folder that has one of the byte strings, by name or by content."""
    hits = []
    for file in sorted(path.rglob("*")):
        if file.is_file():
            data = file.name.encode() + b"\0" + file.read_bytes()
            hits += [f"{file.relative_to(path)}: {needle[:24]!r}" for needle in needles if needle in data]
    return hits


def traces(*, from_token: int = 0, tokens: int = 700) -> list[bytes]:
    """What must be nowhere any more: names, words, and from some token on the ids and the bytes."""
    needles = [SECRET.name.encode(), SECRET.namespace.encode(), TEXT.encode(), b"hush-label"]
    for start in range(from_token, tokens, 256):
        count = min(256, tokens - start)
        needles += [token_ids(start, count, 7)[:64], payload(start, count)]
    return needles


def test_the_search_itself_finds_a_session_that_is_there(store: Store, store_path: Path) -> None:
    sleep_secret(store, 700)
    store.tag(SECRET, None, "now")
    for needle in traces():
        assert found_in(store_path, needle), needle
    assert [hit for hit in found_in(store_path, SECRET.name.encode()) if "marks" in hit]
    store.close()
    assert [hit for hit in found_in(store_path, SECRET.name.encode()) if "index" in hit]


def test_of_a_forgotten_session_nothing_is_left(store: Store, store_path: Path) -> None:
    second = sleep_secret(store, 600, before=sleep_secret(store, 300))
    sleep_secret(store, 700, before=second)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    store.tag(SECRET, 1, "first")
    store.pin(SECRET, 2)
    report = store.forget(SECRET)
    assert report.ok
    assert found_in(store_path, *traces()) == []
    assert [action.version for action in report.actions if action.kind == "remove"] != []
    require_awake(store, 300, uri=OTHER_URI, seed=1)
    assert store.verify(deep=True).ok
    store.close()
    assert found_in(store_path, *traces()) == []
    with Store.open(store_path, writable=True) as again:
        assert [row.uri for row in again.iter_sessions()] == [OTHER_URI]


def fork_that_tells(store: Store, uri: SessionUri, before: Receipt) -> Receipt:
    """A session that says what it was forked from, as the daemon's do."""
    origin = {"session": str(SECRET), "version": before.version, "bundle_id": before.bundle_id.hex(), "tokens": 512}
    return write(
        store,
        drafts(768, first=512, seed=9)[:1],
        768,
        uri=uri,
        parent=before.bundle_id,
        reused=[entry for entry in before.entries if entry.kind == "span" and entry.token_count == 256],
        session={"model": "demo", "forked_from": origin},
    )


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_fork_that_names_the_forgotten_session_is_told_with_its_file(
    store: Store, store_path: Path, dry_run: bool
) -> None:
    """Its manifest is what its id is the digest of: the name stays there, and nowhere else."""
    fork = fork_that_tells(store, OTHER_URI, sleep_secret(store, 700))
    sleep(store, 300, uri=THIRD, seed=1)
    report = store.forget(SECRET, dry_run=dry_run)
    file = bundle_path(store, fork.bundle_id)
    told = [action for action in report.actions if action.kind == "keep" and str(SECRET) in action.reason]
    assert [(one.path, one.session, one.version) for one in told] == [(str(file), OTHER_URI, 1)]
    assert report.ok
    if not dry_run:
        assert {hit.split(":")[0] for hit in found_in(store_path, *traces(from_token=512))} == {
            str(file.relative_to(store_path))
        }
        again = store.forget(SECRET)
        assert [action.path for action in again.actions] == [str(file)], "nor is it said that nothing is left"
        assert store.forget(OTHER_URI).ok
        assert found_in(store_path, *traces()) == [], "then it has gone too"


def test_a_deleted_fork_that_others_need_keeps_no_name(store: Store, store_path: Path) -> None:
    slept = fork_that_tells(store, OTHER_URI, sleep_secret(store, 700))
    fork(store, 900, slept, THIRD)
    store.delete_session(OTHER_URI)
    assert len([*store_path.rglob("*.mvr")]) == 1, "each block of it is needed: nothing else changes its file"
    assert store.forget(SECRET).ok
    assert found_in(store_path, *traces(from_token=512)) == []


def test_a_fork_in_quarantine_that_names_the_forgotten_session_is_a_problem(store: Store, store_path: Path) -> None:
    slept = fork_that_tells(store, OTHER_URI, sleep_secret(store, 700))
    file = bundle_path(store, slept.bundle_id)
    (store_path / "quarantine").mkdir(mode=0o700, exist_ok=True)
    (store_path / "quarantine" / f"{file.name}.1").write_bytes(file.read_bytes())
    report = store.forget(SECRET)
    assert [problem.path for problem in report.problems] == [str(store_path / "quarantine" / f"{file.name}.1")]


def test_what_a_fork_shares_stays_and_the_report_names_it(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    fork(store, 600, secret)  # shares the first two spans
    report = store.forget(SECRET)
    assert report.ok
    assert found_in(store_path, *traces(from_token=512)) == []
    assert [(action.session, action.reason[:2]) for action in report.actions if action.kind == "keep"] == [
        (OTHER_URI, "2 ")
    ]
    assert [action.kind for action in report.actions] == ["strip", "keep"]
    require_forked(store, 600, 512)
    assert store.verify(deep=True).ok
    store.close()
    for index in (True, False):
        if not index:
            (store_path / "index.sqlite").unlink()
        with Store.open(store_path, writable=True) as again:
            require_forked(again, 600, 512)
            assert again.find_session(SECRET) is None


def test_its_blocks_in_another_session_s_files_go_too(store: Store, store_path: Path) -> None:
    """A compaction may have put them there, or the other session was deleted and this one had gone on from it."""
    base = sleep_secret(store, 300)
    with reopened(store) as again:
        other = fork(again, 700, base)  # its file holds what the third needs
        third = write(
            again,
            drafts(600, first=512, seed=3),
            600,
            uri=THIRD,
            parent=other.bundle_id,
            reused=[entry for entry in other.entries if entry.token_count == 256],
        )
        assert third.blocks_reused == 2
        assert again.forget(OTHER_URI).ok
        # of the fork's own tokens the second span is needed by the third, the rest by nobody
        assert found_in(store_path, token_ids(256, 256, 9)[:64]) != []
        assert found_in(store_path, token_ids(512, 188, 9)[:64], OTHER_URI.name.encode()) == []
        assert again.forget(THIRD).ok
        assert found_in(store_path, token_ids(256, 256, 9)[:64], token_ids(512, 88, 3)[:64]) == []
        assert again.verify(deep=True).ok


def test_a_session_deleted_before_can_still_be_forgotten(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    fork(store, 600, secret)
    store.delete_session(SECRET)
    assert found_in(store_path, TEXT.encode()) != []
    report = store.forget(SECRET)
    assert (report.ok, [action.session for action in report.actions]) == (True, [SECRET, OTHER_URI])
    assert found_in(store_path, *traces(from_token=512)) == []
    require_forked(store, 600, 512)
    with pytest.raises(SessionNotFound, match="Nothing of it"):
        store.forget(SECRET)


def test_a_name_that_nothing_has_is_not_found(store: Store) -> None:
    sleep_secret(store, 300)
    with pytest.raises(SessionNotFound, match="Did you mean"):
        store.forget(SessionUri("private", "zyx-secret-sesion"))
    assert store.find_session(SECRET) is not None


def figures_of(report: MaintenanceReport) -> tuple[object, ...]:
    """What a report counts: each action and its bytes, and the sums; not the paths, whose endings change."""
    actions = sorted((one.kind, str(one.session), one.size_bytes) for one in report.actions)
    return actions, report.bytes_freed, report.bytes_written


def share_a_part(store: Store) -> None:
    fork(store, 600, sleep_secret(store, 700))


def share_every_block(store: Store) -> None:
    sleep_secret(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=7)


def be_adopted(store: Store) -> None:
    """Its frames lie in the live file of another session, too."""
    secret = sleep_secret(store, 300)
    adopt(store, sleep(store, 300, uri=OTHER_URI, seed=1), secret)


SHAPES = {
    share_a_part: ([("strip", SECRET), ("keep", OTHER_URI)], {"from_token": 512}),
    share_every_block: ([("strip", SECRET), ("keep", OTHER_URI)], {"tokens": 0}),
    be_adopted: ([("remove", SECRET), ("strip", None)], {"tokens": 300}),
}


@pytest.mark.parametrize(("shape", "actions", "gone"), [(shape, *rest) for shape, rest in SHAPES.items()])
def test_a_dry_run_counts_to_the_byte_what_a_strip_writes_and_frees_and_changes_nothing(
    store: Store, store_path: Path, shape: Callable[[Store], None], actions: list[object], gone: dict[str, int]
) -> None:
    def held() -> dict[Path, tuple[int, int]]:
        return {file: (file.stat().st_ino, file.stat().st_size) for file in store_path.rglob("*.mv?")}

    shape(store)
    before = held()
    with Store.open(store_path, writable=False) as reader:
        planned = reader.forget(SECRET, dry_run=True)
        with pytest.raises(ReadOnlyStore):
            reader.forget(SECRET)
    assert held() == before
    done = store.forget(SECRET)
    assert [(action.kind, action.session) for action in done.actions] == actions
    assert figures_of(planned) == figures_of(done)
    assert found_in(store_path, *traces(**gone)) == []
    assert store.verify(deep=True).ok
    freed = sum(size for _, size in before.values()) - sum(size for _, size in held().values())
    assert freed == done.bytes_freed - done.bytes_written < done.bytes_freed


def test_what_somebody_has_open_is_reported_and_goes_when_it_is_asked_for_again(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    fork(store, 600, secret)
    with store.open_session(SECRET) as reader:
        report = store.forget(SECRET)
        assert [finding.code for finding in report.problems] == ["still_open"]
        assert store.find_session(SECRET) is None
        assert contents(reader) == expected(700, seed=7)
    assert store.forget(SECRET).ok
    assert found_in(store_path, *traces(from_token=512)) == []


def test_a_file_that_nobody_needs_goes_when_its_last_reader_closes(store: Store, store_path: Path) -> None:
    sleep_secret(store, 300)
    with store.open_session(SECRET):
        assert [finding.code for finding in store.forget(SECRET).problems] == ["still_open"]
    assert found_in(store_path, *traces(tokens=300)) == []


def test_leftovers_handed_over_and_quarantined_files_of_it_go(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 300)
    other = sleep(store, 300, uri=OTHER_URI, seed=1)
    for folder in ("incoming", "quarantine"):
        (store_path / folder).mkdir(0o700, exist_ok=True)
        for receipt in (secret, other):
            name = f"{receipt.bundle_id.hex()}.mvb" + (".1" if folder == "quarantine" else "")
            shutil.copy(bundle_path(store, receipt.bundle_id), store_path / folder / name)
            (store_path / folder / name).chmod(0o600)
    leftover = store_path / "bundles" / "0123456789abcdef.tmp"
    leftover.write_bytes(bundle_path(store, secret.bundle_id).read_bytes()[:-100])
    assert store.forget(SECRET).ok
    assert found_in(store_path, *traces(tokens=300)) == []
    assert len(list(store_path.rglob(f"{other.bundle_id.hex()}*"))) == 3


def test_a_temporary_file_that_went_at_the_opening_is_gone_for_good_once_its_session_is_forgotten(
    store: Store, store_path: Path
) -> None:
    secret = sleep_secret(store, 300)
    shutil.copy(bundle_path(store, secret.bundle_id), store_path / "bundles" / "0123456789abcdef.tmp")
    with reopened(store) as again:
        assert again.opening.leftovers_removed == 1
        with mock.patch.object(durable, "sync_folder", side_effect=durable.sync_folder) as flushed:
            assert again.forget(SECRET).ok
    assert str(store_path / "bundles") in [call.args[1] for call in flushed.call_args_list]


def test_what_cannot_be_told_is_reported_and_left(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 300)
    torn = store_path / "quarantine" / f"{secret.bundle_id.hex()}.mvb.1"
    put(torn, bundle_path(store, secret.bundle_id).read_bytes()[:-1])
    old_marks = store_path / "quarantine" / "marks.json.1"
    old_marks.write_text(f'{{"{SECRET}": broken')
    old_marks.chmod(0o600)
    note = store_path / "quarantine" / "note.txt"  # which may be anything, in any encoding
    note.write_text("nothing of interest")
    other = sleep(store, 300, uri=OTHER_URI, seed=1)
    adopt(store, other, secret)
    moved = store_path / "quarantine" / f"{other.bundle_id.hex()}.mvb.1"  # of another session, with frames of this one
    shutil.copy(bundle_path(store, other.bundle_id), moved)
    moved.chmod(0o600)
    report = store.forget(SECRET)
    torn = torn.with_name(f"{secret.bundle_id.hex()}.mvr.1")  # of no version any more
    assert sorted((finding.path, finding.code) for finding in report.problems) == sorted(
        (str(path), "cannot_be_told") for path in (torn, old_marks, note, moved)
    )
    assert moved.exists()
    assert torn.exists()
    assert old_marks.exists()


def linked(path: Path) -> None:
    os.link(path, path.parent.parent.parent / "a backup made with cp -al")


def unreadable(path: Path) -> None:
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads it all the same
        linked(path)


def in_a_folder(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.mkdir(0o700)
    path.with_name("moved").rename(path / "inside")


def a_link(path: Path) -> None:
    elsewhere = path.parent.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def left_as_it_is(path: Path) -> None:
    del path


@pytest.mark.parametrize(
    ("place", "change", "code"),
    [
        ("quarantine/{id}.mvb.1", linked, "cannot_be_told"),
        ("quarantine/{id}.mvb.1", unreadable, "cannot_be_told"),
        ("quarantine/{id}.mvb.1", in_a_folder, "cannot_be_told"),
        ("quarantine/{id}.mvb.1", a_link, "cannot_be_told"),
        ("incoming/{id}.mvb", linked, "cannot_be_told"),
        ("incoming/0123456789abcdef.tmp", in_a_folder, "cannot_be_told"),
        ("bundles/copy.mvb", left_as_it_is, "not_forgotten"),
        ("bundles/copy.mvb", linked, "cannot_be_told"),
        ("bundles/0123456789abcdef.tmp", in_a_folder, "cannot_be_told"),
        ("bundles/{other}/{id}.mvb", left_as_it_is, "not_forgotten"),
        ("bundles/00/inside", in_a_folder, "cannot_be_told"),
        ("old.mvb", left_as_it_is, "not_forgotten"),
        ("old.mvb", a_link, "cannot_be_told"),
        ("backups", in_a_folder, "cannot_be_told"),
        ("index.sqlite-journal", left_as_it_is, "not_forgotten"),
        ("rewrites.7", left_as_it_is, "not_forgotten"),
    ],
)
def test_whatever_lies_in_the_store_s_folder_and_may_hold_it_is_told(
    store: Store, store_path: Path, place: str, change: Callable[[Path], None], code: str
) -> None:
    secret = sleep_secret(store, 300)
    other = "01" if secret.bundle_id.hex().startswith("00") else "00"
    path = store_path / place.format(id=secret.bundle_id.hex(), other=other)
    path.parent.mkdir(0o700, exist_ok=True)
    shutil.copy(bundle_path(store, secret.bundle_id), path)
    path.chmod(0o600)
    change(path)
    for dry_run in (True, False):
        report = store.forget(SECRET, dry_run=dry_run)
        assert [(finding.path, finding.code) for finding in report.problems] == [(str(path), code)]
        assert str(path) in report.problems[0].message
        assert path.exists()


def test_a_retired_file_behind_a_live_one_is_looked_into(store: Store) -> None:
    secret = sleep_secret(store, 300)
    other, third = sleep(store, 300, uri=OTHER_URI, seed=1), sleep(store, 300, uri=THIRD, seed=2)
    adopt(store, other, secret)
    hidden = []
    for receipt in (other, third):
        path = bundle_path(store, receipt.bundle_id)
        shutil.copy(path, path.with_suffix(".mvr"))
        path.with_suffix(".mvr").chmod(0o600)
        hidden.append(str(path.with_suffix(".mvr")))
    report = store.forget(SECRET)
    assert [(finding.path, finding.code) for finding in report.problems] == [(hidden[0], "cannot_be_told")]


def test_a_folder_of_the_store_that_others_may_write_is_told(store: Store, store_path: Path) -> None:
    sleep_secret(store, 300)
    (store_path / "quarantine").chmod(0o777)
    report = store.forget(SECRET)
    assert [(finding.path, finding.code) for finding in report.problems] == [
        (str(store_path / "quarantine"), "cannot_be_told")
    ]
    assert found_in(store_path, *traces(tokens=300)) == []


def test_what_is_empty_or_another_session_s_own_is_no_problem(store: Store, store_path: Path) -> None:
    sleep_secret(store, 300)
    other = sleep(store, 300, uri=OTHER_URI, seed=1)
    shutil.copy(bundle_path(store, other.bundle_id), store_path / "exported.mvb")
    (store_path / "exported.mvb").chmod(0o600)
    (store_path / "empty").touch()
    (store_path / "quarantine" / "empty").mkdir(0o700)
    assert store.forget(SECRET).problems == ()


def test_while_a_bundle_cannot_be_read_what_it_may_need_stays_and_the_report_says_so(
    store: Store, store_path: Path
) -> None:
    secret = sleep_secret(store, 700)
    file = bundle_path(store, fork(store, 600, secret).bundle_id)
    good = file.read_bytes()
    file.write_bytes(good[:-1])  # while the store is open: the index believes in it
    report = store.forget(SECRET)
    assert [finding.code for finding in report.problems] == ["unreadable_bundle"]
    file.write_bytes(good)
    require_forked(store, 600, 512)
    assert store.forget(SECRET).ok
    require_forked(store, 600, 512)
    assert found_in(store_path, *traces(from_token=512)) == []


@pytest.mark.parametrize("at", [1, 2, 3, 5])  # the fourth is within the third
def test_a_sleep_that_comes_to_need_a_frame_meanwhile_keeps_it(store: Store, at: int) -> None:
    """A surplus frame of a live file is found by its id, and referred to, between any two changes of a forget."""
    secret = sleep_secret(store, 300)
    adopt(store, sleep(store, 300, uri=OTHER_URI, seed=1), secret)
    with meanwhile(StoreCore, "committing", lambda: write(store, drafts(300, seed=7), 300, uri=THIRD), at=at):
        store.forget(SECRET)
    require_awake(store, 300, uri=THIRD, seed=7)
    assert store.verify(deep=True).ok


def test_no_room_to_strip_is_reported_and_everything_else_goes(store: Store, store_path: Path) -> None:
    secret = sleep_secret(store, 700)
    fork(store, 600, secret)
    sleep_secret(store, 300, seed=8)
    with mock.patch.object(Temps, "new", side_effect=NoSpace("No room.")):
        report = store.forget(SECRET)
    assert [finding.code for finding in report.problems] == ["no_space"]
    assert store.find_session(SECRET) is None
    assert store.forget(SECRET).ok
    assert found_in(store_path, *traces(from_token=512)) == []


def test_an_index_that_cannot_be_written_anew_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_secret(store, 300)
    monkeypatch.setattr(Index, "erase_dropped", mock.Mock(side_effect=NoSpace("No room.")))
    assert [finding.code for finding in store.forget(SECRET).problems] == ["no_space"]


# --- what comes while a session is being forgotten


class Halfway:
    """A piece of work in another thread that waits in its midst, with all its bytes written, until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Receipt]) -> None:
        self._there, self._go = threading.Event(), threading.Event()
        self._receipts: list[Receipt] = []
        self._thread = threading.Thread(target=lambda: self._receipts.append(work()))
        real = BundleWriter.finish

        def finish(writer: BundleWriter, *arguments: Any) -> Any:
            done = real(writer, *arguments)
            if threading.current_thread() is self._thread:
                self._there.set()
                assert self._go.wait(30)
            return done

        monkeypatch.setattr(BundleWriter, "finish", finish)
        self._thread.start()
        assert self._there.wait(30)

    def go_on(self) -> Receipt:
        self._go.set()
        self._thread.join()
        return self._receipts[0]


@pytest.mark.parametrize(
    ("what", "known"),
    [("sleep", True), ("sleep", False), ("import", False)],
    ids=["more of it", "all of it", "all of it, imported"],
)
def test_a_version_that_is_being_written_is_told_and_not_lost(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, known: bool
) -> None:
    exported = store_path.parent / "secret.mvb"
    with Store.open(store_path.parent / "elsewhere", writable=True) as elsewhere:
        sleep_secret(elsewhere, 600)
        elsewhere.export_session(SECRET, None, exported)
    if known:
        sleep_secret(store, 300, seed=8)
    work = (lambda: sleep_secret(store, 600)) if what == "sleep" else (lambda: store.import_file(exported))
    halfway = Halfway(monkeypatch, work)
    dry, report = store.forget(SECRET, dry_run=True), store.forget(SECRET)
    for one in (dry, report):
        assert [problem.code for problem in one.problems] == ["still_open"]
        assert "is being written" in one.problems[0].message
    receipt = halfway.go_on()
    assert [row.bundle_id for row in store.versions(SECRET)] == [receipt.bundle_id]
    assert store.verify(deep=True).ok
    assert store.forget(SECRET).problems == ()
    assert found_in(store_path, *traces()) == []


def test_a_version_that_came_after_the_last_look_is_told(store: Store, store_path: Path) -> None:
    sleep_secret(store, 600)
    with meanwhile(Index, "erase_dropped", lambda: sleep_secret(store, 300), after=True):
        report = store.forget(SECRET)
    (row,) = store.versions(SECRET)
    assert [(one.code, one.path) for one in report.problems] == [
        ("not_forgotten", str(bundle_path(store, row.bundle_id)))
    ]
    assert store.forget(SECRET).problems == ()
    assert found_in(store_path, *traces()) == []


def test_a_fork_whose_file_is_missing_is_told_with_what_to_do(store: Store, store_path: Path) -> None:
    """Nobody knows which blocks it looks for: all stay, for as long as its file may come back."""
    first = sleep_secret(store, 600)
    second = sleep_secret(store, 700, before=first)
    lost = bundle_path(store, fork(store, 800, second).bundle_id)
    store.close()
    data = lost.read_bytes()
    lost.unlink()
    with Store.open(store_path, writable=True) as again:
        with Store.open(store_path, writable=False) as reader:
            planned = reader.forget(SECRET, dry_run=True)
        report = again.forget(SECRET)
        for one in (planned, report):
            assert [problem.code for problem in one.problems] == ["cannot_be_told"]
            assert str(lost) in one.problems[0].message
            assert f"version 1 of {OTHER_URI}" in one.problems[0].message
            assert not any(
                action.path.startswith(str(bundle_path(again, first.bundle_id))[:-1]) for action in one.actions
            )
        assert [problem.code for problem in again.forget(SECRET).problems] == ["cannot_be_told"]
    lost.write_bytes(data)
    with Store.open(store_path, writable=True) as again:
        require_forked(again, 800, 512)
        assert again.forget(SECRET).problems == ()
        assert found_in(store_path, TEXT.encode(), SECRET.name.encode(), payload(512, 188)) == []
        require_forked(again, 800, 512)
    lost.unlink()
    with Store.open(store_path, writable=True) as again:
        again.delete_session(OTHER_URI)
        assert found_in(store_path, *traces()) == []


@pytest.mark.parametrize("at", range(1, 4))
def test_a_fork_that_is_deleted_during_the_look_is_no_problem(store: Store, store_path: Path, at: int) -> None:
    fork(store, 800, sleep_secret(store, 600))
    with meanwhile(Index, "users_of", lambda: store.delete_session(OTHER_URI), at=at, after=True):
        assert store.forget(SECRET).problems == ()
    assert found_in(store_path, *traces()) == []


# --- what other sessions' versions need that repair has set aside


def export(store: Store, uri: SessionUri, path: Path) -> Path:
    store.export_session(uri, None, path)
    return path


def require_kept_for_another(store: Store, path: Path) -> None:
    """A file in quarantine that a forget leaves, and why."""
    for dry_run in (True, False):
        report = store.forget(SECRET, dry_run=dry_run)
        found = {problem.path: problem for problem in report.problems}
        (kept,) = (one for one in found if one.startswith(f"{store.path}/quarantine/{path.name.partition('.')[0]}"))
        assert found[kept].code == "not_forgotten"
        assert "torpor gc --quarantine" in found[kept].message
        assert Path(kept).exists()


def test_what_a_version_of_another_session_needs_that_is_set_aside_stays_in_quarantine(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    secret = sleep(store, 800, uri=SECRET)
    sleep(store, 600, uri=THIRD)
    elsewhere = export(store, THIRD, tmp_path / "third.mvb")
    store.delete_session(THIRD)
    sleep(store, 1100, uri=OTHER_URI)
    spoil(store, secret, 1)  # which all three have: there is only this copy
    store.repair()
    require_kept_for_another(store, bundle_path(store, secret.bundle_id))
    store.import_file(elsewhere, as_uri=THIRD)
    store.repair()
    with store.open_session(OTHER_URI, 1) as reader:
        assert contents(reader) == expected(1100)
    store.empty_quarantine()
    with contextlib.suppress(SessionNotFound):  # it may have been all that was left
        assert store.forget(SECRET).ok
    assert found_in(store_path, SECRET.name.encode()) == []
    assert store.verify(deep=True).ok


def test_blocks_in_quarantine_stay_for_a_version_that_is_set_aside_and_looks_for_them_elsewhere(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "elsewhere", writable=True) as other:
        secret = sleep(other, 800, uri=SECRET)
        earlier = store_path / "quarantine" / f"{secret.bundle_id.hex()}.mvb.1"
        export(other, SECRET, earlier).chmod(0o600)
    whole = sleep(store, 1100, uri=OTHER_URI)
    copy = export(store, OTHER_URI, tmp_path / "whole.mvb")
    spoil(store, whole, 1, 3)  # the one lies in quarantine, the other nowhere
    store.repair()
    assert list(store.index.given_up()) == [whole.bundle_id]
    require_kept_for_another(store, earlier)
    store.import_file(copy, as_uri=THIRD)
    store.repair()
    require_awake(store, 1100, uri=OTHER_URI)


def test_a_missing_version_that_is_set_aside_keeps_what_the_index_says_that_it_needs(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    secret = sleep(store, 800, uri=SECRET)
    heir = sleep(store, 1100, uri=OTHER_URI)
    file = bundle_path(store, heir.bundle_id)
    file.rename(tmp_path / "away")
    spoil(store, secret, 2)
    store.repair()
    require_kept_for_another(store, bundle_path(store, secret.bundle_id))
    store.empty_quarantine()
    assert store.index.given_up() == {}
    with contextlib.suppress(SessionNotFound):
        assert store.forget(SECRET).ok
    assert found_in(store_path, SECRET.name.encode()) == []


def test_a_session_of_which_all_is_set_aside_can_be_forgotten(store: Store) -> None:
    secret = sleep_secret(store, 300)
    store.tag(SECRET, 1, "hush")
    spoil(store, secret, 0)
    store.repair()
    assert (store.find_session(SECRET), len(store.index.given_up())) == (None, 1)
    report = store.forget(SECRET)
    assert [problem.code for problem in report.problems] == ["cannot_be_told"] * len(report.problems)
    assert store.index.bundles_of(SECRET) == []
    assert not store.marks(SECRET)


# --- what has no file, and what marks and store.json keep


@pytest.mark.parametrize("missed", [True, False])
def test_a_version_without_a_file_and_its_marks_are_told(store_path: Path, missed: bool) -> None:
    with Store.open(store_path, writable=True) as store:
        gone = sleep_secret(store, 300)
        sleep(store, 300, uri=OTHER_URI, seed=1)
        store.tag(SECRET, 1, "hush")
        bundle_path(store, gone.bundle_id).unlink()
    if missed:
        for file in store_path.glob("index.sqlite*"):
            file.unlink()
    with Store.open(store_path, writable=True) as store:
        assert list(store.index.missed()) == [gone.bundle_id] * missed
        reports = [store.forget(SECRET, dry_run=dry_run) for dry_run in (True, False)]
        for report in reports:
            assert [(one.kind, one.session, one.version) for one in report.actions] == [
                ("index", SECRET, 1),
                ("unmark", SECRET, None),
            ]
            assert report.bytes_freed == 0
        assert not store.marks(SECRET)
        assert store.verify(deep=True).ok


def test_a_store_file_that_repair_has_set_aside_hides_no_session(store: Store, store_path: Path) -> None:
    sleep_secret(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    file = store_path / "store.json"
    flip(file, 60)
    store.repair()
    aside = store_path / "quarantine" / "store.json.1"
    assert aside.exists()
    assert store.forget(SECRET).ok
    aside.write_text(f"what the disk made of it: {OTHER_URI}")
    (problem,) = store.forget(OTHER_URI).problems
    assert (problem.path, problem.code) == (str(aside), "cannot_be_told")


def test_marks_that_cannot_be_written_for_store_json_are_told_with_that_as_the_cause(
    store: Store, store_path: Path
) -> None:
    sleep_secret(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    store.tag(SECRET, 1, "hush")
    file = store_path / "store.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    report = store.forget(SECRET)
    (problem,) = report.problems
    assert (problem.path, problem.code) == (str(file), "corrupt_store_file")
    assert "unmark" not in {action.kind for action in report.actions}
    file.write_bytes(whole)
    assert store.forget(SECRET).ok, "as the message says"
    assert found_in(store_path, SECRET.name.encode()) == []


def test_turns_of_another_session_that_name_the_forgotten_one_are_told(store: Store) -> None:
    sleep(store, 300)
    named = turn(store, 5, uri=OTHER_URI)
    store.acknowledge([replace(named, session={**named.session, "forked_from": {"uri": str(URI)}})])
    told = [action for action in store.forget(URI, dry_run=True).actions if action.session == OTHER_URI]
    assert [(action.kind, action.path) for action in told] == [("keep", f"{store.path}/journal/turns.mvj")]
    told = [action for action in store.forget(URI).actions if action.session == OTHER_URI]
    assert [(action.kind, action.version) for action in told] == [("keep", None)]
