"""Mends damaged packs: what is sound in one, and nowhere else, goes into a new pack before the damaged file moves."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..checking.wholeness import FoundBlocks
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.paths import Stamp, open_foreign_file
from ..errors import BundleMissing, ReadBackFailed, StoreBusy, StoreError, StoreIoError
from ..folder.folder import pack_name
from ..folder.store_file import DAMAGED, PACKS
from ..format.damaged_pack import DamagedPack
from ..format.pack import encode_directory, pack_id_of
from ..format.pack_writer import PackWriter
from ..format.sealing import HEADER_BYTES
from ..units import format_plural
from ..writing.maintenance_run import MaintenanceRun
from ..writing.needs import Needed
from ..writing.removal import needed_now

_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class _Copies:
    """The blocks to copy: `full` whole, of `heads` the header alone."""

    full: tuple[bytes, ...]
    heads: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.full or self.heads)


class Mending:
    """The damaged packs of one repair. What is found in them is added to `found`. `made`: the packs that it has made
    anew; what lay there before is in `damaged`, or in them."""

    def __init__(self, run: MaintenanceRun, found: FoundBlocks, made: set[str]) -> None:
        self._run = run
        self._core = run.core
        self._found = found
        self._gone: set[str] = set()
        self._made = made
        self._sound: set[tuple[Stamp, bytes]] = set()

    def mend(self, name: str) -> None:
        """Mend a pack. Raises NoSpace, StoreIoError (of the store's disk), DurabilityLost, LockLost."""
        path = self._core.folder.path_of(name)
        if name in self._made:
            return
        try:
            fd, _ = self._core.folder.open_name(name)
            with DamagedPack(fd, path, None) as file:
                self._take_note(file)
                self._mend(name, file)
        except BundleMissing:
            return
        except StoreIoError as error:
            if error.details.get("path") != path:
                raise
            self._run.fail(path, error)  # it stays where it is
        except (ReadBackFailed, StoreBusy) as error:
            self._run.fail(path, error)

    def keep(self, path: str, needed: Needed) -> bool:
        """Copy what is needed of a file that is to go, and sound in no pack. False, and nothing is copied, if it must
        stay: of a block that is sound nowhere it has a part, with which a repair may put the block together. Raises
        StoreError."""
        with DamagedPack(open_foreign_file(path), path, None) as file:
            if any(needed.has_whole(each) and not self._is_elsewhere(each, "") for each in file.torn):
                return False
            copies = self._copies(file, "", needed)
            new, size_bytes = PACKS, 0
            if copies and not self._run.dry_run:
                with self._written(file, copies) as written, self._core.committing():
                    assert written is not None
                    if self._copies(file, "", needed_now(self._core, pins=False)) != copies:
                        message = f"{path} stays: what needs its blocks has changed. Forget the session again."
                        raise StoreBusy(message, path=path)
                    new, size_bytes = self._core.publish_pack(*written), written[0].size_bytes
                    self._core.count_written(utc_day(now_ns()), size_bytes)
            self._tell_copy(new, copies, size_bytes)
            return True

    def _take_note(self, file: DamagedPack) -> None:
        for block_id in file.frames:
            self._found.full[block_id] = hash(file.read_head(block_id)[0].said)
        for block_id in (*file.heads, *file.torn):
            self._found.heads[block_id] = hash(file.read_head(block_id)[0].said)

    def _mend(self, name: str, file: DamagedPack) -> None:
        for _ in range(_TRIES):
            copies = self._copies(file, name, needed_now(self._core))
            if self._run.dry_run:
                size_bytes = sum(file.frames[each].frame_bytes for each in copies.full)
                self._run.bytes_written += size_bytes
                self._tell(name, _planned_name(file, copies), copies, size_bytes, "")
                return
            with self._written(file, copies) as written, self._core.committing():
                if not self._core.folder.has(name):
                    return  # a repack has removed it
                if not self._is_covered(file, name, copies):
                    continue
                new = self._core.publish_pack(*written) if written else ""
                self._made.add(new)
                place = self._core.folder.move_to_damaged(name) if new != name else ""
                self._let_go(name, new)
                self._tell(name, new, copies, written[0].size_bytes if written else 0, place)
                return
        raise StoreBusy(
            f"{file.path} stays where it is: what needs it changed each time. Repair again.", path=file.path
        )

    def _copies(self, file: DamagedPack, name: str, needed: Needed) -> _Copies:
        whole = {each for each in file.frames if needed.unknown or needed.has_whole(each)}
        full = [each for each in file.frames if each in whole and not self._is_elsewhere(each, name)]
        heads = [
            each
            for each in (*file.frames, *file.heads, *file.torn)
            if each not in whole
            and (needed.unknown or each in needed.blocks)
            and not self._is_elsewhere(each, name, head=True)
        ]
        return _Copies(tuple(full), tuple(heads))

    def _is_elsewhere(self, block_id: bytes, name: str, *, head: bool = False) -> bool:
        """Whether another pack has the block sound; or (head) its header at least."""
        others = self._core.index.packs_of(block_id, stripped=head)
        return any(self._is_sound(other, block_id, head=head) for other in others if other not in (name, *self._gone))

    def _is_sound(self, name: str, block_id: bytes, *, head: bool) -> bool:
        """A file is read once; that the name still means it is asked each time."""
        try:
            with self._core.files.holding(name) as file:
                if head:
                    file.read_head(block_id)
                    return True
                key = (file.stamp(), block_id)
                if key not in self._sound:
                    file.check_payloads(block_id)
                    self._sound.add(key)
                return block_id in file.frames
        except StoreError:
            return False

    def _is_covered(self, file: DamagedPack, name: str, copies: _Copies) -> bool:
        """Whether this pack may go now: what is needed of it is in the new pack, or elsewhere; and the new pack has no
        block of a version that was deleted meanwhile."""
        return self._copies(file, name, needed_now(self._core)) == copies

    @contextlib.contextmanager
    def _written(self, file: DamagedPack, copies: _Copies) -> Iterator[tuple[TempFile, bytes] | None]:
        """A new pack, flushed and read back; None if there is nothing to copy."""
        if not copies:
            yield None
            return
        with self._core.poisoning(), self._core.folder.new_temp() as temp:
            writer = PackWriter(temp)
            for block_id in copies.full:
                writer.add_copy(file, block_id)
            for block_id in copies.heads:
                writer.add_stripped(file, block_id)
            pack_id = writer.finish()
            self._run.bytes_written += temp.size_bytes
            yield temp, pack_id

    def _let_go(self, name: str, new: str) -> None:
        if new != name:
            self._core.index.drop_packs([name])
            self._core.files.let_go(name)

    def _tell(self, name: str, new: str, copies: _Copies, size_bytes: int, place: str) -> None:
        self._tell_copy(new, copies, size_bytes)
        if new != name:
            self._gone.add(name)
            path = self._core.folder.path_of(name)
            self._run.did("move", path, 0, f"It is damaged, and moves to {DAMAGED}/{os.path.basename(place)}.")

    def _tell_copy(self, new: str, copies: _Copies, size_bytes: int) -> None:
        if copies:
            full = [format_plural(len(copies.full), "sound block")] if copies.full else []
            heads = [format_plural(len(copies.heads), "header")] if copies.heads else []
            what = f"It has {' and '.join([*full, *heads])} of a damaged pack."
            self._run.did("copy", self._core.folder.path_of(new), size_bytes, what)


def _planned_name(file: DamagedPack, copies: _Copies) -> str:
    """The name of the new pack: that of the damaged file, if all frames of that are sound; "" without one."""
    if not copies:
        return ""
    offset, frames = HEADER_BYTES, []
    kinds = {**file.frames, **file.heads, **file.torn}
    for block_id in (*copies.full, *copies.heads):
        frames.append(dataclasses.replace(kinds[block_id], offset=offset, is_stripped=block_id in copies.heads))
        offset += kinds[block_id].frame_bytes
    return pack_name(pack_id_of(encode_directory(frames)))
