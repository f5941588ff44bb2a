"""Marks of a client in its transcript: a model of whole state keeps a checkpoint there. And how long it stays awake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torpor.daemon.sessions.transcripts import message_of
from torpor.snapshot.checkpoints import CHECKPOINT_TOKENS
from torpor.tests.daemon.conversing_rig import SYSTEM, assistant, converse, user
from torpor.tests.daemon.session_rig import Rigged, until

FIRST, SECOND = (user("".join(chr(97 + at % 26) for at in range(count))) for count in (700, 1100))


def marks_of(rig: Rigged, name: str = "a") -> list[int]:
    return [at for at in rig.live(name).state.checkpoints.positions if at % CHECKPOINT_TOKENS]


def end_of(rig: Rigged, said: list[Any]) -> int:
    """The place for a mark behind these messages."""
    tokens, half = len(rig.model.encode(rig.model.render(said, True), opening=False)), CHECKPOINT_TOKENS // 2
    return tokens - (tokens - half) % CHECKPOINT_TOKENS


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["gemma3", "mamba2"])
async def test_a_checkpoint_stands_at_each_mark_and_a_fork_there_computes_little(open_kind: Any, kind: str) -> None:
    async with open_kind(kind, endless=False) as rig:
        said = [SYSTEM, FIRST]
        said.append(assistant((await converse(rig, said, "ja", checkpoints=(1, 2))).text))
        assert marks_of(rig) == [end_of(rig, said[:2])], "the system text ends before the first place"
        said.append(SECOND)
        rig.live("a").state.checkpoints.budget_bytes = 16 * rig.live("a").state.checkpoints.record_bytes
        await converse(rig, said, "gut", checkpoints=(2, 4))
        assert marks_of(rig) == [end_of(rig, said[:2]), end_of(rig, said)]
        await rig.sleep("a")
        told = await rig.wake("a", at_token=end_of(rig, said))
        assert told.tokens_prefilled == 0
        assert marks_of(rig)[0] == end_of(rig, said[:2])


async def test_marks_change_no_token_and_no_bit(open_kind: Any) -> None:
    async with open_kind("mamba2", endless=False) as rig:
        one = await converse(rig, [SYSTEM, FIRST], "ja", checkpoints=(2,))
        await rig.service.delete("a")
        other = await converse(rig, [SYSTEM, FIRST], "ja", "b")
        assert (one.tokens, one.token_count) == (other.tokens, other.token_count)


async def test_a_model_that_goes_back_to_every_token_keeps_nothing(rig: Rigged) -> None:
    await converse(rig, [SYSTEM, FIRST], "ja", checkpoints=(2,))
    assert rig.live("a").state.checkpoints.positions == ()


async def test_a_new_conversation_that_begins_alike_takes_over_what_a_mark_kept(open_kind: Any) -> None:
    async with open_kind("mamba2", endless=False, prefix_reuse="exact") as rig:
        system = message_of("system", "Be brief. " * 40)
        await converse(rig, [system, user("one")], "eins", checkpoints=(1,))
        said = [system, SECOND]
        told = await converse(rig, said, "zwei", "b", checkpoints=(1, 2))
        assert (told.cached_tokens, CHECKPOINT_TOKENS) == (256, 512)
        assert marks_of(rig, "b") == [256, end_of(rig, said)]


async def test_a_session_stays_awake_as_long_as_is_wanted(open_rig: Any) -> None:
    async with open_rig(endless=False, idle_sleep=0.02) as rig:
        await converse(rig, [user("one")], "eins", "kept", keep_awake_s=600)
        await converse(rig, [user("two")], "zwei", "other")
        await until(lambda: len(rig.service._parts.sessions.residency.awake) == 1)
        assert rig.live("kept").state.tokens
        live = rig.live("kept")
        live.stay = replace(live.stay, awake_until=0.0)
        await until(lambda: not rig.service._parts.sessions.residency.awake)


async def test_a_session_that_is_wanted_awake_goes_last_and_nobody_is_refused_for_it(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", "kept", keep_awake_s=600)
    await converse(rig, [user("two")], "zwei", "other")
    residency = rig.service._parts.sessions.residency
    used = residency.memory.info()
    budget = used.weights_bytes + used.sessions_bytes + used.reserved_bytes
    await residency.memory.resize(budget - 1)
    await until(lambda: len(residency.awake) == 1)
    assert rig.live("kept").state.tokens
    await residency.memory.resize(budget - rig.live("kept").stay.held_bytes - 1)
    await until(lambda: not residency.awake)
