"""The operations that keep a store in order, or carry a session from one to another: their scenarios.

Beside the store's folder lies what is not the store's: exported files, and copies of damaged ones to compare with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

from torpor.memvid import SessionUri, Store
from torpor.memvid.errors import NoSpace, SessionNotFound, StoreIoError
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.index import index
from torpor.memvid.maintenance.compaction_plan import CompactionPolicy
from torpor.memvid.recovery.repair import LOST
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.faults.beginnings import FIRST, FORK, SECOND, Scenario, two_versions_and_a_fork
from torpor.tests.memvid.faults.shim import by_hand, files_up_to
from torpor.tests.memvid.faults.worlds import SIZES, Broken, Mark, Sees, Tape, Version, World, require_bit_exact, sleep
from torpor.tests.memvid.store_making import OTHER_URI, URI

ALONE: Final = Version(SessionUri("work", "alone"), 1, 30, seed=8)
_DAY_SECONDS: Final = 86_400


# --- export, import, adopt


def _whole_files(paths: Iterable[Path], kind: str) -> Iterator[Mark]:
    """A fact for each file that is there; one that is not whole breaks the promise that it never is."""
    for path in paths:
        try:
            with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), None)) as file:
                for entry in file.entries:
                    file.check_block(entry.id)
        except Exception as error:
            raise Broken(f"{path.name} is there and not whole: {error}", lost=True) from error
        yield Mark(kind, path.name)


def exported(path: Path) -> Iterator[Mark]:
    return _whole_files(path.parent.glob("*.exported"), "exported")


def handed_over(path: Path) -> Iterator[Mark]:
    return _whole_files((path / "incoming").glob("*.mvb"), "handed over")


def a_file_from_elsewhere(path: Path) -> World:
    """A store with a session of its own, and the newest version of another store as a file beside it."""
    elsewhere = path.parent / "elsewhere"
    with Store.open(elsewhere, writable=True) as store:
        sleep(store, SECOND, sleep(store, FIRST))
        store.export_session(URI, None, path.parent / "whole.file")
    shutil.rmtree(elsewhere)
    with Store.open(path, writable=True) as store:
        sleep(store, ALONE)
    return frozenset({ALONE})


def export(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        for number in (1, 2):
            target = path.parent / f"{number}.exported"
            with tape.step(store, adds=[Mark("exported", target.name)], is_outside=True):
                store.export_session(URI, number, target)


def a_version_and_its_tensors(path: Path) -> World:
    """A session of two versions, and beside the store the newest one's arrays as a file."""
    with Store.open(path, writable=True) as store:
        sleep(store, SECOND, sleep(store, FIRST))
        store.export_tensors(URI, None, path.parent / "whole.tensors")
    return frozenset({FIRST, SECOND})


def exported_tensors(path: Path) -> Iterator[Mark]:
    whole, file = path.parent / "whole.tensors", path.parent / "again.tensors"
    if file.exists():
        if file.read_bytes() != whole.read_bytes():
            raise Broken(f"{file.name} is there and not whole", lost=True)
        yield Mark("exported", file.name)


def export_tensors(path: Path, tape: Tape) -> None:
    target = path.parent / "again.tensors"
    facts = [Mark("exported", target.name)]
    with Store.open(path, writable=True) as store, tape.step(store, adds=facts, is_outside=True):
        store.export_tensors(URI, None, target)


def import_files(path: Path, tape: Tape) -> None:
    """As it is, once more, and under another name."""
    source, copy = path.parent / "whole.file", Version(SessionUri("work", "copy"), 1, 516)
    with Store.open(path, writable=True) as store:
        with tape.step(store, adds=[SECOND]):
            store.import_file(source)
        with tape.step(store):
            store.import_file(source)
        with tape.step(store, adds=[copy]):
            store.import_file(source, as_uri=copy.uri)


def adopt(path: Path, tape: Tape) -> None:
    """A client hands a file over, and the daemon takes it."""
    source = path.parent / "whole.file"
    with by_hand(), contextlib.closing(BundleFile(os.open(source, os.O_RDONLY), str(source), None)) as file:
        bundle_id = file.bundle_id
    waiting = Mark("handed over", f"{bundle_id.hex()}.mvb")
    with Store.open(path, writable=True) as store:
        with tape.step(store, adds=[waiting], is_outside=True):
            hand_over(str(path), str(source))
        with tape.step(store, adds=[SECOND], removes=[waiting]) as unsure:
            store.adopt_incoming(bundle_id)
            with by_hand():
                unsure.update(handed_over(path))  # where the system does not let it go; then it is a gc's


