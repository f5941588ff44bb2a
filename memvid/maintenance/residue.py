"""The files in a store's folder that are no bundle files, and whether they hold bytes of a session.

Owns the list of the store's names, and the verdict on each file beside the bundles. Changes nothing.

Rules:
- A thing that is no plain file of ours, cannot be read, or is not of the store may hold anything: it is reported.
- Innocent are only: an empty file; a store's own file that others answer for (index, marks); a whole bundle of another
  session with no frames but its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..disk import durable
from ..disk.lock import LOCK_NAME
from ..disk.paths import closing_fd, list_names, open_file, open_folder, stat_name
from ..errors import StoreError
from ..folder.folder import list_strangers
from ..folder.group_file import GROUP_FILE
from ..folder.journal import TURNS_FILE
from ..folder.marks import MARKS_FILE
from ..folder.scrub_mark import SCRUB_FILE
from ..folder.store_file import ABSENT, BUNDLES, INCOMING, JOURNAL, QUARANTINE, STORE_FILE
from ..format.bundle import BundleFile
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..index.absent import AbsentNotes
from ..index.index_file import INDEX_FILES
from ..index.page_sums import SUMS_FILE
from ..uri import SessionUri
from ..writing.core import StoreCore

_RATES_FILE: Final = "rates.json"
"""Earlier versions of Torpor measured their machine into it. It names no session and holds no token."""
_OWN_FILES: Final = frozenset(
    {STORE_FILE, LOCK_NAME, MARKS_FILE, _RATES_FILE, SCRUB_FILE, GROUP_FILE, SUMS_FILE, *INDEX_FILES}
)
_SET_ASIDE_TEXT: Final = re.compile(
    rf"({re.escape(MARKS_FILE)}|{re.escape(STORE_FILE)})\.[0-9]+|{re.escape(TURNS_FILE)}\.aside(\.[0-9]+)?", re.ASCII
)
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Remain:
    """A file or folder that holds bytes of a session, or may hold some.

    `folder` is the store's own folder around it, "" for any other place. `why` says why the content is unknown, as a
    sentence without its end; None if the session's bytes are in it.
    """

    path: str
    folder: str
    name: str
    size_bytes: int
    why: str | None


def find_remains(core: StoreCore, uri: SessionUri) -> list[Remain]:
    """Look through everything in the store's folder but its bundles' files, its index and its marks."""
    found: list[Remain] = []
    root = core.path
    for name in list_names(core.folder.root_fd, root):
        if name in _OWN_FILES:
            continue
        if name in (INCOMING, QUARANTINE):
            found += _in_folder(core.folder.root_fd, name, root, uri)
        elif name == ABSENT:
            found += _notes(core, uri)
        elif name == JOURNAL:  # its own file is written anew without the session
            found += [one for one in _in_folder(core.folder.root_fd, JOURNAL, root, uri) if one.name != TURNS_FILE]
        elif name != BUNDLES:
            found += _judged(core.folder.root_fd, name, f"{root}/{name}", "", uri)
    for path in (*list_strangers(core.folder), *_hidden_behind_live_ones(core, uri)):
        found += _stranger(core, path, uri)
    bundles_fd, bundles = core.folder.bundles_fd, core.folder.bundles_path
    for name in filter(durable.TEMP_NAME.fullmatch, list_names(bundles_fd, bundles)):
        if not durable.is_plain(bundles_fd, name):  # a plain one is being written, or goes as a leftover
            found += _judged(bundles_fd, name, f"{bundles}/{name}", "", uri)
    return found


def _in_folder(parent_fd: int, folder: str, root: str, uri: SessionUri) -> Iterator[Remain]:
    path = f"{root}/{folder}"
    try:
        fd = open_folder(parent_fd, folder, path)
    except FileNotFoundError:
        return
    except StoreError as error:
        yield Remain(path, "", folder, 0, _reason(error))
        return
    with closing_fd(fd):
        for name in list_names(fd, path):
            yield from _judged(fd, name, f"{path}/{name}", folder, uri)


def _notes(core: StoreCore, uri: SessionUri) -> Iterator[Remain]:
    """The notes of this session without a row, and those whose session is unknown: a delete removes a session's notes,
    but not while others can write in the folder."""
    root = core.path
    try:
        noted, _ = AbsentNotes(core.folder.root_fd, root).load()
    except StoreError as error:
        yield Remain(f"{root}/{ABSENT}", "", ABSENT, 0, _reason(error))
        return
    told = {f"{bundle_id.hex()}.json": one for bundle_id, one in noted.items()}
    for one in _in_folder(core.folder.root_fd, ABSENT, root, uri):
        note = told.get(one.name)
        if note is None:
            yield one
        elif note.row is not None and note.row.uri == uri and not core.index.knows(note.bundle_id):
            yield dataclasses.replace(one, why=None)


def _hidden_behind_live_ones(core: StoreCore, uri: SessionUri) -> Iterator[str]:
    """Retired files of other sessions' bundles beside their live files: no other check looks into these."""
    own = frozenset(core.index.bundles_of(uri))  # which take their retired files with them
    for bundle_id, suffix in core.folder.list_bundles().items():
        if suffix == LIVE_SUFFIX and bundle_id not in own and core.folder.stamp_of(bundle_id, RETIRED_SUFFIX):
            yield core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)


