"""What `why` knows lasts, over a restart and without a daemon; it counts for all, and tells nothing of what is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.causes import MAX_ROWS, RequestCost, Reuse, judge
from torpor.daemon.errors import TranscriptDiverged
from torpor.daemon.events.accounts import client
from torpor.daemon.sessions.transcripts import message_of
from torpor.daemon.views import causes as views
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import Rigged, cancelled, held_at, tokens_of

pytestmark = pytest.mark.usefixtures("short_calls")

URI = SessionUri("default", "a")
OTHER = SessionUri("lab", "b")
TOKENS = tokens_of(1, 600)
SAID = [message_of("system", "It is 06:30. Be brief."), message_of("user", "Hello, who are you?")]
LATER = [message_of("system", "It is 07:45. Be brief."), SAID[1]]


async def send(rig: Rigged, messages: Sequence[Any], name: str = "a", **options: Any) -> Any:
    return await rig.service.chat(name, messages=messages, **({"max_tokens": 3, "create": True} | options))


async def test_why_is_the_same_behind_a_restart_and_without_a_daemon(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await send(rig, SAID)
        with pytest.raises(TranscriptDiverged):
            await send(rig, LATER)
        await send(rig, LATER, on_divergence="rewind")
        told = await rig.service.why("a")
        await rig.service.save("a")
    assert [(each.outcome, each.cause, each.became) for each in told.requests] == [
        ("none", None, None),
        ("diverged", "clock", "refused"),
        ("diverged", "clock", "rewound"),
    ]
    assert "06:30" in (told.requests[1].expected_text or "")
    assert (told.requests[1].remedy or "").startswith("Only a date or a time differs.")
    first, refused, rewound = [each.cost for each in told.requests]
    assert first is not None
    assert refused is not None
    assert rewound is not None
    assert (refused.code, refused.read_tokens, refused.written_tokens) == ("transcript_diverged", 0, 0)
    assert (first.code, first.written_tokens, rewound.written_tokens) == ("", 3, 3)
    assert first.seconds >= first.read_seconds + first.write_seconds > 0
    with Store.open(store, writable=False) as opened:
        assert views.why(opened, URI) == told
    async with open_rig() as rig:
        assert await rig.service.why("a") == told
        await rig.service.append("a", text="And so on.")
        last = (await rig.service.why("a")).requests[-1]
        assert (last.outcome, last.cost is not None and last.cost.wake_seconds > 0) == ("hit", True)


async def test_the_requests_of_all_are_counted_by_each_word(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await send(rig, SAID)
        token = client.set("curl chat_completions")
        rewound = await send(rig, LATER, on_divergence="rewind")
        client.reset(token)
        await rig.read("lab/b", TOKENS)
        await rig.service.sleep("a")
        await rig.service.delete("lab/b")
        by_cause = await rig.service.causes(since="1h")
        rows = {each.key: each for each in by_cause.rows}
        assert rows.keys() == {"new", "clock", "sleep"}
        assert (rows["new"].requests, rows["new"].written_tokens, rows["new"].read_again_tokens) == (2, 3, 0)
        assert rows["clock"].read_tokens == rewound.prefilled_tokens + rewound.recomputed_tokens
        assert 0 < rows["clock"].read_again_tokens < rows["clock"].read_tokens, "all but the time stood there"
        assert rows["sleep"].durable_seconds > 0
        assert (by_cause.total.requests, by_cause.left_out, by_cause.problem) == (4, 0, None)
        assert [each.seconds for each in by_cause.rows] == sorted(
            (each.seconds for each in by_cause.rows), reverse=True
        )
        by_client = {each.key: each.requests for each in (await rig.service.causes(by="client")).rows}
        assert by_client == {"": 3, "curl chat_completions": 1}
        by_session = {each.key: each.requests for each in (await rig.service.causes(by="session")).rows}
        assert by_session == {str(URI): 3, "": 1}
        (last,) = {
            (each.last_again, each.last_again_ns)
            for found in (by_cause, await rig.service.causes(by="session"))
            for each in (*found.rows, found.total)
            if each.read_again_tokens
        }
        assert last == ("clock", (await rig.service.why("a")).requests[-1].cost.ended_ns)
        assert {each.last_again for each in by_cause.rows if not each.read_again_tokens} == {""}
        own = await rig.service.causes(by="session", namespace="default")
        assert [each.key for each in own.rows] == [str(URI)]
        assert (await rig.service.causes(namespace="lab")).rows == ()
        hours = await rig.service.causes(by="hour")
        assert sum(each.requests for each in hours.rows) == 4
        assert all(int(each.key) % 3600 == 0 for each in hours.rows)
        assert (await rig.service.causes(since="0.000001s")).total.requests == 0
    with Store.open(store, writable=False) as opened:
        assert views.causes(opened, by="session").total == by_cause.total


@pytest.mark.parametrize("way", ["forget", "delete"])
async def test_what_a_request_under_way_has_of_a_session_that_goes_is_not_told(
    open_rig: Any, store: Path, way: str
) -> None:
    """One that leaves the way of a session ends once that is forgotten."""
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.read("secret", TOKENS)
        await rig.service.sleep("secret")
        changed = [*TOKENS[:100], *tokens_of(2, 100)]
        await rig.service.create("a")
        reading, gate = await held_at(rig, 1, rig.service.append("a", tokens=changed))
        if way == "forget":
            await rig.service.maintain(operation="forget", session="secret")
        else:
            await rig.service.delete("secret")
        gate.open()
        await reading
        (told,) = views.why(rig.service._parts.store.disk, URI).requests
        assert (told.outcome, told.source, told.expected_text, told.found_text) == ("diverged", None, None, None)
    if way == "forget":
        assert not [path for path in store.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("way", ["forget", "delete"])
async def test_what_a_request_has_that_ends_while_a_session_goes_is_not_told(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, way: str, is_written: bool
) -> None:
    """It begins and ends when the disk has the session no more, and memory has it still."""
    async with open_rig(prefix_reuse="exact") as rig:
        parts = rig.service._parts
        await rig.read("secret", TOKENS)
        await rig.service.save("secret")
        owner, name = (parts.upkeep, "carry_out") if way == "forget" else (parts.store, "on_writer")
        carry_out = getattr(owner, name)

        async def and_then_another(order: Any) -> Any:
            report = await carry_out(order)
            monkeypatch.undo()
            await rig.read("a", [*TOKENS[:100], *tokens_of(2, 100)])
            assert (await rig.service.why("a")).requests[-1].source == "torpor://default/secret"
            if is_written:
                parts.store.disk.write_diary()
            return report

        monkeypatch.setattr(owner, name, and_then_another)
        if way == "forget":
            assert (await rig.service.maintain(operation="forget", session="secret")).problems == ()
            assert not [path for path in store.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
        else:
            await rig.service.delete("secret")
        for told in (views.why(parts.store.disk, URI), await rig.service.why("a")):
            (reuse,) = told.requests
            assert (reuse.outcome, reuse.source, reuse.expected_text, reuse.found_text) == ("diverged", *[None] * 3)
    if way == "forget":
        assert not [path for path in store.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    with Store.open(store, writable=False) as opened:
        assert [each.source for each in views.why(opened, URI).requests] == [None]


async def test_forget_leaves_no_byte_of_a_name_or_a_text_in_the_store(open_rig: Any, store: Path) -> None:
    secret = [message_of("system", "The word is Xyzzy-Plugh. It is 06:30."), message_of("user", "Hello!")]
    other = [message_of("system", "The word is Xyzzy-Plugh. It is 07:45."), message_of("user", "Hello!")]
    async with open_rig(prefix_reuse="exact") as rig:
        await send(rig, secret, "zyx-secret")
        await send(rig, other, "zyx-secret", on_divergence="rewind")
        await send(rig, secret, "a")
        assert (await rig.service.why("a")).requests[-1].source == "torpor://default/zyx-secret"
        await rig.service.delete("a")
    async with open_rig() as rig:
        await rig.service.maintain(operation="forget", session="zyx-secret")
        assert (await rig.service.causes()).total.requests == 1, "what was another's stays, without a name"
    everything = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert b"zyx-secret" not in everything
    assert b"Plugh" not in everything


async def test_a_request_that_is_left_is_told_with_what_it_had_read(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", TOKENS[:64])
        reading, gate = await held_at(rig, 1, rig.service.append("a", tokens=TOKENS))
        reading.cancel()
        gate.open()
        await cancelled(reading)
        told = (await rig.service.causes()).total
        assert (told.requests, told.failed, told.read_tokens) == (2, 1, 64)


def test_a_store_without_a_sound_diary_gives_what_there_is(store: Path) -> None:
    with Store.open(store, writable=True) as opened:
        assert views.why(opened, URI).requests == views.causes(opened).rows == ()
        reuse = Reuse("chat", 7, "diverged", str(URI), 3, 9, 3, 1, "there", "asked", "clock", "Say it later. More.")
        views.say(opened.diary, URI, RequestCost(1, "chat", 8, seconds=1.0), reuse)
        opened.diary.say({"o": "hit", "at": "later", "pv": 7}, URI, {})
        opened.diary.say({"o": "maybe", "v": "chat"}, URI, {"there": 5})
        opened.diary.say({"n": -1}, URI, {})
        assert [each.at_ns for each in views.why(opened, URI).requests] == [7]
        assert {each.key for each in views.causes(opened).rows} == {"clock", "chat"}
    (store / "diary.mvd").chmod(0o600)
    (store / "diary.mvd").rename(store / "aside")
    (store / "diary.mvd").symlink_to(store / "aside")
    with Store.open(store, writable=False) as opened:
        told = views.causes(opened)
        assert (told.rows, str(store / "diary.mvd") in (told.problem or "")) == ((), True)
        assert views.why(opened, URI).problem == told.problem


HIT = Reuse("chat", 1, "hit", "s", 90, 90)
CLOCK = Reuse("chat", 1, "diverged", "s", 20, 60, cause="clock", repeated_tokens=35)
EDITED = Reuse("chat", 1, "diverged", "s", 20, 600, cause="message")


@pytest.mark.parametrize(
    ("reuse", "own", "recomputed", "because", "judged"),
    [
        (None, False, 0, "", ("chat", 0, 0)),
        (None, False, 30, "stripped", ("stripped", 30, 0)),
        (None, False, 1, "", ("recomputed", 1, 0)),
        (Reuse("chat", 1, "none"), False, 0, "", ("new", 0, 0)),
        (HIT, True, 0, "", ("hit", 0, 90)),
        (HIT, True, 30, "stripped", ("stripped", 30, 60)),
        (replace(HIT, cached_tokens=64), False, 0, "", ("hit", 26, 64)),
        (replace(HIT, not_taken="no_room"), False, 0, "", ("no_room", 90, 0)),
        (CLOCK, True, 0, "", ("clock", 35, 20)),
        (replace(CLOCK, became="rewound"), True, 1, "", ("clock", 36, 19)),
        (replace(CLOCK, repeated_tokens=500), True, 0, "", ("clock", 100, 20)),
        (replace(CLOCK, not_taken="no_whole_block"), False, 0, "", ("clock", 55, 0)),
        (EDITED, True, 1, "", ("message", 1, 19)),
        (replace(EDITED, not_taken="no_whole_block"), False, 0, "", ("no_whole_block", 20, 0)),
        (replace(EDITED, cached_tokens=20), False, 0, "", ("hit", 0, 20)),
    ],
)
def test_a_request_is_judged_by_one_definition(
    reuse: Reuse | None, own: bool, recomputed: int, because: str, judged: tuple[str, int, int]
) -> None:
    """Of one for which 100 tokens were read."""
    assert judge("chat", reuse, 100, recomputed, because, own=own) == judged


def test_a_refused_transcript_reads_and_reuses_nothing() -> None:
    assert judge("chat", replace(CLOCK, became="refused"), 0, 0, "", own=True) == ("clock", 0, 0)


async def test_the_tokens_of_a_prompt_are_read_or_reused(open_rig: Any) -> None:
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.read("a", TOKENS)
        await rig.service.append("a", tokens=TOKENS[:40])
        await rig.read("b", TOKENS)
        total = (await rig.service.causes()).total
        assert total.reused_tokens == 600 + total.taken_over_tokens
        assert total.read_tokens + total.reused_tokens == 600 + 640 + 600
        assert total.taken_over_tokens > 0


def test_the_rows_are_bounded(store: Path) -> None:
    with Store.open(store, writable=True) as opened:
        for number in range(MAX_ROWS + 7):
            cost = RequestCost(number, "wake", 0, seconds=float(number + 1))
            views.say(opened.diary, SessionUri("default", f"s{number}"), cost, None)
        told = views.causes(opened, by="session")
        assert (len(told.rows), told.left_out, told.total.requests) == (MAX_ROWS, 7, MAX_ROWS + 7)
        assert [told.rows[0].seconds, told.rows[-1].seconds] == [MAX_ROWS + 7, 8]
