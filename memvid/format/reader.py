"""Reads a version across the files that hold its blocks."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..disk.paths import Closing
from ..errors import BlockMissing, BundleMissing, CorruptBundle, StoreClosed
from ..limits import MAX_OPEN_ANCESTORS, MAX_REMEMBERED_HEAD_BYTES
from .blocks import BlockEntry, BlockHeader, span_parents
from .bundle import BundleFile, FrameFile, Head, require_promised
from .manifest import Manifest


class BundleReader(Closing):
    """Reads the state of one version from all files that hold its blocks. Close it when done.

    While it is open, its bundle and the holders of its blocks are pinned: this process keeps their files. Another
    process may move a block meanwhile; the reader then looks the block up once more.
    """

    def __init__(
        self,
        file: BundleFile,
        manifest: Manifest,
        open_holder: Callable[[bytes], FrameFile],
        open_again: Callable[[], BundleFile],
        on_close: Callable[[], None],
    ) -> None:
        self._files = [file]  # the last one is current
        self._open_again = open_again
        self._holders = FilePool(open_holder)
        self._on_close = on_close
        self._moving = threading.Lock()
        self._closed = False
        self.bundle_id = file.bundle_id
        self.manifest = manifest
        self.path = file.path
        self.file_bytes = file.file_bytes
        self.entries = file.entries
        self._places = {entry.id: entry.bundle_id for entry in self.entries}
        self._parents = span_parents(self.entries)
        self._checked: dict[bytes, BlockHeader] = {}
        self._remembered_bytes = 0

    def close(self) -> None:
        """Close the files and let go of the pins. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._holders.close()
        for file in self._files:
            file.close()
        self._on_close()

    def read_header(self, entry: BlockEntry) -> BlockHeader:
        """The block's header, with its id recomputed; read once, then remembered, up to MAX_REMEMBERED_HEAD_BYTES.

        Raises:
            CorruptBundle, BlockMissing, BundleMissing, and the errors of opening another bundle's file.
        """
        known = None if self._closed else self._checked.get(entry.id)
        if known is None:
            with self._holding(entry) as file:
                known = self._head(file, entry)[0]
                if entry.id in file.checked_heads:
                    self._checked[entry.id] = known
        return known

    def read_slots_into(self, entry: BlockEntry, targets: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill writable byte buffers with slots of one block: for each (index of the slot, buffers), in order, its raw
        bytes, hashed while the processor still has them. The sizes must add up to each slot's.

        Raises:
            CorruptBlock: the bytes differ from those written; the content of the buffers is then undefined.
        """
        own = self._files[-1]
        if not self._closed and self._places.get(entry.id) == self.bundle_id and entry.id in own.frames:
            self._read_slots(own, entry, targets)  # nothing to open and nothing to let go
        else:
            with self._holding(entry) as file:
                self._read_slots(file, entry, targets)

    def _read_slots(
        self, file: FrameFile, entry: BlockEntry, targets: Iterable[tuple[int, Sequence[memoryview]]]
    ) -> None:
        header, head = self._head(file, entry)
        file.read_slots_into(entry.id, header, head, targets)

    def read_slot(self, entry: BlockEntry, slot_index: int) -> bytearray:
        """A slot's raw bytes in memory of their own."""
        data = bytearray(self.read_header(entry).slots[slot_index][0].size_bytes)
        self.read_slots_into(entry, [(slot_index, [memoryview(data)])])
        return data

    def tokens(self) -> bytes:
        """The token ledger: uint32 little-endian ids of all spans in order, from the block headers."""
        ledger = b"".join(self.read_header(entry).tokens for entry in self.entries if entry.kind == "span")
        if len(ledger) != 4 * self.manifest.token_count:
            raise CorruptBundle(
                f"{self.path}: the blocks hold {len(ledger) // 4} tokens, not {self.manifest.token_count}.",
                path=self.path,
                part="manifest",
            )
        return ledger

    @contextlib.contextmanager
    def holding(self, entry: BlockEntry) -> Iterator[FrameFile]:
        """The file to copy a block from; the block's head has been compared with the manifest."""
        with self._holding(entry) as file:
            self._head(file, entry)
            yield file

    def _head(self, file: FrameFile, entry: BlockEntry) -> Head:
        known = file.checked_heads.get(entry.id)
        if known is None:
            known = file.read_head(entry.id)
            identity_digest = self.manifest.identity.digest
            require_promised(known[0], entry, self._parents.get(entry.id), identity_digest, self.path)
            head_bytes = file.frame_of(entry.id).head_bytes
            if self._remembered_bytes + head_bytes <= MAX_REMEMBERED_HEAD_BYTES:
                self._remembered_bytes += head_bytes
                file.checked_heads[entry.id] = known
        return known

    @contextlib.contextmanager
    def _holding(self, entry: BlockEntry) -> Iterator[FrameFile]:
        """The file that holds a block. If the block has left it, it is looked up once more."""
        with contextlib.ExitStack() as stack:
            place = self._places.get(entry.id)
            try:
                file = self._open_at(place, stack)
                file.frame_of(entry.id)
            except (BlockMissing, BundleMissing):
                moved_to = self._look_again(entry.id, place)
                if moved_to == place:
                    raise
                file = self._open_at(moved_to, stack)
            yield file

    def _open_at(self, place: bytes | None, stack: contextlib.ExitStack) -> FrameFile:
        if self._closed:
            raise StoreClosed("This bundle reader was closed.", path=self.path)
        if place == self.bundle_id or place is None:
            return self._files[-1]
        return stack.enter_context(self._holders.holding(place))

    def _look_again(self, block_id: bytes, place: bytes | None) -> bytes | None:
        with self._moving:
            if self._closed or self._places.get(block_id) != place:
                return self._places.get(block_id)
            file = self._open_again()
            self._files.append(file)  # the earlier ones stay open: another thread may be reading them
            self._places = {entry.id: entry.bundle_id for entry in file.entries}
            return self._places.get(block_id)


class FilePool(Closing):
    """The open files of ancestors, a few at a time. Closes the least recently used first, never one being read."""

    def __init__(self, open_file: Callable[[bytes], FrameFile]) -> None:
        self._open_file = open_file
        self._files: OrderedDict[bytes, FrameFile] = OrderedDict()
        self._users: dict[bytes, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def holding(self, bundle_id: bytes) -> Iterator[FrameFile]:
        with self._lock:
            file = self._files.get(bundle_id)
            if file is None:
                file = self._files[bundle_id] = self._open_file(bundle_id)
            self._files.move_to_end(bundle_id)
            self._users[bundle_id] = self._users.get(bundle_id, 0) + 1
            self._close_surplus()
        try:
            yield file
        finally:
            with self._lock:
                self._users[bundle_id] -= 1

    def _close_surplus(self) -> None:
        for bundle_id in list(self._files)[: max(0, len(self._files) - MAX_OPEN_ANCESTORS)]:
            if not self._users.get(bundle_id):
                self._files.pop(bundle_id).close()

    def close(self) -> None:
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()
