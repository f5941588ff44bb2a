"""How the value of an option is written, on a command line and in a file, and the refusals of wrong ones."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...memvid.disk.daily_budget import DailyBudget
from ...memvid.units import format_bytes, parse_bytes, parse_seconds
from ...places import expanded
from .line_patterns import KNOWN_VOLATILE, MAX_PATTERN_CHARS, MAX_PATTERNS, matcher_of


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Reads values. metavar: stands for a value in a usage line."""

    metavar: str = ""

    @property
    def in_file(self) -> str:
        """How a value is written in a file, in Markdown."""
        return "text"

    def read(self, written: Any) -> Any:
        """The value of an entry of a file. Raises ValueError: a sentence, without its full stop, on the form to use."""
        raise NotImplementedError

    def read_text(self, text: str) -> Any:
        """As `read`, for an argument of a command line."""
        return self.read(text)

    def told(self, value: Any) -> str:
        """A value as text."""
        return str(value)

    def argument(self, value: Any) -> str:
        """A value as an argument of a command line, for `read_text`."""
        return str(value)


@dataclass(frozen=True, kw_only=True)
class Flag(Kind):
    """True or false; on a command line given or not."""

    @property
    def in_file(self) -> str:
        return "`true` or `false`"

    def read(self, written: Any) -> bool:
        if written is True or written is False:
            return bool(written)
        raise ValueError("it must be true or false")


@dataclass(frozen=True, kw_only=True)
class Source(Kind):
    """A folder, or a name on the hub. Expands `~`, as a shell does not behind `=`."""

    metavar: str = "PATH"

    def read(self, written: Any) -> str:
        if isinstance(written, str) and written:
            return written
        raise ValueError("it must be a text that is not empty")

    def read_text(self, text: str) -> str:
        return str(expanded(text)) if text.startswith("~") else self.read(text)


@dataclass(frozen=True, kw_only=True)
class Url(Kind):
    """A URL. What it means, who opens it says."""

    metavar: str = "URL"

    def read(self, written: Any) -> str:
        if isinstance(written, str) and "://" in written:
            return written
        raise ValueError("it must be a URL, as s3://BUCKET/PREFIX or file:///FOLDER")


@dataclass(frozen=True, kw_only=True)
class Place(Kind):
    """A path of this machine. In a file it begins at the root, or at a home folder."""

    metavar: str = "PATH"

    @property
    def in_file(self) -> str:
        return 'a path: `"/FOLDER/FILE"` or `"~/FILE"`'

    def read(self, written: Any) -> Path:
        if isinstance(written, str) and written.startswith(("/", "~")):
            return expanded(written)
        raise ValueError("it must be a path that begins with / or ~")

    def read_text(self, text: str) -> Path:
        return Path(text)


@dataclass(frozen=True, kw_only=True)
class CommandLine(Kind):
    """A program and its arguments, in words as a shell takes them."""

    metavar: str = "COMMAND"

    def read(self, written: Any) -> str:
        if isinstance(written, str) and written.strip():
            return written
        raise ValueError("it must be a command, as in 'pass show torpor-key'")


@dataclass(frozen=True, kw_only=True)
class Names(Kind):
    """A table of a file, from names or globs to names."""

    @property
    def in_file(self) -> str:
        return 'a table of names: `"claude-*" = "qwen"`'

    def read(self, written: Any) -> tuple[tuple[str, str], ...]:
        if isinstance(written, dict) and all(name and isinstance(to, str) and to for name, to in written.items()):
            return tuple(written.items())
        raise ValueError('it must be a table with a name behind each name, as in "claude-*" = "qwen"')


@dataclass(frozen=True, kw_only=True)
class LinePatterns(Kind):
    """A list of a file, of regular expressions over lines."""

    @property
    def in_file(self) -> str:
        return f"a list of at most {MAX_PATTERNS} patterns: `['^Deploy number: ']`"

    def read(self, written: Any) -> tuple[str, ...]:
        if not isinstance(written, list) or len(written) > MAX_PATTERNS:
            raise ValueError(f"it must be a list of at most {MAX_PATTERNS} patterns, as in ['^Deploy number: ']")
        for at, each in enumerate(written):
            if not isinstance(each, str) or not 0 < len(each) <= MAX_PATTERN_CHARS:
                raise ValueError(f"item {at} must be a text of 1 to {MAX_PATTERN_CHARS} characters")
            try:
                matcher_of((each,))
            except ValueError as error:
                raise ValueError(f"item {at}, {each!r}, is no pattern: {error}") from None
        try:
            matcher_of((*KNOWN_VOLATILE, *written))
        except ValueError as error:
            raise ValueError(f"they are too much all together: {error}") from None
        return tuple(written)


@dataclass(frozen=True, kw_only=True)
class Choice(Kind):
    """One of a few words or numbers."""

    values: tuple[str | int, ...]

    @property
    def in_file(self) -> str:
        return ", ".join(f'`"{one}"`' if isinstance(one, str) else f"`{one}`" for one in self.values)

    def read(self, written: Any) -> str | int:
        for one in self.values:
            if type(one) is type(written) and one == written:
                return one
        raise ValueError(f"it must be {one_of([repr(one) for one in self.values])}")

    def read_text(self, text: str) -> str | int:
        return self.read(next((one for one in self.values if str(one) == text), text))


