"""Usage: the disk space of the store, by place and by need, and each session's part of it.

Owns the sums, and that they come out even. The index gives the number of versions and tokens, as in a list of sessions:
a version with a damaged or missing manifest counts too. Changes nothing.

How it scales: each manifest and each pack's directory are read; no payload is. So the time grows with the number of
versions times their blocks, the memory with the number of blocks. Beside a live daemon, or where steps wait for
each other, the figures may be of more than one moment; a file that goes meanwhile is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from heapq import nlargest, nsmallest
from operator import itemgetter
from typing import Final, TypeVar

from ..answers import Finding, SessionUsage, SharedBytes, Together, UsageReport, VersionInfo
from ..checking.promised import still_missing
from ..disk import durable
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.paths import closing_fd, list_names, open_folder, plain_bytes
from ..disk.room import free_bytes_of
from ..errors import BundleMissing, StoreClosed, StoreError
from ..folder.folder import manifest_name
from ..folder.marks import stripped_in
from ..folder.store_file import BUNDLES, DAMAGED, INCOMING, JOURNAL, PACKS, VERSIONS
from ..format.layout import Frame
from ..format.manifest import end_record_of
from ..index.index import INDEX_FILE
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.needs import Needed
from ..writing.unreadable import finding_of_missing
from .needers import view_of
from .repack_plan import PackView, homes_of

R = TypeVar("R")
Steps = Generator[None, None, R]
"""Work that gives its result at the end, and stops before each file."""

_Users = frozenset[SessionUri]
_NONE: _Users = frozenset()

MOST_PARTS: Final = 20
"""Parts of the shared bytes that are told."""

MOST_NAMED: Final = 8
"""Sessions that are named of those who share a part."""


@dataclass(slots=True)
class _Session:
    versions: int = 0
    token_count: int = 0
    logical_bytes: int = 0
    shared_bytes: int = 0
    alone_bytes: int = 0
    stripped_versions: int = 0


@dataclass(slots=True)
class _Needs:
    """Which sessions need each block: `full` whole, `heads` its header at least. Equal sets are one object."""

    full: dict[bytes, _Users] = field(default_factory=dict)
    heads: dict[bytes, _Users] = field(default_factory=dict)
    _same: dict[_Users, _Users] = field(default_factory=dict)

    def add(self, uri: SessionUri, blocks: Iterable[bytes], ends: Container[bytes], *, is_stripped: bool) -> None:
        """ends: what a stripped version needs whole."""
        for block_id in blocks:
            users = self.heads if is_stripped and block_id not in ends else self.full
            before = users.get(block_id, _NONE)
            if uri not in before:
                after = before | {uri}
                users[block_id] = self._same.setdefault(after, after)

    def needed(self) -> Needed:
        return Needed(frozenset(self.full) | frozenset(self.heads), frozenset(self.heads.keys() - self.full.keys()), ())

    def of(self, block_id: bytes) -> _Users:
        return self.full.get(block_id, _NONE) | self.heads.get(block_id, _NONE)


@dataclass(slots=True)
class _Tally:
    """The store's sums so far. Every byte of a manifest or pack counts once by place, and once as needed by one
    session, by several, by none, or as unreadable. together: of the chosen sessions, as if they were one."""

    chosen: _Users = _NONE
    together: _Session = field(default_factory=_Session)
    sessions: dict[SessionUri, _Session] = field(default_factory=dict)
    shared: Counter[_Users] = field(default_factory=Counter)
    version_bytes: int = 0
    pack_bytes: int = 0
    unneeded_bytes: int = 0
    unreadable_bytes: int = 0
    problems: list[Finding] = field(default_factory=list)

    def session(self, uri: SessionUri) -> _Session:
        return self.sessions.setdefault(uri, _Session())

    def add_row(self, row: VersionInfo, *, is_stripped: bool) -> None:
        """A session's rows come oldest first: the newest tells its tokens."""
        session = self.session(row.uri)
        session.versions += 1
        session.stripped_versions += is_stripped
        session.token_count = row.token_count
        session.logical_bytes += row.logical_bytes

    def give(self, users: Collection[SessionUri], size_bytes: int) -> None:
        if of_chosen := self.chosen.intersection(users):
            if len(of_chosen) == len(users):
                self.together.alone_bytes += size_bytes
            else:
                self.together.shared_bytes += size_bytes
        sessions = [self.session(uri) for uri in users]
        if not sessions:
            self.unneeded_bytes += size_bytes
        elif len(sessions) == 1:
            sessions[0].alone_bytes += size_bytes
        else:
            self.shared[frozenset(users)] += size_bytes
            for session in sessions:
                session.shared_bytes += size_bytes


