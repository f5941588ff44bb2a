"""Checking what is on disk without changing it: one session's promise, or a whole store.

Owns the comparison of an index row with its bundle, and the report. Repairs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .blocks import BlockEntry, span_parents
from .bundle import BundleFile, FrameFile, require_promised
from .errors import (
    BlockMissing,
    BundleMissing,
    IndexMismatch,
    OwnerMismatch,
    ParentMismatch,
    StoreError,
    VersionMismatch,
)
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX, StoreFolder
from .index import SHADOWED, Index, row_of
from .manifest import Manifest
from .paths import Stamp
from .records import Finding, IndexRow, VerifyReport
from .uri import SessionUri

_LOOKS = 64
"""How often a block is looked for anew that is not where its bundle said: each look follows one rewrite of the file."""

_REMEDY = (
    "Stop the daemon and remove index.sqlite: it is made anew from the bundles. If the refusal stays, the bundle "
    "file was replaced: put it back from a backup."
)


def require_same_as_row(row: IndexRow, uri: SessionUri, manifest: Manifest, path: str) -> None:
    """Raise unless the bundle says of itself what the index says of it: a bundle repointed to another session, of
    the same model and length even, stops here (GM2, GM3; threat 7).

    Raises:
        OwnerMismatch, VersionMismatch, ParentMismatch, IndexMismatch
    """
    _require_equal(OwnerMismatch, path, "owner", str(uri), str(manifest.uri))
    _require_equal(VersionMismatch, path, "version", row.version, manifest.version)
    _require_equal(ParentMismatch, path, "parent", _hex(row.parent), _hex(manifest.parent))
    _require_equal(IndexMismatch, path, "identity", _hex(row.identity_digest), _hex(manifest.identity.digest))
    _require_equal(IndexMismatch, path, "token_count", row.token_count, manifest.token_count)
    if row != row_of(manifest, row.bundle_id, row.bundle_bytes):  # a file's length says nothing of its meaning
        raise IndexMismatch(
            f"{path}: the index tells other facts of it than it does itself. {_REMEDY}", path=path, field="facts"
        )


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
    findings: list[Finding] = field(default_factory=list)
    bundles: int = 0
    blocks: int = 0
    bytes_checked: int = 0

    def find(self, path: str, error: StoreError) -> None:
        self.findings.append(Finding(path, error.code, error.message))


@dataclass(slots=True)
class _User:
    """A bundle that looks for blocks in another: what its file says of each, and which span it puts before it."""

    bundle_id: bytes
    path: str
    stamp: Stamp
    identity_digest: bytes
    blocks: list[tuple[BlockEntry, bytes | None]] = field(default_factory=list)


def verify_store(
    folder: StoreFolder,
    index: Index,
    uri: SessionUri | None,
    promised: Callable[[bytes], bool],
    *,
    deep: bool,
    on_progress: Callable[[int, int], None] | None,
    committing: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> VerifyReport:
    """Check every bundle file, or only those that one session's versions need. Reports damage, never raises it.

    `promised` says, by a fresh look, whether a bundle still belongs to a session: one that was deleted while we read
    is no damage. While `committing` is held, files and rows agree; None where others may change the files meanwhile,
    who published what the index does not know of.
    """
    tally = _Tally()
    rows = {row.bundle_id: row for row in (index.all_rows() if uri is None else index.versions(uri))}
    wanted = set(rows)
    if uri is None:
        wanted |= _report_store(folder, index, tally)
    total = sum(row.bundle_bytes for row in rows.values())
    done = 0
    users: dict[bytes, list[_User]] = {}
    for bundle_id in _in_order(wanted, rows):
        row = rows.get(bundle_id)
        for other, user in _verify_bundle(folder, bundle_id, row, promised, tally, deep).items():
            users.setdefault(other, []).append(user)
        if row is not None and on_progress is not None:
            done += row.bundle_bytes
            on_progress(done, total)
    for other, its_users in users.items():
        _verify_refs(folder, other, its_users, promised, tally, deep=deep and other not in wanted)
    if uri is None:
        with contextlib.nullcontext() if committing is None else committing():
            _report_rows(folder, index, tally, all_known=committing is not None)
    return VerifyReport(deep, tuple(tally.findings), tally.bundles, tally.blocks, tally.bytes_checked)


def _uses(file: BundleFile, manifest: Manifest) -> dict[bytes, _User]:
    """What a bundle looks for in other bundles, by their ids; one walk along its block list."""
    found: dict[bytes, _User] = {}
    parents = span_parents(manifest.blocks)
    stamp = file.stamp()
    for entry in file.entries:
        if entry.bundle_id is not None and entry.bundle_id != file.bundle_id:
            user = found.setdefault(entry.bundle_id, _User(file.bundle_id, file.path, stamp, manifest.identity.digest))
            user.blocks.append((entry, parents[entry.id]))
    return found


def _report_store(folder: StoreFolder, index: Index, tally: _Tally) -> set[bytes]:
    """Report what is wrong with the folder itself; the bundles that are in it."""
    for bundle_id in index.with_status(SHADOWED):
        message = "Another, younger bundle is the same version of the same session; this one is not used."
        tally.findings.append(Finding(folder.bundle_path(bundle_id), "rival_version", message))
    try:
        for path in folder.list_strangers():
            tally.findings.append(Finding(path, "unknown_file", "This does not belong in a store; move it away."))
        return set(folder.list_bundles())
    except StoreError as error:
        tally.find(folder.path, error)
    return set()


def _report_rows(folder: StoreFolder, index: Index, tally: _Tally, *, all_known: bool) -> None:
    """Report versions whose files are sound and that the index does not list: a wake would give an older one.

    `all_known`: a file that the index knows nothing of is one that it lost. Reads only what is no version in the index.
    """
    try:
        files = folder.list_bundles()
    except StoreError:
        return  # said by `_report_store`
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
        fd, path = folder.open_bundle(bundle_id)
        with contextlib.closing(BundleFile(fd, path, bundle_id)) as file:
            manifest = file.manifest
    except StoreError:
        return  # said where the file was checked
    if manifest is None or not path.endswith(LIVE_SUFFIX):
        return
    used = index.find(manifest.uri, manifest.version)
    if used is None or (used.created_ns, used.bundle_id) < (manifest.created_ns, bundle_id):
        message = f"The index does not list version {manifest.version} of {manifest.uri}, which is here. {_REMEDY}"
        tally.findings.append(Finding(path, IndexMismatch.code, message))


def _in_order(bundle_ids: Iterable[bytes], rows: Mapping[bytes, IndexRow]) -> list[bytes]:
    """By session and version, then the bundles that belong to none."""
    listed = sorted((row.uri, row.version, bundle_id) for bundle_id, row in rows.items())
    return [bundle_id for *_, bundle_id in listed] + sorted(set(bundle_ids) - rows.keys())


def _verify_bundle(
    folder: StoreFolder,
    bundle_id: bytes,
    row: IndexRow | None,
    promised: Callable[[bytes], bool],
    tally: _Tally,
    deep: bool,
) -> dict[bytes, _User]:
    """Check one bundle's own file, and its row; what it looks for in others, nothing if it cannot be read."""
    path = folder.bundle_path(bundle_id)
    tally.bundles += 1
    try:
        fd, path = folder.open_bundle(bundle_id)
        file = BundleFile(fd, path, bundle_id)
    except StoreError as error:
        emptied = path.endswith(RETIRED_SUFFIX) and not folder.size_of(bundle_id)  # by a delete on a full disk
        if not (emptied or isinstance(error, BundleMissing)) or (row is not None and promised(bundle_id)):
            tally.find(path, error)
        return {}
    with contextlib.closing(file):
        listed = _check_manifest(file, row, tally)
        for block_id in file.frames:
            _verify_block(file, block_id, listed.get(block_id), file.manifest, tally, deep)
        if file.manifest is None or not file.path.endswith(LIVE_SUFFIX):
            return {}  # a bundle that is no version any more needs nothing: others may have lost what it looked for
        return _uses(file, file.manifest)


