"""Rewriting a bundle's file under the same name: with other frames, compressed ones, or without its manifest.

Owns the order of changes to file and index: at every moment the version's directory, or the index, names a file for
each block that a version needs. Callers decide the content of the file.

Order: temporary file with the same manifest and a new directory → flush → read back → index: the refs of old and new
file together, marked unsettled, durable → rename over the old file → flush the folder → index: the new facts.
A crash leaves the old file or the new one, both whole; a mark that is left makes the next open read the file again.

Rules:
- A file loses a frame only after every version that needs it refers to another file, and not while it is pinned: an
  unfinished sleep may be about to refer to it.
- Only checked bytes are copied, and the new file is read back before it replaces the old one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..disk.budget import Meter
from ..disk.durable import TempFile
from ..errors import BlockMissing, Corruption, ReadBackFailed
from ..format.bundle import BundleFile
from ..format.directory import Directory
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.reader import FilePool
from ..format.writer import BundleWriter
from ..index.rows import LIVE, IndexedBundle, row_of
from .core import StoreCore


@dataclass(frozen=True, slots=True)
class Contents:
    """The planned content of a bundle's file.

    frames: in file order, each block with the bundle whose file has its frame now (the bundle itself included).
    holders: for each other block of the manifest the bundle that holds it.
    with_manifest: False makes a file that only holds blocks for others; only a retired bundle can become one.
    compressing: the blocks whose frames are compressed anew; the others are copied as they lie.
    """

    frames: Sequence[tuple[bytes, bytes]]
    holders: Mapping[bytes, bytes]
    with_manifest: bool = True
    compressing: Collection[bytes] = ()


class Prepared:
    """A new file for a bundle, written, flushed and read back, that has not taken the old one's place.

    `is_in_place`: it has since, even if `commit` then failed to update the index: the index covers both files, and the
    next opening reads the new one.
    """

    def __init__(
        self, core: StoreCore, bundle_id: bytes, old: BundleFile, temp: TempFile, directory: Directory, keep: bool
    ) -> None:
        self._core = core
        self._bundle_id = bundle_id
        self._old = old
        self._temp = temp
        self._directory = directory
        self._keep_manifest = keep
        self.bytes_before = old.file_bytes
        self.bytes_after = temp.size_bytes
        self.is_in_place = False

    def commit(self) -> bool:
        """Replace the old file by the new one. False, with nothing changed, if the bundle was deleted or rewritten
        meanwhile, a frame that it would lose is in use, or a holder has lost a block.

        Raises:
            DurabilityLost, LockLost, NoSpace, StoreIoError
        """
        with self._core.committing():
            suffix = self._core.folder.suffix_of(self._bundle_id)
            if suffix is None or not self._is_allowed(suffix):
                return False
            if suffix == RETIRED_SUFFIX:
                self._core.folder.replace(self._temp, self._bundle_id, suffix)
                self.is_in_place = True
                return True
            self._replace_live()
            return True

    def _replace_live(self) -> None:
        manifest = self._old.manifest
        assert manifest is not None  # `_is_allowed` has refused it
        index = self._core.index
        index.begin_rewrite(self._bundle_id, self._directory.holders)
        self._core.folder.replace(self._temp, self._bundle_id, LIVE_SUFFIX)
        self.is_in_place = True
        row = row_of(manifest, self._bundle_id, self._temp.size_bytes)
        frames = tuple(frame.id for frame in self._directory.frames)
        bundle = IndexedBundle(self._bundle_id, LIVE, row, self._directory.holders, frames)
        index.finish_rewrite(self._core.in_place(bundle))

    def _is_allowed(self, suffix: str) -> bool:
        if not self._core.folder.is_current(self._bundle_id, self._old.stamp()):
            return False
        if suffix == LIVE_SUFFIX and (self._old.manifest is None or not self._keep_manifest):
            return False
        kept = {frame.id for frame in self._directory.frames}
        if any(block_id not in kept for block_id in self._old.frames) and self._core.pins.count(self._bundle_id) > 1:
            return False  # 1: our own
        return self._holders_hold()

    def _holders_hold(self) -> bool:
        """Whether every block that the new directory places elsewhere is there at this moment. Raises StoreIoError if
        the system refuses the look."""
        blocks = self._old.manifest.blocks if self._old.manifest and self._keep_manifest else ()
        with FilePool(self._core.open_frames) as pool:
            for position, entry in enumerate(blocks):
                holder = self._directory.holder_of(position)
                if holder is None:
                    continue
                try:
                    with pool.holding(holder) as file:
                        file.frame_of(entry.id)
                except Corruption:
                    return False
        return True


@contextlib.contextmanager
def prepared(core: StoreCore, bundle_id: bytes, contents: Contents, room: Meter | None = None) -> Iterator[Prepared]:
    """Write a new file for a bundle, ready to be committed; without a commit it is removed at the end.

    Raises:
        Corruption: a frame to copy is damaged or missing.
        NoSpace, StoreIoError, LimitExceeded, and the errors of `room`.
    """
    core.require_writable()
    with core.pinning() as pin, contextlib.ExitStack() as stack:
        for name in {bundle_id, *(source for _, source in contents.frames), *contents.holders.values()}:
            pin(name)
        old = stack.enter_context(core.open_bundle(bundle_id))
        pool = stack.enter_context(FilePool(core.open_frames))
        with core.poisoning():
            temp = core.folder.temps.new()
            stack.callback(temp.close)
            directory = _write(temp, old, pool, contents, room)
        yield Prepared(core, bundle_id, old, temp, directory, contents.with_manifest)


def _write(temp: TempFile, old: BundleFile, pool: FilePool, contents: Contents, room: Meter | None) -> Directory:
    writer = BundleWriter(temp, room)

    def frame_bytes(frame: tuple[bytes, bytes]) -> int:
        with pool.holding(frame[1]) as file:
            return file.frame_of(frame[0]).frame_bytes

    if room is not None and not contents.compressing:
        room.require(sum(map(frame_bytes, contents.frames)))  # before any of it is written and counted
    for block_id, source in writer.each(contents.frames, frame_bytes):
        with pool.holding(source) as file:
            writer.add_copy(file, block_id, compressing=block_id in contents.compressing)
    blocks = old.manifest.blocks if old.manifest and contents.with_manifest else ()
    missing = [entry.id for entry in blocks if entry.id not in writer.frames and entry.id not in contents.holders]
    if missing:
        raise BlockMissing(
            f"{old.path} would lose the block {missing[0].hex()}.", block_id=missing[0].hex(), path=old.path
        )
    manifest = old.encoded_manifest() if contents.with_manifest else b""
    try:
        return writer.finish(manifest, blocks, old.bundle_id, contents.holders)
    except ReadBackFailed:
        _raise_source_damage(pool, contents)
        raise


def _raise_source_damage(pool: FilePool, contents: Contents) -> None:
    """A copy that does not read back comes from a damaged original, unless the disk or the memory is at fault."""
    for block_id, source in contents.frames:
        with pool.holding(source) as file:
            file.check_block(block_id)
