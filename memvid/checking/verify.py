"""Checks the disk without changing it: one session, or a whole store.

Owns the comparison of an index row with its bundle, and the report. Repairs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..disk.paths import Stamp
from ..errors import (
    BlockMissing,
    BundleMissing,
    CorruptStoreFile,
    IndexMismatch,
    OwnerMismatch,
    ParentMismatch,
    StoreError,
    VersionMismatch,
)
from ..folder import duplicate_files
from ..folder.folder import StoreFolder, list_strangers
from ..folder.journal import Journal, waiting_finding
from ..folder.marks import MARKS_FILE, Marks
from ..folder.store_file import JOURNAL, STORE_FILE
from ..format.blocks import BlockEntry, BlockHeader, span_parents
from ..format.bundle import BundleFile, FrameFile, require_promised
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.manifest import Manifest
from ..format.records import Finding, IndexRow, VerifyReport
from ..index.index import Index
from ..index.rows import SHADOWED, indexed, row_of
from ..index.unknown_references import find_lost_notes, missed_finding
from ..uri import SessionUri
from .set_aside_versions import find_losses

_SECOND_LOOK_S: Final = 0.1
"""After so long a write of the journal that was under way has arrived."""

_LOOKS = 64
"""How often a block is looked for again that was not in its place: each look follows one rewrite of the file."""

STRANGER: Final = "unknown_file"
_REMEDY = "Run `torpor rebuild-index`: it takes what the bundles say, and keeps what the index alone knows."


def require_same_as_row(row: IndexRow, uri: SessionUri, manifest: Manifest, path: str) -> None:
    """Raise unless bundle and index row agree: a bundle repointed to another session, even of the same model and
    length, stops here (GM2, GM3; threat 7).

    Raises:
        OwnerMismatch, VersionMismatch, ParentMismatch, IndexMismatch
    """
    _require_equal(OwnerMismatch, path, "owner", str(uri), str(manifest.uri))
    _require_equal(VersionMismatch, path, "version", row.version, manifest.version)
    _require_equal(ParentMismatch, path, "parent", _hex(row.parent), _hex(manifest.parent))
    _require_equal(IndexMismatch, path, "identity", _hex(row.identity_digest), _hex(manifest.identity.digest))
    _require_equal(IndexMismatch, path, "token_count", row.token_count, manifest.token_count)
    if row != row_of(manifest, row.bundle_id, row.bundle_bytes):  # a file's length is no part of its meaning
        raise IndexMismatch(f"{path}: its facts differ from those in the index. {_REMEDY}", path=path, field="facts")


def _require_equal(kind: type[StoreError], path: str, field_name: str, promised: Any, found: Any) -> None:
    if promised != found:
        raise kind(
            f"{path}: the index promises {field_name} {promised}, the bundle says {found}. {_REMEDY}",
            path=path,
            field=field_name,
            expected=promised,
            found=found,
        )


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


@dataclass(slots=True)
class _Tally:
    """The findings so far. One that only counts while a bundle belongs to a session stands with its id. `held`: the
    needs and frames of the versions' files, each with the file's stamp."""

    findings: list[tuple[Finding, bytes | None]] = field(default_factory=list)
    bundles: int = 0
    blocks: int = 0
    bytes_checked: int = 0
    held: dict[bytes, tuple[Stamp, bytes]] = field(default_factory=dict)
    pace: Callable[[int], None] | None = None

    def read(self, size_bytes: int) -> None:
        self.bytes_checked += size_bytes
        if self.pace is not None:
            self.pace(size_bytes)

    def find(self, path: str, error: StoreError, if_promised: bytes | None = None) -> None:
        self.findings.append((Finding(path, error.code, error.message), if_promised))

    def add(self, *findings: Finding) -> None:
        self.findings += ((finding, None) for finding in findings)

    def settled(self, promised: Promised) -> tuple[Finding, ...]:
        """The findings, without those of bundles that were deleted meanwhile."""
        asked = {bundle_id for _, bundle_id in self.findings if bundle_id is not None}
        present = promised(asked) if asked else set()
        return tuple(finding for finding, bundle_id in self.findings if bundle_id is None or bundle_id in present)


Promised = Callable[[Collection[bytes]], set[bytes]]
"""Those of the bundles that belong to a session, by a fresh look."""

_Said = tuple[str, int, int, int, bytes | None, bytes]
"""A block as a manifest describes it: kind, start, tokens, raw bytes, the span before it, digest of the identity."""


@dataclass(slots=True)
class _User:
    """A bundle that needs blocks of another: for each block its description and the span before it."""

    bundle_id: bytes
    path: str
    stamp: Stamp
    identity_digest: bytes
    blocks: list[tuple[BlockEntry, bytes | None]] = field(default_factory=list)


@dataclass(slots=True)
class _Sought:
    """The blocks that others need from one bundle: each once, as the first of them describes it. `users` are all of
    them; `rivals` the blocks that two files describe differently."""

    blocks: dict[bytes, _Said] = field(default_factory=dict)
    users: list[tuple[bytes, str, Stamp]] = field(default_factory=list)
    rivals: set[bytes] = field(default_factory=set)

    def take(self, block_id: bytes, said: _Said) -> None:
        if self.blocks.setdefault(block_id, said) != said:
            self.rivals.add(block_id)

    def add(self, other: _Sought) -> None:
        for block_id, said in other.blocks.items():
            self.take(block_id, said)
        self.users += other.users
        self.rivals |= other.rivals


_Users = dict[bytes, dict[bytes, _User]]
"""For each bundle's id, the bundles that need blocks of it, by their ids."""

