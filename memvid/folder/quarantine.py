"""STORE/quarantine: repair puts files aside here unchanged, and a version may come back from here.

Owns the names in it: the file's own, a dot, and a free number. The ending gives its kind: a version (.mvb), which comes
back once all its blocks are there again; a version that a delete is removing (.mvd); or no version (.mvr).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Final

from ..disk import durable
from ..disk.paths import (
    Closing,
    Stamp,
    closing_fd,
    list_names,
    open_file,
    opened_folder,
    read_at,
    stamp_of,
    stat_name,
    stat_open,
    undoing,
)
from ..errors import BundleMissing, NoSpace, StoreError, StoreIoError, UnsafePath
from ..format.layout import LIVE_SUFFIX
from ..limits import CHUNK_BYTES
from .folder import StoreFolder
from .store_file import QUARANTINE

_MAX_NUMBER: Final = 10**9 - 1
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_JSON_NAME: Final = re.compile(r"(marks|store)\.json\.[1-9][0-9]{0,8}", re.ASCII)
_NAME: Final = re.compile(r"([0-9a-f]{64})(\.mvb|\.mvd|\.mvr)\.([1-9][0-9]{0,8})", re.ASCII)

LEAVING_SUFFIX: Final = ".mvd"
"""Of a version set aside that is being deleted: only a delete gives this ending, and removes the file."""


def move_bundle(
    folder: StoreFolder, bundle_id: bytes, suffix: str, *, as_suffix: str | None = None, as_version: bytes | None = None
) -> str | None:
    """Durably move a bundle's file into quarantine; its path there, None if there was no such file. `as_suffix`: under
    another ending. `as_version`: as a version of the bundle that its content says."""
    name = bundle_id.hex()
    stem = as_version.hex() + LIVE_SUFFIX if as_version is not None else name + (as_suffix or suffix)
    with contextlib.suppress(FileNotFoundError), folder.prefix_folder(name[:2]) as fd:
        return _move(folder, fd, folder.prefix_path(name[:2]), name + suffix, stem)
    return None


def move_back(folder: StoreFolder, name: str, bundle_id: bytes) -> None:
    """Durably make a file in quarantine a version's file under bundles/; there may be none yet."""
    with _opened(folder) as fd:
        folder.take_in(fd, name, bundle_id, f"{_path(folder)}/{name}")
        durable.sync_folder(fd, _path(folder))


def give_ending(folder: StoreFolder, names: Iterable[str], suffix: str) -> dict[str, StoreError]:
    """Durably give files here another ending; needs no space. The failures by path, among them files that are not ours
    alone (a second name, another owner), for they may be so later. Links, folders and the like stay: no repair ever
    takes them."""
    failed: dict[str, StoreError] = {}
    path = _path(folder)
    with contextlib.ExitStack() as stack:
        fd = None
        for name in names:
            try:
                if not _is_takeable(folder, name):
                    continue
                fd = stack.enter_context(_found(folder)) if fd is None else fd
                durable.rename(fd, name, _free_name(fd, path, name.partition(".")[0] + suffix), path)
            except FileNotFoundError:
                continue
            except (NoSpace, StoreIoError, UnsafePath) as error:
                failed[f"{path}/{name}"] = error
        if fd is not None:
            durable.sync_folder(fd, path)
    return failed


def is_own(folder: StoreFolder, name: str) -> bool:
    """Whether it is a plain file of our own; repair takes nothing else for a version."""
    with contextlib.suppress(BundleMissing, UnsafePath):
        return stamp_of_name(folder, name) is not None
    return False


def _is_takeable(folder: StoreFolder, name: str) -> bool:
    """Whether it is a plain file of our own; False if there is none, or never can be one. Raises UnsafePath,
    StoreIoError: the file is not ours alone, or cannot be looked at."""
    try:
        return stamp_of_name(folder, name) is not None
    except UnsafePath:
        with _found(folder) as fd:
            if stat.S_ISREG(stat_name(fd, name, f"{_path(folder)}/{name}").st_mode):
                raise
    return False


