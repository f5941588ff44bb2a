"""A store whose store.json is missing or damaged: how it is recognized, and how the file is made again.

The uuid comes from marks.json, which names it. Where that tells none either, a new one is made, unless the journal has
turns: it is sealed with the uuid, and its turns could not be read any more.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from ..answers import Action
from ..disk import durable
from ..disk.lock import StoreLock
from ..disk.paths import closing_fd, list_names, opened_folder, plain_bytes, whole_path
from ..errors import CorruptStoreFile
from ..folder.damaged import move_aside
from ..folder.marks import MARKS_FILE, uuid_in_marks
from ..folder.store_file import (
    JOURNAL,
    STORE_FILE,
    corrupt_store_file,
    create_folders,
    has_store_file,
    load_store_uuid,
    looks_like_store,
    open_existing_root,
    write_store_file,
)
from .format_1 import encode_old_store_file, uuid_without_store_file


def restore_store_file(path: str | os.PathLike[str], *, dry_run: bool = False) -> tuple[Action, ...]:
    """Make the missing or damaged store.json of a store again, under the store's lock, or with `dry_run` plan it. A
    damaged one moves to `damaged`. Nothing to do for a sound one, and for a folder that nothing shows to be a store.

    Raises:
        CorruptStoreFile: nothing tells its uuid, and there are turns in its journal.
        NoStore, NotAStore, UnsupportedFormat, UnsafePath, StoreLocked, NoSpace, StoreIoError, DurabilityLost
    """
    store_path = whole_path(path)
    with closing_fd(open_existing_root(store_path)) as root_fd:
        if _what_is_wrong(root_fd, store_path) is None or not _is_a_store(root_fd, store_path):
            return ()
        with contextlib.nullcontext() if dry_run else StoreLock(root_fd, store_path):
            wrong = _what_is_wrong(root_fd, store_path)
            if wrong is None:  # somebody else has made it
                return ()
            store_uuid, source = _uuid_of(root_fd, store_path)
            where = " It moves to damaged/." if has_store_file(root_fd, store_path) else ""
            if not dry_run:
                with contextlib.suppress(FileNotFoundError):
                    move_aside(root_fd, store_path, root_fd, STORE_FILE, store_path)
                _write(root_fd, store_path, store_uuid)
            reason = f"{wrong}{where} It is made again, {source}."
            return (Action("rewrite", f"{store_path}/{STORE_FILE}", None, None, 0, reason),)


def _what_is_wrong(root_fd: int, store_path: str) -> str | None:
    """The fault of store.json as a sentence; None for a sound one. Raises NotAStore, UnsupportedFormat, UnsafePath,
    StoreIoError."""
    if not has_store_file(root_fd, store_path):
        return "It is missing."
    try:
        load_store_uuid(root_fd, store_path)
    except CorruptStoreFile as error:
        return f"It is damaged: {error.details['reason']}."
    return None


def _is_a_store(root_fd: int, store_path: str) -> bool:
    return looks_like_store(root_fd, store_path) or uuid_in_marks(root_fd, store_path) is not None


def _write(root_fd: int, store_path: str, store_uuid: str) -> None:
    """Make store.json: one of format 1 for a store that is still to be carried over."""
    if uuid_without_store_file(root_fd, store_path) is not None:
        data = encode_old_store_file(root_fd, store_path, store_uuid)
        durable.write_file(root_fd, STORE_FILE, data, store_path)
        return
    create_folders(root_fd, store_path)
    write_store_file(root_fd, store_path, store_uuid)


def _uuid_of(root_fd: int, store_path: str) -> tuple[str, str]:
    """The store's uuid, and where it comes from, as part of a sentence."""
    store_uuid = uuid_in_marks(root_fd, store_path) or uuid_without_store_file(root_fd, store_path)
    if store_uuid:
        return store_uuid, f"with the uuid in {MARKS_FILE}"
    if _has_turns(root_fd, store_path):
        raise corrupt_store_file(
            store_path,
            f"{MARKS_FILE} does not tell its uuid either, and the turns in {JOURNAL} cannot be read without it (move "
            f"{JOURNAL} away to go on without them)",
        )
    return str(uuid.uuid4()), "with a new uuid, for nothing tells the old one"


def _has_turns(root_fd: int, store_path: str) -> bool:
    path = f"{store_path}/{JOURNAL}"
    try:
        with opened_folder(root_fd, JOURNAL, path) as fd:
            return any(plain_bytes(fd, name) for name in list_names(fd, path))
    except FileNotFoundError:
        return False
