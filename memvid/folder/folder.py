"""The store's folder: which files there are, under which names, and how each comes and goes.

Owns the names of manifest and pack files. Knows nothing of their contents.

    versions/<64 hex>.mvm      a manifest: that a version exists, and all that it is
    packs/<64 hex>.mvp         a pack: frames of blocks
    */*.tmp                    a file that is being written; removed at the next opening to write
    damaged/                   what had to give way; only repair looks there, for what versions lack
    bundles/ab/<64 hex>.mvb    of a store that was carried over from format 1: its frames count as a pack's

Both folders are flat: a file is written in the folder in which it gets its name, so that one flush of one folder makes
the name durable, and no folder has to be made on the way.

A pack is known by its name relative to the store. No file is changed once it has its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..disk import durable
from ..disk.paths import (
    closing_fd,
    is_named,
    list_names,
    open_file,
    open_folder,
    opened_folder,
    plain_bytes,
    read_at,
    stat_name,
    stat_open,
    undoing,
)
from ..errors import PUT_BACK, BundleMissing, NotAStore, StoreClosed, StoreError, StoreIoError
from ..limits import CHUNK_BYTES
from .changes import Changes
from .damaged import free_name, move_aside
from .store_file import BUNDLES, DAMAGED, JOURNAL, PACKS, VERSIONS

MANIFEST_SUFFIX: Final = ".mvm"
PACK_SUFFIX: Final = ".mvp"
MANIFEST_NAME: Final = re.compile(r"([0-9a-f]{64})\.mvm", re.ASCII)
PACK_NAME: Final = re.compile(r"([0-9a-f]{64})\.mvp", re.ASCII)
_BUNDLE: Final = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}(\.mvb|\.mvr)", re.ASCII)
"""A bundle of format 1 in `bundles`, relative to that."""

_PREFIX: Final = re.compile(r"[0-9a-f]{2}", re.ASCII)


def manifest_name(bundle_id: str) -> str:
    """The name of a manifest's file, relative to the store."""
    return f"{VERSIONS}/{bundle_id}{MANIFEST_SUFFIX}"


def pack_name(pack_id: bytes) -> str:
    """The name of a pack's file, relative to the store."""
    return f"{PACKS}/{pack_id.hex()}{PACK_SUFFIX}"


def id_in(name: str) -> str:
    """The id in the name of a manifest or pack, in hex."""
    return name.rpartition("/")[2].partition(".")[0]


