"""STORE/diary.mvd and diary.old.mvd: a bounded diary of what the layers above say of sessions, the newest last.

Owns the bytes, their bound, and that nothing of a forgotten session stays in them. Does not know what an entry says.

Rules:
- Entries are only appended, some at a time, and never flushed: a crash costs the last ones, and no answer waits.
- Each has a digest of its own. What is damaged, as a torn end, is no entry, and is cut or skipped.
- A full file takes the place of the older one, which goes: so the oldest entries go first.
- A delete of a session is an entry too: whoever reads sees neither name nor words of what is deleted. It waits until
  it is written or applied: a failed write, or many entries behind it, costs none. Where too many wait, one takes their
  place that is of all sessions. A time is later than all before it, also than those of an earlier process, for a clock
  that is set back would undo deletes.
- `erase` writes both files anew, the older one first: durably, without the session, and without what was deleted.
- The diary is never needed. A file that cannot be used is read as an empty one, and written anew.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import msgpack
from blake3 import blake3

from ..disk import durable
from ..disk.paths import closing_fd, open_file, plain_status, read_small, stat_open
from ..errors import DurabilityLost, InvalidUri, StoreError, StoreIoError, UnsafePath
from ..limits import MIB
from ..uri import SessionUri
from .folder import StoreFolder

DIARY_FILE: Final = "diary.mvd"
OLD_DIARY_FILE: Final = "diary.old.mvd"
DIARY_FILES: Final = (OLD_DIARY_FILE, DIARY_FILE)
"""The older one first."""

CUT: Final = "\N{HORIZONTAL ELLIPSIS}"
"""The end of a text that was cut short."""

MAX_DIARY_BYTES: Final = 16 * MIB
"""Both files of the diary: some 60,000 entries. The oldest go first."""

MAX_DIARY_ENTRY_BYTES: Final = 512
"""One entry with its frame."""

MAX_UNWRITTEN: Final = 4096
"""Entries that wait to be written; further ones push out the oldest, but no delete. So many are written at once."""

MAX_ENDED: Final = 4096
"""Deletes that wait to be written, as where the disk is full. One more, and all sessions count as deleted."""

MAX_DAMAGED_PLACES: Final = 1024
"""In one file; what stands behind them is not looked at. Else a crafted file would cost seconds at each read."""

_HALF_BYTES: Final = MAX_DIARY_BYTES // 2
_FILE_MAGIC: Final = b"TORPORD1"
_MAGIC: Final = b"\xd1mvd"
_FILE_HEAD: Final = struct.Struct("<8sQ8s")
_HEAD: Final = struct.Struct("<4sHHQ8s")
_SAYS, _ENDS = range(2)
_MAX_NS: Final = 1 << 63
_DAMAGED: Final = False


@dataclass(frozen=True, slots=True)
class Entry:
    """What is said of a session at a time, by the Unix clock. facts: stay when the session is deleted, and have nothing
    of it. words: go with it. other: a session that the entry is about, too, with the words that go with either."""

    at_ns: int
    facts: Mapping[str, Any]
    uri: SessionUri | None
    words: Mapping[str, Any]
    other: SessionUri | None = None
    other_words: Mapping[str, Any] = field(default_factory=dict)

    def without(self, is_gone: Callable[[SessionUri], bool]) -> Entry:
        """The entry without the names of sessions that are gone, and without their words."""
        if self.uri is not None and is_gone(self.uri):
            return Entry(self.at_ns, self.facts, None, {})
        return replace(self, other=None, other_words={}) if self.other is not None and is_gone(self.other) else self


@dataclass(frozen=True, slots=True)
class _End:
    """A session was deleted; None: any may have been."""

    at_ns: int
    uri: SessionUri | None


@dataclass(frozen=True, slots=True)
class _Found:
    """What a file has. data: None without one. applied_ns: its entries have nothing of what was deleted until then.
    newest_ns: the latest time in it, at most that of an entry that was looked at. end: of what is sound. is_whole: all
    of it is."""

    data: bytes | None = None
    applied_ns: int = 0
    entries: Sequence[Entry] = ()
    ends: Sequence[_End] = ()
    newest_ns: int = 0
    end: int = 0
    is_whole: bool = True


_Ended = dict[SessionUri | None, int]
"""The last delete of each name, or of all, and when."""


class Diary:
    """The diary of one open store. Safe from several threads.

    problem: why a file could not be read or written the last time; None if it could.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # of the files
        self._saying = threading.Lock()  # of what waits: never held while a file is read or written
        self._waiting: deque[Entry] = deque(maxlen=MAX_UNWRITTEN)
        self._ended: _Ended = {}  # deletes that wait
        self._has_said = False
        self._last_ns = 0
        self._is_behind_files = False  # the time: it is later than all in the files
        self._end = -1  # of the sound part of the file that was written last; -1: not known
        self.problem: str | None = None

    def path_of(self, name: str) -> str:
        return self._folder.path_of(name)

    # --- saying

    def say(
        self,
        facts: Mapping[str, Any],
        uri: SessionUri,
        words: Mapping[str, Any],
        other: SessionUri | None = None,
        other_words: Mapping[str, Any] | None = None,
        *,
        at_ns: int | None = None,
    ) -> None:
        """Say something of a session, to be written by the next `write`. Texts that find no room in an entry are cut
        short. Waits for no disk."""
        entry = Entry(0, facts, uri, words, other, other_words or {})
        fitting = next((each for each in _shorter(entry) if len(_encoded(each)) <= MAX_DIARY_ENTRY_BYTES), None)
        if fitting is not None:
            with self._saying:
                self._has_said = True
                self._waiting.append(replace(fitting, at_ns=self._now(at_ns)))

    def end(self, uri: SessionUri) -> None:
        """Say that a session is deleted. Waits for no disk."""
        if self._has_said or any(plain_status(self._folder.root_fd, name) for name in DIARY_FILES):
            with self._saying:
                self._ends(uri, self._now())

    def _ends(self, uri: SessionUri, at_ns: int) -> None:
        """Let a delete wait. Within `_saying`."""
        self._ended[uri] = max(at_ns, self._ended.get(uri, 0))
        if len(self._ended) > MAX_ENDED:
            self._ended = {None: max(self._ended.values())}

    def _now(self, at_ns: int | None = None) -> int:
        """A time later than all before it. Within `_saying`."""
        self._last_ns = max(time.time_ns() if at_ns is None else at_ns, self._last_ns + 1)
        return self._last_ns

    def _get_behind_files(self) -> None:
        """Once: let what waits, and all that comes, be later than all in the files. Within `_lock`."""
        if self._is_behind_files:
            return
        newest_ns = max(each.newest_ns for each in self._found()[0].values())
        with self._saying:
            waiting = [*(each.at_ns for each in self._waiting), *self._ended.values()]
            later_ns = max(newest_ns + 1 - min(waiting, default=newest_ns + 1), 0)
            for at, each in enumerate(self._waiting):
                self._waiting[at] = replace(each, at_ns=each.at_ns + later_ns)
            for uri in self._ended:
                self._ended[uri] += later_ns
            self._last_ns = max(self._last_ns + later_ns, newest_ns)
        self._is_behind_files = True

    @property
    def has_unwritten(self) -> bool:
        return bool(self._waiting or self._ended)

    def write(self) -> None:
        """Append what was said since the last time, without a flush. What cannot be written is let go, except deletes:
        those wait on. Raises StoreError."""
        with self._lock:
            if not self.has_unwritten:
                return
            self._get_behind_files()
            with self._saying:
                ended = dict(self._ended)
                said: list[Entry | _End] = [*self._waiting, *_ends_of(ended)]
                self._waiting.clear()
            said.sort(key=lambda each: each.at_ns)
            try:
                for first in range(0, len(said), MAX_UNWRITTEN):
                    self._append(b"".join(map(_encoded, said[first : first + MAX_UNWRITTEN])))
                self.problem = None
            except StoreError as error:
                self._end, self.problem = -1, error.message
                raise
            except OSError as error:
                failure = durable.write_error(error, "write", self.path_of(DIARY_FILE))
                self._end, self.problem = -1, failure.message
                raise failure from error
            self._end_no_more(ended)

    def _end_no_more(self, ended: Mapping[SessionUri | None, int]) -> None:
        """These deletes wait no more, unless the name was deleted again."""
        with self._saying:
            for uri, at_ns in ended.items():
                if self._ended.get(uri) == at_ns:
                    del self._ended[uri]

    def _append(self, data: bytes) -> None:
        root_fd, path = self._folder.root_fd, self.path_of(DIARY_FILE)
        status = plain_status(root_fd, DIARY_FILE)
        if status is not None and status.st_size + len(data) > _HALF_BYTES:
            os.rename(DIARY_FILE, OLD_DIARY_FILE, src_dir_fd=root_fd, dst_dir_fd=root_fd)
            self._end = -1
        with closing_fd(open_file(root_fd, DIARY_FILE, os.O_RDWR | os.O_CREAT, path)) as fd:
            size = stat_open(fd, path).st_size
            if size != self._end:
                self._end = _scanned(self._data(DIARY_FILE)).end
                os.ftruncate(fd, self._end)
            if not self._end:
                data = _file_head(0) + data
            durable.write_at(fd, self._end, data, path)
            self._end += len(data)

    # --- reading

    def read(self, since_ns: int = 0, uri: SessionUri | None = None) -> list[Entry]:
        """All entries since a time, the oldest first; with `uri`, those of one session. What cannot be read is left
        out, and `problem` tells why. Whoever says something does not wait for it."""
        with self._lock:
            if self.has_unwritten:
                self._get_behind_files()
            found, failures = self._found(since_ns, None if uri is None else str(uri).encode())
            self.problem = failures[-1].message if failures else None
            with self._saying:
                late, told = list(self._waiting), _ends_of(self._ended)
        ends = [*(end for each in found.values() for end in each.ends), *told]
        parts = [*((each.entries, each.applied_ns) for each in found.values()), (late, 0)]
        entries = [one for part, applied_ns in parts for one in _left_of(part, ends, applied_ns)]
        return [each for each in entries if each.at_ns >= since_ns and (uri is None or each.uri == uri)]

    def _found(
        self, since_ns: int = 0, needle: bytes | None = None
    ) -> tuple[dict[str, _Found], list[UnsafePath | StoreIoError]]:
        """What each file has, and why some could not be read: such a file has nothing."""
        data, failures = self._each()
        return {name: _scanned(each, since_ns, needle) for name, each in data.items()}, failures

    def _each(self) -> tuple[dict[str, bytes | None], list[UnsafePath | StoreIoError]]:
        data, failures = dict[str, bytes | None](), list[UnsafePath | StoreIoError]()
        for name in DIARY_FILES:
            try:
                data[name] = self._data(name)
            except (UnsafePath, StoreIoError) as error:
                data[name] = None
                failures.append(error)
        return data, failures

    def _data(self, name: str) -> bytes | None:
        """The bytes of a file; None without one. Raises UnsafePath, StoreIoError."""
        try:
            return read_small(self._folder.root_fd, name, MAX_DIARY_BYTES, self.path_of(name))
        except FileNotFoundError:
            return None

    # --- forgetting

    def mentions(self, uri: SessionUri) -> bool:
        """Whether the name of a session stands in the files, also where no reader sees it. Raises UnsafePath,
        StoreIoError: that cannot be told of one of them, and the other has none."""
        with self._lock:
            data, failures = self._each()
        if _is_named(uri, data.values()):
            return True
        if failures:
            raise failures[0]
        return False

    def erase(self, uri: SessionUri) -> bool:
        """Leave nothing of a session, and in the files nothing of what is deleted or damaged, durably; whether they had
        its name. A file that cannot be read or written hinders the other one not.

        Raises:
            UnsafePath, StoreIoError, NoSpace, DurabilityLost: some may be left. No reader is told of it.
        """
        with self._lock:
            self._get_behind_files()
            found, failures = self._found()
            with self._saying:  # what is deleted behind this moment is not applied
                at_ns, ended = self._now(), dict(self._ended)
                self._waiting = deque(_but_of(_left_of(self._waiting, _ends_of(ended), 0), uri), MAX_UNWRITTEN)
            was_named = _is_named(uri, (each.data for each in found.values()))
            if was_named or not all(each.is_whole for each in found.values()):
                try:
                    self._write_anew(found, _ends_of(ended), uri, at_ns, are_all=not failures)
                except StoreError:
                    with self._saying:
                        self._ends(uri, at_ns)
                    raise
            else:
                ended = {uri: ended[uri]} if uri in ended else {}
            if failures:
                raise failures[0]
            self._end_no_more(ended)
            return was_named

    def _write_anew(
        self, found: Mapping[str, _Found], ended: Sequence[_End], gone: SessionUri, at_ns: int, *, are_all: bool
    ) -> None:
        """are_all: no file is left out; else, as where the older one fails, the deletes in the files stay. Raises the
        first failure, behind the last file; DurabilityLost at once."""
        self._end, failure = -1, None
        ends = [end for each in found.values() for end in each.ends]
        for name, each in found.items():
            if each.data is None:
                continue
            entries = _but_of(_left_of(each.entries, [*ends, *ended], each.applied_ns), gone)
            kept = () if are_all and failure is None else (end for end in ends if end.uri != gone)
            data = b"".join([_file_head(at_ns), *map(_encoded, (*entries, *kept))])
            try:
                durable.write_file(self._folder.root_fd, name, data, self._folder.path, replacing=True)
            except DurabilityLost:
                raise
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _is_named(uri: SessionUri, files: Iterable[bytes | None]) -> bool:
    name = uri.name.encode()
    return any(name in (each or b"") for each in files)


