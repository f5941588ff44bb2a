"""The diary: entries that are appended one after the other. What is damaged is skipped, so nothing is ever refused.

The second decoder was written from docs/reference/diary.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, Final

import msgpack
from blake3 import blake3
from torpor.memvid.errors import InvalidUri
from torpor.memvid.folder.diary import DIARY_FILE, Diary, Entry
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.store_file import open_or_make_root
from torpor.memvid.recovery.opening import create_store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.fuzz.mutation import INTERESTING, change_bytes
from torpor.tests.memvid.fuzz.target import SOUND, Target, require

_URIS: Final = tuple(SessionUri("default", name) for name in ("a", "ab", "other"))
_MAGIC: Final = b"\xd1mvd"
_HEAD: Final = struct.Struct("<4sHHQ8s")
_MOST_DAMAGE: Final = 1024
_ALL: Final = "all sessions"
_BODIES: Final = (
    None, [], {}, "torpor://default/a", ["torpor://default/a"], [""], ["x"], [None], ["torpor://default/a", 1],
    {"torpor://default/a": 1}, ["", {}, {}, "", {}], ["torpor://default/a", {}, {}, "", {}],
    ["torpor://default/a", {"n": 1}, {"w": "a"}, "torpor://default/ab", {"o": 2}],
    ["torpor://default/a", [], {}, "", {}], [b"torpor://default/a", {}, {}, "", {}], "abcde",
    [0, {}, {}, 0, {}], [[], {}, {}, "", {}],
)  # fmt: skip

Told = tuple[int, Any, str | None, Any, str | None, Any]


def _short(data: bytes) -> bytes:
    return blake3(data).digest()[:8]


def _head_of(applied_ns: int) -> bytes:
    begun = b"TORPORD1" + struct.pack("<Q", applied_ns)
    return begun + _short(begun)


def _frame(kind: int, at_ns: int, body: bytes) -> bytes:
    begun = _HEAD.pack(_MAGIC, len(body) & 0xFFFF, kind, at_ns, b"")[:16]
    return begun + _short(begun + body) + body


# --- the second decoder


def decoded(data: bytes) -> tuple[list[Told], bool]:
    """What a reader is told, and whether nothing is damaged."""
    applied_ns = int.from_bytes(data[8:16], "little")
    if len(data) < 24 or data[:24] != _head_of(applied_ns) or applied_ns >> 63:
        return [], False
    place, damaged = 24, 0
    said: list[Told] = []
    deleted: list[tuple[int, str]] = []
    while place < len(data) and damaged < _MOST_DAMAGE:
        end = _end_of_frame(data, place)
        known = None if end is None else _read_frame(data[place:end])
        if end is None or known is None:
            damaged += 1
            place = data.find(_MAGIC, place + 1)
            if place < 0:
                break
            continue
        place = end
        if len(known) == 6:
            said.append(known)
        elif len(known) == 2:
            deleted.append(known)
    gone = [(at_ns, uri) for at_ns, uri in deleted if at_ns > applied_ns]
    return [_left_of(one, {uri for at_ns, uri in gone if at_ns > one[0]}) for one in said], not damaged


def _end_of_frame(data: bytes, place: int) -> int | None:
    head = data[place : place + 24]
    if len(head) < 24 or head[:4] != _MAGIC:
        return None
    length = int.from_bytes(head[4:6], "little")
    return place + 24 + length if length <= 488 and place + 24 + length <= len(data) else None


def _read_frame(frame: bytes) -> Any:
    """The six parts of an entry, the two of a delete, none of another kind or form; None for a damaged one."""
    _, _, kind, at_ns, digest = _HEAD.unpack_from(frame)
    body = frame[24:]
    if digest != _short(frame[:16] + body) or at_ns >> 63:
        return None
    try:
        parts = msgpack.unpackb(body)
        if kind > 1:
            return ()
        if type(parts) is not list or len(parts) != (1 if kind else 5):
            return ()
        if kind:
            return at_ns, str(SessionUri.parse(parts[0])) if parts[0] != "" else _ALL
        uri, facts, words, other, others = parts
        if not all(type(each) is dict for each in (facts, words, others)):
            return ()
        names = [str(SessionUri.parse(each)) if each != "" else None for each in (uri, other)]
    except (ValueError, TypeError, InvalidUri, msgpack.UnpackException):
        return ()
    return at_ns, facts, names[0], words, names[1], others


def _left_of(one: Told, gone: set[str]) -> Told:
    at_ns, facts, uri, _, other, _ = one
    if uri is not None and not gone.isdisjoint((uri, _ALL)):
        return at_ns, facts, None, {}, None, {}
    return (*one[:4], None, {}) if other is not None and not gone.isdisjoint((other, _ALL)) else one


def _told(entry: Entry) -> Told:
    names = [None if uri is None else str(uri) for uri in (entry.uri, entry.other)]
    return entry.at_ns, entry.facts, names[0], entry.words, names[1], entry.other_words


class DiaryTarget(Target):
    name = "diary"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = str(folder / "store")
        root_fd = open_or_make_root(path)
        self._folder = StoreFolder(path, root_fd, create_store(root_fd, path))
        self._path = folder / "store" / DIARY_FILE

    def seeds(self) -> Iterable[bytes]:
        yield _head_of(0)
        diary = Diary(self._folder)
        self._path.unlink(missing_ok=True)
        for number in range(8):
            diary.say(
                {"n": number}, _URIS[number % 2], {"w": "w" * number}, _URIS[2], {"o": "others"}, at_ns=1000 + number
            )
        diary.end(_URIS[1])
        diary.say({"n": 8}, _URIS[1], {"w": "again"})
        diary.write()
        yield self._path.read_bytes()
        yield _head_of(5) + _frame(7, 9, b"\xc0") + _frame(0, 3, msgpack.packb(_BODIES[12]))

    def change(self, data: bytes, rng: Random) -> bytes:
        places = [at for at in range(24, len(data)) if data.startswith(_MAGIC, at)]
        if not places or rng.random() < 0.3:
            return change_bytes(data, rng)
        at = rng.choice(places)
        end = _end_of_frame(data, at) or len(data)
        _, _, kind, at_ns, _ = _HEAD.unpack_from(data[at:].ljust(24, b"\0"))
        body, choice = data[at + 24 : end], rng.randrange(5)
        if choice == 0:
            body = change_bytes(body, rng)
        elif choice == 1:
            body = bytes(msgpack.packb(rng.choice(_BODIES)))
        elif choice == 2:
            at_ns = rng.choice((rng.choice(INTERESTING) % (1 << 62), (1 << 64) - 1))  # so that there is a later one
        elif choice == 3:
            kind = rng.randrange(3)
        new = _frame(kind, at_ns, body)
        return data[:at] + new + data[at if choice == 4 else end :]

    def check(self, data: bytes) -> str:
        self._path.write_bytes(data)
        os.chmod(self._path, 0o600)
        diary = Diary(self._folder)
        entries = diary.read()
        wanted, is_whole = decoded(data)
        require(repr([_told(each) for each in entries]) == repr(wanted), "other entries are read")
        for uri in {each.uri for each in entries}.union(_URIS) - {None}:
            its = [each for each in entries if each.uri == uri]
            require(repr(diary.read(uri=uri)) == repr(its), "a session has other entries alone")
        for since_ns in {each.at_ns for each in entries[:4]}:
            later = [each for each in entries if each.at_ns >= since_ns]
            require(repr(diary.read(since_ns)) == repr(later), "since a time there are other entries")
        self._go_on(diary, entries)
        return SOUND if is_whole else "damaged"

    def _go_on(self, diary: Diary, entries: list[Entry]) -> None:
        """Something is said, a session is deleted, and another one forgotten; each holds when it is read again."""
        gone, forgotten = _URIS[:2]
        diary.end(gone)
        diary.say({"n": "last"}, gone, {"w": "new"})
        diary.write()
        again = Diary(self._folder).read()
        require([each.facts for each in again[-1:]] == [{"n": "last"}], "what is said last is not the last")
        require(len(again) == len(entries) + 1, "others have come or gone")
        require(not any(gone in (each.uri, each.other) for each in again[:-1]), "a deleted session is told of")
        diary.erase(forgotten)
        again = Diary(self._folder).read()
        require(not any(forgotten in (each.uri, each.other) for each in again), "a forgotten session is told of")


TARGETS: Final[tuple[type[Target], ...]] = (DiaryTarget,)
