"""The store's folder: which files there are, under which names, and how each comes and goes.

Owns the names of bundle files and the meaning of their endings. Knows nothing of their contents.

    bundles/ab/<64 hex>.mvb   a version of a session
    bundles/ab/<64 hex>.mvr   retired: its session is deleted, but other bundles may still need its blocks
    bundles/*.tmp             an unfinished sleep; removed at the next open for writing

Retiring is one rename, so it takes no disk space and a crash leaves a bundle in one state or the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from ..disk import durable
from ..disk.paths import (
    Stamp,
    closing_fd,
    io_error,
    list_names,
    open_file,
    open_folder,
    opened_folder,
    stamp_of,
    stat_name,
)
from ..errors import PUT_BACK, BundleMissing, NoStore, NotAStore
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from .store_file import (
    BUNDLE_NAME,
    BUNDLES,
    PREFIX_NAME,
    StoreFile,
    corrupt_store_file,
    load_store_file,
    write_store_file,
)
from .temps import Temps


class StoreFolder:
    """Open descriptors of a store's folders. Safe from several threads; writes need the store's lock."""

    def __init__(self, path: str, root_fd: int, store_uuid: str) -> None:
        self.path = path
        self.root_fd = root_fd
        self.uuid = store_uuid
        self.bundles_path = f"{path}/{BUNDLES}"
        self._held_bytes: int | None = None
        self._file_count: int | None = None
        try:
            self.bundles_fd = open_folder(root_fd, BUNDLES, self.bundles_path)
        except FileNotFoundError as error:
            raise NotAStore(
                f"{self.bundles_path} is missing, and with it every session. Put it back from a backup, or mount it.",
                path=self.bundles_path,
            ) from error
        self.temps = Temps(self.bundles_fd, self.bundles_path)

    def close(self) -> None:
        """Close the folders. A later use fails, and does not meet a descriptor that was given out again."""
        for fd in (self.bundles_fd, self.root_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.bundles_fd = self.root_fd = self.temps.folder_fd = -1

    # --- store.json

    def require_store_file(self) -> StoreFile:
        """What store.json says now. Raises CorruptStoreFile, also if it is missing or another store's, which only an
        open store can tell; UnsupportedFormat, UnsafePath, StoreIoError."""
        try:
            file = load_store_file(self.root_fd, self.path)
        except (NoStore, NotAStore) as error:
            raise corrupt_store_file(self.path, "it is missing") from error
        if file.uuid != self.uuid:
            raise corrupt_store_file(self.path, "it is another store's")
        return file

    def write_store_file(self, *, marked: bool) -> None:
        """Put a new store.json in the place of the one that is there, if there is one, durably. `marked`: whether there
        is a file of marks. Raises NoSpace, StoreIoError, DurabilityLost."""
        file = StoreFile(self.uuid, marked)
        write_store_file(self.root_fd, self.bundles_fd, self.path, file, replacing=True)

    # --- bundle files

    def bundle_path(self, bundle_id: bytes, suffix: str = LIVE_SUFFIX) -> str:
        """For messages only; files are opened by descriptor."""
        name = bundle_id.hex()
        return f"{self.prefix_path(name[:2])}/{name}{suffix}"

    def open_bundle(self, bundle_id: bytes) -> tuple[int, str]:
        """Open a bundle's file, live or retired: (descriptor, path for messages). Raises BundleMissing, UnsafePath."""
        for suffix in 2 * (LIVE_SUFFIX, RETIRED_SUFFIX):  # twice: it may be retired between the two attempts
            with contextlib.suppress(BundleMissing):
                return self.open_as(bundle_id, suffix)
        path = self.bundle_path(bundle_id)
        raise BundleMissing(f"The bundle {path} is missing. {PUT_BACK}", bundle_id=bundle_id.hex(), path=path)

    def open_as(self, bundle_id: bytes, suffix: str) -> tuple[int, str]:
        """Open a bundle's file of one ending, as `open_bundle`."""
        name, path = bundle_id.hex(), self.bundle_path(bundle_id, suffix)
        try:
            with self.prefix_folder(name[:2]) as folder_fd:
                return open_file(folder_fd, name + suffix, os.O_RDONLY, path), path
        except FileNotFoundError as error:
            raise BundleMissing(f"{path} is missing.", bundle_id=name, path=path) from error

    def _status_of(self, bundle_id: bytes, suffix: str) -> os.stat_result | None:
        """The status of a bundle's file of this ending; None without a file."""
        name = bundle_id.hex()
        with contextlib.suppress(FileNotFoundError), self.prefix_folder(name[:2]) as folder_fd:
            return stat_name(folder_fd, name + suffix, self.bundle_path(bundle_id, suffix))
        return None

    def has_bundle(self, bundle_id: bytes) -> bool:
        return any(self.suffix_of(bundle_id) for _ in range(2))  # as in `open_bundle`

    def suffix_of(self, bundle_id: bytes) -> str | None:
        """A bundle's ending at present; None if there is no file of it."""
        endings = (LIVE_SUFFIX, RETIRED_SUFFIX)
        return next((suffix for suffix in endings if self._status_of(bundle_id, suffix) is not None), None)

    def size_of(self, bundle_id: bytes) -> int:
        """The bytes of a bundle's file, live or retired; 0 if there is none."""
        found = self._status_of(bundle_id, LIVE_SUFFIX) or self._status_of(bundle_id, RETIRED_SUFFIX)
        return found.st_size if found is not None else 0

    def is_emptied(self, bundle_id: bytes) -> bool:
        """Whether `empty_retired` has emptied a retired bundle: it holds no bytes."""
        return self.suffix_of(bundle_id) == RETIRED_SUFFIX and not self.size_of(bundle_id)

    def is_gone(self, bundle_id: bytes) -> bool:
        """Whether no byte of a bundle is left: a delete, or somebody else, removed or emptied it."""
        return self.suffix_of(bundle_id) is None or self.is_emptied(bundle_id)

    def is_current(self, bundle_id: bytes, stamp: Stamp) -> bool:
        """Whether a bundle's name, live or retired, still means the file with this stamp, untouched."""
        found = self.stamp_of(bundle_id, LIVE_SUFFIX) or self.stamp_of(bundle_id, RETIRED_SUFFIX)
        return found == stamp

    def stamp_of(self, bundle_id: bytes, suffix: str) -> Stamp | None:
        """The stamp of a bundle's file of this ending; None without a file."""
        status = self._status_of(bundle_id, suffix)
        return None if status is None else stamp_of(status)

    def stamps_of(self, bundle_ids: Iterable[bytes]) -> dict[bytes, Stamp]:
        """The stamps of the live files among these bundles, each folder opened once."""
        found: dict[bytes, Stamp] = {}
        for first, some in itertools.groupby(sorted(bundle_ids), lambda bundle_id: bundle_id[:1]):
            with contextlib.suppress(FileNotFoundError), self.prefix_folder(first.hex()) as folder_fd:
                for bundle_id in some:
                    with contextlib.suppress(FileNotFoundError):
                        name = bundle_id.hex() + LIVE_SUFFIX
                        found[bundle_id] = stamp_of(stat_name(folder_fd, name, self.bundle_path(bundle_id)))
        return found

    def list_bundles(self) -> dict[bytes, str]:
        """All bundle files by id, with their ending. A bundle with both endings counts as live. Raises StoreIoError."""
        return self.list_with_twins()[0]

    def list_with_twins(self) -> tuple[dict[bytes, str], list[bytes]]:
        """As `list_bundles`, and the bundles that are there with both endings. Raises StoreIoError."""
        found: dict[bytes, str] = {}
        twins: list[bytes] = []
        for _, prefix, names in self.walk():
            for match in filter(None, map(BUNDLE_NAME.fullmatch, reversed(names))):
                if match[1].startswith(prefix):
                    bundle_id = bytes.fromhex(match[1])
                    if bundle_id in found:
                        twins.append(bundle_id)
                    found[bundle_id] = match[2]
        self._file_count = len(found)
        return found, twins

    def walk(self) -> Iterator[tuple[int, str, list[str]]]:
        """The folders that bundles lie in: descriptor, open until the next one, prefix, and the names there, sorted."""
        for prefix in filter(PREFIX_NAME.fullmatch, list_names(self.bundles_fd, self.bundles_path)):
            with contextlib.suppress(FileNotFoundError), self.prefix_folder(prefix) as folder_fd:
                yield folder_fd, prefix, list_names(folder_fd, self.prefix_path(prefix))

    def publish(self, temp: durable.TempFile, bundle_id: bytes) -> None:
        """Give a flushed temporary file its name, durably."""
        with _made_prefix_folder(self, bundle_id) as (folder_fd, path):
            temp.publish(folder_fd, bundle_id.hex() + LIVE_SUFFIX, path)
        self._count(temp.size_bytes, files=1)

    def take_in(self, from_fd: int, old_name: str, bundle_id: bytes, old_path: str) -> None:
        """Give a file of another folder of the store the name of a live bundle, durably but for its old folder."""
        with _made_prefix_folder(self, bundle_id) as (folder_fd, path):
            try:
                os.rename(old_name, bundle_id.hex() + LIVE_SUFFIX, src_dir_fd=from_fd, dst_dir_fd=folder_fd)
            except OSError as error:
                raise durable.write_error(error, "rename", old_path) from error
            durable.sync_folder(folder_fd, path)
        self._held_bytes = self._file_count = None

    def replace(self, temp: durable.TempFile, bundle_id: bytes, suffix: str) -> None:
        """Let a flushed temporary file take the place of a bundle's file, durably."""
        name = bundle_id.hex()
        with self.prefix_folder(name[:2]) as folder_fd:
            old_bytes = stat_name(folder_fd, name + suffix, self.bundle_path(bundle_id, suffix)).st_size
            temp.publish(folder_fd, name + suffix, self.prefix_path(name[:2]), replacing=True)
        self._count(temp.size_bytes - old_bytes)

    def put_beside(self, temp: durable.TempFile, bundle_id: bytes) -> None:
        """Give a flushed temporary file the name of a retired bundle, durably. It counts for nothing while a live file
        of the same bundle is there."""
        name = bundle_id.hex()
        with self.prefix_folder(name[:2]) as folder_fd:
            temp.publish(folder_fd, name + RETIRED_SUFFIX, self.prefix_path(name[:2]), replacing=True)
        self._held_bytes = self._file_count = None

    def retire(self, bundle_id: bytes) -> None:
        """Durably turn a version of a session into a mere holder of blocks, unless its file is gone."""
        name = bundle_id.hex()
        path = self.prefix_path(name[:2])
        with contextlib.suppress(FileNotFoundError), self.prefix_folder(name[:2]) as folder_fd:
            durable.rename(folder_fd, name + LIVE_SUFFIX, name + RETIRED_SUFFIX, path)
            durable.sync_folder(folder_fd, path)

    def empty_retired(self, bundle_id: bytes) -> int:
        """Free a retired file's bytes but keep its name. The bytes freed; 0 if it was not there."""
        name = bundle_id.hex()
        path = self.bundle_path(bundle_id, RETIRED_SUFFIX)
        with (
            contextlib.suppress(FileNotFoundError),
            self.prefix_folder(name[:2]) as folder_fd,
            closing_fd(open_file(folder_fd, name + RETIRED_SUFFIX, os.O_WRONLY, path)) as fd,
        ):
            try:
                size_bytes = os.fstat(fd).st_size
                os.ftruncate(fd, 0)
            except OSError as error:
                raise io_error(error, "empty", path) from error
            self._count(-size_bytes)
            return size_bytes
        return 0

    def remove(self, bundle_id: bytes, suffix: str) -> int:
        """Durably remove a bundle's file. The bytes freed; 0 if it was not there."""
        name = bundle_id.hex()
        path = self.prefix_path(name[:2])
        with contextlib.suppress(FileNotFoundError), self.prefix_folder(name[:2]) as folder_fd:
            size_bytes = stat_name(folder_fd, name + suffix, f"{path}/{name}{suffix}").st_size
            durable.remove(folder_fd, name + suffix, path)
            self._count(-size_bytes, files=-1)
            durable.sync_folder(folder_fd, path)
            return size_bytes
        return 0

    # --- how many there are, and how much they take

    def file_count(self) -> int:
        """How many bundle files there are, by the last listing and this object's changes since."""
        return len(self.list_bundles()) if self._file_count is None else self._file_count

    def held_bytes(self) -> int:
        """The bytes of all bundle files, live and retired: counted once, then kept up with this object's changes.

        The first call costs a look at each file; code that moves files without this object calls `recount`.
        """
        if self._held_bytes is None:
            self._held_bytes = self.recount()
        return self._held_bytes

    def recount(self) -> int:
        self._file_count = None
        total = 0
        for folder_fd, prefix, names in self.walk():
            for name in filter(BUNDLE_NAME.fullmatch, names):
                with contextlib.suppress(FileNotFoundError):
                    total += stat_name(folder_fd, name, f"{self.prefix_path(prefix)}/{name}").st_size
        self._held_bytes = total
        return total

    def _count(self, size_bytes: int, files: int = 0) -> None:
        if self._file_count is not None:
            self._file_count += files
        if self._held_bytes is not None:
            self._held_bytes += size_bytes

    def prefix_path(self, prefix: str) -> str:
        return f"{self.bundles_path}/{prefix}"

    def prefix_folder(self, prefix: str) -> AbstractContextManager[int]:
        """The folder of the bundles whose ids begin so. Raises FileNotFoundError, UnsafePath."""
        return opened_folder(self.bundles_fd, prefix, self.prefix_path(prefix))


