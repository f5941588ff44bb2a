"""Where the blocks of a version lie in a remote: keys, and the object that tells the place of each block.

    packs/<pack id>.<n>         frames, as in a pack of a store; n tells packs of one content apart
    versions/<bundle id>.mvm    the manifest's file, as in a store
    places/<bundle id>          in which pack, and where in it, each block of the version lies

The places are no part of a version: a bundle id says nothing of them, and each block is proven by its own id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import StoreError
from ..format.layout import Frame
from ..format.pack import decode_lines, encode_lines
from ..format.packing import pack, unpack
from ..format.sealing import HEADER_BYTES, corrupt
from ..limits import MAX_BUNDLE_BYTES, MAX_PLACES_BYTES
from .sealing import seal, unseal

_DOMAIN: Final = "torpor.places/1"
_MANIFEST_KEY: Final = re.compile(r"versions/([0-9a-f]{64})\.mvm", re.ASCII)
_PACK_KEY: Final = re.compile(r"packs/[0-9a-f]{64}\.[0-9]{1,4}", re.ASCII)


def pack_key(pack_id: bytes, number: int = 0) -> str:
    return f"packs/{pack_id.hex()}.{number}"


def is_pack_key(key: str) -> bool:
    return _PACK_KEY.fullmatch(key) is not None


def manifest_key(bundle_id: str) -> str:
    return f"versions/{bundle_id}.mvm"


def places_key(bundle_id: str) -> str:
    return f"places/{bundle_id}"


def own_keys(bundle_id: str) -> list[str]:
    """The objects that a version has alone, in the order in which they are removed."""
    return [places_key(bundle_id), manifest_key(bundle_id)]


def bundle_id_in(key: str) -> str | None:
    """Of which version an object is the manifest; None: it is none."""
    found = _MANIFEST_KEY.fullmatch(key)
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies: the key of a pack, and the frame in it."""

    pack: str
    frame: Frame


Places = Mapping[bytes, Place]
"""By block id."""


def encode_places(bundle_id: str, places: Iterable[Place]) -> bytes:
    """The object of a version's places: a digest, then the packs by their keys, each with a line for each frame."""
    packs: dict[str, list[Frame]] = {}
    for place in places:
        packs.setdefault(place.pack, []).append(place.frame)
    lines = [[key, encode_lines(sorted(frames, key=lambda each: each.offset))] for key, frames in sorted(packs.items())]
    return seal(pack([_DOMAIN, bytes.fromhex(bundle_id), lines], "places"))


def decode_places(data: bytes, bundle_id: str, path: str) -> dict[bytes, Place]:
    """The places of a version. Raises CorruptBundle: bytes that `encode_places` does not write for it."""
    if (encoded := unseal(data)) is None:
        corrupt(path, "places", "their digest differs")
    try:
        document = unpack(encoded, max_bytes=MAX_PLACES_BYTES, what="places")
    except StoreError as error:
        corrupt(path, "places", error.message.rstrip("."))
    if not isinstance(document, list) or len(document) != 3 or document[:2] != [_DOMAIN, bytes.fromhex(bundle_id)]:
        corrupt(path, "places", "they are not those of this version, or of another format version")
    if not isinstance(document[2], list):
        corrupt(path, "places", "they list no packs")
    places: dict[bytes, Place] = {}
    for line in document[2]:
        if not isinstance(line, list) or len(line) != 2 or not isinstance(line[0], str):
            corrupt(path, "places", "a line of them is not valid")
        key, frames = line[0], decode_lines(line[1], "places", path)
        if not is_pack_key(key):
            corrupt(path, "places", "a pack in them has another name than a pack")
        end = HEADER_BYTES
        for frame in frames:
            if frame.offset < end or frame.id in places:
                corrupt(path, "places", "frames in them overlap, or a block has two places")
            end = frame.offset + frame.frame_bytes
            places[frame.id] = Place(key, frame)
        if end > MAX_BUNDLE_BYTES:
            corrupt(path, "places", "a pack in them is larger than any")
    if encode_places(bundle_id, places.values()) != data:
        corrupt(path, "places", "they are not in the form in which they are written")
    return places
