"""What is told of a journal that cannot be read, of its turns that wait, and of others beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..answers import Finding
from ..errors import JournalWaits
from ..format.journal import Found
from ..uri import SessionUri

UNREADABLE: Final = (
    "Put the disk right. If that cannot be done, copy what can be read of the file (`dd conv=noerror,sync bs=4096`), "
    "and put the copy in its place."
)


def waiting_finding(path: str, uri: SessionUri, reason: str) -> Finding:
    """What is told of turns in the journal at `path` that cannot be made a version now."""
    message = (
        f"{path} has acknowledged turns of {uri} that could not be made a version: {reason} The next opening tries "
        "again. Until then the newest state of the session cannot be used."
    )
    return Finding(path, JournalWaits.code, message)


def findings_beside(folder_path: str, names: Iterable[str]) -> list[Finding]:
    """What is told of journals that are not the open one."""
    message = (
        "The store does not write this journal: it was put in the place of another one while the store was open. Turns "
        "in it that no version has become versions at the next opening at which the other one's are."
    )
    return [Finding(f"{folder_path}/{name}", JournalWaits.code, message) for name in names]


def describe_hole(hole: Found) -> str:
    if size_bytes := hole.end - hole.place:
        return (
            f"the {size_bytes} bytes from byte {hole.place} on hold no record. Either a write was cut off there before "
            "it was acknowledged, or they are damaged, and the last turns of a session are lost with them."
        )
    return (
        f"it ends at byte {hole.place} without the zeros that belong there: it was cut off. The last turns of a "
        "session may be lost with its end."
    )
