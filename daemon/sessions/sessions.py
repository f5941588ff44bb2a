"""A session that is awake, and the turn-taking of requests for one session."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...memvid.answers import Lossy
from ...memvid.disk.clock import now_ns
from ...memvid.format.blocks import BlockEntry
from ...memvid.format.manifest import LOSSY, UNNAMED, UNREAD
from ...memvid.format.records import Receipt
from ...memvid.uri import SessionUri
from ...snapshot.caches import growth_of, resident_bytes
from ...snapshot.checkpoints import Checkpoints
from ...snapshot.errors import MalformedSnapshot
from ...snapshot.identity import circumstances_in, compare, decide_bits
from ...snapshot.lossy import lossy_in
from ...snapshot.state import LiveState
from ..api.events import ignore
from ..api.sampling import Sampling
from ..api.session import OwnDurability, Provenance
from ..engine.admission import Request, current
from ..errors import SessionBusy
from ..models.models import LoadedModel
from ..views.ledgers import PlainLedger
from ..views.stored import BACKEND, map_of_provenance, provenance_in
from ..views.trees import BRANCH, TREE
from .chats import Chat, of_type
from .interrupted import INTERRUPTED, Interrupted
from .rereading import LastRead
from .unprocessed_tail import Unread

# Requests that may wait for one session. The next is refused, and nothing has happened (QX18).
MAX_WAITING = 16
# The last time in 64 bits, in nanoseconds of the Unix clock: in the year 2262.
MAX_TIME_NS = 2**63 - 1
# The key in the session map for the choice of a session to throw away.
DURABILITY = "durability"


@dataclass(frozen=True, slots=True)
class Stay:
    """How a session stands in memory.

    held_bytes: the memory of its state when a request last released it; the engine changes it during a request.
    last_used, used_ns: when that was, by the monotonic clock and in Unix time, which goes on while the machine sleeps.
    awake_until: by the same clock, to when a client wants it awake: no idleness ends it before, and pressure only where
        no other session can go.
    """

    held_bytes: int = 0
    last_used: float = field(default_factory=time.monotonic)
    used_ns: int = field(default_factory=now_ns)
    awake_until: float = 0.0


@dataclass(slots=True)
class Session:
    """A session with its state in memory.

    durable: its last version: made by a sleep, or read by a wake. durable_by: the backend that computed its blocks.
    unchanged_tokens: leading tokens whose KV still equals that of the durable snapshot.
    chat: what its tokens say as a chat.
    durability: as of `create`.
    unnamed: nobody chose its name; the first request that names it ends that.
    dirty: whether anything has changed since the durable snapshot.
    acknowledged: the session map of its last durable turn, as of a version with the end of its ledger unread; None
    where a sleep has all of it.
    rewound: whether it was woken at an earlier version than the last. It is a look at that one until something is read
        or written; only then does the session go on from there, and sleep as a new version.
    provenance: where it comes from.
    loss: the tokens that were ever kept in few bits; None for an exact session.
    unread: the unread end of its ledger, to be read before any use; None without one.
    interrupted: the last request that was given up in its midst. It counts while the ledger ends where it ended then.
    versioning: held while a sleep or a write behind makes a version, until the session says so. So the later of two
        sees what the earlier one changed.
    last_read: when the blocks of its last snapshot were last found sound.
    stay: how it stands in memory.
    """

    uri: SessionUri
    model: LoadedModel
    state: LiveState
    sampling: Sampling
    labels: tuple[str, ...] = ()
    chat: Chat = field(default_factory=Chat)
    durability: OwnDurability | None = None
    unnamed: bool = False
    created_ns: int = field(default_factory=now_ns)
    durable: Receipt | None = None
    durable_by: object = None
    unchanged_tokens: int = 0
    dirty: bool = True
    acknowledged: Mapping[str, Any] | None = None
    rewound: bool = False
    provenance: Provenance = field(default_factory=Provenance)
    loss: Lossy | None = None
    unread: Unread | None = None
    interrupted: Interrupted | None = None
    versioning: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)
    last_read: LastRead = field(default_factory=LastRead, compare=False)
    stay: Stay = field(default_factory=Stay, compare=False)

    @property
    def left_midway(self) -> Interrupted | None:
        """The request in whose midst the ledger ends; None if it ends in no such place."""
        given_up = self.interrupted
        return given_up if given_up is not None and given_up.end == len(self.state.tokens) else None

    @property
    def whole_tokens(self) -> int:
        """The tokens without a message that it has read in part."""
        midway = self.left_midway
        return len(self.state.tokens) if midway is None or midway.end >= midway.answer_at else midway.begins_at

    @property
    def is_single_question(self) -> bool:
        """Whether nobody has named it, and it has answered no more than once."""
        said = self.chat.text_map.turns
        return self.unnamed and (not said or sum(turn.role == "assistant" for turn in said) == 1)

    @property
    def is_cut_short(self) -> bool:
        """Whether it holds fewer tokens than the snapshot that it was woken from."""
        return self.durable is not None and len(self.state.tokens) < self.durable.token_count

    def holds_all_of(self, version: str) -> bool:
        """Whether all of a stored version is in memory as it was written. version: its bundle id."""
        if self.durable is None or self.durable.bundle_id != version or self.is_cut_short:
            return False
        return not self.dirty or self.unchanged_tokens >= self.durable.block_tokens

    @property
    def is_mere_look(self) -> bool:
        """Whether it was woken at an earlier token or version, with no change since. An ordinary sleep would lose that
        position, or write a version that no user asked for; so it leaves memory in a way of its own (`awake.py`)."""
        return (self.is_cut_short or self.rewound) and not self.dirty

    @property
    def resident_bytes(self) -> int:
        """The memory of the state; while it decodes in a batch, its memory when a request last released it."""
        if self.state.tokens and not self.state.caches:
            return self.stay.held_bytes
        logits = self.state.last_logits.nbytes if self.state.last_logits is not None else 0
        return resident_bytes(self.state.caches) + self.state.checkpoints.resident_bytes + logits

    def drawing(self, by: Sampling | None) -> Sampling:
        """How it draws, changed by a request's sampling. Raises InvalidSampling: that names a token that its model has
        not."""
        changed = self.sampling.changed(by)
        changed.require_known(self.model.layout.vocabulary)
        return changed

    def growth_of(self, at_once: int) -> Callable[[int], int]:
        """A function of a number of tokens: the most bytes of the state beyond `Stay.held_bytes` while it grows to so
        many, at most `at_once` in a call. It may be asked while the engine grows the state."""
        state, layout = self.state, self.model.layout
        of_caches, of_checkpoints = (
            growth_of(state.caches, layout, at_once),
            state.checkpoints.growth_of(len(state.tokens)),
        )
        more = (layout.logits_bytes if state.last_logits is None else 0) + self.resident_bytes - self.stay.held_bytes

        def growth(token_count: int) -> int:
            return of_caches(token_count) + (0 if layout.by_token else of_checkpoints(token_count)) + more

        return growth

    def ledger(self) -> PlainLedger:
        """Its tokens as they are now, with the blocks of its last version that hold first ones of them."""
        tokens, alike = self.state.tokens[:], self.unchanged_tokens if self.dirty else len(self.state.tokens)
        blocks = () if self.durable is None else self.durable.entries
        entries = [entry for entry in blocks if entry.end <= min(alike, len(tokens))]
        return PlainLedger(len(tokens), entries, lambda start, end: tokens[start:end])

    def let_go(self) -> None:
        """Keep only the ledger of the state, and the model without its weights: a waiting request still refers to the
        session, and would hold its memory."""
        self.state = replace(self.state, caches=[], last_logits=None, checkpoints=Checkpoints())
        self.model = self.model.without_weights()

    def computed_by(self) -> dict[str, str]:
        """The backend of the logits for the next canary: the snapshot's if nothing was computed since the wake and the
        canary is not taken anew at each sleep."""
        slept_by = self.provenance.slept_by
        if slept_by is None or self.state.computed_tokens or not self.model.layout.by_token:
            return dict(self.model.backend)
        return dict(slept_by)

    def became(self, receipt: Receipt, reused: Iterable[BlockEntry], backend: object) -> None:
        """Note a version that has the session up to the last token of its blocks. reused: the blocks that were neither
        read nor written for it. backend: of what computed them."""
        self.durable, self.durable_by = receipt, backend
        self.unchanged_tokens = receipt.block_tokens
        self.rewound = False
        self.last_read.keep(receipt.entries, {block.id for block in reused})

    def to_map(self) -> dict[str, Any]:
        """The session map of a snapshot: all of the session but its model state."""
        return {
            "model": self.model.name,
            "labels": list(self.labels),
            "sampling": self.sampling.to_map(),
            **self.chat.to_map(),
            "created_ns": self.created_ns,
            **({DURABILITY: self.durability} if self.durability else {}),
            **({UNNAMED: True} if self.unnamed else {}),
            **({LOSSY: asdict(self.loss)} if self.loss else {}),
            **map_of_provenance(self.provenance),
            **({UNREAD: self.unread.to_map()} if self.unread else {}),
            **({INTERRUPTED: self.left_midway.to_map()} if self.left_midway else {}),
        }

    @classmethod
    def woken(
        cls,
        uri: SessionUri,
        model: LoadedModel,
        state: LiveState,
        durable: Receipt,
        entries: Mapping[str, Any],
        restored_tokens: int,
    ) -> Session:
        """A session from its restored state and the map of `to_map`. restored_tokens: how many of its first tokens were
        restored unchanged.

        Raises:
            MalformedSnapshot: `to_map` does not make this map.
            InvalidSampling: its sampling parameters are out of range.
        """
        try:
            sampling, unread = sampling_of(entries), _unread_behind(len(state.tokens), entries)
            sampling.require_known(model.layout.vocabulary)
            end = len(state.tokens) + (len(unread.tokens) if unread else 0)
            return cls(
                uri=uri,
                model=model,
                state=state,
                sampling=sampling,
                labels=tuple(of_type(label, "a label", str) for label in of_type(entries["labels"], "labels", list)),
                chat=Chat.from_map(entries, len(state.tokens), unread),
                durability="none" if entries.get(DURABILITY) == "none" else None,
                unnamed=entries.get(UNNAMED) is True,
                created_ns=_time_ns(entries, "created_ns"),
                durable=durable,
                durable_by=entries.get(BACKEND),
                unchanged_tokens=durable.block_tokens,
                dirty=False,
                acknowledged=entries if unread else None,
                loss=lossy_in(entries.get(LOSSY)),
                provenance=_woken_here(provenance_in(entries), model, len(state.tokens), restored_tokens),
                unread=unread,
                interrupted=Interrupted.from_map(entries.get(INTERRUPTED), end),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedSnapshot(
                f"The snapshot of {uri} lacks what a session needs ({type(error).__name__}: {error}).", session=str(uri)
            ) from error


def tree_in(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What a session map says of a branch and of those below it, for a version of the same tokens."""
    return {key: entries[key] for key in (TREE, BRANCH) if key in entries}


