"""The packs of an open store, opened on demand: a few at a time, shared by all who read blocks."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..disk.paths import Closing
from ..errors import StoreIoError
from ..folder.folder import StoreFolder, id_in
from ..folder.store_file import BUNDLES
from ..index.index import PackRow
from ..limits import MAX_OPEN_ANCESTORS

if TYPE_CHECKING:
    from ..format.frames import FrameReader


def open_frames(folder: StoreFolder, name: str) -> FrameReader:
    """Open a pack by its name: of this format, or a bundle of a store that was carried over, whose id does not matter.

    Raises:
        BundleMissing, UnsafePath, StoreIoError, UnsupportedFormat, Corruption
    """
    from ..format.pack import PackFile
    from ..format_1 import BundleFile

    fd, path = folder.open_name(name)
    if name.startswith(f"{BUNDLES}/"):
        return BundleFile(fd, path, None)
    return PackFile(fd, path, bytes.fromhex(id_in(name)))


def pack_row(folder: StoreFolder, name: str) -> PackRow:
    """What the index keeps of a pack. Raises as `open_frames`."""
    with open_frames(folder, name) as file:
        return PackRow(name, file.file_bytes, tuple(file.frames), tuple(file.heads))


class FrameFiles(Closing):
    """Open packs by name. Closes the least recently used first, never one that is in use. Safe from several threads.

    A file is given out while it has its name, for what its blocks prove counts for the name. A file that lost its name
    is closed once nobody uses it: it takes room, and may hold what was deleted.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._files: OrderedDict[str, FrameReader] = OrderedDict()
        self._users: dict[FrameReader, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def holding(self, name: str, *, again: bool = False) -> Iterator[FrameReader]:
        """A pack, open for the block. again: what was found under the name before will do, and nothing is asked of the
        system then. Raises as `open_frames`."""
        with self._lock:
            file = self._files.get(name)
            if file is not None and not again and not self._is_named(name, file):
                self._let_go(name)
                file = None
            if file is None:
                file = self._files[name] = open_frames(self._folder, name)
                self._close_surplus(name)
            self._files.move_to_end(name)
            self._users[file] = self._users.get(file, 0) + 1
        try:
            yield file
        finally:
            with self._lock:
                self._users[file] -= 1
                if not self._users[file]:
                    del self._users[file]
                    if self._files.get(name) is not file:
                        file.close()

    def let_go(self, name: str) -> None:
        """The name means another file from now on, or none."""
        with self._lock:
            if name in self._files:
                self._let_go(name)

    def _let_go(self, name: str) -> None:
        file = self._files.pop(name)
        if file not in self._users:
            file.close()

    def _is_named(self, name: str, file: FrameReader) -> bool:
        status = self._folder.status_of(name)
        return status is not None and (status.st_dev, status.st_ino) == file.stamp()[:2]

    def _close_surplus(self, but: str) -> None:
        for name in list(self._files)[: max(0, len(self._files) - MAX_OPEN_ANCESTORS)]:
            if name != but and self._files[name] not in self._users:
                self._files.pop(name).close()

    def close(self) -> None:
        with self._lock:
            while self._files:
                with contextlib.suppress(StoreIoError):
                    self._files.popitem()[1].close()
