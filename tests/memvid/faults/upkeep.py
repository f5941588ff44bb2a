"""The operations that keep a store in order, or carry a session from one to another: their scenarios.

Beside the store's folder lies what is not the store's: exported files, backups, and copies of damaged files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from unittest import mock

from torpor.memvid.access import upkeep as access
from torpor.memvid.errors import SessionNotFound, StoreError, StoreIoError
from torpor.memvid.exchange.import_checks import ExportedFile, require_whole
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.folder.diary import DIARY_FILE, DIARY_FILES
from torpor.memvid.folder.folder import manifest_name
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.maintenance.strip_plan import RoomPolicy
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.frame_files import open_frames
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.faults import worlds
from torpor.tests.memvid.faults.beginnings import FIRST, FORK, SECOND, Scenario, four_versions, two_versions_and_a_fork
from torpor.tests.memvid.faults.moments import EAGER
from torpor.tests.memvid.faults.shim import by_hand
from torpor.tests.memvid.faults.worlds import AFTERWARDS, SIZES, Broken, Mark, Sees, Tape, Version, World, sleep
from torpor.tests.memvid.format_1_stores import CASES, DATA, private_copy
from torpor.tests.memvid.store_making import OTHER_URI, URI

ALONE: Final = Version(SessionUri("work", "alone"), 1, 30, seed=8)
_DAY_SECONDS: Final = 86_400


# --- export, import, adopt, back up


def _whole_files(paths: Iterable[Path], kind: str) -> Iterator[Mark]:
    """A fact for each file that is there; one that is not whole breaks the promise that it never is."""
    for path in paths:
        try:
            with contextlib.closing(ExportedFile(os.open(path, os.O_RDONLY), str(path))) as file:
                require_whole(file)
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


def an_imported_file(path: Path) -> World:
    world = a_file_from_elsewhere(path)
    with Store.open(path, writable=True) as store:
        store.import_file(path.parent / "whole.file")
    return world | {SECOND}


def import_file(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store, tape.step(store, adds=[SECOND]):
        store.import_file(path.parent / "whole.file")


def import_again(path: Path, tape: Tape) -> None:
    """As it is, and under another name."""
    source, copy = path.parent / "whole.file", Version(SessionUri("work", "copy"), 1, 516)
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            store.import_file(source)
        with tape.step(store, adds=[copy]):
            store.import_file(source, as_uri=copy.uri)


def adopt(path: Path, tape: Tape) -> None:
    """A client hands a file over, and the daemon takes it."""
    source = path.parent / "whole.file"
    with by_hand(), contextlib.closing(ExportedFile(os.open(source, os.O_RDONLY), str(source))) as file:
        bundle_id = file.bundle_id
    waiting = Mark("handed over", f"{bundle_id}.mvb")
    with Store.open(path, writable=True) as store:
        with tape.step(store, adds=[waiting], is_outside=True):
            hand_over(str(path), str(source))
        with tape.step(store, adds=[SECOND], removes=[waiting]) as unsure:
            store.adopt_incoming(bundle_id)
            with by_hand():
                unsure.update(handed_over(path))  # where the system does not let it go; then it is a repack's


def back_up(path: Path, tape: Tape) -> None:
    """Twice, with a sleep and a delete between."""
    target, small = path.parent / "backup", Version(SessionUri("work", "small"), 1, 8, seed=3)
    with Store.open(path, writable=True) as store:
        for number, adds in ((1, [FIRST, SECOND, FORK]), (2, [small])):
            facts = [Mark("backed up", str(fact)) for fact in adds]
            with tape.step(store, adds=facts, is_outside=True, is_gradual=True):
                for problem in store.backup(target).problems:
                    raise StoreIoError(problem.message)  # it says that it could not
            if number == 1:
                tape.sleep(store, small)
                tape.delete(store, OTHER_URI)


def backed_up(path: Path) -> Iterator[Mark]:
    target = path.parent / "backup"
    if not (target / "store.json").exists():
        return
    facts = {FIRST, SECOND, FORK, Version(SessionUri("work", "small"), 1, 8, seed=3)}
    with Store.open(target, writable=True) as store:
        for fact in worlds.observe(store, frozenset(facts), Sees()):
            yield Mark("backed up", str(fact))


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
    """A session with bytes in every place that a file can be in, one of its blocks an heir's too."""
    with Store.open(path, writable=True) as store:
        receipt = sleep(store, _SECRETS[1], sleep(store, _SECRETS[0]))
        with store.open_session(SECRET, 1) as before:
            sleep(store, _HEIR, before)
        store.tag(SECRET, 2, "hush")
        copy = path.parent / "copy"
        store.export_session(SECRET, 2, copy)
    for place in (f"incoming/{receipt.bundle_id}.mvb", "damaged/" + "ab" * 32 + ".mvp", f"packs/{'0' * 15}f.tmp"):
        (path / place).parent.mkdir(mode=0o700, exist_ok=True)
        making.put(path / place, copy.read_bytes())
    copy.unlink()
    return frozenset({*_SECRETS, _HEIR, *(Mark("trace", kind) for kind in _TRACES)})