class StoreFolder:
    """Open descriptors of a store's folders. Safe from several threads; writes need the store's lock."""

    def __init__(self, path: str, root_fd: int, store_uuid: str) -> None:
        self.path = path
        self.root_fd = root_fd
        self.uuid = store_uuid
        self._fds: dict[str, int] = {}
        self._held_bytes: int | None = None
        self.changes = Changes(lambda: self._fds.get(VERSIONS, -1))
        with undoing(self._close_folders):
            for name in (VERSIONS, PACKS):
                self._fds[name] = _open_top(root_fd, name, f"{path}/{name}")
            with contextlib.suppress(FileNotFoundError):
                self._fds[BUNDLES] = open_folder(root_fd, BUNDLES, f"{path}/{BUNDLES}")

    def close(self) -> None:
        """Close the folders. A later use fails, and does not meet a descriptor that was given out again."""
        self._close_folders()
        with contextlib.suppress(OSError):
            os.close(self.root_fd)
        self.root_fd = -1

    def _close_folders(self) -> None:
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popitem()[1])

    def _require_open(self) -> None:
        if self.root_fd < 0:
            raise StoreClosed(f"The store {self.path} was closed.", path=self.path)

    def require_in_place(self) -> None:
        """Raise StoreIoError if `versions` or `packs` has been moved away since it was opened: what is written into it
        would be in no store."""
        self._require_open()
        for name in (VERSIONS, PACKS):
            path = f"{self.path}/{name}"
            if not is_named(self.root_fd, name, self._fds[name], path):
                raise StoreIoError(
                    f"{path} is another folder than when the store was opened. Put it back, or open the store again "
                    "(start the daemon anew).",
                    path=path,
                    errno=errno.ESTALE,
                )

    def path_of(self, name: str) -> str:
        """For messages only; files are opened by descriptor."""
        return f"{self.path}/{name}"

    def manifest_path(self, bundle_id: str) -> str:
        """As `path_of`, of a version's manifest."""
        return self.path_of(manifest_name(bundle_id))

    def new_temp(self, top: str = PACKS) -> durable.TempFile:
        """A temporary file in `packs` or `versions`. Raises NoSpace, StoreIoError."""
        return durable.TempFile(self._fds.get(top, -1), self.path_of(top), changing=self._changing(top))

    def _changing(self, top: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """What is entered around each change of a name there: `changes` tells of `versions` alone."""
        return self.changes.own if top == VERSIONS else contextlib.nullcontext

    def remove_leftovers(self, *, dry_run: bool = False) -> dict[str, int]:
        """Remove what unfinished writes left; the bytes of each, by its name in the store. Only under the store's lock.
        Raises StoreIoError."""
        sizes = {}
        with contextlib.ExitStack() as stack:
            fds = {"": self.root_fd, VERSIONS: self._fds[VERSIONS], PACKS: self._fds[PACKS]}
            for top in (JOURNAL, DAMAGED):
                with contextlib.suppress(FileNotFoundError, StoreError):  # what is not ours holds nothing of ours
                    fds[top] = stack.enter_context(opened_folder(self.root_fd, top, self.path_of(top)))
            for top, fd in fds.items():
                for name in durable.leftovers(fd, self.path_of(top)):
                    sizes[os.path.join(top, name)] = plain_bytes(fd, name)
                    if not dry_run:
                        durable.remove(fd, name, self.path_of(top))
        return sizes

    def being_written(self) -> set[str]:
        """The temporary files of manifests and packs that this process writes now. Raises StoreIoError."""
        folders = {top: durable.being_written(self._fds[top], self.path_of(top)) for top in (VERSIONS, PACKS)}
        return {f"{top}/{name}" for top, names in folders.items() for name in names}

    # --- what there is

    def list_versions(self) -> set[str]:
        """The ids of all manifests that are there. Raises StoreIoError."""
        return {match[1] for match in filter(None, map(MANIFEST_NAME.fullmatch, self._names(VERSIONS)))}

    def list_packs(self) -> set[str]:
        """The names of all packs that are there. Raises StoreIoError."""
        packs = {f"{PACKS}/{name}" for name in self._names(PACKS) if PACK_NAME.fullmatch(name)}
        return packs | {f"{BUNDLES}/{name}" for name in self._in_bundles() if _BUNDLE.fullmatch(name)}

    def list_strangers(self) -> list[str]:
        """The paths of what lies in the folders of manifests and packs under names that no store gives, sorted. Raises
        StoreIoError, UnsafePath."""
        names_of_strangers = [f"{BUNDLES}/{name}" for name in self._in_bundles() if not _BUNDLE.fullmatch(name)]
        for top, form in ((VERSIONS, MANIFEST_NAME), (PACKS, PACK_NAME)):
            names = (name for name in self._names(top) if not form.fullmatch(name))
            names_of_strangers += [f"{top}/{name}" for name in names if not durable.TEMP_NAME.fullmatch(name)]
        return sorted(map(self.path_of, names_of_strangers))

    def _names(self, top: str) -> list[str]:
        self._require_open()
        return list_names(self._fds[top], f"{self.path}/{top}")

    def _in_bundles(self) -> Iterator[str]:
        """What lies in `bundles`, relative to it: in a folder of it that may have bundles, what that has."""
        for prefix in self._names(BUNDLES) if BUNDLES in self._fds else ():
            if not _PREFIX.fullmatch(prefix):
                yield prefix
                continue
            path = f"{self.path}/{BUNDLES}/{prefix}"
            with contextlib.suppress(FileNotFoundError), opened_folder(self._fds[BUNDLES], prefix, path) as fd:
                yield from [f"{prefix}/{name}" for name in list_names(fd, path)]

    @contextlib.contextmanager
    def _folder_of(self, name: str) -> Iterator[tuple[int, str]]:
        """The folder of a file by its name in the store, and the file's own name. Raises FileNotFoundError."""
        self._require_open()
        top, *prefix, own = name.split("/")
        if top not in self._fds:
            raise FileNotFoundError(name)
        if not prefix:
            yield self._fds[top], own
            return
        with opened_folder(self._fds[top], prefix[0], f"{self.path}/{top}/{prefix[0]}") as fd:
            yield fd, own

    def open_name(self, name: str) -> tuple[int, str]:
        """Open a manifest or pack: (descriptor, path for messages). Raises BundleMissing, UnsafePath, StoreIoError."""
        path = self.path_of(name)
        try:
            with self._folder_of(name) as (fd, own):
                return open_file(fd, own, os.O_RDONLY, path), path
        except FileNotFoundError as error:
            raise BundleMissing(f"{path} is missing. {PUT_BACK}", path=path) from error

    def status_of(self, name: str) -> os.stat_result | None:
        """The status of a manifest or pack; None without a file."""
        with contextlib.suppress(FileNotFoundError), self._folder_of(name) as (fd, own):
            return stat_name(fd, own, self.path_of(name))
        return None

    def bytes_of(self, name: str) -> int:
        """The bytes of a manifest or pack; 0 without a file."""
        status = self.status_of(name)
        return status.st_size if status is not None else 0

    def has(self, name: str) -> bool:
        return self.status_of(name) is not None

    def has_manifest(self, bundle_id: str) -> bool:
        return self.has(manifest_name(bundle_id))

    # --- changes

    def publish(self, temp: durable.TempFile, name: str) -> None:
        """Give a flushed temporary file its name, durably: one in `packs` a pack's, one in `versions` a
        manifest's. A file that is there under it is replaced, so it must hold nothing else (`StoreCore.publish`); the
        new one is not taken back then where the flush fails, for others may need it. Raises NoSpace, StoreIoError,
        DurabilityLost."""
        replaced = self.status_of(name)
        temp.publish(os.path.basename(name), replacing=replaced is not None)
        self._count(temp.size_bytes - (replaced.st_size if replaced else 0))

    def write_manifest(self, bundle_id: str, data: bytes) -> None:
        """Write the file of a manifest, durably. Raises as `publish`."""
        with self.new_temp(VERSIONS) as temp:
            temp.append([data])
            temp.sync()
            self.publish(temp, manifest_name(bundle_id))

    def remove(self, name: str) -> int:
        """Remove a manifest or pack; durable after the next `flush`. The bytes freed; 0 if it was not there. Needs no
        room. Raises StoreIoError."""
        path = self.path_of(name)
        with contextlib.suppress(FileNotFoundError), self._folder_of(name) as (fd, own):
            size_bytes = stat_name(fd, own, path).st_size
            with self._changing(name.partition("/")[0])():
                durable.remove(fd, own, os.path.dirname(path))
            self._count(-size_bytes)
            return size_bytes
        return 0

    def flush(self, names: Iterable[str]) -> None:
        """Flush the folders of these files. Raises DurabilityLost."""
        for folder in sorted({os.path.dirname(name) for name in names}):
            with contextlib.suppress(FileNotFoundError), self._folder_of(f"{folder}/") as (fd, _):
                durable.sync_folder(fd, f"{self.path}/{folder}")

    def move_to_damaged(self, name: str) -> str:
        """Move a damaged file out of the way, durably; the path it has then. Raises NoSpace, StoreIoError,
        DurabilityLost, UnsafePath, BundleMissing."""
        path = self.path_of(name)
        try:
            with self._folder_of(name) as (fd, own):
                size_bytes = stat_name(fd, own, path).st_size
                place = move_aside(self.root_fd, self.path, fd, own, os.path.dirname(path))
        except FileNotFoundError as error:
            raise BundleMissing(f"{path} is missing.", path=path) from error
        self._count(-size_bytes)
        return place

    def copy_to_damaged(self, name: str) -> None:
        """Copy a manifest that is not what its name says, durably. Raises as `move_to_damaged`."""
        durable.make_folder(self.root_fd, DAMAGED, self.path)
        fd, path = self.open_name(name)
        to_path = self.path_of(DAMAGED)
        with (
            closing_fd(fd),
            opened_folder(self.root_fd, DAMAGED, to_path) as to_fd,
            durable.TempFile(to_fd, to_path) as temp,
        ):
            for offset in range(0, stat_open(fd, path).st_size, CHUNK_BYTES):
                temp.append([read_at(fd, offset, CHUNK_BYTES, path)])
            temp.sync()
            temp.publish(free_name(os.path.basename(name), list_names(to_fd, to_path)))

    def remove_old_folder(self) -> bool:
        """Remove `bundles/` once no pack is left in it; whether it went. What else lies there stays, and so does the
        folder. Raises DurabilityLost."""
        if BUNDLES not in self._fds or any(name.startswith(f"{BUNDLES}/") for name in self.list_packs()):
            return False
        try:
            for prefix in self._names(BUNDLES):
                os.rmdir(prefix, dir_fd=self._fds[BUNDLES])
            os.rmdir(BUNDLES, dir_fd=self.root_fd)
        except (OSError, StoreError):
            return False
        durable.sync_folder(self.root_fd, self.path)
        os.close(self._fds.pop(BUNDLES))
        return True

    # --- how much it takes

    def held_bytes(self) -> int:
        """The bytes of all manifests and packs: counted once, then kept up with this object's changes. The first call
        costs a look at each file. Raises StoreIoError."""
        if self._held_bytes is None:
            self._held_bytes = sum(map(self.bytes_of, (*map(manifest_name, self.list_versions()), *self.list_packs())))
        return self._held_bytes

    def _count(self, size_bytes: int) -> None:
        if self._held_bytes is not None:
            self._held_bytes += size_bytes

    @property
    def packs_fd(self) -> int:
        return self._fds[PACKS]


def _open_top(root_fd: int, name: str, path: str) -> int:
    try:
        return open_folder(root_fd, name, path)
    except FileNotFoundError as error:
        raise NotAStore(
            f"{path} is missing, and with it what every session needs. Put it back from a backup, or mount it. Or make "
            f"it anew (`mkdir {shlex.quote(path)}`), and let `torpor repair --from FOLDER` fill it from a backup.",
            path=path,
        ) from error
