"""What an object store may be used for in a day: bytes, requests and money. Pure values, and the one table of prices.

Money is what list prices say of the requests, and of a month of storage for the bytes that are sent. What comes from
the object store counts as requests alone: whether its bytes cost anything depends on where this machine is.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, fields
from typing import Final, Self

from ..units import format_bytes, format_plural, parse_bytes

_REQUESTS: Final = re.compile(r"([0-9]{1,12}) ?requests?", re.ASCII | re.IGNORECASE)
_DOLLARS: Final = re.compile(r"\$ ?([0-9]{1,9}(?:\.[0-9]{1,6})?)", re.ASCII)
_FORM: Final = "write bytes, requests or dollars, or several of them, as in 20GB, 10000 requests, $2"


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars: of a million requests that write (PUT, POST, LIST) or read (GET, HEAD), and of a GB, of 10^9 bytes, that
    is stored for a month. Removals are free."""

    write: float
    read: float
    stored: float


S3_STANDARD: Final = Prices(write=5.00, read=0.40, stored=0.023)
"""us-east-1, without free allowances: aws.amazon.com/s3/pricing as others quoted it in 2026."""


@dataclass(frozen=True, slots=True)
class Used:
    """What was used: bytes that were sent, and requests, which write, read or remove."""

    bytes_sent: int = 0
    writes: int = 0
    reads: int = 0
    removals: int = 0

    def __add__(self, other: Used) -> Used:
        return Used(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    @property
    def requests(self) -> int:
        return self.writes + self.reads + self.removals

    @property
    def dollars(self) -> float:
        """By the list prices of S3."""
        requests = (self.writes * S3_STANDARD.write + self.reads * S3_STANDARD.read) / 1e6
        return requests + self.bytes_sent / 1e9 * S3_STANDARD.stored


@dataclass(frozen=True, slots=True)
class DailyBudget:
    """What a day may use; None: no bound of that kind."""

    bytes_sent: int | None = None
    requests: int | None = None
    dollars: float | None = None

    def is_used_up(self, used: Used) -> bool:
        """Whether a bound is reached."""
        bounds = ((getattr(self, each.name), getattr(used, each.name)) for each in fields(self))
        return any(most is not None and so_far >= most for most, so_far in bounds)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read it as a person writes it. Raises ValueError: it is none, allows nothing, or says one thing twice."""
        found: dict[str, int | float] = {}
        for part in (each.strip() for each in text.split(",")):
            name, most = _bound_in(part)
            if name in found:
                raise ValueError(f"it says twice what the day may use of one kind; {_FORM}")
            if not most:
                raise ValueError(f"{part!r} would let nothing be sent. Leave it out for no bound")
            found[name] = most
        return cls(**found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """With each byte, as `parse` reads it."""
        return self.told(exactly=True)

    def told(self, *, exactly: bool = False) -> str:
        """As `parse` reads it. exactly: with each byte."""
        parts = []
        if self.bytes_sent is not None:
            parts.append(f"{self.bytes_sent}B" if exactly else format_bytes(self.bytes_sent))
        if self.requests is not None:
            parts.append(f"{self.requests} requests" if exactly else format_plural(self.requests, "request"))
        if self.dollars is not None:
            parts.append(f"${self.dollars:f}" if exactly else f"${self.dollars:.2f}")
        return ", ".join(parts)


def _bound_in(part: str) -> tuple[str, int | float]:
    if match := _REQUESTS.fullmatch(part):
        return "requests", int(match[1])
    if match := _DOLLARS.fullmatch(part):
        return "dollars", float(match[1])
    try:
        return "bytes_sent", parse_bytes(part)
    except ValueError:
        raise ValueError(f"{part[:40]!r} is no part of a day's budget; {_FORM}") from None
