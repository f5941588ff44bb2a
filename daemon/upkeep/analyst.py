"""Analyses of stored versions: one at a time, as reads of the store. Stops an analysis when no client waits for it any
more. Changes nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from ...memvid.answers import VersionInfo
from ...memvid.errors import BundleMissing
from ...memvid.store import Store
from ...memvid.writing.reader import BundleReader
from ...snapshot.analysis import DEFAULT_KIND, analyze, encode
from ..api.events import OnEvent, ProgressEvent
from ..disk.store_threads import StoreThreads
from ..errors import ServiceClosed

_GONE: Final = "its parent is not in the store any more"


class Analyst:
    """Analyses stored versions."""

    def __init__(self, store: Store, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self._turn = asyncio.Lock()
        self._closing = threading.Event()

    async def analyze(self, row: VersionInfo, *, kind: str | None, labels: Sequence[str] | None, emit: OnEvent) -> str:
        """The artifact of a version, as JSON. To cancel the task stops the work at its next step.

        Raises:
            StoreError: it is missing or damaged.
            MalformedSnapshot: it is sound, but not of the form that this version of Torpor writes.
            ServiceClosed: the daemon stops.
        """
        loop = asyncio.get_running_loop()
        left = threading.Event()

        def report(done: int, total: int) -> None:
            self._require_wanted(left)
            loop.call_soon_threadsafe(emit, ProgressEvent("analyze", done, total))

        def work() -> str:
            self._require_wanted(left)
            return self._analyze(row, kind or DEFAULT_KIND, labels, report)

        try:
            async with self._turn:
                return await self._threads.on_io(work)
        finally:
            left.set()

    def _require_wanted(self, left: threading.Event) -> None:
        if left.is_set() or self._closing.is_set():
            raise ServiceClosed("The daemon stops, or no client waits for this analysis any more; ask again.")

    def _analyze(
        self, row: VersionInfo, kind: str, labels: Sequence[str] | None, report: Callable[[int, int], None]
    ) -> str:
        with ExitStack() as stack:
            reader = stack.enter_context(self._store.open_session(row.uri, row.bundle_id))
            parent, why = self._open_parent(reader)
            if parent is not None:
                stack.enter_context(parent)
            document = analyze(reader, parent, kind=kind, labels=labels, why_no_parent=why, on_progress=report)
        return encode(document).decode()

    def _open_parent(self, reader: BundleReader) -> tuple[BundleReader | None, str]:
        if reader.manifest.parent is None:
            return None, "it has no parent"
        try:
            parent = self._store.open_bundle(reader.manifest.parent)
        except BundleMissing:
            return None, _GONE
        row = self._store.find_session(parent.manifest.uri, parent.manifest.version)
        if row is None or row.bundle_id != parent.bundle_id:  # deleted, and its file kept for other versions
            parent.close()
            return None, _GONE
        return parent, ""

    def close(self) -> None:
        """Begin none, and stop a running one at its next step; it is a read that the store's threads wait for."""
        self._closing.set()
