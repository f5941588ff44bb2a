"""Tags, pins and strips: the marks of versions, in STORE/marks.json. Primary data: nothing can rebuild it.

Owns the file and its strict reader. A mark names a version by its bundle id. A tag or a pin goes before its version
does. So one without a version tells of a version that is missing. A stripped version needs no keys and values:
`maintenance/stripping.py`. Marks are values; a change gives new ones, `save` makes them durable.

Rules:
- The file is there from the store's beginning. It has a digest over all of it (`sealed_json`); a reader takes it whole,
  or raises CorruptMarks or MarksLost. A tag with `move` accepts that lost marks are lost.
- It is replaced by one rename: a crash leaves the old marks or the new ones.
- Load, change and save under the store's lock and its writing lock, else one of two changes is lost.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from ..answers import Finding
from ..disk import durable
from ..disk.paths import Stamp, read_small, stamp_of, stat_name
from ..disk.sealed_json import UNDECODED, SealedFormat, reason_of
from ..errors import (
    PUT_BACK,
    BundleMissing,
    CorruptMarks,
    InvalidTag,
    InvalidUri,
    LimitExceeded,
    MarkNotFound,
    MarksLost,
    StoreError,
    StoreIoError,
    TagTaken,
    UnsupportedFormat,
)
from ..limits import MAX_MARKS, MAX_MARKS_BYTES, MAX_MARKS_NODES, MAX_STRIPS
from ..uri import VERSION_MARK, SessionUri, require_tag
from .folder import StoreFolder
from .store_file import create_folders, write_store_file

MARKS_FILE: Final = "marks.json"
MARKS_VERSION: Final = 2

_FORMAT: Final = SealedFormat("torpor.marks", MARKS_VERSION, MAX_MARKS_BYTES, MAX_MARKS_NODES)
_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHORT_ID_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class SessionMarks:
    """The marks of one session: the bundle id of each tag, the pinned bundles, and the stripped ones."""

    tags: Mapping[str, str] = field(default_factory=dict)
    pins: frozenset[str] = frozenset()
    stripped: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.tags) + len(self.pins) + len(self.stripped)

    @property
    def named(self) -> frozenset[str]:
        """The versions with a tag or a pin: one that is not there is missing, whether the index tells of it or not."""
        return self.pins.union(self.tags.values())

    @property
    def bundle_ids(self) -> frozenset[str]:
        return self.named | self.stripped

    def of(self, bundle_id: str) -> VersionMarks:
        """The marks of one of its versions."""
        tags = tuple(sorted(tag for tag, named in self.tags.items() if named == bundle_id))
        return VersionMarks(tags, bundle_id in self.pins, bundle_id in self.stripped)


@dataclass(frozen=True, slots=True)
class VersionMarks:
    """The marks of one version: its tags, sorted, whether it is pinned, and whether it is stripped."""

    tags: tuple[str, ...] = ()
    pinned: bool = False
    stripped: bool = False

    @property
    def keeps(self) -> bool:
        """Whether a mark keeps the version against any retention."""
        return self.pinned or bool(self.tags)


_NO_MARKS: Final = SessionMarks()
_UNMARKED: Final = VersionMarks()


@dataclass(frozen=True)
class Marks:
    """All marks of one store. Immutable, so safe to share between threads."""

    store_uuid: str
    sessions: Mapping[SessionUri, SessionMarks] = field(default_factory=dict)
    _by_bundle: Mapping[str, VersionMarks] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        marked = {uri: marks for uri, marks in self.sessions.items() if marks}
        total = sum(len(marks.tags) + len(marks.pins) for marks in marked.values())
        if total > MAX_MARKS:
            raise LimitExceeded(f"a store has at most {MAX_MARKS} tags and pins, not {total}.", limit=MAX_MARKS)
        stripped = sum(len(marks.stripped) for marks in marked.values())
        if stripped > MAX_STRIPS:
            raise LimitExceeded(
                f"a store has at most {MAX_STRIPS} stripped versions, not {stripped}.", limit=MAX_STRIPS
            )
        object.__setattr__(self, "sessions", MappingProxyType(marked))
        object.__setattr__(self, "_by_bundle", _by_bundle(marked.values()))

    # --- the file

    @classmethod
    def load(cls, folder: StoreFolder) -> Marks:
        """The marks of a store. The file is read only if it is another one than at the last call: each turn asks, and
        each step of a repack. Raises CorruptMarks, MarksLost, UnsupportedFormat (a later version), UnsafePath,
        StoreIoError."""
        path = f"{folder.path}/{MARKS_FILE}"
        try:
            return _read_once(folder, stamp_of(stat_name(folder.root_fd, MARKS_FILE, path)))
        except FileNotFoundError as error:
            raise marks_lost(path) from error

    def save(self, folder: StoreFolder) -> int:
        """Replace the store's marks, durably; the file's bytes. Raises NoSpace, StoreIoError, DurabilityLost."""
        data = encode_marks(self)
        write_marks(folder.root_fd, folder.path, data)
        _read_once.cache_clear()  # the number of a file that is gone is given again
        return len(data)

    # --- asking

    @property
    def bundle_ids(self) -> frozenset[str]:
        return frozenset(self._by_bundle)

    @property
    def stripped(self) -> frozenset[str]:
        """The versions that need no keys and values."""
        return frozenset(each for each, marks in self._by_bundle.items() if marks.stripped)

    def session(self, uri: SessionUri) -> SessionMarks:
        return self.sessions.get(uri, _NO_MARKS)

    def of(self, bundle_id: str) -> VersionMarks:
        """The marks of the version in this bundle."""
        return self._by_bundle.get(bundle_id, _UNMARKED)

    def tagged(self, uri: SessionUri, tag: str) -> str | None:
        return self.session(uri).tags.get(tag)

    @property
    def named(self) -> frozenset[str]:
        """The versions with a tag or a pin, of all sessions."""
        return frozenset().union(*(marks.named for marks in self.sessions.values()))

    # --- changing

    def tag(self, uri: SessionUri, bundle_id: str, tag: str, *, move: bool = False) -> Marks:
        """Let a tag name the version of this bundle. `move` takes the tag from another version of the session.

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
                bundle_id=named,
            )
        marks = self.session(uri)
        return self._with(uri, replace(marks, tags={**marks.tags, tag: require_id(bundle_id)}))

    def untag(self, uri: SessionUri, tag: str) -> Marks:
        """Take a tag away. Raises InvalidTag, MarkNotFound."""
        require_tag(tag)
        marks = self.session(uri)
        if tag not in marks.tags:
            there = f"its tags are {', '.join(sorted(marks.tags)[:8])}" if marks.tags else "it has none"
            raise MarkNotFound(f"{uri} has no tag {tag!r}; {there}.", session=str(uri), tag=tag)
        return self._with(uri, replace(marks, tags={name: at for name, at in marks.tags.items() if name != tag}))

    def pin(self, uri: SessionUri, bundle_id: str) -> Marks:
        """Keep a version against any retention; a second pin changes nothing. Raises LimitExceeded."""
        marks = self.session(uri)
        return self._with(uri, replace(marks, pins=marks.pins | {require_id(bundle_id)}))

    def unpin(self, uri: SessionUri, bundle_id: str) -> Marks:
        """Give a version back to the retention. Raises MarkNotFound."""
        marks = self.session(uri)
        if bundle_id not in marks.pins:
            raise MarkNotFound(f"{_reference(uri, bundle_id)} is not pinned.", session=str(uri), bundle_id=bundle_id)
        return self._with(uri, replace(marks, pins=marks.pins - {bundle_id}))

    def strip(self, versions: Mapping[SessionUri, Iterable[str]]) -> Marks:
        """These versions, the bundle ids by session, need no keys and values from now on. Raises LimitExceeded."""
        changed = dict(self.sessions)
        for uri, bundle_ids in versions.items():
            marks = self.session(uri)
            changed[uri] = replace(marks, stripped=marks.stripped.union(map(require_id, bundle_ids)))
        return Marks(self.store_uuid, changed)

    def without_bundles(self, bundle_ids: Collection[str], *, names: bool = True, strips: bool = True) -> Marks:
        """No marks of these versions, in any session. names: their tags and pins go. strips: their strips go."""
        gone, none = frozenset(bundle_ids), frozenset[str]()
        named, stripped = gone if names else none, gone if strips else none
        return Marks(self.store_uuid, {uri: _left(marks, named, stripped) for uri, marks in self.sessions.items()})

    def with_those_of(self, later: Marks) -> Marks:
        """These marks and those of another value; where both have a tag, it names the version that it names there. A
        strip is a fact of one store's room, and stays with its own.
        Raises LimitExceeded."""
        return Marks(
            self.store_uuid,
            {uri: _joined(self.session(uri), later.session(uri)) for uri in {**self.sessions, **later.sessions}},
        )

    def _with(self, uri: SessionUri, marks: SessionMarks) -> Marks:
        return Marks(self.store_uuid, {**self.sessions, uri: marks})