def _check_manifest(
    file: BundleFile, row: IndexRow | None, tally: _Tally
) -> dict[bytes, tuple[BlockEntry, bytes | None]]:
    """Compare a bundle with its row; the blocks of its manifest with the span that stands before each."""
    if file.manifest is None:
        return {}
    if row is not None:
        try:
            require_same_as_row(row, row.uri, file.manifest, file.path)
        except StoreError as error:
            tally.find(file.path, error)
    parents = span_parents(file.manifest.blocks)
    return {entry.id: (entry, parents[entry.id]) for entry in file.manifest.blocks}


def _verify_block(
    file: FrameFile,
    block_id: bytes,
    listed: tuple[BlockEntry, bytes | None] | None,
    manifest: Manifest | None,
    tally: _Tally,
    deep: bool,
) -> None:
    """Check one frame, and that it is what the file's own manifest says, if that lists it."""
    tally.blocks += 1
    try:
        frame = file.frame_of(block_id)
        header = file.check_block(block_id) if deep else file.read_head(block_id)[0]
        if listed is not None and manifest is not None:
            require_promised(header, *listed, manifest.identity.digest, file.path)
        tally.bytes_checked += frame.frame_bytes if deep else frame.head_bytes
    except StoreError as error:
        tally.find(file.path, error)


