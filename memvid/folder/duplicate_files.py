"""A bundle whose file is there with both endings: what its name leads to, and how two files become one.

Such twins come from a crash between two steps, or from a backup that is put back beside a retired file. The live file
says that the bundle is a version. Either may hold frames that others look for.

Owns the choice of file for each frame, and when one of the two may go.

Rules:
- A frame is read from the live file; from the retired one if the live file cannot be read, lacks it, or has it damaged.
  Twins are few, so frames in both are read once more than needed.
- A retired file goes, or is renamed over, only if the live one has each of its frames with every byte right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..disk.durable import TempFile
from ..disk.paths import Stamp, undoing
from ..errors import StoreError, StoreIoError
from ..format.blocks import BlockHeader
from ..format.bundle import FrameFile, Head
from ..format.directory import Frame
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX, FrameHead
from ..format.writer import BundleWriter
from . import quarantine
from .folder import StoreFolder


class TwinFrames(FrameFile):
    """The frames of both files of a bundle, as if they were in one. Owns both; `path` and identity are the live one's.

    `directory` is the live file's: a frame in the retired file only is in `frames` alone.
    """

    def __init__(self, live: FrameFile, retired: FrameFile) -> None:
        self._live, self._retired = live, retired
        self._fd = -1  # every read goes to one of the two
        self.path = live.path
        self.file_bytes = live.file_bytes
        self.bundle_id = live.bundle_id
        self.trailer = live.trailer
        self.directory = live.directory
        self.frames = {**retired.frames, **live.frames}
        self.checked_heads = {}
        self._chosen: dict[bytes, FrameFile] = {}

    def _holder(self, block_id: bytes) -> FrameFile:
        chosen = self._chosen.get(block_id)
        if chosen is None:
            chosen = self._chosen[block_id] = self._choose(block_id)
        return chosen

    def _choose(self, block_id: bytes) -> FrameFile:
        if block_id not in self._retired.frames:
            return self._live
        if block_id not in self._live.frames:
            return self._retired
        return self._live if _is_sound(self._live, block_id) else self._retired

    def close(self) -> None:
        self._live.close()
        self._retired.close()

    def stamp(self) -> Stamp:
        return self._live.stamp()

    def frame_of(self, block_id: bytes) -> Frame:
        return self._holder(block_id).frame_of(block_id)

    def read_head(self, block_id: bytes) -> Head:
        return self._holder(block_id).read_head(block_id)

    def read_slots_into(
        self,
        block_id: bytes,
        header: BlockHeader,
        head: FrameHead,
        targets: Iterable[tuple[int, Sequence[memoryview]]],
    ) -> None:
        self._holder(block_id).read_slots_into(block_id, header, head, targets)

    def check_block(
        self, block_id: bytes, on_bytes: Callable[[int], None] | None = None, *, known: Head | None = None
    ) -> BlockHeader:
        return self._holder(block_id).check_block(block_id, on_bytes, known=known)

    def check_payloads(
        self, block_id: bytes, on_bytes: Callable[[int], None] | None = None, *, known: Head | None = None
    ) -> Head:
        return self._holder(block_id).check_payloads(block_id, on_bytes, known=known)

    def frame_chunks(self, block_id: bytes) -> Iterator[memoryview]:
        return self._holder(block_id).frame_chunks(block_id)


def open_frames(folder: StoreFolder, bundle_id: bytes) -> FrameFile:
    """Open a bundle for its frames, wherever they are: in its live file, its retired one, or both.

    Raises:
        BundleMissing, UnsafePath, StoreIoError, and what damage raises: the live file's, if there is one.
    """
    fd, path = folder.open_bundle(bundle_id)
    if not path.endswith(LIVE_SUFFIX):
        return FrameFile(fd, path, bundle_id)
    try:
        live = FrameFile(fd, path, bundle_id)
    except StoreError:
        retired = _open(folder, bundle_id, RETIRED_SUFFIX)
        if retired is None:
            raise
        return retired
    with undoing(live.close):
        retired = _open(folder, bundle_id, RETIRED_SUFFIX)
    return live if retired is None else TwinFrames(live, retired)


def _open(folder: StoreFolder, bundle_id: bytes, suffix: str) -> FrameFile | None:
    """One of a bundle's files; None if it is not there or of no use."""
    with contextlib.suppress(StoreError):
        fd, path = folder.open_as(bundle_id, suffix)
        return FrameFile(fd, path, bundle_id)
    return None


