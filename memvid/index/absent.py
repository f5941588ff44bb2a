"""STORE/absent: a note of each version without a file under bundles/: it is missing, or set aside.

    absent/<64 hex>.json      what the index's row says of the version, and which other bundles it needs

The index holds the same facts; it can be rebuilt because these files are kept. Owns their names, their form, and their
flushes. `Index` and an opening decide which versions have a note.

Rules:
- A version's note is on the disk before a row says that it is set aside, and so before its file moves. It goes before
  the row goes, and needs no room for that: each version has a file of its own, so that a delete works on a full disk.
- An opening for writing notes what it finds missing, writes each note anew that does not say what the row says, and
  removes those of versions that have a file again. So a store of before, or one whose notes were removed, has them
  after one opening; one that is cut off is done again by the next.
- If a version has a file, the file counts and its note does not.
"""

from __future__ import annotations

import contextlib
import errno
import re
import stat
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any, Final

from ..disk import durable
from ..disk.paths import list_names, opened_folder, read_small, stat_name
from ..disk.sealed_json import SealedFormat, reason_of
from ..errors import IndexFailed, StoreError, StoreIoError, UnsafePath
from ..folder.store_file import ABSENT, BUNDLES
from ..limits import MAX_NOTE_BYTES, MAX_NOTE_NODES, MAX_VERSION
from .rows import ASIDE, BLOCK_KEY, COLUMNS, LIVE, IndexedBundle, block_key, facts_of, row_in

_FORMAT: Final = SealedFormat("torpor.absent", 1, MAX_NOTE_BYTES, MAX_NOTE_NODES)
_NAME: Final = re.compile(r"([0-9a-f]{64})\.json", re.ASCII)
_FACTS: Final = tuple(name for name in COLUMNS.split(", ") if name != "bundle_id")
_DIGESTS: Final = ("parent", "identity_digest")
_STATES: Final = {LIVE: "missing", ASIDE: "set aside"}


class AbsentNotes:
    """The notes of one store. `root_fd` is its folder, borrowed."""

    def __init__(self, root_fd: int, store_path: str) -> None:
        self._root_fd = root_fd
        self._store_path = store_path
        self.path = f"{store_path}/{ABSENT}"

    def path_of(self, bundle_id: bytes) -> str:
        return f"{self.path}/{_name_of(bundle_id)}"

    def keep(self, bundles: Iterable[IndexedBundle]) -> None:
        """Note versions durably, each in the place of what was noted of it. The folders are flushed once for all of
        them. Raises NoSpace, StoreIoError, UnsafePath, DurabilityLost."""
        waiting = list(bundles)
        if not waiting:
            return
        durable.make_folder(self._root_fd, ABSENT, self._store_path)
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(self._opened())
            temps_path = f"{self._store_path}/{BUNDLES}"
            temps = stack.enter_context(opened_folder(self._root_fd, BUNDLES, temps_path))
            stack.callback(durable.sync_folder, temps, temps_path)
            stack.callback(durable.sync_folder, fd, self.path)
            for bundle in waiting:
                name, data = _name_of(bundle.bundle_id), encode_note(bundle)
                durable.write_file(fd, name, data, self.path, temp_fd=temps, replacing=True, flushing=False)

    def drop(self, bundle_ids: Iterable[bytes]) -> None:
        """Durably remove the notes of those of the versions that have one. A folder in the place of a note stays, for
        it is not read either; an opening tells of it.

        Raises:
            UnsafePath
            StoreIoError: one could not be removed; all others are gone.
            DurabilityLost
        """
        failed: list[StoreIoError] = []
        with contextlib.suppress(FileNotFoundError), self._opened() as fd:
            removed = [_removed(fd, _name_of(one), self.path, failed) for one in bundle_ids]
            if any(removed):
                durable.sync_folder(fd, self.path)
        for error in failed:
            raise error

    def may_tell_of(self, bundle_id: bytes) -> bool:
        try:
            with self._opened() as fd:
                return _may_be_there(fd, _name_of(bundle_id), self.path)
        except FileNotFoundError:
            return False
        except (UnsafePath, StoreIoError):
            return True

    def load(self) -> tuple[dict[bytes, IndexedBundle], dict[bytes, str]]:
        """What is noted, and why notes cannot be read, in words, by bundle.

        Raises:
            UnsafePath
            StoreIoError: the system refused to read one, twice; whether it is damaged is unknown.
        """
        found: dict[bytes, IndexedBundle] = {}
        unread: dict[bytes, str] = {}
        with contextlib.suppress(FileNotFoundError), self._opened() as fd:
            for match in filter(None, map(_NAME.fullmatch, sorted(list_names(fd, self.path)))):
                bundle_id, path = bytes.fromhex(match[1]), f"{self.path}/{match[0]}"
                try:
                    found[bundle_id] = decode_note(_read(fd, match[0], path), bundle_id)
                except FileNotFoundError:
                    continue  # it went since
                except (ValueError, TypeError, RecursionError) as error:
                    unread[bundle_id] = f"{path} is damaged: {reason_of(error)}."
                except StoreError as error:
                    if isinstance(error, StoreIoError) and error.details.get("errno") != errno.EIO:
                        raise
                    unread[bundle_id] = error.message
        return found, unread

    def _opened(self) -> AbstractContextManager[int]:
        return opened_folder(self._root_fd, ABSENT, self.path)


