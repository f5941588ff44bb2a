"""A store without its store.json: recognised by its bundles, and the file made again.

Owns what a folder must hold to be recognised, and where its uuid is taken from: the marks, for they are truth and name
it, else the index, else a new one, with which the index is made anew. Only a repair asks for it.
"""

from __future__ import annotations

import os
import uuid

from .errors import StoreError
from .folder import STORE_FILE, has_store_file, looks_like_store, no_store, open_existing_root, write_store_file
from .index import Index
from .lock import StoreLock
from .marks import MARKS_FILE, uuid_in_marks
from .paths import list_names
from .records import Action


def lacks_store_file(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a store but for its store.json. Raises NoStore, UnsafePath, StoreIoError."""
    store_path = os.path.abspath(os.fspath(path))
    root_fd = open_existing_root(store_path)
    try:
        return not has_store_file(root_fd, store_path) and looks_like_store(root_fd, store_path)
    finally:
        os.close(root_fd)


def restore_store_file(path: str | os.PathLike[str], *, dry_run: bool = False) -> Action:
    """Make the store.json of a store that lacks it, under the store's lock, or say that this would be done.

    Raises:
        NoStore: nothing tells that the folder is a store.
        StoreLocked, NoSpace, StoreIoError, DurabilityLost
    """
    store_path = os.path.abspath(os.fspath(path))
    root_fd = open_existing_root(store_path)
    try:
        if not looks_like_store(root_fd, store_path):
            raise no_store(store_path)
        if not dry_run:
            lock = StoreLock(root_fd, store_path)
            try:
                if not has_store_file(root_fd, store_path):
                    marked = MARKS_FILE in list_names(root_fd, store_path)
                    write_store_file(root_fd, store_path, _uuid_of(root_fd, store_path), marked=marked)
            finally:
                lock.close()
    finally:
        os.close(root_fd)
    reason = "It was missing; the folder has bundles, so it is a store."
    return Action("rewrite", f"{store_path}/{STORE_FILE}", None, None, 0, reason)


def _uuid_of(root_fd: int, store_path: str) -> str:
    for ask in (uuid_in_marks, Index.uuid_in):
        try:
            found = ask(root_fd, store_path)
        except StoreError:
            continue  # what cannot be read tells nothing; repair sees to it once there is a store again
        if found is not None:
            return found
    return str(uuid.uuid4())
