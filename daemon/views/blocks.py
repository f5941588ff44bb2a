"""The blocks of a session or of a version: what they hold, how they lie on the disk, and who needs them."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from ...memvid.answers import Finding, VersionInfo
from ...memvid.errors import Corruption, StoreError
from ...memvid.folder.folder import id_in
from ...memvid.maintenance.needers import BlockPlace, Needers
from ...memvid.store import Store
from ...memvid.writing.reader import BundleReader
from ..api.blocks import BlockInfo, BlocksResult
from .ledgers import Present
from .roles import RoleSpan, held_in, role_spans, with_thinking

MAX_BLOCKS_TOLD: Final = 4096
"""Of one version: a million tokens."""

MAX_PROBLEMS_TOLD: Final = 100

Mark = tuple[int, ...]
"""A mark of a model, as tokens."""


def blocks_of(
    store: Store,
    present: Present,
    *,
    deep: bool = False,
    thinking: tuple[Mark, Mark] | None = None,
    spans: Sequence[RoleSpan] = (),
    at_each_block: Callable[[], object] = lambda: None,
) -> BlocksResult:
    """The blocks of what a session or a version holds, as the files tell. deep: every byte is read. thinking: where
    thoughts begin and end, if the model is known. spans: whose the tokens are, if more is known than the session map
    tells. at_each_block: is called before each; what it raises ends the look. Raises the errors of a manifest that is
    missing or damaged."""
    row = present.row
    with store.open_session(row.uri, row.bundle_id) as reader:
        manifest = reader.manifest
        places = store.places_of(reader, deep=deep, at_each_block=at_each_block)
        spans = [(start, min(end, present.common), role) for start, end, role in _roles_in(reader, thinking, spans)]
        lossy = manifest.lossy
        blocks = [
            _block(place, places.needers, spans, lossy.bits if lossy else 0)
            for place in places.blocks
            if present.needs(place.entry)
        ]
        if lossy is not None:
            blocks = [_exact_from(block, lossy.tokens) for block in blocks]
    shared_bytes = places.beside_shared_bytes + sum(one.stored_bytes for one in blocks if one.sessions_needing > 1)
    stored_bytes = places.beside_bytes + sum(one.stored_bytes for one in blocks)
    return replace(
        _none_of(row),
        common_tokens=present.common,
        rest=tuple(present.stretches()),
        logical_bytes=sum(one.logical_bytes for one in blocks),
        stored_bytes=stored_bytes,
        shared_bytes=shared_bytes,
        alone_bytes=stored_bytes - shared_bytes,
        beside_bytes=places.beside_bytes,
        deep=deep,
        blocks=tuple(blocks[:MAX_BLOCKS_TOLD]),
        blocks_left_out=max(0, len(blocks) - MAX_BLOCKS_TOLD),
        problems=(*places.problems, *places.needers.unknown)[:MAX_PROBLEMS_TOLD],
    )


def blocks_unread(row: VersionInfo, error: Corruption) -> BlocksResult:
    """Of a version whose manifest is missing or damaged: none, and why."""
    return replace(_none_of(row), problems=(Finding.of(str(error.details.get("path", "")), error),))


def _none_of(row: VersionInfo) -> BlocksResult:
    """What the index has of a version, without its blocks."""
    return BlocksResult(
        session=row.session,
        version=row.version,
        bundle_id=row.bundle_id,
        token_count=row.token_count,
        unread_tokens=row.unread_tokens,
        common_tokens=0,
        rest=(),
        logical_bytes=0,
        stored_bytes=0,
        shared_bytes=0,
        alone_bytes=0,
        beside_bytes=0,
        deep=False,
        blocks=(),
    )


def _block(place: BlockPlace, needers: Needers, spans: Sequence[RoleSpan], bits: int) -> BlockInfo:
    entry, versions = place.entry, needers.of.get(place.entry.id, [])
    used = [needers.rows[each].used_ns for each in versions if each in needers.rows]
    return BlockInfo(
        block_id=entry.id.hex(),
        kind=entry.kind,
        start=entry.start,
        tokens=entry.token_count,
        holds=held_in(spans, entry.start, entry.start + entry.token_count),
        logical_bytes=entry.raw_bytes,
        stored_bytes=place.stored_bytes,
        codec=place.codec,
        lossy_bits=bits or None,
        condition=place.condition,
        pack=id_in(place.pack) if place.pack else None,
        sessions_needing=len(needers.sessions(entry.id)),
        versions_needing=len(versions),
        read_ns=max(used, default=0) or None,
    )


def _exact_from(block: BlockInfo, tokens: int) -> BlockInfo:
    """The block of a version of which so many first tokens are lossy."""
    return replace(block, lossy_bits=None) if block.kind != "span" or block.start >= tokens else block


# --- what they hold


def _roles_in(
    reader: BundleReader, thinking: tuple[Mark, Mark] | None, spans: Sequence[RoleSpan]
) -> Sequence[RoleSpan]:
    manifest = reader.manifest
    spans = spans or role_spans(manifest.session, manifest.token_count)
    if not spans or thinking is None or not any(role == "assistant" for _, _, role in spans):
        return spans
    with contextlib.suppress(StoreError):  # a header is missing: the thoughts are not told apart
        return with_thinking(spans, list(_between(array("I", reader.tokens()), *thinking)))
    return spans


def _between(tokens: Sequence[int], begin: Mark, end: Mark) -> Iterator[tuple[int, int]]:
    """The thoughts of a ledger, marks and all: from a begin to the next end, or to the end of the ledger."""
    started = None
    for at in range(len(tokens)):
        if started is None and tuple(tokens[at : at + len(begin)]) == begin:
            started = at
        elif started is not None and tuple(tokens[at : at + len(end)]) == end:
            yield started, at + len(end)
            started = None
    if started is not None:
        yield started, len(tokens)
