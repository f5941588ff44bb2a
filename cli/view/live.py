"""What `torpor top` knows of a daemon, made of its answers and its events. Draws nothing, and asks nobody.

A daemon tells all of a session in its listing. Between two listings, which take long where there are many sessions,
its events say what has changed. Bounded: sessions as listed, the last sleeps, wakes and misses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from ...daemon.api.causes import Reuse
from ...daemon.api.events import NoticeEvent
from ...daemon.api.process import StatusResult
from ...daemon.api.session import SessionInfo
from ...memvid.units import format_count
from .formatting import format_name

MAX_SHOWN: Final = 200
"""Sleeps and wakes, and misses, that are kept."""

_BEGINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "request_queued": "waiting",
        "memory_awaited": "waiting",
        "prefill_began": "reading",
        "first_token": "writing",
        "sleep_began": "sleeping",
        "wake_began": "waking",
    }
)
"""What a session does from such an event on."""

_ENDS: Final = frozenset(
    (
        *("request_finished", "request_failed", "memory_granted", "prefill_ended", "decode_ended"),
        *("sleep_ended", "sleep_failed", "wake_ended", "wake_failed"),
    )
)
_LEAVING: Final = frozenset(("asked", "idle", "pressure", "suspend", "shutdown", "quantize", "fold"))
"""Causes of sleeps behind which a session has left memory; behind the others it stays."""

_COMING: Final = frozenset(("asked", "warm"))
"""Causes of wakes behind which a session is in memory; the others read what is stored of it for something else."""

_MOVES: Final = frozenset(("sleep_ended", "sleep_failed", "wake_ended", "wake_failed"))
READS: Final = frozenset(("chat", "converse", "append", "generate"))
"""The verbs behind which `why` has something new."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A request that read tokens again, and the cause of most of them."""

    at_ns: int
    session: str
    tokens: int
    cause: str


@dataclass(slots=True)
class _Pace:
    """How fast a session writes. per_s: as last known; tokens, at_s: when it was last listed."""

    tokens: int = 0
    at_s: float = 0.0
    per_s: float = 0.0


