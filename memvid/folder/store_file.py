"""store.json: it makes a folder a store, and tells which one. And how a folder becomes a store."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from dataclasses import dataclass
from typing import Final

from ..disk import durable
from ..disk.lock import LOCK_NAME
from ..disk.paths import (
    FOLDER_MODE,
    closing_fd,
    io_error,
    list_names,
    open_file,
    open_folder,
    open_root,
    opened_folder,
    read_small,
)
from ..disk.sealed_json import SealedFormat, reason_of
from ..errors import CorruptStoreFile, DurabilityLost, NoStore, NotAStore, StoreError
from ..format.layout import BEGINNING
from ..limits import MAX_STORE_JSON_BYTES, MAX_STORE_JSON_NODES

STORE_VERSION: Final = 1
STORE_FILE: Final = "store.json"
BUNDLES: Final = "bundles"
QUARANTINE: Final = "quarantine"
INCOMING: Final = "incoming"
ABSENT: Final = "absent"
JOURNAL: Final = "journal"
_ANOTHER_PLACE: Final = ", or choose another place for the store (--store, $TORPOR_STORE)"

BUNDLE_NAME: Final = re.compile(r"([0-9a-f]{64})(\.mvb|\.mvr)", re.ASCII)
PREFIX_NAME: Final = re.compile(r"[0-9a-f]{2}", re.ASCII)
_FORMAT: Final = SealedFormat("torpor.store", STORE_VERSION, MAX_STORE_JSON_BYTES, MAX_STORE_JSON_NODES)


@dataclass(frozen=True, slots=True)
class StoreFile:
    """store.json: which store this is, and whether there is a file of marks."""

    uuid: str
    marked: bool

    def encode(self) -> bytes:
        return _FORMAT.encode({"uuid": self.uuid, "marked": self.marked})


def load_store_file(root_fd: int, path: str) -> StoreFile:
    """Read store.json.

    Raises:
        NoStore: there is none. NotAStore: that of something else, or there are bundles without one.
        CorruptStoreFile: damaged. UnsupportedFormat: of a later version, and undamaged. UnsafePath, StoreIoError.
    """
    file_path = f"{path}/{STORE_FILE}"
    try:
        data = read_store_file(root_fd, path)
    except FileNotFoundError as error:
        raise (_without_store_file(path) if looks_like_store(root_fd, path) else no_store(path)) from error
    try:
        return _decode(data, file_path)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        if BUNDLES not in list_names(root_fd, path):
            raise NotAStore(
                f"{path} is not a store: there is no folder {BUNDLES}, and {file_path} is not a store's "
                f"({reason_of(error)}). Choose another folder.",
                path=file_path,
            ) from error
        raise corrupt_store_file(path, reason_of(error)) from error


def load_store_uuid(root_fd: int, path: str) -> str:
    """The uuid that store.json tells. Raises as `load_store_file`."""
    return load_store_file(root_fd, path).uuid


def read_store_file(root_fd: int, path: str) -> bytes:
    """The bytes of store.json, or one more than it may have. Raises FileNotFoundError, UnsafePath, StoreIoError."""
    return read_small(root_fd, STORE_FILE, MAX_STORE_JSON_BYTES, f"{path}/{STORE_FILE}")


def _decode(data: bytes, file_path: str) -> StoreFile:
    found = _FORMAT.decode(data, file_path)
    file = StoreFile(str(uuid.UUID(found.get("uuid"))), found.get("marked") is True)
    if file.encode() != data:
        raise ValueError("it is not in the form in which it is written")
    return file


def corrupt_store_file(path: str, reason: str) -> CorruptStoreFile:
    """The error for a damaged store.json, with advice."""
    file_path = f"{path}/{STORE_FILE}"
    return CorruptStoreFile(
        f"{file_path} is damaged: {reason}. Put it back from a backup; without one `torpor repair --store {path}` "
        "makes it again, and nothing is lost.",
        path=file_path,
        reason=reason,
    )


def create_store(root_fd: int, path: str, store_uuid: str | None = None) -> str:
    """Make an empty folder a store, under its lock; store.json comes last, so that a crash leaves no half store.
    `store_uuid`: that of the store it is a backup of."""
    for name in (BUNDLES, QUARANTINE):
        durable.make_folder(root_fd, name, path)
    store_uuid = store_uuid or str(uuid.uuid4())
    with opened_folder(root_fd, BUNDLES, f"{path}/{BUNDLES}") as bundles_fd:
        write_store_file(root_fd, bundles_fd, path, StoreFile(store_uuid, marked=False), replacing=False)
    return store_uuid


def write_store_file(root_fd: int, bundles_fd: int, path: str, file: StoreFile, *, replacing: bool) -> None:
    """Its temporary file lies in `bundles`, where leftovers are looked for."""
    durable.write_file(root_fd, STORE_FILE, file.encode(), path, temp_fd=bundles_fd, replacing=replacing)


def has_store_file(root_fd: int, path: str) -> bool:
    return STORE_FILE in list_names(root_fd, path)


def require_creatable(root_fd: int, path: str) -> None:
    """Refuse to turn a folder that holds something else into a store."""
    if looks_like_store(root_fd, path):
        raise _without_store_file(path)
    for name in list_names(root_fd, path):
        if name == LOCK_NAME:
            continue
        if name in (BUNDLES, QUARANTINE):
            with opened_folder(root_fd, name, f"{path}/{name}") as fd:
                empty = all(durable.TEMP_NAME.fullmatch(inside) for inside in list_names(fd, f"{path}/{name}"))
            if empty:
                continue
        raise NotAStore(
            f"{path} is not a store and holds other things ({name[:80]!a}). Choose another folder, or put its "
            f"{STORE_FILE} back.",
            path=path,
        )


def open_or_make_root(path: str) -> int:
    """Open the store's folder for writing, or create it (0700) with missing folders above it; flushes the new names."""
    parents = [os.path.join(os.path.realpath(path), os.pardir)]
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
        parents.append(above)
    try:
        with contextlib.suppress(FileExistsError):  # also if the system refuses to say that it is a folder
            os.makedirs(path, FOLDER_MODE, exist_ok=True)
        fd = open_root(path, STORE_FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotAStore(_no_folder(path, error), path=path) from error
    except OSError as error:
        raise durable.write_error(error, "create", path, _ANOTHER_PLACE) from error
    try:
        for parent in parents:
            _flush_parent(parent)
    except DurabilityLost:
        os.close(fd)
        raise
    return fd


def _no_folder(path: str, error: OSError) -> str:
    """Why a folder could not be made: a file is in its way, or what the system says."""
    if isinstance(error, NotADirectoryError):
        return f"{path} cannot be a store: there is a file, not a folder, at it or above it."
    return f"{path} cannot be a store: it cannot be made there ({error.strerror}). Choose another folder."


def _flush_parent(path: str) -> None:
    """Flush a folder above the store, unless it may not be opened (another user's): we made no name in it.

    Raises:
        DurabilityLost: a power cut may take the store's name from it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    with closing_fd(fd):
        durable.sync_folder(fd, path)


def open_existing_root(path: str) -> int:
    try:
        return open_root(path, STORE_FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_store(path) from error
    except OSError as error:
        raise io_error(error, "open", path) from error


def looks_like_store(root_fd: int, path: str) -> bool:
    """Whether a folder is recognisably a store, with or without a store.json: `bundles` has a file with a bundle's name
    and the beginning of a bundle of this format version."""
    try:
        bundles_fd = open_folder(root_fd, BUNDLES, f"{path}/{BUNDLES}")
    except (FileNotFoundError, StoreError):
        return False
    with closing_fd(bundles_fd):
        prefixes = sorted(filter(PREFIX_NAME.fullmatch, list_names(bundles_fd, f"{path}/{BUNDLES}")))
        return any(_has_a_bundle(bundles_fd, prefix, f"{path}/{BUNDLES}/{prefix}") for prefix in prefixes)


def _has_a_bundle(bundles_fd: int, prefix: str, path: str) -> bool:
    try:
        fd = open_folder(bundles_fd, prefix, path)
    except (FileNotFoundError, StoreError):
        return False
    with closing_fd(fd):
        names = (name for name in list_names(fd, path) if BUNDLE_NAME.fullmatch(name) and name.startswith(prefix))
        return any(_begins_like_a_bundle(fd, name, f"{path}/{name}") for name in names)


def _begins_like_a_bundle(folder_fd: int, name: str, path: str) -> bool:
    try:
        with closing_fd(open_file(folder_fd, name, os.O_RDONLY, path)) as fd:
            return os.pread(fd, len(BEGINNING), 0) == BEGINNING
    except (OSError, StoreError):
        return False


def _without_store_file(path: str) -> NotAStore:
    return NotAStore(
        f"{path} has a store's bundles, but its {STORE_FILE} is missing. `torpor repair --store {path}` makes it "
        "again.",
        path=path,
    )


def no_store(path: str) -> NoStore:
    return NoStore(
        f"There is no store at {path}. Name another (--store, or $TORPOR_STORE); `torpor ensure` makes one in a folder "
        "that is new or empty.",
        path=path,
    )
