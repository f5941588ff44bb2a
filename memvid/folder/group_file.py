"""New sessions that count together, while they are being written: in STORE/group.json, which is there only meanwhile.

The first of them gets its version last. Whoever opens the store to write and finds the file knows from that session
whether all count: if it has no version, the others are removed. The file is one group; it is removed in one step.

Each version of a group has the group's mark in its session map. So a file of an earlier moment, which somebody has put
back, removes no session that has such a name now.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..disk import durable
from ..disk.sealed_json import SealedFormat
from ..errors import InvalidUri, LimitExceeded
from ..uri import SessionUri
from .folder import StoreFolder
from .small_files import load_small, save_small

GROUP_FILE: Final = "group.json"
GROUP: Final = "group"
"""The entry of the session map that holds the mark."""
MAX_GROUP: Final = 1024
"""Sessions of one group."""
_FORMAT: Final = SealedFormat("torpor.group", 1, 1 << 20, 4 * MAX_GROUP)


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions that count together, the deciding one first, and the mark that their versions have."""

    uris: tuple[SessionUri, ...]
    mark: str


def load_group(folder: StoreFolder) -> Group | None:
    """The group that is not finished; None without a file, or with one that is damaged."""
    fields = load_small(folder, GROUP_FILE, _FORMAT) or {}
    named, mark = fields.get("sessions"), fields.get("mark")
    if not isinstance(named, list) or not 1 <= len(named) <= MAX_GROUP or not isinstance(mark, str):
        return None
    try:
        return Group(tuple(SessionUri.parse(each) for each in named), mark)
    except (InvalidUri, TypeError):
        return None


def save_group(folder: StoreFolder, uris: Sequence[SessionUri]) -> Group:
    """Say durably that these count together. Raises LimitExceeded, NoSpace, StoreIoError, DurabilityLost."""
    if len(uris) > MAX_GROUP:
        raise LimitExceeded(f"A group has at most {MAX_GROUP} sessions, not {len(uris)}.", limit=MAX_GROUP)
    group = Group(tuple(uris), secrets.token_hex(16))
    save_small(folder, GROUP_FILE, _FORMAT, {"sessions": [str(uri) for uri in uris], "mark": group.mark})
    return group


def drop_group(folder: StoreFolder) -> None:
    """Say durably that the group is finished. Raises StoreIoError, DurabilityLost."""
    durable.remove(folder.root_fd, GROUP_FILE, folder.path)
    durable.sync_folder(folder.root_fd, folder.path)
