"""STORE/incoming: a client of a running daemon puts an exported file here, and the daemon takes it.

Owns the folder's name and the putting in. A client hands over an id and never a path, so no text of a client is joined
to a folder. Needs no lock: a file gets its name once it is complete, flushed and checked, and the store checks it
again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final

from ..disk import durable
from ..disk.paths import closing_fd, open_file, open_folder, opened_folder, read_up_to, stat_open
from ..errors import BundleMissing
from ..folder.folder import StoreFolder
from ..folder.store_file import INCOMING, load_store_uuid, open_existing_root
from ..limits import CHUNK_BYTES
from ..uri import SessionUri
from .import_checks import ExportedFile, open_exported, require_whole

SUFFIX: Final = ".mvb"


def hand_over(store_path: str, source_path: str) -> str:
    """Put a checked copy of an exported file into a store's folder `incoming`, durably; its bundle id.

    Raises:
        StoreIoError, NoSpace: it cannot be read or written.
        Corruption, LimitExceeded: it is no whole version with all its blocks, or would unfold to far more than a
            session; nothing is left behind.
    """
    path = f"{store_path}/{INCOMING}"
    with _folder_of(store_path, make=True) as folder_fd, durable.TempFile(folder_fd, path) as temp:
        _copy(source_path, temp)
        temp.sync()
        with ExportedFile(temp.duplicate(), source_path) as file:
            require_whole(file)
        temp.publish(file.bundle_id + SUFFIX, replacing=True)
    return file.bundle_id


def take_back(store_path: str, bundle_id: str) -> None:
    """Remove a handed-over file, if it is there still."""
    with contextlib.suppress(FileNotFoundError), _folder_of(store_path) as folder_fd:
        durable.remove(folder_fd, bundle_id + SUFFIX, f"{store_path}/{INCOMING}")


def open_waiting(folder: StoreFolder, bundle_id: str) -> tuple[int, str]:
    """Open a file handed over to an open store: (descriptor, path for messages). Raises BundleMissing, UnsafePath."""
    return _open_in(opened_folder(folder.root_fd, INCOMING, f"{folder.path}/{INCOMING}"), folder.path, bundle_id)


def remove_taken(folder: StoreFolder, bundle_id: str) -> None:
    """Durably remove a file that an open store has taken. Raises StoreIoError, DurabilityLost."""
    path = f"{folder.path}/{INCOMING}"
    with contextlib.suppress(FileNotFoundError), opened_folder(folder.root_fd, INCOMING, path) as folder_fd:
        if durable.remove(folder_fd, bundle_id + SUFFIX, path):
            durable.sync_folder(folder_fd, path)


def owner_of(store_path: str, bundle_id: str) -> SessionUri:
    """The session of a handed-over file. Raises BundleMissing, Corruption."""
    fd, path = _open_in(_folder_of(store_path), store_path, bundle_id)
    with ExportedFile(fd, path, bundle_id) as file:
        return file.manifest.uri


def _open_in(incoming: AbstractContextManager[int], store_path: str, bundle_id: str) -> tuple[int, str]:
    name = bundle_id + SUFFIX
    path = f"{store_path}/{INCOMING}/{name}"
    try:
        with incoming as folder_fd:
            return open_file(folder_fd, name, os.O_RDONLY, path), path
    except FileNotFoundError as error:
        raise BundleMissing(
            f"Nothing was handed over as {path}. Put the file there first, complete, and ask again.",
            bundle_id=bundle_id,
            path=path,
        ) from error


def _copy(source_path: str, temp: durable.TempFile) -> None:
    with closing_fd(open_exported(source_path)) as fd:
        temp.whole_bytes = lambda: stat_open(fd, source_path).st_size
        while data := read_up_to(fd, CHUNK_BYTES, source_path):
            temp.append([data])


@contextlib.contextmanager
def _folder_of(store_path: str, *, make: bool = False) -> Iterator[int]:
    """The folder, open for the block. Raises FileNotFoundError, NoStore, UnsafePath."""
    path = f"{store_path}/{INCOMING}"
    with closing_fd(open_existing_root(store_path)) as root_fd:
        load_store_uuid(root_fd, store_path)
        if make:
            durable.make_folder(root_fd, INCOMING, store_path)
        folder_fd = open_folder(root_fd, INCOMING, path)
    with closing_fd(folder_fd):
        yield folder_fd
