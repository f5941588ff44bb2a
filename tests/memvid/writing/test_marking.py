"""Tags, pins and references to versions, as a store answers them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.access.sessions import Named
from torpor.memvid.errors import (
    PUT_BACK,
    AmbiguousVersion,
    BundleMissing,
    CorruptMarks,
    InvalidUri,
    MarkNotFound,
    NoSpace,
    SessionNotFound,
)
from torpor.memvid.folder import marks
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.marks import Marks, SessionMarks
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.repack_plan import CLEARING
from torpor.memvid.operations import set_mark
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, id_of, manifest_path, names, put, refusing, reopened, sleep


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


def test_without_a_version_the_newest_one_is_marked(three: Store) -> None:
    assert three.tag(URI, None, "now").version == 3
    assert three.pin(URI, None).version == 3
    assert three.marks(URI).pins == {three.versions(URI)[2].bundle_id}
    three.unpin(URI, id_of(three, URI, 3))
    assert not three.marks(URI).pins
    with pytest.raises(MarkNotFound):
        three.unpin(URI, id_of(three, URI, 3))


def test_what_is_not_there_cannot_be_marked(three: Store) -> None:
    for mark in (lambda: three.tag(URI, 9, "x"), lambda: three.pin(OTHER_URI, None)):
        with pytest.raises(SessionNotFound):
            mark()
    with pytest.raises(MarkNotFound):
        three.untag(URI, "never")


def test_a_reference_means_one_version(three: Store) -> None:
    second = three.versions(URI)[1]
    for text in ("agent@2", "default/agent@2", "torpor://default/agent@2", f"agent@{second.bundle_id[:8]}"):
        assert three.resolve_version(text) == second
    assert three.resolve_version("agent").version == 3
    for text in ("agent@4", "nobody", "nobody@1", "nobody~1", "00000000", "@00000000"):
        with pytest.raises(SessionNotFound):
            three.resolve_version(text)
    with pytest.raises(InvalidUri, match="only a whole version can be taken here: agent@2"):
        three.resolve_version("agent@2:5")
    assert three.named("agent@2:5") == Named("agent@2:5", URI, second, 5)
    assert three.named("agent:5") == Named("agent:5", URI, None, 5)


def test_a_version_is_named_by_how_many_are_before_another_along_the_parents(store: Store) -> None:
    """Not by number: a session that went on from an earlier version has others before it."""
    first = sleep(store, 20)
    sleep(store, 40, before=first)
    third = sleep(store, 30, before=first)
    fork = sleep(store, 30, uri=OTHER_URI, before=third)
    elsewhere = sleep(store, 30, uri=SessionUri("work", "agent"), before=fork)
    store.tag(URI, 2, "left")
    steps = {"agent~0": 3, "agent~": 1, "agent~1": 1, "agent@2~1": 1, "agent@left~": 1, f"{third.bundle_id[:9]}~1": 1}
    assert {text: store.resolve_version(text).version for text in steps} == steps
    assert store.resolve_version(f"{OTHER_URI}~1", look=True).bundle_id == third.bundle_id
    assert store.resolve_version(f"{OTHER_URI}~2", look=True) == store.resolve_version("agent@1")
    for find in (store.resolve_version, store.named, store.resolve_pinned):  # for who changes what is named
        with pytest.raises(InvalidUri, match=f"^{OTHER_URI}~2 is {URI}@1; name it so\\.$"):
            find(f"{OTHER_URI}~2")
    with pytest.raises(SessionNotFound, match="no version 2 before version 3: there is only 1 before it"):
        store.resolve_version("agent~2")
    with pytest.raises(SessionNotFound, match="there is none before it") as refused:
        store.resolve_version("work/agent~1")  # who may name `work` alone is told nothing of `default`
    assert str(OTHER_URI) not in refused.value.message
    store.delete_version(URI, first.bundle_id)
    with pytest.raises(SessionNotFound, match="has lost what was before that"):
        store.resolve_version("agent~1")
    assert store.resolve_version("work/agent").bundle_id == elsewhere.bundle_id


def test_steps_back_go_on_where_a_version_between_is_gone(store: Store) -> None:
    """As a log has it. A daemon's stand-in goes by itself."""
    first = sleep(store, 200)
    second = sleep(store, 210, before=first)
    third = sleep(store, 220, before=second)
    sleep(store, 230, before=third)
    store.delete_version(URI, 2)
    store.delete_version(URI, 3)
    assert store.resolve_version("agent~1").version == 1
    with pytest.raises(SessionNotFound, match="no version 2 before version 4: there is only 1 before it"):
        store.resolve_version("agent~2")


