"""Keeps a sleeping session in fewer bits: first a plan, then a new version.

Rules:
- Only the last version of a sleeping session, unless it is pinned or has a tag. The version is woken and proven, its
  full blocks are quantized, and it sleeps as the next version. So a crash is as harmless as in any sleep, and the exact
  version stays until a prune removes it.
- Blocks in as few bits already are referred to. Blocks in fewer bits are never written in more.
- The canary of the new version is computed from its quantized state. The ledger, the last logits, the random key and
  all whole state stay exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...memvid.answers import Action, Lossy, MaintenanceReport, VersionInfo
from ...memvid.folder.marks import SessionMarks
from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.format.records import Receipt
from ...memvid.store import Store
from ...memvid.units import format_bytes
from ...memvid.writing.reader import BundleReader
from ...snapshot.layout import CANARY_KIND, CacheLayout
from ...snapshot.lossy import LossyTokens, StoredArray, quantize, stored_bytes, worst
from ...snapshot.lossy_kinds import choose
from ...snapshot.records import require_spans
from ...snapshot.restore import read_checkpoint
from ..api.events import ignore
from ..engine.engine import Engine, Steps
from ..models.models import LoadedModel
from ..sessions.sessions import Session
from .orders import WakeOrder
from .writing import Terms, Versions


@dataclass(frozen=True, slots=True)
class Span:
    """The facts of a span block for a plan. is_done: whether it is in as few bits already."""

    token_count: int
    raw_bytes: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one version. left: why it is left as it is; None if the tokens `[start, end)` are quantized, from
    `before` to `after` raw bytes. again: raw bytes of unchanged blocks behind them, which are written again: the last,
    partial block, and records of state.
    """

    row: VersionInfo
    left: str | None = None
    start: int = 0
    end: int = 0
    before: int = 0
    after: int = 0
    again: int = 0

    @property
    def raw_bytes(self) -> int:
        """The new version's own raw bytes, without the headers of its blocks and its file."""
        return self.after + self.again


def plan_spans(
    row: VersionInfo, spans: Sequence[Span], packed_bytes: int, states: Sequence[tuple[int, int]] = ()
) -> Plan:
    """Plan the full blocks to quantize: from the first one that is not done, as each block names the one before it.
    packed_bytes: raw bytes of a full block afterwards. states: the position and later raw bytes of each record of
    state."""
    full = [span for span in spans if span.token_count == BLOCK_TOKENS]
    if not full:
        return Plan(row, left=f"it has no full block: only whole ones, of {BLOCK_TOKENS} tokens, are quantized")
    first = next((at for at, span in enumerate(full) if not span.is_done), len(full))
    before, after = sum(span.raw_bytes for span in full[first:]), packed_bytes * (len(full) - first)
    if first == len(full):
        return Plan(row, left="its full blocks are kept in as few bits already")
    start = first * BLOCK_TOKENS
    again = sum(span.raw_bytes for span in spans if span.token_count != BLOCK_TOKENS)
    again += sum(raw_bytes for at, raw_bytes in states if at > start)
    return Plan(row, None, start, len(full) * BLOCK_TOKENS, before, after, again)


def is_done(arrays: Collection[StoredArray], bits: int) -> bool:
    """Whether all quantisable arrays of a block are in as few bits."""
    return all(
        choose(array.exact, bits) is None or (array.quantization is not None and array.quantization.bits <= bits)
        for array in arrays
    )