# --- forget

SECRET: Final = SessionUri("private", "zyx-secret-session")
_SECRETS: Final = (Version(SECRET, 1, 260, seed=7), Version(SECRET, 2, 516, seed=7))
_HEIR: Final = Version(OTHER_URI, 1, 520, seed=7)
_TRACES: Final = {
    "name": SECRET.name.encode(),
    "payload": making.raw_bytes(SIZES["heads"] * 4 * SIZES["dim"] * 2, 7, "0.k", 512, 4),
    "state": making.raw_bytes(64, 7, "logits", 516),
}


def traces(needles: Mapping[str, bytes], path: Path) -> list[Mark]:
    """Which of these bytes of the secret session any file of the store still has."""
    whole = b"\0".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())
    return [Mark("trace", kind) for kind, needle in needles.items() if needle in whole]


def forget_again(needles: Mapping[str, bytes], store: Store) -> None:
    with contextlib.suppress(SessionNotFound):
        store.forget(SECRET)
    if left := [mark.name for mark in traces(needles, Path(store.path))]:
        raise Broken(f"asked again, forget still leaves its {', '.join(left)}")


def seeing(needles: Mapping[str, bytes]) -> Sees:
    """What is left of the secret session; where its forget was cut off, the next one leaves nothing."""
    return Sees(files=functools.partial(traces, needles), again=functools.partial(forget_again, needles))


def a_secret_everywhere(path: Path) -> World:
    """A session with bytes in every place that a file can be in, one of its blocks an heir's too, and its name in the
    index's free space, as rows that were moved about leave it."""
    with Store.open(path, writable=True) as store:
        receipt = sleep(store, _SECRETS[1], sleep(store, _SECRETS[0]))
        with store.open_session(SECRET, 1) as before:
            sleep(store, _HEIR, before)
        store.tag(SECRET, 2, "hush")
        copy = path.parent / "copy"
        store.export_session(SECRET, 2, copy)
    name = receipt.bundle_id.hex()
    (path / "incoming").mkdir(mode=0o700)
    shutil.copy(copy, path / "incoming" / f"{name}.mvb")
    shutil.copy(copy, path / "quarantine" / f"{name}.mvb.1")
    shutil.copy(copy, path / "bundles" / f"{'0' * 15}f.tmp")
    for file in ("incoming/" + name + ".mvb", "quarantine/" + name + ".mvb.1"):
        (path / file).chmod(0o600)
    copy.unlink()
    with contextlib.closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("CREATE TABLE moved (text TEXT)")
        connection.execute("INSERT INTO moved VALUES (?)", (SECRET.name * 100,))
        connection.execute("DROP TABLE moved")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return frozenset({*_SECRETS, _HEIR, *(Mark("trace", kind) for kind in _TRACES)})


def a_secret_alone(path: Path) -> World:
    """A session that shares nothing, and a temporary file with bytes of it, which the opening removes."""
    secret = Version(SECRET, 1, 516, seed=7)
    with Store.open(path, writable=True) as store:
        file = making.bundle_path(store, sleep(store, secret).bundle_id)
    shutil.copy(file, path / "bundles" / f"{'0' * 15}f.tmp")
    return frozenset({secret, *(Mark("trace", kind) for kind in _TRACES)})


def forget(path: Path, tape: Tape) -> None:
    """Everything of it goes, from every place; once it is acknowledged no power cut brings a byte of it back."""
    gone = [fact for fact in tape.world if isinstance(fact, Mark) or fact.uri == SECRET]
    with Store.open(path, writable=True) as store, tape.step(store, removes=gone) as unsure:
        if store.forget(SECRET).problems:
            unsure.update(fact for fact in gone if isinstance(fact, Mark))


# --- repair

_CUT: Final = Version(SessionUri("work", "cut"), 1, 516, seed=5)
_SALVAGED: Final = Version(_CUT.uri, 0, 256, seed=5, is_salvaged=True)
_LOST: Final = Version(SessionUri("work", "lost"), 1, 30, seed=6)
_TO_DO: Final = Mark("repair", "has something to do")


