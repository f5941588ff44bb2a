"""Small files of a store that are a convenience: their owner can find the content again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..disk import durable
from ..disk.paths import read_small
from ..disk.sealed_json import SealedFormat
from ..errors import StoreError
from .folder import StoreFolder


def load_small(folder: StoreFolder, name: str, form: SealedFormat) -> dict[str, Any] | None:
    """The fields of the file of that name; None if it is missing or damaged."""
    path = f"{folder.path}/{name}"
    try:
        return form.decode(read_small(folder.root_fd, name, form.max_bytes, path), path)
    except (OSError, StoreError, ValueError, TypeError, RecursionError):
        return None


def save_small(folder: StoreFolder, name: str, form: SealedFormat, fields: Mapping[str, Any]) -> None:
    """Keep the fields durably in place of the last ones. Raises NoSpace, StoreIoError, DurabilityLost."""
    data = form.encode(fields)
    durable.write_file(folder.root_fd, name, data, folder.path, temp_fd=folder.packs_fd, replacing=True)
