"""How much of each request's prefix was reused: remembered for a while, to tell why tokens were read again.

Kept in the process, and bounded; its texts go to clients that ask and to no log. What of it lasts goes to the store's
diary once a request has ended (`request_diary.py`). `why.py` has the rules.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Final

from ...memvid.uri import SessionUri
from ..api.causes import REMEDIES, NotTaken, ReadingVerb, Reuse
from ..events import accounts
from ..sessions.encoding import Encoder
from ..sessions.sessions import Session
from ..views.causes import MAX_REQUESTS
from ..views.why import Explanation, explain, volatile_pattern, with_setting
from .prefixes import packed, tokens_in_common
from .reuse import PrefixReuse

MAX_SESSIONS: Final = 1024
"""Sessions with remembered requests: those that were used last."""

MIN_COMMON_TOKENS: Final = 16
"""Fewer common tokens are no prefix: every chat begins with the same control tokens."""

MAX_LINES_SHOWN: Final = 8
MAX_LINE_SHOWN_CHARS: Final = 80
"""Of the volatile lines of a request."""


class Reasons:
    """The last requests of sessions. The event loop's."""

    def __init__(self, encoder: Encoder, reuse: PrefixReuse, awake_of: Callable[[SessionUri], Session | None]) -> None:
        self._encoder = encoder
        self._reuse = reuse
        self._awake_of = awake_of
        self._of: OrderedDict[SessionUri, deque[Reuse]] = OrderedDict()
        self._left: dict[SessionUri, SessionUri] = {}
        self._under_way = 0
        self._gone: set[str] = set()  # sessions forgotten while a request is examined

    def of(self, uri: SessionUri) -> tuple[Reuse, ...]:
        """The remembered requests of a session, the latest last."""
        return tuple(self._of.get(uri, ()))

    def forget(self, uri: SessionUri) -> None:
        """Forget a session, and its name and all texts beside it in the requests of others."""
        self._of.pop(uri, None)
        self._left = {fork: source for fork, source in self._left.items() if uri not in (fork, source)}
        gone = str(uri)
        if self._under_way:
            self._gone.add(gone)
        for requests in self._of.values():
            for at, reuse in enumerate(requests):
                if reuse.source == gone:
                    requests[at] = _without_source(reuse)

    @contextmanager
    def of_what_reads(self, uri: SessionUri) -> Iterator[None]:
        """Forget a request again that ends by an error before the session has read or written anything for it: it was
        no hit. One that diverged from its own session stays, for the user asks why."""
        held, before = self._held(uri), self.of(uri)[-1:]
        try:
            yield
        except BaseException:
            noted = self.of(uri)[-1:]
            if noted and noted != before and self._held(uri) <= held and not _is_own_divergence(noted[0], uri):
                self._of[uri].pop()
            raise

    def _held(self, uri: SessionUri) -> int:
        live = self._awake_of(uri)
        return len(live.state.tokens) if live is not None else 0

    async def note(
        self,
        live: Session,
        verb: ReadingVerb,
        ids: Sequence[int],
        at: int | None = None,
        message_index: int | None = None,
        *,
        refusing: bool = False,
        system: str | None = None,
    ) -> None:
        """Remember a request that is about to read `ids` behind the first `at` tokens (None: all). refusing: it is
        refused if it diverges. system: the text that opens its chat, if lines of that can be said elsewhere."""
        self._under_way += 1
        try:
            reuse = await self._found(live, verb, packed(ids), at, message_index, system, refusing=refusing)
            if reuse.source in self._gone:
                reuse = _without_source(reuse)
            self._remember(live.uri, reuse)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._gone.clear()

    async def _found(
        self,
        live: Session,
        verb: ReadingVerb,
        ids: array[int],
        at: int | None,
        message_index: int | None,
        system: str | None,
        *,
        refusing: bool,
    ) -> Reuse:
        held = len(live.state.tokens)
        kept, now = held if at is None else at, time.time_ns()
        if not held:
            return await self._of_a_new_session(live, verb, ids, now, system)
        if kept == held:
            left = self._left.pop(live.uri, None)
            return await self._of_a_fork(live, verb, ids, now, left) if left else _hit(verb, now, live.uri, held)
        found = live.state.tokens[:kept] + ids
        told = await self._explained(live, live.state.tokens[:], found, kept)
        reuse = _diverged(verb, now, live.uri, kept, held, told, message_index)
        return replace(reuse, became="refused") if refusing else reuse

    def leaves(self, fork: SessionUri, source: SessionUri) -> None:
        """Note that a transcript goes on in a fork, because it leaves the way of the source there."""
        self._left[fork] = source

    def volatile(self, uri: SessionUri, lines: str) -> None:
        """Note the volatile lines of the last request."""
        requests = self._of.get(uri)
        if requests:
            shown = tuple(line[:MAX_LINE_SHOWN_CHARS] for line in lines.split("\n", MAX_LINES_SHOWN)[:MAX_LINES_SHOWN])
            requests[-1] = replace(requests[-1], volatile=shown)

    def took_over(self, uri: SessionUri, cached_tokens: int) -> None:
        """Note how many tokens the last request took over from another session."""
        requests = self._of.get(uri)
        if requests:
            requests[-1] = replace(requests[-1], cached_tokens=cached_tokens)

    def took_nothing(self, uri: SessionUri, why: Mapping[SessionUri, NotTaken]) -> None:
        """Note why the last request, of a new session, took over nothing. why: of each session that was tried."""
        requests = self._of.get(uri)
        if requests and requests[-1].source is not None:
            tried = {str(each): reason for each, reason in why.items()}
            reason = tried.get(requests[-1].source) or next(iter(tried.values()), "no_whole_block")
            requests[-1] = replace(requests[-1], not_taken=reason)

    def went_back(self, uri: SessionUri) -> None:
        """Note that the last request went back to where it diverged, and was read from there."""
        requests = self._of.get(uri)
        if requests:
            requests[-1] = replace(requests[-1], became="rewound")

    async def _of_a_fork(
        self, live: Session, verb: ReadingVerb, ids: array[int], now: int, source: SessionUri
    ) -> Reuse:
        held = len(live.state.tokens)
        ledger = await self._reuse.ledger_of(source, self._awake_of)
        found = live.state.tokens + ids
        common = tokens_in_common(ledger or (), found)
        if ledger is None or not held <= common < len(ledger):
            return _hit(verb, now, live.uri, held)
        told = await self._explained(live, ledger, found, common)
        return replace(_diverged(verb, now, source, common, len(ledger), told, None), cached_tokens=held)

    async def _of_a_new_session(
        self, live: Session, verb: ReadingVerb, ids: Sequence[int], now: int, system: str | None
    ) -> Reuse:
        near = await self._reuse.nearest(live, ids, self._awake_of)
        if near is None:
            return Reuse(verb, now, "none")
        source, ledger = near
        common = tokens_in_common(ledger, ids)
        # The last token is always read, for its logits.
        if common == len(ledger) or common >= len(ids) - 1:
            return Reuse(verb, now, "hit", str(source), common, len(ledger))
        before = None if system is None else await self._reuse.system_of(source, self._awake_of)
        pattern = None if system is None or before is None else volatile_pattern(before, system)
        if common < MIN_COMMON_TOKENS and pattern is None:
            return Reuse(verb, now, "none")
        told = await self._explained(live, ledger, ids, common)
        told = told if pattern is None else with_setting(told, pattern)
        return _diverged(verb, now, source, common, len(ledger), told, None)

    async def _explained(self, live: Session, expected: Sequence[int], found: Sequence[int], at: int) -> Explanation:
        return await self._encoder.with_detokenizer(live.model, lambda reader: explain(expected, found, at, reader))

    def _remember(self, uri: SessionUri, reuse: Reuse) -> None:
        if (account := accounts.current.get()) is not None:
            account.note(uri, reuse.at_ns)
        self._of.setdefault(uri, deque(maxlen=MAX_REQUESTS)).append(reuse)
        self._of.move_to_end(uri)
        while len(self._of) > MAX_SESSIONS:
            self._of.popitem(last=False)


def _without_source(reuse: Reuse) -> Reuse:
    """Each of the texts has a part of both sessions, and so may what a remedy says beyond its cause."""
    remedy = None if reuse.remedy is None or reuse.cause is None else REMEDIES.get(reuse.cause)  # type: ignore[call-overload]
    return replace(reuse, source=None, expected_text=None, found_text=None, remedy=remedy)


def _is_own_divergence(reuse: Reuse, uri: SessionUri) -> bool:
    return reuse.outcome == "diverged" and reuse.source == str(uri)


def _hit(verb: ReadingVerb, now: int, uri: SessionUri, held: int) -> Reuse:
    return Reuse(verb, now, "hit", str(uri), held, held)


def _diverged(
    verb: ReadingVerb,
    now: int,
    source: SessionUri,
    common: int,
    stored: int,
    told: Explanation,
    message_index: int | None,
) -> Reuse:
    return Reuse(verb, now, "diverged", str(source), common, stored, common, message_index, **asdict(told))