@contextlib.contextmanager
def _made_prefix_folder(folder: StoreFolder, bundle_id: bytes) -> Iterator[tuple[int, str]]:
    """The folder that a bundle belongs in, made durably if it is not there, and its path."""
    prefix = bundle_id[:1].hex()
    durable.make_folder(folder.bundles_fd, prefix, folder.bundles_path)
    with folder.prefix_folder(prefix) as folder_fd:
        yield folder_fd, folder.prefix_path(prefix)


def list_retired(folder: StoreFolder) -> list[bytes]:
    """The bundles that only have a retired file. Raises StoreIoError."""
    return [bundle_id for bundle_id, suffix in folder.list_bundles().items() if suffix == RETIRED_SUFFIX]


def list_strangers(folder: StoreFolder) -> list[str]:
    """Paths of foreign entries under bundles/."""
    beside = [
        folder.prefix_path(name)
        for name in list_names(folder.bundles_fd, folder.bundles_path)
        if not PREFIX_NAME.fullmatch(name) and not durable.TEMP_NAME.fullmatch(name)
    ]
    inside = [
        f"{folder.prefix_path(prefix)}/{name}"
        for _, prefix, names in folder.walk()
        for name in names
        if not BUNDLE_NAME.fullmatch(name) or not name.startswith(prefix)
    ]
    return sorted(beside + inside)
