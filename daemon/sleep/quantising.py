"""Keeps sleeping sessions in fewer bits: first a plan, then a new version of each session.

Rules:
- Only the last version of a sleeping session, unless it is pinned or has a tag. The version is woken and proven, its
  full blocks are quantised, and it sleeps as the next version. So a crash is as harmless as in any sleep, and the exact
  version stays until a prune removes it.
- Blocks in as few bits already are referred to. Blocks in fewer bits are never written in more.
- The canary of the new version is computed from its quantised state. The ledger, the last logits, the random key and
  all whole state stay exact.
- A salvaged version is left: a newer version would hide the whole one when it comes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import TorporError
from ...memvid.errors import InvalidPolicy
from ...memvid.folder.marks import SessionMarks
from ...memvid.folder.retention import EARLIEST_NS
from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.format.reader import BundleReader
from ...memvid.format.records import Action, Finding, MaintenanceReport, Receipt
from ...memvid.format.salvaged import salvaged_from
from ...memvid.limits import MAX_KEEP_DAYS
from ...memvid.store import IndexRow, Store
from ...memvid.units import format_bytes
from ...memvid.uri import SessionUri
from ...snapshot.layout import CANARY_KIND, CacheLayout
from ...snapshot.lossy import Loss, StoredArray, quantise, stored_bytes, worst
from ...snapshot.lossy_kinds import BITS, choose
from ...snapshot.records import require_spans
from ...snapshot.restore import read_checkpoint
from ..api.events import ignore
from ..api.store import MaintenanceResult
from ..engine.engine import Engine, Steps
from ..engine.rounds import Rounds
from ..errors import ServiceClosed
from ..models.models import LoadedModel
from ..sessions.sessions import Session
from .hibernation import Hibernation
from .maintenance import result_of
from .orders import WakeOrder

_LOG = logging.getLogger(__name__)
_DAY_NS: Final = 24 * 3600 * 10**9

PASS_SECONDS: Final = 3600.0
"""Seconds between two looks of an age policy at the store."""


@dataclass(frozen=True, slots=True)
class QuantiseOrder:
    """The bits to keep sessions in, and the days that they must have slept (None: any time). clock: gives nanoseconds
    of the Unix clock."""

    bits: int
    after_days: float | None = None
    dry_run: bool = False
    clock: Callable[[], int] = time.time_ns


def order_of(session: str | None, bits: int | None, after_days: float | None, *, dry_run: bool) -> QuantiseOrder:
    """Make an order. Raises InvalidPolicy: an impossible number of bits or days, or no session and no age."""
    if bits not in BITS:
        raise InvalidPolicy(f"Sessions can be kept in {' or '.join(map(str, BITS))} bits, not {bits}.", field="bits")
    if session is None and after_days is None:
        raise InvalidPolicy("Say which session to quantise, or after how many days of sleep.", field="session")
    if after_days is not None and not 0 <= after_days <= MAX_KEEP_DAYS:  # so no NaN
        raise InvalidPolicy(f"after_days is a number of days from 0 to {MAX_KEEP_DAYS}.", field="after_days")
    return QuantiseOrder(bits, after_days, dry_run)


@dataclass(frozen=True, slots=True)
class AgePolicy:
    """Quantise sessions that have slept for `after_days`, at the daemon's start and then every `every_s` seconds.

    Raises InvalidPolicy for impossible numbers.
    """

    after_days: float
    bits: int
    every_s: float = PASS_SECONDS
    clock: Callable[[], int] = time.time_ns

    def __post_init__(self) -> None:
        order_of(None, self.bits, self.after_days, dry_run=False)

    @property
    def order(self) -> QuantiseOrder:
        """The order of each look."""
        return QuantiseOrder(self.bits, self.after_days, clock=self.clock)


@dataclass(frozen=True, slots=True)
class Span:
    """The facts of a span block for a plan. is_done: whether it is in as few bits already."""

    token_count: int
    raw_bytes: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one version. left: why it is left as it is; None if the tokens `[start, end)` are quantised, from
    `before` to `after` raw bytes. again: raw bytes of unchanged blocks behind them, which are written again: the last,
    partial block, and records of state.
    """

    row: IndexRow
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


