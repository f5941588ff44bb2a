"""Sleep: makes a session's state durable as its next version.

Owns the choice of blocks to write and blocks to refer to, and the order pack → manifest → index row → receipt.

Rules:
- Reused blocks are the beginning of the block list in the parent's manifest, maybe without some of its state records.
  Their ids bind their content, so they are not read again, and a sleep costs only its new blocks.
- A new block that a pack already holds, by its id, is referred to and not written. Its bytes on disk are read and
  compared first: a sleep acknowledges only blocks found good on disk.
- All blocks of the version are pinned until its manifest is there, and looked up once more under the lock: a pin is too
  late for a removal that has already looked at the pins.
- A version without new blocks writes no pack: a fork is one small file.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ... import __version__
from ..disk.budget import Beyond, Meter
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..errors import (
    BlockMissing,
    BudgetExceeded,
    Corruption,
    InvalidDraft,
    LimitExceeded,
    StoreError,
)
from ..folder.store_file import VERSIONS
from ..format.blocks import BlockDraft, BlockEntry, require_chain
from ..format.identity import Identity
from ..format.journal import COVERS
from ..format.manifest import Manifest, bundle_id_of, encode_manifest_file, require_session_map
from ..format.pack_writer import PackWriter, PreparedBlock, prepare_block
from ..format.records import Progress, Receipt
from ..index.index import WRITTEN_BYTES, row_of
from ..limits import MAX_BLOCKS, MAX_TOKENS, MIB
from ..uri import SessionUri
from .core import StoreCore

_TRIES: Final = 8
"""Trials of a sleep before it gives up: each time a removal took a block that it had found."""

_SPARE_BYTES: Final = 64 * MIB
"""Raw bytes of blocks found in the store but kept in memory, to be written if they leave the store before the commit.
If a block beyond this leaves it, the sleep fails and loses nothing: the caller still has the state."""


@dataclass(frozen=True, slots=True)
class VersionDraft:
    """The state to make durable as a session's next version.

    `reused` come first in the chain; `blocks` continue it. The drafts' buffers are borrowed until it is written.
    on_progress: is told (tokens written, tokens to write). beyond: "reserve" for a ledger of a few kilobytes, which has
    no other place: it may exceed every budget, and use the space to be kept free. doubted: reused blocks to read before
    the version refers to them. before_publishing: is called when all is flushed and only the commit is left: what it
    raises gives the version up. session: a function is called once the blocks are flushed: from then on no turn of the
    session may be acknowledged until it is written. covers: the session's turns in the journal are in it, or were taken
    back; else they stay there. whole: else the headers of the reused blocks are enough.
    """

    uri: SessionUri
    identity: Identity
    parent: str | None
    reused: Sequence[BlockEntry]
    blocks: Iterable[BlockDraft]
    session: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    block_tokens: int
    compressed: bool = False
    on_progress: Progress | None = None
    beyond: Beyond | None = None
    doubted: Sequence[BlockEntry] = ()
    before_publishing: Callable[[], None] | None = None
    covers: bool = True
    whole: bool = True


def write_version(core: StoreCore, request: VersionDraft) -> Receipt:
    """Write, flush, read back, publish and index the next version of a session. See `Store.write_bundle`."""
    core.begin_upkeep(dry_run=False)
    if not callable(request.session):
        require_session_map(request.session)
    if not 0 <= request.block_tokens <= MAX_TOKENS:
        raise LimitExceeded(f"a session has 0 to {MAX_TOKENS} tokens, not {request.block_tokens}.", limit=MAX_TOKENS)
    with core.pinning() as pin, core.next_version(request.uri) as version, contextlib.ExitStack() as stack:
        core.pins.extend(pin, (entry.id for entry in request.reused))
        _require_reusable(core, request)
        room = stack.enter_context(core.metering(beyond=request.beyond))
        room(0)  # before any temporary file, in case nothing may be written any more
        with core.poisoning():
            receipt = _Sleep(core, request, version, pin, stack, room).run()
        if request.covers:
            with core.journaling():
                core.journal.cover(request.uri)
    return receipt


class _Sleep:
    def __init__(
        self,
        core: StoreCore,
        request: VersionDraft,
        version: int,
        pin: int,
        stack: contextlib.ExitStack,
        room: Meter,
    ) -> None:
        self._core = core
        self._request = request
        self._version = version
        self._pin = pin
        self._stack = stack
        self._room = room
        self._referred = {entry.id for entry in request.reused}
        self._written: set[bytes] = set()
        self._packs: list[tuple[TempFile, bytes]] = []
        self._spares: dict[bytes, PreparedBlock] = {}  # new blocks to refer to, not to write
        self._spare_bytes = 0
        self._temp: TempFile
        self._writer: PackWriter | None = None

    def run(self) -> Receipt:
        drafts: Iterable[BlockDraft] = self._request.blocks
        if self._room.is_bounded and not self._request.compressed:  # compressed bytes have no known length yet
            drafts = list(drafts)
            self._require_room(drafts)
        entries = [*self._request.reused, *self._write_blocks(drafts)]
        problem = require_chain(entries, self._request.block_tokens)
        if problem:
            raise InvalidDraft(f"The blocks of {self._request.uri} are not one chain: {problem}.")
        self._finish_pack()
        session = self._session_map()
        for _ in range(_TRIES):
            published = self._try_to_publish(entries, session)
            if isinstance(published, Receipt):
                return published
            self._write_again(published)
        raise _block_missing(entries[0].id, self._request.uri)

    def _try_to_publish(self, entries: Sequence[BlockEntry], session: Mapping[str, Any]) -> Receipt | list[bytes]:
        """The receipt, or the blocks that are in no pack any more."""
        manifest = self._manifest(entries, session)
        encoded = manifest.encode()
        bundle_id, data = bundle_id_of(encoded), encode_manifest_file(encoded)
        with self._core.folder.new_temp(VERSIONS) as temp:
            self._room(len(data))
            temp.append([data])
            temp.sync()
            with self._core.committing():
                gone = sorted(self._core.missing_of(self._referred, stripped=not self._request.whole))
                if gone:
                    return gone
                if self._request.before_publishing is not None:
                    self._request.before_publishing()
                self._core.publish_version(self._packs, temp, bundle_id, row_of(manifest, bundle_id, len(data)))
                self._room.settle()  # after the files count: for a moment they count twice, which never exceeds it
        return Receipt.of(manifest, bundle_id, self._pack_bytes() + len(data), len(self._written))

    def _write_again(self, gone: Sequence[bytes]) -> None:
        """Blocks that left their packs before the commit: written from memory, or the sleep fails."""
        for block_id in gone:
            block = self._spares.pop(block_id, None)
            if block is None:
                raise _block_missing(block_id, self._request.uri)
            self._referred.discard(block_id)
            self._write(block)
        self._finish_pack()

    # --- blocks

    def _require_room(self, drafts: Sequence[BlockDraft]) -> None:
        """Raise BudgetExceeded for a state that cannot fit, before any of it is written and counted. If all blocks
        together would not fit, block ids are computed to find those that the store has."""
        try:
            self._room.require(sum(slot.spec.size_bytes for draft in drafts for slot in draft.slots))
        except BudgetExceeded:
            self._room.require(sum(map(self._bytes_if_new, self._prepared(drafts))))

    def _bytes_if_new(self, block: PreparedBlock) -> int:
        is_there = block.id in self._referred or self._core.index.packs_of(block.id)
        return 0 if is_there else len(block.encoded_header) + block.header.raw_bytes

    def _prepared(self, drafts: Iterable[BlockDraft]) -> Iterator[PreparedBlock]:
        """The blocks of the chain after the referred ones."""
        reused = self._request.reused
        parent = next((entry.id for entry in reversed(reused) if entry.kind == "span"), None)
        for count, draft in enumerate(drafts, start=len(reused) + 1):
            if count > MAX_BLOCKS:
                raise LimitExceeded(f"a session has at most {MAX_BLOCKS} blocks.", limit=MAX_BLOCKS)
            block = prepare_block(draft, parent, self._request.identity.digest)
            parent = block.id if draft.kind == "span" else parent
            yield block

    def _write_blocks(self, drafts: Iterable[BlockDraft]) -> Iterator[BlockEntry]:
        request = self._request
        held = max((entry.end for entry in request.reused if entry.kind == "span"), default=0)
        done, total = 0, request.block_tokens - held
        rest = self._prepared(drafts)
        for block in rest:
            self._write_block(block, rest)
            entry = block.entry()
            yield entry
            if entry.kind == "span":
                done += entry.token_count
                if request.on_progress is not None:
                    request.on_progress(done, total)

    def _write_block(self, block: PreparedBlock, rest: Iterator[PreparedBlock]) -> None:
        if block.id in self._referred or block.id in self._written:
            return
        self._core.pins.extend(self._pin, [block.id])
        if self._core.find_sound(block.id) is None:
            self._write(block, rest)
            return
        self._referred.add(block.id)
        if self._spare_bytes + block.header.raw_bytes <= _SPARE_BYTES:
            self._spares[block.id] = block
            self._spare_bytes += block.header.raw_bytes

    def _write(self, block: PreparedBlock, rest: Iterator[PreparedBlock] | None = None) -> None:
        if self._writer is None:
            self._temp = self._stack.enter_context(self._core.folder.new_temp())
            self._writer = PackWriter(self._temp, self._room)
            if rest is not None:
                self._writer.expect(rest, self._bytes_if_new)
        self._writer.add(block, compressed=self._request.compressed)
        self._written.add(block.id)

    def _finish_pack(self) -> None:
        """Flush the pack of the new blocks, if there are some, and read it back. It gets its name with the manifest."""
        if self._writer is not None:
            self._packs.append((self._temp, self._writer.finish()))
            self._writer = None

    def _pack_bytes(self) -> int:
        return sum(temp.size_bytes for temp, _ in self._packs)

    # --- the manifest

    def _session_map(self) -> Mapping[str, Any]:
        session = self._request.session
        if callable(session):
            session = session()
            require_session_map(session)
        return session

    def _manifest(self, entries: Sequence[BlockEntry], session: Mapping[str, Any]) -> Manifest:
        request = self._request
        covered = self._core.journal.digest_of(request.uri) if request.covers else None
        return Manifest(
            uri=request.uri,
            version=self._version,
            parent=request.parent,
            identity=request.identity,
            block_tokens=request.block_tokens,
            created_ns=now_ns(),
            blocks=tuple(entries),
            session=session if covered is None else {**session, COVERS: covered},
            environment={**environment(), WRITTEN_BYTES: str(self._pack_bytes() + self._stand_in_bytes(entries))},
        )

    def _stand_in_bytes(self, entries: Sequence[BlockEntry]) -> int:
        """What the version before has written, where it ends in a ledger alone: it goes, and its blocks are this one's
        then, if this one has blocks."""
        parent = self._request.parent if entries and self._request.parent else ""
        row = self._core.index.rows_of([parent]).get(parent)
        return row.bundle_bytes if row is not None and row.uri == self._request.uri and row.unread_tokens else 0


def _require_reusable(core: StoreCore, request: VersionDraft) -> None:
    """Check that the reused blocks are the beginning of the parent's chain, are in packs, and are sound where that is
    doubted.

    Raises:
        InvalidDraft: they are not its beginning.
        BlockMissing, BundleMissing, Corruption: a reused block is missing or cannot be read.
    """
    if not request.reused:
        return
    if request.parent is None:
        raise InvalidDraft("reused blocks must come from the parent bundle, and none is named.", field="parent")
    with _missing_if_refused(request.parent):
        manifest = core.read_manifest(request.parent)
    if manifest.identity.digest != request.identity.digest:
        raise InvalidDraft(
            f"blocks of {request.parent} were made under another identity and cannot be reused.",
            mismatched_fields=manifest.identity.mismatched_fields(request.identity),
        )
    if not _is_beginning(request.reused, manifest.blocks):
        raise InvalidDraft(f"the reused blocks are not the beginning of the chain of {request.parent}.", field="reused")
    reused = [entry.id for entry in request.reused]
    for block_id in sorted(core.missing_of(reused, stripped=not request.whole)):
        raise _block_missing(block_id, request.uri)
    with _missing_if_refused(request.parent):
        _require_sound(core, request.parent, request.doubted)


def _require_sound(core: StoreCore, parent: str, doubted: Sequence[BlockEntry]) -> None:
    """Read blocks of a version whole. Raises what the reading raises, if no pack has one with every byte right."""
    if doubted:
        with core.open_reader(parent) as reader:
            for entry in doubted:
                with reader.holding(entry, checked=True):
                    pass


@contextlib.contextmanager
def _missing_if_refused(bundle_id: str) -> Iterator[None]:
    """For blocks only referred to. A read error must not stop the sleep of a state that does not need them: a caller
    with all blocks writes them."""
    try:
        yield
    except Corruption:
        raise
    except StoreError as error:
        raise BlockMissing(
            f"Nothing can refer to the blocks of the bundle {bundle_id}: {error.message}",
            bundle_id=bundle_id,
            reason=error.code,
        ) from error


def _is_beginning(reused: Iterable[BlockEntry], chain: Iterable[BlockEntry]) -> bool:
    """Whether these are the first blocks of the chain. A session may have stopped keeping a state record."""
    rest = iter(chain)
    for wanted in reused:
        if next((block for block in rest if block == wanted or block.kind != "state"), None) != wanted:
            return False
    return True


def _block_missing(block_id: bytes, uri: SessionUri) -> BlockMissing:
    return BlockMissing(
        f"No pack has the block {block_id.hex()} any more that a new version of {uri} refers to.",
        block_id=block_id.hex(),
        session=str(uri),
    )


def environment() -> dict[str, str]:
    """The program that wrote a bundle, for people. No reader acts on it."""
    return {
        "torpor": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
