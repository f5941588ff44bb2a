"""Explains why tokens were read again: the first difference between request and ledger, and its class of cause.

Pure rules on values. They compare the two texts of the differing message, between the control tokens that enclose it.
The rules are tried from the surest to the vaguest, and a rule holds only if it explains the whole difference.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from ..api.causes import REMEDIES, Cause

BEFORE_TOKENS: Final = 8
BEHIND_TOKENS: Final = 16
"""Tokens of each side to show before and behind the difference."""

MESSAGE_TOKENS: Final = 2048
"""Tokens to either side that may belong to the message."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATES: Final = re.compile(
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:T(?=\d))?"
    r"|\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[ap]m\b|Z\b|[+-]\d\d:?\d\d)?"
    rf"|(?:\b\d{{1,2}}(?:st|nd|rd|th)?\s+)?\b{_MONTH}(?:\s+\d{{1,2}}(?:st|nd|rd|th)?\b)?(?:,?\s+\d{{4}}\b)?"
    r"|\b(?:mon|tues?|wednes|thurs?|fri|satur|sun)(?:day)?\b"
    r"|\b\d{10,19}\b",
    re.IGNORECASE,
)
_LEAST_PATTERN_CHARS: Final = 4
_MOST_PATTERN_CHARS: Final = 80
_SIGNS: Final = re.compile(r"[\\.+*?()|\[\]{}^$]")
_PART_OF_WORD: Final = re.compile(r"\w*\Z")
_THOUGHT: Final = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_WORDS: Final = re.compile(r"[^\W_]+")


RUN_TOKENS: Final = 16
"""Fewer tokens in a row are no text that was read before: every chat has the same control tokens."""

_WINDOW_TOKENS: Final = (RUN_TOKENS + 1) // 2


@dataclass(frozen=True, slots=True)
class Explanation:
    """The stored text, the requested text, and why they differ, as far as known. remedy: advice for the user.
    repeated_tokens: as of `Reuse`."""

    expected_text: str
    found_text: str
    cause: Cause
    remedy: str
    repeated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """The tokenizer that this module uses. decode: with control tokens written out; controls: their ids."""

    decode: Callable[[Sequence[int]], str]
    controls: frozenset[int]


def explain(expected: Sequence[int], requested: Sequence[int], at: int, reader: Detokenizer) -> Explanation:
    """Why two ledgers differ at token `at`. expected: the stored tokens."""
    shown = [reader.decode(side[max(0, at - BEFORE_TOKENS) : at + BEHIND_TOKENS]) for side in (expected, requested)]
    cause = _cause_of(expected, requested, at, reader)
    return Explanation(shown[0], shown[1], cause, REMEDIES[cause], repeated(expected[at:], requested[at:]))


