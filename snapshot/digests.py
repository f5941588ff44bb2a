"""Digests of model files, remembered by inode, size and times, so that gigabytes of weights are read once.

The memory is only a cache: a missing, damaged or foreign one counts as empty. The change time is part of the key: an
editor can set a modification time back, but not a change time by ordinary means. A failing disk, a clock that was set
back or a restored image changes bytes behind all of them: a full check reads every file again, and says which of them
had changed unseen.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from ..places import user_folder
from .errors import ModelFilesChanging

FORMAT = "torpor.digests/1"
MAX_REMEMBERED_FILES = 4096
MAX_CACHE_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 8 * 1024 * 1024
# Coarser than the clock of any file system in use (FAT has 2 s).
_CLOCK_GRAIN_NS = 2_500_000_000


def default_cache_path() -> Path:
    """Where digests are remembered by default."""
    return user_folder("cache") / "digests.json"


@dataclass(slots=True)
class DigestCache:
    """File digests as BLAKE3-256 hex, kept in one JSON file at `path`.

    full: read every file anyway; `changed_unseen` then lists those with other bytes under the same stamp.
    """

    path: Path
    full: bool = False
    changed_unseen: list[str] = field(default_factory=list)
    _known: dict[str, list[str | int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = _read(self.path)

    def digest(self, file: Path) -> str:
        """The BLAKE3-256 of the file's bytes, as hex.

        Raises:
            ModelFilesChanging: the file was written to while it was being read.
            OSError: it cannot be read.
        """
        path = str(file.resolve())
        before = _stamp(path)
        known = self._known.get(path)
        believed = known is not None and known[:-1] == before
        if known is not None and believed and not self.full:
            return str(known[-1])
        digest = _hash_file(path)
        if _stamp(path) != before:
            raise ModelFilesChanging(
                f"{file} changed while it was being read. Wait until the copy or download is complete, then try again.",
                path=str(file),
            )
        if known is not None and believed and digest != known[-1]:
            self.changed_unseen.append(path)
        entry = [*before, digest]
        if entry != known and _is_settled(before):
            self._remember(path, entry)
        return digest

    def _remember(self, path: str, entry: list[str | int]) -> None:
        # Keep repairs of other processes; without a readable file there, ours is all there is.
        self._known = _read(self.path) or self._known
        self._known.pop(path, None)
        self._known[path] = entry
        while len(self._known) > MAX_REMEMBERED_FILES:
            del self._known[next(iter(self._known))]
        _write(self.path, self._known)


def _stamp(path: str) -> list[str | int]:
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _is_settled(stamp: list[str | int]) -> bool:
    """Whether a later write must show in the times: a file system's clock may stand still for some milliseconds, so a
    second write at once could leave the same stamp."""
    return time.time_ns() - int(stamp[-1]) > _CLOCK_GRAIN_NS


def _hash_file(path: str) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    buffer = bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher.hexdigest()


def _read(path: Path) -> dict[str, list[str | int]]:
    try:
        if path.stat().st_size > MAX_CACHE_BYTES:
            return {}
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("files"), dict):
        return {}
    return {file: entry for file, entry in stored["files"].items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 6:
        return False
    *stamp, digest = entry
    return all(isinstance(part, int) for part in stamp) and isinstance(digest, str) and len(digest) == 64


def _write(path: Path, known: dict[str, list[str | int]]) -> None:
    # A failure to remember costs a second reading, never an answer, so errors end here.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".digests-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "files": known}, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
