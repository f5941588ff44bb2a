"""Patterns of lines: regular expressions that a user writes, matched in time that grows only as the text does.

The engine is the one that pydantic has for constraints. It goes back in no text, and refuses a pattern that takes it
more than 10 MiB. Python's own may take hours for a line of 40 characters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

MAX_PATTERNS: Final = 64
MAX_PATTERN_CHARS: Final = 512

MAX_LINE_CHARS: Final = 1024
"""A longer line matches nothing."""

STATUS_BEGINS: Final = r"^(gitStatus: |Git status \(snapshot )"
"""The line with which Claude Code, Crush and others begin the state of a repository."""

STATUS_LINES: Final = (
    r"^(Current branch|Git user|Main branch \(you will usually use this for PRs\)): ",
    r"^Status:( clean)?$",
    r"^\(clean\)$",
    r"^( [MTADRCU]|[MTADRCU][ MTADRCU]|\?\?) \S+( -> \S+)?$",
    r"^Recent commits:$",
    r"^[0-9a-f]{7,40} \S",
)
"""The lines of such a state. Elsewhere they may say anything: a heading, a number of people."""

_MOMENT: Final = r".*(\b(19|20)\d\d|\d:\d\d|\d{10})"
"""A year, a time of day, or seconds since 1970: rules have other numbers."""

KNOWN_VOLATILE: Final = (
    # Claude Code: a checksum of the conversation.
    r"^x-anthropic-billing-header:",
    # opencode, Crush, pi, aider, goose, Pydantic AI and others: what day it is, and what time.
    r"(?i)^\s*(- )?((the |(the )?current )(date|time|date and time|datetime)|today('s date)?)( is\b|:)" + _MOMENT,
    STATUS_BEGINS,
)
"""Lines of known agents that are others with each request, or with each conversation."""


@lru_cache(maxsize=4)
def matcher_of(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a line matches one of some patterns. Raises ValueError: they are too large, or one is no pattern."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # here: it takes a command's start some time

    whole = "|".join(f"(?:{each})" for each in patterns)
    try:
        matches = SchemaValidator(core_schema.str_schema(pattern=whole, regex_engine="rust-regex")).isinstance_python
    except SchemaError as error:
        reason = str(error).splitlines()[-1].partition("rror: ")[2]
        raise ValueError(reason.rstrip(".")) from None
    return lambda line: len(line) <= MAX_LINE_CHARS and matches(line)