def a_secret_alone(path: Path) -> World:
    """A session that shares nothing, and a temporary file with bytes of it, which the opening removes."""
    secret = Version(SECRET, 1, 516, seed=7)
    with Store.open(path, writable=True) as store:
        sleep(store, secret)
        (name,) = store._core.folder.list_packs()
    shutil.copy(path / name, path / "packs" / f"{'0' * 15}f.tmp")
    return frozenset({secret, *(Mark("trace", kind) for kind in _TRACES)})


_TOLD: Final = {"name": SECRET.name.encode(), "words": b"hush, it is said"}


def a_secret_in_the_diary(path: Path) -> World:
    """Both files of the diary tell of a session that shares nothing; so does what is said of another one."""
    secret = Version(SECRET, 1, 30, seed=7)
    with Store.open(path, writable=True) as store:
        sleep(store, secret)
        for name in DIARY_FILES:
            store.diary.say({"read": 1}, SECRET, {"text": _TOLD["words"].decode()})
            store.diary.say({"read": 2}, OTHER_URI, {"text": "aloud"}, SECRET, {"text": _TOLD["words"].decode()})
            store.write_diary()
            (path / DIARY_FILE).rename(path / name)
    return frozenset({secret, *(Mark("trace", kind) for kind in _TOLD)})


def forget(path: Path, tape: Tape) -> None:
    """Everything of it goes, from every place; once it is acknowledged no power cut brings a byte of it back."""
    gone = [fact for fact in tape.world if isinstance(fact, Mark) or fact.uri == SECRET]
    with Store.open(path, writable=True) as store, tape.step(store, removes=gone) as unsure:
        problems = store.forget(SECRET).problems
        tape.hear(problems)
        if problems:
            unsure.update(fact for fact in gone if isinstance(fact, Mark))


def forget_one_of_two(path: Path, tape: Tape) -> None:
    """The versions go as in a delete; then the packs that the fork needs are written anew."""
    with Store.open(path, writable=True) as store, tape.step(store, removes=[FIRST, SECOND]):
        store.forget(URI)


# --- repair

_SHORT_FORK: Final = Version(SessionUri("work", "short"), 1, 264)
_CUT: Final = Version(SessionUri("work", "cut"), 1, 516, seed=5, whole=256)


def with_a_bad_trailer(path: Path) -> World:
    """A pack of which a fork needs blocks has a bad trailer. It gets it back, and nothing of it is lost."""
    with Store.open(path, writable=True) as store:
        first = sleep(store, FIRST)
        sleep(store, _SHORT_FORK, first)
        pack = path / _pack_of(store, first)
    _change(pack, pack.stat().st_size - 10, 4)
    (path.parent / "damaged").mkdir()
    return frozenset()


