"""Tags, pins and references to versions, as a store answers them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.errors import (
    PUT_BACK,
    BundleMissing,
    CorruptMarks,
    MarkNotFound,
    MarksLost,
    NoSpace,
    ReadOnlyStore,
    SessionNotFound,
    TagTaken,
)
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.retention import Retention
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import OTHER_URI, URI, manifest_path, refusing, reopened, sleep


@pytest.fixture
def three(store: Store) -> Store:
    for tokens in (10, 20, 30):
        sleep(store, tokens)
    return store


def test_a_tag_names_a_version_until_it_is_taken_away(three: Store) -> None:
    assert three.tag(URI, 2, "before-refactor").token_count == 20
    with reopened(three) as again:
        assert again.resolve_version("agent@before-refactor").version == 2
        assert again.marks(URI).tags == {"before-refactor": again.versions(URI)[1].bundle_id}
        again.untag(URI, "before-refactor")
        assert not again.marks(URI)
        with pytest.raises(SessionNotFound):
            again.resolve_version("agent@before-refactor")


@pytest.mark.parametrize("move", [False, True])
def test_a_version_without_a_file_is_given_no_mark(three: Store, store_path: Path, move: bool) -> None:
    three.tag(URI, 1, "good")
    row = three.versions(URI)[2]
    file = manifest_path(three, row.bundle_id)
    away = file.rename(store_path.parent / "away")
    for mark in (lambda: three.tag(URI, None, "good", move=move), lambda: three.pin(URI, 3)):
        with pytest.raises(BundleMissing) as refused:
            mark()
        assert refused.value.details["path"] == str(file)
        assert "Version 3 of torpor://default/agent has no manifest" in refused.value.message
        assert PUT_BACK in refused.value.message
    assert three.marks(URI).tags == {"good": three.versions(URI)[0].bundle_id}
    assert not three.marks(URI).pins
    away.rename(file)
    three.tag(URI, 3, "good", move=True)
    three.pin(URI, 3)


def test_a_tag_moves_only_on_purpose(three: Store) -> None:
    three.tag(URI, 1, "good")
    with pytest.raises(TagTaken):
        three.tag(URI, 2, "good")
    assert three.resolve_version("agent@good").version == 1
    three.tag(URI, 2, "good", move=True)
    assert three.resolve_version("agent@good").version == 2


def test_without_a_version_the_newest_one_is_marked(three: Store) -> None:
    assert three.tag(URI, None, "now").version == 3
    assert three.pin(URI, None).version == 3
    assert three.marks(URI).pins == {three.versions(URI)[2].bundle_id}
    three.unpin(URI, 3)
    assert not three.marks(URI).pins
    with pytest.raises(MarkNotFound):
        three.unpin(URI, 3)


def test_what_is_not_there_cannot_be_marked(three: Store) -> None:
    for mark in (lambda: three.tag(URI, 9, "x"), lambda: three.pin(OTHER_URI, None), lambda: three.unpin(URI, 9)):
        with pytest.raises(SessionNotFound):
            mark()
    with pytest.raises(MarkNotFound):
        three.untag(URI, "never")


def test_a_reference_means_one_version(three: Store) -> None:
    second = three.versions(URI)[1]
    for text in ("agent@2", "default/agent@2", "torpor://default/agent@2", f"agent@{second.bundle_id.hex()[:8]}"):
        assert three.resolve_version(text) == second
    assert three.resolve_version("agent").version == 3
    for text in ("agent@4", "nobody", "nobody@1"):
        with pytest.raises(SessionNotFound):
            three.resolve_version(text)


def test_a_read_only_store_reads_marks_and_sets_none(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    with Store.open(store_path, writable=False) as reader:
        three.tag(URI, 2, "second")  # read anew each time: nothing is remembered
        assert sorted(reader.marks(URI).tags) == ["first", "second"]
        assert reader.resolve_version("agent@second").version == 2
        for change in (
            lambda: reader.tag(URI, 1, "x"),
            lambda: reader.untag(URI, "first"),
            lambda: reader.pin(URI, 1),
            lambda: reader.unpin(URI, 1),
        ):
            with pytest.raises(ReadOnlyStore):
                change()


def test_damaged_marks_stop_what_needs_them_and_nothing_else(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    (store_path / "marks.json").write_bytes(b"{}")
    with pytest.raises(CorruptMarks):
        three.resolve_version("agent@first")
    with pytest.raises(CorruptMarks):
        three.tag(URI, 2, "second")
    assert three.resolve_version("agent@2").version == 2
    assert three.resolve_version("agent").version == 3


def test_lost_marks_are_not_none_until_somebody_says_so(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    three.pin(URI, 2)
    (store_path / "marks.json").unlink()
    for ask in (
        lambda: three.marks(URI),
        lambda: three.tag(URI, 3, "third"),
        lambda: three.pin(URI, 3),
        lambda: three.untag(URI, "first"),
        lambda: three.prune(Retention(keep_last=1)),
        lambda: three.prune(Retention(keep_last=1), dry_run=True),
    ):
        with pytest.raises(MarksLost, match="--move"):
            ask()
    assert [row.version for row in three.versions(URI)] == [1, 2, 3]
    three.tag(URI, 2, "third", move=True)
    three.prune(Retention(keep_last=1))
    assert [row.version for row in three.versions(URI)] == [2, 3]


def test_marks_that_were_all_taken_off_are_lost_too_with_their_file(three: Store, store_path: Path) -> None:
    three.pin(URI, 1)
    three.unpin(URI, 1)
    (store_path / "marks.json").unlink()
    with pytest.raises(MarksLost):
        three.marks(URI)


def test_lost_marks_stop_no_delete(three: Store, store_path: Path) -> None:
    three.pin(URI, 1)
    (store_path / "marks.json").unlink()
    assert three.delete_session(URI).problems == ()
    assert three.find_session(URI) is None


def test_a_mark_that_is_cut_off_leaves_the_marks_as_they_were(three: Store) -> None:
    three.pin(URI, 2)
    with mock.patch.object(durable, "write_file", refusing(NoSpace("The disk is full."))), pytest.raises(NoSpace):
        three.pin(URI, 1)
    assert three.marks(URI).pins == {three.versions(URI)[1].bundle_id}


def test_a_deleted_session_s_marks_do_not_come_back_with_its_name(three: Store) -> None:
    three.tag(URI, 1, "first")
    three.pin(URI, 2)
    sleep(three, 5, uri=OTHER_URI)
    three.tag(OTHER_URI, 1, "first")
    three.delete_session(URI)
    sleep(three, 10)
    assert not three.marks(URI)
    assert sorted(three.marks(OTHER_URI).tags) == ["first"]


def test_a_full_disk_keeps_no_delete_from_happening_for_the_marks(
    three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.tag(URI, 1, "first")
    full = refusing(NoSpace("No room for marks.json."))
    with monkeypatch.context() as patch:
        patch.setattr(Marks, "save", full)
        assert three.delete_session(URI).versions_deleted == 3
    assert three.find_session(URI) is None
    assert list(three.marks(URI).tags) == ["first"]  # names nothing; gc takes it away
    sleep(three, 10, seed=1)
    with pytest.raises(SessionNotFound):
        three.resolve_version("agent@first")


def test_a_mark_survives_the_loss_of_the_index(three: Store) -> None:
    three.pin(URI, 1)
    with reopened(three, anew=True) as again:
        assert again.marks(URI).pins == {again.versions(URI)[0].bundle_id}


def test_a_tag_whose_version_was_lost_says_so(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    manifest_path(three, three.versions(URI)[0].bundle_id).unlink()
    with reopened(three, anew=True) as again, pytest.raises(SessionNotFound, match="names the bundle"):
        again.resolve_version("agent@first")
