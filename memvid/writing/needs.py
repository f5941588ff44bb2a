"""What is needed: the blocks that manifests name, and those in use. The one ground on which a pack is removed.

Needs are collected from the manifests themselves, and never from the index. Each is read once: it cannot change. While
one cannot be read, or is missing, its needs are unknown, and nothing may be removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..answers import Finding
from ..errors import BundleMissing, StoreError
from ..folder.folder import StoreFolder
from ..format.manifest import Manifest, end_record_of

if TYPE_CHECKING:
    from ..format.frames import FrameReader


@dataclass(frozen=True, slots=True)
class Needed:
    """The ids of all blocks that versions name now. `stripped`: those that only stripped versions name, of which the
    header is enough. `unknown`: why needs are unknown; then nothing may be removed."""

    blocks: frozenset[bytes]
    stripped: frozenset[bytes]
    unknown: tuple[Finding, ...]

    def has_whole(self, block_id: bytes) -> bool:
        """Whether a block's keys and values are needed, and not its header alone."""
        return block_id in self.blocks and block_id not in self.stripped

    def idle_in(self, file: FrameReader) -> set[bytes]:
        """The blocks of which a file has what nothing needs: those that no version names, and keys and values where the
        header is enough. A frame without any, as a recurrent model's span has, is a header alone."""
        beyond = {each for each, frame in file.frames.items() if frame.frame_bytes > frame.head_bytes}
        return ({*file.frames, *file.heads} - self.blocks) | (self.stripped & beyond)


class Needs:
    """The needs of one open store's versions, remembered by manifest: 32 bytes a block. Thread-safe."""

    def __init__(self, folder: StoreFolder, read_manifest: Callable[[str], Manifest]) -> None:
        self._folder = folder
        self._read_manifest = read_manifest
        self._of: dict[str, tuple[bytes, ...]] = {}
        self._with_end: set[str] = set()
        """Versions with a record of their last position, which is needed of a stripped one too."""
        self._ids: dict[bytes, bytes] = {}  # one object for each id: versions of a session share most
        self._last: tuple[object, tuple[frozenset[bytes], frozenset[bytes]]] | None = None
        self._lock = threading.Lock()

    def read_ahead(self) -> None:
        """Read the manifests that `now` would read, letting others in behind each. Raises StoreIoError."""
        for bundle_id in self._folder.list_versions():
            self.of(bundle_id)

    def now(
        self,
        known: Collection[str],
        stripped: Collection[str],
        pinned: Collection[bytes],
        but_for: Collection[str] = (),
    ) -> Needed:
        """The needs of all manifests that are there.

        known: the versions that the index tells of; one without a file is missing, and its needs are unknown. stripped:
        the versions that need no keys and values. pinned: blocks that are needed whatever manifests say. but_for: these
        versions count as deleted, for a dry run, also those that cannot be read.

        Raises:
            StoreIoError: the folder cannot be listed.
        """
        with self._lock:
            there, unknown = set(self._folder.list_versions()), []
            for bundle_id in sorted(((there - self._of.keys()) | (set(known) - there)) - set(but_for)):
                finding = self._read(bundle_id)
                if finding is None:
                    there.add(bundle_id)
                elif finding.code != BundleMissing.code or bundle_id in known:  # else it went behind the listing
                    unknown.append(finding)
            for gone in self._of.keys() - there:
                del self._of[gone]
                self._with_end.discard(gone)
            blocks, heads = self._wanted(frozenset(stripped), frozenset(but_for))
            held = frozenset(pinned)
            return Needed(blocks if held <= blocks else blocks | held, heads - held if held else heads, tuple(unknown))

    def _wanted(self, stripped: frozenset[str], but_for: frozenset[str]) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """The blocks that versions name, and those of them of which the header is enough. Counted anew only if versions
        or strips have changed: a repack asks before each step."""
        question = (frozenset(self._of), stripped, but_for)
        if self._last is None or self._last[0] != question:
            full: set[bytes] = set()
            heads: set[bytes] = set()
            for bundle_id, blocks in self._of.items():
                if bundle_id in but_for:
                    continue
                (heads if bundle_id in stripped else full).update(blocks)
                if bundle_id in stripped and bundle_id in self._with_end:
                    full.add(blocks[-1])
            self._ids = {each: each for each in full | heads}
            self._last = question, (frozenset(full | heads), frozenset(heads - full))
        return self._last[1]

    def of(self, bundle_id: str) -> tuple[bytes, ...]:
        """The blocks that a version names; none if its manifest cannot be read."""
        with self._lock:
            if bundle_id not in self._of:
                self._read(bundle_id)
            return self._of.get(bundle_id, ())

    def fault_of(self, bundle_id: str) -> Finding | None:
        """Why a manifest cannot be read, and its needs are unknown; None for one that can."""
        with self._lock:
            return None if bundle_id in self._of else self._read(bundle_id)

    def ends(self) -> set[bytes]:
        """The records of last positions that stay when their versions are stripped, of the manifests read so far."""
        with self._lock:
            return {self._of[each][-1] for each in self._with_end}

    def _read(self, bundle_id: str) -> Finding | None:
        try:
            manifest = self._read_manifest(bundle_id)
        except StoreError as error:
            return Finding.of(self._folder.manifest_path(bundle_id), error)
        self._of[bundle_id] = tuple(self._ids.setdefault(entry.id, entry.id) for entry in manifest.blocks)
        if end_record_of(manifest) is not None:
            self._with_end.add(bundle_id)
        return None


class Pins:
    """Blocks that this process uses now: sets of ids, each held until it is released. No removal takes their packs. A
    reader pins those of its version, a sleep those that it refers to. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[int, set[bytes]] = {}
        self._next = 0
        self._lock = threading.RLock()  # a generator that is collected within lets go of its pin

    def add(self, block_ids: Iterable[bytes] = ()) -> int:
        """Pin these; the number by which they are released."""
        with self._lock:
            self._next += 1
            self._held[self._next] = set(block_ids)
            return self._next

    def extend(self, number: int, block_ids: Iterable[bytes]) -> None:
        """Pin more under the same number."""
        with self._lock:
            self._held[number].update(block_ids)

    def release(self, number: int) -> None:
        with self._lock:
            self._held.pop(number, None)

    def blocks(self) -> Collection[bytes]:
        """All that are pinned now."""
        with self._lock:
            return set().union(*self._held.values())