def list_bundles(folder: StoreFolder) -> list[tuple[bytes, str, str]]:
    """The files named after a bundle: its id, the ending, and the whole name; the newest of each first. Raises
    UnsafePath, StoreIoError."""
    matches = filter(None, map(_NAME.fullmatch, _list(folder)))
    found = [(match[1], match[2], int(match[3]), match[0]) for match in matches]
    return [(bytes.fromhex(one), suffix, name) for one, suffix, _, name in sorted(found, key=lambda one: -one[2])]


def list_ours(folder: StoreFolder) -> list[tuple[str, str]]:
    """The files here with names of ours: name and path. Raises UnsafePath, StoreIoError."""
    ours = (name for name in _list(folder) if _NAME.fullmatch(name) or _JSON_NAME.fullmatch(name))
    return [(name, f"{_path(folder)}/{name}") for name in ours]


def bundle_of(name: str) -> bytes | None:
    """The bundle that a name here tells; None for marks."""
    match = _NAME.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def size_of(folder: StoreFolder, name: str) -> int:
    with contextlib.suppress(FileNotFoundError), _found(folder) as fd:
        return stat_name(fd, name, f"{_path(folder)}/{name}").st_size
    return 0


def remove(folder: StoreFolder, name: str) -> None:
    """Durably remove a file here. Needs no space."""
    with contextlib.suppress(FileNotFoundError), _found(folder) as fd:
        durable.remove(fd, name, _path(folder))
        durable.sync_folder(fd, _path(folder))


def open_name(folder: StoreFolder, name: str) -> tuple[int, str]:
    """Open a file here to read it: descriptor and path. Raises BundleMissing, UnsafePath, StoreIoError."""
    path = f"{_path(folder)}/{name}"
    try:
        with _found(folder) as fd:
            return open_file(fd, name, os.O_RDONLY, path), path
    except FileNotFoundError as error:
        raise BundleMissing(f"{path} is missing.", path=path) from error


def stamp_of_name(folder: StoreFolder, name: str) -> Stamp | None:
    try:
        fd, path = open_name(folder, name)
    except BundleMissing:
        return None
    with closing_fd(fd):
        return stamp_of(stat_open(fd, path))


def move_file(folder: StoreFolder, name: str) -> str | None:
    """Durably move a file of the store's own folder into quarantine, as `move_bundle`."""
    return _move(folder, folder.root_fd, folder.path, name, name)


def next_place_of(folder: StoreFolder, name: str) -> str:
    """The path to which `move_file` would move a file of this name now. Raises UnsafePath, StoreIoError."""
    path = _path(folder)
    with contextlib.suppress(FileNotFoundError), _found(folder) as fd:
        return f"{path}/{_free_name(fd, path, name)}"
    return f"{path}/{name}.1"


def places_of(folder: StoreFolder, name: str) -> list[str]:
    """The paths in quarantine of files that once had this name, oldest first. Raises UnsafePath, StoreIoError."""
    path = _path(folder)
    with contextlib.suppress(FileNotFoundError), _found(folder) as fd:
        return [f"{path}/{name}.{number}" for number in sorted(_numbers(fd, path, name))]
    return []


