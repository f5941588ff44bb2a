"""A version whose file is damaged, away or set aside: its number is not given again, its marks and what it needs stay,
and it comes back with its file, whatever is done meanwhile (promise 1, threats 24 and 25); unless it is given up."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torpor.memvid import Receipt, SessionUri, Store, errors
from torpor.memvid.folder.retention import Retention
from torpor.memvid.format.records import MaintenanceReport
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, bundle_path, contents, expected, flip, put, sleep

BASE_URI = SessionUri("default", "base")
LAST = Retention(keep_last=1)


@dataclass(frozen=True)
class Made:
    """A closed store, with versions 1 (pinned), 4 and 5 (tagged or not) of a session. The file of the fifth, and those
    that it needs, but for their endings. A rival: an exported file of another store that says it is the fifth version
    too. And the index of before the fifth."""

    path: Path
    fifth: Receipt
    file: Path
    needed: list[Path]
    rival: Path
    earlier: dict[str, bytes]


def make(folder: Path, *, tagged: bool) -> Made:
    with Store.open(folder / "elsewhere", writable=True) as store:
        for number in range(5):
            sleep(store, 40 + number, seed=8)
        store.export_session(URI, 5, folder / "rival.mvb")
    path = folder / "store"
    with Store.open(path, writable=True) as store:
        base = sleep(store, 300, uri=BASE_URI)
        receipts = [sleep(store, 300)]
        store.pin(URI, 1)
        for tokens in (310, 320):
            sleep(store, tokens, uri=OTHER_URI, seed=3)
        for tokens in (500, 600, 700):
            receipts.append(sleep(store, tokens, before=receipts[-1]))
        store.prune(LAST, URI)
    earlier = index_files(path)
    with Store.open(path, writable=True) as store:
        receipts.append(sleep(store, 800, before=receipts[-1]))
        if tagged:
            store.tag(URI, 5, "release")
        needed = {entry.bundle_id for entry in receipts[-1].entries} - {receipts[-1].bundle_id}
        assert needed == {base.bundle_id, receipts[2].bundle_id}, "one stands, one is retired"
        files = [bundle_path(store, one).with_suffix("") for one in needed if one]
        file = bundle_path(store, receipts[-1].bundle_id)
    return Made(path, receipts[-1], file, files, folder / "rival.mvb", earlier)


def index_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("index.sqlite*")}


def put_index(path: Path, files: dict[str, bytes]) -> None:
    for name in index_files(path):
        (path / name).unlink()
    for name, data in files.items():
        put(path / name, data)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Made]:
    return {tagged: make(tmp_path_factory.mktemp("lost"), tagged=tagged) for tagged in (True, False)}


def copied(made: Made, to: Path) -> Made:
    shutil.copytree(made.path, to)
    files = [to / file.relative_to(made.path) for file in (made.file, *made.needed)]
    return replace(made, path=to, file=files[0], needed=files[1:])


def harmed(part: str) -> Callable[[Made], None]:
    def harm(made: Made) -> None:
        manifest = made.file.read_bytes().rindex(b"torpor.manifest/1")
        flip(made.file, {"header": 20, "directory": -200, "trailer": -8, "manifest": manifest}[part])

    return harm


def made_longer(made: Made) -> None:
    put(made.file, made.file.read_bytes() + b"more than it says")


def in_quarantine(part: str) -> Callable[[Made], None]:
    def move(made: Made) -> None:
        harmed(part)(made)
        made.file.rename(made.path / "quarantine" / f"{made.file.name}.1")

    return move


def set_aside(made: Made) -> None:
    """By a repair, for the head of its first frame is gone, and no other file has the block."""
    data = made.file.read_bytes()
    put(made.file, data[:64] + bytes(236) + data[300:])
    with Store.open(made.path, writable=True) as store:
        assert [problem.code for problem in store.repair().problems] == ["version_lost"]


def set_aside_and_forgotten(made: Made) -> None:
    """As `set_aside`, and the notes of what is absent are lost too."""
    set_aside(made)
    shutil.rmtree(made.path / "absent")


STATES: dict[str, Callable[[Made], None]] = {
    **{part: harmed(part) for part in ("header", "directory", "trailer", "manifest")},
    "longer": made_longer,
    "away": lambda made: made.file.unlink(),
    "trailer, in quarantine": in_quarantine("trailer"),
    "manifest, in quarantine": in_quarantine("manifest"),
    "set aside": set_aside,
    "set aside, the notes lost": set_aside_and_forgotten,
}
MENDABLE = ("header", "directory", "trailer", "longer")
INDEXES = ("lost", "kept", "of before the fifth", "of before the loss", "of before a rewrite")


def lose(made: Made, state: str, index: str) -> None:
    """What becomes of the version's file, and of the index."""
    before = index_files(made.path)
    STATES[state](made)
    if index == "lost":
        (made.path / "index.sqlite").unlink()
    elif index == "of before the fifth":
        put_index(made.path, made.earlier)
    elif index == "of before the loss":
        put_index(made.path, before)
    elif index == "of before a rewrite":
        last = index_files(made.path)
        with Store.open(made.path, writable=True) as store:
            store.index.begin_rewrite(bytes(32), ())
        put_index(made.path, last)


def import_rival(store: Store, made: Made) -> None:
    with contextlib.suppress(errors.NameTaken):
        store.import_file(made.rival)


