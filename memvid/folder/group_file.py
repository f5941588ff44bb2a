"""New sessions that count together, while they are being written: in STORE/group.json, which is there only meanwhile.

The first of them gets its version last. Whoever opens the store to write and finds the file knows from that session
whether all count: if it has no version, the others are removed. The file is one group; it is removed in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..disk import durable
from ..disk.sealed_json import SealedFormat
from ..errors import InvalidUri, LimitExceeded
from ..uri import SessionUri
from .folder import StoreFolder
from .small_files import load_small, save_small

GROUP_FILE: Final = "group.json"
MAX_GROUP: Final = 1024
"""Sessions of one group."""
_FORMAT: Final = SealedFormat("torpor.group", 1, 1 << 20, 4 * MAX_GROUP)


def load_group(folder: StoreFolder) -> list[SessionUri]:
    """The sessions of the group that is not finished; none without a file, or with one that is damaged."""
    named = (load_small(folder, GROUP_FILE, _FORMAT) or {}).get("sessions")
    if not isinstance(named, list) or len(named) > MAX_GROUP:
        return []
    try:
        return [SessionUri.parse(each) for each in named]
    except (InvalidUri, TypeError):
        return []


def save_group(folder: StoreFolder, uris: Sequence[SessionUri]) -> None:
    """Say durably that these count together. Raises LimitExceeded, NoSpace, StoreIoError, DurabilityLost."""
    if len(uris) > MAX_GROUP:
        raise LimitExceeded(f"A group has at most {MAX_GROUP} sessions, not {len(uris)}.", limit=MAX_GROUP)
    save_small(folder, GROUP_FILE, _FORMAT, {"sessions": [str(uri) for uri in uris]})


def drop_group(folder: StoreFolder) -> None:
    """Say durably that the group is finished. Raises StoreIoError, DurabilityLost."""
    durable.remove(folder.root_fd, GROUP_FILE, folder.path)
    durable.sync_folder(folder.root_fd, folder.path)
