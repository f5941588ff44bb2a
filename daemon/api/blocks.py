"""The blocks of a memory, and who needs what lies in a store, as answers show them. Imports no pydantic."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ...memvid.answers import Condition, Finding
from ...records import Count, Result

RestPlace = Literal["ledger", "journal", "memory"]


class BlockInfo(Result):
    """A block of a version. kind: `span`, the keys and values of `tokens` tokens from `start`; `state`, a record of the
    whole state at `start`.

    holds: how many of its tokens each role has, in their order: `system`, `tools`, `user`, `assistant`, `thinking`,
        `tool`, or `text`, which no message has; `a+b` for what cannot be told apart. Empty if no messages are known.
        Tokens behind `common_tokens` do not count.
    logical_bytes: raw. stored_bytes: what of the disk is needed of it. codec: `raw`, `planes` (compressed), or empty
        where it has no bytes or cannot be read.
    lossy_bits: in how many bits its keys and values once were; None for an exact one.
    pack: the id of the pack that has it, in hex; None where none has.
    sessions_needing, versions_needing: how many need it, this one among them.
    resident: whether the session has in memory what counts of it; None without a daemon. read_ns: when a version with
        it was woken or imported last, as far as the index was not lost since; None for never.
    """

    block_id: str
    kind: str
    start: Count
    tokens: Count
    holds: dict[str, int]
    logical_bytes: Count
    stored_bytes: Count
    codec: str
    lossy_bits: int | None
    condition: Condition
    pack: str | None
    sessions_needing: Count
    versions_needing: Count
    resident: bool | None = None
    read_ns: int | None = None


class Stretch(Result):
    """Tokens of a ledger from `start` up to `end` that stand in no block of the version. place: `ledger`, as
    tokens alone in the version; `journal`; or `memory` alone."""

    start: Count
    end: Count
    place: RestPlace


class BlocksResult(Result):
    """The blocks of what a session holds now, or of a version that is named, in the order of the ledger.

    version, bundle_id: the one that has them. token_count: of its ledger, of which the last `unread_tokens` have no
        block. common_tokens: the first of these that the session has, too: not all after it went back. Blocks behind
        them are left out; they may end in the midst of the last one. rest: all that stands in none of the blocks.
    stored_bytes = shared_bytes + alone_bytes: of these blocks and of `beside_bytes`, its manifest and what its packs
        have beside blocks. shared: what other sessions need too; alone: what its session alone needs.
    deep: every byte was read; otherwise damage within keys and values is not seen. blocks_left_out: those cut off the
        list. problems: packs that cannot be read, and manifests, without which more may need a block than is told. If
        the version's own cannot be read, nothing of it is told.
    """

    session: str
    version: int
    bundle_id: str
    token_count: Count
    unread_tokens: Count
    common_tokens: Count
    rest: tuple[Stretch, ...]
    logical_bytes: Count
    stored_bytes: Count
    shared_bytes: Count
    alone_bytes: Count
    beside_bytes: Count
    deep: bool
    blocks: tuple[BlockInfo, ...]
    blocks_left_out: Count = 0
    problems: tuple[Finding, ...] = field(default=())


class Needer(Result):
    """A version that needs blocks of what was asked for: how many, and their bytes on the disk; alone_bytes: of those
    that it alone needs, which are freed if it goes. tags, pinned, stripped: its marks. journal: turns stand behind it,
    so that it stays."""

    session: str
    version: int
    bundle_id: str
    blocks: Count
    stored_bytes: Count
    alone_bytes: Count
    tags: tuple[str, ...]
    pinned: bool
    stripped: bool
    journal: bool


class WhoResult(Result):
    """Who needs a block, a version or a pack of a store. id: in hex; path: of its file, of a block that of its pack;
    empty where none has it.

    blocks, stored_bytes: what it consists of. unneeded_bytes: of those, what no version needs. needers: versions, by
        session, oldest first; needers_left_out: those cut off the list. problems: manifests whose needs nothing tells,
        without which it may be needed though nobody is named; and packs that cannot be read.
    """

    kind: Literal["block", "version", "pack"]
    id: str
    path: str
    blocks: Count
    stored_bytes: Count
    unneeded_bytes: Count
    needers: tuple[Needer, ...]
    needers_left_out: Count
    problems: tuple[Finding, ...]
