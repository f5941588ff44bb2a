"""The class of a cause, by the two texts around the place where they part; characters as tokens."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence

import pytest
from torpor.daemon.options.line_patterns import matcher_of
from torpor.daemon.prefixes.prefixes import tokens_in_common
from torpor.daemon.views.why import (
    BEFORE_TOKENS,
    BEHIND_TOKENS,
    REMEDIES,
    RUN_TOKENS,
    Detokenizer,
    Explanation,
    explain,
    repeated,
    volatile_pattern,
    with_setting,
)

CONTROLS = {"\1": 1, "\2": 2, "\3": 3}
WORDS = Detokenizer(lambda tokens: "".join(map(chr, tokens)), frozenset(CONTROLS.values()))


def told(expected: str, found: str, reader: Detokenizer = WORDS) -> Explanation:
    one, other = [ord(each) for each in expected], [ord(each) for each in found]
    return explain(one, other, tokens_in_common(one, other), reader)


def turns(*messages: str) -> str:
    return "".join(f"\1{message}\2\n" for message in messages)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("It is 2026-11-22 06:30:01.", "It is 2026-11-23 17:02:59."),
        ("now: 2026-11-22T06:30:01Z", "now: 2026-11-22T06:31:44Z"),
        ("Today is Sunday, 22 November 2026.", "Today is Monday, 23 November 2026."),
        ("Nov. 22, 2026", "December 1st, 2026"),
        ("22/11/2026, 6:30 pm", "1/12/2026, 11:05 am"),
        ("epoch 1795329001", "epoch 1795329733"),
    ],
)
def test_a_clock_is_told_where_only_dates_and_times_differ(old: str, new: str) -> None:
    assert (
        told(turns(f"system\n{old} Be brief.", "user\nhi"), turns(f"system\n{new} Be brief.", "user\nhi")).cause
        == "clock"
    )
    assert told(turns(f"system\n{old} Be brief."), turns(f"system\n{new} Be long.")).cause == "system_text"


@pytest.mark.parametrize(("old", "new"), [("question 1", "question 7"), ("1.5 kg", "2.5 kg"), ("Mark", "March on")])
def test_other_numbers_and_names_are_no_clock(old: str, new: str) -> None:
    assert told(turns("system\nS", f"user\n{old}"), turns("system\nS", f"user\n{new}")).cause == "message"


def test_keys_and_tools_in_another_order_are_told() -> None:
    one, other = '{"name": "ls", "args": {"a": 1, "b": 2}}', '{"args": {"b": 2, "a": 1}, "name": "ls"}'
    assert told(turns(f"system\n{one}"), turns(f"system\n{other}")).cause == "reordered"
    assert told(turns("system\ntools:\nread\nwrite"), turns("system\ntools:\nwrite\nread")).cause == "reordered"
    assert told(turns("system\ntools:\nread\nwrite"), turns("system\ntools:\nwrite\nlist")).cause == "system_text"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<think>why</think>\n\nhello", "hello"),
        ("hello", "<think>\n\n</think>\n\nhello"),
        ("<think>why</think>hello", "<think>who</think>hello"),
        ("<think>cut off", ""),
    ],
)
def test_thinking_that_is_dropped_moved_or_changed_is_told(old: str, new: str) -> None:
    old, new = turns("user\nhi", f"assistant\n{old}", "user\nx"), turns("user\nhi", f"assistant\n{new}", "user\nx")
    assert told(old, new).cause == "thinking"


def test_a_changed_answer_with_thinking_is_a_changed_message() -> None:
    old, new = turns("assistant\n<think>why</think>yes"), turns("assistant\n<think>why</think>no")
    assert told(old, new).cause == "message"


def test_another_template_is_told_by_its_control_tokens() -> None:
    assert (
        told("\1user\nhello there\2\n\1assistant\nyes\2", "\1user\nhello there\3\n\1assistant\nyes\3").cause
        == "template"
    )
    assert (
        told("\1user\nhello there\2\n\1assistant\nyes\2", "\1user\nhello there\3\n\1assistant\nno\3").cause == "message"
    )


def test_other_tokens_of_the_same_text_are_told() -> None:
    """As after an answer that the tokenizer would have cut otherwise: capital letters stand for two small ones."""
    words = Detokenizer(lambda tokens: "".join(map(chr, tokens)).replace("A", "ab"), WORDS.controls)
    assert told(turns("user\nxaby"), turns("user\nxAy"), words).cause == "tokenization"


def test_a_transcript_that_ends_where_the_session_goes_on_is_told() -> None:
    assert told(turns("user\nhi", "assistant\nyes"), turns("user\nhi")).cause == "goes_on"


def test_the_message_in_which_they_part_is_told_apart() -> None:
    assert told(turns("system\nS"), turns("system\nT")).cause == "system_text"
    assert told(turns("system\nS", "user\na"), turns("system\nS", "user\nb")).cause == "message"
    assert told("one text", "one word").cause == "other_text"


def test_both_sides_are_shown_for_a_few_tokens() -> None:
    old, new = "a" * 100 + "b" * 100, "a" * 100 + "c" * 100
    shown = told(old, new)
    assert shown.expected_text == "a" * BEFORE_TOKENS + "b" * BEHIND_TOKENS
    assert shown.found_text == "a" * BEFORE_TOKENS + "c" * BEHIND_TOKENS
    assert shown.remedy == REMEDIES[shown.cause]


@pytest.mark.parametrize("place", [0, 5000])
def test_long_texts_without_control_tokens_are_compared_within_bounds(place: int) -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return "".join(map(chr, tokens))

    told("a" * place + "b" * 100_000, "a" * place + "c" * 100_000, Detokenizer(decode, WORDS.controls))
    assert max(decoded) <= 2 * 2048


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        ("It's Saturday, 22 May", "It's Sunday, 23 May", "^It's"),
        ("(Build) [a+b] 7", "(Build) [a+b] 8", r"^\(Build\) \[a\+b\]"),
        ("Branch: main", "Branch: master", "^Branch:"),
        ("22 May 2026 it is", "23 May 2026 it is", None),
        ("You are one.", "You are two.", None),
        ("Mood: good\nDay: one", "Mood: bad\nDay: two", None),
        ("Mood: good", "Mood: good\nDay: two", None),
        ("same", "same", None),
    ],
)
def test_the_line_that_differs_is_named_by_how_it_begins(old: str, new: str, pattern: str | None) -> None:
    texts = [f"You are a helper.\n{side}\nBe brief." for side in (old, new)]
    assert volatile_pattern(*texts) == pattern
    if pattern is not None:
        told = with_setting(Explanation("", "", "clock", "Say it later."), pattern)
        (written,) = tomllib.loads(told.remedy[told.remedy.index("volatile") :])["volatile"]
        lines = {*texts[0].split("\n"), *texts[1].split("\n")}
        assert {line for line in lines if matcher_of((written,))(line)} == {old, new}


def _repeated_slowly(had: list[int], now: list[int]) -> int:
    runs = {tuple(had[at : at + RUN_TOKENS]) for at in range(len(had) - RUN_TOKENS + 1)}
    found = set[int]()
    for at in range(len(now) - RUN_TOKENS + 1):
        if tuple(now[at : at + RUN_TOKENS]) in runs:
            found.update(range(at, at + RUN_TOKENS))
    return len(found)


@pytest.mark.parametrize("seed", range(20))
def test_any_runs_are_counted_as_a_slow_count_does(seed: int) -> None:
    chance = random.Random(seed)
    had = [chance.randrange(50_000) for _ in range(400)]
    now = list[int]()
    while len(now) < 600:
        at, length = chance.randrange(400), chance.randrange(40)
        now += [*had[at : at + length], chance.randrange(50_000, 60_000)]
    assert repeated(had, now) == _repeated_slowly(had, now)


@pytest.mark.parametrize("length", [RUN_TOKENS - 1, RUN_TOKENS, RUN_TOKENS + 1, 2 * RUN_TOKENS, 700])
@pytest.mark.parametrize("at", [0, 1, 7, 300])
def test_each_token_of_a_run_that_stood_there_is_repeated(length: int, at: int) -> None:
    had = list(range(1000))
    run = had[at : at + length]
    now = [5000, 5001, *run, 5002, *run, *range(6000, 6040), *had[990:]]
    assert repeated(had, now) == _repeated_slowly(had, now) == (0 if length < RUN_TOKENS else 2 * length)


def test_text_that_moved_or_stands_behind_a_change_is_repeated_and_another_is_not() -> None:
    had = list(range(1000))
    assert repeated(had, [*had[500:], 7777, *had[:500]]) == 1000
    assert repeated(had, had[1:]) == 999
    assert repeated(had, list(range(2000, 3000))) == repeated([], had) == repeated(had, []) == 0
    assert repeated([1] * 100, [1] * 300) == 300, "each of them stood there"
