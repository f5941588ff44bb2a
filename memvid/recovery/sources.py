"""Files that a repair may take from: manifests, packs, and bundles of format 1 in any folders. They are only read.

A name is believed in nothing: a manifest's digest and a block's id prove what is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

from ..disk.paths import closing_fd, io_error, open_foreign_file, whole_path
from ..errors import Corruption, LimitExceeded
from ..format.damaged_pack import DamagedPack
from ..format.frames import FrameReader
from ..format.manifest import read_manifest_bytes
from ..format_1 import open_any

_NAME: Final = re.compile(r".*\.(mvm|mvp|mvb|mvr)(\.[0-9]+)?", re.ASCII | re.DOTALL)
"""Behind the ending a number may stand, as in `damaged`."""


def list_sources(folders: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The paths of all files with a fitting ending in these folders, and in the folders in them, sorted, manifests
    first; links to folders are not followed. Raises StoreIoError."""
    files: set[str] = set()
    for folder in folders:
        top = whole_path(folder)
        for path, _, names in os.walk(top, onerror=_refuse):
            files.update(os.path.join(path, name) for name in names if _NAME.fullmatch(name))
    return sorted(files, key=lambda path: (not is_manifest(path), path))


def _refuse(error: OSError) -> None:
    raise io_error(error, "list", str(error.filename)) from error


def is_manifest(path: str) -> bool:
    match = _NAME.fullmatch(os.path.basename(path))
    return match is not None and match[1] == "mvm"


def open_source(path: str) -> FrameReader:
    """Open a file with frames; a damaged one as what is sound in it. Raises StoreIoError, UnsupportedFormat."""
    try:
        return open_any(open_foreign_file(path), path)
    except (Corruption, LimitExceeded):
        return DamagedPack(open_foreign_file(path), path, None)


def manifest_in(path: str) -> bytes:
    """The manifest that a file holds sound, encoded; empty if it has none. Raises StoreIoError, UnsupportedFormat."""
    try:
        return _read_manifest(path) if is_manifest(path) else _manifest_beside_frames(path)
    except (Corruption, LimitExceeded):
        return b""


def _read_manifest(path: str) -> bytes:
    with closing_fd(open_foreign_file(path)) as fd:
        return read_manifest_bytes(fd, path, None)


def _manifest_beside_frames(path: str) -> bytes:
    with open_source(path) as file:
        return file.encoded_manifest()