def _woken_here(provenance: Provenance, model: LoadedModel, token_count: int, restored_tokens: int) -> Provenance:
    """The provenance of a version, compared with what computes its session now."""
    slept_by = circumstances_in(provenance.slept_by)
    differs = compare(slept_by, model.backend).differing
    elsewhere = token_count if decide_bits(differs) else provenance.elsewhere_tokens
    return replace(provenance, slept_by=slept_by, differs=differs, elsewhere_tokens=min(elsewhere, restored_tokens))


def _unread_behind(count: int, entries: Mapping[str, Any]) -> Unread | None:
    """The unread end of the ledger, if it follows the restored tokens: not after a repair's cut or at an earlier
    token."""
    unread = Unread.from_map(entries.get(UNREAD))
    return unread if unread is not None and unread.start == count else None


def sampling_of(entries: Mapping[str, Any]) -> Sampling:
    """A session's sampling parameters, from the map of `Session.to_map`.

    Raises:
        MalformedSnapshot: there are none.
        InvalidSampling: they are out of range.
    """
    stored = entries.get("sampling")
    if type(stored) is not dict:
        raise MalformedSnapshot("The snapshot lacks the sampling parameters that a session needs.")
    return Sampling.from_map(stored)


def _time_ns(entries: Mapping[str, Any], name: str) -> int:
    value = of_type(entries[name], name, int)
    if not 0 <= value <= MAX_TIME_NS:
        raise ValueError(f"{name} is {value}, not a time from 0 to {MAX_TIME_NS}")
    return value


