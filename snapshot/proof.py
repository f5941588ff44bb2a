"""Whether a recomputed state is, bit for bit, the stored one, without reading the stored bytes.

A block's header has the digest of each of its slots, and the block's id proves it. So the computed state is cut into
blocks as for a sleep, hashed, and compared with the headers. Runs on an I/O thread: it computes nothing.
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
    """The part of a state that equals the stored one bit for bit. tokens: so many leading tokens, in whole blocks. end:
    all of it, with logits, random key, passes, and whole state."""

    tokens: int
    end: bool


def compare(computed: Cut, reader: BundleReader, plan: WakePlan) -> Sameness:
    """Compare a whole version with its recomputed state, cut with nothing reused. plan: of the whole version.

    The canary of a record is not compared: it is the logits of a token behind the state.

    Raises:
        NonFiniteState: the computed state holds NaN or infinity.
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
