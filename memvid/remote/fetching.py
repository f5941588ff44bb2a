"""Versions of a remote come into a store as an import does: the blocks that it lacks, in a new pack, then the manifest.

Rules:
- A manifest's digest is its name. Each block is proven against the manifest by its id, and what was written is read
  back, as for any import. What the places say is believed by nothing: a wrong place gives other bytes, and these are
  refused.
- Of a version that was sent stripped, its headers come; it is stripped here.
- A pack that was read and is not what was written leaves: whoever has its blocks sends them again, as another pack.
- The next frames come while one is written, of whatever packs they are. Memory: one frame, and what
  `Objects.get_ranges` has under way.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager

from ..errors import BundleMissing, Corruption, CorruptObject, LimitExceeded, StoreError, Truncated
from ..exchange.import_checks import require_in_proportion
from ..exchange.transfer import take
from ..folder.marks import Marks, stripped_in
from ..format.blocks import BlockEntry, span_parents
from ..format.frames import FrameReader, require_promised
from ..format.manifest import Manifest
from ..format.records import Receipt
from ..limits import MAX_FETCHED_FRAME_BYTES
from ..writing.core import StoreCore
from .leaving import let_leave
from .objects import Part
from .places import Place, Places, manifest_key
from .versions import RemoteVersions


def fetch(
    core: StoreCore,
    remote: RemoteVersions,
    manifest: Manifest,
    bundle_id: str,
    before_commit: Callable[[], None] = lambda: None,
) -> Receipt | None:
    """Let a version of a remote be one of the store, under its own name and number; the caller says that it may. None:
    it is already, with all that the remote has of it. before_commit: as of `Intake.take`.

    Raises:
        BundleMissing, Corruption, LimitExceeded: the remote does not have it whole.
        RemoteUnreachable, RemoteRefused
        NoSpace, BudgetExceeded, StoreIoError, ReadBackFailed, and what `before_block` of the remote raises: the store
            is as it was before.
    """
    places = remote.places_for(manifest, bundle_id)
    whole = {block_id for block_id, place in places.items() if not place.frame.is_stripped}
    ids = {entry.id for entry in manifest.blocks}
    lacking = core.missing_of(ids & whole) | core.missing_of(ids - whole, stripped=True)
    ends_strip = ids <= whole and bundle_id in (stripped_in(core.folder) or ())
    if not lacking and not ends_strip and core.folder.has_manifest(bundle_id):
        return None
    with FetchedFrames(remote, manifest, places, bundle_id, lacking) as frames:
        require_in_proportion(manifest, frames.file_bytes, frames.path)
        try:
            receipt = take(core, manifest, frames.holding, before_commit)
        except (Corruption, CorruptObject) as error:
            pack = frames.pack_of(error)
            if pack is not None and not isinstance(error, BundleMissing):  # what is missing is seen by who sends
                let_leave(remote.objects, pack)
            raise
    if ids - whole and core.missing_of(ids):
        with core.committing():
            Marks.load(core.folder).strip({manifest.uri: [bundle_id]}).save(core.folder)
    return receipt


class FetchedFrames(FrameReader):
    """The frames of one version as one file, in the order of its blocks. Whoever reads them in that order finds them on
    their way already. Use it from one thread."""

    def __init__(
        self, remote: RemoteVersions, manifest: Manifest, places: Places, bundle_id: str, wanted: Collection[bytes]
    ) -> None:
        """wanted: the blocks that will be asked for, as far as is known. Raises LimitExceeded: a frame is too long to
        be fetched."""
        self.path = path = remote.path_of(manifest_key(bundle_id))
        self.checked_heads, self.heads, self.torn = {}, {}, {}
        self.frames = {}
        self._remote, self._manifest, self._places = remote, manifest, places
        self._wanted = wanted
        self._parents = span_parents(manifest.blocks)
        self._order = list(manifest.blocks)
        self._number, self._held = -1, list[memoryview]()
        self._pack: str | None = None  # that was read last
        self._coming = self._frames_of(())
        self._starts: list[int] = []
        self._fd = -1
        end = 0
        for entry in self._order:
            frame = places[entry.id].frame
            if frame.frame_bytes > MAX_FETCHED_FRAME_BYTES:
                raise LimitExceeded(
                    f"{path} has a block of {frame.frame_bytes} bytes; the most that is fetched is "
                    f"{MAX_FETCHED_FRAME_BYTES}.",
                    path=path,
                    size_bytes=frame.frame_bytes,
                    limit=MAX_FETCHED_FRAME_BYTES,
                )
            there = self.heads if frame.is_stripped else self.frames
            there[entry.id] = dataclasses.replace(frame, offset=end)
            self._starts.append(end)
            end += frame.frame_bytes
        self.file_bytes = end

    @contextmanager
    def holding(self, entry: BlockEntry, checked: bool) -> Iterator[FrameReader]:
        """This, to copy a block from. checked: its header has been compared with the manifest; its bytes are compared
        when the copy is read back."""
        self._remote.before_block()
        if checked:
            header, _ = self.read_head(entry.id)
            require_promised(header, entry, self._parents.get(entry.id), self._manifest.identity.digest, self.path)
        yield self

    def pack_of(self, error: StoreError) -> str | None:
        """The pack that is not what was written, by what was read of it: that of the block that is named, or that which
        was read last; None: none was."""
        place = self._places.get(bytes.fromhex(str(error.details.get("block_id", ""))))
        return self._pack if place is None else place.pack

    def close(self) -> None:
        self._coming.close()
        self._held = []

    def _read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        pieces = self._chunks(offset, sum(buffer.nbytes for buffer in buffers))
        piece = memoryview(b"")
        for buffer in buffers:
            target = buffer.cast("B")
            while target:
                piece = piece or next(pieces)
                count = min(target.nbytes, piece.nbytes)
                target[:count] = piece[:count]
                target, piece = target[count:], piece[count:]

    def _chunks(self, start: int, size_bytes: int) -> Iterator[memoryview]:
        """What is held itself, and no copy. A read is always within one frame."""
        number = bisect.bisect_right(self._starts, start) - 1
        if number != self._number:
            self._hold(number)
        at = self._starts[number]
        for piece in self._held:
            first, end = max(start - at, 0), min(start + size_bytes - at, piece.nbytes)
            if first < end:
                yield piece[first:end]
            at += piece.nbytes

    def _hold(self, number: int) -> None:
        """Hold one frame, and no other. Unless it is the one that comes next, it and those wanted behind it are asked
        for anew."""
        self._number, self._held = -1, []
        self._pack = self._places[self._order[number].id].pack
        came = next(self._coming, None)
        if came is None or came[0] != number:
            self._coming.close()
            behind = range(number + 1, len(self._order))
            self._coming = self._frames_of([number, *(at for at in behind if self._order[at].id in self._wanted)])
            came = next(self._coming)
        self._number, self._held = came

    def _frames_of(self, numbers: Sequence[int]) -> Generator[tuple[int, list[memoryview]]]:
        """Frames by their numbers: the number of each, and its bytes, piece by piece."""
        places = [self._places[self._order[each].id] for each in numbers]
        parts = self._remote.objects.get_ranges(
            [(place.pack, place.frame.offset, place.frame.frame_bytes) for place in places]
        )
        for number, place in zip(numbers, places, strict=True):
            yield number, self._pieces(next(parts), place)  # and kept by who asked alone

    def _pieces(self, part: Part | None, place: Place) -> list[memoryview]:
        """Raises BundleMissing, Truncated."""
        if part is None:
            raise self._remote.missing(place.pack)
        pieces = [memoryview(piece) for piece in part]
        if sum(piece.nbytes for piece in pieces) != place.frame.frame_bytes:
            path = self._remote.path_of(place.pack)
            raise Truncated(f"{path} ends earlier than its places say.", path=path)
        return pieces
