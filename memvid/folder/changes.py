"""Whether somebody else has changed names in `versions`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from ..disk.paths import Stamp, stamp_of


class Changes:
    """Tells the changes of a folder that others made from those of this object, by the folder's own stamp."""

    def __init__(self, descriptor: Callable[[], int]) -> None:
        self._descriptor = descriptor
        self._noted: Stamp | None = None
        self._naming = threading.Lock()  # held around one change of a name; never while flushing

    def note(self) -> None:
        """The names are listed next: from now on `of_others` tells of what comes after this."""
        with self._naming:
            self._noted = self._stamp()

    def of_others(self, *, waiting: bool) -> bool:
        """Whether others have changed names since `note`. Costs one look at the folder itself. waiting: for a change
        of our own that another thread is making; else the answer is no while there is one."""
        if not self._naming.acquire(blocking=waiting):
            return False
        try:
            return self._stamp() != self._noted
        finally:
            self._naming.release()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Around a change of one name by this object. What another has changed before it stays to be told."""
        with self._naming:
            is_known = self._stamp() == self._noted
            yield
            if is_known:
                self._noted = self._stamp()

    def _stamp(self) -> Stamp | None:
        with contextlib.suppress(OSError):  # closed
            return stamp_of(os.fstat(self._descriptor()))
        return None
