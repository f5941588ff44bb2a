"""A version from elsewhere comes into a store: the blocks that it lacks, in one new pack, then its manifest.

Owns the choice of blocks to copy. The source is checked by the caller; what was written is read back.

Rules:
- Blocks that the store has with every byte right are referred to and not written. They are pinned, and looked up once
  more under the lock; if one has left meanwhile, all blocks are copied.
- A version that is there already gets what it lacks: blocks, its manifest, or nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from ..disk.budget import Meter
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..errors import ReadBackFailed, StoreError
from ..folder.store_file import VERSIONS
from ..format.blocks import BlockEntry
from ..format.frames import FrameReader
from ..format.layout import Frame
from ..format.manifest import Manifest, bundle_id_of, encode_manifest_file
from ..format.pack import pack_file_bytes
from ..format.pack_writer import PackWriter
from ..format.records import Receipt
from ..index.index import row_of
from ..writing.core import StoreCore

Source = Callable[[BlockEntry, bool], AbstractContextManager[FrameReader]]
"""The file to copy a block from; True: with every byte of the block right. One that has its header alone
(`FrameReader.heads`) gives the header."""


@dataclass(slots=True)
class Intake:
    """Versions on their way into a store. `sound`: blocks found right there, or written, in this piece of work, so that
    each is read once."""

    core: StoreCore
    sound: set[bytes] = field(default_factory=set)

    def take(
        self,
        blocks: Sequence[BlockEntry],
        manifest_for: Callable[[int], Manifest],
        source: Source,
        before_commit: Callable[[], None] = lambda: None,
    ) -> Receipt:
        """Write what the store lacks of a version. manifest_for: its manifest, if its new pack has so many bytes.
        before_commit: called, perhaps twice, once all that was lacking has come and was read back; what it raises is
        raised, and no version came.

        Raises:
            NoSpace, BudgetExceeded, StoreIoError, ReadBackFailed: the store is as it was before.
            DurabilityLost, LockLost, ReadOnlyStore, and the errors of `source`.
        """
        for is_last in (False, True):
            with ExitStack() as stack:
                pin = stack.enter_context(self.core.pinning())
                self.core.pins.extend(pin, (entry.id for entry in blocks))
                room = stack.enter_context(self.core.metering())
                room(0)  # before any temporary file, in case nothing may be written any more
                stack.enter_context(self.core.poisoning())
                lacking = [entry for entry in blocks if is_last or not self._has(entry.id)]
                pack_bytes = _bytes_of(lacking, source)
                draft = _Draft(manifest_for(pack_bytes))
                if is_last or not self._has_manifest(draft.bundle_id):
                    draft.manifest_bytes = len(draft.data)
                room.require(pack_bytes + draft.manifest_bytes)
                packs = stack.enter_context(self._packed(lacking, source, room))
                before_commit()
                if self._commit(draft, packs, {entry.id for entry in lacking}, room):
                    self.sound.update(entry.id for entry in lacking)
                    return Receipt.of(draft.manifest, draft.bundle_id, pack_bytes + draft.manifest_bytes, len(lacking))
        raise AssertionError("a version with all its blocks in its own pack is led right")

    def _has(self, block_id: bytes) -> bool:
        """Whether the store has a block with every byte right."""
        if block_id not in self.sound and self.core.find_sound(block_id) is not None:
            self.sound.add(block_id)
        return block_id in self.sound

    @contextlib.contextmanager
    def _packed(
        self, lacking: Sequence[BlockEntry], source: Source, room: Meter
    ) -> Iterator[list[tuple[TempFile, bytes]]]:
        """A flushed pack with these blocks, without a name yet; none for no blocks."""
        if not lacking:
            yield []
            return

        with self.core.folder.new_temp() as temp:
            writer = PackWriter(temp, room)
            for entry in writer.each(lacking, lambda entry: _frame_of(entry, source).frame_bytes):
                with source(entry, True) as file:
                    (writer.add_copy if entry.id in file.frames else writer.add_stripped)(file, entry.id)
            try:
                pack_id = writer.finish()
            except ReadBackFailed:
                _require_sound(lacking, source)
                raise
            yield [(temp, pack_id)]

    def _commit(
        self, draft: _Draft, packs: Sequence[tuple[TempFile, bytes]], written: Collection[bytes], room: Meter
    ) -> bool:
        """Whether it was done; else the manifest, or a block that was not copied, has left the store."""
        manifest, core = draft.manifest, self.core
        with ExitStack() as stack:
            temp = None
            if draft.manifest_bytes:
                temp = stack.enter_context(core.folder.new_temp(VERSIONS))
                room(len(draft.data))
                temp.append([draft.data])
                temp.sync()
            stack.enter_context(core.committing())
            is_deleted = temp is None and not core.folder.has_manifest(draft.bundle_id)
            if is_deleted or core.missing_of({entry.id for entry in manifest.blocks} - set(written)):
                self.sound.clear()
                return False
            row = row_of(manifest, draft.bundle_id, len(draft.data))
            if temp is not None:
                core.publish_version(packs, temp, draft.bundle_id, row)
            else:
                for pack, pack_id in packs:
                    core.publish_pack(pack, pack_id)
                core.index.add(row)
            core.index.note_use(draft.bundle_id, now_ns())  # its date is that of another store
            room.settle()  # after the files count: for a moment they count twice, which never exceeds it
        return True

    def _has_manifest(self, bundle_id: str) -> bool:
        """Whether the version's manifest is there, and right."""
        try:
            self.core.read_manifest(bundle_id)
        except StoreError:
            return False
        return True


class _Draft:
    """A version on its way in. `manifest_bytes`: the bytes to write for its manifest, 0 for none."""

    def __init__(self, manifest: Manifest) -> None:
        encoded = manifest.encode()
        self.manifest = manifest
        self.bundle_id = bundle_id_of(encoded)
        self.data = encode_manifest_file(encoded)
        self.manifest_bytes = 0


def _bytes_of(blocks: Sequence[BlockEntry], source: Source) -> int:
    """The bytes of a pack with these blocks; 0 for none. Raises the errors of `source`, LimitExceeded."""
    if not blocks:
        return 0
    return pack_file_bytes([_frame_of(entry, source) for entry in blocks])


def _frame_of(entry: BlockEntry, source: Source) -> Frame:
    """A block's frame in the source, the whole one if it is there."""
    with source(entry, False) as file:
        return file.frames.get(entry.id) or file.heads[entry.id]


def _require_sound(blocks: Sequence[BlockEntry], source: Source) -> None:
    """Raise the damage of the originals, if that is why a copy did not read back."""
    for entry in blocks:
        with source(entry, True) as file:
            if entry.id in file.frames:
                file.check_block(entry.id)
