"""Versions of a store go into a remote: the blocks that it lacks, then places and manifest. The store is only read.

Rules:
- Every block is proven as it is read. A version that is not whole is not sent; of a stripped one that goes which is
  there.
- What is there already is not sent: blocks that versions of the same kin have there, those in the packs that were sent
  last (of a version, perhaps, that was deleted here meanwhile), and packs of an upload that was cut off. But what lies
  in packs that leave is sent again, under other names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..errors import Corruption, RemoteTooLarge, RemoteUnclear
from ..folder.marks import stripped_in
from ..format.blocks import BlockEntry
from ..format.frames import FrameReader
from ..format.manifest import Manifest
from ..limits import MAX_SENT_PACK_BYTES
from ..writing.core import StoreCore
from .pack_stream import PackStream
from .places import Place, Places
from .versions import RemoteVersions

_ROUNDS: Final = 4
"""How often it is looked whether packs leave that were relied on, while an upload takes long."""

_KIN: Final = 8
"""Versions that are asked for: their places are one request each."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What an upload did: blocks and bytes that were sent, and the blocks in all."""

    bundle_id: str
    blocks_sent: int
    bytes_sent: int
    blocks: int


def send(
    core: StoreCore,
    remote: RemoteVersions,
    bundle_id: str,
    goes_on: Callable[[], bool] = lambda: True,
    *,
    before: str | None = None,
) -> Sent | None:
    """Write what the remote lacks of a version. goes_on: asked before each pack; None: it said no. What has landed by
    then is not sent again. before: the version that the remote has of the session. The store may have let it go.

    Raises:
        Corruption: the version is missing, damaged, or not whole here, and not stripped.
        StoreBusy: it was packed anew meanwhile.
        RemoteUnreachable, RemoteRefused, RemoteUnclear: try again; what has landed is not sent twice.
        What `before_block` of the versions raises.
    """
    is_stripped = bundle_id in (stripped_in(core.folder) or ())
    with core.open_reader(bundle_id) as reader:

        def source(entry: BlockEntry, checked: bool) -> AbstractContextManager[FrameReader]:
            remote.before_block()
            return reader.holding(entry, checked=checked, stripped=is_stripped)

        manifest = reader.manifest
        remote.look()
        places = _places_there(remote, manifest, _kin_of(core, manifest, bundle_id, before), is_stripped=is_stripped)
        blocks_sent = bytes_sent = 0
        for _ in range(_ROUNDS):
            lacking = [entry for entry in manifest.blocks if entry.id not in places]
            for entries in _packs_of(lacking):
                if not goes_on():
                    return None
                landed, size_bytes = remote.put_pack(PackStream(entries, source))
                places |= landed
                bytes_sent += size_bytes
            blocks_sent += len(lacking)
            if not remote.has_looked:
                remote.look()
            staying = {block_id: place for block_id, place in places.items() if remote.has_pack(place.pack)}
            if len(staying) == len(places):
                remote.put_version(manifest, places)
                return Sent(bundle_id, blocks_sent, bytes_sent, len(manifest.blocks))
            places = staying
        raise RemoteUnclear(
            f"Packs leave {remote.objects.url} as fast as they are sent. Try again later.", url=remote.objects.url
        )


def _packs_of(lacking: Sequence[BlockEntry]) -> Iterator[list[BlockEntry]]:
    """The blocks in packs of about MAX_SENT_PACK_BYTES at most."""
    pack: list[BlockEntry] = []
    size_bytes = 0
    for entry in lacking:
        if pack and size_bytes + entry.raw_bytes > MAX_SENT_PACK_BYTES:
            yield pack
            pack, size_bytes = [], 0
        pack.append(entry)
        size_bytes += entry.raw_bytes
    if pack:
        yield pack


def _places_there(
    remote: RemoteVersions, manifest: Manifest, kin: Sequence[str], *, is_stripped: bool
) -> dict[bytes, Place]:
    """The places of blocks that the remote has, by what was sent last, and by what it has of their version's kin.
    is_stripped: headers alone will do."""
    places: dict[bytes, Place] = {}
    wanted = {entry.id for entry in manifest.blocks}
    sources: list[Callable[[], Places | None]] = [remote.places_sent, *(partial(remote.places_seen, of) for of in kin)]
    for source in sources:
        if wanted <= places.keys():
            break
        try:
            theirs = source()
        except (Corruption, RemoteTooLarge):  # what they tell is sent again
            continue
        new = {each: place for each, place in (theirs or {}).items() if each in wanted and each not in places}
        places |= {
            each: place
            for each, place in new.items()
            if (is_stripped or not place.frame.is_stripped) and remote.has_pack(place.pack)
        }
    return places


def _kin_of(core: StoreCore, manifest: Manifest, bundle_id: str, before: str | None) -> list[str]:
    """Versions that may have blocks of a version in the remote, those first that share most: itself, the one before it
    there, and those of the store with the same beginning."""
    ours = [entry.id for entry in manifest.blocks]
    kin = [bundle_id] if before is None else [bundle_id, before]
    if not ours:
        return kin
    shared: list[tuple[int, str]] = []
    for other in core.index.bundle_ids() - set(kin):
        theirs = core.needs.of(other)
        if theirs[:1] == tuple(ours[:1]):
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
            shared.append((-sum(1 for _ in alike), other))
    return kin + [other for _, other in sorted(shared)[:_KIN]]
