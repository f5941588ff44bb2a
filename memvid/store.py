"""The store: sessions' versions put to sleep, opened again, deleted. The only door to what is on disk.

Owns the order of steps in a sleep, a wake and a delete, the pins, and who may write. Knows nothing of models.

Rules:
- Sleep: temporary file → flush → read back → rename → flush folder → index row → receipt.
- Wake: index row → bundle file → bundle id → owner, version, parent and identity as the row says → reader.
- Delete: retire the files, oldest version first (the last rename is the point of no return) → index rows → remove
  what nothing refers to and nobody has open.
- One writer at a time, by the store's lock between processes and by `_writing` between threads. Readers never wait
  for a writer.
- After a failed flush, or when the lock file was replaced, this object writes no more until the store is reopened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from .. import __version__
from . import deletion
from .blocks import BlockDraft, BlockEntry, require_chain, span_parents
from .bundle import BundleFile, BundleReader
from .codecs import RAW, Codec
from .durable import TempFile
from .errors import (
    BundleMissing,
    DurabilityLost,
    InvalidDraft,
    LimitExceeded,
    LockLost,
    ReadOnlyStore,
    SessionNotFound,
    StoreClosed,
    StoreError,
)
from .folder import (
    LIVE_SUFFIX,
    StoreFolder,
    create_store,
    has_store_file,
    load_store_uuid,
    open_existing_root,
    open_or_make_root,
    require_creatable,
)
from .identity import Identity
from .index import LIVE, UNREADABLE, Index, IndexedBundle, IndexUnusable, row_of
from .limits import MAX_BLOCKS, MAX_BUNDLE_REFS, MAX_TOKENS
from .lock import StoreLock
from .manifest import Manifest, require_session_map
from .opening import load_index
from .pins import Pins
from .records import DeleteReport, IndexRow, OpenReport, Receipt, StoreStatistics, VerifyReport
from .uri import SessionUri, not_found, parse_reference, resolve
from .verify import require_same_as_row, verify_store
from .writer import BundleWriter

__all__ = [
    "DeleteReport",
    "IndexRow",
    "OpenReport",
    "Progress",
    "Receipt",
    "Store",
    "StoreStatistics",
    "VerifyReport",
]

Progress = Callable[[int, int], None]


class Store:
    """An open store. Use `Store.open`; close it when done. All methods may be called from several threads."""

    def __init__(self, folder: StoreFolder, lock: StoreLock | None, index: Index, opening: OpenReport) -> None:
        self.path = folder.path
        self.uuid = folder.uuid
        self.writable = lock is not None
        self.index = index
        self.opening = opening
        self._folder = folder
        self._lock = lock
        self._writing = threading.RLock()
        self._pins = Pins()
        self._poison: StoreError | None = None
        self._closed = False

    # --- opening and closing

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool) -> Store:
        """Open a store.

        To write: creates it if it is missing, takes its lock, removes what unfinished sleeps and deletes left, and
        makes the index anew where it is missing, foreign, stale or damaged. To read: takes no lock, writes nothing,
        and sees the sessions that were there when it was opened; works beside a live daemon.

        Raises:
            NoStore, NotAStore, UnsupportedFormat, StoreLocked, UnsafePath, NoSpace, StoreIoError, DurabilityLost
        """
        store_path = os.path.abspath(os.fspath(path))
        root_fd = open_or_make_root(store_path) if writable else open_existing_root(store_path)
        lock: StoreLock | None = None
        try:
            if writable:
                lock, store_uuid = _claim(root_fd, store_path)
            else:
                store_uuid = load_store_uuid(root_fd, store_path)
            folder = StoreFolder(store_path, root_fd, store_uuid)
        except BaseException:
            if lock is not None:
                lock.close()
            os.close(root_fd)
            raise
        try:
            index, opening = load_index(folder, writable=writable)
        except BaseException:
            if lock is not None:
                lock.close()
            folder.close()
            raise
        return cls(folder, lock, index, opening)

    def close(self) -> None:
        """Let go of files and lock. Open readers stay usable for what they have open. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self.index.close()
            if self._lock is not None:
                self._lock.close()
            self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- sleep

    def write_bundle(
        self,
        *,
        uri: SessionUri,
        identity: Identity,
        parent: bytes | None,
        reused: Sequence[BlockEntry],
        blocks: Iterable[BlockDraft],
        session: Mapping[str, Any],
        token_count: int,
        codec: Codec = RAW,
        on_progress: Progress | None = None,
    ) -> Receipt:
        """Make a session's state durable as its next version, then return the receipt.

        `reused` come first in the chain and name the bundles that hold them; `blocks` continue it. The drafts' buffers
        are borrowed until this returns. `on_progress` is told (tokens written, tokens to write).

        Raises:
            InvalidDraft, LimitExceeded, BlockMissing, BundleMissing: what was handed in; nothing was written.
            NoSpace, StoreIoError, ReadBackFailed: the store is as it was before.
            DurabilityLost, LockLost: not acknowledged, and this store writes no more until it is opened again.
            ReadOnlyStore, StoreClosed
        """
        with self._writing, self._poisoning():
            self._require_writable()
            require_session_map(session)
            if not 0 <= token_count <= MAX_TOKENS:
                raise LimitExceeded(f"a session has 0 to {MAX_TOKENS} tokens, not {token_count}.", limit=MAX_TOKENS)
            self._require_reusable(reused, identity)
            manifest = Manifest(
                uri=uri,
                version=self._next_version(uri),
                parent=parent,
                identity=identity,
                token_count=token_count,
                created_ns=max(time.time_ns(), 0),  # a clock before 1970 must not make the bundle invalid
                blocks=tuple(reused),
                session=session,
                environment=_environment(),
            )
            temp = self._folder.new_temp()
            try:
                return self._write(temp, manifest, blocks, codec, on_progress)
            finally:
                temp.close()

    def _write(
        self,
        temp: TempFile,
        draft: Manifest,
        blocks: Iterable[BlockDraft],
        codec: Codec,
        on_progress: Progress | None,
    ) -> Receipt:
        writer = BundleWriter(temp, draft.identity.digest, codec)
        entries = list(draft.blocks)
        span = next((entry for entry in reversed(entries) if entry.kind == "span"), None)
        done, total = 0, draft.token_count - (span.end if span else 0)
        for block in blocks:
            entry = writer.add_block(block, span.id if span else None)
            entries.append(entry)
            if len(entries) > MAX_BLOCKS:
                raise LimitExceeded(f"a session has at most {MAX_BLOCKS} blocks.", limit=MAX_BLOCKS)
            if entry.kind == "span":
                span = entry
                done += entry.token_count
                if on_progress is not None:
                    on_progress(done, total)
        problem = require_chain(entries, draft.token_count)
        if problem:
            raise InvalidDraft(f"The blocks of {draft.uri} are not one chain: {problem}.", session=str(draft.uri))
        manifest = dataclasses.replace(draft, blocks=tuple(entries))
        bundle_id = writer.finish(manifest)
        self._commit(temp, manifest, bundle_id)
        return Receipt(
            uri=manifest.uri,
            version=manifest.version,
            bundle_id=bundle_id,
            parent=manifest.parent,
            token_count=manifest.token_count,
            bytes_written=temp.size_bytes,
            logical_bytes=manifest.logical_bytes,
            blocks_new=len(manifest.own_blocks),
            blocks_reused=len(draft.blocks),
            entries=tuple(entry.in_bundle(bundle_id) for entry in entries),
        )

    def _commit(self, temp: TempFile, manifest: Manifest, bundle_id: bytes) -> None:
        """Publish the flushed and checked file, then enter it in the index; undo the first if the second fails."""
        self._require_lock()
        self._folder.publish(temp, bundle_id)
        row = row_of(manifest, bundle_id, temp.size_bytes)
        try:
            self.index.add(IndexedBundle(bundle_id, LIVE, row, manifest.refs))
        except BaseException as failure:  # whatever stopped it, a version that was not acknowledged must not stay
            try:
                self._folder.remove(bundle_id, LIVE_SUFFIX)
            except Exception as error:
                # else the next sleep would get the same version number, and the clock decide between the two
                raise DurabilityLost(
                    f"The index took no row for {self._folder.bundle_path(bundle_id)} ({failure}), and the file could "
                    f"not be taken back ({error}). Nothing more is written until the store is opened again.",
                    path=self._folder.bundle_path(bundle_id),
                ) from error
            raise

    def _next_version(self, uri: SessionUri) -> int:
        """One more than the last, and past the numbers that bundles may have which cannot be read at present."""
        latest = self.index.find(uri)
        return (latest.version if latest else 0) + len(self.index.with_status(UNREADABLE)) + 1

    def _require_reusable(self, reused: Sequence[BlockEntry], identity: Identity) -> None:
        """Every reused block must be where its entry says, in a bundle of the same identity."""
        files: dict[bytes, list[BlockEntry]] = {}
        for entry in reused:
            if entry.bundle_id is None:
                raise InvalidDraft("a reused block must name the bundle that holds it.", block_id=entry.id.hex())
            files.setdefault(entry.bundle_id, []).append(entry)
        if len(files) > MAX_BUNDLE_REFS:
            raise LimitExceeded(f"a bundle refers to at most {MAX_BUNDLE_REFS} others.", limit=MAX_BUNDLE_REFS)
        parents = span_parents(reused)
        for bundle_id, entries in files.items():
            with contextlib.closing(self._open_file(bundle_id)) as file:
                if file.manifest.identity.digest != identity.digest:
                    raise InvalidDraft(
                        f"blocks of {file.path} were made under another identity and cannot be reused.",
                        mismatched_fields=file.manifest.identity.mismatched_fields(identity),
                    )
                for entry in entries:
                    file.require_block(entry)
                    if file.parent_of(entry) != parents[entry.id]:
                        raise InvalidDraft(
                            f"the reused block at token {entry.start} follows another block than it was made behind.",
                            block_id=entry.id.hex(),
                        )

    # --- wake and inspection

    def open_session(self, uri: SessionUri, version: int | None = None) -> BundleReader:
        """Open a version of a session, the latest if none is named, once its bundle is proven to be the one promised.

        Raises:
            SessionNotFound, BundleMissing, Truncated, TrailingData, CorruptBundle, BundleMismatch, OwnerMismatch,
            VersionMismatch, ParentMismatch, IndexMismatch, UnsupportedFormat, UnsafePath
        """
        self._require_open()
        row = self.find_session(uri, version)
        if row is None:
            raise self._not_found(uri, version)
        try:
            reader = self.open_bundle(row.bundle_id)
        except BundleMissing:
            if not self._promised(row.bundle_id):  # deleted meanwhile
                raise self._not_found(uri, version, but=row) from None
            raise
        if self.find_session(uri, row.version) != row:  # deleted before its ancestors were pinned: they may be gone
            reader.close()
            raise self._not_found(uri, version)
        try:
            require_same_as_row(row, uri, reader.manifest, reader.file_bytes, reader.path)
        except BaseException:
            reader.close()
            raise
        return reader

    def open_bundle(self, bundle_id: bytes) -> BundleReader:
        """Open a bundle by its id, whoever owns it: for inspection. The bundle id is still recomputed."""
        self._require_open()
        self._pins.add([bundle_id])
        try:
            file = self._open_file(bundle_id)
        except BaseException:
            self._unpin([bundle_id])
            raise
        refs = file.manifest.refs
        self._pins.add(refs)
        return BundleReader(file, self._open_file, lambda: self._unpin([bundle_id, *refs]))

    def resolve(self, text: str, also: Iterable[SessionUri] = ()) -> SessionUri:
        """The one session that `text` (a URI, NAMESPACE/NAME, or a bare NAME) means, of the store's and of `also`.

        Looks up by name; only the suggestions for a name that nothing has list the store.

        Raises:
            InvalidUri, AmbiguousName, SessionNotFound
        """
        self._require_open()
        namespace, name = parse_reference(text)
        others = set(also)
        if namespace is None:
            known = others.union(self.index.find_by_name(name))
        else:
            uri = SessionUri(namespace, name)
            known = others if self.index.find(uri) is None else others | {uri}
        try:
            return resolve(text, known)
        except SessionNotFound:
            raise not_found(text, others.union(row.uri for row in self.index.latest())) from None

    def find_session(self, uri: SessionUri, version: int | None = None) -> IndexRow | None:
        self._require_open()
        return self.index.find(uri, version)

    def versions(self, uri: SessionUri) -> list[IndexRow]:
        """All versions of a session, oldest first."""
        self._require_open()
        return self.index.versions(uri)

    def iter_sessions(self) -> Iterator[IndexRow]:
        """The latest version of each session, by URI."""
        self._require_open()
        yield from self.index.latest()

    def verify(self, uri: SessionUri | None = None, *, deep: bool, on_progress: Progress | None = None) -> VerifyReport:
        """Check one session, or everything: frames of reference only, or (deep) every byte. Changes nothing.

        Damage is reported, not raised. `on_progress` is told (bytes done, bytes in all) of the bundle files.

        Raises:
            SessionNotFound
        """
        self._require_open()
        if uri is not None and self.find_session(uri) is None:
            raise self._not_found(uri, None)
        return verify_store(self._folder, self.index, uri, self._promised, deep=deep, on_progress=on_progress)

    def statistics(self) -> StoreStatistics:
        self._require_open()
        rows = self.index.all_rows()
        return StoreStatistics(
            sessions=len({row.uri for row in rows}),
            versions=len(rows),
            bundle_files=len(self._folder.list_bundles()),
            file_bytes=sum(row.bundle_bytes for row in rows),
            bundles_pinned=len(self._pins),
            writable=self.writable and self._poison is None,
        )

    # --- delete

    def delete_session(self, uri: SessionUri) -> DeleteReport:
        """Forget a session, all versions of it. Needs no disk space.

        A crash leaves the session as it was, or without its oldest versions, or gone. Bundles that other sessions
        refer to keep their files, but are never listed as this session's again.

        Raises:
            SessionNotFound, ReadOnlyStore, LockLost, DurabilityLost, StoreIoError
        """
        with self._writing, self._poisoning():
            self._require_writable()
            if self.index.find(uri) is None:
                raise self._not_found(uri, None)
            return deletion.delete_session(self._folder, self.index, self._pins, uri)

    def _unpin(self, bundle_ids: Sequence[bytes]) -> None:
        """A reader closed. Never waits for a writer: what is left then goes with the next delete, or the next open."""
        self._pins.release(bundle_ids)
        if self._pins.waiting and self._writing.acquire(blocking=False):
            try:
                if not self._closed and self._poison is None:
                    with contextlib.suppress(StoreError, OSError):
                        deletion.remove_waiting(self._folder, self.index, self._pins)
            finally:
                self._writing.release()

    # --- guards

    def _open_file(self, bundle_id: bytes) -> BundleFile:
        fd, path = self._folder.open_bundle(bundle_id)
        return BundleFile(fd, path, bundle_id)

    def _promised(self, bundle_id: bytes) -> bool:
        """Whether a bundle that is not there ought to be: a fresh look, for a daemon beside us may have deleted it."""
        if self.writable:
            return self.index.knows(bundle_id)
        try:
            fresh = Index.copy_to_memory(self.path, self._folder.root_fd, self.uuid)
        except (IndexUnusable, StoreError):
            return True
        with contextlib.closing(fresh):
            return fresh.knows(bundle_id)

    def _not_found(self, uri: SessionUri, version: int | None, but: IndexRow | None = None) -> SessionNotFound:
        """The error for a session or version that is not there; `but` is its last row in an index that is too old."""
        versions = [row.version for row in self.index.versions(uri) if not but]
        if not versions:
            return not_found(str(uri), (row.uri for row in self.index.latest() if row != but))
        return SessionNotFound(
            f"{uri} has no version {version}; it has {versions[0]} to {versions[-1]}.",
            session=str(uri),
            version=version,
            suggestions=[str(uri)],
        )

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"The store {self.path} was closed.", path=self.path)

    def _require_writable(self) -> None:
        self._require_open()
        if self._lock is None:
            raise ReadOnlyStore(f"The store {self.path} was opened for reading only.", path=self.path)
        if self._poison is not None:
            raise type(self._poison)(
                f"The store {self.path} writes no more since an earlier failure: {self._poison.message}",
                **self._poison.details,
            )
        self._require_lock()

    def _require_lock(self) -> None:
        if self._lock is not None:
            self._lock.require_held()

    @contextlib.contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Remember a failure after which this object must not write again."""
        try:
            yield
        except (DurabilityLost, LockLost) as error:
            self._poison = self._poison or error
            raise


def _claim(root_fd: int, path: str) -> tuple[StoreLock, str]:
    """Take the lock of a store that this program understands; make the store if the folder is empty.

    Looks before it writes: a store of a later version, or a folder with other things in it, is left as it is.
    """
    if has_store_file(root_fd, path):
        load_store_uuid(root_fd, path)
    else:
        require_creatable(root_fd, path)
    lock = StoreLock(root_fd, path)
    try:
        if not has_store_file(root_fd, path):
            return lock, create_store(root_fd, path)
        return lock, load_store_uuid(root_fd, path)
    except BaseException:
        lock.close()
        raise


def _environment() -> dict[str, str]:
    """What wrote the bundle, for people who look into it later. No reader acts on it."""
    return {
        "torpor": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
