"""Tags and pins: the marks that people give to versions, in STORE/marks.json. Primary data: nothing can rebuild it.

Owns the file and its strict reader. Knows no bundles: a mark names a version by bundle id and number, and the caller
checks whether it exists. Marks are values; a change gives new ones, `save` makes them durable.

Rules:
- The file has a digest over all of it (`sealed_json`); a reader takes it whole or raises CorruptMarks.
- An unreadable file never counts as empty. A missing file means that nothing was ever marked, unless store.json says
  that there was one: MarksLost. A tag with `move` then accepts that the old marks are lost.
- It is replaced by one rename: a crash leaves the old marks or the new ones.
- Load, change and save under the store's lock and its writing lock, else one of two changes is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ..disk import durable
from ..disk.paths import closing_fd, list_names, read_small, read_up_to
from ..disk.sealed_json import SealedFormat, reason_of
from ..errors import CorruptMarks, InvalidTag, InvalidUri, LimitExceeded, MarkNotFound, MarksLost, StoreError, TagTaken
from ..limits import MAX_MARKS, MAX_MARKS_BYTES, MAX_MARKS_NODES, MAX_VERSION
from ..uri import VERSION_MARK, SessionUri, require_tag
from . import quarantine
from .folder import StoreFolder

MARKS_FILE: Final = "marks.json"
MARKS_VERSION: Final = 1

_FORMAT: Final = SealedFormat("torpor.marks", MARKS_VERSION, MAX_MARKS_BYTES, MAX_MARKS_NODES)
_ID_BYTES: Final = 32
_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHORT_ID_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class SessionMarks:
    """The marks of one session: the bundle id of each tag, the pinned bundles, and the version number of each marked
    bundle, for a mark may be all that is left of a version.

    Raises:
        ValueError: there are numbers of other bundles than have marks, or impossible version numbers.
    """

    tags: Mapping[str, bytes] = field(default_factory=dict)
    pins: frozenset[bytes] = frozenset()
    numbers: Mapping[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.numbers.keys() != self.pins.union(self.tags.values()):
            raise ValueError("there are version numbers of other bundles than have marks")
        if not all(type(number) is int and 1 <= number <= MAX_VERSION for number in self.numbers.values()):
            raise ValueError(f"a version number in it is not 1 to {MAX_VERSION}")

    def __len__(self) -> int:
        return len(self.tags) + len(self.pins)


@dataclass(frozen=True, slots=True)
class VersionMarks:
    """The marks of one version: its tags, sorted, and whether it is pinned."""

    tags: tuple[str, ...] = ()
    pinned: bool = False

    def __bool__(self) -> bool:
        return self.pinned or bool(self.tags)


_NO_MARKS: Final = SessionMarks()
_UNMARKED: Final = VersionMarks()


@dataclass(frozen=True)
class Marks:
    """All marks of one store. Immutable, so safe to share between threads."""

    store_uuid: str
    sessions: Mapping[SessionUri, SessionMarks] = field(default_factory=dict)
    _by_bundle: Mapping[bytes, VersionMarks] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        marked = {uri: marks for uri, marks in self.sessions.items() if marks}
        total = sum(len(marks) for marks in marked.values())
        if total > MAX_MARKS:
            raise LimitExceeded(f"a store has at most {MAX_MARKS} tags and pins, not {total}.", limit=MAX_MARKS)
        object.__setattr__(self, "sessions", MappingProxyType(marked))
        object.__setattr__(self, "_by_bundle", _by_bundle(marked.values()))

    # --- the file

    @classmethod
    def load(cls, folder: StoreFolder) -> Marks:
        """Read the marks of a store. Raises CorruptMarks, MarksLost, UnsupportedFormat (a later version), UnsafePath;
        without a file, also the errors of store.json."""
        path = f"{folder.path}/{MARKS_FILE}"
        data = _read_file(folder.root_fd, path)
        if data is None and folder.require_store_file().marked:
            data = _read_file(folder.root_fd, path)  # the very first mark may have come between the two looks
            if data is None:
                raise marks_lost(folder)
        return cls(folder.uuid) if data is None else decode_marks(data, folder.uuid, path)

    def save(self, folder: StoreFolder) -> int:
        """Replace the store's marks, durably; the file's bytes. Raises NoSpace, StoreIoError, DurabilityLost."""
        data = encode_marks(self)
        if not folder.require_store_file().marked:
            # At any cut, store.json names no file that never was, and names the one with acknowledged marks.
            if MARKS_FILE not in list_names(folder.root_fd, folder.path):
                _write(folder, encode_marks(Marks(self.store_uuid)))
            folder.write_store_file(marked=True)
        _write(folder, data)
        return len(data)

    # --- asking

    @property
    def bundle_ids(self) -> frozenset[bytes]:
        return frozenset(self._by_bundle)

    def session(self, uri: SessionUri) -> SessionMarks:
        return self.sessions.get(uri, _NO_MARKS)

    def of(self, bundle_id: bytes) -> VersionMarks:
        """The marks of the version in this bundle."""
        return self._by_bundle.get(bundle_id, _UNMARKED)

    def tagged(self, uri: SessionUri, tag: str) -> bytes | None:
        return self.session(uri).tags.get(tag)

    def owner_of(self, bundle_id: bytes) -> tuple[SessionUri, int] | None:
        """The session and number of a marked bundle; None without marks."""
        if bundle_id not in self._by_bundle:
            return None
        return next((uri, of.numbers[bundle_id]) for uri, of in self.sessions.items() if bundle_id in of.numbers)

    def dangling(self, known: Container[bytes]) -> list[tuple[SessionUri, bytes]]:
        """The marked bundles that are not among `known`, each with its session."""
        return [
            (uri, bundle_id)
            for uri, marks in sorted(self.sessions.items())
            for bundle_id in sorted(marks.numbers)
            if bundle_id not in known
        ]

    # --- changing

    def tag(self, uri: SessionUri, bundle_id: bytes, number: int, tag: str, *, move: bool = False) -> Marks:
        """Let a tag name the version of this bundle and number. `move` takes the tag from another version of the
        session.

        Raises:
            InvalidTag, TagTaken, LimitExceeded
        """
        require_tag(tag)
        named = self.tagged(uri, tag)
        if named is not None and named != bundle_id and not move:
            raise TagTaken(
                f"The tag {tag!r} already names {_reference(uri, named)}. Move it (--move), or choose another tag.",
                session=str(uri),
                tag=tag,
                bundle_id=named.hex(),
            )
        marks = self.session(uri)
        tags = {**marks.tags, tag: _require_id(bundle_id)}
        return self._with(uri, _marked(tags, marks.pins, {**marks.numbers, bundle_id: number}))

    def untag(self, uri: SessionUri, tag: str) -> Marks:
        """Take a tag away. Raises InvalidTag, MarkNotFound."""
        require_tag(tag)
        marks = self.session(uri)
        if tag not in marks.tags:
            there = f"its tags are {', '.join(sorted(marks.tags)[:8])}" if marks.tags else "it has none"
            raise MarkNotFound(f"{uri} has no tag {tag!r}; {there}.", session=str(uri), tag=tag)
        tags = {name: named for name, named in marks.tags.items() if name != tag}
        return self._with(uri, _marked(tags, marks.pins, marks.numbers))

    def pin(self, uri: SessionUri, bundle_id: bytes, number: int) -> Marks:
        """Keep a version, the one of this number, against any retention; a second pin changes nothing. Raises
        LimitExceeded."""
        marks = self.session(uri)
        pins = marks.pins | {_require_id(bundle_id)}
        return self._with(uri, _marked(marks.tags, pins, {**marks.numbers, bundle_id: number}))

    def unpin(self, uri: SessionUri, bundle_id: bytes) -> Marks:
        """Give a version back to the retention. Raises MarkNotFound."""
        marks = self.session(uri)
        if bundle_id not in marks.pins:
            raise MarkNotFound(
                f"{_reference(uri, bundle_id)} is not pinned.", session=str(uri), bundle_id=bundle_id.hex()
            )
        return self._with(uri, _marked(marks.tags, marks.pins - {bundle_id}, marks.numbers))

    def without(self, uri: SessionUri) -> Marks:
        """No marks of this session: it was deleted or forgotten."""
        return self._with(uri, _NO_MARKS)

    def without_bundles(self, bundle_ids: Iterable[bytes]) -> Marks:
        """No marks of these versions, in any session: they are gone."""
        gone = frozenset(bundle_ids)
        return Marks(self.store_uuid, {uri: _left(marks, gone) for uri, marks in self.sessions.items()})

    def with_those_of(self, later: Marks) -> Marks:
        """These marks and those of another value; where both have a tag, it names the version that it names there.
        Raises LimitExceeded."""
        return Marks(
            self.store_uuid,
            {uri: _joined(self.session(uri), later.session(uri)) for uri in {**self.sessions, **later.sessions}},
        )

    def _with(self, uri: SessionUri, marks: SessionMarks) -> Marks:
        return Marks(self.store_uuid, {**self.sessions, uri: marks})


def _left(marks: SessionMarks, gone: frozenset[bytes]) -> SessionMarks:
    tags = {tag: named for tag, named in marks.tags.items() if named not in gone}
    return _marked(tags, marks.pins - gone, marks.numbers)


def _joined(marks: SessionMarks, later: SessionMarks) -> SessionMarks:
    return _marked({**marks.tags, **later.tags}, marks.pins | later.pins, {**marks.numbers, **later.numbers})


def _marked(tags: Mapping[str, bytes], pins: frozenset[bytes], numbers: Mapping[bytes, int]) -> SessionMarks:
    return SessionMarks(tags, pins, {one: numbers[one] for one in pins.union(tags.values())})


def _by_bundle(sessions: Iterable[SessionMarks]) -> Mapping[bytes, VersionMarks]:
    tags: dict[bytes, list[str]] = {}
    pins: set[bytes] = set()
    for marks in sessions:
        pins |= marks.pins
        for tag, bundle_id in marks.tags.items():
            tags.setdefault(bundle_id, []).append(tag)
    return {
        bundle_id: VersionMarks(tuple(sorted(tags.get(bundle_id, ()))), bundle_id in pins)
        for bundle_id in pins.union(tags)
    }


def _require_id(bundle_id: bytes) -> bytes:
    if not isinstance(bundle_id, bytes) or len(bundle_id) != _ID_BYTES:
        raise ValueError("a bundle id has 32 bytes")
    return bundle_id


def _reference(uri: SessionUri, bundle_id: bytes) -> str:
    return f"{uri}{VERSION_MARK}{bundle_id.hex()[:_SHORT_ID_DIGITS]}"


# --- the bytes


def encode_marks(marks: Marks) -> bytes:
    """The file's bytes: the same marks of the same store give the same bytes."""
    return _FORMAT.encode(
        {
            "store": marks.store_uuid,
            "sessions": {
                str(uri): {
                    "pins": sorted(pinned.hex() for pinned in of.pins),
                    "tags": {tag: named.hex() for tag, named in of.tags.items()},
                    "versions": {bundle_id.hex(): number for bundle_id, number in of.numbers.items()},
                }
                for uri, of in marks.sessions.items()
            },
        }
    )


