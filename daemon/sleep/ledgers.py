"""Ledgers without state: a stop that cannot write a session's keys and values keeps its tokens, to be read again.

Such a version refers to all blocks of the session's last version that still match its caches, and lists the tokens
behind them (`unprocessed_tail.py`): a few bytes per token, in one small file. The next request for the session computes
the missing keys and values, in the same model calls as before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from blake3 import blake3

from ...memvid.errors import CorruptBlock, Corruption, StoreError
from ...memvid.format.blocks import BlockEntry
from ...memvid.format.identity import Identity
from ...memvid.format.journal import COVERS
from ...memvid.format.manifest import UNREAD
from ...memvid.format.packing import pack
from ...memvid.store import IndexRow, Receipt, Store, VersionDraft
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...snapshot import memory
from ...snapshot.capture import plan_reuse
from ...snapshot.errors import ContextTooShort, MalformedSnapshot
from ...snapshot.passes import PASSES, Passes
from ...snapshot.state import token_array
from ..api.session import Recomputed
from ..engine.engine import Engine, Steps
from ..engine.generation import replay
from ..events.bus import Bus
from ..events.events import LedgerKept, LedgerRead
from ..sessions.sessions import Durable, Session
from ..sessions.transcripts import TEXT_MAP
from ..sessions.unprocessed_tail import Unread, unread_in
from .hibernation import Hibernation

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rest:
    """The durable blocks before a ledger's end, their version and their backend."""

    bundle_id: bytes | None
    blocks: Sequence[BlockEntry]
    backend: Any


@dataclass(frozen=True, slots=True)
class Behind:
    """What a session has behind blocks of its last version that still match its caches. held: the tokens in those;
    backend: what computed them; bundle_id: of that version, None where no block is kept."""

    held: int
    backend: Any
    bundle_id: bytes | None = None

    @classmethod
    def of(cls, session: Session) -> Behind:
        """By what is known of the last version, without a look at it."""
        durable = session.durable
        if durable is None:
            return cls(0, dict(session.model.backend))
        return cls(_tokens_in(_still_held(session, durable)), durable.backend, durable.bundle_id)

    def session_map(self, session: Session) -> dict[str, Any]:
        """The session map of a version with these blocks. Any thread may make it: what it looks at is evaluated."""
        state = session.state
        passes, key = state.passes.after(self.held), bytes(memory.readable(state.random_key))
        tokens, digest = state.tokens[self.held :], _digest_of(session)
        unread = Unread(self.held, tokens, passes, key, digest, session.text_map, session.turn_open)
        own = {"backend": self.backend, "turn_open": False, PASSES: state.passes.cut_back(self.held).tobytes()}
        return _with_end(session.to_map() | own, unread)


def rests_on(kept: Mapping[str, Any], session: Session, held: int) -> dict[str, Any]:
    """The map of `Behind.session_map` for a version that has more of the same ledger in blocks: its first `held`
    tokens."""
    unread = Unread.from_map(kept[UNREAD])
    assert unread is not None, "what is acknowledged stands behind blocks"
    before = held - unread.start
    passes = unread.passes.after(before)
    rest = replace(unread, start=held, tokens=unread.tokens[before:], passes=passes)
    own = {"backend": session.computed_by(), PASSES: session.state.passes.cut_back(held).tobytes()}
    return _with_end({**kept, **own}, rest)


