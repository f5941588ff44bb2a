"""Writes sizes and counts for people; reads sizes and durations that a person wrote. Pure functions."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([KMGT])(i)?)?B?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d)?", re.ASCII | re.IGNORECASE)
_SECONDS_OF = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def format_bytes(size_bytes: int) -> str:
    """Write a size with a binary unit and three significant digits: `41.2 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{three_digits(size)} {unit}"
    return f"{size / 1024:.1f} TiB"


def three_digits(figure: float) -> str:
    """Write a figure of at least one with three significant digits, and no decimals past 100: `9.99`, `41.2`, `340`."""
    decimals = 2 if figure < 9.995 else 1 if figure < 99.95 else 0
    return f"{figure:.{decimals}f}"


def format_count(count: int) -> str:
    return f"{count:,}"


def format_plural(count: int, one: str) -> str:
    """Write a count with its noun: `1 block`, `2 blocks`."""
    return f"{format_count(count)} {one if count == 1 else one + 's'}"


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
    whole, _, decimals = number.partition(".")
    unit: int = base ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0)
    scale: int = 10 ** len(decimals)
    size_bytes, rest = divmod(int(whole + decimals) * unit, scale)
    if rest:
        raise ValueError(f"{text[:40]!r} is no whole number of bytes")
    return size_bytes


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
