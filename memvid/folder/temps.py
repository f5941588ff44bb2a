"""The temporary files of a store, and the leftovers of unfinished writes."""

from __future__ import annotations

import os
import threading
import weakref

from ..disk import durable
from ..disk.paths import list_names


class Temps:
    """Makes temporary files in a folder (`folder_fd`, borrowed; `path` for messages), and knows the open ones. Safe
    from several threads."""

    def __init__(self, folder_fd: int, path: str) -> None:
        self.folder_fd = folder_fd
        self._path = path
        self._open: weakref.WeakSet[durable.TempFile] = weakref.WeakSet()
        self._making = threading.Lock()

    def new(self) -> durable.TempFile:
        """An empty one. Raises NoSpace, StoreIoError."""
        with self._making:  # before the file exists, or it is taken for a leftover
            temp = durable.TempFile(self.folder_fd, self._path)
            self._open.add(temp)
            return temp

    def leftovers(self) -> list[str]:
        """The names of those that no process is writing. Only under the store's lock. A caller that has the writing
        lock too sees no small file that is being written."""
        with self._making:
            written = {os.path.basename(temp.path) for temp in self._open.copy() if not temp.closed}
            return [name for name in self._plain_ones() if name not in written]

    def remove_all(self) -> int:
        """Remove the leftovers of unfinished writes, how many. Only under the store's lock, before any temporary file
        is made.

        Only files with a name that `TempFile` gives: all others belong to a user.
        """
        return sum(durable.remove(self.folder_fd, name, self._path) for name in self._plain_ones())

    def _plain_ones(self) -> list[str]:
        names = filter(durable.TEMP_NAME.fullmatch, list_names(self.folder_fd, self._path))
        return [name for name in names if durable.is_plain(self.folder_fd, name)]
