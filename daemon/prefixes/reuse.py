"""Prefix reuse: a new session takes over the state of another one for the tokens that both begin with.

Owns the choice of the source, and the copy of its state: from memory, or from the store and proven like any wake. Its
tree is lost with the process; at the start it learns the stored ledgers in the background.

`exact`, the default, takes only tokens that were read in the same model calls as this session would make, so that keys,
values and logits are the same to the bit. `longest` takes every token in common. Never used are states that are lossy,
that something else computed with perhaps other bits, or that do not tell how they were read.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from ...errors import TorporError
from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.format.manifest import LOSSY
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ...snapshot import restore
from ...snapshot.errors import NotEnoughMemory
from ...snapshot.forking import borrow
from ...snapshot.identity import decide_bits, require_circumstances, tokens_from_elsewhere
from ...snapshot.passes import Passes
from ...snapshot.state import LiveState, token_array
from ..api.causes import NotTaken
from ..api.events import OnEvent
from ..engine.engine import Engine, Steps
from ..engine.generation import reading
from ..events.bus import Bus
from ..events.events import PrefixHit
from ..models.models import LoadedModel
from ..options.serve_options import ReusePolicy
from ..sessions.sessions import Session
from ..sessions.transcripts import TextMap
from ..sessions.unprocessed_tail import text_map_in
from ..tasks.cancellation import to_the_end
from ..tasks.pieces import NAMES_AT_ONCE
from ..versions.orders import WakeOrder
from ..versions.writing import Versions
from .prefixes import Match, PrefixTree, tokens_in_common

AwakeOf = Callable[[SessionUri], Session | None]

A = TypeVar("A")
B = TypeVar("B")

_MOST_SOURCES: Final = 4
"""How many sessions are tried before the tokens are read after all."""

_MOST_LOOKED_AT: Final = 16
"""Sessions whose tokens are compared to tell why a text was read."""

_MOST_NAMES: Final = 1024
"""Sessions whose names are compared for that."""


@dataclass(eq=False, repr=False)
class PrefixReuse:
    """Finds and copies states that need not be computed again. The event loop's. found: how often from
    each session."""

    _store: Store
    _engine: Engine
    _versions: Versions
    _bus: Bus
    _found: Counter[SessionUri]
    _policy: ReusePolicy = "exact"

    def __post_init__(self) -> None:
        self.hits = self.misses = self.cached_tokens = 0
        self._tree = PrefixTree()
        self._learning: asyncio.Task[None] | None = None

    def learn_stored(self) -> None:
        """Begin to read the ledgers of sleeping sessions in the background."""
        if self._policy != "off":
            self._learning = asyncio.ensure_future(self._learn_stored())

    async def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.wait({self._learning})

    async def learned(self) -> None:
        """Wait until the ledgers of all sessions that slept at the start are known."""
        if self._learning is not None:
            await asyncio.wait({self._learning})

    def note(self, session: Session) -> None:
        if self._policy != "off":
            self._tree.put(session.uri, session.model.identity.digest, session.state.tokens)

    def forget(self, uri: SessionUri) -> None:
        self._tree.remove(uri)

    async def adopt(
        self, session: Session, ids: Sequence[int], awake_of: AwakeOf, emit: OnEvent
    ) -> LiveState | Mapping[SessionUri, NotTaken]:
        """A state for a new session that is to read `ids`. If all of them have to be read: why of each session that was
        tried; of none where no whole block is in common. The last token is always read, for its logits (QX6)."""
        why: dict[SessionUri, NotTaken] = {}
        if self._policy == "off" or len(ids) <= BLOCK_TOKENS:
            return why
        begun, wanted = time.monotonic(), token_array(b"")
        wanted.extend(ids[:-1])
        match = self._tree.find(session.uri.namespace, session.model.identity.digest, wanted)
        for uri in self._sources(match, awake_of):
            try:
                live = awake_of(uri)
                state = await (
                    self._from_store(session, uri, wanted, len(ids), emit)
                    if live is None
                    else self._from_memory(session, live, wanted, len(ids))
                )
            except NotEnoughMemory:
                state = "no_room"
            except TorporError:
                self._tree.remove(uri)  # it is damaged, gone or changed; try others
                state = "unreadable"
            if isinstance(state, str):
                why[uri] = state
            else:
                self.hits += 1
                self._found[uri] += 1
                self.cached_tokens += (cached := len(state.tokens))
                seconds = time.monotonic() - begun
                self._bus.publish(PrefixHit(session.uri, uri, len(ids), cached, live is not None, seconds))
                return state
        self.misses += 1
        return why

    def _sources(self, match: Match | None, awake_of: AwakeOf) -> Sequence[SessionUri]:
        """The sessions of a match to try. Those that sleep as ledgers alone are forgotten: they stood before others."""
        tried: list[SessionUri] = []
        ledgers = []
        for uri in match.sources if match else ():
            if awake_of(uri) is None and (row := self._store.find_session(uri)) is not None and not row.block_tokens:
                ledgers.append(uri)
                continue
            tried.append(uri)
            if len(tried) == _MOST_SOURCES:
                break
        for uri in ledgers:
            self._tree.remove(uri)
        return tried

    async def foreseen(self, session: Session, ids: Sequence[int], awake_of: AwakeOf) -> int:
        """How many first tokens of `ids` a new session would take over, as of `adopt`; nothing is copied."""
        if self._policy == "off" or len(ids) <= BLOCK_TOKENS:
            return 0
        wanted = token_array(b"")
        wanted.extend(ids[:-1])
        match, most = self._tree.find(session.uri.namespace, session.model.identity.digest, wanted), 0
        for uri in self._sources(match, awake_of):
            found = await self._looked_at(
                awake_of(uri),
                partial(self._usable_of, session, wanted=wanted, count=len(ids)),
                partial(self._look, session, uri, wanted, len(ids)),
            )
            most = max(most, found if isinstance(found, int) else 0 if isinstance(found, str) else found[1])
        return most

    async def read_on_alike(
        self, session: Session, uri: SessionUri, at: int, ids: Sequence[int], awake_of: AwakeOf
    ) -> int:
        """How many first tokens of `ids` another session has behind its first `at` tokens, read in the calls in which a
        fork there would read them; 0 if that is less than a block. session: a new one of the same model."""
        if self._policy == "off" or not session.model.layout.by_token:
            return 0
        found = await self._looked_at(awake_of(uri), _way_of, partial(self._stored_way, session, uri))
        if isinstance(found, str):
            return 0
        ledger, passes = found
        begun = replace(session, state=replace(session.state, tokens=token_array(b"")))
        begun.state.tokens.extend(ledger[:at])
        alike = self._usable(begun, ledger[at:], passes.after(at), ids[:-1], len(ids))
        return alike if alike >= BLOCK_TOKENS else 0

    async def _looked_at(
        self, live: Session | None, of_awake: Callable[[Session], A], of_stored: Callable[[], B]
    ) -> A | B | NotTaken:
        """What a look at another session gives, awake or asleep."""
        if live is not None:
            return of_awake(live)
        with suppress(TorporError):  # it is damaged, gone or changed
            return await self._versions.threads.on_io(of_stored)
        return "unreadable"

    def known(self, session: Session, ids: Sequence[int]) -> int:
        """The first tokens of `ids`, in full blocks, that some session has read."""
        match = self._tree.find(session.uri.namespace, session.model.identity.digest, ids[:-1])
        return match.tokens if match else 0

    def usable(
        self, session: Session, other: Session, ledger: Sequence[int], passes: Passes, ids: Sequence[int]
    ) -> int:
        """How many first tokens of `ids` a new session may take over from another one that will have a ledger, read in
        these calls."""
        is_alike = session.uri.namespace == other.uri.namespace and session.model.identity == other.model.identity
        if self._policy == "off" or not is_alike or len(ids) <= BLOCK_TOKENS:
            return 0
        return self._usable(session, ledger, passes, ids[:-1], len(ids))

    async def nearest(
        self, session: Session, ids: Sequence[int], awake_of: AwakeOf
    ) -> tuple[SessionUri, Sequence[int]] | None:
        """Of some other sessions the one with the longest common beginning with `ids`, and its tokens; None if there is
        none. Where no full block is common, those that the same client named come first. At most one sleeping session
        is read."""
        if self._policy == "off":
            return None
        namespace, identity = session.uri.namespace, session.model.identity.digest
        match = self._tree.find(namespace, identity, ids)
        sources = match.sources if match else _alike_first(session.uri, self._tree.sessions(namespace, identity))
        looked_at: list[tuple[SessionUri, Sequence[int]]] = []
        has_read = False
        for uri in list(itertools.islice(sources, _MOST_LOOKED_AT)):
            live = awake_of(uri)
            if live is not None:
                looked_at.append((uri, live.state.tokens[:]))
            elif not has_read and (ledger := await self._stored_ledger(uri)) is not None:
                looked_at.append((uri, ledger))
                has_read = True
        return max(looked_at, key=lambda near: tokens_in_common(near[1], ids), default=None)

    async def ledger_of(self, uri: SessionUri, awake_of: AwakeOf) -> Sequence[int] | None:
        """The tokens of another session, awake or asleep; None if it is gone."""
        live = awake_of(uri)
        return live.state.tokens[:] if live is not None else await self._stored_ledger(uri)

    async def system_of(self, uri: SessionUri, awake_of: AwakeOf) -> str | None:
        """The text that opened the chat of another session, awake or asleep; None without one, or if it is gone."""

        def of_stored() -> TextMap:
            with self._store.open_session(uri) as reader:
                return text_map_in(reader.manifest.session, uri)

        found = await self._looked_at(awake_of(uri), lambda live: live.chat.text_map, of_stored)
        return None if isinstance(found, str) else found.system

    async def _stored_ledger(self, uri: SessionUri) -> Sequence[int] | None:
        row = self._store.find_session(uri)
        if row is None:
            return None
        try:
            return token_array(await self._versions.threads.on_io(partial(self._ledger_of, uri, row.version)))
        except TorporError:
            return None  # damaged or gone: its next wake reports it

    async def _from_memory(
        self, session: Session, live: Session, wanted: Sequence[int], count: int
    ) -> LiveState | NotTaken:
        source, usable = live.state, self._usable_of(session, live, wanted, count)
        if isinstance(usable, str):
            return usable
        caches, key = session.model.new_caches(), session.state.random_key

        def steps() -> Steps[LiveState | NotTaken]:
            self._engine.release(source)
            return (yield from borrow(source, caches, key, usable)) or "no_whole_block"

        return await self._engine.run(steps())

    def _usable_of(self, session: Session, live: Session, wanted: Sequence[int], count: int) -> int | NotTaken:
        """How many tokens may be taken over of an awake session, a block at least."""
        found = _way_of(live)
        if isinstance(found, str):
            return found
        usable = self._usable(session, *found, wanted, count)
        return usable if usable >= BLOCK_TOKENS else "other_calls"

    async def _from_store(
        self, session: Session, uri: SessionUri, wanted: Sequence[int], count: int, emit: OnEvent
    ) -> LiveState | NotTaken:
        found = await self._versions.threads.on_io(lambda: self._look(session, uri, wanted, count))
        if isinstance(found, str):
            return found
        version, usable = found
        order = WakeOrder(version, usable, cause="prefix")
        wake = self._versions.waking.wake(uri, order, session.model, emit)
        woken = await to_the_end(wake)  # threads fill its memory from a file that must stay open
        state = woken.session.state
        state.random_key, state.last_logits = session.state.random_key, None
        state.checkpoints.cut(0)  # they lie in the other session's bundle
        return state

    def _look(self, session: Session, uri: SessionUri, wanted: Sequence[int], count: int) -> tuple[int, int] | NotTaken:
        """The usable version and position of a sleeping session; reads manifest and headers.

        Raises SessionNotFound: it is gone. StoreError: its bundle cannot be read."""
        with self._store.open_session(uri) as reader:
            whole = self._whole_plan(session, reader)
            if isinstance(whole, str):
                return whole
            usable = self._usable(session, token_array(whole.tokens), whole.held_passes, wanted, count)
            if usable < BLOCK_TOKENS:
                return "other_calls"
            resumed = _plan_at(session.model, reader, usable).resumed_tokens
        return (reader.manifest.version, resumed) if resumed >= BLOCK_TOKENS else "no_whole_block"

    def _whole_plan(self, session: Session, reader: BundleReader) -> restore.WakePlan | NotTaken:
        """The plan of a wake of a version with all its tokens, if they have the bits of this model. Raises as
        `_look`."""
        kept, model = reader.manifest.session, session.model
        differs = require_circumstances(kept.get("backend"), model.backend, model=model.name, strict=False)
        is_from_elsewhere = decide_bits(differs) or tokens_from_elsewhere(kept) > 0
        if kept.get(LOSSY) is not None or is_from_elsewhere:
            return "other_bits"
        if not reader.is_whole():
            return "no_whole_block"
        whole = _plan_at(model, reader, None)
        return whole if whole.loss is None else "other_bits"

    def _stored_way(self, session: Session, uri: SessionUri) -> tuple[Sequence[int], Passes] | NotTaken:
        """The tokens of a sleeping session, and how they were read. Raises as `_look`."""
        with self._store.open_session(uri) as reader:
            whole = self._whole_plan(session, reader)
            return whole if isinstance(whole, str) else (token_array(whole.tokens), whole.held_passes)

    def _usable(
        self, session: Session, ledger: Sequence[int], passes: Passes, wanted: Sequence[int], count: int
    ) -> int:
        common = tokens_in_common(ledger, wanted)
        if self._policy == "longest":
            return common
        return read_alike(passes, reading(session.model, session.state, count), common)

    async def _learn_stored(self) -> None:
        for uri in itertools.chain.from_iterable(self._store.index.iter_uris(NAMES_AT_ONCE)):
            try:
                await self._learn(uri)
            except TorporError:
                continue  # damaged or gone: its next wake reports it

    async def _learn(self, uri: SessionUri) -> None:
        """Learn the ledger of a sleeping session, unless it is deleted meanwhile: no request may find it then."""
        while uri not in self._tree and (row := self._store.find_session(uri)) is not None:
            tokens = await self._versions.threads.on_io(partial(self._ledger_of, uri, row.version))
            now = self._store.find_session(uri)
            if uri not in self._tree and now is not None and now.bundle_id == row.bundle_id:
                self._tree.put(uri, bytes.fromhex(row.identity), token_array(tokens))

    def _ledger_of(self, uri: SessionUri, version: int) -> bytes:
        with self._store.open_session(uri, version) as reader:
            return bytes(reader.tokens())


def _plan_at(model: LoadedModel, reader: BundleReader, at: int | None) -> restore.WakePlan:
    return restore.plan_wake(
        reader, model.identity, model.layout, model=model.name, context_tokens=model.context_tokens, at=at
    )


def _way_of(live: Session) -> tuple[Sequence[int], Passes] | NotTaken:
    """The tokens of an awake session, and how they were read."""
    if live.loss is not None or live.provenance.elsewhere_tokens:
        return "other_bits"
    return live.state.tokens, live.state.passes


def read_alike(passes: Passes, reading: Iterator[tuple[int, bool]], common: int) -> int:
    """How many of the first `common` tokens were read in the same calls as `reading` would make. reading: sizes of the
    calls to come, from the first token on.
    """
    position = 0
    for done, (size, _) in zip(passes, reading, strict=False):
        if done != size or position + size > common:
            break
        position += size
    return position


def _alike_first(uri: SessionUri, sessions: Iterator[SessionUri]) -> Iterator[SessionUri]:
    """Sessions, those first whose names begin like this one's, as a client's do that gave them one name."""

    def differs_at(each: SessionUri) -> int:
        return next((at for at, two in enumerate(zip(each.name, uri.name, strict=False)) if two[0] != two[1]), 1 << 30)

    return iter(sorted(itertools.islice(sessions, _MOST_NAMES), key=differs_at, reverse=True))
