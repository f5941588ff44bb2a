"""What became of the prefix of each request: told for transcripts and for sessions that begin like others (MS8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from torpor.daemon.errors import ContextOverflow, TranscriptDiverged
from torpor.daemon.prefixes import prefix_history
from torpor.daemon.prefixes.prefix_history import MAX_REQUESTS
from torpor.daemon.prefixes.reuse import PrefixReuse
from torpor.daemon.sessions.transcripts import message_of
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import NotEnoughMemory
from torpor.tests.daemon.session_rig import Rigged, cancelled, held_at, hold_calls, tokens_of

pytestmark = pytest.mark.usefixtures("short_calls")

SYSTEM = message_of("system", "It is 06:30. Be brief.")
TOKENS = tokens_of(1, 600)


async def last(rig: Rigged, name: str = "a") -> Any:
    return (await rig.service.why(name)).requests[-1]


async def send(rig: Rigged, messages: Sequence[Any], name: str = "a", **options: Any) -> Any:
    return await rig.service.chat(name, messages=messages, **({"max_tokens": 3} | options))


@pytest.fixture
def rig(open_rig: Any) -> Any:
    return open_rig(prefix_reuse="exact")


async def test_a_cold_store_a_foreign_session_and_an_early_divergence_ms8(rig: Rigged) -> None:
    await rig.read("x/first", TOKENS)
    assert (await last(rig, "x/first")).outcome == "none", "nothing was there"
    await rig.read("y/foreign", TOKENS)
    assert (await last(rig, "y/foreign")).outcome == "none", "no other namespace is looked into"
    await rig.read("x/early", TOKENS[:40] + tokens_of(2, 500))
    early = await last(rig, "x/early")
    assert (early.outcome, early.common_tokens, early.stored_tokens, early.position) == ("diverged", 40, 600, 40)
    assert early.source == "torpor://x/first"
    assert early.expected_text == rig.model.decode(TOKENS[32:56])
    assert early.found_text == rig.model.decode(TOKENS[32:40] + tokens_of(2, 500)[:16])
    await rig.read("x/alike", [*TOKENS, 1, 2])
    alike = await last(rig, "x/alike")
    assert (alike.outcome, alike.common_tokens, alike.cached_tokens) == ("hit", 600, 576)
    await rig.read("x/short", TOKENS[:200])
    short = await last(rig, "x/short")
    assert (short.outcome, short.common_tokens, short.cached_tokens) == ("hit", 200, 0), "less than a block"
    assert (alike.not_taken, short.not_taken, early.not_taken) == (None, "no_whole_block", "no_whole_block")
    await rig.read("x/other", tokens_of(3, 300))
    assert (await last(rig, "x/other")).outcome == "none"


@pytest.mark.parametrize("sleeps", [False, True])
async def test_it_is_told_why_nothing_was_taken_over(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """The one reason, and no guess by the number of tokens."""
    for at in range(0, 600, 100):
        await rig.service.append("a", tokens=TOKENS[at : at + 100], create=at == 0)
    if sleeps:
        await rig.sleep("a")
    await rig.read("b", [*TOKENS[:500], 1])
    found = await last(rig, "b")
    assert (found.common_tokens, found.cached_tokens, found.not_taken) == (500, 0, "other_calls")

    def refuse(*_: object) -> Any:
        raise NotEnoughMemory("No.", wanted_bytes=1)

    monkeypatch.setattr(PrefixReuse, "_usable_of", refuse)
    monkeypatch.setattr(PrefixReuse, "_look", refuse)
    await rig.read("c", TOKENS)
    assert (await last(rig, "c")).not_taken == "no_room"


async def test_a_session_that_sleeps_is_compared_too(rig: Rigged) -> None:
    await rig.asleep("a", TOKENS)
    await rig.read("b", TOKENS[:300] + tokens_of(2, 300))
    found = await last(rig, "b")
    assert (found.outcome, found.position, found.stored_tokens) == ("diverged", 300, 600)
    assert not rig.is_awake("a")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("before", [0, 10])
async def test_among_many_sessions_those_of_a_like_name_are_compared(rig: Rigged, before: int) -> None:
    """A client's id names a group. Its text may leave the way before a block is full, and no tree finds it then."""
    for at in range(20):
        if at == before:
            await rig.read("client", TOKENS)
        await rig.read(f"other-{at}", tokens_of(10 + at, 300))
    await rig.read("client-0a1b2c3d", TOKENS[:40] + tokens_of(2, 300))
    found = await last(rig, "client-0a1b2c3d")
    assert (found.outcome, found.source, found.position) == ("diverged", "torpor://default/client", 40)


