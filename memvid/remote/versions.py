"""The versions of a remote: what is there of one, as objects. Reads and writes them; knows no store, and no head.

Rules:
- Every object here has a name that its content gives, so what lies under the name is right, or damaged, and may be
  written again. Nothing is believed to have landed, or to be gone, before it was read back.
- Where the places of a version are, its manifest is, which tells whose it is: it is written first, and removed last.
- A pack that leaves (`leaving.py`) is as good as gone for who sends. What the look at these tells holds for `LOOK_S`: a
  head that relies on it is changed within that time, or after another look.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

from ..disk.clock import running_s
from ..errors import BundleMissing, CorruptBundle, Corruption, RemoteTooLarge, RemoteUnclear, RemoteUnreachable
from ..format.manifest import Manifest, bundle_id_of, decode_manifest, encode_manifest_file, manifest_in_file
from ..format.sealing import HEADER_BYTES
from ..limits import MAX_MANIFEST_BYTES, MAX_PLACES_BYTES, REMOTE_GRACE_S
from .leaving import read_leaving
from .objects import Objects
from .pack_stream import PackStream
from .places import Place, Places, decode_places, encode_places, manifest_key, own_keys, pack_key, places_key

_TRIES: Final = 3
_REMEMBERED: Final = 16

LOOK_S: Final = REMOTE_GRACE_S / 4


class RemoteVersions:
    """What a remote has of versions. Remembers the places of a few, and for a time the packs that it has seen there.
    Use it from one thread at a time. clock: seconds, on in a suspend: `disk.clock.running_s`. before_block: called
    before each block that is sent or fetched; what it raises ends that there. on_pack: is told of each pack before it
    is sent; it may be set."""

    def __init__(
        self,
        objects: Objects,
        clock: Callable[[], float] = running_s,
        before_block: Callable[[], None] = lambda: None,
    ) -> None:
        self.objects = objects
        self.before_block = before_block
        self.on_pack: Callable[[str], None] = lambda key: None
        self._clock = clock
        self._places: OrderedDict[str, Places] = OrderedDict()
        self._packs: dict[str, float] = {}  # seen there, and when
        self._sent: OrderedDict[str, Places] = OrderedDict()  # what lies in the packs that were sent last
        self._leaving: Collection[str] = ()
        self._looked_s = -math.inf

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
        key = places_key(bundle_id)
        found = self.objects.get(key, MAX_PLACES_BYTES)
        if found is None:
            return None
        return _remember(self._places, bundle_id, decode_places(found.data, bundle_id, self.path_of(key)))

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

    def places_seen(self, bundle_id: str) -> Places | None:
        """As `places`, but they may be those of an earlier time: who uses them asks for the packs."""
        if bundle_id in self._places:
            self._places.move_to_end(bundle_id)
            return self._places[bundle_id]
        return self.places(bundle_id)

    # --- writing

    def forget_seen(self) -> None:
        """Ask anew what is there."""
        self._places.clear()
        self._packs.clear()

    def look(self) -> None:
        """Look which packs leave. Raises as `read_leaving`."""
        begun_s = self._clock()
        self._leaving = read_leaving(self.objects).packs.keys()
        self._looked_s = begun_s
        self._packs = {key: seen_s for key, seen_s in self._packs.items() if begun_s - seen_s < REMOTE_GRACE_S}

    @property
    def has_looked(self) -> bool:
        """Whether what the last look told holds still."""
        return self._clock() - self._looked_s < LOOK_S

    def require_look(self) -> None:
        """Before a head is changed, which relies on packs. Raises RemoteUnreachable: it has taken too long."""
        if not self.has_looked:
            raise RemoteUnreachable(
                f"Since it was looked what {self.objects.url} has, too much time has passed: this machine was "
                "suspended, or the remote is slow. Try again; what has landed is not sent twice.",
                url=self.objects.url,
            )

    def places_sent(self) -> Places:
        """Places in the packs that were sent last, also of versions that are there no more, or never were. Who uses
        them asks for the packs."""
        return {block_id: place for places in self._sent.values() for block_id, place in places.items()}

    def has_pack(self, key: str) -> bool:
        """Whether a pack is there to stay, of whatever length; asked for once in a while. Raises as `Objects`."""
        if key in self._leaving:
            return False
        begun_s = self._clock()
        if key not in self._packs and self.objects.size(key) is not None:
            self._packs[key] = begun_s
        return key in self._packs

    def put_pack(self, stream: PackStream) -> tuple[Places, int]:
        """Send a pack, unless it is there to stay; the places of its blocks, and the bytes that were sent. Raises the
        errors of the stream, RemoteUnclear, and as `Objects`."""
        keys = (pack_key(stream.pack_id, number) for number in itertools.count())
        key, sent = next(key for key in keys if key not in self._leaving), 0
        begun_s = self._clock()
        if self.objects.size(key) != stream.size_bytes:
            self.on_pack(key)
            sent = self._put(key, stream)
        self._packs[key] = begun_s
        places = {frame.id: Place(key, frame) for frame in stream.frames}
        return _remember(self._sent, key, places), sent

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
        """Write the manifest and the places of a version whose packs are there, unless they are; its bundle id. Raises
        RemoteUnclear, and as `Objects`."""
        encoded = manifest.encode()
        bundle_id = bundle_id_of(encoded)
        ours = {entry.id: places[entry.id] for entry in manifest.blocks}
        self.write(manifest_key(bundle_id), encode_manifest_file(encoded))
        if not self._has_places(manifest, bundle_id, ours):
            self.write(places_key(bundle_id), encode_places(bundle_id, ours.values()))
            _remember(self._places, bundle_id, ours)
        return bundle_id

    def _has_places(self, manifest: Manifest, bundle_id: str, ours: Places) -> bool:
        """Whether another upload has left places that do: it may have cut the packs otherwise."""
        try:
            places = self.places_for(manifest, bundle_id)
        except (Corruption, RemoteTooLarge):
            return False
        if any(places[each].frame.is_stripped and not place.frame.is_stripped for each, place in ours.items()):
            return False
        return all(map(self.has_pack, {place.pack for place in places.values()}))

    def remove_version(self, bundle_id: str) -> None:
        """Remove the places and the manifest of a version; from any thread. Nobody sends it meanwhile. Raises as
        `remove`."""
        for key in own_keys(bundle_id):
            self.remove(key)

    def remove(self, key: str) -> None:
        """Remove an object, and see that it is gone; from any thread. Raises RemoteUnclear, and as `Objects`."""
        for _ in range(_TRIES):
            try:
                self.objects.remove(key)
            except RemoteUnclear as error:
                unclear: RemoteUnclear | None = error
            else:
                unclear = None
            if self.objects.size(key) is None:
                return
        raise unclear or RemoteUnclear(f"{self.path_of(key)} is there still, though it was removed.", key=key)

    def write(self, key: str, data: bytes) -> None:
        """Write a small object whose name nothing else has, unless it is there; from any thread. Raises RemoteUnclear,
        and as `Objects`."""
        for _ in range(_TRIES):
            unclear: RemoteUnclear | None = None
            try:
                if self.objects.create(key, data) is not None or self._has(key, data):
                    return
                self.objects.put(key, [data], len(data))  # nothing is there (409), or it is damaged
            except RemoteUnclear as error:
                unclear = error
            if self._has(key, data):
                return
        raise unclear or RemoteUnclear(f"{self.path_of(key)} does not read back as it was sent.", key=key)

    def _has(self, key: str, data: bytes) -> bool:
        try:
            found = self.objects.get(key, max(len(data), 1))
        except (Corruption, RemoteTooLarge):  # of a sealed remote, or longer than what we write: another one
            return False
        return found is not None and found.data == data

    def missing(self, key: str) -> BundleMissing:
        """The error for an object that a version needs."""
        path = self.path_of(key)
        return BundleMissing(
            f"{path} is missing: the remote does not have this version whole. Push it again from a machine that has "
            "it.",
            path=path,
        )


def _remember(among: OrderedDict[str, Places], key: str, places: Places) -> Places:
    among[key] = places
    among.move_to_end(key)
    while len(among) > _REMEMBERED:
        among.popitem(last=False)
    return places