def test_digits_of_an_id_alone_name_its_version_unless_a_session_is_called_so(three: Store) -> None:
    second = three.versions(URI)[1]
    digits = second.bundle_id[:8]
    for text in (digits, f"@{digits.upper()}", f"default/{digits}", f"torpor://default/@{digits}"):
        assert three.named(text) == Named(text, URI, second, None)
        assert three.session_of(text) == URI
    for text in (f"work/{digits}", f"work/@{digits}"):
        with pytest.raises(SessionNotFound, match="of work whose bundle id begins with"):
            three.named(text)
    called = sleep(three, 10, uri=SessionUri("default", digits))
    assert three.resolve_version(digits).bundle_id == called.bundle_id
    assert three.resolve_version(f"@{digits}") == second
    ids = [row.bundle_id for row in three.versions(URI)]
    three.index.add_all(replace(row, bundle_id=f"{digits}{row.bundle_id[8:]}") for row in three.versions(URI))
    with pytest.raises(AmbiguousVersion, match=f"{digits} begins the ids of several versions") as refused:
        three.resolve_version(f"@{digits}")
    assert refused.value.details["candidates"] == sorted(f"{URI}@{digits}{each[8:]}" for each in ids)


def test_a_read_only_store_reads_marks_anew_each_time(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    with Store.open(store_path, writable=False) as reader:
        three.tag(URI, 2, "second")
        assert sorted(reader.marks(URI).tags) == ["first", "second"]
        assert reader.resolve_version("agent@second").version == 2


NEED_MARKS: dict[str, Callable[[Store], object]] = {
    "what is marked": lambda store: store.marks(URI),
    "a tag's version": lambda store: store.resolve_version("agent@first"),
    "tag": lambda store: store.tag(URI, 3, "third"),
    "untag": lambda store: store.untag(URI, "first"),
    "pin": lambda store: store.pin(URI, 3),
    "prune": lambda store: store.prune(Retention(keep_last=1)),
    "a plan of it": lambda store: store.prune(Retention(keep_last=1), dry_run=True),
    "drop stand-ins": lambda store: store.drop_stand_ins(URI),
    "strip": lambda store: store.strip(URI, 1),
    "import what may be stripped": lambda store: store.import_file(f"{store.path}/../exported"),
}


@pytest.mark.parametrize("how", ["damaged", "lost"])
@pytest.mark.parametrize("ask", NEED_MARKS.values(), ids=NEED_MARKS)
def test_without_marks_what_needs_them_is_refused_and_nothing_goes(
    three: Store, store_path: Path, ask: Callable[[Store], object], how: str
) -> None:
    """They are not none. What is there may be stripped by them: then the next repack would let go of what an import has
    brought, once they are put back."""
    sleep(three, 40, unread=3)
    three.tag(URI, 1, "first")
    three.export_session(URI, 3, store_path.parent / "exported")
    three.strip(URI, 3)
    marks, before = store_path / "marks.json", names(store_path)
    good = marks.read_bytes()
    marks.write_bytes(b"{}") if how == "damaged" else marks.unlink()
    refusal = (CorruptMarks, "torpor repair") if how == "damaged" else (errors.MarksLost, "--move")
    with pytest.raises(refusal[0], match=refusal[1]):
        ask(three)
    three.repack(policy=CLEARING)
    assert names(store_path) == before
    assert three.resolve_version("agent@2").version == 2
    assert three.resolve_version("agent").version == 4
    making.require_awake(three, 10, version=1)
    put(marks, good)
    assert set(three.marks(URI).tags) == {"first"}


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_without_marks_a_session_can_be_deleted(three: Store, store_path: Path, how: str) -> None:
    (store_path / "marks.json").write_bytes(b"{}") if how == "damaged" else (store_path / "marks.json").unlink()
    assert three.delete_session(URI).problems == ()
    assert names(store_path) == set()


def test_lost_marks_are_none_once_somebody_says_so(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    (store_path / "marks.json").unlink()
    three.tag(URI, 2, "third", move=True)
    three.prune(Retention(keep_last=1))
    assert [row.version for row in three.versions(URI)] == [2, 3]


def test_a_deleted_session_s_marks_do_not_come_back_with_its_name(three: Store) -> None:
    three.tag(URI, 1, "first")
    three.pin(URI, 2)
    sleep(three, 5, uri=OTHER_URI)
    three.tag(OTHER_URI, 1, "first")
    three.delete_session(URI)
    sleep(three, 10)
    assert not three.marks(URI)
    assert sorted(three.marks(OTHER_URI).tags) == ["first"]


def test_a_tag_whose_version_was_lost_says_so(three: Store, store_path: Path) -> None:
    three.tag(URI, 1, "first")
    manifest_path(three, three.versions(URI)[0].bundle_id).unlink()
    with reopened(three, anew=True) as again, pytest.raises(SessionNotFound, match="names the bundle"):
        again.resolve_version("agent@first")


# --- a tag or a pin whose version is missing


def lose(store: Store, version: int) -> tuple[Path, Path]:
    """Take the manifest of a version away, and the index with all that it tells; where it was and where it is."""
    file = manifest_path(store, id_of(store, URI, version))
    store.close()
    return file, file.rename(Path(store.path).parent / "away")


@pytest.mark.parametrize("how", ["always", "from the second look on"])
def test_while_the_system_does_not_read_the_marks_no_pack_goes(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A tag may tell of a version that is missing with the index."""
    receipt, real, refuse = sleep(store), marks.stat_name, refusing(errors.StoreIoError("EMFILE"))
    store.tag(URI, 1, "good")
    manifest = manifest_path(store, receipt.bundle_id)
    good = manifest.read_bytes()
    manifest.unlink()
    with reopened(store, anew=True) as again:
        looks = itertools.count(how == "always")
        monkeypatch.setattr(marks, "stat_name", lambda *args: refuse() if next(looks) else real(*args))
        report = again.repack()
        monkeypatch.undo()
        assert [finding.code for finding in report.problems] == ["store_io" if how == "always" else "bundle_missing"]
        put(manifest, good)
        again._core.look_again()
        making.require_awake(again, 300)


def test_a_tag_and_a_pin_of_a_missing_version_are_taken_away(three: Store) -> None:
    three.tag(URI, 2, "good")
    three.pin(URI, 3)
    second, third = id_of(three, URI, 2), id_of(three, URI, 3)
    manifest_path(three, second).unlink()
    lose(three, 3)
    with reopened(three, anew=True) as store:
        assert len(store.opening.unreadable) == 2
        with pytest.raises(SessionNotFound):
            set_mark(store, f"agent@{'0' * 12}", pinned=False)
        with pytest.raises(SessionNotFound):
            set_mark(store, "agent@7", pinned=False)
        freed = set_mark(store, f"agent@{third[:12]}", pinned=False)
        assert (freed.bundle_id, freed.version, freed.pinned) == (third, None, False)
        assert set_mark(store, "agent", untag="good").bundle_id == second
        assert store.verify(deep=True).findings == ()
        assert store.repack(policy=CLEARING).problems == ()


def test_a_session_of_which_only_a_tag_is_left_says_so_and_can_be_deleted(store: Store) -> None:
    sleep(store)
    store.tag(URI, 1, "good")
    lose(store, 1)
    with reopened(store, anew=True) as store:
        with pytest.raises(SessionNotFound, match=r"manifest of a version .* is missing: the tag good still names it"):
            store.open_session(URI)
        assert store.resolve("agent") == URI
        assert store.delete_session(URI).problems == ()
        assert store.marks(URI) == SessionMarks()
    with reopened(store, anew=True) as store:
        assert store.opening.unreadable == ()


def test_tags_and_pins_go_before_their_versions_and_strips_behind_them(three: Store) -> None:
    for version in (1, 2, 3):
        three.tag(URI, version, f"t{version}")
        three.pin(URI, version)
        three.strip(URI, version)
    real, seen = StoreFolder.remove, []

    def remove(folder: StoreFolder, name: str, **how: bool) -> int:
        if name.startswith("versions/"):
            of = Marks.load(folder).of(name[9:73])
            seen.append((of.tags, of.pinned, of.stripped))
        return real(folder, name, **how)

    with mock.patch.object(StoreFolder, "remove", remove):
        three.delete_version(URI, 1)
        assert Marks.load(three._core.folder).bundle_ids == {row.bundle_id for row in three.versions(URI)}
        three.delete_session(URI)
    assert seen == [((), False, True)] * 3
    assert Marks.load(three._core.folder) == Marks(three.uuid)


def test_without_room_for_other_marks_a_delete_takes_its_own_last(three: Store) -> None:
    three.pin(URI, 3)
    packs = Path(three.path, "packs")
    real, full = Marks.save, [True]

    def save(marks: Marks, folder: StoreFolder) -> int:
        if full[0]:
            raise NoSpace("The disk is full.", path=folder.path)
        return real(marks, folder)

    def remove(core: StoreCore, names: Iterable[str]) -> dict[str, int]:
        full[0] = False
        return removed(core, names)

    removed = StoreCore.remove_packs
    with mock.patch.object(Marks, "save", save), mock.patch.object(StoreCore, "remove_packs", remove):
        assert three.delete_session(URI).problems == ()
    assert not full[0]
    assert list(packs.iterdir()) == []
    assert Marks.load(three._core.folder) == Marks(three.uuid)


def test_a_delete_whose_tags_find_no_room_at_all_says_so_and_goes_on(three: Store) -> None:
    three.tag(URI, 3, "good")
    with mock.patch.object(Marks, "save", refusing(NoSpace("The disk is full.", path=three.path))):
        (told,) = three.delete_version(URI, 3).problems
        assert (told.path, told.code) == (f"{three.path}/marks.json", "no_space")
        assert "torpor untag" in told.message
        assert len([*Path(three.path, "packs").iterdir()]) == 2, "its packs went all the same"
    assert three.delete_version(URI, 2).problems == ()
    assert Marks.load(three._core.folder) == Marks(three.uuid), "the next delete takes them"
