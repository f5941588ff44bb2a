"""What lies in a store's folders and belongs to nobody."""

from __future__ import annotations

from collections.abc import Iterator

from ..disk import durable
from ..disk.paths import list_names, opened_folder
from .folder import BUNDLE_NAME, MANIFEST_NAME, PACK_NAME, PREFIX_NAME, StoreFolder
from .store_file import BUNDLES, PACKS, VERSIONS


def list_strangers(folder: StoreFolder) -> list[str]:
    """The paths of names in `versions`, `packs` and `bundles` that no store gives, sorted. Raises StoreIoError,
    UnsafePath."""
    return sorted([*_beside(folder, VERSIONS), *_beside(folder, PACKS), *_among_bundles(folder)])


def _beside(folder: StoreFolder, top: str) -> Iterator[str]:
    form = MANIFEST_NAME if top == VERSIONS else PACK_NAME
    for name in _names(folder, top):
        if not form.fullmatch(name) and not durable.TEMP_NAME.fullmatch(name):
            yield f"{folder.path}/{top}/{name}"


def _among_bundles(folder: StoreFolder) -> Iterator[str]:
    for prefix in _names(folder, BUNDLES):
        if not PREFIX_NAME.fullmatch(prefix):
            yield f"{folder.path}/{BUNDLES}/{prefix}"
            continue
        for name in _names(folder, f"{BUNDLES}/{prefix}"):
            if not BUNDLE_NAME.fullmatch(name) or not name.startswith(prefix):
                yield f"{folder.path}/{BUNDLES}/{prefix}/{name}"


def _names(folder: StoreFolder, name: str) -> list[str]:
    path, (top, _, prefix) = f"{folder.path}/{name}", name.partition("/")
    try:
        with opened_folder(folder.root_fd, top, f"{folder.path}/{top}") as fd:
            if not prefix:
                return list_names(fd, path)
            with opened_folder(fd, prefix, path) as inner_fd:
                return list_names(inner_fd, path)
    except FileNotFoundError:
        return []
