"""Cases that are text, what is done and what must come of it: transcripts of commands, and exchanges over HTTP.

    What the file is about, and what holds for all of its cases.

    $ONE = 00000001             a name for a text
    -- a daemon                 a line that begins so, or with `$ `, is done first in each case

    == what the case proves
    $ torpor ls  # [4] text     short for the lines `[4]` and `! text` below
    {"sessions": [{"name":
      "a"}]}                    a line that begins with blanks goes on with the one before
    # a remark

What else a line means, its runner says. A runner fails at the file and the line where something is not so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a file: its title, and its lines with their numbers."""

    file: Path
    title: str
    lines: list[tuple[int, str]]


def cases_in(folder: Path) -> Iterator[Case]:
    """All cases of all files."""
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        for name, value in re.findall(r"^(\$[A-Z]+) = (.*)$", text, re.MULTILINE):
            text = text.replace(name, value)
        case = Case(file, "", [])
        for_all = case.lines
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("== "):
                if case.title:
                    yield case
                case = Case(file, line[3:], [*for_all])
            elif line.startswith(" "):
                case.lines[-1] = (case.lines[-1][0], f"{case.lines[-1][1]} {line.strip()}")
            elif line.startswith(("-- ", "$ ")) or (case.title and line and not line.startswith("# ")):
                case.lines.extend((number, each) for each in _at_length(line))
        yield case


def _at_length(line: str) -> Iterator[str]:
    done, _, refusal = line.partition("  # ")
    yield done
    if refusal:
        status, _, said = refusal.partition("] ")
        yield f"{status.rstrip(']')}]"
        yield from [f"! {said}"] * bool(said)


@contextmanager
def at_line(case: Case, number: int, line: str, shown: Callable[[], object]) -> Iterator[None]:
    """Say where it is that something is not so, and what came of the case. Raises AssertionError."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case.file}:{number}: {line[:200]}\n{error}\n{shown()}") from None


def has_at_least(value: Any, wanted: Any) -> None:
    """Compare a JSON value: maps may have more keys, lists have as many members, `"..."` is anything but null. Raises
    AssertionError."""
    if isinstance(wanted, dict):
        assert isinstance(value, dict), f"{value} for {wanted}"
        assert wanted.keys() <= value.keys(), f"{value} has not all of {wanted}"
        for key, each in wanted.items():
            has_at_least(value[key], each)
    elif isinstance(wanted, list):
        assert isinstance(value, list), f"{value} for {wanted}"
        assert len(value) == len(wanted), f"{value} for {wanted}"
        for one, each in zip(value, wanted, strict=True):
            has_at_least(one, each)
    else:
        assert value == wanted or (wanted == "..." and value is not None), f"{value} for {wanted}"
