"""Whether a state that was computed again is, bit for bit, the one that is stored: without reading what is stored.

A block's header has the digest of each of its slots, and is proven by the block's id. So what was computed is cut into
blocks as a sleep would cut it, hashed, and compared with the headers. Runs on an I/O thread: it computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from ..memvid.format.blocks import BlockDraft, BlockHeader, SlotDraft
from ..memvid.format.reader import BundleReader
from .capture import Cut
from .layout import CANARY_KIND
from .restore import WakePlan


@dataclass(frozen=True, slots=True)
class Sameness:
    """What of a state is, bit for bit, what is stored. tokens: so many leading tokens, in whole blocks. end: all of it,
    with logits, random key, how the tokens were read, and what of the caches is whole state."""

    tokens: int
    end: bool


def compare(computed: Cut, reader: BundleReader, plan: WakePlan) -> Sameness:
    """Compare a whole version with its state computed again, cut with nothing reused. plan: of the whole version.

    The canary of a record is not compared: it is what a token would give behind the state, and not of it.

    Raises:
        NonFiniteState: what was computed holds NaN or infinity.
        StoreError: a header is damaged.
    """
    same, stored = 0, {entry.start: entry for entry in plan.spans}
    for draft in computed.drafts():
        if draft.kind == "state":
            end = plan.state is not None and _is_same(draft, reader.read_header(plan.state))
            return Sameness(same, end and same == plan.target_tokens)
        entry = stored.get(draft.start)
        if entry is None or not _is_same(draft, reader.read_header(entry)):
            break
        same = entry.end
    return Sameness(same, end=False)


def _is_same(draft: BlockDraft, header: BlockHeader) -> bool:
    found = [(slot.spec, _digest(slot)) for slot in draft.slots if slot.spec.kind != CANARY_KIND]
    stored = [(spec, digest) for spec, digest in header.slots if spec.kind != CANARY_KIND]
    return draft.tokens == header.tokens and found == stored


def _digest(slot: SlotDraft) -> bytes:
    hasher = blake3()
    for buffer in slot.buffers:
        hasher.update(buffer)
    return hasher.digest()
