"""A collection: what no session of a remote needs goes, in two steps an hour apart, with machines at work meanwhile.

Order of one: the time by the object store's clock → what is listed → the head of each session → the places of each
version that a head names, and of that behind which its turns stand: their packs are needed → the time again → the list
of packs that leave is changed, in one step → the packs of it go that are due.

Rules:
- A pack is listed to leave once nothing needs it, and it is older than `REMOTE_GRACE_S`; and goes once it has been
  listed for that long, and still nothing needs it. Who sends a version relies on no pack that is listed, and changes
  its head within a quarter of that time after its look: so who relied on a pack before it was listed is seen by then,
  and the pack stays. It leaves the list only when it is gone: a removal that comes late meets nothing new.
- A pack is needed as long as a head says so that was read, and not listed. Sessions are found by their heads, and by
  the manifests that no head names: a listing that lacks something new has to lack both, for an hour.
- Where anything cannot be read that may need a pack, no pack goes.
- What has no head that names it and is no pack is only told: who holds the session removes it (`sessions.sweep`).
- Dates are compared with others of the object store alone. What is done behind the change of the list is done within a
  quarter of the time, by a clock of this machine that runs on in a suspend.
- Two collections at once: the list is changed by one of them, and the other ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ..answers import Action, Finding, MaintenanceReport
from ..errors import (
    CorruptBundle,
    Corruption,
    RemoteError,
    RemoteTooLarge,
    RemoteUnclear,
    RemoteUnreachable,
    StoreClosed,
    StoreError,
    UnsupportedFormat,
)
from ..limits import MAX_LEAVING, REMOTE_GRACE_S
from ..uri import SessionUri
from .heads import TAILS, Head, Heads, Tried
from .leases import Clock
from .leaving import LEAVING_KEY, Leaving, encode_leaving, now_ns, read_leaving
from .objects import Entry, Objects
from .places import bundle_id_in, is_pack_key, manifest_key
from .probe import PROBES
from .tails import record_of, uri_of_tail
from .versions import LOOK_S, RemoteVersions

_GRACE_NS: Final = REMOTE_GRACE_S * 10**9
_TRIES: Final = 3
_UNDER_WAY: Final = "No session needs it. It stays for an hour, as an upload may be under way that relies on it."


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did. leaving: the packs that leave from now on. orphans: by session, what its head does not
    name: keys of manifests and of turns. is_left: another one has something to do in `REMOTE_GRACE_S`. stuck: how many
    blocks of what is forgotten stay in packs of which sessions need others; sharers: those sessions."""

    report: MaintenanceReport
    leaving: Collection[str]
    orphans: Mapping[SessionUri, list[str]]
    is_left: bool
    stuck: int = 0
    sharers: Collection[SessionUri] = ()


def collect(
    heads: Heads,
    objects: Objects,
    clock: Clock,
    also: Mapping[str, Collection[bytes]] = MappingProxyType({}),
    *,
    dry_run: bool,
    should_stop: Callable[[], bool] = lambda: False,
) -> Collected:
    """also: the packs of a session that is forgotten, and its blocks in each: they may leave however young they are.
    dry_run: tell what would be done; for the time, a small object is written and removed. should_stop: is asked between
    two requests.

    Raises:
        StoreClosed: it was to stop. UnsupportedFormat: a later version collects there.
        RemoteUnreachable: also where another collection is under way. As `Objects`. Nothing was removed then.
    """
    return _Collection(heads, objects, clock, also, should_stop, dry_run=dry_run).run()


@dataclass(slots=True)
class _Listed:
    """What the remote has, as far as its listings tell, by key."""

    packs: dict[str, Entry] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)  # by bundle id
    places: dict[str, Entry] = field(default_factory=dict)  # by bundle id
    tails: list[str] = field(default_factory=list)
    probes: list[Entry] = field(default_factory=list)


