"""Turns that are acknowledged in the journal, before a version has them: their scenarios.

An acknowledged turn is a fact of its own: the newest version of the session has so many tokens at least, and they are
the session's. Which version has them is open: the one that an opening makes of the journal, or a later sleep.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final
from unittest import mock

from torpor.memvid.folder import journal
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.faults.beginnings import FIRST, SECOND, Scenario
from torpor.tests.memvid.faults.upkeep import SECRET, seeing
from torpor.tests.memvid.faults.worlds import Broken, Mark, Sees, Tape, Version, World, sleep
from torpor.tests.memvid.store_making import URI

NEW: Final = SessionUri("work", "new")
GONE: Final = SessionUri("work", "gone")
_SEEDS: Final = {URI: 0, NEW: 7, GONE: 5, SECRET: 8}
_TURNS: Final = (20, 30, 60, 265, 270, 290, 516, 520, 530, 540)
"""Tokens of which it can be said that they are acknowledged."""

_USED: Final = 9
"""The seed of a version that a check adds, to see that the store can be used."""


def said(store: Store) -> Iterator[Mark]:
    """Which acknowledged turns the newest version of each session has."""
    for uri, seed in _SEEDS.items():
        for row in reversed(store.versions(uri)):
            ledger = making.ledger(store, uri, row.version)
            count = len(ledger) // 4
            if ledger == making.token_ids(0, count, _USED):
                continue
            if ledger != making.token_ids(0, count, seed):
                raise Broken(f"the newest version of {uri} has tokens that were never its own", lost=True)
            yield from _said(uri, count)
            break


def _said(uri: SessionUri, count: int) -> list[Mark]:
    return [Mark("said", str(uri), turn) for turn in _TURNS if turn <= count]


def say(store: Store, tape: Tape, *also: Version | Mark, **counts: int) -> None:
    """Acknowledge turns, all at once: so many tokens each session has then. Room for them is taken before. also: what
    else may be found from then on."""
    uris = {"first": URI, "new": NEW, "gone": GONE, "secret": SECRET}
    records, facts = [], [*also]
    for name, count in counts.items():
        uri = uris[name]
        row = store.find_session(uri)
        held, number = (row.block_tokens, row.version) if row else (0, 0)
        records.append(making.turn(store, count - held, uri=uri, seed=_SEEDS[uri]))
        facts += _said(uri, count)
        facts.append(Version(uri, number + 1, held, seed=_SEEDS[uri], tail=count - held, is_optional=True))
    with tape.step(store):
        for record in records:
            store.make_room_to_acknowledge(record.uri, len(record.encode()))
    with tape.step(store, adds=facts):
        store.acknowledge(records)


def put_to_sleep(store: Store, tape: Tape, version: Version) -> None:
    with tape.step(store, adds=[version, *_said(version.uri, version.token_count)]):
        sleep(store, version)


def delete(store: Store, tape: Tape, uri: SessionUri) -> None:
    with tape.step(store, removes=_all_of(tape.world, uri)):
        store.delete_session(uri)


def _all_of(world: World, uri: SessionUri) -> list[Version | Mark]:
    return [one for one in world if (one.uri == uri if isinstance(one, Version) else one.name == str(uri))]


def one_asleep(path: Path) -> World:
    with Store.open(path, writable=True) as store:
        sleep(store, FIRST)
    return frozenset({FIRST, *_said(URI, FIRST.token_count)})


def turns(path: Path, tape: Tape) -> None:
    """Turns of a session that slept and of one that never did, together and alone; a sleep that covers some, turns
    behind it; a delete; the next opening, which makes versions of what is left; and then more of all."""
    with Store.open(path, writable=True) as store:
        say(store, tape, first=265, new=20)
        say(store, tape, first=270)
        say(store, tape, gone=60)
        put_to_sleep(store, tape, SECOND)
        say(store, tape, first=530, gone=290)
        delete(store, tape, GONE)
    with Store.open(path, writable=True) as store:
        say(store, tape, new=60)
        say(store, tape, first=540, new=265)
        put_to_sleep(store, tape, Version(NEW, 2, 290, seed=_SEEDS[NEW]))
        delete(store, tape, URI)
        say(store, tape, gone=60)
        delete(store, tape, GONE)


_written_anew = functools.partial(mock.patch.multiple, journal, _STEP_BYTES=8, _SMALL_BYTES=0, _VOID_SHARE=0)
"""Meanwhile the journal is written anew before each turn."""


def turns_anew(path: Path, tape: Tape) -> None:
    with _written_anew():
        turns(path, tape)


def a_way_back(path: Path, tape: Tape) -> None:
    """A sleep takes the place of turns that it does not begin with: these do not come back."""
    shorter = Version(URI, 2, 30)
    with Store.open(path, writable=True) as store:
        say(store, tape, Version(URI, 3, 260, tail=10, is_optional=True), first=270, new=20)
        gone = [one for one in _all_of(tape.world, URI) if one not in (FIRST, *_said(URI, shorter.token_count))]
        with tape.step(store, adds=[shorter], removes=gone):
            sleep(store, shorter)
        say(store, tape, new=30)


def a_foreign_journal(path: Path) -> World:
    """The journal of another store lies in the place of this one's."""
    elsewhere = path.parent / "elsewhere"
    with Store.open(elsewhere, writable=True) as store:
        store.acknowledge([making.turn(store, 20)])
        foreign = (elsewhere / "journal" / journal.TURNS_FILE).read_bytes()
    shutil.rmtree(elsewhere)
    world = one_asleep(path)
    (path / "journal").mkdir(mode=0o700)
    for place in (path.parent / "foreign", path / "journal" / journal.TURNS_FILE):
        place.write_bytes(foreign)
        place.chmod(0o600)
    return world | {Mark("foreign", "its bytes")}


