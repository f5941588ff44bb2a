"""Reads a version across the packs that hold its blocks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from ..disk.paths import Closing
from ..errors import (
    PUT_BACK,
    BlockMissing,
    BundleMissing,
    CorruptBundle,
    Corruption,
    StoreClosed,
    StoreError,
    StoreIoError,
)
from ..format.blocks import BlockEntry, BlockHeader, span_parents
from ..format.frames import FrameReader, Head, require_promised
from ..format.manifest import Manifest, whole_before
from ..format.records import Receipt
from ..limits import MAX_REMEMBERED_HEAD_BYTES
from .frame_files import FrameFiles

T = TypeVar("T")
Locate = Callable[[bytes, bool], list[str]]
"""The packs that may have a block; True: also those with its header alone, behind the others."""


MOST_LOOKS: Final = 64
"""How often a block that was sound in no pack is looked for again: each look that finds other packs follows a move."""


class BundleReader(Closing):
    """Reads the state of one version from all packs that hold its blocks. Close it when done.

    While it is open, its blocks are pinned: this process keeps their packs. Another process may move a block meanwhile,
    and a file may be put back: a block that is not found is looked for once more. A slot that is damaged is read from
    another pack that has it.
    """

    def __init__(
        self,
        manifest: Manifest,
        bundle_id: str,
        path: str,
        files: FrameFiles,
        locate: Locate,
        look_again: Callable[[], object],
        on_close: Callable[[], None],
    ) -> None:
        """path: of the manifest, for messages. locate, look_again: see `StoreCore`."""
        self.manifest = manifest
        self.bundle_id = bundle_id
        self.path = path
        self.entries = manifest.blocks
        self._files = files
        self._locate = locate
        self._look_again = look_again
        self._on_close = on_close
        self._closed = False
        self._parents = span_parents(self.entries)
        self._headers: dict[bytes, BlockHeader] = {}
        self._places: dict[bytes, str] = {}
        """The pack in which a block was found, so that not each slot asks the index."""
        self._remembered_bytes = 0
        self._looking = threading.Lock()

    def close(self) -> None:
        """Close the files and let go of the pins. Idempotent."""
        if not self._closed:
            self._closed = True
            self._files.close()
            self._on_close()

    def receipt(self) -> Receipt:
        """The receipt of a sleep that would write nothing but this version."""
        return Receipt.of(self.manifest, self.bundle_id)

    def read_header(self, entry: BlockEntry) -> BlockHeader:
        """The block's header, with its id recomputed; read once, then remembered, up to MAX_REMEMBERED_HEAD_BYTES. A
        stripped block has one too.

        Raises:
            CorruptBundle, BlockMissing, and the errors of opening a pack.
        """
        known = None if self._closed else self._headers.get(entry.id)
        return known or self._read(entry, lambda file: self._head(file, entry)[0], stripped=True)[1]

    def read_slots_into(self, entry: BlockEntry, targets: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill writable byte buffers with slots of one block: for each (index of the slot, buffers), in order, its raw
        bytes, hashed while the processor still has them. The sizes must add up to each slot's.

        Raises:
            CorruptBlock: the bytes differ from those written; the content of the buffers is then undefined.
            BlockMissing: no pack has its keys and values.
        """
        slots = list(targets)

        def read(file: FrameReader) -> None:
            header, head = self._head(file, entry)
            file.read_slots_into(entry.id, header, head, slots)

        try:
            self._read(entry, read)
        except (Corruption, StoreIoError):
            if len(slots) == 1:
                raise
            for one in slots:  # each may be sound in another pack
                self.read_slots_into(entry, [one])

    def read_slot(self, entry: BlockEntry, slot_index: int) -> bytearray:
        """A slot's raw bytes in memory of their own."""
        data = bytearray(self.read_header(entry).slots[slot_index][0].size_bytes)
        self.read_slots_into(entry, [(slot_index, [memoryview(data)])])
        return data

    def tokens(self, start: int = 0) -> bytes:
        """The token ledger from `start` on, where a span begins: uint32 little-endian ids of all spans in order, from
        the block headers. A stripped version has it too."""
        spans = [entry for entry in self.entries if entry.kind == "span" and entry.start >= start]
        ledger = b"".join(self.read_header(entry).tokens for entry in spans)
        count = self.manifest.block_tokens - start
        if len(ledger) != 4 * count:
            raise CorruptBundle(
                f"{self.path}: the blocks hold {len(ledger) // 4} tokens, not {count}.",
                path=self.path,
                part="manifest",
            )
        return ledger

    def has(self, entry: BlockEntry) -> bool:
        """Whether a pack has all of a block, by the index: its keys and values too."""
        return bool(self._locate(entry.id, False))

    def is_whole(self) -> bool:
        """Whether packs have all of each block, by the index. A version without tokens may lack its record."""
        return all(map(self.has, self.entries))

    def whole_up_to(self) -> int:
        """How many of the version's first tokens need only what packs have that are there, in whole blocks."""
        for entry in self.entries:
            if not self.has(entry):
                return whole_before(self.manifest, entry)
        return self.manifest.block_tokens

    @contextmanager
    def holding(self, entry: BlockEntry, *, checked: bool = False, stripped: bool = False) -> Iterator[FrameReader]:
        """The pack to copy a block from; the block's head has been compared with the manifest. checked: with every byte
        of the block right, whatever other packs have of it. stripped: one that has the header alone will do."""

        def check(file: FrameReader) -> None:
            head = self._head(file, entry)
            if not (stripped and entry.id in file.heads):
                file.frame_of(entry.id)
                if checked:
                    file.check_block(entry.id, known=head)

        name, _ = self._read(entry, check, stripped=stripped)
        with self._files.holding(name, again=True) as file:
            yield file

    def _head(self, file: FrameReader, entry: BlockEntry) -> Head:
        known = file.checked_heads.get(entry.id)
        if known is None:
            known = file.read_head(entry.id)
            identity_digest = self.manifest.identity.digest
            require_promised(known[0], entry, self._parents.get(entry.id), identity_digest, self.path)
            head_bytes = (file.heads.get(entry.id) or file.frame_of(entry.id)).head_bytes
            if self._remembered_bytes + head_bytes <= MAX_REMEMBERED_HEAD_BYTES:
                self._remembered_bytes += head_bytes
                file.checked_heads[entry.id] = known
                self._headers[entry.id] = known[0]
        return known

    def _read(self, entry: BlockEntry, use: Callable[[FrameReader], T], *, stripped: bool = False) -> tuple[str, T]:
        """The first pack that has the block as it was written, and what `use` makes of it."""
        if (known := self._places.get(entry.id)) is not None and not self._closed:
            try:
                with self._files.holding(known, again=True) as file:
                    return known, use(file)
            except StoreError:
                pass  # another pack may have it
        tried: set[str] = set()
        failure: StoreError | None = None
        before: list[str] | None = None
        for _ in range(MOST_LOOKS):
            names = self._locate(entry.id, stripped)
            for name in names:
                if name in tried:
                    continue
                tried.add(name)
                try:
                    if self._closed:
                        raise StoreClosed("This bundle reader was closed.", path=self.path)
                    with self._files.holding(name) as file:
                        result = use(file)
                        self._places[entry.id] = sys.intern(name)
                        return name, result
                except (BlockMissing, BundleMissing):
                    tried.discard(name)  # it may be put back
                except StoreClosed:
                    raise
                except StoreError as error:  # damaged, or refused by the system: another pack may have it
                    failure = failure or error
            if before is not None and set(names) <= set(before):
                break
            before = names
            try:
                with self._looking:
                    self._look_again()
            except StoreError as error:
                failure = failure or error
                break
        raise failure or self._missing(entry)

    def _missing(self, entry: BlockEntry) -> BlockMissing:
        uri, version, whole = self.manifest.uri, self.manifest.version, self.whole_up_to()
        way = f" `torpor wake {uri}@{version} --at {whole}` goes on from there." if whole else ""
        return BlockMissing(
            f"No pack has the block at token {entry.start} of version {version} of {uri} "
            f"({entry.id.hex()[:16]}). The version is whole up to token {whole}. {PUT_BACK}{way}",
            block_id=entry.id.hex(),
            path=self.path,
            whole_up_to=whole,
        )