class Ledgers:
    """Keeps the ledgers of sessions that cannot be kept whole. Callers hold the session alone."""

    def __init__(self, store: Store, hibernation: Hibernation, engine: Engine, bus: Bus) -> None:
        self._store = store
        self._hibernation = hibernation
        self._engine = engine
        self._bus = bus

    async def keep(self, session: Session, why: str) -> None:
        """Write a version with the session's whole ledger and the durable part of its state, unless the newest version
        is the same already (after a refused stop). The session is as it was, and still needs its sleep. why: the code
        of the error that keeps it from that.

        Raises StoreError: not even the ledger could be made durable."""
        make = partial(self._write, session)
        try:
            receipt = await self._hibernation.threads.on_writer(partial(make, relying=True))
        except Corruption:  # a referred block was deleted or damaged since its check
            receipt = await self._hibernation.threads.on_writer(partial(make, relying=False))
        if receipt is not None:
            self._tell_kept(receipt, why)

    async def keep_less(self, row: IndexRow, sound_tokens: int, records: Sequence[int]) -> Receipt:
        """Replace a version that ends in a ledger and has damaged blocks: all behind its first `sound_tokens` becomes a
        ledger. The session sleeps, or is a mere look.

        records: positions of its sound state records.

        Raises StoreError: it could not be made durable, or the rest of the version cannot be read."""
        make = partial(self._write_less, row, sound_tokens, records)
        receipt = await self._hibernation.threads.on_writer(make)
        self._tell_kept(receipt, CorruptBlock.code)
        return receipt

    async def read(self, session: Session) -> Recomputed | None:
        """Read the unread end of the session's ledger, in reserved memory. Gives its report; None if it had no token.
        After a failure or a cancel the session must not be used. The session keeps the report only if other bits came
        out.

        Raises GenerationFailed: the model failed. MalformedSnapshot, ContextTooShort: the ledger is not the model's."""
        unread, start = session.unread, len(session.state.tokens)
        if unread is None:
            return None
        _require_readable(session, unread)
        await self._engine.run(_steps(session, unread))
        same = _digest_of(session) == unread.logits_digest
        assert session.durable is not None, "the end of a ledger comes out of a version"
        read = Recomputed(session.durable.version, start, len(unread.tokens), same, damaged=unread.damaged)
        again = read if unread.tokens else None
        session.text_map, session.turn_open, session.unread = unread.text_map, unread.turn_open, None
        session.dirty = True
        self._bus.publish(LedgerRead(session.uri, len(session.state.tokens), len(unread.tokens), same))
        if not same:
            session.provenance = session.provenance.computed_again(again)
        return again

    def _tell_kept(self, receipt: Receipt, why: str) -> None:
        version, tokens, unread = receipt.version, receipt.ledger_tokens, receipt.unread_tokens
        self._bus.publish(LedgerKept(receipt.uri, version, tokens, unread, receipt.bytes_written, why))

    def _write(self, session: Session, *, relying: bool) -> Receipt | None:
        """Write the version; None if the newest one is the same. relying: refer to durable blocks, if they can be
        read."""
        rest = self._rest_of(session) if relying else None
        rest = rest or _Rest(None, (), dict(session.model.backend))
        held = _tokens_in(rest.blocks)
        kept = Behind(held, rest.backend).session_map(session)
        if self._is_newest(session.uri, rest, kept):
            return None
        return self._put(session.uri, session.model.identity, rest.bundle_id, rest.blocks, kept, held)

    def _rest_of(self, session: Session) -> _Rest | None:
        """The durable part of the session; None if there is none, or it cannot be read: the ledger has all
        tokens."""
        if (durable := session.durable) is None:
            return None
        try:
            with self._store.open_session(session.uri, durable.version) as reader:
                blocks = _still_held(session, replace(durable, entries=reader.entries))
                return _Rest(durable.bundle_id, blocks, reader.manifest.session.get("backend"))
        except StoreError as error:
            _LOG.warning("the ledger of %s rests on nothing: %s: %s", session.uri, error.code, error.message)
            return None

    def _is_newest(self, uri: SessionUri, rest: _Rest, kept: Mapping[str, Any]) -> bool:
        """Whether the newest version has these blocks and this session map, but for the turns that it covers."""
        try:
            with self._store.open_session(uri) as reader:
                manifest = reader.manifest
        except StoreError:
            return False
        if (manifest.parent, [each.id for each in manifest.blocks]) != (
            rest.bundle_id,
            [each.id for each in rest.blocks],
        ):
            return False
        held = {name: value for name, value in manifest.session.items() if name != COVERS}
        return pack(held, "session map") == pack(kept, "session map")

    def _write_less(self, row: IndexRow, sound_tokens: int, records: Sequence[int]) -> Receipt:
        with self._store.open_session(row.uri, row.version) as reader:
            manifest, tokens = reader.manifest, token_array(reader.tokens())
            reused = plan_reuse(reader.entries, sound_tokens, records)
        unread = unread_in(manifest.session, row.uri)
        assert unread is not None, "it ends in a ledger"
        held = _tokens_in(reused)
        passes = Passes.in_map(manifest.session).cut(len(tokens)).after(held)
        for size in unread.passes:
            passes.add(size)
        less = replace(unread, start=held, tokens=tokens[held:] + unread.tokens, passes=passes, damaged=True)
        kept = _with_end(manifest.session, less)
        return self._put(row.uri, manifest.identity, reader.bundle_id, reused, kept, held, covers=False)

    def _put(
        self,
        uri: SessionUri,
        identity: Identity,
        parent: bytes | None,
        reused: Sequence[BlockEntry],
        kept: Mapping[str, Any],
        held: int,
        *,
        covers: bool = True,
    ) -> Receipt:
        """Write a version of durable blocks, with the end of its ledger behind them. covers: as of `VersionDraft`."""
        return self._store.write_bundle(
            VersionDraft(
                uri=uri,
                identity=identity,
                parent=parent,
                reused=reused,
                blocks=(),
                session=kept,
                token_count=held,
                beyond="reserve",
                covers=covers,
            )
        )


def _with_end(kept: Mapping[str, Any], unread: Unread) -> dict[str, Any]:
    return {**kept, TEXT_MAP: unread.text_map.cut(unread.start).to_map(), UNREAD: unread.to_map()}


def _tokens_in(entries: Sequence[BlockEntry]) -> int:
    return max((entry.end for entry in entries if entry.kind == "span"), default=0)


def _still_held(session: Session, durable: Durable) -> Sequence[BlockEntry]:
    """The blocks of the session's last version that still match its caches."""
    if session.unchanged_tokens >= durable.token_count:
        return durable.entries
    records = [entry.start for entry in durable.entries if entry.kind == "state"]
    return plan_reuse(durable.entries, session.unchanged_tokens, records)


def _digest_of(session: Session) -> str:
    assert session.state.last_logits is not None, "a session that has read something has logits"
    return blake3(memory.readable(session.state.last_logits)).hexdigest()


def _steps(session: Session, unread: Unread) -> Steps[None]:
    sizes = list(unread.passes.between(0, len(unread.tokens)))
    if sizes:
        yield from replay(session.model, session.state, unread.tokens, sizes)
    session.state.random_key = mx.array(np.frombuffer(unread.random_key, dtype="<u4"))


def _require_readable(session: Session, unread: Unread) -> None:
    model, count = session.model, len(session.state.tokens) + len(unread.tokens)
    if (highest := max(unread.tokens, default=0)) >= model.layout.vocabulary:
        raise MalformedSnapshot(
            f"The ledger has token {highest}, and the model's vocabulary ends at {model.layout.vocabulary - 1}.",
            token=highest,
            vocabulary=model.layout.vocabulary,
        )
    if count > model.context_tokens:
        raise ContextTooShort(
            f"The ledger holds {format_plural(count, 'token')}, and the context of model {model.name!r} ends at "
            f"{model.context_tokens}.",
            token_count=count,
            context_tokens=model.context_tokens,
        )
