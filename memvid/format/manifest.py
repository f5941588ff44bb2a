"""The manifest of a bundle as a value, and its canonical encoding. The digest of that encoding is the bundle id.

Owns the manifest's fields and their checks. A manifest lists a snapshot's blocks, and the directory their places: so
frames can be moved and recompressed while the bundle stays the same. Of the session map it knows what a listing shows
without a model: the model's name, the labels, whether anybody named it, the loss, and the tokens without any state.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from ..answers import Lossy
from ..disk.paths import read_at, stat_open
from ..errors import BundleMismatch, InvalidDraft, LimitExceeded, StoreError
from ..limits import (
    MAX_BLOCKS,
    MAX_ENVIRONMENT_CHARS,
    MAX_ENVIRONMENT_ENTRIES,
    MAX_FRAME_BYTES,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_MANIFEST_BYTES,
    MAX_SESSION_MAP_BYTES,
    MAX_TOKENS,
    MAX_VERSION,
)
from ..uri import SessionUri
from .blocks import BLOCK_KINDS, ID_BYTES, TOKEN_BYTES, BlockEntry, most_blocks, require_chain
from .identity import Identity
from .packing import pack, unpack
from .sealing import HEADER_BYTES, MANIFEST_MAGIC, corrupt, encode_header, require_header

_DOMAIN: Final = "torpor.manifest/1"
_KEYS: Final = {
    "blocks", "created_ns", "environment", "identity", "parent", "session", "token_count", "uri", "version",
}  # fmt: skip
_LINE: Final = struct.Struct("<32sQQHHI")  # block id, start, raw bytes, tokens, kind, zero
LINE_BYTES: Final = _LINE.size

UNREAD: Final = "unread"
"""The entry of the session map for tokens behind the blocks, in that version alone: a map; its `tokens` are uint32, as
bytes. The layers above write and read them; the store counts them, so that no reader takes the ledger to be shorter."""

UNNAMED: Final = "unnamed"
"""The entry of the session map that is true where nobody chose the session's name; else false, or left out."""

LOSSY: Final = "lossy"
"""The entry of the session map for a loss, in a lossy version and in all later versions."""

ELSEWHERE: Final = "elsewhere"
"""The entry of the session map for how many of the first tokens another backend computed than the one it names."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`parent` is the bundle of the session's previous state. block_tokens: the tokens in its blocks; the file calls it
    `token_count`."""

    uri: SessionUri
    version: int
    parent: str | None
    identity: Identity
    block_tokens: int
    created_ns: int
    blocks: tuple[BlockEntry, ...]
    session: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def logical_bytes(self) -> int:
        """Raw bytes of the whole state, in this file and others."""
        return sum(entry.raw_bytes for entry in self.blocks)

    @property
    def model(self) -> str:
        """The model's short name as the session map tells it; "" if it does not."""
        name = self.session.get("model")
        return name if isinstance(name, str) else ""

    @property
    def labels(self) -> tuple[str, ...]:
        labels = self.session.get("labels")
        return tuple(label for label in labels if isinstance(label, str)) if isinstance(labels, list | tuple) else ()

    @property
    def unnamed(self) -> bool:
        """Whether nobody chose the session's name; False if another program wrote something else there."""
        return self.session.get(UNNAMED) is True

    @property
    def artifact_labels(self) -> tuple[str, ...]:
        """Labels for a file made from this version: the session's labels, the model's name, the version."""
        return tuple(dict.fromkeys(label for label in (*self.labels, self.model, f"v{self.version}") if label))

    @property
    def tail(self) -> bytes:
        """The tokens behind the blocks: whole uint32, as bytes."""
        return tail_in(self.session)

    @property
    def unread_tokens(self) -> int:
        """How many tokens follow the tokens in blocks; 0 if another program wrote something else there."""
        return len(self.tail) // TOKEN_BYTES

    @property
    def token_count(self) -> int:
        """All tokens of its ledger: a wake gives these back."""
        return self.block_tokens + self.unread_tokens

    @property
    def lossy(self) -> Lossy | None:
        """The loss, at most the version's tokens; None if there is none, or another program wrote something else
        there."""
        entry = self.session.get(LOSSY)
        if not isinstance(entry, Mapping) or entry.keys() != {"bits", "tokens"} or not self.block_tokens:
            return None
        bits, tokens = entry["bits"], entry["tokens"]
        if not all(type(value) is int and 0 < value <= MAX_TOKENS for value in (bits, tokens)):
            return None
        return Lossy(bits, min(tokens, self.block_tokens))

    def encode(self) -> bytes:
        """The canonical bytes. Raises InvalidDraft, LimitExceeded: it may not be written."""
        require_session_map(self.session)
        document = {
            "uri": str(self.uri),
            "version": self.version,
            "parent": None if self.parent is None else bytes.fromhex(self.parent),
            "identity": [[part, value] for part, value in self.identity.parts],
            "token_count": self.block_tokens,
            "created_ns": self.created_ns,
            "blocks": b"".join(_encode_line(entry) for entry in self.blocks),
            "session": dict(self.session),
            "environment": dict(self.environment),
        }
        data = pack([_DOMAIN, document], "manifest")
        if len(data) > MAX_MANIFEST_BYTES:
            raise LimitExceeded(
                f"the manifest would have {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}.",
                size_bytes=len(data),
                limit=MAX_MANIFEST_BYTES,
            )
        return data