class _Collection:
    def __init__(
        self,
        heads: Heads,
        objects: Objects,
        clock: Clock,
        also: Mapping[str, Collection[bytes]],
        should_stop: Callable[[], bool],
        *,
        dry_run: bool,
    ) -> None:
        self._heads = heads
        self._objects = objects
        self._clock = clock
        self._also = also.keys()
        self._alone = {each: key for key, ids in also.items() for each in ids}  # without what others have, too
        self._sharers: dict[str, set[SessionUri]] = {}  # who needs each of these packs
        self._should_stop = should_stop
        self._dry_run = dry_run
        self._versions = RemoteVersions(objects, clock)
        self._read: dict[SessionUri, Head | None] = {}  # each as it was read last
        self._unread: set[SessionUri] = set()  # those whose heads cannot be read
        self._of_versions: dict[str, frozenset[str]] = {}  # the packs that each needed version needs
        self._orphans: dict[SessionUri, list[str]] = {}
        self._actions: list[Action] = []
        self._problems: list[Finding] = []
        self._freed = 0

    def run(self) -> Collected:
        self._go_on()
        start_ns = now_ns(self._objects)
        before = self._read_leaving()
        listed = self._list()
        for uri, head in self._heads.each(sorted(self._heads.uris()), noting=False):
            self._go_on()
            self._look_at(uri, head)
        self._find_sessions_by(listed)
        leaving, packs = list[str](), dict[str, int]()
        needed = {key for of in self._of_versions.values() for key in of}
        if not self._problems:
            packs, leaving = self._carry_on(listed, before, needed, start_ns)
        if not self._dry_run:
            self._remove_probes(listed, start_ns)
        report = MaintenanceReport(
            "repack", self._dry_run, tuple(self._actions), bytes_freed=self._freed, problems=tuple(self._problems)
        )
        stuck = [key for key in self._alone.values() if key in needed]
        sharers = sorted({uri for key in stuck for uri in self._sharers[key]})
        is_left = any(key not in needed for key in packs)
        return Collected(report, leaving, self._orphans, is_left, len(stuck), sharers)

    def _carry_on(
        self, listed: _Listed, before: Leaving | None, needed: Collection[str], start_ns: int
    ) -> tuple[dict[str, int], list[str]]:
        """Change the list, and remove what is due. Gives the list, and what is new in it."""
        self._go_on()
        end_ns = now_ns(self._objects)
        packs, going = dict[str, int](), dict[str, int]()
        for key, since_ns in (before or Leaving()).packs.items():
            packs[key] = since_ns
            if start_ns - since_ns < _GRACE_NS:
                if self._dry_run and key not in needed and key in listed.packs:
                    due = time.strftime("%H:%M", time.gmtime((since_ns + _GRACE_NS) / 10**9))
                    reason = f"It leaves already. A collection removes it from {due} UTC on, if no session needs it."
                    entry = listed.packs[key]
                    self._actions.append(Action("leave", self._path(key), None, None, entry.size_bytes, reason))
                continue
            size_bytes = self._size(key)
            if size_bytes is None:
                del packs[key]
            elif key not in needed:
                packs[key], going[key] = end_ns, size_bytes
        new = self._new(listed, needed, packs, start_ns)
        packs |= dict.fromkeys(new, end_ns)
        if not self._dry_run and (before is None or packs != before.packs):
            begun_s = self._clock()
            self._write(before, packs)
            self._remove_packs(going, begun_s)
        else:
            for key, size_bytes in going.items():
                self._removed(key, size_bytes)
        reason = "No session needs it. It is removed by a collection an hour from now; until then its bytes stay."
        for key, size_bytes in new.items():
            self._actions.append(Action("leave", self._path(key), None, None, size_bytes, reason))
        return packs, list(new)

    def _new(self, listed: _Listed, needed: Collection[str], packs: Mapping[str, int], start_ns: int) -> dict[str, int]:
        """The packs that leave from now on, and their sizes: as many as the list takes."""
        new = dict[str, int]()
        for key in self._also:
            if key not in needed and key not in packs and (size_bytes := self._size(key)) is not None:
                new[key] = size_bytes
        for key, entry in listed.packs.items():
            if key in needed or key in packs or key in new:
                continue
            if start_ns - entry.modified_ns >= _GRACE_NS:
                new[key] = entry.size_bytes
            else:
                self._actions.append(Action("keep", self._path(key), None, None, entry.size_bytes, _UNDER_WAY))
        room = max(MAX_LEAVING - len(packs), 0)
        return dict(list(new.items())[:room])

    # --- what is there

    def _list(self) -> _Listed:
        """Before any head is read: what comes later is not in it."""
        listed = _Listed()
        for entry in self._entries("packs/"):
            if is_pack_key(entry.key):
                listed.packs[entry.key] = entry
        for entry in self._entries("versions/"):
            if (bundle_id := bundle_id_in(entry.key)) is not None:
                listed.manifests[bundle_id] = entry.key
        for entry in self._entries("places/"):
            listed.places[entry.key.removeprefix("places/")] = entry
        listed.tails = [entry.key for entry in self._entries(TAILS)]
        listed.probes = self._entries(f"{PROBES}/")
        return listed

    def _entries(self, prefix: str) -> list[Entry]:
        self._go_on()
        return list(self._objects.entries(prefix))

    def _look_at(self, uri: SessionUri, head: Tried) -> None:
        """Read which packs a session needs, by its head that was read; again where it changes meanwhile."""
        path = f"{self._objects.url}: {uri}"
        try:
            if isinstance(head, StoreError):
                raise head
            self._read[uri] = head
            for attempt in range(_TRIES):
                try:
                    self._read_packs_of(head)
                    return
                except (Corruption, RemoteTooLarge) as error:
                    was, head = head, self._head(uri)
                    is_changed = (head and (head.versions, head.tail)) != (was and (was.versions, was.tail))
                    if not is_changed or attempt == _TRIES - 1:
                        self._tell(str(error.details.get("path", path)), error)
                        return
        except (RemoteUnreachable, RemoteUnclear):
            raise
        except (RemoteError, UnsupportedFormat) as error:
            self._unread.add(uri)
            self._tell(path, error)

    def _head(self, uri: SessionUri) -> Head | None:
        self._go_on()
        self._read[uri] = head = self._heads.head(uri, noting=False)
        return head

    def _read_packs_of(self, head: Head | None) -> None:
        """Raises as `_needed_by` and `RemoteVersions.places`, and BundleMissing."""
        if head is None:
            return
        for bundle_id in self._needed_by(head):
            if bundle_id not in self._of_versions:
                self._go_on()
                places = self._versions.places(bundle_id)
                if places is None:
                    raise self._versions.missing(f"places/{bundle_id}")
                self._of_versions[bundle_id] = packs = frozenset(place.pack for place in places.values())
                for block_id in places if self._alone else ():
                    self._alone.pop(block_id, None)
                for key in packs & self._also:
                    self._sharers.setdefault(key, set()).add(head.uri)

    def _needed_by(self, head: Head) -> list[str]:
        """The versions. Raises as `tails.record_of`."""
        bases = (record_of(self._objects, key, head.uri).base for key in head.tail)
        return [*head.versions, *(base for base in bases if base is not None)]

    def _find_sessions_by(self, listed: _Listed) -> None:
        """What no head names: of a session whose head no listing had, or left there."""
        for bundle_id, key in listed.manifests.items():
            if bundle_id in self._of_versions:
                continue
            self._go_on()
            try:
                manifest = self._versions.manifest(bundle_id)
            except (Corruption, UnsupportedFormat, RemoteTooLarge) as error:
                self._tell(self._path(key), error)
                continue
            if manifest is not None:
                self._note_unless_named(manifest.uri, key)
        for key in listed.tails:
            if (uri := uri_of_tail(key)) is not None:
                self._note_unless_named(uri, key)
        for bundle_id, entry in listed.places.items():
            if bundle_id not in listed.manifests and bundle_id not in self._of_versions:
                reason = "Nothing tells of which session these places are: the manifest of their version is not there."
                self._actions.append(Action("keep", self._path(entry.key), None, None, entry.size_bytes, reason))

    def _note_unless_named(self, uri: SessionUri, key: str) -> None:
        if uri not in self._read and uri not in self._unread:
            self._look_at(uri, self._heads.tried(uri, noting=False))
        if uri in self._unread:
            return
        head = self._read[uri]
        named = () if head is None else (*head.tail, *map(manifest_key, head.versions))
        if key not in named and (bundle_id_in(key) or "") not in self._of_versions:
            self._orphans.setdefault(uri, []).append(key)

    def _size(self, key: str) -> int | None:
        self._go_on()
        return self._objects.size(key)

    # --- the list of packs that leave

    def _read_leaving(self) -> Leaving | None:
        """None: it is damaged, and made anew: what it listed and nothing needs is listed again."""
        try:
            return read_leaving(self._objects)
        except CorruptBundle:
            return None

    def _write(self, before: Leaving | None, packs: Mapping[str, int]) -> None:
        """Raises RemoteUnreachable: another collection has changed it. RemoteUnclear."""
        data = encode_leaving(packs)
        unclear: RemoteUnclear | None = None
        tag = None
        try:
            if before is None:
                self._objects.put(LEAVING_KEY, [data], len(data))
            elif before.tag is None:
                tag = self._objects.create(LEAVING_KEY, data)
            else:
                tag = self._objects.replace(LEAVING_KEY, data, before.tag)
        except RemoteUnclear as error:
            unclear = error
        if tag is None and read_leaving(self._objects).packs != packs:
            raise unclear or RemoteUnreachable(
                f"Another machine frees what is not needed in {self._objects.url} at the moment. Try again later.",
                url=self._objects.url,
            )

    def _remove_packs(self, going: Mapping[str, int], begun_s: float) -> None:
        for key, size_bytes in going.items():
            if self._clock() - begun_s >= LOOK_S or self._should_stop():
                return  # the next one does the rest
            try:  # once: what is there again behind a removal may be somebody's who sent it since
                self._objects.remove(key)
                is_gone = self._objects.size(key) is None
            except RemoteError as error:
                self._tell(self._path(key), error)
                return
            if is_gone:
                self._removed(key, size_bytes)

    def _removed(self, key: str, size_bytes: int) -> None:
        self._freed += size_bytes
        reason = "No session needs it, for an hour at least."
        self._actions.append(Action("remove", self._path(key), None, None, size_bytes, reason))

    # --- the rest

    def _remove_probes(self, listed: _Listed, start_ns: int) -> None:
        """Those that a process left which is no more."""
        for entry in listed.probes:
            if start_ns - entry.modified_ns >= _GRACE_NS:
                with contextlib.suppress(RemoteError):
                    self._objects.remove(entry.key)

    def _go_on(self) -> None:
        if self._should_stop():
            raise StoreClosed("What is not needed in the remote was not freed, as the daemon stops. Nothing is wrong.")

    def _path(self, key: str) -> str:
        return f"{self._objects.url}/{key}"

    def _tell(self, path: str, error: StoreError) -> None:
        self._problems.append(Finding.of(path, error))
