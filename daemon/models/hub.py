"""Models by their names on a hub of Hugging Face: in its cache on this machine, or downloaded into it.

`huggingface_hub` speaks with the hub and owns the cache. But it begins a file anew when its download broke off, and
most models are one file of gigabytes. So each file is fetched by the library's function for one, into
`DIGEST.incomplete` beside the cache's blobs: there the next download goes on. Then the library makes a folder of them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from huggingface_hub import HfApi, constants, hf_hub_url, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision, http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, tqdm
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _get_classes

from ...memvid.units import format_bytes
from ...snapshot.errors import ModelFilesMissing
from ...snapshot.model_files import (
    A_MODEL_FOLDER,
    CONFIG_FILE,
    MAX_SETTINGS_BYTES,
    load_object,
    missing_weights,
    require_model_files,
)
from ..errors import ModelUnavailable

OnBytes = Callable[[int, int], None]
"""Takes the bytes that are there, and those of the whole model. If it raises, the download ends, to go on another
time."""

PIECE_BYTES: Final = 1 << 20
"""What is told of, or lost by an end, at once: at the library's ten megabytes a slow line would seem to stand still."""

_LOOK_AGAIN_S: Final = 0.5
"""At a file that another process downloads."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_CHARS: Final = 64
_ON_THE_WAY: Final = frozenset({"TransportError", "ConnectionError", "TimeoutError", "LocalEntryNotFoundError"})
"""Bases of errors of the network, by name: releases of `huggingface_hub` differ in the library that raises them."""
_GO_ON: Final = "What is here already is not downloaded again."

constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES


def untold(_present: int, _total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file on the hub. digest: the name of its blob, which for large files is the SHA-256 of their bytes."""

    path: str
    size: int
    digest: str

    @property
    def is_large(self) -> bool:
        return len(self.digest) == _SHA256_CHARS


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. folder: None if it is not whole."""

    name: str
    disk_bytes: int
    folder: Path | None


def cached(name: str) -> Path | None:
    """The folder of a model that is whole in the cache; None if it is not. No network is asked."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=DEFAULT_ALLOW_PATTERNS))
        require_model_files(folder)
    except (LocalEntryNotFoundError, HFValidationError, ModelFilesMissing):
        return None
    return None if missing_weights(folder) else folder


def models_in_cache() -> list[CachedModel]:
    """What the cache has of models that mlx-lm may load, by name. No network is asked."""
    if not Path(constants.HF_HUB_CACHE).is_dir():
        return []
    scan = scan_cache_dir(constants.HF_HUB_CACHE)
    sizes = {
        repo.repo_id: repo.size_on_disk
        for repo in scan.repos
        if repo.repo_type == "model" and any(_is_known(config) for config in _configs_of(repo))
    }
    for part in scan.incomplete_files:
        kind, _, name = part.file_path.parent.parent.name.partition(constants.REPO_ID_SEPARATOR)
        if kind == "models":
            name = name.replace(constants.REPO_ID_SEPARATOR, "/", 1)
            sizes[name] = sizes.get(name, 0) + part.size_on_disk
    return [CachedModel(name, size, cached(name)) for name, size in sorted(sizes.items())]


def _configs_of(repo: Any) -> Iterator[Path]:
    for revision in repo.revisions:
        yield from (file.file_path for file in revision.files if file.file_name == CONFIG_FILE)


def _is_known(config: Path) -> bool:
    try:
        _require_known(config.name, config)
    except ModelUnavailable:
        return False
    return True


def fetch(name: str, on_bytes: OnBytes) -> Path:
    """Download what the cache lacks of a model, and give its folder. What came before a download broke off is not
    downloaded again. on_bytes: called at the beginning of each file, and behind each piece.

    Raises:
        ModelUnavailable: there is no network, no such model, no right to read it, or no room on the disk; or mlx-lm
            cannot load it. The message says what to do.
    """
    try:
        return _fetched(name, on_bytes)
    except ModelUnavailable:
        raise
    except Exception as error:  # also those of the libraries below the hub's own
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ModelUnavailable(
            f"{name!r} is no folder here, and cannot be downloaded from {constants.ENDPOINT}: "
            f"{_advice(name, error) or f'{reason}. {_GO_ON}'}",
            source=name,
            reason=reason,
        ) from error