def decode_marks(data: bytes, store_uuid: str, path: str) -> Marks:
    """Read the file's bytes. Raises CorruptMarks for anything that `encode_marks` would not have written here."""
    try:
        fields = _FORMAT.decode(data, path)
        if fields.get("store") != store_uuid:
            raise ValueError("it belongs to another store")
        marks = Marks(store_uuid, _sessions(fields.get("sessions")))
        if encode_marks(marks) != data:  # any other fault: keys, the order of pins
            raise ValueError("it is not in the form in which it is written")
        return marks
    except (ValueError, TypeError, RecursionError, InvalidUri, InvalidTag, LimitExceeded) as error:
        raise CorruptMarks(
            f"{path} is damaged: {reason_of(error)}. Put it back from a backup, or let `torpor repair` move it away "
            "(the tags and pins in it are lost then). Until then no version is removed by a rule.",
            path=path,
            reason=reason_of(error),
        ) from error


def uuid_in_marks(root_fd: int, path: str) -> str | None:
    """The uuid of the store whose marks lie in a folder; None if none can be read. Raises UnsafePath, StoreIoError."""
    file_path = f"{path}/{MARKS_FILE}"
    data = _read_file(root_fd, file_path)
    if data is None:
        return None
    try:
        found = str(uuid.UUID(_FORMAT.decode(data, file_path).get("store")))
        decode_marks(data, found, file_path)
    except (ValueError, TypeError, AttributeError, RecursionError, StoreError):
        return None
    return found


