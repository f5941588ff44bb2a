"""What lies in a store's folder beside its manifests and packs, and whether it holds bytes of a session.

Owns the verdict on each such file. Changes nothing.

Rules:
- A thing that is no plain file of ours, cannot be read, or is not of the store may hold anything: that is told.
- Innocent are only: an empty file; a file of the store that others answer for (index, marks, diary); a sound manifest
  of another session; a sound pack of which nothing is idle (`Needed.idle_in`). What was handed over to become a version
  (`incoming`) counts as needed by that one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from ..disk.durable import TEMP_NAME
from ..disk.lock import LOCK_NAME
from ..disk.paths import (
    closing_fd,
    list_names,
    open_file,
    opened_folder,
    read_at,
    read_up_to,
    stat_name,
    stat_open,
    undoing,
)
from ..errors import StoreError
from ..folder.diary import DIARY_FILES
from ..folder.journal import TURNS_FILE
from ..folder.marks import MARKS_FILE
from ..folder.scrub_mark import SCRUB_FILE
from ..folder.store_file import BUNDLES, DAMAGED, INCOMING, JOURNAL, PACKS, STORE_FILE, VERSIONS
from ..format.manifest import Manifest, decode_manifest, map_tells_of, read_manifest
from ..format.sealing import BUNDLE_MAGIC, MANIFEST_MAGIC, PACK_MAGIC
from ..format_1 import open_any
from ..index.index import COUNT_NAME, INDEX_FILE
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.needs import Needed

_OWN: Final = frozenset(
    (
        *(STORE_FILE, LOCK_NAME, MARKS_FILE, SCRUB_FILE, INDEX_FILE, *DIARY_FILES),
        *(VERSIONS, PACKS, BUNDLES, DAMAGED, INCOMING, JOURNAL),
    )
)
_MANIFEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEXT: Final = re.compile(r"\.json(\.[0-9]+)?\Z", re.ASCII)
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Remain:
    """A file or folder that holds bytes of a session, or may hold some.

    `folder` is the store's own folder around it from which it may be removed; "": a person has to. `why` says why the
    content is unknown, as a sentence without its end; None if the session's bytes are in it.
    """

    path: str
    folder: str
    name: str
    size_bytes: int
    why: str | None


def find_remains(core: StoreCore, uri: SessionUri, needed: Needed) -> Iterator[Remain]:
    """Look through everything in the store's folder but its manifests and packs, its index, its marks and its journal.
    needed: by all other versions. Raises StoreIoError."""
    judge = _Judge(uri, needed)
    root_fd, root = core.folder.root_fd, core.path
    for name in list_names(root_fd, root):
        if name not in _OWN and not COUNT_NAME.fullmatch(name) and not TEMP_NAME.fullmatch(name):
            yield from judge.file(root_fd, name, f"{root}/{name}", "")
    for folder in (DAMAGED, INCOMING, JOURNAL):
        path = f"{root}/{folder}"
        try:
            with opened_folder(root_fd, folder, path) as fd:
                for name in list_names(fd, path):
                    if folder != INCOMING and TEMP_NAME.fullmatch(name):
                        continue  # a leftover is gone, and what is being written tells of others
                    if (folder, name) == (JOURNAL, TURNS_FILE) and _is_open_journal(core):
                        continue  # it was written anew without the session
                    yield from judge.file(fd, name, f"{path}/{name}", folder)
        except FileNotFoundError:
            continue
        except StoreError as error:  # others may write in it, say
            yield Remain(path, "", folder, 0, error.message.rstrip("."))
    for path in core.folder.list_strangers():
        inside, name = os.path.split(os.path.relpath(path, root))
        top, _, prefix = inside.partition("/")
        with opened_folder(root_fd, top, f"{root}/{top}") as top_fd:
            if not prefix:
                yield from judge.file(top_fd, name, path, "")
                continue
            with opened_folder(top_fd, prefix, f"{root}/{inside}") as fd:
                yield from judge.file(fd, name, path, "")


def _is_open_journal(core: StoreCore) -> bool:
    """Whether the file with the journal's name is the one that this store writes; a reader writes none."""
    return not core.has_lock or TURNS_FILE not in core.journal.strange()


class _Judge:
    def __init__(self, uri: SessionUri, needed: Needed) -> None:
        self._uri = uri
        self._needed = needed

    def file(self, folder_fd: int, name: str, path: str, folder: str) -> Iterator[Remain]:
        """A name with the verdict on it; nothing for an innocent one."""
        size_bytes = 0
        try:
            status = stat_name(folder_fd, name, path)
            if stat.S_ISDIR(status.st_mode):
                yield Remain(path, "", name, 0, "it is a folder, and a store has none there")
                return
            size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
            if stat.S_ISREG(status.st_mode) and not size_bytes:
                return
            holds, why = self._verdict(open_file(folder_fd, name, os.O_RDONLY, path), path, folder)
        except FileNotFoundError:
            return  # it went meanwhile
        except StoreError as error:
            holds, why = False, str(error.details.get("reason") or error.message.rstrip("."))
        if holds or why:
            yield Remain(path, folder, name, size_bytes, None if holds else why)

    def _verdict(self, fd: int, path: str, folder: str) -> tuple[bool, str]:
        """Whether a file holds bytes of the session; if not, why that is unknown, or "". Closes `fd`."""
        with undoing(lambda: os.close(fd)):
            magic = read_at(fd, 0, min(len(PACK_MAGIC), stat_open(fd, path).st_size), path)
        if magic in (PACK_MAGIC, BUNDLE_MAGIC):
            with open_any(fd, path) as file:
                encoded = file.encoded_manifest()
                manifest = decode_manifest(encoded, path) if encoded else None
                idle = self._needed.idle_in(file)
                if manifest is not None and folder == INCOMING:
                    idle -= {entry.id for entry in manifest.blocks}
                return self._of(manifest, idle)
        with closing_fd(fd):
            name = _MANIFEST.match(os.path.basename(path))
            if magic == MANIFEST_MAGIC and name:
                return self._of(read_manifest(fd, path, name[0]), set())
            if _mentions(fd, self._uri.name.encode(), path):
                return False, f"it has the text {self._uri.name} in it"
            return False, "" if _TEXT.search(path) else "it is no file of a store"

    def _of(self, manifest: Manifest | None, idle: Collection[bytes]) -> tuple[bool, str]:
        if manifest is not None and manifest.uri == self._uri:
            return True, ""
        if manifest is not None and map_tells_of(manifest.session, self._uri):
            return False, f"it is a version of {manifest.uri}, and names it as its origin"
        return bool(idle), ""


def _mentions(fd: int, text: bytes, path: str) -> bool:
    tail = b""
    while chunk := read_up_to(fd, _CHUNK_BYTES, path):
        if text in tail + chunk:
            return True
        tail = chunk[-len(text) :]
    return False