def usage_in_steps(core: StoreCore) -> Steps[UsageReport]:
    """See `Store.usage_in_steps`."""
    report, _ = yield from usage_together_in_steps(core, _NONE)
    return report


def usage_together_in_steps(core: StoreCore, chosen: _Users) -> Steps[tuple[UsageReport, Together]]:
    """See `Store.usage_together`."""
    core.require_open()
    core.look_again()
    tally = _Tally(chosen)
    stripped = stripped_in(core.folder) or frozenset()
    rows = core.index.all_rows()
    users = yield from _add_versions(core, rows, stripped, tally)
    _add_rows(core, rows, stripped, tally)
    yield from _add_packs(core, users, tally)
    places = _places(core)
    file_bytes = tally.version_bytes + tally.pack_bytes + sum(places.values())
    alone_bytes = sum(session.alone_bytes for session in tally.sessions.values())
    shared_bytes = tally.shared.total()
    stored_bytes = alone_bytes + shared_bytes
    together = _told_together(tally)
    report = UsageReport(
        file_bytes=file_bytes,
        version_bytes=tally.version_bytes,
        pack_bytes=tally.pack_bytes,
        damaged_bytes=places[DAMAGED],
        incoming_bytes=places[INCOMING],
        index_bytes=places[INDEX_FILE],
        temp_bytes=places[durable.TEMP_SUFFIX],
        journal_bytes=places[JOURNAL],
        other_bytes=places[""],
        logical_bytes=sum(session.logical_bytes for session in tally.sessions.values()),
        stored_bytes=stored_bytes,
        shared_bytes=shared_bytes,
        alone_bytes=alone_bytes,
        rest_bytes=file_bytes - stored_bytes,
        unneeded_bytes=tally.unneeded_bytes,
        unreadable_bytes=tally.unreadable_bytes,
        written_today_bytes=core.index.written().get(utc_day(now_ns()), 0),
        free_bytes=free_bytes_of(core.folder.packs_fd, core.path),
        sessions=tuple(_told(uri, one) for uri, one in sorted(tally.sessions.items())),
        shared_by=tuple(_shared_by(tally)),
        problems=tuple(tally.problems),
        counted_ns=now_ns(),
    )
    return report, together


def _told_together(tally: _Tally) -> Together:
    there = sorted(tally.chosen & tally.sessions.keys())
    shared, alone = tally.together.shared_bytes, tally.together.alone_bytes
    logical = sum(tally.sessions[uri].logical_bytes for uri in there)
    return Together(tuple(map(str, there)), logical, shared + alone, shared, alone)


def _told(uri: SessionUri, session: _Session) -> SessionUsage:
    return SessionUsage(str(uri), **asdict(session), stored_bytes=session.shared_bytes + session.alone_bytes)


def _shared_by(tally: _Tally) -> Iterator[SharedBytes]:
    """The largest parts; where sessions were chosen, of those that they need."""

    def order(uri: SessionUri) -> tuple[bool, int, SessionUri]:
        session = tally.sessions[uri]
        return uri not in tally.chosen, -session.shared_bytes - session.alone_bytes, uri

    parts = [part for part in tally.shared.items() if not tally.chosen or not tally.chosen.isdisjoint(part[0])]
    for users, size_bytes in nlargest(MOST_PARTS, parts, key=itemgetter(1)):
        yield SharedBytes(size_bytes, tuple(map(str, nsmallest(MOST_NAMED, users, key=order))), len(users))


# --- versions


def _add_versions(
    core: StoreCore, rows: Iterable[VersionInfo], stripped: frozenset[str], tally: _Tally
) -> Steps[_Needs]:
    """A version whose manifest was damaged since the store has read it needs its blocks still."""
    users, owners = _Needs(), {row.bundle_id: row.uri for row in rows}
    for bundle_id in sorted(core.folder.list_versions()):
        yield
        status = core.folder.status_of(manifest_name(bundle_id))
        if status is None:
            continue
        try:
            manifest = core.read_manifest(bundle_id)
        except StoreClosed:
            raise
        except BundleMissing:
            continue  # it was deleted meanwhile
        except StoreError as error:
            tally.version_bytes += status.st_size
            tally.unreadable_bytes += status.st_size
            path = core.folder.manifest_path(bundle_id)
            tally.problems.append(Finding.of(path, error))
            if (uri := owners.get(bundle_id)) is not None:
                users.add(uri, core.needs.of(bundle_id), core.needs.ends(), is_stripped=bundle_id in stripped)
            continue
        tally.version_bytes += status.st_size
        tally.give([manifest.uri], status.st_size)
        end = end_record_of(manifest)
        blocks = [entry.id for entry in manifest.blocks]
        users.add(manifest.uri, blocks, () if end is None else (end.id,), is_stripped=bundle_id in stripped)
    return users