class Turns:
    """Lets requests for one session take turns, in order of arrival. A normal request lifts background ones before
    it. on_free: is told of each session that no request has any more."""

    def __init__(self) -> None:
        self.on_free: Callable[[SessionUri], None] = ignore
        self._lines: dict[SessionUri, tuple[asyncio.Lock, list[tuple[Request, bool]]]] = {}
        self._released = asyncio.Event()

    def in_use(self) -> set[SessionUri]:
        """The sessions that a request holds or waits for."""
        return set(self._lines)

    async def released(self, within_s: float | None) -> None:
        """Wait until a request releases a session, for at most `within_s` seconds."""
        self._released.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._released.wait(), within_s)

    def users(self, uri: SessionUri) -> int:
        """How many requests hold the session or wait for it."""
        return len(self._lines[uri][1]) if uri in self._lines else 0

    def is_busy(self, uri: SessionUri) -> bool:
        """Whether a client's request holds the session or waits for it, and not briefly; one that was given up will
        soon be gone."""
        line = self._lines[uri][1] if uri in self._lines else ()
        return any(request.goes_on and not briefly for request, briefly in line)

    def lift(self, uri: SessionUri) -> None:
        """Let requests that hold a session or wait for it stand back no more."""
        for request, _ in self._lines[uri][1]:
            request.lift()

    @asynccontextmanager
    async def take(self, uri: SessionUri, *, always: bool = False, briefly: bool = False) -> AsyncIterator[None]:
        """Hold the session alone. always: wait behind any number of requests. briefly: to fork it, and for no answer.
        Raises SessionBusy: too many wait; nothing has happened."""
        if self.users(uri) > MAX_WAITING and not always:
            raise SessionBusy(
                f"{MAX_WAITING} requests already wait for {uri}; send this one again later.", session=str(uri)
            )
        lock, line = self._lines.setdefault(uri, (asyncio.Lock(), []))
        request = current()
        request.waits = request.waits or bool(line)
        if not request.stands_back():
            self.lift(uri)
        user = request, briefly
        line.append(user)
        try:
            async with lock:
                yield
        finally:
            line.remove(user)
            if not line:
                del self._lines[uri]
                self.on_free(uri)
            self._released.set()
