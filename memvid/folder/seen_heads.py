"""STORE/heads.json: how new the heads of remotes were when this store last saw them, so that an older one is refused.

An object store that is put back to an earlier state, or that lies, gives a head as it was: whose session it is, and
which versions it has, would be true no more. A head has a revision that only grows.

Rules:
- The file has digests of names alone, so it tells none.
- What is seen is remembered, and written with the next head that this store changes. Where the disk takes no change,
  the one after that writes it.
- The file is never needed: without it, or if it is damaged, each head counts as seen for the first time.
- Full, it lets go of what was noted longest ago.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, Final

from blake3 import blake3

from ..answers import Finding
from ..disk import durable
from ..disk.paths import read_small
from ..disk.sealed_json import SealedFormat
from ..errors import HeadReplayed, NoSpace, StoreError, StoreIoError
from ..limits import MAX_SEEN_HEADS
from ..uri import SessionUri
from .folder import StoreFolder

HEADS_FILE: Final = "heads.json"
CANNOT_BE_TOLD: Final = "cannot_be_told"
_DIGEST_BYTES: Final = 16
_LINE_BYTES: Final = 2 * 2 * _DIGEST_BYTES + 26
"""Two digests in hex, and the largest revision."""

_FORMAT: Final = SealedFormat("torpor.heads", 1, MAX_SEEN_HEADS * _LINE_BYTES + 1024, 4 * MAX_SEEN_HEADS + 64)
_Key = tuple[str, str]
"""Digests of a session's URI and of a remote's URL."""


class SeenHeads:
    """The newest revision seen of each head. Safe from several threads. The file is read at the first use.

    url: of a remote. `save` and `forget` need the store's lock.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: dict[_Key, int] | None = None
        self._asked: set[str] = set()  # digests of the URLs of remotes that are asked
        self._is_saved = True

    @property
    def _revisions(self) -> dict[_Key, int]:
        """What was noted last stands last. Within `_lock`."""
        if self._loaded is None:
            self._loaded = _load(self._folder)
        return self._loaded

    def newest(self, url: str, uri: SessionUri) -> int:
        """The newest revision seen of a head; 0: none."""
        with self._lock:
            return self._revisions.get(_key(url, uri), 0)

    def require_new(self, url: str, uri: SessionUri, revision: int | None, seen: int) -> None:
        """Refuse a head that is older than one seen before. revision: None: there is no head. seen: the newest one
        before this one was asked for; another thread may have seen a newer one meanwhile. Raises HeadReplayed."""
        if (revision or 0) >= seen:
            return
        found = "there is none now" if revision is None else f"this one has revision {revision}"
        forget = f"If another machine has forgotten the session, forget it here, too (`torpor forget {uri}`). "
        raise HeadReplayed(
            f"The head of {uri} in {url} had revision {seen} when it was seen last, and {found}. Newer versions may be "
            f"missing there, so nothing is done with it. Put the newer head back. {forget if revision is None else ''}"
            "If the remote was put back to an earlier state on purpose, stop the daemon and remove "
            f"{self._folder.path_of(HEADS_FILE)}.",
            session=str(uri),
            seen=seen,
            found=revision,
        )

    def note(self, url: str, uri: SessionUri, revision: int) -> None:
        """A head was seen, or has been written."""
        key = _key(url, uri)
        with self._lock:
            revisions = self._revisions
            if revision <= revisions.get(key, 0):
                return
            revisions.pop(key, None)
            revisions[key] = revision
            while len(revisions) > MAX_SEEN_HEADS:
                del revisions[next(iter(revisions))]
            self._is_saved = False

    def save(self) -> None:
        """Write what was noted since the last time, if anything. Raises DurabilityLost."""
        with self._lock, contextlib.suppress(NoSpace, StoreIoError):
            if not self._is_saved:
                self._write(self._revisions)

    def knows(self, uri: SessionUri) -> bool:
        """Whether a head of the session was seen."""
        with self._lock:
            return any(of == _digest(str(uri)) for of, _ in self._revisions)

    def why_alone(self) -> str | None:
        """What to tell at the start of a daemon without a remote; None: the store has never had one."""
        with self._lock:
            if not self._revisions:
                return None
        return (
            "This store has had a remote, and the daemon has none: its sessions go on here alone, and diverge from "
            "what other machines do with them. Start it with `torpor serve --remote URL`. If that remote is given up, "
            f"remove {self._folder.path_of(HEADS_FILE)} while no daemon runs."
        )

    def ask(self, url: str) -> None:
        """From now on who removes a session asks this remote first."""
        self._asked.add(_digest(url))

    def left_elsewhere(self, uri: SessionUri) -> tuple[Finding, ...]:
        """What to tell of a session that goes here: that a remote which is not asked has had it."""
        with self._lock:
            if not any(of == _digest(str(uri)) and place not in self._asked for of, place in self._revisions):
                return ()
        path = self._folder.path_of(HEADS_FILE)
        message = (
            f"A remote had {uri} when this store asked it last. It is not asked now, and may have it still. A daemon "
            f"with that remote removes it there, too: `torpor serve --remote URL`, then `torpor forget {uri}`."
        )
        return (Finding(path, CANNOT_BE_TOLD, message),)

    def forget(self, uri: SessionUri) -> None:
        """Leave nothing of a session. Raises NoSpace, StoreIoError: the file still has it; DurabilityLost."""
        with self._lock:
            kept = {key: revision for key, revision in self._revisions.items() if key[0] != _digest(str(uri))}
            if len(kept) < len(self._revisions):
                self._write(kept)
                self._loaded = kept

    def _write(self, revisions: Mapping[_Key, int]) -> None:
        data = _FORMAT.encode({"heads": [[*key, revision] for key, revision in revisions.items()]})
        durable.write_file(self._folder.root_fd, HEADS_FILE, data, self._folder.path, replacing=True)
        self._is_saved = True


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest(_DIGEST_BYTES)


def _key(url: str, uri: SessionUri) -> _Key:
    return _digest(str(uri)), _digest(url)


def _load(folder: StoreFolder) -> dict[_Key, int]:
    path = folder.path_of(HEADS_FILE)
    try:
        heads = _FORMAT.decode(read_small(folder.root_fd, HEADS_FILE, _FORMAT.max_bytes, path), path).get("heads")
        return dict(map(_line, heads if isinstance(heads, list) else []))
    except (OSError, StoreError, ValueError, TypeError, RecursionError):
        return {}


def _line(line: Any) -> tuple[_Key, int]:
    of, place, revision = line
    if type(revision) is not int:
        raise ValueError("no revision")
    return (of, place), revision