def _ends_of(ended: Mapping[SessionUri | None, int]) -> list[_End]:
    return [_End(at_ns, uri) for uri, at_ns in ended.items()]


def _left_of(entries: Sequence[Entry], ends: Sequence[_End], applied_ns: int) -> list[Entry]:
    """Entries without what was deleted behind them. applied_ns: they have nothing of what was deleted until then."""
    last: _Ended = {}
    for each in ends:
        if each.at_ns > applied_ns:
            last[each.uri] = max(each.at_ns, last.get(each.uri, 0))
    if not last:
        return list(entries)
    of_all = last.get(None, 0)
    return [entry.without(lambda uri, at_ns=entry.at_ns: max(last.get(uri, 0), of_all) > at_ns) for entry in entries]  # type: ignore[misc]


def _but_of(entries: Iterable[Entry], gone: SessionUri) -> Iterator[Entry]:
    return (each.without(gone.__eq__) for each in entries if each.uri != gone)


def _shorter(entry: Entry) -> Iterator[Entry]:
    """The entry, with ever shorter texts; without the other session at last, then without words."""
    yield entry
    for most in (160, 80, 40):
        yield replace(entry, words=_cut(entry.words, most), other_words=_cut(entry.other_words, most))
    yield replace(entry, words=_cut(entry.words, 40), other=None, other_words={})
    yield replace(entry, words={}, other=None, other_words={})


