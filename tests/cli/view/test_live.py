"""What `torpor top` knows: sessions by listings and events, paces, misses, and lines that fit any width."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text
from torpor.cli.view.live import MAX_SHOWN, SORTS, Live
from torpor.cli.view.live_lines import head, miss_line, move_line, panel, session_line, title_line
from torpor.tests.cli.live_rig import A, B, event, info, reuse, status


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_events_tell_what_a_session_does_until_it_has_ended() -> None:
    live = Live()
    live.take_sessions([info("a"), info("b", state="asleep", resident_bytes=0)])
    seen = []
    for name in ("prefill_began", "prefill_ended", "first_token", "decode_ended", "request_queued", "memory_awaited"):
        live.take_event(event(name, tokens=5, seconds=0.5))
        seen.append(live.doing.get(A, live.sessions[A].state))
    assert seen == ["reading", "awake", "writing", "awake", "waiting", "waiting"]
    assert live.pace_of(A) == 10.0


@pytest.mark.parametrize(
    ("cause", "state"), [("asked", "asleep"), ("idle", "asleep"), ("save", "awake"), ("ledger", "awake")]
)
def test_a_sleep_takes_a_session_from_memory_but_for_a_save(cause: str, state: str) -> None:
    live = Live()
    live.take_sessions([info("a")])
    live.take_event(event("sleep_ended", at_ns=9, cause=cause, version=3, bytes_written=10, seconds=0.1))
    found = live.sessions[A]
    assert (found.state, found.version, found.slept_ns, found.dirty) == (state, 3, 9, False)
    assert found.resident_bytes == (0 if state == "asleep" else 4096)
    assert live.take_event(event("wake_ended", cause="asked", tokens=120, bytes_read=1, seconds=0.1))
    assert (live.sessions[A].state, live.sessions[A].token_count) == ("awake", 120)
    live.take_event(event("wake_ended", cause="prefix", tokens=120, bytes_read=1, seconds=0.1))
    assert [each.name for each in live.moves] == ["wake_ended", *["sleep_ended"] * (state == "asleep")]
    live.take_event(event("session_deleted"))
    assert not live.sessions


def test_a_long_writing_has_its_pace_from_one_listing_to_the_next() -> None:
    clock = Clock()
    live = Live(clock)
    live.take_sessions([info("a", token_count=100)])
    clock.now_s = 5.0
    live.take_event(event("first_token", seconds=1.0))
    assert live.pace_of(A) == 0.0
    clock.now_s = 7.0
    live.take_sessions([info("a", token_count=140)])
    assert live.pace_of(A) == 20.0
    live.take_sessions([info("a", state="asleep", token_count=140)])
    assert live.pace_of(A) == 0.0


def test_misses_are_told_once_the_latest_first_and_are_bounded() -> None:
    live = Live()
    live.take_reuses(A, [reuse(1, None), reuse(5, "clock")])
    live.take_reuses(B, [reuse(3, "system_text"), reuse(4, None)])
    live.take_reuses(A, [reuse(5, "clock"), reuse(6, "message")])
    assert [(each.at_ns, each.session, each.tokens, each.cause) for each in live.misses] == [
        (6, A, 30, "message at token 10"),
        (5, A, 30, "clock at token 10"),
        (3, B, 30, "system_text at token 10"),
    ], "a hit is no miss"
    live.take_reuses(A, [reuse(at, "clock") for at in range(10, 10 + 2 * MAX_SHOWN)])
    assert len(live.misses) == MAX_SHOWN
    assert live.misses[0].at_ns == 9 + 2 * MAX_SHOWN


def test_sessions_are_sorted_by_any_column_and_found_by_name_label_and_model() -> None:
    live = Live()
    live.take_sessions(
        [
            info("a", token_count=5, resident_bytes=3, written_bytes=9),
            info("b", token_count=9, resident_bytes=1, written_bytes=5, labels=("Nightly",)),
            info("c", token_count=7, resident_bytes=2, written_bytes=7, state="asleep", slept_ns=99, model="other"),
        ]
    )
    live.take_event(event("prefill_began", "b", tokens=3))

    def names(sort: str, **more: Any) -> str:
        return "".join(each.name for each in live.rows(sort, **more))

    assert {sort: names(sort) for sort in SORTS} == {
        "activity": "bac",
        "name": "abc",
        "tokens": "bca",
        "memory": "acb",
        "disk": "acb",
        "rate": "abc",
    }
    assert (names("tokens", reverse=True), names("name", reverse=True)) == ("acb", "cba")
    assert [names("name", holding=text) for text in ("night", "OTHER", "default/", "x")] == ["b", "c", "abc", ""]


@pytest.mark.parametrize("width", [20, 60, 80, 140])
def test_no_line_is_wider_than_the_screen_and_columns_stand_below_their_titles(width: int) -> None:
    live = Live()
    hostile = "ab\x1b[31m[red]☃☃☃\n" * 20
    live.take_sessions([info("a"), replace(info("b", labels=(hostile,)), session=hostile, model=hostile)])
    live.take_status(status(store=hostile))
    lines = [*head(live, width), title_line(width, "name", reverse=False)]
    lines += [session_line(live, each, width) for each in live.rows("name")]
    lines.append(move_line(event("sleep_failed", hostile, cause="idle", code="no_space", seconds=0.1), width))
    assert [line.cell_len <= width for line in lines] == [True] * len(lines)
    assert not any("\x1b" in line.plain or "\n" in line.plain for line in lines)
    assert {line.cell_len for line in lines[-4:-1]} == {width}, "a session's line fills the screen"


def test_the_head_tells_memory_and_disk_against_their_budgets() -> None:
    live = Live()
    assert [line.plain for line in head(live, 80)] == ["connecting"]
    live.take_status(status())
    told = [line.plain.rstrip() for line in head(live, 140)]
    assert told[0].startswith("torpor 1.2.3  /home/me/store")
    assert told[0].endswith("pid 42, up 61.0 s")
    assert told[1:3] == [
        "memory  ━━━━━━━━━─────────── 3.50 GiB of 8.00 GiB  models 1.00 GiB, sessions 2.00 GiB, reserved 512 MiB",
        "store   ━━━━━━━━━━━━━━━━━━── 9.00 GiB of 10.0 GiB  50.0 GiB free on the disk",
    ]
    assert told[3].startswith("work    2 awake, 3 asleep  4 waiting (1 for memory)")
    assert told[4] == "model   demo  1.00 GiB  2 awake"
    live.lose("no daemon")
    assert re.search(r"/home/me/store +no daemon since \d\d:\d\d:\d\d$", head(live, 80)[0].plain)


def test_the_head_tells_how_often_a_session_slept_to_make_room() -> None:
    live = Live()
    live.take_status(status())
    assert not any("make room" in line.plain for line in head(live, 140))
    live.take_status(status(memory=replace(status().memory, slept_by_pressure=1200)))
    assert any(line.plain.rstrip().endswith("1,200 slept to make room") for line in head(live, 140))


def test_what_happened_has_its_size_and_its_cause() -> None:
    slept = event("sleep_ended", cause="idle", version=2, bytes_written=2048, seconds=0.25)
    failed = event("wake_failed", cause="asked", code="corrupt", seconds=0.1)
    assert move_line(slept, 80).plain[9:] == "sleep default/a  idle  2.00 KiB in 250 ms"
    assert move_line(failed, 80).plain[9:] == "wake  default/a  asked  failed: corrupt"
    live = Live()
    live.take_reuses(A, [reuse(5, "clock")])
    assert miss_line(live.misses[0], 80).plain[9:] == "default/a  30 tokens  clock at token 10"
    assert [each.plain for each in panel("x", [], 3, 5, empty="none")] == ["x ───", "none", ""]
    assert [each.plain for each in panel("x", [Text("1"), Text("2")], 2, 5, empty="none")] == ["x ───", "1"]
