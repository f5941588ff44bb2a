"""Why requests read tokens again, and what they cost, as the store's diary tells of them.

Owns what an entry of the diary says. Its facts have no text and no name; words and names go with their session. The
texts on both sides of a difference go with either session: each has a part of the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, get_args

from ...memvid.folder.diary import CUT, Diary, Entry
from ...memvid.store import Store
from ...memvid.units import parse_seconds
from ...memvid.uri import SessionUri
from ..api.causes import (
    MAX_ROWS,
    REMEDIES,
    By,
    CausesResult,
    Costs,
    Judged,
    PrefixOutcome,
    RequestCost,
    Reuse,
    WhyResult,
    judge,
)

MAX_REQUESTS: Final = 16
"""Requests of one session that are told, the last ones."""

_HOUR_S: Final = 3600

_COST: Final = {
    "request": "n",
    "verb": "v",
    "client": "by",
    "code": "e",
    "seconds": "s",
    "read_tokens": "r",
    "recomputed_tokens": "re",
    "recomputed_because": "rb",
    "taken_over_tokens": "t",
    "written_tokens": "w",
    "waited_seconds": "s0",
    "wake_seconds": "s1",
    "read_seconds": "s2",
    "write_seconds": "s3",
    "durable_seconds": "s4",
}
_REUSE: Final = {
    "verb": "pv",
    "at_ns": "at",
    "outcome": "o",
    "common_tokens": "c",
    "stored_tokens": "st",
    "position": "p",
    "message_index": "m",
    "cause": "k",
    "became": "b",
    "cached_tokens": "ca",
    "not_taken": "nt",
    "repeated_tokens": "rp",
}
"""Fields of the records, and their names in an entry. A field that has its default is left out."""

_DEFAULTS: Final = {each.name: each.default for each in fields(Reuse)}

_OWN: Final = "own"
"""A fact: the source of the reuse is the session itself."""


def say(
    diary: Diary, uri: SessionUri, cost: RequestCost, reuse: Reuse | None, gone: Collection[SessionUri] = ()
) -> None:
    """Let the diary tell of a request. gone: sessions that were deleted since it began."""
    facts = {short: value for name, short in _COST.items() if (value := _short(getattr(cost, name)))}
    words, of_both, source = dict[str, Any](), dict[str, Any](), None
    if reuse is not None:
        told = {name: getattr(reuse, name) for name in _REUSE}
        facts |= {_REUSE[name]: value for name, value in told.items() if value != _DEFAULTS.get(name)}
        texts = {"there": reuse.expected_text, "asked": reuse.found_text, "more": _beyond(reuse)}
        of_both = {name: text for name, text in texts.items() if text}
        words = {"volatile": "\n".join(reuse.volatile)} if reuse.volatile else {}
        if reuse.source == str(uri):
            facts[_OWN], words, of_both = 1, words | of_both, {}
        elif reuse.source is not None:
            source = SessionUri.parse(reuse.source)
    if source is not None and source in gone:
        source, of_both = None, {}
    diary.say(facts, uri, words, source, of_both)


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _beyond(reuse: Reuse) -> str:
    """What a remedy says beyond that of its cause."""
    return (reuse.remedy or "").removeprefix(_remedy_of(reuse.cause)).strip()


def _remedy_of(cause: str | None) -> str:
    return REMEDIES.get(cause, "")  # type: ignore[call-overload,no-any-return]


_TEXTS: Final = frozenset(
    (*("verb", "client", "code", "recomputed_because"), *("outcome", "cause", "became", "not_taken"))
)
"""The fields that are words; the others are numbers."""

_FIELD_OF: Final = {
    short: (at, name, name in _TEXTS) for at, names in enumerate((_COST, _REUSE)) for name, short in names.items()
}
_Told = dict[str, Any]


def _told(entry: Entry) -> tuple[_Told, _Told]:
    """What an entry says of the cost of its request, and of its prefix. Raises TypeError: anybody may have written
    it."""
    told: tuple[_Told, _Told] = {}, {}
    for short, value in entry.facts.items():
        if (field := _FIELD_OF.get(short)) is not None:
            at, name, is_text = field
            if not (type(value) is str if is_text else type(value) in (int, float) and value >= 0):
                raise TypeError(name)
            told[at][name] = value
    return told


def _reuse(told: _Told) -> Reuse | None:
    """Without names and texts; None if nothing is said of the prefix."""
    if told.get("outcome") not in _OUTCOMES or told.get("became") not in ("refused", "rewound", None):
        return None
    return Reuse(**{"verb": "", "at_ns": 0, **told})


_OUTCOMES: Final = get_args(PrefixOutcome)


def reuse_of(entry: Entry) -> Reuse | None:
    """What an entry says of the prefix of its request, and of its cost; None if nothing. One without a prompt that has
    recomputed tokens, as a wake may, has these in common with its session. Raises TypeError: it is not of this
    form."""
    of_cost, told = _told(entry)
    if (reuse := _reuse(told)) is None:
        if not (count := of_cost.get("recomputed_tokens", 0)):
            return None
        judged = _judged(of_cost, None, own=False)._asdict()
        cost = RequestCost(**{"request": 0, "verb": "", **of_cost, **judged, "ended_ns": entry.at_ns})
        session = None if entry.uri is None else str(entry.uri)
        return Reuse(cost.verb, entry.at_ns, "hit", session, count, count, cost=cost)
    if not all(type(each) is str for words in (entry.words, entry.other_words) for each in words.values()):
        raise TypeError("words")
    own = _OWN in entry.facts
    words = entry.words if own else entry.other_words
    source = entry.uri if own else entry.other
    more = words.get("more", "")
    remedy = f"{_remedy_of(reuse.cause)} {'' if more.endswith(CUT) else more}".strip()
    judged = _judged(of_cost, reuse, own=own)._asdict()
    return replace(
        reuse,
        source=None if source is None else str(source),
        expected_text=words.get("there"),
        found_text=words.get("asked"),
        remedy=remedy or None,
        volatile=tuple(entry.words.get("volatile", "").split("\n")) if "volatile" in entry.words else (),
        cost=RequestCost(**{"request": 0, "verb": "", **of_cost, **judged, "ended_ns": entry.at_ns}),
    )


def _judged(cost: _Told, reuse: Reuse | None, *, own: bool) -> Judged:
    read, recomputed = cost.get("read_tokens", 0), cost.get("recomputed_tokens", 0)
    return judge(cost.get("verb", ""), reuse, read, recomputed, cost.get("recomputed_because", ""), own=own)


def why(store: Store, uri: SessionUri, known: Iterable[Reuse] = ()) -> WhyResult:
    """The last requests for a session. known: those that the daemon remembers, with their texts whole."""
    of = {each.at_ns: each for each in known}
    for entry in store.diary.read(uri=uri):
        try:
            told = reuse_of(entry)
        except TypeError:
            continue  # of another form: a later program's
        if told is not None:
            of[told.at_ns] = replace(of[told.at_ns], cost=told.cost) if told.at_ns in of else told
    return WhyResult(str(uri), tuple(of[at] for at in sorted(of)[-MAX_REQUESTS:]), store.diary.problem)


def causes(store: Store, *, since: str | None = None, by: By = "cause", namespace: str | None = None) -> CausesResult:
    """What requests cost, by what they have in common. since, namespace: as of `CausesRequest`. Raises ValueError:
    `since` is no duration."""
    begins_ns = 0 if since is None else time.time_ns() - int(parse_seconds(since) * 1e9)
    rows, total, first_ns = dict[str, Counter[str]](), Counter[str](), None
    lasts: dict[str, tuple[int, str]] = {}  # of each row, when tokens were last read again, and why
    for entry in store.diary.read(begins_ns):
        if namespace is not None and (entry.uri is None or entry.uri.namespace != namespace):
            continue
        try:
            cost, told_of_prefix = _told(entry)
            reuse = _reuse(told_of_prefix)
        except TypeError:
            continue
        first_ns = entry.at_ns if first_ns is None else first_ns
        judged = _judged(cost, reuse, own=_OWN in entry.facts)
        key = judged.cause if by == "cause" else _key(by, entry, cost)
        row = rows.setdefault(key, Counter())
        for name in _SUMMED & cost.keys():
            row[name] += cost[name]
        row["requests"] += 1
        row["failed"] += "code" in cost
        row["reused_tokens"] += judged.reused_tokens
        row["read_again_tokens"] += judged.read_again_tokens
        if judged.read_again_tokens:
            lasts[key] = max(lasts.get(key, (0, "")), (entry.at_ns, judged.cause))
    for row in rows.values():
        total.update(row)
    told = [_costs(key, sums, *lasts.get(key, ())) for key, sums in rows.items()]
    told.sort(key=(lambda each: int(each.key)) if by == "hour" else (lambda each: (-each.seconds, each.key)))
    shown = told[-MAX_ROWS:] if by == "hour" else told[:MAX_ROWS]
    return CausesResult(
        by,
        tuple(shown),
        _costs("", total, *max(lasts.values(), default=())),
        first_ns,
        len(told) - len(shown),
        store.diary.problem,
    )


def _key(by: By, entry: Entry, cost: _Told) -> str:
    if by == "session":
        return "" if entry.uri is None else str(entry.uri)
    return str(cost.get("client", "")) if by == "client" else str(entry.at_ns // 10**9 // _HOUR_S * _HOUR_S)


_SUMMED: Final = frozenset(field.name for field in fields(RequestCost)) & {field.name for field in fields(Costs)}


def _costs(key: str, sums: Mapping[str, Any], last_again_ns: int = 0, last_again: str = "") -> Costs:
    rounded: dict[str, Any] = {name: _short(value) for name, value in sums.items()}
    return Costs(key, **rounded, last_again=last_again, last_again_ns=last_again_ns)
