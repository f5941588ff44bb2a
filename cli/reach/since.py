"""A point in time as a person types it: how long ago, or a date."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Annotated, Final

from ..errors import InvalidUsage
from .options import option

_AGO: Final = re.compile(r"([0-9]{1,6})\s*(s|min|m|h|d|w)", re.ASCII)
_SECONDS: Final = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

SinceOption = Annotated[
    str | None, option("--since WHEN", "Only from then on: 30min, 2h, 3d, 1w, 2026-11-30 or 2026-11-30T14:05.")
]


def parse_since(text: str | None) -> int:
    """The instant in nanoseconds of the Unix clock; 0 for None. A date is one of this machine's time zone, unless it
    says another. Raises InvalidUsage."""
    if text is None:
        return 0
    if ago := _AGO.fullmatch(text.strip()):
        return max(0, time.time_ns() - int(ago[1]) * _SECONDS[ago[2]] * 10**9)
    try:
        return max(0, int(datetime.fromisoformat(text.strip()).timestamp()) * 10**9)
    except (ValueError, OverflowError, OSError):
        raise InvalidUsage(
            "--since takes how long ago (30min, 2h, 3d, 1w) or a date (2026-11-30, 2026-11-30T14:05).", option="--since"
        ) from None
