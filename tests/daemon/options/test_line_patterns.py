"""Patterns of lines, in time that grows as a line does; and the lines of known agents."""

from __future__ import annotations

import pytest
from torpor.daemon.options.kinds import LinePatterns
from torpor.daemon.options.line_patterns import KNOWN_VOLATILE, MAX_LINE_CHARS, MAX_PATTERNS, STATUS_LINES, matcher_of

VOLATILE = (
    "x-anthropic-billing-header: cc_version=2.1.330.251; cc_entrypoint=cli;",  # Claude Code
    "Today's date: 2026-11-22",
    "  Today's date: Sat Nov 22 2026",  # opencode
    "Today's date is Saturday, 22 November 2026.",
    "Current date and time: Saturday, November 22, 2026 at 10:00:31 AM GMT",  # pi
    "- Current date: 2026-11-22",  # aider
    "The current date is 2026-11-22 10:00:31.",  # goose
    "The date is 2026-11-22.",  # Pydantic AI
    "Today: 2026-11-22; current working directory: '/home'.",
    "gitStatus: This is the git status at the start of the conversation.",
    "Git status (snapshot at conversation start - may be outdated):",  # Crush
)
STATUS = (
    *("Current branch: main", "Main branch (you will usually use this for PRs): main", "Git user: someone"),
    *("Status:", "Status: clean", "(clean)", " M a.py", "?? b/", "AM c.py", "R  a -> b", "Recent commits:"),
    "1f17483 Say what is new",
)
STAYING = (
    *("", "You are a coding agent.", "Never guess today's date.", "The current date is not known to you.", "Today"),
    *(
        "Current directory: /home/2026",
        "Status of the work: 3 of 4",
        "Time: 5 min",
        "A  b c",
        "   indented",
        "- M a.py",
        "The time is limited to 30 seconds.",
        "The date is in the form of ISO 8601.",
    ),
    *("deadbeef", "Commit 1f17483 was reverted.", "I  am", "Current date: " + "9" * MAX_LINE_CHARS, "Today: 1\ud800"),
)


@pytest.mark.parametrize(
    ("patterns", "lines", "expected"),
    [
        (KNOWN_VOLATILE, VOLATILE, True),
        (KNOWN_VOLATILE, STATUS + STAYING, False),
        (STATUS_LINES, STATUS, True),
        (STATUS_LINES, STAYING, False),
    ],
)
def test_the_lines_of_known_agents_and_no_others_match(
    patterns: tuple[str, ...], lines: tuple[str, ...], expected: bool
) -> None:
    matches = matcher_of(patterns)
    assert [line for line in lines if matches(line) is not expected] == []


def test_a_pattern_goes_back_in_no_line() -> None:
    """Python's own engine would take longer than the world is old."""
    assert not matcher_of((r"^(a+)+$", r"^(a|a)*b\d$"))("a" * (MAX_LINE_CHARS - 1) + "c")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("^Today", f"it must be a list of at most {MAX_PATTERNS} patterns"),
        (["a"] * (MAX_PATTERNS + 1), f"it must be a list of at most {MAX_PATTERNS} patterns"),
        (["^a", 1], "item 1 must be a text of 1 to 512 characters"),
        ([""], "item 0 must be a text of 1 to 512 characters"),
        (["a" * 513], "item 0 must be a text of 1 to 512 characters"),
        (["^a", "(b"], r"item 1, '\(b', is no pattern: unclosed group"),
        (["(?=x)"], "is no pattern: look-around"),
        (["(a{1000}){1000}"], "is no pattern: Compiled regex exceeds size limit"),
        ([r"\pL{160}"] * MAX_PATTERNS, "all together: Compiled regex exceeds size limit"),
    ],
)
def test_what_is_no_list_of_patterns_is_refused(written: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LinePatterns().read(written)
    assert LinePatterns().read(["^a", "b$"]) == ("^a", "b$")