_Found = dict[bytes, dict[bytes, _Said]]
"""The sound blocks, by the bundle whose file holds them."""


def verify_store(
    folder: StoreFolder,
    index: Index,
    uri: SessionUri | None,
    promised: Promised,
    *,
    deep: bool,
    on_progress: Callable[[int, int], None] | None,
    pace: Callable[[int], None] | None,
    index_now: Callable[[], contextlib.AbstractContextManager[Index | None]],
    all_known: bool,
) -> VerifyReport:
    """Check every bundle file, or only those that one session's versions need. Reports damage, never raises it; and
    each version that repair has set aside, until it is back or given up.

    Each file is read once, and each block is compared once with all descriptions of it: within a session as its files
    are read, across sessions at the end. Time grows with the bytes read, memory with the blocks of the largest session
    and those in other sessions' files.

    `promised` says, by a fresh look, which bundles still belong to a session: damage in one deleted meanwhile is none.
    `index_now` gives the index's rows at the end, held while no other process may change it. `all_known`: the index has
    a row for each published file, so one without a row is one that it lost.
    """
    tally = _Tally(pace=pace)
    rows = {row.bundle_id: row for row in (index.all_rows() if uri is None else index.versions(uri))}
    wanted = set(rows)
    if uri is None:
        wanted |= _report_store(folder, index, tally)
    total = sum(row.bundle_bytes for row in rows.values())
    done = 0
    _report_small_files(folder, tally)
    _report_journal(folder, tally)
    tally.add(*find_losses(folder, index, uri))
    left: dict[bytes, _Sought] = {}
    for bundle_ids in _by_session(wanted, rows):
        found: _Found = {}
        sought: dict[bytes, _Sought] = {}
        for bundle_id in bundle_ids:
            row = rows.get(bundle_id)
            found[bundle_id] = _verify_bundle(folder, bundle_id, row, sought, tally, deep)
            if row is not None and on_progress is not None:
                done += row.bundle_bytes
                on_progress(done, total)
        for other, its in sought.items():
            if _leave_unproven(its, found.get(other, {})):
                left.setdefault(other, _Sought()).add(its)
    same: _Users = {}
    rewritten: _Users = {}
    for other, its in left.items():
        broken = _find_broken(folder, other, its, tally, deep=deep and other not in wanted)
        for user in its.users if broken else ():
            _ask_again(folder, other, broken, user, same, rewritten, tally)
    for users, bytes_too in ((same, False), (rewritten, deep)):
        for other, its_users in users.items():
            _verify_refs(folder, other, list(its_users.values()), tally, bytes_too=bytes_too, moved_too=deep)
    with index_now() as now:
        _report_stale(folder, now, rows, tally)
        if uri is None:
            _report_rows(folder, index, tally, all_known=all_known)
    return VerifyReport(tally.settled(promised), tally.bundles, tally.blocks, tally.bytes_checked)


def _leave_unproven(its: _Sought, found: Mapping[bytes, _Said]) -> bool:
    """Keep only the needed blocks that a bundle's file was not found to have; whether any are left."""
    its.blocks = {
        block_id: said for block_id, said in its.blocks.items() if block_id in its.rivals or found.get(block_id) != said
    }
    return bool(its.blocks)


def _find_broken(folder: StoreFolder, bundle_id: bytes, its: _Sought, tally: _Tally, *, deep: bool) -> set[bytes]:
    """Those of the blocks that a bundle's file lacks, or has otherwise than described; `deep` reads their bytes too."""
    broken = set(its.rivals)
    with contextlib.ExitStack() as stack:
        holder = _Opened(folder, bundle_id, stack)
        for block_id, said in its.blocks.items():
            try:
                file = holder.file()
                if _said_of(file.read_head(block_id)[0]) != said:
                    broken.add(block_id)
                elif deep:
                    _verify_block(file, block_id, None, None, tally, deep=True)
            except StoreError:
                broken.add(block_id)
    return broken