def _verify_refs(
    folder: StoreFolder,
    bundle_id: bytes,
    users: Sequence[_User],
    promised: Callable[[bytes], bool],
    tally: _Tally,
    *,
    deep: bool,
    looks: int = _LOOKS,
) -> None:
    """Check that a bundle holds every block that others look for in it; their bytes too, if nobody else does.

    A block that is not there may have been moved since the user's file was read, by another thread or a daemon beside
    us. Unless that file is the same still, the user is asked again where it looks, at most `looks` times.
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
                    if deep and entry.id not in checked:
                        checked.add(entry.id)
                        _verify_block(file, entry.id, None, None, tally, deep)
                except StoreError as error:
                    now = now or _Now(folder, user)
                    place = now.places.get(entry.id)
                    if looks and now.stamp != user.stamp and place is not None:
                        again = _User(user.bundle_id, user.path, now.stamp, user.identity_digest)
                        moved.setdefault(place, {}).setdefault(user.bundle_id, again).blocks.append((entry, parent))
                        continue
                    if not isinstance(error, BundleMissing | BlockMissing) or promised(user.bundle_id):
                        tally.find(user.path, error)
                    if not holder.sound:
                        break  # nothing else that this user looks for there will be found
    for place, its_users in moved.items():
        _verify_refs(folder, place, list(its_users.values()), promised, tally, deep=True, looks=looks - 1)


class _Opened:
    """A bundle's file, or why it cannot be had: asked for again and again, opened once."""

    def __init__(self, folder: StoreFolder, bundle_id: bytes, stack: contextlib.ExitStack) -> None:
        self._opened: FrameFile | None = None
        self._failure: StoreError | None = None
        try:
            fd, path = folder.open_bundle(bundle_id)
            self._opened = stack.enter_context(contextlib.closing(FrameFile(fd, path, bundle_id)))
        except StoreError as error:
            self._failure = error

    @property
    def sound(self) -> bool:
        return self._opened is not None

    def file(self) -> FrameFile:
        if self._opened is None:
            assert self._failure is not None
            raise self._failure
        return self._opened


class _Now:
    """A user's file, read anew after a block was not where it had said; empty if it cannot be read."""

    def __init__(self, folder: StoreFolder, user: _User) -> None:
        self.stamp = user.stamp
        self.places: dict[bytes, bytes | None] = {}
        try:
            fd, path = folder.open_bundle(user.bundle_id)
            with contextlib.closing(BundleFile(fd, path, user.bundle_id)) as file:
                self.stamp = file.stamp()
                self.places = {entry.id: entry.bundle_id for entry in file.entries}
        except StoreError:
            return
