"""The versions of a remote: what is there of one, as objects. Reads and writes them; knows no store, and no head.

Rules:
- Every object here has a name that its content gives, so what lies under the name is right, or damaged, and may be
  written again. Nothing is believed to have landed before it was read back.
- Manifest last: where it is, its places are, and the packs that they name.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ..errors import BundleMissing, CorruptBundle, Corruption, RemoteUnclear
from ..format.manifest import Manifest, bundle_id_of, decode_manifest, encode_manifest_file, manifest_in_file
from ..format.sealing import HEADER_BYTES
from ..limits import MAX_MANIFEST_BYTES, MAX_PLACES_BYTES
from .objects import Objects
from .pack_stream import PackStream
from .places import Place, Places, decode_places, encode_places, manifest_key, pack_key, places_key

_TRIES: Final = 3
_REMEMBERED: Final = 16


class RemoteVersions:
    """What a remote has of versions. Remembers the places of a few, and the packs that it has seen there. Use it from
    one thread at a time."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._places: OrderedDict[str, Places] = OrderedDict()
        self._packs: set[str] = set()

    def path_of(self, key: str) -> str:
        """The object, for messages."""
        return f"{self.objects.url}/{key}"

    def manifest(self, bundle_id: str) -> Manifest | None:
        """The manifest of a version, proven to be the one that was asked for; None if it is not there. Raises
        Corruption, UnsupportedFormat, and as `Objects`."""
        key = manifest_key(bundle_id)
        found = self.objects.get(key, MAX_MANIFEST_BYTES + HEADER_BYTES)
        if found is None:
            return None
        path = self.path_of(key)
        return decode_manifest(manifest_in_file(found.data, path, bundle_id), path)

    def require_manifest(self, bundle_id: str) -> Manifest:
        """Raises BundleMissing, and as `manifest`."""
        manifest = self.manifest(bundle_id)
        if manifest is None:
            raise self.missing(manifest_key(bundle_id))
        return manifest

    def places(self, bundle_id: str) -> Places | None:
        """The places of a version's blocks; None if they are not there. Raises CorruptBundle, and as `Objects`."""
        if bundle_id in self._places:
            self._places.move_to_end(bundle_id)
            return self._places[bundle_id]
        key = places_key(bundle_id)
        found = self.objects.get(key, MAX_PLACES_BYTES)
        return None if found is None else self._keep(bundle_id, decode_places(found.data, bundle_id, self.path_of(key)))

    def places_for(self, manifest: Manifest, bundle_id: str) -> Places:
        """The places of all blocks of a version. Raises BundleMissing, CorruptBundle: they are not there, or not of
        all."""
        places = self.places(bundle_id)
        if places is None:
            raise self.missing(places_key(bundle_id))
        if lacking := [entry for entry in manifest.blocks if entry.id not in places]:
            path = self.path_of(places_key(bundle_id))
            raise CorruptBundle(f"{path} has no place for the block at token {lacking[0].start}.", path=path)
        return places

    # --- writing

    def has_pack(self, key: str) -> bool:
        """Whether a pack is there, of whatever length; asked for once. Raises as `Objects`."""
        if key not in self._packs and self.objects.size(key) is not None:
            self._packs.add(key)
        return key in self._packs

    def put_pack(self, stream: PackStream) -> tuple[dict[bytes, Place], int]:
        """Send a pack, unless it is there; the places of its blocks, and the bytes that were sent. Raises the errors of
        the stream, RemoteUnclear, and as `Objects`."""
        key, sent = pack_key(stream.pack_id), 0
        if self.objects.size(key) != stream.size_bytes:
            sent = self._put(key, stream)
        self._packs.add(key)
        return {frame.id: Place(key, frame) for frame in stream.frames}, sent

    def _put(self, key: str, stream: PackStream) -> int:
        for _ in range(_TRIES):
            try:
                self.objects.put(key, stream.parts(), stream.size_bytes)
            except RemoteUnclear as error:
                unclear: RemoteUnclear | None = error
            else:
                unclear = None
            if self.objects.size(key) == stream.size_bytes:
                return stream.size_bytes
        raise unclear or RemoteUnclear(f"{self.path_of(key)} does not read back as it was sent.", key=key)

    def put_version(self, manifest: Manifest, places: Places) -> str:
        """Write the places and the manifest of a version whose packs are there, unless they are; its bundle id. Raises
        RemoteUnclear, and as `Objects`."""
        encoded = manifest.encode()
        bundle_id = bundle_id_of(encoded)
        ours = {entry.id: places[entry.id] for entry in manifest.blocks}
        if not self._has_places(manifest, bundle_id, ours):
            self._write(places_key(bundle_id), encode_places(bundle_id, ours.values()))
            self._keep(bundle_id, ours)
        self._write(manifest_key(bundle_id), encode_manifest_file(encoded))
        return bundle_id

    def _has_places(self, manifest: Manifest, bundle_id: str, ours: Places) -> bool:
        """Whether another upload has left places that do: it may have cut the packs otherwise."""
        try:
            places = self.places_for(manifest, bundle_id)
        except Corruption:
            return False
        if any(places[each].frame.is_stripped and not place.frame.is_stripped for each, place in ours.items()):
            return False
        return all(map(self.has_pack, {place.pack for place in places.values()}))

    def _write(self, key: str, data: bytes) -> None:
        for _ in range(_TRIES):
            unclear: RemoteUnclear | None = None
            try:
                if self.objects.create(key, data) is not None or self._has(key, data):
                    return
                self.objects.put(key, [data], len(data))  # what is there is damaged: the name says what it must be
            except RemoteUnclear as error:
                unclear = error
            if self._has(key, data):
                return
        raise unclear or RemoteUnclear(f"{self.path_of(key)} does not read back as it was sent.", key=key)

    def _has(self, key: str, data: bytes) -> bool:
        try:
            found = self.objects.get(key, max(len(data), 1))
        except Corruption:  # of a sealed remote
            return False
        return found is not None and found.data == data

    def _keep(self, bundle_id: str, places: Places) -> Places:
        self._places[bundle_id] = places
        self._places.move_to_end(bundle_id)
        while len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)
        return places

    def missing(self, key: str) -> BundleMissing:
        """The error for an object that a version needs."""
        path = self.path_of(key)
        return BundleMissing(
            f"{path} is missing: the remote does not have this version whole. Push it again from a machine that has "
            "it.",
            path=path,
        )