class Quantising:
    """Plans and carries out orders; the caller holds the session alone."""

    def __init__(self, store: Store, engine: Engine, versions: Versions) -> None:
        self._store = store
        self._engine = engine
        self._versions = versions

    async def mark_on(self, row: VersionInfo) -> Plan | None:
        """A plan to leave a marked version as it is; else None. Raises StoreError: the marks cannot be read."""

        def look() -> Plan | None:
            left = _mark_on(row, self._store.marks(row.uri))
            return None if left is None else Plan(row, left)

        return await self._versions.threads.on_io(look)

    async def plan(self, row: VersionInfo, bits: int, model: LoadedModel | None) -> Plan:
        """Plan for a session, by its last version; reads block headers if needed. model: maybe without its weights;
        None if it is not served.

        Raises:
            StoreError: blocks cannot be read.
            SnapshotError: its blocks are not those of its model.
        """
        return await self._versions.threads.on_io(lambda: self._plan(row, bits, model))

    def _plan(self, row: VersionInfo, bits: int, model: LoadedModel | None) -> Plan:
        if model is None or model.identity.digest.hex() != row.identity:
            return Plan(row, "its model is not served here")
        if not any(choose(exact, bits) for exact in model.layout.span_slots(BLOCK_TOKENS)):
            return Plan(row, "none of its caches can be kept in few bits")
        with self._store.open_session(row.uri, row.version) as reader:
            if not reader.is_whole():
                return Plan(row, "its keys and values are not there")
            spans, packed_bytes = _spans(reader, model.layout, bits), stored_bytes(model.layout, bits)
            return plan_spans(row, spans, packed_bytes, _states(reader, model.layout))

    async def carry_out(self, plan: Plan, bits: int, model: LoadedModel) -> Receipt:
        """Write the next version of a session, with the planned tokens in few bits. Raises as a wake and a sleep; the
        session is then as it was."""
        uri = plan.row.uri
        order = WakeOrder(version=plan.row.version, cause="quantize")
        woken = await self._versions.waking.wake(uri, order, model, ignore)
        session = woken.session
        with self._store.open_session(uri, plan.row.version) as reader:
            lossy = await self._engine.run(_quantize(session, reader, plan, bits))
        terms = Terms(may_wait=True, lossy=lossy)
        return await self._versions.sleep(session, ignore, cause="quantize", terms=terms)


def _mark_on(row: VersionInfo, marks: SessionMarks) -> str | None:
    """Why a marked version is left, with the command that takes the mark away; None without a mark."""
    name = f"{row.uri.namespace}/{row.uri.name}"
    if row.bundle_id in marks.pins:
        return f"version {row.version} is pinned: `torpor unpin {name}@{row.version}`, then quantize again"
    tag = next((tag for tag, named in sorted(marks.tags.items()) if named == row.bundle_id), None)
    return tag and f"version {row.version} is tagged {tag}: `torpor untag {name} {tag}`, then quantize again"


def _spans(reader: BundleReader, layout: CacheLayout, bits: int) -> list[Span]:
    return [
        Span(
            entry.token_count,
            entry.raw_bytes,
            is_done(require_spans(reader, entry, layout.span_slots(entry.token_count)), bits),
        )
        for entry in reader.entries
        if entry.kind == "span"
    ]


def _states(reader: BundleReader, layout: CacheLayout) -> list[tuple[int, int]]:
    """The position and later raw bytes of each record of state: the last one then has a new canary, and the others have
    none."""
    found = []
    for entry in reader.entries:
        if entry.kind == "state":
            slots = [spec for spec, _ in reader.read_header(entry).slots]
            canary = layout.logits_bytes if entry is reader.entries[-1] else 0
            canary -= sum(spec.size_bytes for spec in slots if spec.kind == CANARY_KIND)
            found.append((entry.start, entry.raw_bytes + canary))
    return found


def _quantize(session: Session, reader: BundleReader, plan: Plan, bits: int) -> Steps[LossyTokens]:
    """Turn a woken session into its next version, on the engine thread. Checkpoints behind the first changed block are
    read into memory, to be written again. Gives the tokens in few bits."""
    state, layout = session.state, session.model.layout
    positions = state.checkpoints.positions
    for entry in reader.entries:
        if entry.kind == "state" and entry.start > plan.start and entry.start in positions:
            state.checkpoints.add(read_checkpoint(reader, entry, layout))
            yield None
    lossy = yield from quantize(state.caches, layout, bits, plan.start, plan.end)
    session.loss = worst(session.loss, Lossy(bits, plan.end))
    session.unchanged_tokens = min(session.unchanged_tokens, plan.start)
    session.dirty = True
    return lossy


def report_of(plan: Plan, bits: int, receipt: Receipt | None, *, dry_run: bool) -> MaintenanceReport:
    """The report of a session that was left, or quantized. receipt: None without a new version; a plan's bytes are raw
    bytes, without headers."""
    row = plan.row
    if plan.left is not None:
        action, written = Action("keep", "", row.session, row.version, 0, plan.left), 0
    else:
        before, after = format_bytes(plan.before), format_bytes(plan.after)
        what = f"{before} of keys and values are {after} in {bits} bits"
        stays = f"version {row.version} stays as it is until a prune removes it"
        written, version = (
            (plan.raw_bytes, row.version) if receipt is None else (receipt.bytes_written, receipt.version)
        )
        action = Action("quantize", "", row.session, version, written, f"{what}; {stays}")
    return MaintenanceReport("quantize", dry_run, (action,), bytes_written=written)
