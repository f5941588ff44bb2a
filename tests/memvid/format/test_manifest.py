"""Manifests: one encoding, and nothing but what `encode` writes is read (threats 8, 15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.errors import CorruptBundle, InvalidDraft, LimitExceeded, StoreError
from torpor.memvid.format.blocks import BlockEntry
from torpor.memvid.format.manifest import LINE_BYTES, Manifest, decode_manifest, map_tells_of
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import IDENTITY, URI

ENTRIES = (
    BlockEntry(b"a" * 32, "span", 0, 256, 10),
    BlockEntry(b"b" * 32, "span", 256, 44, 10),
    BlockEntry(b"c" * 32, "state", 300, 0, 0),
)
MANIFEST = Manifest(URI, 3, "70" * 32, IDENTITY, 300, 1, ENTRIES, {"model": "demo", "labels": ["x"]}, {"torpor": "0"})


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert decode_manifest(MANIFEST.encode(), "file") == MANIFEST


def with_line(number: int, at: int, data: bytes) -> Callable[[dict[str, object]], object]:
    def edit(fields: dict[str, object]) -> None:
        lines = bytearray(fields["blocks"])  # type: ignore[call-overload]
        lines[number * LINE_BYTES + at : number * LINE_BYTES + at + len(data)] = data
        fields["blocks"] = bytes(lines)

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda fields: fields.pop("uri"), id="a field less"),
        pytest.param(lambda fields: fields.update(zz=1), id="a field more"),
        pytest.param(lambda fields: fields.update(uri="torpor://a/../b"), id="a uri"),
        pytest.param(lambda fields: fields.update(version=0), id="version 0"),
        pytest.param(lambda fields: fields.update(version=True), id="a version that is a truth value"),
        pytest.param(lambda fields: fields.update(parent=b"p"), id="a short parent"),
        pytest.param(lambda fields: fields.update(token_count=299), id="threat 8: fewer tokens"),
        pytest.param(lambda fields: fields.update(token_count=301), id="threat 8: more tokens"),
        pytest.param(lambda fields: fields.update(token_count=-1), id="threat 8: -1 tokens"),
        pytest.param(lambda fields: fields.update(token_count=1 << 63), id="threat 8: 2^63 tokens"),
        pytest.param(lambda fields: fields.update(created_ns="now"), id="a time that is text"),
        pytest.param(lambda fields: fields["identity"].reverse(), id="an identity out of order"),
        pytest.param(lambda fields: fields.update(identity=[]), id="no identity"),
        pytest.param(lambda fields: fields.update(identity=[[1, 2, 3]]), id="an identity of three"),
        pytest.param(lambda fields: fields.update(blocks=fields["blocks"][:-1]), id="a line cut"),
        pytest.param(lambda fields: fields.update(blocks=fields["blocks"] + bytes(LINE_BYTES)), id="a line of zeros"),
        pytest.param(lambda fields: fields.update(session=[]), id="a session that is a list"),
        pytest.param(lambda fields: fields["session"].update(labels=7), id="labels"),
        pytest.param(lambda fields: fields.update(environment={"a": 1}), id="an environment of numbers"),
        pytest.param(lambda fields: fields.update(environment={"a": "x" * 2000}), id="a long environment"),
        pytest.param(with_line(1, 50, b"\7\0"), id="a block kind"),
        pytest.param(with_line(1, 32, bytes(8)), id="threat 8: a start"),
        pytest.param(with_line(1, 39, b"\x40"), id="threat 8: a start of 2^62"),
        pytest.param(with_line(1, 47, b"\x40"), id="threat 12: 2^62 raw bytes"),
        pytest.param(with_line(1, 48, b"\0\0"), id="threat 8: no tokens in a span"),
        pytest.param(with_line(1, 52, b"\1"), id="zeros that are none"),
    ],
)
def test_a_manifest_that_encode_would_not_write_is_refused(edit: Callable[[dict[str, object]], object]) -> None:
    domain, fields = msgpack.unpackb(MANIFEST.encode())
    edit(fields)
    with pytest.raises(CorruptBundle):
        decode_manifest(msgpack.packb([domain, fields]), "file")


def test_keys_in_another_order_are_refused_though_they_say_the_same() -> None:
    """One manifest has one encoding: else one snapshot had two bundle ids."""
    domain, fields = msgpack.unpackb(MANIFEST.encode())
    turned = msgpack.packb([domain, dict(reversed(fields.items()))])
    assert msgpack.unpackb(turned) == [domain, fields]
    with pytest.raises(CorruptBundle):
        decode_manifest(turned, "file")
    longer = MANIFEST.encode().replace(b"\xabtoken_count\xcd\x01\x2c", b"\xabtoken_count\xce\x00\x00\x01\x2c")
    assert msgpack.unpackb(longer) == [domain, fields]
    with pytest.raises(CorruptBundle):
        decode_manifest(longer, "file")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"session": {"labels": ["x"] * 257}}, InvalidDraft),
        ({"session": {"labels": "x"}}, InvalidDraft),
        ({"session": {"labels": ["x" * 257]}}, InvalidDraft),
        ({"session": {"labels": [""]}}, InvalidDraft),
        ({"session": {"text": "x" * (4 << 20)}}, LimitExceeded),
        ({"session": {1: "x"}}, InvalidDraft),
    ],
)
def test_a_manifest_that_no_reader_would_take_is_not_written(change: dict[str, object], kind: type[StoreError]) -> None:
    with pytest.raises(kind):
        dataclasses.replace(MANIFEST, **change).encode()  # type: ignore[arg-type]


def test_a_manifest_tells_of_another_session_where_one_of_its_texts_is_its_whole_uri() -> None:
    origin = SessionUri("default", "origin")
    for session in ({"forked_from": {"session": str(origin)}}, {"any": [{"deep": [str(origin)]}]}):
        assert map_tells_of(session, origin)
    for text in (f"{origin}s", f"said of {origin}", origin.name):
        assert not map_tells_of({"forked_from": {"session": text}}, origin)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_manifest(data, "file")
