"""The options of an artifact (its kind, labels and file), and the writing of its file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from ...daemon.api.limits import MAX_KIND_CHARS, MAX_LABEL_CHARS, MAX_LABELS
from ...memvid.disk.targets import new_file, require_target
from ...memvid.folder.store_file import open_existing_root
from ..errors import InvalidUsage
from .options import option


def _require_kind(value: str | None) -> str | None:
    if value is not None and not 1 <= len(value) <= MAX_KIND_CHARS:
        raise InvalidUsage(f"--kind takes 1 to {MAX_KIND_CHARS} characters.", option="--kind")
    return value


def _require_labels(value: list[str] | None) -> list[str] | None:
    labels = value or []
    if len(labels) > MAX_LABELS or not all(1 <= len(label) <= MAX_LABEL_CHARS for label in labels):
        raise InvalidUsage(
            f"--label takes 1 to {MAX_LABEL_CHARS} characters, and may be given {MAX_LABELS} times.", option="--label"
        )
    return value


KindOption = Annotated[str | None, option("--kind KIND", "A name to find it by.", callback=_require_kind)]
LabelOption = Annotated[
    list[str] | None,
    option(
        "--label LABEL",
        "A label of the document, instead of the session's labels, the model's name and the version. Can be repeated.",
        callback=_require_labels,
    ),
]
OverwriteOption = Annotated[bool, option("--overwrite", "Replace a file that is there already.")]


def require_file(target: str, command: str) -> str:
    """Refuse standard output: a file gets its name only once it is whole."""
    if target == "-":
        raise InvalidUsage(
            f"{command} cannot write to standard output: the file gets its name once it is whole. Name a file (./- for"
            " one named -)."
        )
    return target


class ArtifactFile:
    """A small file for an artifact, anywhere but in the store."""

    def __init__(self, target: str, store: Path, *, replacing: bool) -> None:
        """Refuse at once a target that could not be written later. Raises TargetExists, NoTargetFolder, UnsafePath."""
        self.path = os.path.abspath(target)
        self._store, self._replacing = store, replacing
        with self._root() as root_fd:
            require_target(root_fd, self.path, replacing=replacing)

    def write(self, data: bytes) -> None:
        """Write the file, whole or not at all. Raises also NoSpace, StoreIoError, DurabilityLost."""
        with self._root() as root_fd, new_file(root_fd, self.path, replacing=self._replacing) as temp:
            temp.append([data])
            temp.sync()

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        root_fd = open_existing_root(os.path.abspath(self._store))
        try:
            yield root_fd
        finally:
            os.close(root_fd)