def _ask_again(
    folder: StoreFolder,
    holder: bytes,
    broken: set[bytes],
    user: tuple[bytes, str, Stamp],
    same: _Users,
    rewritten: _Users,
    tally: _Tally,
) -> None:
    """Read a user's file once more, and note the findings: for an unchanged file its broken blocks, for a rewritten one
    all its present needs."""
    bundle_id, path, stamp = user
    try:
        fd, path = folder.open_bundle(bundle_id)
        with BundleFile(fd, path, bundle_id) as file:
            if file.manifest is None or not path.endswith(LIVE_SUFFIX):
                return  # it is no version any more
            uses = _uses(file, file.manifest)
            is_same = file.stamp() == stamp
    except StoreError as error:
        tally.find(path, error, if_promised=bundle_id)
        return
    if is_same and holder in uses:
        uses[holder].blocks = [(entry, parent) for entry, parent in uses[holder].blocks if entry.id in broken]
        same.setdefault(holder, {})[bundle_id] = uses[holder]
    elif not is_same:
        for other, one in uses.items():
            rewritten.setdefault(other, {})[bundle_id] = one


def _said_of(header: BlockHeader) -> _Said:
    return (header.kind, header.start, header.token_count, header.raw_bytes, header.parent, header.identity_digest)


def _uses(file: BundleFile, manifest: Manifest) -> dict[bytes, _User]:
    """A bundle's needs in other bundles, by their ids; one walk along its block list."""
    found: dict[bytes, _User] = {}
    parents = span_parents(manifest.blocks)
    stamp = file.stamp()
    for entry in file.entries:
        if entry.bundle_id is not None and entry.bundle_id != file.bundle_id:
            user = found.setdefault(entry.bundle_id, _User(file.bundle_id, file.path, stamp, manifest.identity.digest))
            user.blocks.append((entry, parents[entry.id]))
    return found


def _seek(
    file: BundleFile, manifest: Manifest, parents: Mapping[bytes, bytes | None], sought: dict[bytes, _Sought]
) -> None:
    """Note a bundle's needs in others, and its description of each block."""
    identity = manifest.identity.digest
    user = (file.bundle_id, file.path, file.stamp())
    its = [sought.setdefault(holder, _Sought()) for holder in file.directory.holders]
    for one in its:
        one.users.append(user)
    for entry, place in zip(manifest.blocks, file.directory.places, strict=True):
        if place:
            said = (entry.kind, entry.start, entry.token_count, entry.raw_bytes, parents[entry.id], identity)
            its[place - 1].take(entry.id, said)


def _report_store(folder: StoreFolder, index: Index, tally: _Tally) -> set[bytes]:
    """Report faults of the folder itself; returns the bundles in it."""
    for bundle_id in index.with_status(SHADOWED):
        message = "Another, younger bundle is the same version of the same session; this one is not used."
        tally.add(Finding(folder.bundle_path(bundle_id), "rival_version", message))
    missed = [missed_finding(folder.bundle_path(bundle_id), row) for bundle_id, row in index.missed().items()]
    tally.add(*missed, *find_lost_notes(folder, index))
    try:
        tally.add(*find_strangers(folder))
        files, both = folder.list_with_twins()
        for bundle_id in both:
            message = "A live and a retired file of this bundle are both there; `torpor repair` makes one of them."
            tally.add(Finding(folder.bundle_path(bundle_id, RETIRED_SUFFIX), "twin_file", message))
        return set(files)
    except StoreError as error:
        tally.find(folder.path, error)
    return set()


def find_strangers(folder: StoreFolder) -> list[Finding]:
    message = "This does not belong in a store; move it away."
    return [Finding(path, STRANGER, message) for path in list_strangers(folder)]


def _report_small_files(folder: StoreFolder, tally: _Tally) -> None:
    try:
        folder.require_store_file()
    except StoreError as error:
        tally.find(f"{folder.path}/{STORE_FILE}", error)
    try:
        Marks.load(folder)
    except CorruptStoreFile:
        pass  # it is reported
    except StoreError as error:
        tally.find(f"{folder.path}/{MARKS_FILE}", error)