def _stranger(core: StoreCore, path: str, uri: SessionUri) -> Iterator[Remain]:
    """A file under bundles/ that no version is read from."""
    inside = os.path.relpath(path, core.folder.bundles_path)
    prefix, name = os.path.split(inside)
    if not prefix:
        yield from _judged(core.folder.bundles_fd, name, path, "", uri)
        return
    with contextlib.suppress(FileNotFoundError), core.folder.prefix_folder(prefix) as folder_fd:
        yield from _judged(folder_fd, name, path, "", uri)


def _judged(folder_fd: int, name: str, path: str, folder: str, uri: SessionUri) -> Iterator[Remain]:
    """A name with the verdict on it; nothing for an innocent one."""
    try:
        status = stat_name(folder_fd, name, path)
        if stat.S_ISDIR(status.st_mode):
            if not _is_empty(folder_fd, name, path):
                yield Remain(path, "", name, 0, "it is a folder, and a store has none there")
            return
        size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
        fd = open_file(folder_fd, name, os.O_RDONLY, path)
    except FileNotFoundError:
        return  # it is gone, or was taken
    except StoreError as error:
        yield Remain(path, folder, name, 0, _reason(error))
        return
    if not size_bytes:
        os.close(fd)
        return
    holds, why = _mentions(fd, uri) if folder and _SET_ASIDE_TEXT.fullmatch(name) else _verdict(fd, path, uri)
    if holds or why:
        yield Remain(path, folder, name, size_bytes, None if holds else why)


def _verdict(fd: int, path: str, uri: SessionUri) -> tuple[bool, str]:
    """Whether a file holds a version of a session; if not, why that is unknown, or "". Closes `fd`."""
    try:
        with BundleFile(fd, path, None) as file:
            if file.manifest is None:
                return False, "it holds blocks and does not say whose they are"
            if file.manifest.uri == uri:
                return True, ""
            if file.manifest.tells_of(uri):
                return False, f"it is a version of {file.manifest.uri}, and names it as its origin"
            own = {entry.id for entry in file.manifest.blocks}
            return False, "" if own.issuperset(file.frames) else "it holds blocks of other sessions than its own"
    except StoreError as error:
        return False, f"it is no whole bundle ({error.code})"


def _mentions(fd: int, uri: SessionUri) -> tuple[bool, str]:
    """As `_verdict`, for marks, a store.json or a journal that were set aside: they may name sessions, and cannot be
    parsed."""
    name, tail = uri.name.encode(), b""
    with closing_fd(fd):
        try:
            while chunk := os.read(fd, _CHUNK_BYTES):
                if name in tail + chunk:
                    return False, f"it was set aside, and has the text {uri.name} in it"
                tail = chunk[-len(name) :]
            return False, ""
        except OSError as error:
            return False, os.strerror(error.errno or 0)


def _reason(error: StoreError) -> str:
    """The reason alone, without the message's path and advice."""
    return str(error.details.get("reason") or error.message.rstrip("."))


def _is_empty(folder_fd: int, name: str, path: str) -> bool:
    try:
        fd = open_folder(folder_fd, name, path)
    except StoreError:
        return False
    with closing_fd(fd):
        return not list_names(fd, path)