def _left(marks: SessionMarks, named: frozenset[str], stripped: frozenset[str]) -> SessionMarks:
    tags = {tag: bundle_id for tag, bundle_id in marks.tags.items() if bundle_id not in named}
    return SessionMarks(tags, marks.pins - named, marks.stripped - stripped)


def _joined(marks: SessionMarks, later: SessionMarks) -> SessionMarks:
    return replace(marks, tags={**marks.tags, **later.tags}, pins=marks.pins | later.pins)


def _by_bundle(sessions: Iterable[SessionMarks]) -> Mapping[str, VersionMarks]:
    tags: dict[str, list[str]] = {}
    pins: set[str] = set()
    stripped: set[str] = set()
    for marks in sessions:
        pins |= marks.pins
        stripped |= marks.stripped
        for tag, bundle_id in marks.tags.items():
            tags.setdefault(bundle_id, []).append(tag)
    return {
        each: VersionMarks(tuple(sorted(tags.get(each, ()))), each in pins, each in stripped)
        for each in pins.union(tags, stripped)
    }


def require_id(bundle_id: Any) -> str:
    """Check a bundle id. Raises ValueError."""
    if not isinstance(bundle_id, str) or not _ID.fullmatch(bundle_id):
        raise ValueError("a bundle id has 64 lower-case hex digits")
    return bundle_id