WORK: dict[str, Callable[[Store, Made], object]] = {
    "opening": lambda store, made: None,
    "reading": lambda store, made: None,
    "gc": lambda store, made: store.gc(),
    "prune": lambda store, made: store.prune(LAST),
    "compact": lambda store, made: store.compact(),
    "delete": lambda store, made: store.delete_session(BASE_URI),
    "forget": lambda store, made: store.forget(BASE_URI),
    "rebuild": lambda store, made: store.rebuild_index(),
    "repair": lambda store, made: store.repair(),
    "import": import_rival,
    "losing the file too": lambda store, made: made.file.unlink(missing_ok=True),
}


def tells(index: str) -> bool:
    """Whether an index knows of the fifth version."""
    return index not in ("lost", "of before the fifth")


def is_told(state: str, tagged: bool, index: str) -> bool:
    """Whether marks, index, notes, file or quarantine say whose version it is. Only a new index asks the quarantine."""
    if tagged or tells(index):
        return True
    if "in quarantine" in state and index != "lost":
        return False
    return not state.startswith(("manifest", "away", "set aside, the"))


CASES = [
    (state, tagged, index)
    for state in STATES
    for tagged in (True, False)
    for index in INDEXES
    if is_told(state, tagged, index)
]


def told(store: Store) -> set[str]:
    return {finding.path for finding in (*store.opening.unreadable, *store.verify(deep=False).findings)}


@pytest.mark.one_in(32)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("state", "tagged", "index"), CASES)
def test_threats_24_25_a_version_that_cannot_be_opened_keeps_number_marks_and_needs_until_its_file_is_back(
    originals: dict[bool, Made], store_path: Path, state: str, tagged: bool, index: str, work: str
) -> None:
    made = copied(originals[tagged], store_path)
    good, tags = made.file.read_bytes(), {"release": made.fifth.bundle_id} if tagged else {}
    lose(made, state, index)
    if work == "reading":
        with Store.open(store_path, writable=False) as reader:
            assert str(made.file) in told(reader)
    with Store.open(store_path, writable=True) as store:
        assert str(made.file) in told(store)
        report = WORK[work](store, made)
        numbers = {row.version for row in store.versions(URI)}
        is_mended = work == "repair" and not store.verify(deep=False).findings
        assert is_mended or not (work == "repair" and state in MENDABLE)
        if isinstance(report, MaintenanceReport) and not (tells(index) or state == "set aside" or is_mended):
            assert report.bytes_freed == 0, "nobody knows what it needs"
        slept = [sleep(store, tokens, seed=7).version for tokens in (330, 340)]
        assert slept == [max(5, *numbers) + 1, max(5, *numbers) + 2]
        assert sleep(store, 20, uri=FORK_URI, seed=9).version == 1, "in its session only"
        assert work == "losing the file too" or store.rebuild_index(dry_run=True).actions == ()
    for _ in range(2):
        with Store.open(store_path, writable=True) as store:
            assert store.opening.index_rebuilt is None
            assert (str(made.file) in told(store)) is not is_mended
            store.gc()
            assert store.marks(URI).tags == tags
            assert store.index.last_number(URI) == slept[-1]
            assert all(list(store_path.rglob(f"{file.name}.mv*")) for file in made.needed)
    put(made.file, good)
    with Store.open(store_path, writable=True) as store:
        assert store.opening.unreadable == ()
        if work == "repair":
            store.repair()  # what the first one set aside of what it needs is back
        assert {1, 5, *slept} <= {row.version for row in store.versions(URI)}
        with store.open_session(URI, 5) as reader:
            assert (reader.bundle_id, contents(reader)) == (made.fifth.bundle_id, expected(800))
        assert (store.index.missed(), store.index.needs_unknown()) == ({}, [])
        assert store.marks(URI).tags == tags
        assert store.verify(deep=True).ok


GIVING_UP: dict[str, Callable[[Store], MaintenanceReport]] = {
    "delete": lambda store: store.delete_session(URI),
    "forget": lambda store: store.forget(URI),
    "empty quarantine": lambda store: store.empty_quarantine(),
}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("how", GIVING_UP)
@pytest.mark.parametrize(("state", "tagged", "index"), CASES)
def test_threat_24_a_version_that_cannot_be_opened_can_be_given_up_and_comes_back_no_more(
    originals: dict[bool, Made], store_path: Path, state: str, tagged: bool, index: str, how: str
) -> None:
    if (state, how) == ("away", "empty quarantine") and not tells(index):
        pytest.skip("what only marks tell of is not in quarantine")
    made = copied(originals[tagged], store_path)
    lose(made, state, index)
    with Store.open(store_path, writable=True) as store:
        if how == "empty quarantine":
            store.repair()
        left = [row.version for row in store.versions(URI)] if how == "empty quarantine" else []
        report = GIVING_UP[how](store)
        assert how == "forget" or report.problems == ()
        store.delete_session(BASE_URI)
        store.gc()
        assert store.index.needs_unknown() == []
    with Store.open(store_path, writable=True) as store:
        assert str(made.file) not in told(store)
        assert bool(store.marks(URI).tags) == (tagged and 5 in left)
        sleep(store, 800, uri=FORK_URI)  # its blocks are there again
        assert "restore" not in [action.kind for action in store.repair().actions]
        assert [row.version for row in store.versions(URI)] == left