def with_a_bad_block(path: Path) -> World:
    """A version with a bad second span, and damaged marks. Beside the store lie copies."""
    with Store.open(path, writable=True) as store:
        sleep(store, ALONE)
        cut = sleep(store, _CUT)
        pack = path / _pack_of(store, cut)
        with open_frames(store._core.folder, _pack_of(store, cut)) as file:
            spoilt = file.frame_of(cut.entries[1].id)
    _change(pack, spoilt.offset + spoilt.frame_bytes - 40, 4)
    _change(path / "marks.json", 20, 4)
    copies = path.parent / "damaged"
    copies.mkdir()
    shutil.copy(pack, copies / "cut")
    shutil.copy(path / "marks.json", copies / "marks")
    kept = {Mark("damaged bytes", name) for name in ("cut", "marks")}
    return frozenset({*kept, *map(_whole, (ALONE, _CUT))})


def _whole(version: Version) -> Mark:
    return Mark("whole", str(version), version)


def whole_ones(store: Store) -> Iterator[Mark]:
    """The versions that are now as they were put to sleep, each as far as it can be."""
    for version in (FIRST, SECOND, FORK, _SHORT_FORK, ALONE, _CUT):
        with contextlib.suppress(StoreError):
            worlds.require_right(store, version)
            yield _whole(version)


def _pack_of(store: Store, receipt: object) -> str:
    """The pack of a version's last block."""
    (name, *_) = store.index.packs_of(receipt.entries[-1].id)  # type: ignore[attr-defined]
    return name


def _change(file: Path, at: int, count: int) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + count] = bytes(255 - byte for byte in data[at : at + count])
    file.write_bytes(data)


def damaged_bytes(path: Path) -> Iterator[Mark]:
    """Each damaged original that is still in its place, or in `damaged`."""
    held = {file.read_bytes() for form in ("packs/*.mvp", "damaged/*", "marks.json") for file in path.glob(form)}
    for copy in (path.parent / "damaged").iterdir():
        if copy.read_bytes() in held:
            yield Mark("damaged bytes", copy.name)


def nothing_more(store: Store) -> None:
    """What an opening cannot read is no fault of the store."""


def repair(path: Path, tape: Tape) -> None:
    _repair(path, tape, [_whole(FIRST), _whole(_SHORT_FORK)])


def repair_around(path: Path, tape: Tape) -> None:
    """What is sound comes out of a pack with a bad block, and the marks are made anew."""
    _repair(path, tape, [])


def _repair(path: Path, tape: Tape, mended: list[Mark], sources: Sequence[Path] = ()) -> None:
    with Store.open(path, writable=True) as store, tape.step(store, adds=mended, is_gradual=True):
        report = store.repair(sources=sources)
        with by_hand():
            whole = set(whole_ones(store))
        if not whole.issuperset(mended):  # a part of it was refused, or harmed meanwhile
            raise StoreIoError(f"{len(report.problems)} problems.")


def repair_again(store: Store) -> None:
    """A second repair finishes what was begun, and after that there is nothing to do."""
    store.repair()
    if actions := store.repair().actions:
        raise Broken(f"a repair has still to {actions[0].kind} {actions[0].path}: {actions[0].reason}")


REPAIRED: Final = Sees(
    files=damaged_bytes,
    marks=whole_ones,
    finish=nothing_more,
    again=repair_again,
    is_damaged=True,
    is_gradual=True,
    has_others=True,
)


def lacking(path: Path) -> World:
    """A store with a damaged manifest, and without one of its packs; beside it a backup that has them."""
    two_versions_and_a_fork(path)
    with Store.open(path, writable=True) as store:
        store.backup(path.parent / "backup")
        row = store.require_session(OTHER_URI)
        with store.open_session(URI, 1) as reader:
            (path / _pack_of(store, reader)).unlink()
    _change(path / manifest_name(row.bundle_id), 100, 4)
    return frozenset()