class Live:
    """The state of the screen. clock: seconds, for paces."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.status: StatusResult | None = None
        self.sessions: dict[str, SessionInfo] = {}
        self.doing: dict[str, str] = {}
        self.moves: deque[NoticeEvent] = deque(maxlen=MAX_SHOWN)
        self.misses: deque[Miss] = deque(maxlen=MAX_SHOWN)
        self.trouble: str | None = "connecting"
        self._lost_at = ""
        self._paces: dict[str, _Pace] = {}
        self._touched_ns: dict[str, int] = {}
        self._reused_ns: dict[str, int] = {}
        self._clock = clock

    def lose(self, why: str) -> None:
        """The daemon does not answer: what was told stands, with the time until which it held."""
        self._lost_at = self._lost_at or f"{datetime.now().astimezone():%H:%M:%S}"
        self.trouble = f"{why} since {self._lost_at}"
        self.doing.clear()

    def take_status(self, status: StatusResult) -> None:
        """Take what the daemon says of itself."""
        self.status, self.trouble, self._lost_at = status, None, ""

    def take_sessions(self, listed: Iterable[SessionInfo]) -> None:
        """Take a whole listing."""
        now_s = self._clock()
        self.sessions = {each.session: each for each in listed}
        for name in [name for name in self._paces if name not in self.sessions]:
            del self._paces[name]
        for name in [name for name in self._touched_ns if name not in self.sessions]:
            del self._touched_ns[name]
        for name, info in self.sessions.items():
            if info.state != "awake":
                self._paces.pop(name, None)
                continue
            pace = self._paces.setdefault(name, _Pace(info.token_count, now_s))
            if self.doing.get(name) == "writing" and info.token_count > pace.tokens and now_s > pace.at_s:
                pace.per_s = (info.token_count - pace.tokens) / (now_s - pace.at_s)
            pace.tokens, pace.at_s = info.token_count, now_s

    def take_event(self, event: NoticeEvent) -> bool:
        """Take an event. Gives whether only a listing tells what it means for the sessions."""
        name, facts = event.session, event.facts
        if _is_move(event):
            self.moves.appendleft(event)
        if name is None:
            return False
        if event.request is not None or event.name in _MOVES:  # no upkeep, as a scrub
            self._touched_ns[name] = event.time_ns
        if (begun := _BEGINS.get(event.name)) is not None:
            self.doing[name] = begun
            if begun == "writing" and (pace := self._paces.get(name)) is not None:
                pace.at_s, pace.per_s = self._clock(), 0.0
        elif event.name in _ENDS:
            self.doing.pop(name, None)
        if event.name == "decode_ended" and facts.get("seconds"):
            pace = self._paces.setdefault(name, _Pace())
            pace.per_s = float(facts["tokens"] or 0) / float(facts["seconds"] or 1)
        return self._take_change(event, name, facts)

    def _take_change(self, event: NoticeEvent, name: str, facts: Mapping[str, Any]) -> bool:
        info = self.sessions.get(name)
        if event.name == "session_deleted":
            self.sessions.pop(name, None)
        elif event.name == "sleep_ended" and info is not None:
            leaves = facts["cause"] in _LEAVING
            state = "asleep" if leaves else info.state
            resident = 0 if leaves else info.resident_bytes
            self.sessions[name] = replace(
                info,
                state=state,
                resident_bytes=resident,
                version=facts["version"],
                slept_ns=event.time_ns,
                dirty=False,
            )
        elif event.name == "wake_ended" and info is not None and facts["cause"] in _COMING:
            self.sessions[name] = replace(info, state="awake", token_count=facts["tokens"])
        return event.name in ("session_created", "session_forked", "session_folded", "wake_ended") or (
            event.name == "request_finished" and info is None
        )

    def take_reuses(self, session: str, reuses: Sequence[Reuse]) -> None:
        """Take the last requests of a session, as `why` tells them: those that are new here, and read again what it or
        another session had."""
        known_ns = self._reused_ns.pop(session, 0)
        found = [miss for each in reuses if each.at_ns > known_ns for miss in _misses(session, each)]
        self._reused_ns[session] = max([known_ns, *(each.at_ns for each in reuses)])
        self.misses.extend(found)
        self.misses = deque(sorted(self.misses, key=lambda miss: miss.at_ns, reverse=True), MAX_SHOWN)
        while len(self._reused_ns) > 4 * MAX_SHOWN:
            del self._reused_ns[next(iter(self._reused_ns))]

    def pace_of(self, session: str) -> float:
        """Tokens a second that it writes, or wrote last; 0 where nothing is known."""
        pace = self._paces.get(session)
        return 0.0 if pace is None else pace.per_s

    def touched_ns(self, info: SessionInfo) -> int:
        """When something happened to a session, as far as is known."""
        return max(self._touched_ns.get(info.session, 0), info.slept_ns or 0)

    def rows(self, sort: str, *, reverse: bool = False, holding: str = "") -> list[SessionInfo]:
        """The sessions whose name or label holds a text, sorted by a column of `SORTS`: largest and latest first, and
        names by the alphabet; reverse: the other way."""
        key, falling = SORTS[sort]
        wanted = holding.casefold()
        found = [each for each in self.sessions.values() if not wanted or wanted in _searched(each)]
        found.sort(key=lambda each: each.session)
        found.sort(key=lambda each: key(self, each), reverse=falling != reverse)
        return found


def _is_move(event: NoticeEvent) -> bool:
    """Whether a session went to sleep or woke, or was to: not where one that stays awake was written."""
    return event.name in _MOVES and event.facts.get("cause") in (
        _LEAVING if event.name.startswith("sleep") else _COMING
    )


def _searched(info: SessionInfo) -> str:
    return " ".join((format_name(info.session), info.model, *info.labels)).casefold()


def _misses(session: str, reuse: Reuse) -> Iterator[Miss]:
    if reuse.cost is not None and reuse.cost.read_again_tokens:
        where = "" if reuse.position is None else f" at token {format_count(reuse.position)}"
        yield Miss(reuse.at_ns, session, reuse.cost.read_again_tokens, f"{reuse.cost.cause}{where}")


SORTS: Final[Mapping[str, tuple[Callable[[Live, SessionInfo], Any], bool]]] = MappingProxyType(
    {
        "activity": (
            lambda live, info: (info.session in live.doing, info.state == "awake", live.touched_ns(info)),
            True,
        ),
        "name": (lambda live, info: info.session, False),
        "tokens": (lambda live, info: info.token_count, True),
        "memory": (lambda live, info: info.resident_bytes, True),
        "disk": (lambda live, info: info.written_bytes, True),
        "rate": (lambda live, info: live.pace_of(info.session), True),
    }
)
"""How sessions can be sorted: the key, and whether the largest comes first."""
