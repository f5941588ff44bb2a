"""The files that a model was loaded from: their content at the load, and whether it has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import TorporError
from ...snapshot.adapter_files import identify_adapter, load_settings
from ...snapshot.digests import DigestCache
from ...snapshot.model_files import parts_of_files

Stamps = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """The folders of a model and its adapter. stamps: of each folder's files. parts: the files' parts of the identity,
    with digests."""

    folders: tuple[Path, ...]
    stamps: tuple[Stamps, ...]
    parts: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, adapter: Path | None, digests: DigestCache) -> LoadedFiles:
        """The files as they are now. Raises ModelFilesMissing, AdapterFilesMissing, ModelFilesChanging."""
        folders = (folder,) if adapter is None else (folder, adapter)
        return cls(folders, tuple(map(stamps_of, folders)), _parts(folders, digests))

    def are_untouched(self) -> bool:
        """Whether no file was touched; a touched file may still have the same content."""
        try:
            return tuple(map(stamps_of, self.folders)) == self.stamps
        except OSError:
            return False

    def differences(self, digests: DigestCache) -> tuple[str, ...]:
        """The names of the parts that have changed, or why the files cannot be read, as a sentence. A touched file with
        the same content is no difference.
        """
        try:
            if tuple(map(stamps_of, self.folders)) == self.stamps:
                return ()
            now = _parts(self.folders, digests)
        except TorporError as error:
            return (error.message,)
        except OSError as error:
            return (f"{error.filename} cannot be read: {error.strerror or error}",)
        return tuple(sorted(name for name, part in self.parts.items() if now.get(name) != part))


def stamps_of(folder: Path) -> Stamps:
    """The stamps of a folder's files: they change when a file is touched. Raises OSError: there is no such folder."""
    stamps: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.iterdir()):
        try:
            status = file.stat()  # follows links: a hub's cache is made of them
        except OSError:
            continue  # a broken link; a load that needs the file reports it
        stamps[file.name] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return stamps


def _parts(folders: tuple[Path, ...], digests: DigestCache) -> dict[str, str]:
    folder, *adapters = folders
    parts = parts_of_files(folder, digests)
    for adapter in adapters:
        parts["adapter"] = identify_adapter(load_settings(adapter), adapter, fused=False, digests=digests)
    return parts
