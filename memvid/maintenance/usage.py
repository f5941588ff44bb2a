"""Usage: the disk space of the store, by place and by need, and each session's part of it.

Owns the sums, and that they come out even. block_references.py finds the frames that each session needs. The index
gives the number of versions and tokens, as in a list of sessions: an unreadable or missing version counts too. Changes
nothing.

How it scales: each version's manifest and directory are read once, and once more for files with blocks that others
need; no payload is read. So the time grows with the number of versions times their blocks, the memory with the frames
that several sessions share. Beside a live daemon the figures may be of more than one moment; a file that goes meanwhile
is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..disk import durable
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.paths import closing_fd, list_names, open_folder, plain_bytes
from ..disk.room import free_bytes_of
from ..errors import BundleMissing, StoreError
from ..folder.folder import list_strangers
from ..folder.store_file import ABSENT, BUNDLES, INCOMING, JOURNAL, QUARANTINE
from ..format.bundle import BundleFile
from ..format.layout import RETIRED_SUFFIX
from ..format.manifest import Manifest
from ..format.records import Finding, IndexRow, SessionUsage, UsageReport
from ..index.page_sums import INDEX_FILE
from ..index.rows import SHADOWED, row_of
from ..index.unknown_references import UNREADABLE_CODE
from ..recovery.missing_versions import missing_finding
from ..uri import SessionUri
from ..writing.block_references import Needs, read_needs
from ..writing.core import StoreCore


@dataclass(slots=True)
class _Session:
    versions: int = 0
    newest: int = 0
    token_count: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    shared_bytes: int = 0
    exclusive_bytes: int = 0


@dataclass(slots=True)
class _Tally:
    """The store's sums so far. Every byte of a readable file counts once as `live` or `retired`, and once as needed by
    one session, by several, or by none. `listed` are the bundles that the index knows, as versions or not."""

    listed: Collection[bytes] = ()
    sessions: dict[SessionUri, _Session] = field(default_factory=dict)
    live_bytes: int = 0
    retired_bytes: int = 0
    unreadable_bytes: int = 0
    shared_bytes: int = 0
    unneeded_bytes: int = 0
    problems: list[Finding] = field(default_factory=list)

    def add_live(self, file: BundleFile, manifest: Manifest) -> None:
        """Count a version's file as if its session alone needed the listed blocks, and nothing the rest."""
        session = self.sessions.setdefault(manifest.uri, _Session())
        listed = {entry.id for entry in manifest.blocks}
        surplus = sum(frame.frame_bytes for frame in file.directory.frames if frame.id not in listed)
        if file.bundle_id not in self.listed:  # slept since the index was read
            self.add_version(row_of(manifest, file.bundle_id, file.file_bytes))
        session.stored_bytes += file.file_bytes
        session.exclusive_bytes += file.file_bytes - surplus
        self.unneeded_bytes += surplus
        self.live_bytes += file.file_bytes

    def add_version(self, row: IndexRow) -> None:
        session = self.sessions.setdefault(row.uri, _Session())
        session.versions += 1
        if row.version > session.newest:
            session.newest, session.token_count = row.version, row.ledger_tokens
        session.logical_bytes += row.logical_bytes

    def add_retired(self, file: BundleFile) -> None:
        self.retired_bytes += file.file_bytes
        self.unneeded_bytes += file.file_bytes

    def move_needed(self, file: BundleFile, needed: dict[bytes, set[SessionUri]], *, retired: bool) -> None:
        """Give frames that are needed from outside to those who need them."""
        manifest = None if retired else file.manifest
        listed = {entry.id for entry in manifest.blocks} if manifest else set()
        for block_id, users in needed.items():
            frame = file.frames.get(block_id)
            if frame is None:
                continue  # its place changed meanwhile
            if manifest is not None and block_id in listed:
                self.sessions[manifest.uri].exclusive_bytes -= frame.frame_bytes
                users = users | {manifest.uri}
            else:
                self.unneeded_bytes -= frame.frame_bytes
            self._give(users, frame.frame_bytes)

    def _give(self, users: Iterable[SessionUri], size_bytes: int) -> None:
        found = [self.sessions.setdefault(uri, _Session()) for uri in users]
        if len(found) == 1:
            found[0].exclusive_bytes += size_bytes
            return
        self.shared_bytes += size_bytes
        for session in found:
            session.shared_bytes += size_bytes