def _report_journal(folder: StoreFolder, tally: _Tally) -> None:
    """What two looks find: what only the first one does a daemon was just writing."""
    try:
        if not (found := _findings_of_journal(folder)):
            return
        time.sleep(_SECOND_LOOK_S)
        again = _findings_of_journal(folder)
        tally.add(*(finding for finding in found if finding in again))
    except StoreError as error:
        tally.find(f"{folder.path}/{JOURNAL}", error)


def _findings_of_journal(folder: StoreFolder) -> list[Finding]:
    with Journal.load(folder, writable=False) as journal:
        gone = {uri for uri, base in journal.bases().items() if folder.suffix_of(base) is None}
        reason = "the version before them is missing."
        return [*journal.findings, *(waiting_finding(journal.path, uri, reason) for uri in sorted(gone))]


def _report_stale(folder: StoreFolder, now: Index | None, rows: Mapping[bytes, IndexRow], tally: _Tally) -> None:
    """Report versions whose index row differs from their file: the index is of another moment, and must not decide
    which files go. Leaves out a file that was rewritten since it was read."""
    said = now.storages() if now is not None else {}
    stale = {one for one, (_, storage) in tally.held.items() if said.get(one, storage) != storage}
    for bundle_id, stamp in folder.stamps_of(stale).items():
        if stamp == tally.held[bundle_id][0]:
            path, row = folder.bundle_path(bundle_id), rows[bundle_id]
            message = (
                f"{path}: version {row.version} of {row.uri} needs other files, or holds other blocks, than the index "
                f"says: the two are of different moments. {_REMEDY}"
            )
            tally.add(Finding(path, IndexMismatch.code, message))


def _report_rows(folder: StoreFolder, index: Index, tally: _Tally, *, all_known: bool) -> None:
    """Report versions with sound files that the index does not list: a wake would give an older one.

    `all_known`: the index has a row for each published file. Reads only files that are no version in the index.
    """
    try:
        files = folder.list_bundles()
    except StoreError:
        return  # `_report_store` reports these
    try:
        known = index.bundle_ids()
        listed = index.rows_of(known).keys()
        for bundle_id in sorted(bundle_id for bundle_id, suffix in files.items() if suffix == LIVE_SUFFIX):
            if bundle_id not in listed and (all_known or bundle_id in known):
                _report_unlisted(folder, index, bundle_id, tally)
    except StoreError as error:
        tally.find(folder.path, error)


def _report_unlisted(folder: StoreFolder, index: Index, bundle_id: bytes, tally: _Tally) -> None:
    try:
        with BundleFile(*folder.open_bundle(bundle_id), bundle_id) as file:
            manifest, path = file.manifest, file.path
    except StoreError:
        return  # reported where the file was checked
    if manifest is None or not path.endswith(LIVE_SUFFIX):
        return
    used = index.find(manifest.uri, manifest.version)
    if used is None or (used.created_ns, used.bundle_id) < (manifest.created_ns, bundle_id):
        message = f"The index does not list version {manifest.version} of {manifest.uri}, which is here. {_REMEDY}"
        tally.add(Finding(path, IndexMismatch.code, message))


def _by_session(bundle_ids: Iterable[bytes], rows: Mapping[bytes, IndexRow]) -> Iterator[list[bytes]]:
    """For each session the versions, by its URI and their number; then one by one the bundles of no session."""
    listed = sorted((row.uri, row.version, bundle_id) for bundle_id, row in rows.items())
    for _, versions in itertools.groupby(listed, operator.itemgetter(0)):
        yield [bundle_id for *_, bundle_id in versions]
    for bundle_id in sorted(set(bundle_ids) - rows.keys()):
        yield [bundle_id]


def _verify_bundle(
    folder: StoreFolder, bundle_id: bytes, row: IndexRow | None, sought: dict[bytes, _Sought], tally: _Tally, deep: bool
) -> dict[bytes, _Said]:
    """Check one bundle's file, and its row; its sound blocks. Adds its needs in others to `sought`."""
    path = folder.bundle_path(bundle_id)
    tally.bundles += 1
    try:
        fd, path = folder.open_bundle(bundle_id)
        file = BundleFile(fd, path, bundle_id)
    except StoreError as error:
        if not (folder.is_gone(bundle_id) or isinstance(error, BundleMissing)):
            tally.find(path, error)
        elif row is not None:
            tally.find(path, error, if_promised=bundle_id)
        return {}
    with file:
        manifest = file.manifest
        parents = {} if manifest is None else span_parents(manifest.blocks)
        listed = {} if manifest is None else {entry.id: (entry, parents[entry.id]) for entry in manifest.blocks}
        if manifest is not None and row is not None:
            try:
                require_same_as_row(row, row.uri, manifest, file.path)
            except StoreError as error:
                tally.find(file.path, error)
            told = indexed(file)
            if told.stamp is not None:
                tally.held[bundle_id] = (told.stamp, told.storage)
        found = {}
        for block_id in file.frames:
            header = _verify_block(file, block_id, listed.get(block_id), manifest, tally, deep=deep)
            if header is not None:
                found[block_id] = _said_of(header)
        if manifest is not None and file.path.endswith(LIVE_SUFFIX):
            # a bundle that is no version any more needs nothing: others may have lost its blocks
            _seek(file, manifest, parents, sought)
        return found