def _reference(uri: SessionUri, bundle_id: str) -> str:
    return f"{uri}{VERSION_MARK}{bundle_id[:_SHORT_ID_DIGITS]}"


# --- the bytes


def encode_marks(marks: Marks) -> bytes:
    """The file's bytes: the same marks of the same store give the same bytes."""
    return _FORMAT.encode(
        {
            "store": marks.store_uuid,
            "sessions": {
                str(uri): {
                    "pins": sorted(of.pins),
                    "tags": dict(of.tags),
                    "stripped": sorted(of.stripped),
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
        sessions = fields["sessions"].items()
        marks = Marks(store_uuid, {SessionUri.parse(text): session_marks(value) for text, value in sessions})
        if encode_marks(marks) != data:  # any other fault: keys, the order of pins, other digits
            raise ValueError("it is not in the form in which it is written")
        return marks
    except (*UNDECODED, InvalidUri, InvalidTag, LimitExceeded) as error:
        raise CorruptMarks(
            f"{path} is damaged: {reason_of(error)}. Put it back, or let `torpor repair --from FOLDER` take it from a "
            "backup; without one `torpor repair` moves it away, and the tags and pins in it are lost. Until then no "
            "version is removed by a rule.",
            path=path,
            reason=reason_of(error),
        ) from error


def marks_in(folder: StoreFolder) -> Marks | None:
    """The marks; None where they cannot be read, which others tell."""
    try:
        return Marks.load(folder)
    except StoreError:
        return None


def _marks_unless_damaged(folder: StoreFolder) -> Marks | None:
    """As `marks_in`. Raises StoreIoError: the system did not read them this time."""
    try:
        return Marks.load(folder)
    except StoreIoError:
        raise
    except StoreError:
        return None


@lru_cache(maxsize=1)
def _read_once(folder: StoreFolder, _stamp: Stamp) -> Marks:
    """The marks behind a stamp. It was taken before the read, so they are at least as new as the file that had it.
    Raises FileNotFoundError, and as `Marks.load`."""
    path = f"{folder.path}/{MARKS_FILE}"
    return decode_marks(read_small(folder.root_fd, MARKS_FILE, MAX_MARKS_BYTES, path), folder.uuid, path)


def findings_of_missing(
    folder: StoreFolder, knows: Callable[[str], bool], uri: SessionUri | None = None
) -> list[Finding]:
    """The versions, of one session or of all, that only a tag or a pin tells of: they have no manifest, and the index
    does not know them. Cheap for a session of which none is missing. A daemon may delete versions meanwhile: their tags
    and pins go first, so a second look at the marks tells. Raises StoreIoError."""
    marks = marks_in(folder) if uri is None else _marks_unless_damaged(folder)
    if marks is None:
        return []
    named = marks.named if uri is None else marks.session(uri).named
    unknown = {each for each in named if not knows(each)}
    if not unknown or not (lost := unknown - folder.list_versions()):
        return []
    marks = marks_in(folder) or marks
    return [
        Finding(folder.manifest_path(each), BundleMissing.code, _told_of_missing(folder, its_uri, each, marks))
        for its_uri, of in sorted(marks.sessions.items())
        for each in sorted(lost & of.named)
        if uri in (None, its_uri)
    ]


def _told_of_missing(folder: StoreFolder, uri: SessionUri, bundle_id: str, marks: Marks) -> str:
    of = marks.of(bundle_id)
    ways = [f"`torpor untag {uri} {tag}`" for tag in of.tags]
    ways += [f"`torpor unpin {_reference(uri, bundle_id)}`"] if of.pinned else []
    names = [f"the tag {tag}" for tag in of.tags] + ["a pin"] * of.pinned
    return (
        f"The manifest of a version of {uri} ({folder.manifest_path(bundle_id)}) is missing: "
        f"{' and '.join(names)} still {'names' if len(names) == 1 else 'name'} it. {PUT_BACK} To do without that "
        f"version: {', '.join(ways)}. Until then no pack is removed."
    )


def is_stripped(folder: StoreFolder, bundle_id: str) -> bool | None:
    """Whether a version needs no keys and values; None where the marks are damaged or missing. Cheap, as each turn
    asks. Raises StoreIoError: the system did not read them this time."""
    marks = _marks_unless_damaged(folder)
    return None if marks is None else marks.of(bundle_id).stripped


def stripped_in(folder: StoreFolder) -> frozenset[str] | None:
    """The versions that need no keys and values; None where the marks cannot be read, which others tell."""
    marks = marks_in(folder)
    return None if marks is None else marks.stripped


def uuid_in_marks(root_fd: int, path: str) -> str | None:
    """The uuid of the store whose marks lie in a folder; None if none can be read. Raises UnsafePath, StoreIoError."""
    file_path = f"{path}/{MARKS_FILE}"
    try:
        data = read_small(root_fd, MARKS_FILE, MAX_MARKS_BYTES, file_path)
        store_uuid = str(uuid.UUID(_FORMAT.decode(data, file_path).get("store")))
        decode_marks(data, store_uuid, file_path)
    except (*UNDECODED, FileNotFoundError, CorruptMarks, UnsupportedFormat):
        return None
    return store_uuid


def session_marks(value: Any) -> SessionMarks:
    """The marks of one session, as JSON has them. Raises InvalidTag, UNDECODED."""
    tags = {require_tag(tag): require_id(text) for tag, text in value["tags"].items()}
    pins, stripped = map(require_id, value["pins"]), map(require_id, value["stripped"])
    return SessionMarks(tags, frozenset(pins), frozenset(stripped))


def marks_lost(path: str) -> MarksLost:
    """The error for a missing file of marks, with advice."""
    return MarksLost(
        f"{path} is missing, and each store has one. Put it back, or let `torpor repair --from FOLDER` take it from a "
        "backup. Where there is none, mark anew what is to stay, first with `torpor tag SESSION@VERSION TAG --move`; "
        "`torpor repair` makes an empty one. Until then no version is removed by a rule.",
        path=path,
    )


def write_marks(root_fd: int, path: str, data: bytes) -> None:
    """Put a file of marks in its place, durably. Raises NoSpace, StoreIoError, DurabilityLost."""
    durable.write_file(root_fd, MARKS_FILE, data, path, replacing=True)


def create_store(root_fd: int, path: str, store_uuid: str | None = None) -> str:
    """Make an empty folder a store, under its lock; store.json comes last, so that a crash leaves no half store.
    store_uuid: that of the store it is a backup of. Raises NoSpace, StoreIoError, DurabilityLost."""
    create_folders(root_fd, path)
    store_uuid = store_uuid or str(uuid.uuid4())
    write_marks(root_fd, path, encode_marks(Marks(store_uuid)))
    write_store_file(root_fd, path, store_uuid)
    return store_uuid
