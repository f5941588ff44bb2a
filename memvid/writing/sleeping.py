"""Sleep: makes a session's state durable as its next version.

Owns the choice of blocks to write and blocks to refer to, and the order file → index row → receipt.

Rules:
- Reused blocks are the beginning of the block list in the parent's manifest, maybe without some of its state records.
  Their ids bind their content, so they are not read again, and a sleep costs only its new blocks.
- A new block that a live bundle already holds, by its id, is referred to and not written. Its bytes on disk are read
  and compared first: a sleep acknowledges only blocks found good on disk.
- Bundles referred to are pinned until the new version's row is in the index, and looked up once more under the lock: a
  pin is too late for a delete or a compaction that has already checked the pins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ... import __version__
from ..disk.budget import Beyond, Meter
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.paths import Closing
from ..errors import (
    BlockMissing,
    BudgetExceeded,
    BundleMissing,
    Corruption,
    DurabilityLost,
    InvalidDraft,
    LimitExceeded,
    StoreError,
)
from ..format.blocks import BlockDraft, BlockEntry, require_chain
from ..format.bundle import FrameFile
from ..format.identity import Identity
from ..format.journal import COVERS
from ..format.layout import LIVE_SUFFIX
from ..format.ledger_tail import unread_of
from ..format.manifest import Manifest, bundle_id_of, require_session_map
from ..format.reader import FilePool
from ..format.records import Progress, Receipt
from ..format.writer import BundleWriter, PreparedBlock, prepare_block
from ..index.rows import LIVE, IndexedBundle, row_of
from ..limits import MAX_BLOCKS, MAX_TOKENS, MIB
from ..uri import SessionUri
from .core import StoreCore

_TRIES: Final = 8
"""Trials of a sleep before it gives up: each time another delete or compaction took a block that it had found."""

_SPARE_BYTES: Final = 64 * MIB
"""Raw bytes of blocks found in the store but kept in memory, to be written if they leave the store before the commit.
If a block beyond this leaves it, the sleep fails and loses nothing: the caller still has the state."""


@dataclass(frozen=True, slots=True)
class VersionDraft:
    """The state to make durable. `reused` come first in the chain, `blocks` continue it; buffers are borrowed. The
    `doubted` reused blocks are read before the version refers to them. `before_publishing` is called last, and what it
    raises gives the version up. covers: whether it takes the place of what the journal has of the session. session: a
    function is called once the blocks are flushed, and no turn of the session is acknowledged from then on."""

    uri: SessionUri
    identity: Identity
    parent: bytes | None
    reused: Sequence[BlockEntry]
    blocks: Iterable[BlockDraft]
    session: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    token_count: int
    compressed: bool = False
    on_progress: Progress | None = None
    beyond: Beyond | None = None
    doubted: Sequence[BlockEntry] = ()
    before_publishing: Callable[[], None] | None = None
    covers: bool = True


def receipt_of(
    manifest: Manifest, bundle_id: bytes, file_bytes: int, blocks_new: int, places: Mapping[bytes, bytes]
) -> Receipt:
    """A version that was written. blocks_new: the blocks in its own file; places: the bundles of the others."""
    return Receipt(
        uri=manifest.uri,
        version=manifest.version,
        bundle_id=bundle_id,
        parent=manifest.parent,
        token_count=manifest.token_count,
        bytes_written=file_bytes,
        logical_bytes=manifest.logical_bytes,
        blocks_new=blocks_new,
        blocks_reused=len(manifest.blocks) - blocks_new,
        entries=tuple(entry.held_by(places.get(entry.id, bundle_id)) for entry in manifest.blocks),
        unread_tokens=unread_of(manifest),
    )


def write_version(core: StoreCore, request: VersionDraft) -> Receipt:
    """Write, flush, read back, publish and index the next version of a session. See `Store.write_bundle`."""
    core.begin_upkeep(dry_run=False)
    if not callable(request.session):
        require_session_map(request.session)
    if not 0 <= request.token_count <= MAX_TOKENS:
        raise LimitExceeded(f"a session has 0 to {MAX_TOKENS} tokens, not {request.token_count}.", limit=MAX_TOKENS)
    with core.pinning() as pin, core.next_version(request.uri) as version, contextlib.ExitStack() as stack:
        holdings = stack.enter_context(Holdings(core, pin))
        places = _places_of_reused(core, pin, holdings, request)
        for entry in request.doubted:
            holdings.require_sound(places[entry.id], entry.id)
        room = stack.enter_context(core.metering(beyond=request.beyond))
        room(0)  # before any temporary file, in case nothing may be written any more
        with core.poisoning():
            receipt = _Sleep(core, request, version, holdings, places, stack, room).run()
            if request.covers:
                core.journal.cover(request.uri)
    return receipt


class _Sleep:
    def __init__(
        self,
        core: StoreCore,
        request: VersionDraft,
        version: int,
        holdings: Holdings,
        places: dict[bytes, bytes],
        stack: contextlib.ExitStack,
        room: Meter,
    ) -> None:
        self._core = core
        self._request = request
        self._version = version
        self._holdings = holdings
        self._places = places
        self._reused = frozenset(places)
        self._stack = stack
        self._room = room
        self._spares: dict[bytes, PreparedBlock] = {}  # new blocks to refer to, not to write
        self._spare_bytes = 0
        self._temp: TempFile
        self._writer: BundleWriter

    def _new_file(self) -> tuple[TempFile, BundleWriter]:
        temp = self._stack.enter_context(self._core.folder.temps.new())
        return temp, BundleWriter(temp, self._room)

    def run(self) -> Receipt:
        drafts: Iterable[BlockDraft] = self._request.blocks
        if self._room.is_bounded and not self._request.compressed:  # compressed bytes have no known length yet
            drafts = list(drafts)
            self._require_room(drafts)
        self._temp, self._writer = self._new_file()
        entries = [*self._request.reused, *self._write_blocks(drafts)]
        problem = require_chain(entries, self._request.token_count)
        if problem:
            raise InvalidDraft(f"The blocks of {self._request.uri} are not one chain: {problem}.")
        manifest = with_name_of_its_own(self._core, self._manifest(entries, self._session_map()))
        encoded = manifest.encode()
        bundle_id = bundle_id_of(encoded)
        for _ in range(_TRIES):
            directory = self._writer.finish(encoded, manifest.blocks, bundle_id, self._places)
            row = row_of(manifest, bundle_id, self._temp.size_bytes)
            blocks = tuple(self._writer.frames)
            with self._core.committing():
                moved = moved_blocks(self._core, self._places)
                if not moved:
                    if self._request.before_publishing is not None:
                        self._request.before_publishing()
                    bundle = IndexedBundle(bundle_id, LIVE, row, directory.holders, blocks)
                    publish(self._core, self._temp, bundle, self._room)
                    return receipt_of(manifest, bundle_id, self._temp.size_bytes, len(blocks), self._places)
            self._lead_elsewhere(moved, bundle_id)
        raise _block_missing(moved[0], bundle_id)

    def _lead_elsewhere(self, moved: Sequence[bytes], bundle_id: bytes) -> None:
        """Write the file again with blocks that left their places before the commit: a delete or a compaction was about
        to take them when they were found."""
        self._holdings.look_again()
        with FrameFile(self._temp.duplicate(), self._temp.path, bundle_id) as earlier:
            self._temp, self._writer = self._new_file()
            for block_id in self._writer.each(earlier.frames, lambda one: earlier.frames[one].frame_bytes):
                self._writer.add_copy(earlier, block_id)
        for block_id in moved:
            block = self._spares.get(block_id)
            find = self._holdings.find if block_id in self._reused else self._holdings.find_sound
            holder = find(block_id)
            if holder is not None:
                self._places[block_id] = holder
            elif block is not None:
                del self._places[block_id]
                self._writer.add(block, compressed=self._request.compressed)
            else:
                raise _block_missing(block_id, bundle_id)

    def _require_room(self, drafts: Sequence[BlockDraft]) -> None:
        """Raise BudgetExceeded for a state that cannot fit, before any of it is written and counted. If all blocks
        together would not fit, block ids are computed to find those that the store has."""
        try:
            self._room.require(sum(slot.spec.size_bytes for draft in drafts for slot in draft.slots))
        except BudgetExceeded:
            self._room.require(sum(map(self._bytes_if_new, self._prepared(drafts))))

    def _bytes_if_new(self, block: PreparedBlock) -> int:
        is_there = block.id in self._places or self._core.index.holders_of(block.id)
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
        done, total = 0, request.token_count - held
        for block in self._writer.each(self._prepared(drafts), self._bytes_if_new):
            self._write_block(block)
            entry = block.entry()
            yield entry
            if entry.kind == "span":
                done += entry.token_count
                if request.on_progress is not None:
                    request.on_progress(done, total)

    def _write_block(self, block: PreparedBlock) -> None:
        if block.id in self._places:
            return
        holder = self._holdings.find_sound(block.id)
        if holder is None:
            self._writer.add(block, compressed=self._request.compressed)
        else:
            self._places[block.id] = holder
            if self._spare_bytes + block.header.raw_bytes <= _SPARE_BYTES:
                self._spares[block.id] = block
                self._spare_bytes += block.header.raw_bytes

    def _session_map(self) -> Mapping[str, Any]:
        told = self._request.session
        if not callable(told):
            return told
        self._writer.flush()  # a turn may wait from now on
        found = told()
        require_session_map(found)
        return found

    def _manifest(self, entries: Sequence[BlockEntry], session: Mapping[str, Any]) -> Manifest:
        request = self._request
        covered = self._core.journal.digest_of(request.uri) if request.covers else None
        return Manifest(
            uri=request.uri,
            version=self._version,
            parent=request.parent,
            identity=request.identity,
            token_count=request.token_count,
            created_ns=now_ns(),
            blocks=tuple(entry.held_by(None) for entry in entries),
            session=session if covered is None else {**session, COVERS: covered},
            environment=environment(),
        )


def with_name_of_its_own(core: StoreCore, manifest: Manifest) -> Manifest:
    """The manifest of a new version. Its time is moved if a file has its bundle id: under a clock that stands still, a
    deleted version of the same state and time may hold blocks for others under that id."""
    while core.folder.has_bundle(bundle_id_of(manifest.encode())):
        manifest = dataclasses.replace(manifest, created_ns=manifest.created_ns + 1)
    return manifest


def moved_blocks(core: StoreCore, places: Mapping[bytes, bytes]) -> list[bytes]:
    """The blocks no longer readable at their `places`. Call it while committing: a pinned block that is there then
    stays until the new row is in the index."""
    moved: list[bytes] = []
    by_holder: dict[bytes, list[bytes]] = {}
    for block_id, holder in places.items():
        by_holder.setdefault(holder, []).append(block_id)
    for holder, block_ids in by_holder.items():
        try:
            with core.open_frames(holder) as file:
                moved += [block_id for block_id in block_ids if block_id not in file.frames]
        except StoreError:  # damaged, gone, or refused by the system
            moved += block_ids
    return moved


def publish(core: StoreCore, temp: TempFile, bundle: IndexedBundle, meter: Meter | None = None) -> None:
    """Give the flushed and checked file its name, then enter it in the index; undo the first if the second fails.
    `meter`: the one that counted its bytes, if any."""
    with core.committing():
        core.folder.publish(temp, bundle.bundle_id)
        if meter is not None:
            meter.settle()  # after the file counts: for a moment its bytes count twice, which never exceeds the budget
        try:
            core.index.add(core.in_place(bundle))
        except BaseException as failure:  # after any error: a version that was not acknowledged must not stay
            path = core.folder.bundle_path(bundle.bundle_id)
            try:
                core.folder.remove(bundle.bundle_id, LIVE_SUFFIX)
            except Exception as error:
                # else the next sleep would get the same version number, and the clock decide between the two
                raise DurabilityLost(
                    f"The index took no row for {path} ({failure}), and the file could not be taken back ({error}). "
                    "Nothing more is written until the store is opened again.",
                    path=path,
                ) from error
            raise


class Holdings(Closing):
    """Other bundles' files, opened and pinned on demand for a sleep."""

    def __init__(self, core: StoreCore, pin: Callable[[bytes], None]) -> None:
        self._core = core
        self._pin = pin
        self._frames: dict[bytes, frozenset[bytes]] = {}
        self._pool = FilePool(core.open_frames)

    def close(self) -> None:
        self._pool.close()

    def look_again(self) -> None:
        """Forget the contents of files seen before. They stay pinned."""
        self._pool.close()
        self._pool = FilePool(self._core.open_frames)
        self._frames.clear()

    def has(self, holder: bytes, block_id: bytes) -> bool:
        """Whether a bundle's file holds a frame of this block; False if the file is gone or cannot be read."""
        known = self._frames.get(holder)
        if known is None:
            self._pin(holder)  # pin first, then look
            known = self._frames[holder] = self._read(holder)
        return block_id in known

    def _read(self, holder: bytes) -> frozenset[bytes]:
        try:
            with self._pool.holding(holder) as file:
                return frozenset(file.frames)
        except StoreError:
            return frozenset()

    def find(self, block_id: bytes) -> bytes | None:
        """A live bundle whose file holds this block."""
        return next((holder for holder in self._core.index.holders_of(block_id) if self.has(holder, block_id)), None)

    def find_sound(self, block_id: bytes) -> bytes | None:
        """A live bundle that holds this block with every byte right."""
        for holder in self._core.index.holders_of(block_id):
            if self.has(holder, block_id):
                with contextlib.suppress(StoreError), self._pool.holding(holder) as file:
                    file.check_block(block_id)
                    return holder
        return None

    def require_sound(self, holder: bytes, block_id: bytes) -> None:
        """Read all of a block that a wake would read. Raises Corruption; BlockMissing if the system refuses to."""
        with _missing_if_refused(holder), self._pool.holding(holder) as file:
            file.check_payloads(block_id)


