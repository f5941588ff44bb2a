"""The index's facts of one bundle: its row, the bundles it refers to, and the blocks in its file.

Owns the columns of a row and their form.
"""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final

import msgpack
from blake3 import blake3

from ..disk.paths import Stamp
from ..errors import CorruptBundle, IndexFailed, StoreError
from ..format.bundle import BundleFile
from ..format.ledger_tail import unread_of
from ..format.lossy import Lossy, lossy_of
from ..format.manifest import Manifest
from ..format.records import IndexRow
from ..format.salvaged import Salvaged, salvaged_of
from ..uri import SessionUri

LIVE: Final = "live"
UNREADABLE: Final = "unreadable"
"""A bundle whose file cannot be read, and that no row told of before. Whose version it is stands in its row where its
manifest, or a mark, still tells."""
SHADOWED: Final = "shadowed"
MISSED: Final = "missed"
"""A version that only its marks tell of: the index was made anew without its file, or was behind. Of its row only
owner, number and bundle are facts."""
ASIDE: Final = "aside"
"""A version that repair has set aside: no version at present, but its number is given to no other, and what it needs
stays, so that it can come back."""
COLUMNS: Final = (
    "namespace, name, version, bundle_id, parent, identity_digest, token_count, bundle_bytes, logical_bytes, "
    "created_ns, model, labels, salvaged_tokens, salvaged_of, unread_tokens, lossy_bits, lossy_tokens"
)
BLOCK_KEY: Final = struct.Struct(">q")
_STORAGE_BYTES: Final = 16
STAMP: Final = struct.Struct(">QQqq")  # inode, length, modification and change time


@dataclass(frozen=True, slots=True)
class IndexedBundle:
    """The index entry of one bundle file; `row` is None for one of unknown owner.

    `refs` are the other bundles that hold blocks of this one, `blocks` the ids of all frames in its file. Of the ids
    the index keeps the first 8 bytes, and `Index.stored` gives no more of them back. `stamp` tells the file that this
    was read from, or that was written so; None for no file, which the next opening then reads.
    """

    bundle_id: bytes
    status: str
    row: IndexRow | None
    refs: tuple[bytes, ...]
    blocks: tuple[bytes, ...]
    stamp: Stamp | None = field(default=None, compare=False)

    @property
    def storage(self) -> bytes:
        """A digest of its references and blocks, as far as an index keeps these."""
        keys = sorted({block_key(block) for block in self.blocks})
        return blake3(msgpack.packb((sorted(set(self.refs)), keys))).digest(_STORAGE_BYTES)


def indexed(file: BundleFile) -> IndexedBundle:
    """The index entry of a readable live bundle. The one place that knows where a file holds each fact.

    Raises:
        CorruptBundle: the file only holds blocks for others, which no version does.
    """
    if file.manifest is None:
        raise CorruptBundle(
            f"{file.path} has the ending of a version, but no manifest.", path=file.path, part="manifest"
        )
    row = row_of(file.manifest, file.bundle_id, file.file_bytes)
    return IndexedBundle(file.bundle_id, LIVE, row, file.directory.holders, tuple(file.frames), file.stamp())


def row_of(manifest: Manifest, bundle_id: bytes, bundle_bytes: int) -> IndexRow:
    return IndexRow(
        uri=manifest.uri,
        version=manifest.version,
        bundle_id=bundle_id,
        parent=manifest.parent,
        identity_digest=manifest.identity.digest,
        token_count=manifest.token_count,
        bundle_bytes=bundle_bytes,
        logical_bytes=manifest.logical_bytes,
        created_ns=manifest.created_ns,
        model=manifest.model,
        labels=manifest.labels,
        salvaged=salvaged_of(manifest),
        unread_tokens=unread_of(manifest),
        lossy=lossy_of(manifest),
    )


def block_key(block_id: bytes) -> int:
    (key,) = BLOCK_KEY.unpack_from(block_id)
    return int(key)


def stamped(stamp: Stamp | None) -> bytes | None:
    """A stamp as a row keeps it: without the device, whose number may be another after a restart."""
    return None if stamp is None else STAMP.pack(*stamp[1:])


def id_of(value: Any, path: str) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise failed(path, "it holds a row that is not valid: an id has the wrong form")
    return value


def row_in(columns: tuple[Any, ...], path: str) -> IndexRow:
    """A row that was read (COLUMNS), as a value. Written out, for a listing does it for every session."""
    namespace, name, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created = columns[:10]
    model, labels, saved, saved_of, unread, bits, lossy_tokens = columns[10:]
    try:
        numbers = (version, tokens, file_bytes, raw_bytes, created, unread)
        if not all(type(number) is int for number in numbers):
            raise TypeError("a number is none")
        if not (type(bundle_id) is type(identity) is bytes and len(bundle_id) == len(identity) == 32):
            raise TypeError("an id has the wrong form")
        if parent is not None and not (type(parent) is bytes and len(parent) == 32):
            raise TypeError("the parent's id has the wrong form")
        if not (type(model) is type(labels) is str):
            raise TypeError("a text is none")
        if not all(type(number) in (int, NoneType) for number in (saved, saved_of, bits, lossy_tokens)):
            raise TypeError("a number is none")
        names = () if labels == "[]" else _labels(labels)
        uri = SessionUri(namespace, name)
        salvaged = None if saved is None else Salvaged(saved, saved_of)
        lossy = None if bits is None or lossy_tokens is None else Lossy(bits, lossy_tokens)
    except (StoreError, TypeError, ValueError, RecursionError) as error:
        raise failed(path, f"it holds a row that is not valid: {error}") from error
    return IndexRow(
        uri, version, bundle_id, parent, identity, tokens, file_bytes, raw_bytes, created, model, names, salvaged,
        unread, lossy,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _labels(encoded: str) -> tuple[str, ...]:
    return tuple(str(label) for label in json.loads(encoded))


def failed(path: str, why: str) -> IndexFailed:
    return IndexFailed(
        f"The index {path} failed: {why}. Where the disk has room and takes writes, `torpor rebuild-index` makes it "
        "anew from the bundles.",
        path=path,
        reason=why,
    )


def facts_of(row: IndexRow | None) -> tuple[Any, ...]:
    """The columns of a row but for its bundle's id, in their order; all empty for a bundle of unknown owner."""
    if row is None:
        return (None,) * 16
    return (
        row.uri.namespace, row.uri.name, row.version, row.parent, row.identity_digest, row.token_count,
        row.bundle_bytes, row.logical_bytes, row.created_ns, row.model, json.dumps(row.labels),
        *((row.salvaged.tokens, row.salvaged.of) if row.salvaged else (None, None)), row.unread_tokens,
        *((row.lossy.bits, row.lossy.tokens) if row.lossy else (None, None)),
    )  # fmt: skip