def damaged(path: Path) -> World:
    """A version whose file has a bad trailer and blocks that a fork needs, one with a bad second span, and zeros."""
    with Store.open(path, writable=True) as store:
        second = sleep(store, SECOND, sleep(store, FIRST))
        sleep(store, FORK, second)
        sleep(store, ALONE)
        cut, lost = sleep(store, _CUT), sleep(store, _LOST)
        spoilt = making.frame_of(store, cut.entries[1])
        files = [making.bundle_path(store, receipt.bundle_id) for receipt in (second, cut, lost)]
    _change(files[0], files[0].stat().st_size - 10, 4)
    _change(files[1], spoilt.offset + spoilt.frame_bytes - 40, 4)
    _change(files[2], 0, files[2].stat().st_size)
    copies = path.parent / "damaged"
    copies.mkdir()
    for number, file in enumerate(files):
        shutil.copy(file, copies / str(number))
    kept = {Mark("damaged bytes", str(number)) for number in range(len(files))}
    return frozenset({FIRST, SECOND, FORK, ALONE, _TO_DO, *kept})


def _change(file: Path, at: int, count: int) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + count] = bytes(255 - byte for byte in data[at : at + count]) if at else bytes(count)
    file.write_bytes(data)


def damaged_bytes(path: Path) -> Iterator[Mark]:
    """Each damaged original that is still in its place, or in quarantine."""
    held = {file.read_bytes() for place in ("bundles", "quarantine") for file in (path / place).rglob("*.mv*")}
    for copy in (path.parent / "damaged").iterdir():
        if copy.read_bytes() in held:
            yield Mark("damaged bytes", copy.name)


def repair(path: Path, tape: Tape) -> None:
    step = tape.step
    with Store.open(path, writable=True) as store, step(store, adds=[_SALVAGED], removes=[_TO_DO]) as unsure:
        if any(problem.code != LOST for problem in store.repair().problems):
            unsure.add(_TO_DO)


def repair_again(store: Store) -> Iterator[Mark]:
    """What was sound stays so; a second repair finishes what was begun, and after that there is nothing to do."""
    require_bit_exact(store, FIRST)
    require_bit_exact(store, ALONE)
    if store.repair().actions:
        yield _TO_DO
        if actions := store.repair().actions:
            raise Broken(f"a repair has still to {actions[0].kind} {actions[0].path}: {actions[0].reason}")
    known = {row.uri for row in store.index.given_up().values()}  # of zeros an index made anew can tell nothing
    for told in (store.repair().problems, store.verify(deep=False).findings):
        lost = [finding.message for finding in told if finding.code == LOST]
        for one in (_CUT, _LOST):
            if (one is _CUT or one.uri in known) and not any(f"ersion 1 of {one.uri} is lost" in each for each in lost):
                raise Broken(f"it is not told that {one.uri} is lost: {lost}")


REPAIRED: Final = Sees(files=damaged_bytes, finish=repair_again, finished=frozenset({_SALVAGED}))


# --- what repair has set aside

_BROKEN: Final = (Version(URI, 1, 30, seed=6), Version(OTHER_URI, 1, 30, seed=5))


def set_aside_without_an_index(path: Path) -> Iterator[Mark]:
    """The versions that come back as set aside where the index is lost: they are learnt from the quarantine."""
    index, hidden = path / "index.sqlite", path.parent / "index.hidden"
    if index.exists():
        index.rename(hidden)
    try:
        with Store.open(path, writable=False) as store:
            for row in store.index.given_up().values():
                yield Mark("set aside without an index", str(row.uri))
    finally:
        if hidden.exists():
            hidden.rename(index)


def _aside(uri: SessionUri) -> list[Mark]:
    return [Mark("set aside", str(uri)), Mark("set aside without an index", str(uri))]


def sessions_with_versions_set_aside(path: Path) -> World:
    """A session of a version that stands and one that is set aside, and a session of which that is all."""
    with Store.open(path, writable=True) as store:
        for version in _BROKEN:
            file = making.bundle_path(store, sleep(store, version).bundle_id)
            _change(file, 64 + 40, 4)
        sleep(store, SECOND)
        sleep(store, ALONE)
        store.repair()
    return frozenset({SECOND, ALONE, *(mark for version in _BROKEN for mark in _aside(version.uri))})