def _places_of_reused(
    core: StoreCore, pin: Callable[[bytes], None], holdings: Holdings, request: VersionDraft
) -> dict[bytes, bytes]:
    """The present bundle of each reused block; checks that they are the beginning of the parent's chain.

    Raises:
        InvalidDraft: they are not.
        BlockMissing, BundleMissing, Corruption: a reused block is missing or cannot be read.
    """
    if not request.reused:
        return {}
    if request.parent is None:
        raise InvalidDraft("reused blocks must come from the parent bundle, and none is named.", field="parent")
    pin(request.parent)
    with _missing_if_refused(request.parent):
        opened = core.open_bundle(request.parent)
    with opened as parent:
        manifest = parent.manifest
        if manifest is None:
            raise BundleMissing(
                f"{parent.path} is no version of a session any more.",
                bundle_id=parent.bundle_id.hex(),
                path=parent.path,
            )
        if manifest.identity.digest != request.identity.digest:
            raise InvalidDraft(
                f"blocks of {parent.path} were made under another identity and cannot be reused.",
                mismatched_fields=manifest.identity.mismatched_fields(request.identity),
            )
        if not _is_beginning(request.reused, manifest.blocks):
            raise InvalidDraft(
                f"the reused blocks are not the beginning of the chain of {parent.path}.", field="reused"
            )
        held = {entry.id: entry.bundle_id for entry in parent.entries}
        places = {entry.id: held[entry.id] for entry in request.reused}
    return {block_id: _holder_now(holdings, block_id, place, request.parent) for block_id, place in places.items()}


