"""Heads: one small object for each session in a remote, which says whose it is and which versions it has.

Owns their keys, their bytes, and how one is changed: by compare-and-swap alone, each time with another token.

Rules:
- A write whose answer is unclear has landed if the head that is read back has its token. An answer "no" may be to a
  write that was sent twice, so it is treated alike.
- A write that did not land by then may land later. It changes what it was made from, or nothing: the tag sees to that,
  and no two heads are alike.
- A head that is older than one seen before is refused (`folder/seen_heads.py`).
- A head is not believed to be a session's because it lies under its key: it says so itself.
"""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from ..disk.paths import stat_open
from ..errors import (
    CorruptHead,
    InvalidDraft,
    InvalidUri,
    LimitExceeded,
    RemoteError,
    RemoteUnclear,
    RemoteUnreachable,
    StoreError,
    UnsupportedFormat,
)
from ..folder.folder import StoreFolder
from ..folder.seen_heads import SeenHeads
from ..format.packing import pack, unpack
from ..format.sealing import DIGEST_BYTES
from ..limits import (
    MAX_HEAD_BYTES,
    MAX_HEAD_VERSIONS,
    MAX_LEASE_S,
    MAX_MACHINE_CHARS,
    MAX_TAIL_KEY_CHARS,
    MAX_TAIL_SEGMENTS,
    MAX_VERSION,
)
from ..uri import SessionUri
from .objects import Objects, is_key
from .sealing import seal, unseal

HEADS: Final = "heads/"
TAILS: Final = "tails/"
TOKEN_BYTES: Final = 16
READ_AT_ONCE: Final = 8
"""Heads that are read side by side, where many are."""
_ID_BYTES: Final = 32
_TRIES: Final = 8
"""How often a change is tried while others change the head, or answers are lost."""