def tail_in(session: Mapping[str, Any]) -> bytes:
    """As `Manifest.tail`, of a session map."""
    entry = session.get(UNREAD)
    tokens = entry.get("tokens") if isinstance(entry, dict) else None
    return tokens[: len(tokens) // TOKEN_BYTES * TOKEN_BYTES] if isinstance(tokens, bytes) else b""


def map_tells_of(session: Mapping[str, Any], uri: SessionUri) -> bool:
    """Whether a session map names another session's URI, as a fork's names its origin."""
    values: list[Any] = [session]
    while values:
        value = values.pop()
        if value == str(uri):
            return True
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
    return False


def require_session_map(session: Mapping[str, Any]) -> None:
    """Refuse a session map that a manifest may not hold, before anything is written."""
    size_bytes = len(pack(dict(session), "the session map"))
    if size_bytes > MAX_SESSION_MAP_BYTES:
        raise LimitExceeded(
            f"the session map has {size_bytes} packed bytes, the limit is {MAX_SESSION_MAP_BYTES}.",
            size_bytes=size_bytes,
            limit=MAX_SESSION_MAP_BYTES,
        )
    labels = session.get("labels", ())
    if not isinstance(labels, list | tuple) or len(labels) > MAX_LABELS:
        raise InvalidDraft(f"labels must be a list of at most {MAX_LABELS}.", field="labels")
    if not all(isinstance(label, str) and 1 <= len(label) <= MAX_LABEL_CHARS for label in labels):
        raise InvalidDraft(f"a label is text of 1 to {MAX_LABEL_CHARS} characters.", field="labels")


def bundle_id_of(encoded: bytes) -> str:
    """BLAKE3-256 of an encoded manifest, in hex: it names every block, and a block's id covers its bytes."""
    return blake3(encoded).hexdigest()


def end_record_of(manifest: Manifest) -> BlockEntry | None:
    """The state record that ends a version: it tells in which calls the tokens were read, and what came out. So a
    stripped version needs it too."""
    last = manifest.blocks[-1] if manifest.blocks else None
    return last if last is not None and last.kind == "state" else None


def whole_before(manifest: Manifest, entry: BlockEntry) -> int:
    """How many of a version's first tokens it has without `entry`. The record of its last position has the logits
    there, so what lacks that is whole up to the token before."""
    return min(entry.start, max(manifest.block_tokens - 1, 0))


def _encode_line(entry: BlockEntry) -> bytes:
    kind = BLOCK_KINDS.index(entry.kind)
    return _LINE.pack(entry.id, entry.start, entry.raw_bytes, entry.token_count, kind, 0)


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Decode a manifest; refuse all bytes that `encode` does not write: the packing and each field have one form.

    Raises:
        CorruptBundle, LimitExceeded
    """
    document = unpack(data, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    if not isinstance(document, list) or len(document) != 2 or document[0] != _DOMAIN:
        corrupt(path, "manifest", "it is not a manifest of this format version")
    fields = document[1]
    if not isinstance(fields, dict) or fields.keys() != _KEYS:
        corrupt(path, "manifest", "its fields are not those of this format version")
    try:
        token_count = integer_in(fields["token_count"], 0, MAX_TOKENS)
        manifest = Manifest(
            uri=SessionUri.parse(fields["uri"]),
            version=integer_in(fields["version"], 1, MAX_VERSION),
            parent=None if fields["parent"] is None else bytes_in(fields["parent"], ID_BYTES).hex(),
            identity=identity_in(fields["identity"]),
            block_tokens=token_count,
            created_ns=integer_in(fields["created_ns"], 0, (1 << 63) - 1),
            blocks=_decode_blocks(fields["blocks"], min(MAX_BLOCKS, most_blocks(token_count))),
            session=map_in(fields["session"]),
            environment=_environment(fields["environment"]),
        )
        require_session_map(manifest.session)
    except (StoreError, ValueError, TypeError) as error:
        corrupt(path, "manifest", str(error).rstrip("."))
    problem = require_chain(manifest.blocks, manifest.block_tokens)
    if problem:
        corrupt(path, "manifest", problem)
    return manifest


def _decode_blocks(lines: Any, most: int) -> tuple[BlockEntry, ...]:
    if not isinstance(lines, bytes) or len(lines) % LINE_BYTES or len(lines) > most * LINE_BYTES:
        raise ValueError("its block list has a wrong length")
    return tuple(_decode_line(fields) for fields in _LINE.iter_unpack(lines))


def _decode_line(fields: tuple[Any, ...]) -> BlockEntry:
    block_id, start, raw_bytes, token_count, kind, zero = fields
    if zero or start > MAX_TOKENS or raw_bytes > MAX_FRAME_BYTES or kind >= len(BLOCK_KINDS):
        raise ValueError("a line of its block list is outside its limits")
    return BlockEntry(block_id, BLOCK_KINDS[kind], start, token_count, raw_bytes)


def integer_in(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"a number is not within {low} to {high}")
    return value


def bytes_in(value: Any, size_bytes: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size_bytes:
        raise ValueError(f"an id does not have {size_bytes} bytes")
    return value


def identity_in(value: Any) -> Identity:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("its identity is not a list of pairs")
    parts = tuple((part, text) for part, text in value)
    identity = Identity(parts)
    if identity.parts != parts:
        raise ValueError("its identity is out of order")
    return identity


def map_in(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a map is missing")  # noqa: TRY004 - one kind of refusal, turned into CorruptBundle above
    return value


def _environment(value: Any) -> dict[str, str]:
    environment = map_in(value)
    if len(environment) > MAX_ENVIRONMENT_ENTRIES:
        raise ValueError("its environment has too many entries")
    for key, text in environment.items():
        if not isinstance(text, str) or max(len(key), len(text)) > MAX_ENVIRONMENT_CHARS:
            raise ValueError("its environment holds something else than short text")
    return environment


# --- its file


def encode_manifest_file(encoded: bytes) -> bytes:
    """The file of an encoded manifest: a header, then its bytes. Its name is the bundle id."""
    return encode_header(MANIFEST_MAGIC, HEADER_BYTES + len(encoded)) + encoded


def is_manifest_file(data: bytes, bundle_id: str) -> bool:
    """Whether these are the bytes of a sound file of that manifest. `read_manifest_bytes` says why not."""
    header = encode_header(MANIFEST_MAGIC, len(data))
    return data[:HEADER_BYTES] == header and bundle_id_of(data[HEADER_BYTES:]) == bundle_id


def read_manifest_bytes(fd: int, path: str, bundle_id: str | None) -> bytes:
    """The manifest's bytes in an open file, whose digest is `bundle_id`; None: whatever it is.

    Raises:
        UnsupportedFormat, Truncated, TrailingData, CorruptBundle, BundleMismatch, LimitExceeded, StoreIoError
    """
    size_bytes = stat_open(fd, path).st_size
    if size_bytes > MAX_MANIFEST_BYTES + HEADER_BYTES:
        raise LimitExceeded(
            f"{path} has {size_bytes} bytes; a manifest has at most {MAX_MANIFEST_BYTES}.",
            path=path,
            size_bytes=size_bytes,
            limit=MAX_MANIFEST_BYTES,
        )
    return manifest_in_file(read_at(fd, 0, size_bytes, path), path, bundle_id)


def manifest_in_file(data: bytes, path: str, bundle_id: str | None) -> bytes:
    """The manifest's bytes in those of its file. Raises as `read_manifest_bytes`."""
    require_header(data[:HEADER_BYTES], MANIFEST_MAGIC, len(data), path)
    encoded = data[HEADER_BYTES:]
    digest = bundle_id_of(encoded)
    if bundle_id is not None and digest != bundle_id:
        raise BundleMismatch(
            f"{path} is damaged, or another version's: its content is not what its name promises.",
            path=path,
            expected=bundle_id,
            found=digest,
        )
    return encoded


def read_manifest(fd: int, path: str, bundle_id: str) -> Manifest:
    """The manifest in an open file. Raises as `read_manifest_bytes`, and CorruptBundle where it is not valid."""
    return decode_manifest(read_manifest_bytes(fd, path, bundle_id), path)
