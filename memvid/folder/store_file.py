"""store.json: it makes a folder a store, and tells which one, and how much it may hold where nobody says. And how a
folder becomes a store."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Final

from ..disk import durable
from ..disk.budget import MAX_BUDGET_BYTES
from ..disk.lock import LOCK_NAME
from ..disk.paths import FOLDER_MODE, closing_fd, io_error, list_names, open_root, opened_folder, read_small
from ..disk.sealed_json import UNDECODED, SealedFormat, reason_of
from ..errors import CorruptStoreFile, DurabilityLost, NoStore, NotAStore, StoreError, UnsupportedFormat
from ..limits import MAX_STORE_JSON_BYTES, MAX_STORE_JSON_NODES

STORE_VERSION: Final = 2
STORE_FILE: Final = "store.json"
_ANOTHER_PLACE: Final = ", or choose another place for the store (--store, $TORPOR_STORE)"
VERSIONS: Final = "versions"
PACKS: Final = "packs"
BUNDLES: Final = "bundles"
DAMAGED: Final = "damaged"
INCOMING: Final = "incoming"
JOURNAL: Final = "journal"
_FOLDERS: Final = (VERSIONS, PACKS)
_OF_A_REMOTE: Final = frozenset({".unfinished", "heads"})
"""What a remote has: the first one if it was opened as a folder, the second one if it has a session."""
_FORMAT: Final = SealedFormat("torpor.store", STORE_VERSION, MAX_STORE_JSON_BYTES, MAX_STORE_JSON_NODES)
_FORMAT_1: Final = SealedFormat("torpor.store", 1, MAX_STORE_JSON_BYTES, MAX_STORE_JSON_NODES)


def encode_store_file(store_uuid: str, budget: int | None = None) -> bytes:
    return _FORMAT.encode({"uuid": store_uuid, **({} if budget is None else {"budget": budget})})


def load_store_uuid(root_fd: int, path: str) -> str:
    """The uuid that store.json tells. Raises as `load_store_file`."""
    return load_store_file(root_fd, path)[0]


def load_store_file(root_fd: int, path: str) -> tuple[str, int | None]:
    """The uuid and the budget in bytes that store.json tells; None: no daemon has given it one yet.

    Raises:
        NoStore: there is none. NotAStore: that of something else, or there are packs without one.
        CorruptStoreFile: damaged. UnsupportedFormat: of another version, and undamaged. UnsafePath, StoreIoError.
    """
    file_path = f"{path}/{STORE_FILE}"
    try:
        data = read_small(root_fd, STORE_FILE, MAX_STORE_JSON_BYTES, file_path)
    except FileNotFoundError as error:
        _refuse_remote(root_fd, path)
        raise (_without_store_file(path) if looks_like_store(root_fd, path) else no_store(path)) from error
    if _format_1_uuid(data, file_path) is not None:
        raise UnsupportedFormat(
            f"{path} is a store of format 1, as Torpor kept them before. The next `torpor ensure` or `torpor serve` "
            "carries it over, without copying a session's keys and values; then it can be read. An older Torpor does "
            "not open it any more.",
            path=file_path,
            found=1,
            supported=STORE_VERSION,
        )
    try:
        fields = _FORMAT.decode(data, file_path)
        store_uuid, budget = str(uuid.UUID(fields.get("uuid"))), fields.get("budget")
        if encode_store_file(store_uuid, budget) != data:
            raise ValueError("it is not in the form in which it is written")
        if budget is not None and not (type(budget) is int and 0 < budget <= MAX_BUDGET_BYTES):
            raise ValueError("its budget is no number of bytes")
    except UNDECODED as error:
        if not looks_like_store(root_fd, path):
            raise NotAStore(
                f"{path} is not a store: there is no folder {VERSIONS} with a version, and {file_path} is not a "
                f"store's ({reason_of(error)}). Choose another folder.",
                path=file_path,
            ) from error
        raise corrupt_store_file(path, reason_of(error)) from error
    return store_uuid, budget


def uuid_of_format_1(root_fd: int, path: str) -> str | None:
    """The uuid of a store of format 1, which is still to be carried over; None for any other folder. Raises UnsafePath,
    StoreIoError."""
    file_path = f"{path}/{STORE_FILE}"
    try:
        data = read_small(root_fd, STORE_FILE, MAX_STORE_JSON_BYTES, file_path)
    except FileNotFoundError:
        return None
    return _format_1_uuid(data, file_path)


def _format_1_uuid(data: bytes, file_path: str) -> str | None:
    try:
        return str(uuid.UUID(_FORMAT_1.decode(data, file_path).get("uuid")))
    except (*UNDECODED, UnsupportedFormat):
        return None


def require_store_file(root_fd: int, path: str, store_uuid: str) -> None:
    """Refuse a store whose store.json is not its own any more. Raises CorruptStoreFile, and as `load_store_uuid`."""
    try:
        present = load_store_uuid(root_fd, path)
    except (NoStore, NotAStore) as error:
        raise corrupt_store_file(path, "it is missing") from error
    if present != store_uuid:
        raise corrupt_store_file(path, "it is another store's")


def corrupt_store_file(path: str, reason: str) -> CorruptStoreFile:
    """The error for a damaged store.json, with advice."""
    file_path = f"{path}/{STORE_FILE}"
    return CorruptStoreFile(
        f"{file_path} is damaged: {reason}. Put it back from a backup; without one `torpor repair --store {path}` "
        "makes it again, and nothing is lost.",
        path=file_path,
        reason=reason,
    )


def create_folders(root_fd: int, path: str) -> None:
    """Make the folders of a store, durably. Raises NoSpace, StoreIoError, DurabilityLost."""
    for name in _FOLDERS:
        durable.make_folder(root_fd, name, path)


def write_store_file(
    root_fd: int, path: str, store_uuid: str, budget: int | None = None, *, replacing: bool = False
) -> None:
    """Say durably which store it is. Raises NoSpace, StoreIoError, DurabilityLost."""
    durable.write_file(root_fd, STORE_FILE, encode_store_file(store_uuid, budget), path, replacing=replacing)


def has_store_file(root_fd: int, path: str) -> bool:
    return STORE_FILE in list_names(root_fd, path)


def require_creatable(root_fd: int, path: str, own_files: tuple[str, ...]) -> None:
    """Refuse to turn a folder that holds something else into a store. own_files: small files of a store that a crash
    may have left. Raises NotAStore."""
    _refuse_remote(root_fd, path)
    if looks_like_store(root_fd, path):
        raise _without_store_file(path)
    for name in list_names(root_fd, path):
        if name == LOCK_NAME or name in own_files or durable.TEMP_NAME.fullmatch(name):
            continue
        if name in _FOLDERS:
            with opened_folder(root_fd, name, f"{path}/{name}") as fd:
                empty = all(durable.TEMP_NAME.fullmatch(inside) for inside in list_names(fd, f"{path}/{name}"))
            if empty:
                continue
        raise NotAStore(
            f"{path} is not a store and holds other things ({name[:80]!a}). Choose another folder, or put its "
            f"{STORE_FILE} back.",
            path=path,
        )


def looks_like_store(root_fd: int, path: str) -> bool:
    """Whether a folder is recognisably a store, with or without a store.json: `versions`, `packs` or `bundles` has a
    file with the name of a manifest, a pack, or a bundle of format 1. A remote has manifests, too, and is none."""
    if _is_remote(root_fd, path):
        return False
    return has_manifests(root_fd, path) or has_own_packs(root_fd, path) or has_bundles(root_fd, path)


def _is_remote(root_fd: int, path: str) -> bool:
    """Whether a folder is a remote, and no store. Raises StoreIoError."""
    names = list_names(root_fd, path)
    return STORE_FILE not in names and not _OF_A_REMOTE.isdisjoint(names)


def has_manifests(root_fd: int, path: str) -> bool:
    """Whether `versions` has a file with the name of a manifest."""
    return _has_names(root_fd, VERSIONS, ".mvm", path)


def has_own_packs(root_fd: int, path: str) -> bool:
    """Whether `packs` has a pack. A store of format 1 has none, and a carrying over makes none: so it is of format 2,
    whatever an older store.json says that was put back."""
    return _has_names(root_fd, PACKS, ".mvp", path)


def has_bundles(root_fd: int, path: str) -> bool:
    """Whether `bundles` has a file with the name of a bundle of format 1."""
    with contextlib.suppress(OSError, StoreError), opened_folder(root_fd, BUNDLES, f"{path}/{BUNDLES}") as fd:
        prefixes = list_names(fd, f"{path}/{BUNDLES}")
        return any(_has_names(fd, prefix, suffix, path) for prefix in prefixes for suffix in (".mvb", ".mvr"))
    return False


def _has_names(parent_fd: int, name: str, suffix: str, path: str) -> bool:
    with contextlib.suppress(OSError, StoreError), opened_folder(parent_fd, name, f"{path}/{name}") as fd:
        return any(each.endswith(suffix) for each in list_names(fd, f"{path}/{name}"))
    return False


def _refuse_remote(root_fd: int, path: str) -> None:
    if _is_remote(root_fd, path):
        raise NotAStore(
            f"{path} is a remote, not a store. A daemon uses it beside its store: `torpor serve --remote "
            f"{Path(path).as_uri()}`; then `torpor ls --remote` lists its sessions.",
            path=path,
        )


def _without_store_file(path: str) -> NotAStore:
    return NotAStore(
        f"{path} has a store's versions or packs, but its {STORE_FILE} is missing. `torpor repair --store {path}` "
        "makes it again.",
        path=path,
    )


def open_or_make_root(path: str) -> int:
    """Open the store's folder for writing, or create it (0700) with missing folders above it; flushes the new names."""
    missing, above = [], path
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    parents = [os.path.join(os.path.realpath(path), os.pardir), *map(os.path.dirname, missing[1:])]
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, FOLDER_MODE if folder == path else 0o777)
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


def no_store(path: str) -> NoStore:
    return NoStore(
        f"There is no store at {path}. Name another (--store, or $TORPOR_STORE); `torpor ensure` makes one in a folder "
        "that is new or empty.",
        path=path,
    )