def why_left(row: IndexRow, order: QuantiseOrder, *, is_awake: bool) -> str | None:
    """Why a session is left as it is, without a read; None if it may be quantised. A date in the future, or before this
    program existed, does not count as old.
    """
    if is_awake:
        return "the session is awake"
    if order.after_days is None:
        return None
    now_ns = order.clock()
    if not EARLIEST_NS <= row.created_ns <= now_ns:
        return "its date cannot be believed"
    if now_ns - row.created_ns < order.after_days * _DAY_NS:
        return f"it has not slept for {order.after_days:g} days"
    return None


def plan_spans(row: IndexRow, spans: Sequence[Span], packed_bytes: int, states: Sequence[tuple[int, int]] = ()) -> Plan:
    """Plan the full blocks to quantise: from the first one that is not done, as each block names the one before it.
    packed_bytes: raw bytes of a full block afterwards. states: the position and later raw bytes of each record of
    state."""
    full = [span for span in spans if span.token_count == BLOCK_TOKENS]
    if not full:
        return Plan(row, left=f"it has no full block: only whole ones, of {BLOCK_TOKENS} tokens, are quantised")
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
        choose(array.exact, bits) is None or (array.quantisation is not None and array.quantisation.bits <= bits)
        for array in arrays
    )


class Quantising:
    """Plans and carries out orders; the caller holds the session alone."""

    def __init__(self, store: Store, engine: Engine, hibernation: Hibernation) -> None:
        self._store = store
        self._engine = engine
        self._hibernation = hibernation

    async def leave(self, row: IndexRow, order: QuantiseOrder, *, is_awake: bool) -> Plan | None:
        """A plan to leave the session as it is, if its row or marks say so; else None. Raises StoreError: the marks
        cannot be read."""

        def look() -> Plan | None:
            left = why_left(row, order, is_awake=is_awake) or _mark_on(row, self._store.marks(row.uri))
            return None if left is None else Plan(row, left)

        return await self._hibernation.threads.on_io(look)

    async def plan(self, row: IndexRow, order: QuantiseOrder, model: LoadedModel | None) -> Plan:
        """Plan an order for one session, by its last version; reads block headers if needed. model: maybe without its
        weights; None if it is not served.

        Raises:
            StoreError: blocks cannot be read.
            SnapshotError: its blocks are not those of its model.
        """
        return await self._hibernation.threads.on_io(lambda: self._plan(row, order, model))

    def _plan(self, row: IndexRow, order: QuantiseOrder, model: LoadedModel | None) -> Plan:
        if model is None or model.identity.digest != row.identity_digest:
            return Plan(row, "its model is not served here")
        if not any(choose(exact, order.bits) for exact in model.layout.span_slots(BLOCK_TOKENS)):
            return Plan(row, "none of its caches can be kept in few bits")
        with self._store.open_session(row.uri, row.version) as reader:
            if salvaged_from(reader.manifest) is not None:
                return Plan(row, "it is what a repair has saved of a damaged version")
            spans, packed_bytes = _spans(reader, model.layout, order.bits), stored_bytes(model.layout, order.bits)
            return plan_spans(row, spans, packed_bytes, _states(reader, model.layout))

    async def carry_out(self, plan: Plan, bits: int, model: LoadedModel) -> Receipt:
        """Write the next version of a session, with the planned tokens in few bits. Raises as a wake and a sleep; the
        session is then as it was."""
        uri = plan.row.uri
        order = WakeOrder(version=plan.row.version, cause="quantise")
        woken = await self._hibernation.waking.wake(uri, order, model, ignore)
        session = woken.session
        with self._store.open_session(uri, plan.row.version) as reader:
            await self._engine.run(_quantise(session, reader, plan, bits))
        return await self._hibernation.sleep(session, ignore, cause="quantise", may_wait=True)


