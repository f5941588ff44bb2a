"""The orders of wakes."""

from __future__ import annotations

from dataclasses import dataclass

from ..events.events import WakeCause
from ..sessions.sessions import Session


@dataclass(frozen=True, slots=True)
class WakeOrder:
    """The order of a wake. version: None is the last one. at_token: how many of its tokens; None: all. strict: also
    refuse a session that another device, library or version computed. cause: for the events.
    """

    version: int | None = None
    at_token: int | None = None
    strict: bool = False
    cause: WakeCause = "asked"


def order_of_look(live: Session) -> WakeOrder | None:
    """The order that brings a look back where it stands; None for a session that is no look."""
    if not live.is_mere_look:
        return None
    assert live.durable is not None, "what is looked at has slept"
    return WakeOrder(live.durable.version, len(live.state.tokens) if live.is_cut_short else None)