def encode_note(bundle: IndexedBundle) -> bytes:
    """The bytes of a version's note: the same row gives the same bytes."""
    facts = dict(zip(_FACTS, facts_of(bundle.row), strict=True))
    for name in _DIGESTS:
        facts[name] = None if facts[name] is None else facts[name].hex()
    return _FORMAT.encode(
        {
            "blocks": b"".join(BLOCK_KEY.pack(key) for key in sorted({block_key(one) for one in bundle.blocks})).hex(),
            "bundle": bundle.bundle_id.hex(),
            "needs": b"".join(sorted(set(bundle.refs))).hex(),
            "row": facts,
            "state": _STATES[bundle.status],
        }
    )


def decode_note(data: bytes, bundle_id: bytes) -> IndexedBundle:
    """What a note says of the version whose name it has. Raises ValueError, TypeError, RecursionError, StoreError for
    anything that `encode_note` would not have written."""
    fields = _FORMAT.decode(data, bundle_id.hex())
    facts: dict[str, Any] = fields["row"] if isinstance(fields.get("row"), dict) else {}
    for name in _DIGESTS:
        facts[name] = None if facts.get(name) is None else bytes.fromhex(facts[name])
    status = {state: status for status, state in _STATES.items()}.get(fields.get("state", ""), "")
    values = [facts.get(name) for name in _FACTS]
    if not all(type(value) in (int, str, bytes, NoneType) for value in values):
        raise TypeError("a value in it is of another kind")
    if any(type(value) is int and value.bit_length() > 63 for value in values):
        raise ValueError("a number in it is too large")
    if not (type(facts.get("version")) is int and 1 <= facts["version"] <= MAX_VERSION):
        raise ValueError("its version has a number that none can have")
    try:
        row = row_in((*values[:3], bundle_id, *values[3:]), "")
    except IndexFailed as error:
        raise ValueError(error.details["reason"]) from error
    row.model.encode()  # SQLite takes no text with half a character, and JSON does
    bundle = IndexedBundle(
        bundle_id, status, row, _cut(fields.get("needs"), 32), _cut(fields.get("blocks"), BLOCK_KEY.size)
    )
    if status not in _STATES or encode_note(bundle) != data:
        raise ValueError("it is not in the form in which it is written")
    return bundle


def _cut(text: Any, size: int) -> tuple[bytes, ...]:
    data = bytes.fromhex(text)
    if len(data) % size:
        raise ValueError("an id in it has another length")
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def _name_of(bundle_id: bytes) -> str:
    return f"{bundle_id.hex()}.json"


def _removed(folder_fd: int, name: str, folder_path: str, failed: list[StoreIoError]) -> bool:
    """Remove a note, if it is there. Where it stays, the error goes to `failed`."""
    try:
        return durable.remove(folder_fd, name, folder_path)
    except StoreIoError as error:
        if _may_be_there(folder_fd, name, folder_path):  # a read-only system refuses before it looks for the name
            failed.append(error)
        return False


def _may_be_there(folder_fd: int, name: str, folder_path: str) -> bool:
    try:
        return not stat.S_ISDIR(stat_name(folder_fd, name, f"{folder_path}/{name}").st_mode)
    except FileNotFoundError:
        return False
    except StoreIoError:
        return True


def _read(folder_fd: int, name: str, path: str) -> bytes:
    """The whole file, or one byte more than is allowed; asked twice."""
    with contextlib.suppress(StoreIoError):
        return read_small(folder_fd, name, MAX_NOTE_BYTES, path)
    try:
        return read_small(folder_fd, name, MAX_NOTE_BYTES, path)
    except StoreIoError as error:
        raise StoreIoError(
            f"{error.message} It tells of a version that has no file. Try again; if it stays so, move it out of the "
            "store.",
            **error.details,
        ) from error
