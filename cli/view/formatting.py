"""Figures for people: seconds, rates, ids, times. `memvid/units.py` has sizes and counts. JSON never uses these."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from ...memvid.units import format_plural, three_digits
from ...memvid.uri import DEFAULT_NAMESPACE, SCHEME

SHORT_ID_DIGITS = 12  # hex digits of an id in a table: 48 bits tell the bundles of one store apart


def format_seconds(seconds: float) -> str:
    """Write a duration in the unit that suits it: `340 µs`, `12.3 ms`, `3.21 s`, `2 min 05 s`."""
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{three_digits(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_rate(count: int, seconds: float) -> str:
    """Write a rate per second: `1,115/s`; a dash for no time at all."""
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "–"


def format_id(hex_id: str | None) -> str:
    """Shorten an id for a table; a missing one is a dash."""
    return hex_id[:SHORT_ID_DIGITS] if hex_id else "–"


def format_name(session: str, *, bare: bool = False) -> str:
    """Write a session's name with its namespace: `default/notes`. bare: as it is typed, without the default one."""
    return session.removeprefix(SCHEME).removeprefix(f"{DEFAULT_NAMESPACE}/" if bare else "")


def format_marks(marks: Iterable[str]) -> str:
    """Write the tags and marks of a version: `(north, pinned)`; empty for none."""
    told = ", ".join(marks)
    return f"({told})" if told else ""


def format_sampling(values: Mapping[str, Any]) -> str:
    """Write how tokens are drawn: `temperature 0.8, top_p 0.95`. values: the fields of a `Sampling`."""
    biased = len(values.get("logit_bias", ()))
    numbers = [f"{name} {value:g}" for name, value in values.items() if name != "logit_bias"]
    return ", ".join([*numbers, f"logit_bias of {format_plural(biased, 'token')}"] if biased else numbers)


def format_time(instant_ns: int | None) -> str:
    """Write an instant in local time, to the minute; a missing one is a dash."""
    if instant_ns is None:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(instant_ns // 10**9))
