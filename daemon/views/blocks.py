"""The blocks of a stored version: what they hold, how they lie on the disk, and who needs them."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from ...memvid.answers import VersionInfo
from ...memvid.errors import StoreError
from ...memvid.folder.folder import id_in
from ...memvid.maintenance.needers import BlockPlace, Needers
from ...memvid.store import Store
from ...memvid.writing.reader import BundleReader
from ..api.blocks import BlockInfo, BlocksResult
from .roles import RoleSpan, held_in, role_spans, with_thinking

MAX_BLOCKS_TOLD: Final = 4096
"""Of one version: a million tokens."""

MAX_PROBLEMS_TOLD: Final = 100

Mark = tuple[int, ...]
"""A mark of a model, as tokens."""


def blocks_of(
    store: Store,
    row: VersionInfo,
    *,
    deep: bool = False,
    thinking: tuple[Mark, Mark] | None = None,
    spans: Sequence[RoleSpan] = (),
    at_each_block: Callable[[], object] = lambda: None,
) -> BlocksResult:
    """The blocks of a version, as its files tell. deep: every byte is read. thinking: where thoughts begin and end, if
    the model is known. spans: whose the tokens are, if more is known than the session map tells. at_each_block: is
    called before each; what it raises ends the look. Raises the errors of a manifest that is missing or damaged."""
    with store.open_session(row.uri, row.bundle_id) as reader:
        manifest = reader.manifest
        places = store.places_of(reader, deep=deep, at_each_block=at_each_block)
        spans = _roles_in(reader, thinking, spans)
        lossy = manifest.lossy
        blocks = [_block(place, places.needers, spans, lossy.bits if lossy else 0) for place in places.blocks]
        if lossy is not None:
            blocks = [_exact_from(block, lossy.tokens) for block in blocks]
    shared_bytes = places.beside_shared_bytes + sum(one.stored_bytes for one in blocks if one.sessions_needing > 1)
    stored_bytes = places.beside_bytes + sum(one.stored_bytes for one in blocks)
    return BlocksResult(
        session=row.session,
        version=row.version,
        bundle_id=row.bundle_id,
        token_count=row.token_count,
        unread_tokens=row.unread_tokens,
        journal_tokens=_behind(store, row),
        memory_tokens=None,
        logical_bytes=manifest.logical_bytes,
        stored_bytes=stored_bytes,
        shared_bytes=shared_bytes,
        alone_bytes=stored_bytes - shared_bytes,
        beside_bytes=places.beside_bytes,
        deep=deep,
        blocks=tuple(blocks[:MAX_BLOCKS_TOLD]),
        blocks_left_out=max(0, len(blocks) - MAX_BLOCKS_TOLD),
        problems=(*places.problems, *places.needers.unknown)[:MAX_PROBLEMS_TOLD],
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


def _behind(store: Store, row: VersionInfo) -> int:
    """The tokens that the journal has behind a version; 0 where it cannot be read, which is told elsewhere."""
    with contextlib.suppress(StoreError):
        return max(0, store.acknowledged_tokens(row.uri) - row.token_count)
    return 0


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