def _add_rows(core: StoreCore, rows: Iterable[VersionInfo], stripped: frozenset[str], tally: _Tally) -> None:
    gone = {row.bundle_id for row in rows if not core.folder.has_manifest(row.bundle_id)}
    missing = still_missing(core, gone)
    for row in rows:
        if row.bundle_id in gone and row.bundle_id not in missing:
            continue  # it was deleted meanwhile
        tally.add_row(row, is_stripped=row.bundle_id in stripped)
        if row.bundle_id in missing:
            tally.problems.append(finding_of_missing(core.folder, row))


# --- packs


def _add_packs(core: StoreCore, users: _Needs, tally: _Tally) -> Steps[None]:
    """Of a block that lies in several packs the frame counts that a repack would keep."""
    packs = []
    for name in sorted(core.folder.list_packs()):
        yield
        status = core.folder.status_of(name)
        try:
            packs.append(view_of(core, name))
        except StoreClosed:
            raise
        except BundleMissing:
            continue
        except StoreError as error:
            size_bytes = status.st_size if status is not None else 0
            tally.pack_bytes += size_bytes
            tally.unreadable_bytes += size_bytes
            tally.problems.append(Finding.of(core.folder.path_of(name), error))
    homes = homes_of(packs, users.needed())
    for pack in packs:
        tally.pack_bytes += pack.size_bytes
        _add_pack(pack, users, homes, tally)


def _add_pack(pack: PackView, users: _Needs, homes: Mapping[bytes, str], tally: _Tally) -> None:
    """Count its frames, and what is no frame to all who need one of these."""
    all_users: set[SessionUri] = set()
    rest = pack.size_bytes
    for frames, is_whole in ((pack.frames, True), (pack.heads, False)):
        for block_id, frame in frames.items():
            rest -= frame.frame_bytes
            its_users = users.of(block_id) if homes.get(block_id) == pack.name else _NONE
            all_users |= its_users
            _give_frame(frame, its_users, tally, is_whole=is_whole and block_id in users.full)
    tally.give(all_users, rest)


def _give_frame(frame: Frame, users: _Users, tally: _Tally, *, is_whole: bool) -> None:
    if is_whole or not users:
        tally.give(users, frame.frame_bytes)
        return
    tally.give(users, frame.head_bytes)  # the rest can go
    tally.give((), frame.frame_bytes - frame.head_bytes)


# --- places beside manifests and packs


def _places(core: StoreCore) -> Counter[str]:
    """The bytes of everything that is no manifest and no pack, by place or kind; "" for the rest."""
    sizes: Counter[str] = Counter()
    for name in list_names(core.folder.root_fd, core.path):
        if name in (DAMAGED, INCOMING, JOURNAL):
            sizes[name] += sum(_files_in(core, name).values())
        elif name in (VERSIONS, PACKS):
            files = _files_in(core, name)
            sizes[durable.TEMP_SUFFIX] += sum(
                size for inside, size in files.items() if durable.TEMP_NAME.fullmatch(inside)
            )
        elif name != BUNDLES:
            is_temp = durable.TEMP_NAME.fullmatch(name)
            kind = INDEX_FILE if name.startswith(INDEX_FILE) else durable.TEMP_SUFFIX if is_temp else ""
            sizes[kind] += plain_bytes(core.folder.root_fd, name)
    for path in core.folder.list_strangers():
        sizes[""] += plain_bytes(None, path)
    return sizes


def _files_in(core: StoreCore, name: str) -> dict[str, int]:
    path = f"{core.path}/{name}"
    try:
        fd = open_folder(core.folder.root_fd, name, path)
    except (FileNotFoundError, StoreError):  # one that is not ours to look into holds nothing of ours
        return {}
    with closing_fd(fd):
        return {inside: plain_bytes(fd, inside) for inside in list_names(fd, path)}
