"""What a session says in a version: blocks up to a position, and the rest of its ledger behind them.

The blocks of a version are those of the version before it that still match the session, and new ones. They end at the
last token, as after a sleep; at a full block, while the session goes on (`writing_behind.py`); or where the version
before ends, if a stop has no time or room for keys and values. The rest of the ledger stands in the session map
(`unprocessed_tail.py`): a few bytes per token. The next use computes it, in the same model calls as before. A turn's
record in the journal has the same map, and becomes a version where no other comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from ...memvid.format.blocks import BlockEntry
from ...memvid.format.journal import COVERS
from ...memvid.format.manifest import UNREAD, Manifest
from ...memvid.format.packing import pack
from ...memvid.store import VersionDraft
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ...snapshot import memory
from ...snapshot.capture import plan_reuse
from ...snapshot.passes import PASSES, Passes
from ...snapshot.state import token_array
from ..sessions.sessions import Session
from ..sessions.transcripts import TEXT_MAP
from ..sessions.unprocessed_tail import Unread, unread_in


@dataclass(frozen=True, slots=True)
class Base:
    """The version that a session's next one follows, and its first blocks that still match the session's caches.

    bundle_id: None where there is none. held: the tokens in the blocks; backend: of what computed them.
    """

    bundle_id: str | None
    blocks: Sequence[BlockEntry]
    backend: Any

    @property
    def held(self) -> int:
        return max((entry.end for entry in self.blocks if entry.kind == "span"), default=0)

    @classmethod
    def of(cls, session: Session, blocks: Sequence[BlockEntry] | None = None) -> Base:
        """By what is known of the last version, without a look at it. blocks: those of it that can be read; None:
        all."""
        durable = session.durable
        if durable is None:
            return cls.none(session)
        blocks = durable.entries if blocks is None else blocks
        if session.unchanged_tokens < durable.block_tokens:
            records = [entry.start for entry in blocks if entry.kind == "state"]
            blocks = plan_reuse(blocks, session.unchanged_tokens, records)
        return cls(durable.bundle_id, blocks, session.durable_by if blocks else dict(session.model.backend))

    @classmethod
    def none(cls, session: Session) -> Base:
        """Without a version: all of the ledger is the rest."""
        return cls(None, (), dict(session.model.backend))


def parent_of(session: Session) -> str | None:
    """The version that a session's next one follows; where it has none, the one of another that it began with."""
    if session.durable is not None:
        return session.durable.bundle_id
    origin = session.provenance.forked_from
    return None if origin is None else origin.bundle_id


# --- session maps


def map_of(session: Session) -> dict[str, Any]:
    """The session map of a version with all tokens in blocks."""
    return {**session.to_map(), "backend": session.computed_by()}


def map_behind(session: Session, base: Base) -> dict[str, Any]:
    """The session map of a version with these blocks and the rest of the ledger. Any thread may make it: what it looks
    at is evaluated."""
    state, held = session.state, base.held
    unread = Unread(
        held,
        state.tokens[held:],
        state.passes.after(held),
        bytes(memory.readable(state.random_key)),
        digest_of(session),
        session.chat.text_map,
        session.chat.turn_open,
    )
    own = {"backend": base.backend, "turn_open": False, PASSES: state.passes.cut_back(held).tobytes()}
    return _with_rest(session.to_map() | own, unread)


def with_more_blocks(kept: Mapping[str, Any], session: Session, held: int) -> dict[str, Any]:
    """The map of `map_behind` for a version that has more of the same ledger in blocks: its first `held` tokens."""
    unread = Unread.from_map(kept[UNREAD])
    assert unread is not None, "what is acknowledged stands behind blocks"
    before = held - unread.start
    rest = replace(unread, start=held, tokens=unread.tokens[before:], passes=unread.passes.after(before))
    own = {"backend": session.computed_by(), PASSES: session.state.passes.cut_back(held).tobytes()}
    return _with_rest({**kept, **own}, rest)


def is_said_by(manifest: Manifest, kept: Mapping[str, Any]) -> bool:
    """Whether a version has this session map, but for the turns that it covers."""
    said = {name: value for name, value in manifest.session.items() if name != COVERS}
    return pack(said, "session map") == pack(kept, "session map")


def digest_of(session: Session) -> str:
    """Of the logits behind the session's last token, as hex."""
    assert session.state.last_logits is not None, "a session that has read something has logits"
    return blake3(memory.readable(session.state.last_logits)).hexdigest()


def _with_rest(kept: Mapping[str, Any], unread: Unread) -> dict[str, Any]:
    return {**kept, TEXT_MAP: unread.text_map.cut(unread.start).to_map(), UNREAD: unread.to_map()}


# --- versions without new blocks


def ledger_of(session: Session, base: Base) -> VersionDraft:
    """The version with no more blocks than the one before. It has a few kilobytes and cannot be tried again, so it uses
    the space to be kept free, too."""
    return VersionDraft(
        uri=session.uri,
        identity=session.model.identity,
        parent=parent_of(session),
        reused=base.blocks,
        blocks=(),
        session=map_behind(session, base),
        block_tokens=base.held,
        beyond="reserve",
    )


def copy_of(reader: BundleReader, uri: SessionUri, kept: Mapping[str, Any]) -> VersionDraft:
    """The version of another session that has all blocks of a stored one."""
    manifest = reader.manifest
    return VersionDraft(
        uri=uri,
        identity=manifest.identity,
        parent=reader.bundle_id,
        reused=reader.entries,
        blocks=(),
        session=kept,
        block_tokens=manifest.block_tokens,
    )


def with_fewer_blocks(reader: BundleReader, sound_tokens: int, records: Sequence[int]) -> VersionDraft:
    """The version that replaces a stored one with a rest and damaged blocks: all behind its first `sound_tokens` is the
    rest. records: positions of its sound state records. Raises StoreError: the rest of it cannot be read."""
    manifest, tokens = reader.manifest, token_array(reader.tokens())
    unread = unread_in(manifest.session, manifest.uri)
    assert unread is not None, "it ends in a ledger"
    base = Base(reader.bundle_id, plan_reuse(reader.entries, sound_tokens, records), None)
    passes = Passes.in_map(manifest.session).cut(len(tokens)).after(base.held)
    for size in unread.passes:
        passes.add(size)
    less = replace(unread, start=base.held, tokens=tokens[base.held :] + unread.tokens, passes=passes, damaged=True)
    return VersionDraft(
        uri=manifest.uri,
        identity=manifest.identity,
        parent=base.bundle_id,
        reused=base.blocks,
        blocks=(),
        session=_with_rest(manifest.session, less),
        block_tokens=base.held,
        beyond="reserve",
        covers=False,
    )