def set_aside(store: Store) -> Iterator[Mark]:
    """What can come back."""
    names = {file.name.partition(".")[0] for file in Path(store.path, "quarantine").glob("*.mvb.*")}
    for bundle_id, row in store.index.given_up().items():
        if bundle_id.hex() in names:
            yield Mark("set aside", str(row.uri))


def deleted_in_whole(store: Store) -> None:
    """A session is deleted with all that can come back, or with none of it."""
    if Mark("set aside", str(URI)) in set_aside(store) and not store.versions(URI):
        raise Broken(f"{URI} was deleted, and a version of it may still come back")


def delete_what_is_set_aside(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        for uri, versions in ((URI, [SECOND]), (OTHER_URI, [])):
            with tape.step(store, removes=[*versions, *_aside(uri)]) as unsure:
                if store.delete_session(uri).problems:
                    unsure.update(_aside(uri)[1:])


def empty_quarantine(path: Path, tape: Tape) -> None:
    gone = [mark for version in _BROKEN for mark in _aside(version.uri)]
    with Store.open(path, writable=True) as store, tape.step(store, removes=gone):
        store.empty_quarantine()


SET_ASIDE: Final = Sees(marks=set_aside, files=set_aside_without_an_index, is_whole=deleted_in_whole)


_NEWEST: Final = Version(URI, 3, 30, seed=3)
_WAITING: Final = (SECOND, FORK)
_GONE: Final = Version(SessionUri("work", "gone"), 1, 30, seed=4)
_GIVEN_UP: Final = frozenset(Mark(kind, f"{_GONE.uri}@{_GONE.number}") for kind in ("waiting", "known"))


def _named(version: Version, kind: str) -> Mark:
    return Mark(kind, f"{version.uri}@{version.number}")


def told_of(store: Store, versions: Iterable[Version] = (FIRST, *_WAITING, _GONE)) -> Iterator[Mark]:
    """Of the versions that are, or were, set aside: which are so, and of which the store knows at all."""
    aside = {(row.uri, row.version) for row in store.index.given_up().values()}
    for version in versions:
        if (version.uri, version.number) in aside:
            yield _named(version, "waiting")
        if (version.uri, version.number) in aside or store.find_session(version.uri, version.number):
            yield _named(version, "known")


def waiting_for_a_file(path: Path) -> World:
    """A version whose file is gone, the two in quarantine that need its blocks, and a newer one of its session."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        sleep(store, FORK, sleep(store, SECOND, first))
        sleep(store, _NEWEST)
        file = making.bundle_path(store, first.bundle_id)
        file.rename(path.parent / file.name)
        store.repair()
        return frozenset({_NEWEST, *told_of(store)})


def found_again(path: Path) -> World:
    """The missing file is put back: what was set aside for want of it can come back."""
    world = waiting_for_a_file(path)
    (file,) = path.parent.glob("*.mvb")
    file.rename(path / "bundles" / file.name[:2] / file.name)
    return (world | {FIRST}) - {_named(FIRST, "waiting")}


def bring_back(path: Path, tape: Tape) -> None:
    """All of it is a version again, and stays one."""
    adds, removes = _WAITING, [_named(version, "waiting") for version in _WAITING]
    with Store.open(path, writable=True) as store, tape.step(store, adds=adds, removes=removes):
        for problem in store.repair().problems:
            raise StoreIoError(problem.message)  # it says that it could not


_NEEDY: Final = Version(SessionUri("work", "needy"), 1, 516)
_MISSED: Final = (_GONE, _NEEDY)


def without_files(path: Path) -> World:
    """Two versions that an opening has found missing, one of which needs another one's file, beside a version of its
    session; and one that was given up."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        files = [making.bundle_path(store, sleep(store, _GONE).bundle_id)]
        files.append(making.bundle_path(store, sleep(store, _NEEDY, first).bundle_id))
        sleep(store, dataclasses.replace(ALONE, uri=_GONE.uri, number=2))
        making.bundle_path(store, sleep(store, ALONE).bundle_id).unlink()
        store.repair()
    for file in files:
        file.unlink()
    Store.open(path, writable=True).close()
    known = [_named(version, "known") for version in (*_MISSED, ALONE)]
    return frozenset({FIRST, dataclasses.replace(ALONE, uri=_GONE.uri, number=2), *known})


def give_up(path: Path, tape: Tape) -> None:
    """What has no file is given up, and then it goes: one with a delete, and the others with the quarantine."""
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            store.repair()
        for versions, end in (
            ([_NEEDY], lambda: store.delete_session(_NEEDY.uri)),
            ([_GONE, ALONE], store.empty_quarantine),
        ):
            gone = [_named(version, "known") for version in versions]
            with tape.step(store, removes=gone) as unsure:
                if end().problems:  # where the index's file takes no change
                    unsure.update(gone)


def known_after_a_repair(store: Store) -> Iterator[Mark]:
    store.repair()
    yield from (mark for mark in told_of(store, (*_MISSED, ALONE)) if mark.kind == "known")


# --- gc, recompression, a new index


def old_leftovers(path: Path) -> World:
    """What a client handed over two days ago. (Marks that a delete left are a loss to an index made anew.)"""
    two_versions_and_a_fork(path)
    waiting = path / "incoming" / f"{'ab' * 32}.mvb"
    waiting.parent.mkdir(mode=0o700)
    waiting.write_bytes(b"what a client left")
    waiting.chmod(0o600)
    then = os.stat(waiting).st_mtime - 2 * _DAY_SECONDS
    os.utime(waiting, (then, then))
    return frozenset({FIRST, SECOND, FORK})


def gc(path: Path, tape: Tape) -> None:
    """With a temporary file that came after the opening, and a delete before: what others need stays."""
    with Store.open(path, writable=True) as store:
        tape.delete(store, URI)
        with by_hand():
            os.close(os.open(f"{path}/bundles/{'0' * 15}e.tmp", os.O_WRONLY | os.O_CREAT, 0o600))
        with tape.step(store):
            store.gc()
        tape.delete(store, OTHER_URI)
        with tape.step(store):
            store.gc()


_PLAIN: Final = tuple(Version(SessionUri("work", "plain"), *each, period=16) for each in ((1, 260), (2, 516)))


def compressible(path: Path) -> World:
    """Beside a version that was given up, its file being nowhere: that there was one, only the index knows."""
    with Store.open(path, writable=True) as store:
        sleep(store, _PLAIN[1], sleep(store, _PLAIN[0]))
        sleep(store, ALONE)
        making.bundle_path(store, sleep(store, _GONE).bundle_id).unlink()
        store.repair()
        return frozenset({*_PLAIN, ALONE, *_GIVEN_UP})


def recompress(path: Path, tape: Tape) -> None:
    """Cold files are written anew with another codec; then there is something to forget, and nothing left to do."""
    policy = CompactionPolicy(cold_after_seconds=0)
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            report = store.compact(policy=policy)
        if not report.problems and [action.kind for action in report.actions] != ["recompress"] * len(_PLAIN):
            raise Broken("not every file was compressed, and nothing says why")
        tape.delete(store, ALONE.uri)


def one_given_up(path: Path) -> World:
    """Two versions and a fork, beside a version that was given up: that there was one, only the index knows."""
    world = two_versions_and_a_fork(path)
    with Store.open(path, writable=True) as store:
        making.bundle_path(store, sleep(store, _GONE).bundle_id).unlink()
        store.repair()
    return world | _GIVEN_UP


def a_log_left(path: Path) -> World:
    """The same, of a process that was killed: its last sleep stands in the index's log, and not in the file."""
    world, copy = one_given_up(path), path.parent / "killed"
    with Store.open(path, writable=True) as store:
        sleep(store, ALONE)
        shutil.copytree(path, copy)
    shutil.rmtree(path)
    copy.rename(path)
    if not (path / "index.sqlite-wal").stat().st_size:
        raise AssertionError("there is no log")
    return world | {ALONE}


_TOLD_OF_THE_ONE: Final = functools.partial(told_of, versions=(_GONE,))


def rebuild_asked(path: Path, tape: Tape) -> None:
    """A sound index is made anew: what it alone knew, the new one knows too, and the old one does not come back."""
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            store.rebuild_index()
        tape.delete(store, URI)


def replace_beside_a_log(path: Path, tape: Tape) -> None:
    """The system refuses to open the index, then takes a new one: what was in the old one's log is no part of it."""
    require, refusals = index.require_ours, iter([sqlite3.OperationalError("disk I/O error")])

    def refuse(*arguments: Any, **options: Any) -> Any:
        for error in refusals:
            raise error
        return require(*arguments, **options)

    with mock.patch.object(index, "require_ours", refuse), Store.open(path, writable=True) as store:
        tape.delete(store, URI)


def rebuild_asked_on_a_full_disk(path: Path, tape: Tape) -> None:
    """A sound index is to be made anew, and there is no room for it: the old one must not come back."""
    with Store.open(path, writable=True) as store:
        with no_room_for_an_index(), tape.step(store):
            store.rebuild_index()
        tape.delete(store, URI)
        tape.delete(store, OTHER_URI)


def return_to_file(path: Path, tape: Tape) -> None:
    """The index's file takes no change, so it is kept in memory; then there is room, and it has a file again."""
    with Store.open(path, writable=True) as store:
        _refuse_two_drops(store)
        tape.delete(store, OTHER_URI)
        tape.sleep(store, Version(OTHER_URI, 1, 40, seed=3))
        with tape.step(store):
            store.gc()
        tape.delete(store, URI)


def return_to_file_past_a_log(path: Path, tape: Tape) -> None:
    """The same, and what stands in the index's log cannot be brought into the file: it is no part of the next one."""
    with Store.open(path, writable=True) as store:
        _refuse_two_drops(store)
        tape.sleep(store, ALONE)
        leave_file = store.index.go_on_in_memory

        def leave_log() -> None:
            with files_up_to(0):
                leave_file()

        store.index.go_on_in_memory = leave_log  # type: ignore[method-assign]
        tape.delete(store, OTHER_URI)
        with tape.step(store):
            store.gc()


def _refuse_two_drops(store: Store) -> None:
    drop, refusals = store.index.drop, iter([NoSpace("No room.")] * 2)

    def refuse(bundle_ids: Iterable[bytes]) -> None:
        for error in refusals:
            raise error
        drop(bundle_ids)

    store.index.drop = refuse  # type: ignore[method-assign]


@contextlib.contextmanager
def no_room_for_an_index() -> Iterator[None]:
    connect = sqlite3.connect

    def refuse(database: str, *args: object, **kwargs: object) -> sqlite3.Connection:
        if database != ":memory:":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return connect(database, *args, **kwargs)  # type: ignore[arg-type]

    no_room = making.refusing(NoSpace("No room."))
    with mock.patch.object(sqlite3, "connect", refuse), mock.patch.object(index, "new_file", no_room):
        yield


SCENARIOS: Final = (
    Scenario("export", two_versions_and_a_fork, export, Sees(files=exported)),
    Scenario("export_tensors", a_version_and_its_tensors, export_tensors, Sees(files=exported_tensors)),
    Scenario("import", a_file_from_elsewhere, import_files),
    Scenario("adopt", a_file_from_elsewhere, adopt, Sees(files=handed_over)),
    Scenario("forget_everywhere", a_secret_everywhere, forget, seeing(_TRACES)),
    Scenario("forget_alone", a_secret_alone, forget, seeing(_TRACES)),
    Scenario("repair", damaged, repair, REPAIRED),
    Scenario("delete_set_aside", sessions_with_versions_set_aside, delete_what_is_set_aside, SET_ASIDE),
    Scenario("empty_quarantine", sessions_with_versions_set_aside, empty_quarantine, SET_ASIDE),
    Scenario("bring_back", found_again, bring_back, Sees(marks=told_of)),
    Scenario("give_up", without_files, give_up, Sees(finish=known_after_a_repair)),
    Scenario("gc", old_leftovers, gc),
    Scenario("recompress", compressible, recompress, Sees(marks=told_of)),
    Scenario("return_to_file", one_given_up, return_to_file, Sees(marks=_TOLD_OF_THE_ONE)),
    Scenario("return_to_file_past_a_log", one_given_up, return_to_file_past_a_log, Sees(marks=_TOLD_OF_THE_ONE)),
    Scenario("replace_beside_a_log", a_log_left, replace_beside_a_log, Sees(marks=_TOLD_OF_THE_ONE)),
    Scenario("rebuild_asked", one_given_up, rebuild_asked, Sees(marks=_TOLD_OF_THE_ONE)),
    Scenario("rebuild_asked_on_a_full_disk", one_given_up, rebuild_asked_on_a_full_disk, Sees(marks=_TOLD_OF_THE_ONE)),
)