async def test_nothing_is_looked_up_where_nothing_is_reused(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", TOKENS)
        await rig.read("b", TOKENS)
        assert (await last(rig, "b")).outcome == "none"


async def test_a_request_that_goes_on_is_a_hit_of_all_that_there_is(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await rig.read("a", TOKENS[:50])
        await rig.write("a", 3)
        await rig.service.chat("a", message="hi", max_tokens=1)
        told = (await rig.service.why("a")).requests
        assert [(each.verb, each.outcome, each.common_tokens) for each in told[:2]] == [
            ("append", "none", 0),
            ("generate", "hit", 50),
        ]
        assert (told[2].verb, told[2].source) == ("chat", "torpor://default/a")
        assert told[2].common_tokens == told[2].stored_tokens > 50
        assert [each.at_ns for each in told] == sorted(each.at_ns for each in told)


async def test_a_request_that_ends_before_it_has_read_anything_is_no_hit(rig: Rigged) -> None:
    await rig.read("a", TOKENS[:50])
    before = (await rig.service.why("a")).requests
    for refused in (
        rig.service.generate("a", max_tokens=100_000),
        rig.service.generate("a", tokens=TOKENS, max_tokens=100_000),
        rig.service.append("a", tokens=[0] * 100_000),
    ):
        with pytest.raises(ContextOverflow):
            await refused
    reading, gate = await held_at(rig, 1, rig.service.append("a", tokens=TOKENS[:20]))
    reading.cancel()
    await asyncio.sleep(0)
    gate.open()
    await cancelled(reading)
    assert (await rig.service.why("a")).requests == before
    writing, gate = await held_at(rig, 3, rig.service.generate("a", tokens=[1, 2], max_tokens=9))
    writing.cancel()
    await asyncio.sleep(0)
    gate.open()
    await cancelled(writing)
    assert ((await last(rig)).verb, (await last(rig)).outcome) == ("generate", "hit"), "a part of it stays"


async def test_a_refused_transcript_is_explained(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await rig.service.create("a")
        answer = (await send(rig, [SYSTEM, message_of("user", "one")])).text
        talked = [SYSTEM, message_of("user", "one"), message_of("assistant", answer), message_of("user", "two")]
        await send(rig, talked)
        assert (await last(rig)).outcome == "hit"
        for changed, cause, index in (
            ([message_of("system", "It is 17:45. Be brief."), *talked[1:]], "clock", 0),
            ([message_of("system", "Be brief. It is 06:30."), *talked[1:]], "reordered", 0),
            ([message_of("system", "Be long."), *talked[1:]], "system_text", 0),
            ([SYSTEM, message_of("user", "someone else")], "message", 1),
            (talked[:2], "goes_on", 2),
        ):
            with pytest.raises(TranscriptDiverged) as refusal:
                await send(rig, changed)
            found = await last(rig)
            assert (found.outcome, found.cause, found.message_index) == ("diverged", cause, index)
            assert found.position == found.common_tokens == refusal.value.details["position"]
            assert found.stored_tokens == len(rig.live("a").state.tokens)
            assert found.remedy
            assert found.became == "refused"
        await send(rig, changed, on_divergence="rewind")
        assert ((await last(rig)).cause, (await last(rig)).became) == ("goes_on", "rewound"), "and so is this"
        with pytest.raises(ContextOverflow):
            await send(rig, [SYSTEM, message_of("user", "x" * 1900)], on_divergence="rewind", max_tokens=2000)
        assert ((await last(rig)).outcome, (await last(rig)).became) == ("diverged", None), "it did not go back"


async def test_only_the_last_requests_of_the_last_sessions_are_remembered(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process; the diary of the store has them all."""
    monkeypatch.setattr(prefix_history, "MAX_SESSIONS", 2)
    async with open_rig() as rig:
        reasons = rig.service._parts.sessions.reasons
        for name in ("a", "b", "c"):
            await rig.service.create(name)
            for number in range(MAX_REQUESTS + 3):
                await rig.service.append(name, tokens=[number])
        assert [len(reasons.of(SessionUri("default", name))) for name in "abc"] == [0, 16, 16]
        assert [len((await rig.service.why(name)).requests) for name in "abc"] == [16, 16, 16]
        assert (await last(rig, "c")).common_tokens == MAX_REQUESTS + 2


@pytest.mark.parametrize("way", ["delete", "forget"])
async def test_of_a_session_that_is_gone_nothing_is_remembered(rig: Rigged, way: str) -> None:
    await rig.asleep("a", TOKENS[:9])
    if way == "delete":
        await rig.service.delete("a")
    else:
        await rig.service.maintain(operation="forget", session="a")
    await rig.service.create("a")
    assert (await rig.service.why("a")).requests == ()


@pytest.mark.parametrize("way", ["delete", "forget"])
async def test_no_text_of_a_session_that_is_gone_is_told_of_another_one(rig: Rigged, way: str) -> None:
    await rig.asleep("a", [*TOKENS[:200], 5, 6, 7])
    await rig.read("b", [*TOKENS[:200], 8, 9])
    assert (await last(rig, "b")).expected_text is not None
    if way == "delete":
        await rig.service.delete("a")
    else:
        await rig.service.maintain(operation="forget", session="a")
    told = await last(rig, "b")
    assert (told.outcome, told.common_tokens, told.source) == ("diverged", 200, None)
    assert told.expected_text is told.found_text is None, "each has a part of both"


async def test_no_text_of_a_session_that_goes_while_it_is_explained_is_told(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_calls(monkeypatch, prefix_history, "explain")
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.asleep("a", [*TOKENS[:200], 5, 6, 7])
        reading = asyncio.ensure_future(rig.read("b", [*TOKENS[:200], 8, 9]))
        await gate.reached()
        await rig.service.delete("a")
        gate.open()
        await reading
        told = await last(rig, "b")
        assert (told.outcome, told.common_tokens) == ("diverged", 200)
        assert told.source is told.expected_text is told.found_text is None
        await rig.read("c", [*TOKENS[:200], 7, 7, 7])
        assert (await last(rig, "c")).expected_text is not None, "of others it is"


async def test_no_text_of_a_session_that_goes_while_others_are_looked_at_is_told(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.asleep("sleeping", [*TOKENS[:300], *tokens_of(5, 20)])
    await rig.read("a", [*TOKENS[:350], *tokens_of(6, 20)])
    reading, going = asyncio.Event(), asyncio.Event()
    read = rig.service._parts.sessions.reuse._stored_ledger

    async def read_slowly(uri: Any) -> Any:
        found = await read(uri)
        reading.set()
        await going.wait()
        return found

    monkeypatch.setattr(rig.service._parts.sessions.reuse, "_stored_ledger", read_slowly)
    late = asyncio.ensure_future(rig.read("late", [*TOKENS[:350], *tokens_of(2, 50)]))
    await reading.wait()
    await rig.service.maintain(operation="forget", session="a")
    going.set()
    await late
    told = await last(rig, "late")
    assert (told.outcome, told.source, told.expected_text, told.found_text) == ("diverged", None, None, None)


async def test_no_text_of_it_gets_into_a_log(open_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with open_rig(endless=False) as rig:
            await rig.service.create("a")
            await send(rig, [message_of("user", "a secret of mine")])
            with pytest.raises(TranscriptDiverged):
                await send(rig, [message_of("user", "a secret of theirs")])
            assert "mine" in (await last(rig)).expected_text
    assert "secret" not in caplog.text