def repair_from(path: Path, tape: Tape) -> None:
    _repair(path, tape, [*map(_whole, (FIRST, SECOND, FORK))], [path.parent / "backup"])


# --- a store of format 1


def of_format_1(source: Path, path: Path) -> World:
    """A store of the last release of format 1. What a carrying over that nobody disturbs makes of it counts."""
    copy = private_copy(source, path.parent / "copy")
    with Store.open(copy, writable=True) as store:
        facts = frozenset(as_carried_over(store))
    shutil.rmtree(copy)
    private_copy(source, path)
    return facts


def as_carried_over(store: Store) -> Iterator[Mark]:
    """What each version that wakes wakes as."""
    uris = (row.uri for row in store.iter_sessions())
    for uri in [uri for uri in uris if uri.name not in (AFTERWARDS.name, "since-the-fault")]:
        for row in store.versions(uri):
            with contextlib.suppress(StoreError), store.open_session(uri, row.version) as reader:
                content = hashlib.sha256(repr(making.contents(reader)).encode()).hexdigest()  # type: ignore[arg-type]
                yield Mark("version", f"{uri}@{row.version}", content)


def carry_over(path: Path, tape: Tape) -> None:
    """Then a repack empties the old folder."""
    with Store.open(path, writable=True) as store, tape.step(store):
        store.repack(policy=EAGER)


CARRIED_OVER: Final = Sees(marks=as_carried_over, finish=nothing_more, is_damaged=True, has_others=True)


# --- repack, strip


def old_leftovers(path: Path) -> World:
    """What a client handed over two days ago, and packs that lost their versions but for a block that a fork needs."""
    two_versions_and_a_fork(path)
    with Store.open(path, writable=True) as store:
        store.delete_session(URI)
    waiting = path / "incoming" / f"{'ab' * 32}.mvb"
    waiting.parent.mkdir(mode=0o700)
    making.put(waiting, b"what a client left")
    then = os.stat(waiting).st_mtime - 2 * _DAY_SECONDS
    os.utime(waiting, (then, then))
    return frozenset({FORK})


def repack(path: Path, tape: Tape) -> None:
    """With a temporary file that came after the opening."""
    with Store.open(path, writable=True) as store:
        with by_hand():
            os.close(os.open(f"{path}/packs/{'0' * 15}e.tmp", os.O_WRONLY | os.O_CREAT, 0o600))
        with tape.step(store):
            store.repack()


def repack_twice(path: Path, tape: Tape) -> None:
    """After each of two deletes: first what the fork needs stays, and then nothing."""
    with Store.open(path, writable=True) as store:
        for uri in (URI, OTHER_URI):
            tape.delete(store, uri)
            with tape.step(store):
                store.repack()


def repack_into_one(path: Path, tape: Tape) -> None:
    """Packs are written anew into fewer; what they were needed for goes afterwards."""
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            report = store.repack(URI, policy=EAGER)
        if not report.problems and not report.actions:
            raise StoreIoError("A manifest could not be read, so nothing was to do.")  # without a fault the sweep fails
        tape.delete(store, OTHER_URI)
        with tape.step(store):
            store.repack(URI, policy=dataclasses.replace(EAGER, cold_after_seconds=0))


_PLAIN: Final = tuple(Version(SessionUri("work", "plain"), *each, period=16) for each in ((1, 260), (2, 516)))


def compressible(path: Path) -> World:
    with Store.open(path, writable=True) as store:
        sleep(store, _PLAIN[1], sleep(store, _PLAIN[0]))
        sleep(store, ALONE)
    return frozenset({*_PLAIN, ALONE})


def compress(path: Path, tape: Tape) -> None:
    """Cold packs are written anew, compressed; then there is something to delete, and nothing left to do."""
    policy = RepackPolicy(cold_after_seconds=0)
    with Store.open(path, writable=True) as store:
        with tape.step(store):
            report = store.repack(policy=policy)
        if not report.problems and not report.actions:
            raise StoreIoError("A manifest could not be read, so nothing was to do.")
        tape.delete(store, ALONE.uri)


