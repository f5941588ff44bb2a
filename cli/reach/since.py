"""A point in time as a person types it: how long ago, or a date."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from datetime import time as time_of_day
from typing import Annotated, Final

from ..errors import InvalidUsage
from .options import option

_AGO: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(s|min|m|h|d|w)", re.ASCII)
_SECONDS: Final = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DAYS: Final = {"today": 0, "yesterday": 1}

SinceOption = Annotated[
    str | None, option("--since WHEN", "Only from then on: 30min, 2h, 3d, 1w, today, 2026-11-30 or 2026-11-30T14:05.")
]


def parse_since(text: str | None) -> int:
    """The instant in nanoseconds of the Unix clock; 0 for None. A date is one of this machine's time zone, unless it
    says another. Raises InvalidUsage."""
    return 0 if text is None else _instant(text.strip(), time.time_ns())


def parse_ago(text: str) -> float:
    """The seconds since that instant, below 0 for one to come. Raises as `parse_since`."""
    now_ns = time.time_ns()
    return (now_ns - _instant(text.strip(), now_ns)) / 1e9


def _instant(text: str, now_ns: int) -> int:
    if ago := _AGO.fullmatch(text):
        return max(0, now_ns - round(float(ago[1]) * _SECONDS[ago[2]] * 1e9))
    try:
        if (days := _DAYS.get(text)) is not None:
            then = datetime.combine(datetime.now().astimezone().date() - timedelta(days), time_of_day())
        else:
            then = datetime.fromisoformat(text)
        return max(0, int(then.timestamp()) * 10**9)
    except (ValueError, OverflowError, OSError):
        raise InvalidUsage(
            "--since takes how long ago (30min, 2h, 3d, 1w), or a day or time (today, yesterday, 2026-11-30, "
            "2026-11-30T14:05).",
            option="--since",
        ) from None