def foreign_bytes(path: Path) -> Iterator[Mark]:
    foreign = (path.parent / "foreign").read_bytes()
    if any(file.read_bytes() == foreign for name in ("journal", "damaged") for file in (path / name).glob("*")):
        yield Mark("foreign", "its bytes")


def put_aside(path: Path, tape: Tape) -> None:
    with Store.open(path, writable=True) as store:
        say(store, tape, first=265)


# --- forget

_TRACES: Final = {"name": SECRET.name.encode(), "turn": making.token_ids(520, 10, _SEEDS[SECRET])}


def a_secret(path: Path) -> World:
    secret = Version(SECRET, 1, 516, seed=_SEEDS[SECRET])
    with Store.open(path, writable=True) as store:
        sleep(store, FIRST)
        sleep(store, secret)
    promised = [*_said(URI, FIRST.token_count), *_said(SECRET, secret.token_count), Mark("trace", "name")]
    return frozenset({FIRST, secret, *promised})


def forgotten(path: Path, tape: Tape) -> None:
    """A session with turns is forgotten while another one has some: these stay, and no byte of the others does."""
    with Store.open(path, writable=True) as store:
        say(store, tape, secret=520, first=265)
        say(store, tape, Mark("trace", "turn"), secret=530)
        say(store, tape, first=270)
        marks = [Mark("trace", kind) for kind in _TRACES]
        with tape.step(store, removes=[*_all_of(tape.world, SECRET), *marks]) as unsure:
            if store.forget(SECRET).problems:
                unsure.update(marks)
        say(store, tape, first=290)


def forgotten_anew(path: Path, tape: Tape) -> None:
    with _written_anew():
        forgotten(path, tape)


_FORGETTING: Final = dataclasses.replace(seeing(_TRACES), marks=said)

SCENARIOS: Iterable[Scenario] = (
    Scenario("turns", one_asleep, turns, Sees(marks=said)),
    Scenario("turns_anew", one_asleep, turns_anew, Sees(marks=said)),
    Scenario("turns_and_a_way_back", one_asleep, a_way_back, Sees(marks=said)),
    Scenario("turns_beside_foreign_ones", a_foreign_journal, put_aside, Sees(marks=said, files=foreign_bytes)),
    Scenario("turns_forgotten", a_secret, forgotten, _FORGETTING),
    Scenario("turns_forgotten_anew", a_secret, forgotten_anew, _FORGETTING),
)