class QuarantineCopy(Closing):
    """A flushed copy of a bundle's file without a name in quarantine yet. Close it when done."""

    def __init__(self, folder: StoreFolder, bundle_id: bytes, suffix: str, as_suffix: str) -> None:
        self._folder = folder
        self._name = bundle_id.hex() + as_suffix
        path = folder.bundle_path(bundle_id, suffix)
        with folder.prefix_folder(self._name[:2]) as prefix:
            source = open_file(prefix, bundle_id.hex() + suffix, os.O_RDONLY, path)
        with closing_fd(source):
            self._same = _same_as(folder, self._name, source)
            self._temp = None if self._same else folder.temps.new()
            if self._temp is not None:
                self._fill(self._temp, source, path)

    def _fill(self, temp: durable.TempFile, source: int, path: str) -> None:
        with undoing(temp.close):
            temp.whole_bytes = lambda: stat_open(source, path).st_size
            while chunk := read_at(source, temp.size_bytes, CHUNK_BYTES, path):
                temp.append([chunk])
            temp.sync()

    def publish(self) -> str:
        """Name it durably, unless one with the same bytes is there already. Returns the path in quarantine."""
        if self._same is not None:
            return self._same
        assert self._temp is not None
        with _opened(self._folder) as fd:
            path = _path(self._folder)
            name = _free_name(fd, path, self._name)
            self._temp.publish(fd, name, path)
            return f"{path}/{name}"

    @property
    def bytes_written(self) -> int:
        return self._temp.size_bytes if self._temp else 0

    def close(self) -> None:
        if self._temp is not None:
            self._temp.close()


def _move(folder: StoreFolder, from_fd: int, from_path: str, name: str, stem: str) -> str | None:
    with _opened(folder) as fd:
        path = _path(folder)
        new_name = _free_name(fd, path, stem)
        try:
            os.rename(name, new_name, src_dir_fd=from_fd, dst_dir_fd=fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise durable.write_error(error, "rename", f"{from_path}/{name}") from error
        durable.sync_folder(fd, path)  # the new folder first: a power cut may leave two names, but not none
        durable.sync_folder(from_fd, from_path)
        return f"{path}/{new_name}"


def _same_as(folder: StoreFolder, name: str, source: int) -> str | None:
    """The path of a file in quarantine with the same bytes: a repair that was cut off had copied it."""
    size_bytes = stat_open(source, f"{folder.prefix_path(name[:2])}/{name}").st_size
    with _opened(folder) as fd:
        for path in places_of(folder, name):
            inside = os.path.basename(path)
            if stat_name(fd, inside, path).st_size == size_bytes and _equal(fd, inside, path, source):
                return path
    return None


def _equal(folder_fd: int, name: str, path: str, source: int) -> bool:
    with closing_fd(open_file(folder_fd, name, os.O_RDONLY, path)) as other:
        at = 0
        while chunk := read_at(source, at, CHUNK_BYTES, path):
            if chunk != read_at(other, at, CHUNK_BYTES, path):
                return False
            at += len(chunk)
        return True


def _free_name(fd: int, path: str, name: str) -> str:
    """The number after the highest; the lowest free one if somebody put a file with the highest here."""
    taken = set(_numbers(fd, path, name))
    number = max(taken, default=0) + 1
    if number > _MAX_NUMBER:
        number = next(free for free in itertools.count(1) if free not in taken)
    return f"{name}.{number}"


def _numbers(fd: int, path: str, name: str) -> list[int]:
    """The numbers that we gave; a name of another form is somebody's own."""
    found = (other.rpartition(".") for other in list_names(fd, path))
    return [int(number) for stem, _, number in found if stem == name and _NUMBER.fullmatch(number)]


def _list(folder: StoreFolder) -> list[str]:
    """The names here; none where there is no such folder. Raises UnsafePath, StoreIoError."""
    with contextlib.suppress(FileNotFoundError), _found(folder) as fd:
        return list_names(fd, _path(folder))
    return []


def _found(folder: StoreFolder) -> AbstractContextManager[int]:
    """The existing folder, for readers and for work on a full disk. Raises FileNotFoundError."""
    return opened_folder(folder.root_fd, QUARANTINE, _path(folder))


def _opened(folder: StoreFolder) -> AbstractContextManager[int]:
    durable.make_folder(folder.root_fd, QUARANTINE, folder.path)
    return _found(folder)


def _path(folder: StoreFolder) -> str:
    return f"{folder.path}/{QUARANTINE}"
