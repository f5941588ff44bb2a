"""How an empty folder becomes a store."""

from __future__ import annotations

import uuid

from ..disk.paths import opened_folder
from .marks import Marks, encode_marks, write_marks
from .store_file import PACKS, create_folders, write_store_file


def create_store(root_fd: int, path: str, store_uuid: str | None = None) -> str:
    """Make an empty folder a store, under its lock; store.json comes last, so that a crash leaves no half store.
    store_uuid: that of the store it is a backup of. Raises NoSpace, StoreIoError, DurabilityLost."""
    create_folders(root_fd, path)
    store_uuid = store_uuid or str(uuid.uuid4())
    with opened_folder(root_fd, PACKS, f"{path}/{PACKS}") as packs_fd:
        write_marks(root_fd, packs_fd, path, encode_marks(Marks(store_uuid)))
    write_store_file(root_fd, path, store_uuid)
    return store_uuid
