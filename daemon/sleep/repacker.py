"""Repacks in the background: after sleeps, one session at a time, while no sleep is being written.

The store does the work: a repack blocks no sleep or wake, and may stop between any two steps. An error fails no
request: it is logged, and the repack is tried again after the session's next sleep.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ...memvid.errors import SessionNotFound, StoreError
from ...memvid.format.records import Receipt
from ...memvid.maintenance.repack_plan import RepackPolicy
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from .disk_space import Stop, Way

_LOG = logging.getLogger(__name__)


class Repacker:
    """Keeps the number of packs that a wake opens low. Safe from several threads."""

    def __init__(self, store: Store, policy: RepackPolicy, way: Way) -> None:
        self._store = store
        self._way = way
        self._policy = policy
        # A thread of its own: sleeps, on the writer's thread, must not wait for the copy of a large file.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torpor-repack")
        self._lock = threading.Lock()
        self._due: dict[SessionUri, None] = {}
        self._closing = False

    @contextlib.contextmanager
    def giving_way(self) -> Iterator[None]:
        """While a sleep is written, the running repack stops at its next step; it goes on afterwards."""
        try:
            with self._way.sleeping():
                yield
        finally:
            with self._lock:  # a stopped repack is due before it checks whether the sleep has ended
                if self._due and not self._must_stop():
                    self._thread.submit(self._work)

    def consider(self, receipt: Receipt) -> None:
        """Repack the session of a sleep, if its newest version is spread over many packs. Called within the sleep's
        `giving_way`; it begins when that ends."""
        if self._store.count_packs(receipt.entries) > self._policy.max_packs:
            with self._lock:
                self._due[receipt.uri] = None

    def close(self) -> None:
        """Wait for the running step, and end the thread. A later sleep does the remaining steps."""
        with self._lock:
            self._closing = True
        self._thread.shutdown(cancel_futures=True)

    def _must_stop(self) -> bool:
        return self._closing or self._way.has_sleeps

    def _work(self) -> None:
        while (uri := self._next()) is not None:
            stop = Stop(self._must_stop)
            with self._way.repacking():
                self._repack(uri, stop)
            if stop.was_told:
                with self._lock:
                    self._due[uri] = None

    def _next(self) -> SessionUri | None:
        with self._lock:
            if self._must_stop() or not self._due:
                return None
            uri = next(iter(self._due))
            del self._due[uri]
            return uri

    def _repack(self, uri: SessionUri, stop: Stop) -> None:
        try:
            report = self._store.repack(uri, policy=self._policy, should_stop=stop)
            for problem in report.problems:
                _LOG.warning("repacking %s: %s: %s", uri, problem.code, problem.message)
        except SessionNotFound:
            pass  # deleted meanwhile
        except StoreError as error:
            _LOG.warning("repacking %s: %s: %s", uri, error.code, error.message)
        except Exception:  # noqa: BLE001 - a bug here must not end the thread for all sessions
            _LOG.exception("repacking %s", uri)