def _sessions(value: Any) -> dict[SessionUri, SessionMarks]:
    if not isinstance(value, dict):
        raise ValueError("it has no map of sessions")  # noqa: TRY004
    return {SessionUri.parse(text): _session(marks) for text, marks in value.items()}


def _session(value: Any) -> SessionMarks:
    if not isinstance(value, dict) or value.keys() != {"pins", "tags", "versions"}:
        raise ValueError("a session in it has other keys than pins, tags and versions")
    pins, tags, numbers = value["pins"], value["tags"], value["versions"]
    if not isinstance(pins, list) or not isinstance(tags, dict) or not (pins or tags):
        raise ValueError("a session in it has no list of pins, no map of tags, or neither pins nor tags")
    if not isinstance(numbers, dict):
        raise ValueError("a session in it has no map of versions")  # noqa: TRY004
    return SessionMarks(
        {require_tag(tag): _id(text) for tag, text in tags.items()},
        frozenset(map(_id, pins)),
        {_id(text): number for text, number in numbers.items()},
    )


def _id(text: Any) -> bytes:
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise ValueError("a bundle id in it is not 64 hex digits")
    return bytes.fromhex(text)


def marks_lost(folder: StoreFolder, last_aside: str | None = None) -> MarksLost:
    """The error for lost marks, with advice; `last_aside`: where damaged ones are being moved now."""
    path = f"{folder.path}/{MARKS_FILE}"
    way_back = _way_back(folder, path, last_aside)
    return MarksLost(
        f"{path} is missing, and there were tags or pins in it. {way_back} Where there is none, mark anew what is to "
        "stay, first with `torpor tag SESSION@VERSION TAG --move`. Until then no version is removed by a rule.",
        path=path,
    )


