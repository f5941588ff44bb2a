"""Verbs that make a session, change it and show it; `session.py` has what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field

from ...records import Listed
from .dialogue import JsonObject, Tools, require_root
from .events import Listener, Reporting
from .limits import DEFAULT_HISTORY, MAX_HISTORY, MAX_NAMED_SESSIONS, MAX_NUMBER
from .records import Labels, ModelName, NamedSampling, Request, SessionText, Text
from .session import OwnDurability


class CreateRequest(Request):
    """Make a session. It is empty, and in memory only until its first turn or sleep.

    system, tools, template_arguments: open its chat. model: the daemon's first if None.
    durability: `none` for a session to throw away: a crash loses what it did since its last sleep, and so it is for its
    forks and folds; as the daemon's option if None.
    unnamed: nobody chose the name; it is a client's own id, for example. The first request that reads or writes in the
    session, and does not say so, names it for good.
    """

    session: SessionText
    _: KW_ONLY
    model: ModelName | None = None
    labels: Labels = ()
    sampling: NamedSampling | None = None
    system: Text | None = None
    tools: Tools = ()
    template_arguments: JsonObject | None = None
    durability: OwnDurability | None = None
    unnamed: bool = False

    def require(self) -> None:
        require_root(self.tools, self.template_arguments)


class SetRequest(Reporting):
    """Change how the session draws its tokens from now on: only the given fields of `sampling`. A given seed begins its
    random numbers anew. labels: in place of those that it has. A sleeping session is woken, and its next sleep keeps
    the change."""

    session: SessionText
    _: KW_ONLY
    sampling: NamedSampling | None = None
    labels: Labels | None = None
    on_event: Listener = None

    def require(self) -> None:
        if self.labels is None and (self.sampling is None or not self.sampling.named()):
            raise ValueError("name at least one of the sampling's parameters, or labels")


class ListRequest(Request):
    """The sessions of this namespace, else of the client's; without both, all sessions."""

    namespace: SessionText | None = None


class ShowRequest(Request):
    """Everything that can be seen of one session, or of one version of it (`NAME@3`); one that sleeps is read from its
    bundle and stays asleep."""

    session: SessionText


class HistoryRequest(Request):
    """The versions of sessions and of their kin: what they came from, and what was forked, folded or branched off them;
    of a version (`NAME@3`), it and what it came from; without a name, all. namespace: only in that one. since_ns: only
    what was made since. limit: so many."""

    sessions: Annotated[Sequence[SessionText], Listed(or_one=True), Field(max_length=MAX_NAMED_SESSIONS)] = ()
    _: KW_ONLY
    namespace: SessionText | None = None
    since_ns: Annotated[int, Field(ge=0, le=MAX_NUMBER)] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_HISTORY)] = DEFAULT_HISTORY
