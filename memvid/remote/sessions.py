"""The sessions of a remote, for one open store: whose each is, and how it goes there. How it comes here: `pulling.py`.

Rules:
- A session goes on in one place: its head tells in which. What is sent becomes its newest version there by its head
  alone, changed by who holds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from ..answers import Finding, Standing, VersionInfo
from ..disk.clock import running_s
from ..disk.paths import undoing
from ..errors import (
    Corruption,
    Diverged,
    LeaseLost,
    RemoteError,
    RemoteTooLarge,
    RemoteUnclear,
    RemoteUnreachable,
    SessionNotFound,
    StoreError,
)
from ..format.journal import JournalRecord
from ..format.manifest import Manifest
from ..limits import MAX_HEAD_VERSIONS, MAX_MACHINE_CHARS
from ..uri import SessionUri
from ..writing.core import StoreCore
from .collecting import Collected, collect
from .heads import Head, Heads, Party, key_of
from .leases import LEASE_S, Clock, Lease, Watch, ask, take, withdraw
from .objects import Objects
from .places import bundle_id_in, manifest_key, own_keys
from .probe import probe
from .pulling import Pulled, Pulling
from .remote_file import RemoteFile
from .sealed_objects import SealedObjects
from .tails import put_record, record_of
from .uploading import Sent, send
from .versions import RemoteVersions


@dataclass(frozen=True, slots=True)
class Pushed:
    """A version is the newest one of its session in the remote."""

    version: int
    sent: Sent


@dataclass(frozen=True, slots=True)
class Found:
    """A session of the remote. here: what this store has of it, beside its newest version there. ours: whether this
    store holds it."""

    head: Head
    here: Standing
    ours: bool


class RemoteSessions:
    """The sessions of one remote. Safe from several threads; one version is sent or fetched at a time. used: what each
    day has used of it. holders, versions_seen: as of `Heads`. To look there asks nobody. sent_packs: of
    each session those that were sent, and of which no head has told. before_block: as of `RemoteVersions`; it may be
    set."""

    def __init__(self, core: StoreCore, objects: Objects, machine: str, clock: Clock, key: bytes | None = None) -> None:
        """machine: its name, for people. key: if the remote is to be sealed."""
        sealed = None if key is None else SealedObjects(objects, key)
        self._file = RemoteFile(objects, sealed)
        self._core = core
        self._objects = objects = sealed or objects
        self._proven: object = None  # the place that was tried
        self.silence: RemoteError | None = None  # why it could not be tried when it was opened
        self._clock = clock
        self.before_block: Callable[[], None] = lambda: None
        self._versions = RemoteVersions(objects, clock, lambda: self.before_block())
        self._moving = threading.Lock()
        self._watches: dict[SessionUri, Watch] = {}
        self.sent_packs: dict[SessionUri, set[str]] = {}
        self._behind: dict[SessionUri, int] = {}  # the version that was the newest when the turns there were said
        self.url = objects.url
        self.is_sealed = sealed is not None
        core.seen_heads.ask(objects.url)
        self._heads = Heads(objects, core.seen_heads)
        self.holders = self._heads.holders
        self.versions_seen = self._heads.versions
        self.used = core.used_days
        self.me = Party.of(core.folder, machine)
        self._pulling = Pulling(core, self._versions, self.me)

    @classmethod
    def open(cls, core: StoreCore, objects: Objects, key: bytes | None = None) -> RemoteSessions:
        """As this machine, and tried. The objects are closed if it fails. Raises as `Store.open_remote`."""
        with undoing(objects.close):
            opened = cls(core, objects, platform.node()[:MAX_MACHINE_CHARS] or "unnamed", running_s, key)
            try:
                opened.require_proven()
            except (RemoteUnreachable, RemoteUnclear) as error:
                opened.silence = error
        return opened

    def close(self) -> None:
        """Let go of connections. Nothing is asked any more."""
        self._objects.close()

    @property
    def keeps_old(self) -> bool:
        """As `Objects.keeps_old`."""
        return self._objects.keeps_old

    @property
    def heads(self) -> Heads:
        """The heads of the sessions. Raises as `require_proven`."""
        self.require_proven()
        return self._heads

    def require_proven(self) -> None:
        """See that the remote is sealed as is told, and try whether the object store holds to its conditions, once
        for each place that its URL leads to. Raises RemoteKeyWrong, before anything is written; RemoteUnfit; and as
        `RemoteFile.is_there`."""
        place = self._objects.place()
        if self._proven != place:
            self._versions.forget_seen()
            is_told = self._file.is_there()
            probe(self._objects)
            if not is_told:
                self._file.make()
            self._proven = place

    def take(self, uri: SessionUri, lease_s: int = LEASE_S) -> Lease:
        """Take a session. Raises as `leases.take`: LeaseHeld."""
        heads = self.heads
        watch = self._watches.setdefault(uri, Watch(self.me, self._clock))
        lease = take(heads, uri, watch, lease_s=lease_s)
        del self._watches[uri]  # who takes it again begins to watch anew
        return lease

    def ask(self, uri: SessionUri) -> None:
        """Ask who has a session for it. Raises as `leases.ask`."""
        ask(self.heads, uri, self.me)

    def withdraw(self, uri: SessionUri) -> None:
        """Ask no more. Raises as `leases.ask`."""
        withdraw(self.heads, uri, self.me)

    def push(self, lease: Lease, goes_on: Callable[[], bool] = lambda: True, *, again: bool = False) -> Pushed | None:
        """Make the newest version here that of the remote. It is one at once if it is there. goes_on, None: as of
        `uploading.send`. again: nothing is believed to be there that was seen earlier: what is missing is sent again.

        Raises:
            SessionNotFound: there is no version here.
            LeaseLost: another machine has the session; what was sent is of no use there.
            As `require_proven`, `uploading.send`, and `Heads.change`.
        """
        self.require_proven()
        row = self._core.index.find(lease.uri)
        if row is None:
            raise SessionNotFound(
                f"{lease.uri} has no version here yet; put it to sleep first.", session=str(lease.uri), suggestions=[]
            )
        while True:
            with self._moving:
                if again:
                    self._versions.forget_seen()
                self._versions.on_pack = self.sent_packs.setdefault(lease.uri, set()).add
                sent = send(
                    self._core,
                    self._versions,
                    row.bundle_id,
                    goes_on=lambda: not lease.is_lost and goes_on(),
                    before=lease.head.newest,
                )
            if sent is None:
                if lease.is_lost:
                    lease.renew()  # raises
                return None
            before = lease.head  # first: turns that are sent from now on are others
            covered = before.tail if self._behind.get(lease.uri, 0) < row.version else ()
            try:
                after = lease.change(partial(self._pushed, row, covered))
            except (LeaseLost, SessionNotFound):
                self._take_back(row)
                raise
            if not after.tail:
                self._remove(covered)
            with contextlib.suppress(StoreError):  # what stays is in nobody's way, and goes with a collection
                self._remove_versions(after, [each for each in before.versions if each not in after.versions])
            if self._versions.has_looked:
                break  # else this machine was suspended before the head had landed: what it relies on may have gone
        self.sent_packs.pop(lease.uri, None)
        return Pushed(row.version, sent)

    def _pushed(self, row: VersionInfo, covered: tuple[str, ...], head: Head) -> Head:
        """A head with one more version. covered: turns that are in it. Raises as `push`."""
        self._versions.require_look()
        if not self._core.index.knows(row.bundle_id):  # else what is being deleted would come back
            raise SessionNotFound(
                f"Version {row.version} of {head.uri} was deleted while it was sent.",
                session=str(head.uri),
                suggestions=[],
            )
        return _with_room(head).with_version(row.bundle_id, () if head.tail == covered else head.tail)

    def _take_back(self, row: VersionInfo) -> None:
        """Remove a version that was sent while its session was removed; what stays goes with a collection."""
        with contextlib.suppress(StoreError):
            head = self.heads.head(row.uri)
            is_gone = head is None or head.is_empty or not self._core.index.knows(row.bundle_id)
            if is_gone and (head is None or row.bundle_id not in self._needed_of(head)):
                self._remove_version(row.uri, row.bundle_id)

    def send_turns(self, lease: Lease, record: JournalRecord) -> bool:
        """Let turns behind a version survive this machine; False: the remote does not have that version yet.

        Raises:
            LeaseLost, InvalidDraft, LimitExceeded, and as `Objects` and `Heads.change`: they are not there, as far as
            is known.
        """
        if record.base is not None and record.base not in lease.head.versions:
            return False
        key, before = put_record(self._versions, record, self.me.store), lease.head.tail
        self._behind[lease.uri] = 0 if record.newest is None else record.newest[0]  # before a push can find them
        try:
            lease.change(lambda head: dataclasses.replace(head, tail=(key,)))
        except LeaseLost:
            with contextlib.suppress(RemoteError):
                head = self.heads.head(lease.uri)  # it may have landed before another machine took the session
                if head is None or key not in head.tail:
                    self._remove([key])
            raise
        self._remove(before)
        return True

    def require_droppable(self, head: Head, lease: Lease | None = None) -> None:
        """Refuse to drop what this store does not have, unless it had the session last, and has nothing of it any more:
        a removal that the remote was silent to goes on then. lease: if it was taken just now. Raises Diverged: another
        machine has gone on with it; SessionNotFound: nothing of it is here; and as `Pulling.beside`."""
        if head.newest is not None and not self._core.folder.has_manifest(head.newest):
            is_here = self._core.index.find(head.uri) is not None or self._core.journal.find(head.uri) is not None
            holder = None if head.holder is None else head.holder.party
            last = holder if lease is None else lease.before
            if is_here:
                raise self._gone_on(head.uri)
            if last != self.me:
                place = "has it" if last is None else f"has it, at {last.machine}"
                raise SessionNotFound(
                    f"It is not here; {self.url} {place}. Bring it here with `torpor pull {head.uri}`; then it can be "
                    "removed from both.",
                    session=str(head.uri),
                    suggestions=[],
                )
        self._require_turns_here(head)

    def _require_turns_here(self, head: Head) -> None:
        """Raises Diverged: another machine has added turns that are not here, and were told; and as
        `Pulling.beside`."""
        if self._pulling.has_turns_of_others(head):
            with self._moving:
                if self._pulling.beside(head) != "ahead":
                    raise self._gone_on(head.uri)

    def drop(self, lease: Lease) -> list[str]:
        """Let the remote have nothing of a session: no machine finds it any more. The keys of what was removed, each of
        which was seen to be gone. The head stays, empty: it has the name in its key, and without it other machines
        would take the remote for one that was put back.

        Raises:
            LeaseLost, and as `Heads.change`: it has the session still.
            As `_remove_version`: no head names what is left, and a collection removes it.
        """
        before = lease.head
        lease.change(_emptied)
        self._behind.pop(lease.uri, None)
        keys = list[str]()
        try:
            for key in before.tail:
                self._versions.remove(key)
                keys.append(key)
            for bundle_id in before.versions:
                keys += self._remove_version(lease.uri, bundle_id)
        finally:
            lease.release(asleep=False, edit=_emptied)
        return keys

    def drop_version(self, lease: Lease, bundle_id: str) -> None:
        """Let the remote keep a version no more, nor turns behind it if it was the newest. Raises Diverged: another
        machine has added these, and they are not here; LeaseLost, and as `Heads.change`, `_remove_version`."""
        if lease.head.newest == bundle_id:
            self._require_turns_here(lease.head)

        def dropped(head: Head) -> Head:
            tail = () if head.newest == bundle_id else head.tail
            return dataclasses.replace(head.without_versions([bundle_id]), tail=tail)

        before = lease.head
        after = lease.change(dropped)
        self._remove(key for key in before.tail if key not in after.tail)
        self._remove_versions(after, [bundle_id])

    def sweep(self, uri: SessionUri, keys: Iterable[str]) -> list[str]:
        """Remove what a collection found of a session and its head does not name: uploads that were cut off, and what
        could not be removed. The caller sees to it that nothing of this store uses the session meanwhile. Gives the
        keys of what was removed; nothing is where another machine has the session. Raises as `take` and `drop`."""
        head = self.heads.head(uri)
        if head is not None and not (head.holder is None or (head.awake_at is None and head.holder.party == self.me)):
            return []
        lease = self.take(uri)
        try:
            named = {*lease.head.tail, *map(manifest_key, self._needed_of(lease.head))}
            gone = list[str]()
            for key in keys:
                if key in named:
                    continue
                if (bundle_id := bundle_id_in(key)) is None:
                    self._versions.remove(key)
                elif not self._remove_version(uri, bundle_id):
                    continue
                gone.append(key)
        finally:
            lease.release(asleep=head is not None and head.holder is not None)
        return gone

    def collect(
        self,
        also: Mapping[str, Collection[bytes]] = MappingProxyType({}),
        *,
        dry_run: bool,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Collected:
        """Free what no session needs: see `collecting.py`. also, and what it raises: as of `collecting.collect`."""
        self.require_proven()
        return collect(self.heads, self._objects, self._clock, also, dry_run=dry_run, should_stop=should_stop)

    def packs_of(self, head: Head) -> dict[str, set[bytes]]:
        """The packs that its versions need, and their blocks in each, as far as that can be told. Raises as
        `Objects`."""
        packs, versions = dict[str, set[bytes]](), RemoteVersions(self._objects)
        for bundle_id in head.versions:
            with contextlib.suppress(Corruption, RemoteTooLarge):
                for block_id, place in (versions.places(bundle_id) or {}).items():
                    packs.setdefault(place.pack, set()).add(block_id)
        return packs

    def _needed_of(self, head: Head) -> set[str]:
        """The versions that a head needs: those that it names, and that behind which its turns stand. Raises as
        `tails.record_of`."""
        bases = (record_of(self._objects, key, head.uri).base for key in head.tail)
        return {*head.versions, *(base for base in bases if base is not None)}

    def _remove_versions(self, head: Head, bundle_ids: Iterable[str]) -> None:
        """Versions that a head names no more; one that its turns stand behind stays."""
        if gone := [each for each in bundle_ids if each not in self._needed_of(head)]:
            for bundle_id in gone:
                self._remove_version(head.uri, bundle_id)

    def _remove_version(self, uri: SessionUri, bundle_id: str) -> list[str]:
        """Remove a version of a session; the keys of what is gone. Of a version of another session nothing goes: who
        can write to a plain remote can name it in any head. Its manifest tells, here or there, as its digest is its
        name. Raises as `RemoteVersions.manifest`: nothing tells whose it is, and it stays; and as `remove_version`."""
        try:
            manifest: Manifest | None = self._core.read_manifest(bundle_id)
        except StoreError:
            manifest = self._versions.manifest(bundle_id)
        if manifest is not None and manifest.uri != uri:
            return []
        self._versions.remove_version(bundle_id)
        return own_keys(bundle_id)

    def _remove(self, keys: Iterable[str]) -> None:
        """What no head names any more; what stays is in nobody's way."""
        for key in keys:
            with contextlib.suppress(RemoteError):
                self._objects.remove(key)

    def pull(self, head: Head, *, turns: bool = True) -> Pulled | None:
        """As `Pulling.pull`."""
        with self._moving:
            return self._pulling.pull(head, turns=turns)

    def fetch_back(self, uri: SessionUri, bundle_id: str) -> int:
        """As `Pulling.fetch_back`."""
        with self._moving:
            return self._pulling.fetch_back(uri, bundle_id)

    def listed(self, namespace: str | None = None) -> tuple[list[Found], list[Finding]]:
        """The sessions of the remote, of one namespace or of all, by name; and heads that cannot be read. Names of
        which the remote has nothing are left out: a listing may be stale, and a session may have been removed. Raises
        as `Objects.entries`."""
        found, problems = [], []
        uris = sorted(uri for uri in self.heads.uris() if namespace in (None, uri.namespace))
        for uri, head in self.heads.each(uris, noting=False):
            if isinstance(head, StoreError):
                problems.append(Finding.of(f"{self.url}/{key_of(uri)}", head))
                continue
            if head is None:
                continue
            if self._core.index.find(uri) is not None:  # also of one that another machine has removed there
                self.heads.note(head)
            if head.holder or not head.is_empty:
                holder, here = head.holder, self._here(head)
                found.append(Found(head, here, holder is not None and holder.party == self.me))
        return found, problems

    def _here(self, head: Head) -> Standing:
        newest = self._core.index.find(head.uri)
        if newest is None:
            return "absent"
        if newest.bundle_id == head.newest:
            return "same"
        if newest.bundle_id in head.versions:
            return "behind"
        has_turns_of_others = self._pulling.has_turns_of_others(head)
        if self.is_ahead(head.uri, head) and not has_turns_of_others:
            return "ahead"
        # Names do not tell: by the tokens, as a wake does, unless they cannot be had.
        if head.newest is not None or has_turns_of_others:
            with contextlib.suppress(StoreError), self._moving:
                return self._pulling.beside(head) or "diverged"
        return "diverged"

    def behind_of(self, uris: Iterable[SessionUri]) -> list[SessionUri]:
        """The sessions of these that the remote lacks something of, as of `is_ahead`; or may, as their heads cannot be
        read. Raises RemoteUnreachable: of all that are left."""
        behind = []
        for uri, head in self.heads.each(uris):
            if isinstance(head, RemoteUnreachable):
                raise head
            if isinstance(head, StoreError) or self.is_ahead(uri, head):
                behind.append(uri)
        return behind

    def is_known(self, uri: SessionUri) -> bool:
        """Whether the remote has had the session, as far as is remembered here. Asks nobody."""
        return self._core.seen_heads.knows(uri)

    def is_ahead(self, uri: SessionUri, head: Head | None) -> bool:
        """Whether the session here has gone on from the newest version that the remote has, if any. A session that was
        dropped there is not: it would come back."""
        newest = self._core.index.find(uri)
        if newest is None or head is None:
            return newest is not None
        if head.newest is None:
            return head.holder is not None and head.holder.party == self.me
        if newest.bundle_id in head.versions:
            return False
        return any(head.newest in (row.bundle_id, row.parent) for row in self._core.index.versions(uri))

    def _gone_on(self, uri: SessionUri) -> Diverged:
        return Diverged(
            f"{uri} has gone on at another machine, and {self.url} keeps it. Wake it (`torpor wake {uri}`), and remove "
            "it then.",
            session=str(uri),
        )


def _emptied(head: Head) -> Head:
    return dataclasses.replace(head, versions=(), tail=())


def _with_room(head: Head) -> Head:
    """Without its oldest version, if it keeps as many as it may."""
    return head.without_versions(head.versions[:1]) if len(head.versions) >= MAX_HEAD_VERSIONS else head
