"""Lets the store's diary tell of each request that has read, written or woken something; and counts it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ...memvid.folder.diary import Diary
from ...memvid.uri import SessionUri
from ..api.causes import RequestCost, Reuse, judge
from ..events.accounts import Account
from ..events.bus import Bus
from ..events.figures import Begun
from ..views.causes import say
from .prefix_history import Reasons

_LOG = logging.getLogger(__name__)

_OF_WORK: Final = ("read_tokens", "written_tokens", "durable_seconds")
"""What only a request has spent of which the diary tells."""


class RequestDiary:
    """What becomes of the account of a request once it has ended. The event loop's. on_said: is told behind each."""

    def __init__(self, diary: Diary, reasons: Reasons, bus: Bus, on_said: Callable[[], None]) -> None:
        self._diary = diary
        self._reasons = reasons
        self._bus = bus
        self._on_said = on_said
        bus.on_account = self._ended

    def forget(self, uri: SessionUri) -> None:
        """A session is about to be deleted: what requests that are under way have of it is not told any more."""
        for account in self._bus.accounts:
            account.gone.add(uri)

    def end(self, uri: SessionUri) -> None:
        """A session is deleted, and what was known of it in memory goes now: nothing that was said of it until now is
        told any more, nor by requests that began while it was being deleted."""
        self.forget(uri)
        self._diary.end(uri)
        self._on_said()

    def _ended(self, account: Account) -> None:
        try:
            self._tell(account)
        except Exception:  # noqa: BLE001 - a figure that is lost must not fail the answer
            _LOG.exception("no account of a request")

    def _tell(self, account: Account) -> None:
        uri = account.session
        if uri is None or not (account.noted_ns or account.was_woken or any(map(account.spent.get, _OF_WORK))):
            return
        reuse = next((each for each in self._reasons.of(uri) if each.at_ns == account.noted_ns), None)
        cost = _cost_of(account, reuse)
        self._count(account, reuse, cost)
        if uri not in account.gone:
            say(self._diary, uri, cost, reuse, account.gone)
            self._on_said()

    def _count(self, account: Account, reuse: Reuse | None, cost: RequestCost) -> None:
        figures = self._bus.figures
        figures.waited.add(cost.waited_seconds)
        figures.tokens.update(read=cost.read_tokens, taken_over=cost.taken_over_tokens, written=cost.written_tokens)
        if cost.read_again_tokens:
            figures.read_again[cost.cause] += cost.read_again_tokens
        if account.first_token_s is not None:
            figures.first_token.add(account.first_token_s, _begun(account, reuse))


def _begun(account: Account, reuse: Reuse | None) -> Begun:
    if account.was_woken:
        return "woken"
    had = reuse is not None and reuse.common_tokens > 0 and reuse.source == str(account.session)
    return "reused" if had or account.spent["taken_over_tokens"] else "cold"


def _cost_of(account: Account, reuse: Reuse | None) -> RequestCost:
    cost = RequestCost(
        account.number,
        account.verb,
        time.time_ns(),
        account.client,
        account.code,
        seconds=time.monotonic() - account.began,
        **account.spent,
    )
    own = reuse is not None and reuse.source == str(account.session)
    of_tokens = (cost.read_tokens, cost.recomputed_tokens, cost.recomputed_because)
    return replace(cost, **judge(cost.verb, reuse, *of_tokens, own=own)._asdict())