@contextlib.contextmanager
def _missing_if_refused(bundle_id: bytes) -> Iterator[None]:
    """For blocks only referred to. A read error must not stop the sleep of a state that does not need them: a caller
    with all blocks writes them."""
    try:
        yield
    except Corruption:
        raise
    except StoreError as error:
        raise BlockMissing(
            f"Nothing can refer to the blocks of the bundle {bundle_id.hex()}: {error.message}",
            bundle_id=bundle_id.hex(),
            reason=error.code,
        ) from error


def _is_beginning(reused: Iterable[BlockEntry], chain: Iterable[BlockEntry]) -> bool:
    """Whether these are the first blocks of the chain. A session may have stopped keeping a state record."""
    rest = iter(chain)
    for entry in reused:
        wanted = entry.held_by(None)
        if next((block for block in rest if block == wanted or block.kind != "state"), None) != wanted:
            return False
    return True


def _holder_now(holdings: Holdings, block_id: bytes, place: bytes | None, parent: bytes) -> bytes:
    """The present bundle of a block: by its entry, or else by the index."""
    holder = place if place is not None and holdings.has(place, block_id) else holdings.find(block_id)
    if holder is None:
        raise _block_missing(block_id, parent)
    return holder


def _block_missing(block_id: bytes, bundle_id: bytes) -> BlockMissing:
    return BlockMissing(
        f"No bundle holds the block {block_id.hex()} any more that the bundle {bundle_id.hex()} refers to.",
        block_id=block_id.hex(),
        bundle_id=bundle_id.hex(),
    )


def environment() -> dict[str, str]:
    """The program that wrote a bundle, for people. No reader acts on it."""
    return {
        "torpor": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