def _stripped(version: Version) -> Version:
    return dataclasses.replace(version, whole=0, is_stripped=True)


def strip(path: Path, tape: Tape) -> None:
    """Keys and values go, but those that the fork needs; the ledgers stay. Then the session goes on, and the fork is
    stripped and deleted."""
    with Store.open(path, writable=True) as store:
        gone = worlds.versions_of(tape.world, URI)
        with tape.step(store, adds=map(_stripped, gone), removes=gone):
            store.strip(URI)
        tape.sleep(store, Version(URI, 3, 40, seed=3))
        with tape.step(store, adds=[_stripped(FORK)], removes=[FORK]):
            store.strip(OTHER_URI, 1)
        with tape.step(store, removes=[_stripped(FORK)]):
            store.delete_session(OTHER_URI)


_NOON_NS: Final = 1_767_268_800 * 10**9
"""2026-01-01. A date that can be believed: the clock of the other scenarios is older than the program."""


def _at(days: int) -> contextlib.AbstractContextManager[object]:
    return mock.patch("time.time_ns", return_value=_NOON_NS + days * _DAY_SECONDS * 10**9)


def of_a_day_ago(path: Path) -> World:
    with _at(0):
        return two_versions_and_a_fork(path)


def make_room(path: Path, tape: Tape) -> None:
    """A store gets a budget and has to come within it: what is not in use is stripped. Then its session goes on."""
    room = mock.patch.object(access, "free_bytes_of", return_value=1 << 30)  # a budget as long in each run
    with _at(1), room, Store.open(path, writable=True) as store:
        with tape.step(store):
            store.hold_to_budget(None)
        gone = worlds.versions_of(tape.world, URI)
        with tape.step(store, adds=map(_stripped, gone), removes=gone):
            report = store.make_room(0, RoomPolicy(strip_named=True), lambda: [OTHER_URI])
            if [action.kind for action in report.actions].count("strip") < len(gone):
                raise StoreIoError("A file could not be read, so less was to strip.")
        tape.sleep(store, Version(URI, 3, 40, seed=3))


SCENARIOS: Final = (
    Scenario("export", two_versions_and_a_fork, export, Sees(files=exported)),
    Scenario("export_tensors", a_version_and_its_tensors, export_tensors, Sees(files=exported_tensors)),
    Scenario("import", a_file_from_elsewhere, import_file),
    Scenario("import_again", an_imported_file, import_again),
    Scenario("adopt", a_file_from_elsewhere, adopt, Sees(files=handed_over)),
    Scenario("backup", two_versions_and_a_fork, back_up, Sees(files=backed_up, is_gradual=True)),
    Scenario("forget", two_versions_and_a_fork, forget_one_of_two),
    Scenario("forget_everywhere", a_secret_everywhere, forget, seeing(_TRACES)),
    Scenario("forget_alone", a_secret_alone, forget, seeing(_TRACES)),
    Scenario("forget_diary", a_secret_in_the_diary, forget, seeing(_TOLD)),
    Scenario("repair", with_a_bad_trailer, repair, REPAIRED),
    Scenario("repair_around", with_a_bad_block, repair_around, REPAIRED),
    Scenario("repair_from", lacking, repair_from, dataclasses.replace(REPAIRED, files=None, again=None)),
    Scenario("carry_over", functools.partial(of_format_1, DATA / "format-1-whole" / "store"), carry_over, CARRIED_OVER),
    Scenario("carry_over_small", functools.partial(of_format_1, CASES / "small"), carry_over, CARRIED_OVER),
    Scenario("repack", old_leftovers, repack),
    Scenario("repack_twice", two_versions_and_a_fork, repack_twice),
    Scenario("repack_into_one", four_versions, repack_into_one),
    Scenario("compress", compressible, compress),
    Scenario("strip", two_versions_and_a_fork, strip),
    Scenario("make_room", of_a_day_ago, make_room),
)