_DOMAIN: Final = "torpor.head/1"
_ANY_DOMAIN: Final = re.compile(r"torpor\.head/[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Party:
    """Who may hold a session: a store where it lies, by a uuid, and the name of its machine, for people."""

    store: str
    machine: str

    @classmethod
    def of(cls, folder: StoreFolder, machine: str) -> Party:
        """The party of an open store. A copy of its folder, which has the store's uuid, too, has another inode number,
        and so it is another party, also on the same machine. Raises StoreIoError."""
        place = stat_open(folder.root_fd, folder.path).st_ino
        name = "".join(letter for letter in machine if letter.isprintable())[:MAX_MACHINE_CHARS]
        return cls(str(uuid.uuid5(uuid.UUID(folder.uuid), str(place))), name or "a machine without a name")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a session. asleep: anybody may take it. pulse: other bytes with each renewal of the lease."""

    party: Party
    pulse: bytes
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """What a remote says of a session.

    epoch: grows with each change of the holder. holder: None if the session is free. lease_s: for how long a renewal
    counts, in seconds. versions: the bundle ids of those that the remote keeps, the newest last. tail: the keys of
    journal segments behind the newest version, the oldest first. request: who asks the holder for the session.
    revision: grows with each change of epoch, versions or tail. token: of the write that made this head. `Heads` sets
    these two.
    """

    uri: SessionUri
    epoch: int
    lease_s: int
    holder: Holder | None = None
    versions: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    request: Party | None = None
    revision: int = 0
    token: bytes = b""

    @property
    def newest(self) -> str | None:
        return self.versions[-1] if self.versions else None

    @property
    def is_empty(self) -> bool:
        """Whether the remote has nothing of the session: it is new, or was removed."""
        return not self.versions and not self.tail

    @property
    def awake_at(self) -> Party | None:
        """Who has the session awake, if his lease counts still; None if anybody may take it."""
        return None if self.holder is None or self.holder.asleep else self.holder.party

    def with_version(self, bundle_id: str, tail: Sequence[str] = ()) -> Head:
        """With one more version, as the newest one unless it is there. tail: the segments that it does not cover.

        Raises:
            LimitExceeded: the remote keeps too many versions of the session.
        """
        versions = self.versions if bundle_id in self.versions else (*self.versions, bundle_id)
        if len(versions) > MAX_HEAD_VERSIONS:
            raise LimitExceeded(
                f"The remote keeps {MAX_HEAD_VERSIONS} versions of {self.uri} already, and no session may have more "
                "there. Keep fewer: drop old ones, with a retention (`torpor prune`), say.",
                session=str(self.uri),
                limit=MAX_HEAD_VERSIONS,
            )
        return dataclasses.replace(self, versions=versions, tail=tuple(tail))

    def without_versions(self, bundle_ids: Collection[str]) -> Head:
        """Without versions that the remote keeps no more."""
        return dataclasses.replace(self, versions=tuple(each for each in self.versions if each not in bundle_ids))

    def encode(self) -> bytes:
        """The object's bytes: a digest, then what they are and the fields. Raises InvalidDraft: it may not be
        written."""
        holder, request = self.holder, self.request
        try:
            fields = {
                "uri": str(self.uri),
                "epoch": self.epoch,
                "revision": self.revision,
                "holder": None if holder is None else [*_party_fields(holder.party), holder.pulse, holder.asleep],
                "lease_s": self.lease_s,
                "token": self.token,
                "versions": b"".join(map(bytes.fromhex, self.versions)),
                "tail": list(self.tail),
                "request": None if request is None else _party_fields(request),
            }
            data = seal(pack([_DOMAIN, fields], "head"))
            if Head.decode(data, "it") != self:
                raise ValueError("it would read as another")
        except (CorruptHead, ValueError) as error:
            reason = error.reason if isinstance(error, CorruptHead) else str(error)
            raise InvalidDraft(f"The head of {self.uri} cannot be written: {reason}.", field="head") from error
        return data

    @classmethod
    def decode(cls, data: bytes, place: str) -> Head:
        """Read a head. place: for messages. Raises CorruptHead for all bytes that `encode` does not write;
        UnsupportedFormat: a later version."""
        try:
            fields = _fields(data, place)
            request, uri = fields["request"], SessionUri.parse(fields["uri"])
            return cls(
                uri,
                _whole(fields["epoch"], MAX_VERSION),
                _whole(fields["lease_s"], MAX_LEASE_S),
                _holder(fields["holder"]),
                _versions(fields["versions"]),
                _tail(fields["tail"], uri),
                None if request is None else _party(request),
                _whole(fields["revision"], MAX_VERSION),
                _random(fields["token"]),
            )
        except (ValueError, TypeError, StoreError) as error:
            if isinstance(error, UnsupportedFormat):
                raise
            reason = str(error).rstrip(".")[:300]
            raise CorruptHead(
                f"{place} is no sound head: {reason}. Put it back as it was: what the object store keeps of earlier "
                "contents has it, or a backup. Until then the session is used from this disk alone.",
                path=place,
                reason=reason,
            ) from error


@dataclass(frozen=True, slots=True)
class Seen:
    """A head, and the tag by which it may be replaced."""

    head: Head
    tag: str


Tried = Head | RemoteError | UnsupportedFormat | None
_Coming = tuple[SessionUri, "Future[Tried]"]
_FIELDS: Final = {"uri", "epoch", "revision", "holder", "lease_s", "token", "versions", "tail", "request"}


class Heads:
    """The heads of one remote, as one store sees them. Safe from several threads. holders, versions: who had each
    session, and which versions the remote had of it, when its head was last read; without those that nobody had, and
    that it had none of."""

    def __init__(self, objects: Objects, seen: SeenHeads) -> None:
        self._objects = objects
        self._seen = seen
        self.holders: dict[SessionUri, Party] = {}
        self.versions: dict[SessionUri, tuple[str, ...]] = {}

    def read(self, uri: SessionUri, *, noting: bool = True) -> Seen | None:
        """The head of a session; None: there was never one. noting: remember how new it is, and what it says.

        Raises:
            CorruptHead; HeadReplayed: an older one than before; UnsupportedFormat; RemoteError.
        """
        key = key_of(uri)
        place = f"{self._objects.url}/{key}"
        newest = self._seen.newest(self._objects.url, uri)
        found = self._objects.get(key, MAX_HEAD_BYTES)
        if found is None:
            self._seen.require_new(self._objects.url, uri, None, newest)
            return None
        head = Head.decode(found.data, place)
        if head.uri != uri:
            raise CorruptHead(
                f"{place} is the head of another session, {head.uri}: somebody has put it there. Put back the one of "
                f"{uri}.",
                path=place,
                reason="it is another session's",
            )
        self._seen.require_new(self._objects.url, uri, head.revision, newest)
        if noting:
            self._seen.note(self._objects.url, uri, head.revision)
            self.note(head)
        return Seen(head, found.tag)

    def note(self, head: Head) -> None:
        """Remember who has a session, and which versions the remote has of it."""
        if head.holder is None:
            self.holders.pop(head.uri, None)
        else:
            self.holders[head.uri] = head.holder.party
        if head.versions:
            self.versions[head.uri] = head.versions
        else:
            self.versions.pop(head.uri, None)

    def head(self, uri: SessionUri, *, noting: bool = True) -> Head | None:
        """As `read`, without what a change needs."""
        seen = self.read(uri, noting=noting)
        return None if seen is None else seen.head

    def tried(self, uri: SessionUri, *, noting: bool = True) -> Tried:
        """As `head`, and where it cannot be read, why."""
        try:
            return self.head(uri, noting=noting)
        except (RemoteError, UnsupportedFormat) as error:
            return error

    def each(self, uris: Iterable[SessionUri], *, noting: bool = True) -> Iterator[tuple[SessionUri, Tried]]:
        """As `tried`, of many sessions in their order, READ_AT_ONCE side by side, for a request takes long."""
        pool, coming = ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="torpor-heads"), deque[_Coming]()
        try:
            for uri in uris:
                coming.append((uri, pool.submit(self.tried, uri, noting=noting)))
                if len(coming) == READ_AT_ONCE:
                    first, head = coming.popleft()
                    yield first, head.result()
            for uri, head in coming:
                yield uri, head.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def change(self, uri: SessionUri, change: Callable[[Head | None], Head], known: Seen | None = None) -> Seen:
        """Change a head, or make the first; the head that landed. An unchanged one is not written.

        change: is given the head as it is, and gives what it shall be. It is called again when another has changed
        the head meanwhile, or an answer was lost: so it finds what an earlier call gave, perhaps, and others' changes
        on top. It may raise to give up. known: the head as it was last seen. If it is so still, nothing is read.

        Raises:
            What `change` raises, and `read`. RemoteUnclear: it may have landed, or may land yet. RemoteUnreachable:
            also if others were faster each time. DurabilityLost: it has landed; the store takes no more changes.
        """
        key, sent, unclear = key_of(uri), set[bytes](), None
        for attempt in range(_TRIES + 1):
            found = self.read(uri) if attempt or known is None else known
            before = None if found is None else found.head
            if found is not None and found.head.token in sent:
                self._seen.save()
                return found
            if attempt == _TRIES:
                break
            after = change(before)
            if found is not None and after == before:
                return found
            after, unclear = _as_written(before, after), None
            data = after.encode()
            sent.add(after.token)
            try:
                tag = self._objects.create(key, data) if found is None else self._objects.replace(key, data, found.tag)
            except RemoteUnclear as error:
                tag, unclear = None, error
            if tag is not None:
                self._seen.note(self._objects.url, uri, after.revision)
                self._seen.save()
                self.note(after)
                return Seen(after, tag)
        if unclear is not None:
            raise unclear
        raise RemoteUnreachable(
            f"Others change the head of {uri} in {self._objects.url} all the time. Try again later.", session=str(uri)
        )

    def uris(self) -> Iterator[SessionUri]:
        """The sessions that have a head. A listing may be stale: `read` tells what there is. Raises RemoteError."""
        for entry in self._objects.entries(HEADS):
            if (uri := uri_in(entry.key)) is not None:
                yield uri


def _as_written(before: Head | None, after: Head) -> Head:
    """With a token of its own, and the revision that it has then. Only a forged head has the largest one: it stays."""
    kept = before is not None and (after.epoch, after.versions, after.tail) == (
        before.epoch,
        before.versions,
        before.tail,
    )
    revision = (0 if before is None else before.revision) + (not kept)
    return dataclasses.replace(after, revision=min(revision, MAX_VERSION), token=os.urandom(TOKEN_BYTES))


# --- keys


def key_of(uri: SessionUri) -> str:
    """The key of a session's head."""
    return f"{HEADS}{_in_small_letters(uri.namespace)}/{_in_small_letters(uri.name)}"


def tails_of(uri: SessionUri) -> str:
    """What the keys of all turns of a session begin with, without the slash behind it."""
    return TAILS + key_of(uri).removeprefix(HEADS)


def uri_in(key: str) -> SessionUri | None:
    """The session whose head has this key; None: no head has it."""
    try:
        namespace, name = map(_in_any_letters, key.removeprefix(HEADS).split("/"))
        uri = SessionUri(namespace, name)
    except (ValueError, InvalidUri):
        return None
    return uri if key_of(uri) == key else None


def _in_small_letters(part: str) -> str:
    """A part of a URI, and behind a `=` which of its letters are large ones: bits, the first one lowest, in hex. So it
    is short enough for the name of a file, whatever it is."""
    large = sum(1 << at for at, letter in enumerate(part) if letter.isupper())
    return f"{part.lower()}={large:x}" if large else part


def _in_any_letters(part: str) -> str:
    text, _, digits = part.partition("=")
    large = int(digits or "0", 16)
    return "".join(letter.upper() if large >> at & 1 else letter for at, letter in enumerate(text))


# --- fields


def _fields(data: bytes, place: str) -> dict[str, Any]:
    """Raises UnsupportedFormat: a later version, and undamaged. ValueError, StoreError: other bytes than a head's."""
    if (packed := unseal(data)) is None:
        raise ValueError("its digest does not fit its content")
    document = unpack(packed, max_bytes=MAX_HEAD_BYTES - DIGEST_BYTES, what="head")
    if not isinstance(document, list) or len(document) != 2 or not isinstance(document[0], str):
        raise ValueError("it does not say that it is a head")
    domain, fields = document
    if domain != _DOMAIN and _ANY_DOMAIN.fullmatch(domain):
        raise UnsupportedFormat(
            f"{place} is a {domain[:40]}; this program reads {_DOMAIN}. Use the Torpor that wrote it. Nothing was "
            "touched.",
            path=place,
            found=domain[:40],
            supported=_DOMAIN,
        )
    if domain != _DOMAIN or not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise ValueError("it has other fields than a head")
    return fields


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError("a number in it is none, or out of range")
    return value


def _random(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != TOKEN_BYTES:
        raise ValueError(f"a token in it has not {TOKEN_BYTES} bytes")
    return value


def _party_fields(party: Party) -> list[str]:
    return [party.store, party.machine]


def _party(value: Any) -> Party:
    store, machine = value
    if not isinstance(store, str) or str(uuid.UUID(store)) != store:
        raise ValueError("it names no store by its uuid")
    if not isinstance(machine, str) or not 1 <= len(machine) <= MAX_MACHINE_CHARS or not machine.isprintable():
        raise ValueError("it names a machine by no printable text")
    return Party(store, machine)


def _holder(value: Any) -> Holder | None:
    if value is None:
        return None
    store, machine, pulse, asleep = value
    if type(asleep) is not bool:
        raise ValueError("it does not say whether the session sleeps")
    return Holder(_party([store, machine]), _random(pulse), asleep)


def _versions(value: Any) -> tuple[str, ...]:
    if type(value) is not bytes or len(value) % _ID_BYTES or len(value) > MAX_HEAD_VERSIONS * _ID_BYTES:
        raise ValueError(f"its versions are not {MAX_HEAD_VERSIONS} bundle ids at most")
    ids = tuple(value[at : at + _ID_BYTES].hex() for at in range(0, len(value), _ID_BYTES))
    if len(set(ids)) != len(ids):
        raise ValueError("it has a version twice")
    return ids


def _tail(value: Any, uri: SessionUri) -> tuple[str, ...]:
    if type(value) is not list or len(value) > MAX_TAIL_SEGMENTS:
        raise ValueError(f"its tail is not a list of {MAX_TAIL_SEGMENTS} keys at most")
    for key in value:
        if not isinstance(key, str) or len(key) > MAX_TAIL_KEY_CHARS or not is_key(key):
            raise ValueError("its tail has what is no key")
        if key.rpartition("/")[0] != tails_of(uri):  # its holder removes what it names
            raise ValueError("its tail has what are no turns of the session")
    return tuple(value)