def _mark_on(row: IndexRow, marks: SessionMarks) -> str | None:
    """Why a marked version is left, with the command that takes the mark away; None without a mark."""
    name = f"{row.uri.namespace}/{row.uri.name}"
    if row.bundle_id in marks.pins:
        return f"version {row.version} is pinned: `torpor unpin {name}@{row.version}`, then quantise again"
    tag = next((tag for tag, named in sorted(marks.tags.items()) if named == row.bundle_id), None)
    return tag and f"version {row.version} is tagged {tag}: `torpor untag {name} {tag}`, then quantise again"


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


def _quantise(session: Session, reader: BundleReader, plan: Plan, bits: int) -> Steps[None]:
    """Turn a woken session into its next version, on the engine thread. Checkpoints behind the first changed block are
    read into memory, to be written again.
    """
    state, layout = session.state, session.model.layout
    positions = state.checkpoints.positions
    for entry in reader.entries:
        if entry.kind == "state" and entry.start > plan.start and entry.start in positions:
            state.checkpoints.add(read_checkpoint(reader, entry, layout))
            yield None
    session.lossy = yield from quantise(state.caches, layout, bits, plan.start, plan.end)
    session.loss = worst(session.loss, Loss(bits, plan.end))
    session.unchanged_tokens = min(session.unchanged_tokens, plan.start)
    session.dirty = True


class Tally:
    """Collects the report of an order, session by session."""

    def __init__(self, order: QuantiseOrder) -> None:
        self._order = order
        self._actions: list[Action] = []
        self._problems: list[Finding] = []
        self._written = 0

    def add(self, plan: Plan, receipt: Receipt | None) -> None:
        """Add a session: left, planned (no receipt), or done."""
        row = plan.row
        if plan.left is not None:
            self._actions.append(Action("keep", "", row.uri, row.version, 0, plan.left))
            return
        before, after = format_bytes(plan.before), format_bytes(plan.after)
        what = f"{before} of keys and values are {after} in {self._order.bits} bits"
        stays = f"version {row.version} stays as it is until a prune removes it"
        size, version = (plan.raw_bytes, row.version) if receipt is None else (receipt.bytes_written, receipt.version)
        self._written += 0 if receipt is None else receipt.bytes_written
        self._actions.append(Action("quantise", "", row.uri, version, size, f"{what}; {stays}"))

    def fail(self, uri: SessionUri, error: TorporError) -> None:
        """Add a session that could not be quantised."""
        self._problems.append(Finding(str(uri), error.code, error.message))

    def report(self) -> MaintenanceResult:
        """The report, with done work first, as long as an answer takes. A plan's bytes_written are raw bytes, without
        headers."""
        written, actions = self._written, sorted(self._actions, key=lambda action: action.kind == "keep")
        if self._order.dry_run:
            written = sum(action.size_bytes for action in self._actions)
        return result_of(
            MaintenanceReport("quantise", self._order.dry_run, tuple(actions), 0, written, tuple(self._problems))
        )


class Ageing(Rounds):
    """Carries an age policy out again and again. Errors are logged, and the next round tries again."""

    def __init__(self, carry_out: Callable[[], Awaitable[MaintenanceResult]], every_s: float) -> None:
        self._carry_out = carry_out
        self._every_s = every_s
        super().__init__()

    async def _round(self) -> float:
        begun = time.monotonic()
        try:
            for problem in (await self._carry_out()).problems:
                _LOG.warning("quantising %s: %s: %s", problem.path, problem.code, problem.message)
        except ServiceClosed:
            pass  # during a stop, which may still be refused
        except TorporError as error:
            _LOG.warning("quantising: %s: %s", error.code, error.message)
        except Exception:  # noqa: BLE001 - a bug here must not end the policy
            _LOG.exception("quantising")
        return max(0.0, self._every_s - (time.monotonic() - begun))