def _cut(words: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {
        name: f"{each[: most - 1]}{CUT}" if isinstance(each, str) and len(each) > most else each
        for name, each in words.items()
    }


# --- bytes


def _file_head(applied_ns: int) -> bytes:
    begun = _FILE_HEAD.pack(_FILE_MAGIC, applied_ns, b"")[:-8]
    return begun + blake3(begun).digest(8)


def _encoded(said: Entry | _End) -> bytes:
    if isinstance(said, Entry):
        kind, fields = _SAYS, [_text(said.uri), said.facts, said.words, _text(said.other), said.other_words]
    else:
        kind, fields = _ENDS, [_text(said.uri)]
    body = bytes(msgpack.packb(fields))
    head = _HEAD.pack(_MAGIC, len(body), kind, said.at_ns, b"")[:-8]
    return head + blake3(head + body).digest(8) + body


def _text(uri: SessionUri | None) -> str:
    return "" if uri is None else str(uri)


def _scanned(data: bytes | None, since_ns: int = 0, needle: bytes | None = None) -> _Found:
    """What a file has; of entries those since a time that have these bytes."""
    if data is None:
        return _Found()
    applied_ns = int.from_bytes(data[8:16], "little")
    if data[: _FILE_HEAD.size] != _file_head(applied_ns) or applied_ns >= _MAX_NS:
        return _Found(data, is_whole=not data)
    entries, deleted, damaged, newest_ns = list[Entry](), list[_End](), 0, applied_ns
    place = end = _FILE_HEAD.size
    while 0 <= place < len(data) and damaged < MAX_DAMAGED_PLACES:
        ends = _end_at(data, place)
        said = None if ends is None else _said(data, place, ends, since_ns, needle)
        if ends is None or said is _DAMAGED:
            damaged, place = damaged + 1, data.find(_MAGIC, place + 1)
            continue
        place = end = ends
        if type(said) is Entry:
            entries.append(said)
            newest_ns = max(newest_ns, said.at_ns)
        elif type(said) is _End:
            deleted.append(said)
            newest_ns = max(newest_ns, said.at_ns)
    return _Found(data, applied_ns, entries, deleted, newest_ns, end, not damaged)


def _end_at(data: bytes, place: int) -> int | None:
    """Where an entry ends, by its length; None if none begins at a place."""
    if data[place : place + len(_MAGIC)] != _MAGIC or len(data) - place < _HEAD.size:
        return None
    end = place + _HEAD.size + int.from_bytes(data[place + 4 : place + 6], "little")
    return end if end <= len(data) and end - place <= MAX_DIARY_ENTRY_BYTES else None


def _said(data: bytes, place: int, end: int, since_ns: int, needle: bytes | None) -> Entry | _End | bool | None:
    """What an entry says; None for one that is not wanted, of a later kind, or that nothing of ours wrote."""
    _, _, kind, at_ns, digest = _HEAD.unpack_from(data, place)
    begins = place + _HEAD.size
    body = data[begins:end]
    if at_ns >= _MAX_NS or blake3(data[place : begins - 8] + body).digest(8) != digest:
        return _DAMAGED  # also of what is not wanted: its length may be wrong, and hide what follows
    if kind == _SAYS and (at_ns < since_ns or (needle is not None and needle not in body)):
        return None
    try:
        return _decoded(kind, at_ns, msgpack.unpackb(body))
    except (ValueError, TypeError, InvalidUri, msgpack.UnpackException):
        return None


def _decoded(kind: int, at_ns: int, fields: Any) -> Entry | _End | None:
    if type(fields) is not list:
        return None
    if kind == _SAYS:
        uri, facts, words, other, other_words = fields
        if not type(facts) is type(words) is type(other_words) is dict:
            raise ValueError
        return Entry(at_ns, facts, _uri(uri), words, _uri(other), other_words)
    if kind == _ENDS:
        (ended,) = map(_uri, fields)
        return _End(at_ns, ended)
    return None


@lru_cache(4096)
def _uri(text: object) -> SessionUri | None:
    return SessionUri.parse(text) if text != "" else None  # type: ignore[arg-type]
