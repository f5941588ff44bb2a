"""An answer's limit is a ceiling: memory is taken as the answer grows, and no answer is lost for the lack of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.chat.answer_room import STEP_TOKENS, next_end
from torpor.daemon.errors import MemoryBudgetExceeded
from torpor.memvid.errors import NoSpace
from torpor.memvid.store import Store
from torpor.tests.daemon.conversing_rig import converse, ledger, user
from torpor.tests.daemon.session_rig import (
    HELD,
    SAMPLED,
    Rigged,
    all_begun,
    cancelled,
    listening,
    tokens_of,
    until,
    writing,
)


async def told(rig: Rigged) -> Any:
    return (await rig.service.status()).memory


async def all_is_free(rig: Rigged) -> None:
    await until(lambda: not rig.service._parts.sessions.residency.turns.in_use())
    memory = await told(rig)
    assert (memory.reserved_bytes, memory.waiting) == (0, 0)
    assert memory.sessions_bytes == sum(
        each.resident_bytes for each in rig.service._parts.sessions.residency.awake.values()
    )


@pytest.mark.parametrize(("tokens", "end"), [(0, 256), (1, 256), (255, 256), (256, 512), (300, 400)])
def test_room_ends_at_a_step_or_at_the_ceiling(tokens: int, end: int) -> None:
    assert next_end(tokens, 10_000 if end % STEP_TOKENS == 0 else end) == end


async def test_a_ceiling_far_above_the_budget_is_no_demand(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + 9 * HELD) as rig:
        await rig.read_each("abcdefgh", tokens_of(1, 50))
        results = await asyncio.gather(*(writing(rig, name, 1_900, stop=STOP) for name in "abcdefgh"))
        assert {each.finish_reason for each in results} == {"stop"}
        assert (await told(rig)).slept_by_pressure == 0
        await all_is_free(rig)


STOP = tuple(chr(each) for each in range(32, 127))
"""Any plain letter."""


@pytest.mark.one_in(1)
async def test_an_answer_beyond_the_budget_ends_where_the_memory_does(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + 3 * HELD) as rig:
        await rig.read("a", tokens_of(1, 240))
        result = await writing(rig, "a", 1_700)
        assert result.finish_reason == "length"
        assert 100 < len(result.tokens) == result.token_count - 240 < 3 * STEP_TOKENS - 240
        assert rig.live("a").state.is_consistent
        with pytest.raises(MemoryBudgetExceeded):
            await rig.service.append("a", tokens=tokens_of(2, 800))
        await all_is_free(rig)


@pytest.mark.one_in(1)
async def test_answers_that_crowd_each_other_all_end_and_are_as_alone(
    open_rig: Any, weights: int, tmp_path: Path
) -> None:
    """No two of them fit whole: those that came later give way, and come back."""
    names, count = "abc", 300
    async with open_rig(store=tmp_path / "alone") as rig:
        alone = {}
        for at, name in enumerate(names):
            await rig.read(name, tokens_of(at, 240), sampling=SAMPLED)
            alone[name] = (await writing(rig, name, count)).tokens
            last = await rig.fingerprint(name)
    async with open_rig(memory_budget=weights + 4 * HELD) as rig:
        await rig.read_own(names, 240, sampling=SAMPLED)
        async with listening(rig) as heard:
            tasks = await all_begun(rig, [writing(rig, name, count) for name in names])
            results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for name, result in zip(names, results, strict=True):
            assert (result.tokens, result.finish_reason) == (alone[name], "length")
        assert heard.of("memory_awaited")
        assert (await told(rig)).slept_by_pressure > 0
        if not rig.is_awake("c"):
            await rig.wake("c")
        assert await rig.fingerprint("c") == last
        await all_is_free(rig)


@pytest.mark.one_in(1)
async def test_a_client_that_leaves_while_its_answer_waits_loses_nothing_of_it(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + 4 * HELD) as rig:
        said = [user("one")]
        await rig.read("other", tokens_of(1, 300))
        other = rig.service._parts.sessions.residency.turns.take(rig.service._parts.sessions.resolve("other"))
        async with other:
            task = asyncio.ensure_future(converse(rig, said, max_tokens=600))
            await until(lambda: rig.service._parts.models.memory.info().waiting == 1)
            held = ledger(rig)
            task.cancel()
            await cancelled(task)
            assert ledger(rig) == held
        result = await converse(rig, said, max_tokens=600)
        assert result.session == "torpor://default/a"
        assert ledger(rig)[: len(held)] == held
        assert len(result.tokens) > len(held) - 40
        await all_is_free(rig)


async def test_an_answer_ends_where_the_journal_finds_no_room(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.read("a", tokens_of(1, 250))
    asked: list[int] = []

    def make_room(_store: Store, _uri: Any, record_bytes: int, _base: bytes | None = None) -> None:
        asked.append(record_bytes)
        if len(asked) > 2:
            raise NoSpace("The disk is full.")

    monkeypatch.setattr(Store, "make_room_to_acknowledge", make_room)
    result = await writing(rig, "a", 1_700)
    assert (result.finish_reason, result.token_count) == ("length", 512)
    assert asked[0] < 32 * 1024
    await all_is_free(rig)
