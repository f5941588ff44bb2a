"""How far the scrub of a store has come, in a small file, so that the next daemon goes on where the last one stopped.

Sessions are read in the order of a digest of their names, round and round: the next is the one read longest ago. The
file has only the first bytes of that digest, so it tells no name of a deleted session. Without it, or if it is damaged,
a round begins anew.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from ..disk import durable
from ..disk.paths import read_small
from ..disk.sealed_json import SealedFormat
from ..errors import StoreError
from ..uri import SessionUri
from .folder import StoreFolder

SCRUB_FILE: Final = "scrub.json"
_PLACE_BYTES: Final = 2
_FORMAT: Final = SealedFormat("torpor.scrub", 1, 4096, 64)
_FIELDS: Final = {"after": str, "begun_ns": int, "checked_ns": int}


@dataclass(frozen=True, slots=True)
class ScrubMark:
    """A round that is under way, or has ended.

    after: place of the session that was read last, empty at the beginning. begun_ns, checked_ns: when the round began,
    and when a session was last read, by the Unix clock; 0 for never.
    """

    after: bytes = b""
    begun_ns: int = 0
    checked_ns: int = 0


def place_of(uri: SessionUri) -> bytes:
    """Where a session stands in a round."""
    return blake3(str(uri).encode()).digest()


def read_ns(mark: ScrubMark, uri: SessionUri) -> int:
    """Since when, at least, a session has been read in the current round; 0 if it has not."""
    return mark.begun_ns if place_of(uri) <= mark.after else 0


def left_of(pages: Iterable[Sequence[SessionUri]], after: bytes) -> Generator[None, None, list[SessionUri]]:
    """The sessions that a round still has to read, in order. Yields behind each page of all sessions."""
    left: dict[bytes, SessionUri] = {}
    for page in pages:
        left.update((place, uri) for uri in page if (place := place_of(uri)) > after)
        yield
    return [left[place] for place in sorted(left)]


def load_mark(folder: StoreFolder) -> ScrubMark:
    """The mark that was saved last; the mark of a store that was never read if none can be used."""
    path = f"{folder.path}/{SCRUB_FILE}"
    try:
        fields = _FORMAT.decode(read_small(folder.root_fd, SCRUB_FILE, _FORMAT.max_bytes, path), path)
        if {name: type(value) for name, value in fields.items()} != _FIELDS:
            return ScrubMark()
        return ScrubMark(bytes.fromhex(fields["after"]), fields["begun_ns"], fields["checked_ns"])
    except (OSError, StoreError, ValueError, TypeError, RecursionError):
        return ScrubMark()


def save_mark(folder: StoreFolder, mark: ScrubMark) -> None:
    """Save it durably in place of the last one. Raises NoSpace, StoreIoError, DurabilityLost."""
    fields = {"after": mark.after[:_PLACE_BYTES].hex(), "begun_ns": mark.begun_ns, "checked_ns": mark.checked_ns}
    data = _FORMAT.encode(fields)
    durable.write_file(folder.root_fd, SCRUB_FILE, data, folder.path, replacing=True)
