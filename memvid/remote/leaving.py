"""`leaving/packs`: the packs of a remote that leave, as nothing needed them or they were damaged, in one object.

Who sends a version reads it, and relies on none of these: it sends such blocks again, under another name. So what is
listed here is needed by nothing more later than it was, and may be removed once what was under way has landed. One
object tells all, so that a look takes one request, and a collection is one change that lands or does not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import (
    CorruptBundle,
    Corruption,
    CorruptObject,
    RemoteError,
    RemoteTooLarge,
    RemoteUnclear,
    StoreError,
    UnsupportedFormat,
)
from ..format.packing import pack, unpack
from ..format.sealing import DIGEST_BYTES, corrupt
from ..limits import MAX_LEAVING, MAX_LEAVING_BYTES
from .objects import Objects
from .places import is_pack_key
from .probe import PROBES
from .sealing import seal, unseal

LEAVING_KEY: Final = "leaving/packs"
_DOMAIN: Final = "torpor.leaving/1"


@dataclass(frozen=True, slots=True)
class Leaving:
    """packs: since when each leaves, by its key; in nanoseconds since 1970, by the clock of the object store: since it
    was listed, or was last about to be removed. tag: of the object, for a change; None: there is none."""

    packs: Mapping[str, int] = field(default_factory=dict)
    tag: str | None = None


def read_leaving(objects: Objects) -> Leaving:
    """Raises CorruptBundle: other bytes than `encode_leaving` writes; UnsupportedFormat: a later version's; and as
    `Objects.get`."""
    path = f"{objects.url}/{LEAVING_KEY}"
    try:
        found = objects.get(LEAVING_KEY, MAX_LEAVING_BYTES)
        return Leaving() if found is None else Leaving(_decode(found.data, path), found.tag)
    except (CorruptBundle, CorruptObject, RemoteTooLarge) as error:
        raise CorruptBundle(
            f"{error.message} No version can be sent until it is written anew: `torpor repack --remote` does that.",
            path=path,
            part="list",
        ) from error


def encode_leaving(packs: Mapping[str, int]) -> bytes:
    return seal(pack([_DOMAIN, [[key, packs[key]] for key in sorted(packs)]], "leaving"))


def let_leave(objects: Objects, key: str) -> None:
    """List a pack that was read and is not what was written: who has its blocks sends them again then. Nothing happens
    where others change the list, or it cannot be reached: who reads the pack next lists it."""
    with contextlib.suppress(Corruption, RemoteError):
        before = read_leaving(objects)
        if key in before.packs or len(before.packs) >= MAX_LEAVING:
            return
        data = encode_leaving({**before.packs, key: now_ns(objects)})
        if before.tag is None:
            objects.create(LEAVING_KEY, data)
        else:
            objects.replace(LEAVING_KEY, data, before.tag)


def now_ns(objects: Objects) -> int:
    """The time by the object store's clock: that of an object which was written just now. Raises RemoteUnclear: it is
    not listed; and as `Objects`."""
    key = f"{PROBES}/{os.urandom(16).hex()}-now"
    try:
        with contextlib.suppress(RemoteUnclear):
            objects.put(key, [b"now"], 3)
        for entry in objects.entries(f"{PROBES}/"):
            if entry.key == key:
                return entry.modified_ns
    finally:
        with contextlib.suppress(RemoteError):
            objects.remove(key)
    raise RemoteUnclear(
        f"{objects.url} does not list what was written just now, so nothing tells how old a pack is. Try again later.",
        url=objects.url,
    )


def _decode(data: bytes, path: str) -> dict[str, int]:
    if (encoded := unseal(data)) is None:
        corrupt(path, "list", "its digest differs")
    try:
        document = unpack(encoded, max_bytes=MAX_LEAVING_BYTES - DIGEST_BYTES, what="leaving")
    except StoreError as error:
        corrupt(path, "list", error.message.rstrip("."))
    if not isinstance(document, list) or len(document) != 2 or not isinstance(document[0], str):
        corrupt(path, "list", "it does not say that it is one")
    if document[0] != _DOMAIN:
        raise UnsupportedFormat(
            f"{path} is a {document[0][:40]}; this program reads {_DOMAIN}. Use the Torpor that wrote it.",
            path=path,
            found=document[0][:40],
            supported=_DOMAIN,
        )
    lines = document[1]
    if not isinstance(lines, list) or len(lines) > MAX_LEAVING or not all(map(_is_line, lines)):
        corrupt(path, "list", "a line of it is not valid")
    packs: dict[str, int] = dict(lines)
    if encode_leaving(packs) != data:
        corrupt(path, "list", "it is not in the form in which it is written")
    return packs


def _is_line(line: Any) -> bool:
    return (
        isinstance(line, list)
        and len(line) == 2
        and isinstance(line[0], str)
        and is_pack_key(line[0])
        and type(line[1]) is int
        and line[1] >= 0
    )