def repeated(had: Sequence[int], now: Sequence[int]) -> int:
    """How many tokens of `now` stand in `had` too, in runs of RUN_TOKENS or more. Time grows with the tokens, and not
    with their product: each run of so many has a whole window of `had` in it, and these are looked up."""
    old, new = array("I", had), array("I", now)
    width = _WINDOW_TOKENS * old.itemsize
    of_old, of_new = old.tobytes(), new.tobytes()
    starts = {of_old[at : at + width]: at // old.itemsize for at in range(0, len(of_old) - width + 1, width)}
    count = at = done = 0
    while at + _WINDOW_TOKENS <= len(new):
        if (place := starts.get(of_new[at * old.itemsize : at * old.itemsize + width])) is None:
            at += 1
            continue
        begin, end, ahead = at, at + _WINDOW_TOKENS, place - at
        while at - begin < RUN_TOKENS and begin > 0 < begin + ahead and new[begin - 1] == old[begin - 1 + ahead]:
            begin -= 1
        while end < len(new) and end + ahead < len(old) and new[end] == old[end + ahead]:
            end += 1
        if end - begin < RUN_TOKENS:
            at += 1
            continue
        count, at, done = count + end - max(begin, done), end, end
    return count


def volatile_pattern(before: str, now: str) -> str | None:
    """A pattern of the one line by which two system texts differ, for it to be said elsewhere: how it begins. None if
    they differ elsewhere, too, or its beginning tells it from no other line."""
    lines, others = now.split("\n"), before.split("\n")
    pairs = [(line, other) for line, other in zip(lines, others, strict=False) if line != other]
    if len(lines) != len(others) or len(pairs) != 1:
        return None
    (pair,) = pairs
    alike = "".join(one for one, two in takewhile(lambda each: each[0] == each[1], zip(*pair, strict=False)))
    alike, dated = _PART_OF_WORD.sub("", alike), _DATES.search(pair[0])
    for beginning in (alike[: dated.start()] if dated else alike, alike):
        start = beginning[:_MOST_PATTERN_CHARS].rstrip()
        if len(start) >= _LEAST_PATTERN_CHARS and sum(each.startswith(start) for each in lines) == 1:
            return "^" + _SIGNS.sub(r"\\\g<0>", start)
    return None


def with_setting(explanation: Explanation, pattern: str) -> Explanation:
    """An explanation whose remedy has the setting with a pattern, too."""
    text = json.dumps(pattern, ensure_ascii=False) if "'" in pattern else f"'{pattern}'"
    setting = f"Or add that line to the list in the daemon's configuration, and it is said later: volatile = [{text}]"
    return replace(explanation, remedy=f"{explanation.remedy} {setting}")


def _cause_of(expected: Sequence[int], requested: Sequence[int], at: int, reader: Detokenizer) -> Cause:
    if at >= len(requested):
        return "goes_on"
    start = _start_of_message(requested, at, reader.controls)
    sides = [reader.decode(side[start : _end_of_message(side, at, reader.controls)]) for side in (expected, requested)]
    old, new = sides
    if old == new and requested[at] not in reader.controls and expected[at] not in reader.controls:
        return "tokenization"
    if old != new and (cause := _cause_of_texts(old, new)) is not None:
        return cause
    if _differ_in_controls(expected, requested, at, reader):
        return "template"
    if start == 0 or requested[start - 1] not in reader.controls:
        return "other_text"
    return "system_text" if new.lstrip().startswith("system") else "message"


def _cause_of_texts(old: str, new: str) -> Cause | None:
    """The one kind of difference between two texts; None if there are several."""
    if _THOUGHT.sub(" ", old).split() == _THOUGHT.sub(" ", new).split():
        return "thinking"
    if _DATES.sub("0", old).strip() == _DATES.sub("0", new).strip():
        return "clock"
    return "reordered" if Counter(_WORDS.findall(old)) == Counter(_WORDS.findall(new)) else None


def _differ_in_controls(expected: Sequence[int], requested: Sequence[int], at: int, reader: Detokenizer) -> bool:
    """Whether the texts from `at` on are the same without control tokens."""
    if expected[at] not in reader.controls and requested[at] not in reader.controls:
        return False
    plain = [
        reader.decode([token for token in side[at : at + MESSAGE_TOKENS] if token not in reader.controls]).split()
        for side in (expected, requested)
    ]
    shorter = min(len(plain[0]), len(plain[1]))
    return shorter > 0 and plain[0][:shorter] == plain[1][:shorter]


def _start_of_message(tokens: Sequence[int], at: int, controls: frozenset[int]) -> int:
    """The position behind the last control token before `at`, within MESSAGE_TOKENS."""
    lowest = max(0, at - MESSAGE_TOKENS)
    return next((place + 1 for place in range(at - 1, lowest - 1, -1) if tokens[place] in controls), lowest)


def _end_of_message(tokens: Sequence[int], at: int, controls: frozenset[int]) -> int:
    """The position of the first control token from `at` on, within MESSAGE_TOKENS."""
    end = min(len(tokens), at + MESSAGE_TOKENS)
    return next((place for place in range(at, end) if tokens[place] in controls), end)
