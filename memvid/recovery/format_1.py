"""Small files of a store of format 1, read once to carry it over: its marks, its notes of missing versions, and the
manifest in a bundle's file. Pure but for reads; changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final

from ..answers import Lossy, VersionInfo
from ..disk.paths import list_names, read_at, read_small, stat_open
from ..disk.sealed_json import UNDECODED, SealedFormat
from ..errors import PUT_BACK, CorruptBundle, StoreError, Truncated, UnsupportedFormat
from ..folder.marks import MARKS_FILE, Marks, require_id, session_marks, uuid_in_marks
from ..folder.store_file import has_bundles, has_manifests, has_own_packs
from ..format.manifest import Manifest, bundle_id_of, decode_manifest, encode_manifest_file
from ..format.pack import Trailer
from ..format.sealing import HEADER_BYTES
from ..format_1 import TRAILER
from ..limits import MAX_MARKS_BYTES, MAX_MARKS_NODES, MAX_NOTE_BYTES, MAX_NOTE_NODES, MAX_VERSION
from ..uri import SessionUri

QUARANTINE: Final = "quarantine"
NOTES: Final = "absent"
LEFTOVERS: Final = re.compile(r"group\.json|rewrites\.[0-9]{1,15}|index\.sqlite-(sums|wal|shm|journal)", re.ASCII)
"""Files of a store of format 1 that say nothing to one of format 2."""
NOTE_NAME: Final = re.compile(r"([0-9a-f]{64})\.json", re.ASCII)
MOVED_NAME: Final = re.compile(r"([0-9a-f]{64})(\.mvb|\.mvd|\.mvr)\.([1-9][0-9]{0,8})", re.ASCII)
"""A bundle's file in quarantine: a version, one that was being deleted, or blocks for others."""

_MARKS: Final = SealedFormat("torpor.marks", 1, MAX_MARKS_BYTES, MAX_MARKS_NODES)
_STORE: Final = SealedFormat("torpor.store", 1, 4096, 64)
_NOTE: Final = SealedFormat("torpor.absent", 1, MAX_NOTE_BYTES, MAX_NOTE_NODES)
MALFORMED: Final = (*UNDECODED, StoreError)
"""What the decoders of this module raise for bytes that a store of format 1 has not written."""


@dataclass(frozen=True, slots=True)
class OldVersion:
    """A version in a bundle's file: its id, its manifest, and the manifest's bytes."""

    bundle_id: str
    manifest: Manifest
    encoded: bytes


def read_version(fd: int, path: str) -> OldVersion:
    """The version in an open bundle's file, whatever its name; its frames and its directory are not looked at.

    Raises:
        Truncated, CorruptBundle, LimitExceeded, StoreIoError
    """
    trailer = _trailer_of(fd, path)
    encoded = read_at(fd, trailer.manifest_offset, trailer.manifest_bytes, path)
    if not encoded or bundle_id_of(encoded) != trailer.bundle_id.hex():
        raise CorruptBundle(
            f"{path}: the manifest is damaged: its digest is not the bundle's id. {PUT_BACK}",
            path=path,
            part="manifest",
        )
    return OldVersion(trailer.bundle_id.hex(), decode_manifest(encoded, path), encoded)


def damaged_manifest(fd: int, path: str) -> bytes:
    """What a damaged bundle's file has of its manifest, as a manifest's file, which is damaged as well."""
    with contextlib.suppress(StoreError):
        trailer = _trailer_of(fd, path)
        return encode_manifest_file(read_at(fd, trailer.manifest_offset, trailer.manifest_bytes, path))
    return b""


def _trailer_of(fd: int, path: str) -> Trailer:
    """The trailer, whatever the header says: a damaged header costs frames, and not the manifest."""
    size_bytes = stat_open(fd, path).st_size
    if size_bytes < HEADER_BYTES + TRAILER.size_bytes:
        raise Truncated(f"{path} is cut off: it has {size_bytes} bytes.", path=path, size_bytes=size_bytes)
    trailer_bytes = TRAILER.size_bytes
    return TRAILER.decode(read_at(fd, size_bytes - trailer_bytes, trailer_bytes, path), size_bytes, path)


