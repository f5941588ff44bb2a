"""STORE/quarantine: where repair puts what is damaged, as it was. Nothing here is ever read again or removed by us.

Owns the names in it: the file's own, a dot, and a number that is free. Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from . import durable
from .folder import BUNDLES, QUARANTINE, StoreFolder
from .limits import CHUNK_BYTES
from .paths import FOLDER_MODE, io_error, list_names, open_file, open_folder, stat_name, stat_open


def move_bundle(folder: StoreFolder, bundle_id: bytes, suffix: str) -> str | None:
    """Durably move a bundle's file into quarantine; its path there, None if there was no such file."""
    name = bundle_id.hex()
    try:
        fd = open_folder(folder.bundles_fd, name[:2], f"{folder.path}/{BUNDLES}/{name[:2]}")
    except FileNotFoundError:
        return None
    try:
        return _move(folder, fd, f"{folder.path}/{BUNDLES}/{name[:2]}", name + suffix)
    finally:
        os.close(fd)


def move_file(folder: StoreFolder, name: str) -> str | None:
    """Durably move a file of the store's own folder into quarantine, as `move_bundle`."""
    return _move(folder, folder.root_fd, folder.path, name)


def places_of(folder: StoreFolder, name: str) -> list[str]:
    """The paths in quarantine of files that once had this name, oldest first."""
    with _opened(folder) as fd:
        path = _path(folder)
        return [f"{path}/{name}.{number}" for number in sorted(_numbers(fd, path, name))]


class QuarantineCopy:
    """A copy of a bundle's file that is written and flushed, and has no name in quarantine yet. Close it when done."""

    def __init__(self, folder: StoreFolder, bundle_id: bytes, suffix: str) -> None:
        self._folder = folder
        self._name = bundle_id.hex() + suffix
        path = folder.bundle_path(bundle_id, suffix)
        prefix = open_folder(folder.bundles_fd, self._name[:2], os.path.dirname(path))
        try:
            source = open_file(prefix, self._name, os.O_RDONLY, path)
        finally:
            os.close(prefix)
        try:
            self._same = _same_as(folder, self._name, source)
            self._temp = None if self._same else folder.new_temp()
            if self._temp is not None:
                self._fill(self._temp, source, path)
        finally:
            os.close(source)

    def _fill(self, temp: durable.TempFile, source: int, path: str) -> None:
        try:
            while chunk := _read_at(source, temp.size_bytes, path):
                temp.append([chunk])
            temp.sync()
        except BaseException:
            temp.close()
            raise

    def publish(self) -> str:
        """Give it its name, durably; one with the same bytes that is there already will do. The path in quarantine."""
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


def _move(folder: StoreFolder, from_fd: int, from_path: str, name: str) -> str | None:
    with _opened(folder) as fd:
        path = _path(folder)
        new_name = _free_name(fd, path, name)
        try:
            os.rename(name, new_name, src_dir_fd=from_fd, dst_dir_fd=fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise durable.write_error(error, "rename", f"{from_path}/{name}") from error
        durable.sync_folder(fd, path)  # first where it is now: a power cut may leave two names, but not none
        durable.sync_folder(from_fd, from_path)
        return f"{path}/{new_name}"


def _same_as(folder: StoreFolder, name: str, source: int) -> str | None:
    """The path of a file in quarantine that has the bytes of this one: a repair that was cut off had copied it."""
    size_bytes = stat_open(source, f"{folder.path}/{BUNDLES}/{name[:2]}/{name}").st_size
    with _opened(folder) as fd:
        for path in places_of(folder, name):
            inside = os.path.basename(path)
            if stat_name(fd, inside, path).st_size == size_bytes and _equal(fd, inside, path, source):
                return path
    return None


def _equal(folder_fd: int, name: str, path: str, source: int) -> bool:
    other = open_file(folder_fd, name, os.O_RDONLY, path)
    try:
        at = 0
        while chunk := _read_at(source, at, path):
            if chunk != _read_at(other, at, path):
                return False
            at += len(chunk)
        return True
    finally:
        os.close(other)


def _read_at(fd: int, offset: int, path: str) -> bytes:
    try:
        return os.pread(fd, CHUNK_BYTES, offset)
    except OSError as error:
        raise io_error(error, "read", path) from error


def _free_name(fd: int, path: str, name: str) -> str:
    return f"{name}.{max(_numbers(fd, path, name), default=0) + 1}"


def _numbers(fd: int, path: str, name: str) -> list[int]:
    found = (other.rpartition(".") for other in list_names(fd, path))
    return [int(number) for stem, _, number in found if stem == name and number.isascii() and number.isdigit()]


@contextlib.contextmanager
def _opened(folder: StoreFolder) -> Iterator[int]:
    durable.make_folder(folder.root_fd, QUARANTINE, folder.path, FOLDER_MODE)
    fd = open_folder(folder.root_fd, QUARANTINE, _path(folder))
    try:
        yield fd
    finally:
        os.close(fd)


def _path(folder: StoreFolder) -> str:
    return f"{folder.path}/{QUARANTINE}"
