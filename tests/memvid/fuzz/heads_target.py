"""Heads of a remote: whoever may write there may write anything. The digest is made right again after each change."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from random import Random
from typing import Any, Final

import msgpack
from blake3 import blake3
from torpor.memvid.remote.heads import Head, Holder, Party
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.fuzz.mutation import change_bytes, change_document
from torpor.tests.memvid.fuzz.target import SOUND, Target, again, require

_URI: Final = re.compile(r"torpor://([A-Za-z0-9][A-Za-z0-9._-]{0,127})/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
_KEY: Final = re.compile(r"[a-z0-9_=%-][a-z0-9._=%-]*(/[a-z0-9_=%-][a-z0-9._=%-]*)*")


class HeadTarget(Target):
    name = "head"
    max_bytes = 1 << 19

    def seeds(self) -> Iterable[bytes]:
        party = Party("00000000-0000-4000-8000-000000000001", "a machine of Ana's")
        small = Head(SessionUri("default", "agent"), 1, 60, revision=1, token=b"t" * 16)
        yield small.encode()
        held = Head(
            SessionUri("a", "B.c"), 7, 3600, Holder(party, b"p" * 16), revision=9, token=b"u" * 16, request=party
        )
        yield held.encode()
        versions = tuple(f"{number:064x}" for number in range(40))
        yield Head(
            SessionUri("a", "b"),
            7,
            30,
            Holder(Party(party.store, "ä"), b"p" * 16, asleep=True),
            versions,
            tuple(f"tails/a/b/{number}" for number in range(9)),
            revision=9,
            token=b"u" * 16,
        ).encode()

    def change(self, data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.05:
            return change_bytes(data, rng)
        packed = change_document(data[32:], rng)
        return blake3(packed).digest() + packed

    def check(self, data: bytes) -> str:
        head = Head.decode(data, "input")
        require(again(head.encode) == data, "an accepted head is encoded otherwise")
        require(len(data) <= 1 << 18 and blake3(data[32:]).digest() == data[:32], "its size or its digest is wrong")
        name, fields = msgpack.unpackb(data[32:])
        require(name == "torpor.head/1", "it is no head")
        require(_URI.fullmatch(fields["uri"]) is not None and str(head.uri) == fields["uri"], "another session")
        for field, most in (("epoch", (1 << 53) - 1), ("revision", (1 << 53) - 1), ("lease_s", 3600)):
            require(type(fields[field]) is int and 1 <= fields[field] <= most, f"{field} is out of range")
            require(getattr(head, field) == fields[field], f"{field} is another")
        require(len(head.token) == 16 and head.token == fields["token"], "the token is no token")
        require(b"".join(map(bytes.fromhex, head.versions)) == fields["versions"], "other versions")
        require(len(set(head.versions)) == len(head.versions) <= 4096, "a version twice, or too many")
        require(list(head.tail) == fields["tail"] and len(head.tail) <= 512, "another tail")
        require(all(_KEY.fullmatch(key) and len(key) <= 200 for key in head.tail), "what is no key is in the tail")
        if head.holder is not None:
            require(len(head.holder.pulse) == 16 and type(head.holder.asleep) is bool, "a holder without a pulse")
            _require_party(head.holder.party, fields["holder"][:2])
        if head.request is not None:
            _require_party(head.request, fields["request"])
        return SOUND


def _require_party(party: Party, fields: list[Any]) -> None:
    require([party.store, party.machine] == fields, "another party")
    require(str(uuid.UUID(party.store)) == party.store, "a store without a uuid")
    require(party.machine.isprintable() and 1 <= len(party.machine) <= 255, "a machine's name that acts on a terminal")


TARGETS: Final = (HeadTarget,)
