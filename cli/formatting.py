"""How figures are written for people: seconds, rates, ids, ages (sizes and counts: `memvid/sizes.py`); and how a size
or a duration that a person wrote is read. Pure functions; JSON never uses them."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal

from ..memvid.sizes import three_digits

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([KMGT])(i)?)?B?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d)?", re.ASCII | re.IGNORECASE)
_SECONDS_OF = {"s": 1, "min": 60, "h": 3600, "d": 86400}
SHORT_ID_DIGITS = 12  # hex digits of an id that a table shows: 48 bits, enough to tell bundles of one store apart


def parse_bytes(text: str) -> int:
    """Read a size as a person writes it: whole bytes, or a number and a unit as in `500MiB`, `1.5 GiB`, `2GB`.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r} is no size; write bytes, or a number with a unit, as in 500MiB or 2GB")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    size = Decimal(number) * base ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0)
    if size != int(size):
        raise ValueError(f"{text[:40]!r} is no whole number of bytes")
    return int(size)


def parse_seconds(text: str) -> float:
    """Read a duration as a person writes it: seconds, or a number and a unit as in `90s`, `15min`, `2 h`, `1d`.

    Raises:
        ValueError: it is none, or none at all.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(
            f"{text[:40]!r} is no duration; write seconds above 0, or a number with s, min, h or d, as in 15min"
        )
    return float(match[1]) * _SECONDS_OF[(match[2] or "s").lower()]


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
    """Write a rate per second: `1,115/s`; nothing sensible for no time at all."""
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "–"


def format_id(hex_id: str | None) -> str:
    """Shorten an id for a table; a missing one is a dash."""
    return hex_id[:SHORT_ID_DIGITS] if hex_id else "–"


def format_time(instant_ns: int | None) -> str:
    """Write a wall-clock instant in local time, to the minute; one that never was is a dash."""
    if instant_ns is None:
        return "–"
    return datetime.fromtimestamp(instant_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M")