# --- making one of two


def remove_redundant(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> int:
    """Remove the retired files with nothing that the live ones beside them lack; how many. It reads every byte of both,
    so it is for few. Raises StoreIoError, DurabilityLost."""
    count = 0
    for bundle_id in bundle_ids:
        if _is_redundant(folder, bundle_id):
            folder.remove(bundle_id, RETIRED_SUFFIX)
            count += 1
    return count


def _is_redundant(folder: StoreFolder, bundle_id: bytes) -> bool:
    with contextlib.ExitStack() as stack:
        live = _open(folder, bundle_id, LIVE_SUFFIX)
        if live is None:
            return False
        stack.callback(live.close)
        if _is_empty(folder, bundle_id):
            return True
        retired = _open(folder, bundle_id, RETIRED_SUFFIX)
        if retired is None:
            return False  # what is in it must be looked for frame by frame
        stack.callback(retired.close)
        return all(_is_sound(live, block_id) for block_id in retired.frames)


def _is_empty(folder: StoreFolder, bundle_id: bytes) -> bool:
    stamp = folder.stamp_of(bundle_id, RETIRED_SUFFIX)
    return stamp is not None and stamp[2] == 0


def _is_sound(file: FrameFile, block_id: bytes) -> bool:
    try:
        file.check_payloads(block_id)
    except StoreIoError:
        raise
    except StoreError:
        return False
    return True


def retire(folder: StoreFolder, bundle_id: bytes) -> None:
    """Durably turn a version into a mere holder of blocks, as `StoreFolder.retire`, also if a retired file lies beside
    the live one. Then every sound frame of the two goes into the retired file, and the live one goes; to quarantine if
    it cannot be read, for repair may still find something in it.

    Needs disk space only if both can be read and the retired one holds what the live one lacks.

    Raises:
        NoSpace, StoreIoError, DurabilityLost: the version is still one.
    """
    if folder.stamp_of(bundle_id, LIVE_SUFFIX) is None:
        return
    if folder.stamp_of(bundle_id, RETIRED_SUFFIX) is None or _is_redundant(folder, bundle_id):
        folder.retire(bundle_id)
        return
    with contextlib.ExitStack() as stack:
        live, retired = (_open(folder, bundle_id, suffix) for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX))
        for file in filter(None, (live, retired)):
            stack.callback(file.close)
        if live is None:
            quarantine.move_bundle(folder, bundle_id, LIVE_SUFFIX, as_suffix=RETIRED_SUFFIX)
            return
        if retired is None:
            quarantine.move_bundle(folder, bundle_id, RETIRED_SUFFIX)
            folder.retire(bundle_id)
            return
        temp = stack.enter_context(folder.temps.new())
        _write_sound(temp, live, retired)
        folder.put_beside(temp, bundle_id)
        folder.remove(bundle_id, LIVE_SUFFIX)


def _write_sound(temp: TempFile, *files: FrameFile) -> None:
    """A file that only holds blocks: each block from the first of the files that has it with every byte right."""
    writer = BundleWriter(temp)
    found = ((file, block_id) for file in files for block_id in file.frames)
    for file, block_id in writer.each(found, lambda one: one[0].frames[one[1]].frame_bytes):
        if block_id not in writer.frames and _is_sound(file, block_id):
            writer.add_copy(file, block_id)
    writer.finish(b"", (), files[0].bundle_id, {})
