"""The list at the beginning of a safetensors file: its tensors, and whether the file has all their bytes.

Read before anything is loaded from such a file, so that a broken download is reported as that, by its path.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

MAX_LIST_BYTES: Final = 16 * 1024 * 1024
"""Room for a hundred thousand tensors."""

_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"


class NotWhole(ValueError):
    """No safetensors file, or not all of one; the text says why, to follow the file's name."""


def tensor_names(file: Path) -> frozenset[str]:
    """The names of the tensors in a file that has all its bytes. Reads the list only.

    Raises:
        NotWhole: it begins otherwise, or ends before the last tensor does.
        OSError: it cannot be read.
    """
    return frozenset(_tensors(file))


def tensor_bytes(file: Path) -> dict[str, int]:
    """The bytes of all tensors of each type, by the type's name in the file (as in `BF16`). Raises as
    `tensor_names`."""
    sizes: dict[str, int] = {}
    for entry in _tensors(file).values():
        begin, end = entry["data_offsets"]
        kind = str(entry.get("dtype"))
        sizes[kind] = sizes.get(kind, 0) + max(0, int(end) - int(begin))
    return sizes


def _tensors(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as opened:
        listed, list_bytes = _read_list(opened.read(_LENGTH.size), opened.read)
    tensors = {name: entry for name, entry in listed.items() if name != _METADATA}
    try:
        end = _LENGTH.size + list_bytes + max((int(each["data_offsets"][1]) for each in tensors.values()), default=0)
    except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
        raise _begins_otherwise() from error
    found = file.stat().st_size
    if found < end:
        raise NotWhole(f"has {found} of its {end} bytes, as a copy or download that broke off")
    return tensors


def _read_list(head: bytes, read: Callable[[int], bytes]) -> tuple[Mapping[str, Any], int]:
    list_bytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MAX_LIST_BYTES + 1
    if list_bytes > MAX_LIST_BYTES:
        raise _begins_otherwise()
    try:
        listed = json.loads(read(list_bytes))
    except (ValueError, RecursionError) as error:
        raise _begins_otherwise() from error
    if not isinstance(listed, dict):
        raise _begins_otherwise()
    return listed, list_bytes


def _begins_otherwise() -> NotWhole:
    return NotWhole("does not begin as a safetensors file does")