def is_marked(data: bytes, path: str) -> bool:
    """Whether store.json says that there is a file of marks."""
    return _STORE.decode(data, path).get("marked") is True


def uuid_without_store_file(root_fd: int, path: str) -> str | None:
    """The uuid of a store of format 1 that lacks its store.json, by its marks; "" where they do not tell it. None for
    any other folder. Beside marks of version 1 and no pack of its own nothing was written in format 2: so a carrying
    over may begin anew, also if the lost store.json was of version 2. Raises UnsafePath, StoreIoError."""
    if not has_bundles(root_fd, path) or has_own_packs(root_fd, path) or uuid_in_marks(root_fd, path) is not None:
        return None
    with contextlib.suppress(*UNDECODED, FileNotFoundError, UnsupportedFormat):
        data = read_small(root_fd, MARKS_FILE, MAX_MARKS_BYTES, f"{path}/{MARKS_FILE}")
        return str(uuid.UUID(_MARKS.decode(data, path).get("store")))
    return None if has_manifests(root_fd, path) else ""


def encode_old_store_file(root_fd: int, path: str, store_uuid: str) -> bytes:
    """A store.json of format 1, as the store had it."""
    return _STORE.encode({"uuid": store_uuid, "marked": MARKS_FILE in list_names(root_fd, path)})


def encode_no_old_marks(store_uuid: str) -> bytes:
    """The marks of a store of format 1 without tags and pins."""
    return _MARKS.encode({"store": store_uuid, "sessions": {}})


def decode_old_marks(data: bytes, store_uuid: str, path: str) -> Marks:
    """The tags and pins of a store of format 1. Raises MALFORMED."""
    fields = _MARKS.decode(data, path)
    if fields.get("store") != store_uuid:
        raise ValueError("it belongs to another store")
    sessions = {text: {**value, "stripped": ()} for text, value in fields["sessions"].items()}  # it knew no strips
    return Marks(store_uuid, {SessionUri.parse(text): session_marks(value) for text, value in sessions.items()})


def decode_note(data: bytes, bundle_id: str) -> VersionInfo:
    """The version that a note tells of, which has no file under bundles/. Raises MALFORMED."""
    fields = _NOTE.decode(data, bundle_id)
    facts = fields["row"]
    if fields.get("bundle") != bundle_id:
        raise ValueError("it tells of another bundle")
    is_exact = facts["lossy_bits"] is None or facts["lossy_tokens"] is None
    unread = _number(facts, "unread_tokens")
    return VersionInfo(
        session=str(SessionUri(_text(facts, "namespace"), _text(facts, "name"))),
        version=_number(facts, "version", 1, MAX_VERSION),
        bundle_id=bundle_id,
        parent=None if facts["parent"] is None else require_id(facts["parent"]),
        identity=require_id(facts["identity_digest"]),
        token_count=_number(facts, "token_count") + unread,
        unread_tokens=unread,
        bundle_bytes=_number(facts, "bundle_bytes"),
        logical_bytes=_number(facts, "logical_bytes"),
        created_ns=_number(facts, "created_ns"),
        model=_text(facts, "model"),
        labels=tuple(str(label) for label in json.loads(_text(facts, "labels"))),
        lossy=None if is_exact else Lossy(_number(facts, "lossy_bits"), _number(facts, "lossy_tokens")),
        unnamed=False,
        used_ns=0,
    )


def _number(facts: dict[str, Any], name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
    value = facts[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"its {name} is no number that it can be")
    return value


def _text(facts: dict[str, Any], name: str) -> str:
    value = facts[name]
    if type(value) is not str:
        raise ValueError(f"its {name} is no text")
    value.encode()  # SQLite takes no text with half a character, and JSON does
    return value