def _verify_block(
    file: FrameFile,
    block_id: bytes,
    listed: tuple[BlockEntry, bytes | None] | None,
    manifest: Manifest | None,
    tally: _Tally,
    *,
    deep: bool,
) -> BlockHeader | None:
    """Check one frame, also against the file's own manifest if that lists it; None if it fails."""
    tally.blocks += 1
    try:
        frame = file.frame_of(block_id)
        header = file.check_block(block_id) if deep else file.read_head(block_id)[0]
        if listed is not None and manifest is not None:
            require_promised(header, *listed, manifest.identity.digest, file.path)
    except StoreError as error:
        tally.find(file.path, error, if_promised=file.bundle_id if file.was_emptied() else None)
        return None
    tally.read(frame.frame_bytes if deep else frame.head_bytes)
    return header


def _verify_refs(
    folder: StoreFolder,
    bundle_id: bytes,
    users: Sequence[_User],
    tally: _Tally,
    *,
    bytes_too: bool,
    moved_too: bool,
    looks: int = _LOOKS,
) -> None:
    """Check that a bundle holds every block that others need from it; also their bytes, if not read yet.

    A missing block may have moved since the user's file was read, through another thread or a daemon beside us. Unless
    that file is unchanged, the user is asked again for the place, at most `looks` times; `moved_too` reads the bytes of
    such a block.
    """
    moved: dict[bytes, dict[bytes, _User]] = {}
    checked: set[bytes] = set()
    with contextlib.ExitStack() as stack:
        holder = _Opened(folder, bundle_id, stack)
        for user in users:
            now: _Now | None = None
            for entry, parent in user.blocks:
                try:
                    file = holder.file()
                    header = file.read_head(entry.id)[0]
                    require_promised(header, entry, parent, user.identity_digest, user.path)
                    if bytes_too and entry.id not in checked:
                        checked.add(entry.id)
                        _verify_block(file, entry.id, None, None, tally, deep=True)
                except StoreError as error:
                    now = now or _Now(folder, user)
                    place = now.places.get(entry.id)
                    if looks and now.stamp != user.stamp and place is not None:
                        again = _User(user.bundle_id, user.path, now.stamp, user.identity_digest)
                        moved.setdefault(place, {}).setdefault(user.bundle_id, again).blocks.append((entry, parent))
                        continue
                    missing = isinstance(error, BundleMissing | BlockMissing) or holder.is_gone()
                    tally.find(user.path, error, if_promised=user.bundle_id if missing else None)
                    if not holder.sound:
                        break  # this user's other blocks will not be found there either
    for place, its_users in moved.items():
        users = list(its_users.values())
        _verify_refs(folder, place, users, tally, bytes_too=moved_too, moved_too=moved_too, looks=looks - 1)


class _Opened:
    """A bundle's file, or the error: asked for again and again, opened once."""

    def __init__(self, folder: StoreFolder, bundle_id: bytes, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._bundle_id = bundle_id
        self._opened: FrameFile | None = None
        self._failure: StoreError | None = None
        try:
            self._opened = stack.enter_context(duplicate_files.open_frames(folder, bundle_id))
        except StoreError as error:
            self._failure = error

    @property
    def sound(self) -> bool:
        return self._opened is not None

    def is_gone(self) -> bool:
        return self._folder.is_gone(self._bundle_id) if self._opened is None else self._opened.was_emptied()

    def file(self) -> FrameFile:
        if self._opened is None:
            assert self._failure is not None
            raise self._failure
        return self._opened


class _Now:
    """A user's file, read anew after a block was not in its place; empty if it cannot be read."""

    def __init__(self, folder: StoreFolder, user: _User) -> None:
        self.stamp = user.stamp
        self.places: dict[bytes, bytes | None] = {}
        try:
            with BundleFile(*folder.open_bundle(user.bundle_id), user.bundle_id) as file:
                self.stamp = file.stamp()
                self.places = {entry.id: entry.bundle_id for entry in file.entries}
        except StoreError:
            return