def _fetched(name: str, on_bytes: OnBytes) -> Path:
    info = HfApi().model_info(name, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    files = {file.path: file for file in sorted(_files_of(info), key=lambda file: file.size)}
    if CONFIG_FILE not in files or not any(path.endswith(".safetensors") for path in files):
        raise _no_model(name, f"it lacks {CONFIG_FILE} or weights in .safetensors files")
    if files[CONFIG_FILE].size > MAX_SETTINGS_BYTES:
        raise _no_model(name, f"its {CONFIG_FILE} has more than {format_bytes(MAX_SETTINGS_BYTES)}")
    download = _Download(name, str(info.sha), sum(file.size for file in files.values()), on_bytes)
    _require_known(name, download.fetch(files.pop(CONFIG_FILE)))
    download.require_room(files.values())
    for file in files.values():
        download.fetch(file)
    return download.folder()


class _NoBar(tqdm):  # type: ignore[misc]  # of no known type to the type checker
    """In the place of the library's bars: `OnBytes` tells of what they would show."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _files_of(info: Any) -> Iterator[_File]:
    """The files that mlx-lm reads of a model. Raises ValueError: the hub tells no commit, or no size or digest of a
    file."""
    if not _COMMIT.fullmatch(str(info.sha)):
        raise ValueError("the hub tells no commit of it")
    for file in filter_repo_objects(info.siblings, allow_patterns=DEFAULT_ALLOW_PATTERNS, key=lambda it: it.rfilename):
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        if type(file.size) is not int or file.size < 0 or not _DIGEST.fullmatch(str(digest)):
            raise ValueError(f"the hub tells no size or digest of {file.rfilename!r}")
        yield _File(file.rfilename, file.size, digest)


def _require_known(name: str, config: Path) -> None:
    """Raises ModelUnavailable: mlx-lm has no such architecture. So it is refused before gigabytes are downloaded."""
    try:
        settings = load_object(config)
        _get_classes(settings)
    except ModelFilesMissing as error:
        raise _no_model(name, f"its {CONFIG_FILE} is no JSON object") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_model(
            name, f"mlx-lm does not know its model_type {str(settings.get('model_type'))[:100]!r}"
        ) from error


def _no_model(name: str, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{name} on {constants.ENDPOINT} is no model for mlx-lm: {why}. {A_MODEL_FOLDER}", source=name
    )


def _advice(name: str, error: Exception) -> str | None:
    """What is wrong and what to do, where the library's own words are not for who wants a model."""
    if isinstance(error, GatedRepoError):
        return (
            f"it is gated. Accept its terms on {constants.ENDPOINT}/{name}, then give your token with `hf auth login` "
            "or $HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such model that you may read. Look at its spelling; for a private one give your token with "
            "`hf auth login` or $HF_TOKEN; for a folder write ./FOLDER."
        )
    if isinstance(error, OfflineModeIsEnabled):
        return (
            "$HF_HUB_OFFLINE forbids to ask. Unset it, or give a folder, or a model that is whole in the hub's cache."
        )
    if _ON_THE_WAY & {kind.__name__ for kind in type(error).__mro__}:
        return f"the hub cannot be reached, or the connection broke. Look at the network, then try again. {_GO_ON}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {constants.HF_HUB_CACHE} is full. Make room, then try again. {_GO_ON}"
    return None


def _sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class _Download:
    """Fetches the files of a model, one after the other; and takes the place of the bar that the library shows for
    each. total: bytes of all."""

    def __init__(self, name: str, commit: str, total: int, on_bytes: OnBytes) -> None:
        self._name, self._commit, self._total, self._on_bytes = name, commit, total, on_bytes
        self._place = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
        self._blobs = self._place / "blobs"
        self._before = 0  # bytes of the files before this one
        self._of_file = 0
        self._size = 0  # of this file, as the hub tells it

    def require_room(self, files: Collection[_File]) -> None:
        """Raises ModelUnavailable: the disk has no room for what is missing of these files."""
        missing = sum(file.size - self._present(file) for file in files)
        folder = next(each for each in (self._blobs, *self._blobs.parents) if each.exists())
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise ModelUnavailable(
                f"{self._name} needs {format_bytes(missing)} more on the disk of {constants.HF_HUB_CACHE}, and "
                f"{format_bytes(free)} are free there. Make room, or name a folder on another disk with $HF_HOME.",
                source=self._name,
                missing_bytes=missing,
                free_bytes=free,
            )

    def fetch(self, file: _File) -> Path:
        """The blob of a file, downloaded as far as the cache lacks it."""
        blob, self._size = self._blobs / file.digest, file.size
        if not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            with self._part(file).open("ab") as part:
                self._lock(part)
                if not blob.exists():
                    self._complete(file, part)
                    self._part(file).rename(blob)
        self._before, self._of_file = self._before + file.size, 0
        return blob

    def folder(self) -> Path:
        """The folder of the files, all of which are there. By the commit that they are of: the hub is not asked for
        another one, and what it might tell then is part of no path."""
        folder = snapshot_download(
            self._name, revision=self._commit, allow_patterns=DEFAULT_ALLOW_PATTERNS, tqdm_class=_NoBar
        )
        _cache_commit_hash_for_specific_revision(str(self._place), constants.DEFAULT_REVISION, self._commit)
        return Path(folder)

    def _lock(self, part: BinaryIO) -> None:
        """Have a part alone. While another process downloads it, that is told, and may be given up."""
        while True:
            try:
                return fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.update(part.seek(0, os.SEEK_END) - self._of_file)
                time.sleep(_LOOK_AGAIN_S)

    def _complete(self, file: _File, part: BinaryIO) -> None:
        """Download what is missing of a file. Raises ModelUnavailable: then it is another than the hub names."""
        if part.seek(0, os.SEEK_END) > file.size or not file.is_large:
            part.truncate(part.seek(0))
        http_get(
            hf_hub_url(self._name, file.path, revision=self._commit),
            part,
            resume_size=part.tell(),
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.path,
            tqdm_class=self._begin,
        )
        part.flush()
        if file.is_large and _sha256_of(self._part(file)) != file.digest:
            part.truncate(0)  # not removed: other processes wait for their turn at it
            raise ModelUnavailable(
                f"{file.path} of {self._name} came with other bytes than the hub's digest is of. Try again: it is "
                "downloaded anew.",
                source=self._name,
            )

    def _part(self, file: _File) -> Path:
        return self._blobs / f"{file.digest}.incomplete"

    def _present(self, file: _File) -> int:
        """How many bytes of a file the cache has."""
        sizes = [path.stat().st_size for path in (self._blobs / file.digest, self._part(file)) if path.exists()]
        return min(file.size, max(sizes, default=0))

    # --- as a bar

    def _begin(self, *, initial: int = 0, **_shown: object) -> Self:
        self._of_file = initial
        self.update(0)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, count: int) -> None:
        self._of_file += count
        if self._of_file > self._size:
            raise ModelUnavailable(
                f"A file of {self._name} does not end: {constants.ENDPOINT} tells {format_bytes(self._size)}, and "
                "sends more. Try again later, or use another hub ($HF_ENDPOINT).",
                source=self._name,
            )
        self._on_bytes(self._before + self._of_file, self._total)