@dataclass(frozen=True, kw_only=True)
class Number(Kind):
    """A whole number."""

    least: int
    most: int

    @property
    def in_file(self) -> str:
        return f"{self.least} to {self.most:,}"

    def read(self, written: Any) -> int:
        if type(written) is int and self.least <= written <= self.most:
            return written
        raise ValueError(f"it must be a whole number from {self.least} to {self.most:,}")


@dataclass(frozen=True, kw_only=True)
class Days(Kind):
    """A number of days. not_0: why 0 is refused, and the remedy; None if 0 is a value. word: that stands for 0; empty
    without one."""

    metavar: str = "DAYS"
    most: int
    not_0: str | None = None
    word: str = ""

    @property
    def in_file(self) -> str:
        word = f'; or `"{self.word}"`' if self.word else ""
        return f"days, {'0' if self.not_0 is None else 'above 0'} to {self.most:,}{word}"

    def read(self, written: Any) -> float:
        if self.word and isinstance(written, str) and written.strip().lower() == self.word:
            return 0.0
        if type(written) in (int, float) and 0 <= written <= self.most:
            if not written and self.not_0 is not None:
                raise ValueError(f"0 {self.not_0}")
            return float(written)
        also = f", or {self.word}" if self.word else ""
        raise ValueError(f"it must be a number of days from 0 to {self.most:,}{also}")

    def read_text(self, text: str) -> float:
        with contextlib.suppress(ValueError):
            return self.read(float(text))
        return self.read(text)

    def told(self, value: Any) -> str:
        return f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Size(Kind):
    """Bytes, or a number with a unit. not_0: why 0 is refused, and the remedy; None if 0 is a value. word: that stands
    for 0; empty without one."""

    metavar: str = "SIZE"
    not_0: str | None = None
    word: str = ""

    @property
    def in_file(self) -> str:
        return 'a size: `"12GiB"`, or bytes' + (f'; or `"{self.word}"`' if self.word else "")

    def read(self, written: Any) -> int:
        if self.word and isinstance(written, str) and written.strip().lower() == self.word:
            return 0
        also = f", or {self.word}" if self.word else ""
        try:
            size = parse_bytes(written) if isinstance(written, str) else written
        except ValueError as error:
            raise ValueError(f"{error}{also}") from None
        if size == 0 and type(size) is int and self.not_0 is not None:
            raise ValueError(f"0 {self.not_0}, or give a size, as in 20GiB")
        if type(size) is int and size >= 0:
            return size
        raise ValueError(f"it must be a size: bytes, or a text with a unit, as in 500MiB{also}")

    def told(self, value: Any) -> str:
        return format_bytes(value).replace(" ", "").replace(".00", "")

    def argument(self, value: Any) -> str:
        return str(value or self.word or 0)


@dataclass(frozen=True, kw_only=True)
class Daily(Kind):
    """What a day may use of an object store."""

    metavar: str = "BUDGET"

    @property
    def in_file(self) -> str:
        return 'bytes, requests, dollars: `"20GB, 10000 requests, $2"`'

    def read(self, written: Any) -> DailyBudget:
        if isinstance(written, str):
            return DailyBudget.parse(written)
        raise ValueError("it must be a text, as in 20GB, 10000 requests, $2")

    def told(self, value: Any) -> str:
        return DailyBudget.parse(str(value)).told()


@dataclass(frozen=True, kw_only=True)
class Duration(Kind):
    """Seconds above 0, or a number with a unit. word: that stands for None; with one, 0 is a value, too."""

    metavar: str = "SECONDS"
    most: float = sys.float_info.max
    word: str = ""

    @property
    def in_file(self) -> str:
        return 'a duration: `"15min"`, or seconds' + (f'; or `"{self.word}"`' if self.word else "")

    def read(self, written: Any) -> float | None:
        if self.word and isinstance(written, str) and written.strip().lower() == self.word:
            return None
        if self.word and str(written).strip() in ("0", "0.0"):
            return 0.0
        seconds = parse_seconds(written) if isinstance(written, str) else written
        if type(seconds) in (int, float) and self.most < seconds < math.inf:
            raise ValueError(f"it must be a duration of at most {self.most:g} seconds")
        if type(seconds) in (int, float) and 0 < seconds <= self.most:
            return float(seconds)
        raise ValueError("it must be a duration above 0: seconds, or a text with a unit, as in 15min")

    def told(self, value: Any) -> str:
        return self.word if value is None else f"{value:g}"

    def argument(self, value: Any) -> str:
        return self.word if value is None else str(value)


def one_of(told: Sequence[str]) -> str:
    """Several words as a choice in a sentence."""
    *others, last = told
    return f"{', '.join(others)} or {last}" if others else last