def usage(core: StoreCore) -> UsageReport:
    """See `Store.usage`."""
    core.require_open()
    rows = core.index.all_rows()
    tally = _Tally(listed={*(row.bundle_id for row in rows), *core.index.with_status(SHADOWED)})
    needs = read_needs(core, tally.add_live)
    _add_versions(core, rows, tally)
    _add_needed(core, needs, tally)
    _add_unread(core, needs, tally)
    places = _places(core)
    rest = sum(places.values())
    return UsageReport(
        file_bytes=tally.live_bytes + tally.retired_bytes + tally.unreadable_bytes + rest,
        live_bytes=tally.live_bytes,
        retired_bytes=tally.retired_bytes,
        unreadable_bytes=tally.unreadable_bytes,
        quarantine_bytes=places[QUARANTINE],
        incoming_bytes=places[INCOMING],
        index_bytes=places[INDEX_FILE],
        temp_bytes=places[durable.TEMP_SUFFIX],
        journal_bytes=places[JOURNAL],
        other_bytes=places[""],
        logical_bytes=sum(session.logical_bytes for session in tally.sessions.values()),
        shared_bytes=tally.shared_bytes,
        unneeded_bytes=tally.unneeded_bytes,
        written_today_bytes=core.index.written_on(utc_day(now_ns())),
        free_bytes=free_bytes_of(core.folder.bundles_fd, core.path),
        sessions=tuple(
            SessionUsage(
                uri=uri,
                versions=one.versions,
                token_count=one.token_count,
                logical_bytes=one.logical_bytes,
                stored_bytes=one.stored_bytes,
                shared_bytes=one.shared_bytes,
                exclusive_bytes=one.exclusive_bytes,
            )
            for uri, one in sorted(tally.sessions.items())
        ),
        problems=tuple(tally.problems),
    )


def _add_versions(core: StoreCore, rows: Sequence[IndexRow], tally: _Tally) -> None:
    absent = [row.bundle_id for row in rows if not core.folder.has_bundle(row.bundle_id)]
    missing = core.promised(absent) if absent else set()
    gone = set(absent) - missing
    for row in rows:
        if row.bundle_id not in gone:
            tally.add_version(row)
        if row.bundle_id in missing:
            tally.problems.append(missing_finding(core.folder, row))


def _add_needed(core: StoreCore, needs: Needs, tally: _Tally) -> None:
    retired = set(needs.retired)
    for bundle_id in sorted(retired.union(needs.needed)):
        try:
            with core.open_bundle(bundle_id) as file:
                if bundle_id in retired:
                    tally.add_retired(file)
                tally.move_needed(file, needs.of(bundle_id), retired=bundle_id in retired)
        except BundleMissing:
            continue  # removed meanwhile, or missing: verify reports versions that need it
        except StoreError as error:
            if bundle_id in retired:
                path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
                tally.problems.append(Finding(path, UNREADABLE_CODE, error.message))
                tally.unreadable_bytes += core.folder.size_of(bundle_id)


def _add_unread(core: StoreCore, needs: Needs, tally: _Tally) -> None:
    tally.problems += needs.unread.values()
    tally.unreadable_bytes += sum(core.folder.size_of(bundle_id) for bundle_id in needs.unread)


# --- places beside the bundles' files


def _places(core: StoreCore) -> Counter[str]:
    """The bytes of everything that is no bundle file, by place or kind; "" for the rest."""
    found: Counter[str] = Counter()
    bundles_fd = core.folder.bundles_fd
    for name in list_names(core.folder.root_fd, core.path):
        if name in (QUARANTINE, INCOMING, JOURNAL):
            found[name] += _bytes_in(core, name)
        elif name == ABSENT:
            found[""] += _bytes_in(core, name)
        elif name != BUNDLES:
            found[INDEX_FILE if name.startswith(INDEX_FILE) else ""] += plain_bytes(core.folder.root_fd, name)
    for name in filter(durable.TEMP_NAME.fullmatch, list_names(bundles_fd, core.folder.bundles_path)):
        found[durable.TEMP_SUFFIX] += plain_bytes(bundles_fd, name)
    for path in list_strangers(core.folder):
        found[""] += plain_bytes(None, path)
    return found


def _bytes_in(core: StoreCore, name: str) -> int:
    path = f"{core.path}/{name}"
    try:
        fd = open_folder(core.folder.root_fd, name, path)
    except (FileNotFoundError, StoreError):  # one that is not ours to look into holds nothing of ours
        return 0
    with closing_fd(fd):
        return sum(plain_bytes(fd, inside) for inside in list_names(fd, path))