def _way_back(folder: StoreFolder, path: str, last_aside: str | None) -> str:
    """The first advice for lost marks: a file that was set aside may be whole."""
    aside = quarantine.places_of(folder, MARKS_FILE)
    for place in reversed(aside):
        with contextlib.suppress(StoreError):
            with closing_fd(quarantine.open_name(folder, os.path.basename(place))[0]) as fd:
                data = read_up_to(fd, MAX_MARKS_BYTES + 1, place)
            decode_marks(data, folder.uuid, place)
            return f"{place} is whole: move it back to {path}."
    if last_aside or aside:
        return (
            f"Put it back from a backup. {last_aside or aside[-1]} is what was set aside of it: damaged, but it may "
            "still show what was marked."
        )
    return "Put it back from a backup."


def _write(folder: StoreFolder, data: bytes) -> None:
    in_bundles = folder.bundles_fd  # where leftovers are looked for
    durable.write_file(folder.root_fd, MARKS_FILE, data, folder.path, temp_fd=in_bundles, replacing=True)


def _read_file(root_fd: int, path: str) -> bytes | None:
    """The file's bytes, or one more than it may have; None if there is none."""
    try:
        return read_small(root_fd, MARKS_FILE, MAX_MARKS_BYTES, path)
    except FileNotFoundError:
        return None
