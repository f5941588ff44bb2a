"""A store whose store.json is missing or damaged: how it is recognised, and how the file is made again.

The uuid comes from the marks, which are truth and name it; else from the index; else it is new, and the index is made
anew with it. Marks, also in quarantine, and any store.json that was set aside, tell that there were marks.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from ..disk.lock import StoreLock
from ..disk.paths import closing_fd, list_names
from ..errors import CorruptStoreFile, StoreError
from ..folder import quarantine
from ..folder.folder import StoreFolder
from ..folder.marks import MARKS_FILE, uuid_in_marks
from ..folder.store_file import (
    STORE_FILE,
    has_store_file,
    load_store_file,
    looks_like_store,
    no_store,
    open_existing_root,
    read_store_file,
)
from ..format.records import Action
from ..index.index import Index
from ..limits import MAX_STORE_JSON_BYTES

_SAYS_MARKED = b'"marked":true'


def lacks_store_file(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a store but for its store.json, which is missing or damaged. Raises NoStore, NotAStore,
    UnsupportedFormat, UnsafePath, StoreIoError."""
    store_path = os.path.abspath(os.fspath(path))
    with closing_fd(open_existing_root(store_path)) as root_fd:
        return _what_is_wrong(root_fd, store_path) is not None and _is_a_store(root_fd, store_path)


def restore_store_file(path: str | os.PathLike[str], *, dry_run: bool = False) -> tuple[Action, ...]:
    """Make the missing store.json of a store, under the store's lock, or with `dry_run` plan it. A damaged one goes to
    quarantine; a sound one stays.

    Raises:
        NoStore: nothing shows that the folder is a store.
        NotAStore, UnsupportedFormat, UnsafePath, StoreLocked, NoSpace, StoreIoError, DurabilityLost
    """
    store_path = os.path.abspath(os.fspath(path))
    with contextlib.ExitStack() as stack:
        root_fd = open_existing_root(store_path)
        stack.callback(os.close, root_fd)
        if not _is_a_store(root_fd, store_path):
            raise no_store(store_path)
        if not dry_run:
            lock = StoreLock(root_fd, store_path)
            stack.callback(lock.close)
        wrong = _what_is_wrong(root_fd, store_path)
        if wrong is None:
            return ()
        actions = actions_for(root_fd, store_path, wrong)
        if not dry_run:
            folder = StoreFolder(store_path, root_fd, _uuid_of(root_fd, store_path))
            stack.callback(os.close, folder.bundles_fd)
            make_store_file(folder)
        return actions


def actions_for(root_fd: int, store_path: str, wrong: str) -> tuple[Action, ...]:
    """The actions of `make_store_file` on a store.json with this fault."""
    path = f"{store_path}/{STORE_FILE}"
    rewrite = Action("rewrite", path, None, None, 0, f"{wrong} It is made again from what else the store holds.")
    if not has_store_file(root_fd, store_path):
        return (rewrite,)
    return Action("quarantine", path, None, None, 0, wrong), rewrite


def make_store_file(folder: StoreFolder) -> None:
    """Make store.json anew with the folder's uuid, under the store's lock; an old one goes to quarantine first. A crash
    between the two leaves a store without store.json.

    Raises:
        NoSpace, StoreIoError, DurabilityLost, UnsafePath
    """
    quarantine.move_file(folder, STORE_FILE)
    folder.write_store_file(marked=_were_marks(folder))


def _what_is_wrong(root_fd: int, store_path: str) -> str | None:
    """The fault of store.json as a sentence; None for a sound one. Raises NotAStore, UnsupportedFormat, UnsafePath,
    StoreIoError."""
    if not has_store_file(root_fd, store_path):
        return "It is missing."
    try:
        load_store_file(root_fd, store_path)
    except CorruptStoreFile as error:
        return f"It is damaged: {error.details['reason']}."
    return None


def _is_a_store(root_fd: int, store_path: str) -> bool:
    return looks_like_store(root_fd, store_path) or any(_told(root_fd, store_path))


def _uuid_of(root_fd: int, store_path: str) -> str:
    """If marks and index are of two stores: the one with the uuid that a damaged store.json still shows."""
    told = list(_told(root_fd, store_path))
    text = b""
    with contextlib.suppress(FileNotFoundError):
        text = read_store_file(root_fd, store_path)
    return next((one for one in told if one.encode() in text), told[0] if told else str(uuid.uuid4()))


def _told(root_fd: int, store_path: str) -> Iterator[str]:
    for ask in (uuid_in_marks, Index.uuid_in):
        try:
            found = ask(root_fd, store_path)
        except StoreError:
            continue  # an unreadable file tells nothing; repair handles it once there is a store again
        if found is not None:
            yield found


def _were_marks(folder: StoreFolder) -> bool:
    """Whether there ever was a file of marks: a wrong store.json would let a prune remove marked versions."""
    if MARKS_FILE in list_names(folder.root_fd, folder.path) or quarantine.places_of(folder, MARKS_FILE):
        return True
    return any(_SAYS_MARKED in text for text in _files_set_aside(folder))


def _files_set_aside(folder: StoreFolder) -> Iterator[bytes]:
    for place in quarantine.places_of(folder, STORE_FILE):
        with contextlib.suppress(StoreError, OSError):
            with closing_fd(quarantine.open_name(folder, os.path.basename(place))[0]) as fd:
                text = os.read(fd, MAX_STORE_JSON_BYTES)
            yield text
