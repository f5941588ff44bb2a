"""Sessions of any lengths are read in one call, where their caches lie: with the bits of each alone where the ledger
says so, and within a tolerance elsewhere."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torpor.daemon.engine.asking import Decode
from torpor.daemon.engine.decoding import Decoder
from torpor.daemon.engine.generation import read
from torpor.daemon.errors import GenerationFailed
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel, load_model
from torpor.daemon.models.sharing import difference
from torpor.snapshot.canary import tolerance_of
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.passes import UNREPEATABLE
from torpor.snapshot.state import LiveState
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, Watched, all_begun, as_killed, tokens_of, writing

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

LENGTHS = (60, 3, 700, 257, 120, 2, 64, 255)
STEPS = 3
_BEGUN: dict[tuple[str, int], LiveState] = {}
_ALONE: dict[tuple[str, int, int], Any] = {}


@pytest.fixture(scope="module", params=["demo", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The demo model, whose small layers round otherwise beside others; and two of the 28 layers of the Qwen3-0.6B
    shape, with random weights. Their networks are watched."""
    source = DEMO_MODEL_FOLDER if request.param == "demo" else request.getfixturevalue("thin_qwen3")
    loaded = load_model(str(request.param), str(source), DigestCache(tmp_path_factory.mktemp("rounds") / "digests"))
    loaded = dataclasses.replace(loaded, network=Watched(loaded.network))
    assert loaded.can_read_in_rounds
    return loaded


def asked_of(model: LoadedModel, states: dict[int, LiveState], step: int) -> list[Decode]:
    """The token of each row at a step. states: by row."""
    return [Decode(model, state, 11 + (7 * row + step) % 97) for row, state in states.items()]


def commit(asked: Sequence[Decode], outcomes: Sequence[Any]) -> list[np.ndarray]:
    """The logits of each."""
    for each, logits in zip(asked, outcomes, strict=True):
        assert isinstance(logits, mx.array), logits
        each.state.tokens.append(each.token)
        each.state.last_logits = logits
    return [np.array(logits) for logits in outcomes]


def written(model: LoadedModel, decoder: Decoder, states: dict[int, LiveState], steps: int = STEPS) -> Any:
    """The logits of each row, step by step."""
    rounds = []
    for step in range(steps):
        asked = asked_of(model, states, step)
        rounds.append(commit(asked, decoder.decode(asked)))
    return list(zip(*rounds, strict=True))


def begun(model: LoadedModel, row: int) -> LiveState:
    """A session that has read its prompt, which is read once for all tests."""
    if (model.name, row) not in _BEGUN:
        state = model.new_state(mx.random.key(0))
        tokens = random.Random(row).choices(range(5, model.layout.vocabulary), k=LENGTHS[row])
        for _ in read(model, state, tokens, lambda *_: None):
            pass
        _BEGUN[model.name, row] = state
    return copy.deepcopy(_BEGUN[model.name, row])


def begun_in(model: LoadedModel, rows: Iterable[int]) -> dict[int, LiveState]:
    return {row: begun(model, row) for row in rows}


def alone(model: LoadedModel, rows: Iterable[int], steps: int = STEPS) -> Any:
    """As `written`, each in calls of its own."""
    for row in rows:
        if (model.name, row, steps) not in _ALONE:
            _ALONE[model.name, row, steps] = written(model, Decoder(1), begun_in(model, [row]), steps)[0]
    return [_ALONE[model.name, row, steps] for row in rows]


def assert_as_alone(model: LoadedModel, found: Any, wanted: Any, *, to_the_bit: bool) -> None:
    for mine, its in zip(found, wanted, strict=True):
        for one, other in zip(mine, its, strict=True):
            assert difference(mx.array(one), mx.array(other)) <= tolerance_of(model.compute_dtype)
            assert not to_the_bit or one.tobytes() == other.tobytes()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("count", [2, 5, 8])
def test_invariance_of_sessions_of_unlike_lengths_that_are_read_in_one_call(model: LoadedModel, count: int) -> None:
    repeats = model.company.repeats(model.network, count)
    states, decoder = begun_in(model, range(count)), Decoder(16)
    model.network.reset()
    found = written(model, decoder, states)
    assert model.network.rows == [count] * STEPS, "one call a round"
    assert decoder.batched_tokens == STEPS * count
    for state in states.values():
        assert list(state.passes)[-STEPS:] == [1 if repeats else UNREPEATABLE] * STEPS
        assert state.is_consistent
    assert_as_alone(model, found, alone(model, range(count)), to_the_bit=repeats)


@pytest.mark.one_in(1)
def test_sessions_leave_and_join_between_two_rounds_and_nothing_is_copied(model: LoadedModel) -> None:
    states, decoder = begun_in(model, range(3)), Decoder(16)
    held = {row: [id(cache) for cache in state.caches] for row, state in states.items()}
    first = written(model, decoder, states, 1)
    joining = begun_in(model, [3])
    second = written(model, decoder, {0: states[0], 2: states[2], **joining}, 1)
    third = written(model, decoder, {2: states[2]}, 1)
    assert {row: [id(cache) for cache in state.caches] for row, state in states.items()} == held
    grown = [len(state.tokens) - LENGTHS[row] for row, state in (states | joining).items()]
    assert grown == [2, 1, 3, 1]
    wanted = begun_in(model, [2])
    its = [written(model, Decoder(1), wanted, 1)[0] for _ in range(3)]
    repeats = model.company.repeats(model.network, 3)
    assert_as_alone(model, [first[2], second[1], third[0]], its, to_the_bit=repeats)


@pytest.mark.one_in(1)
def test_the_one_that_fails_is_told_and_the_others_read_on_lp10(model: LoadedModel) -> None:
    states, decoder = begun_in(model, range(3)), Decoder(16)
    broken = states[1].caches[0]
    broken.keys = mx.full(broken.keys.shape, float("nan"))
    asked = asked_of(model, states, 0)
    model.company.repeats(model.network, 3)  # a first round is tried
    model.network.reset()
    outcomes = decoder.decode(asked)
    assert model.network.rows == [3, 1, 1, 1], "once together, then each alone"
    assert isinstance(outcomes.pop(1), GenerationFailed)
    assert [states[row].caches[0].offset - LENGTHS[row] for row in range(3)] == [1, 0, 1]
    del asked[1]
    assert_as_alone(model, [[each] for each in commit(asked, outcomes)], alone(model, (0, 2), 1), to_the_bit=True)
    assert all(state.is_consistent for state in states.values())


@pytest.mark.one_in(1)
def test_rounds_that_fail_without_a_failing_session_end(model: LoadedModel) -> None:
    """Then the sessions go on in batches, or alone; none of them notices."""
    states, told = begun_in(model, range(2)), list[Any]()
    decoder = Decoder(16, told.append)

    def fail(_number: int, tokens: Any, cache: Any) -> None:
        if len(tokens) > 1 and hasattr(cache[0], "caches"):
            shape = (2, *cache[0].caches[0].keys.shape[1:])
            cache[0].update_and_fetch(*(mx.ones(shape)[:, :, :1] for _ in "kv"))
            raise RuntimeError("no rounds")

    model.network.before = fail
    try:
        found = written(model, decoder, states, 5)
    finally:
        model.network.reset()
    assert len(told) == 3
    assert_as_alone(model, found, alone(model, range(2), 5), to_the_bit=False)


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("asked", "read"), [(2, 3), (3, 3), (4, 6), (5, 6)])
def test_who_is_read_along_takes_a_free_row_and_never_a_call(model: LoadedModel, asked: int, read: int) -> None:
    """In rounds of three."""
    each, decoder = asked_of(model, begun_in(model, range(6)), 0), Decoder(3)
    for rows in (2, 3):
        model.company.repeats(model.network, rows)
    model.network.reset()
    outcomes = decoder.decode(each[:asked], each[asked:6])
    assert [logits is not None for logits in outcomes] == [True] * read + [False] * (6 - read)
    assert model.network.rows == [3] * (read // 3)


async def test_a_cancelled_one_keeps_whole_tokens_and_the_others_are_as_without_it_qx16(open_rig: Any) -> None:
    prompts = {name: tokens_of(at, 9 + 130 * at) for at, name in enumerate("abc")}
    async with open_rig(batch=4) as rig:
        for name, prompt in prompts.items():
            await rig.read(name, prompt)
        await together(rig, "abc", 2)
        gate = rig.network.hold_at(5)
        tasks = await all_begun(rig, [writing(rig, name, 20) for name in "abc"])
        await gate.reached()
        assert all(rig.live(name).state.caches for name in "abc"), "they stay where they are"
        tasks[1].cancel()
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert tasks[1].cancelled()
        assert {name: len(rig.live(name).state.tokens) - len(prompts[name]) for name in "ac"} == {"a": 22, "c": 22}
        assert 0 < len(rig.live("b").state.tokens) - len(prompts["b"]) < 22
        assert all(rig.live(name).state.is_consistent for name in "abc")


async def together(rig: Rigged, names: str, count: int) -> None:
    tasks = await all_begun(rig, [writing(rig, name, count) for name in names])
    await asyncio.gather(*tasks)


@pytest.mark.one_in(1)
async def test_what_was_read_in_rounds_sleeps_and_is_read_again_to_the_same_bits_behind_a_kill(
    open_rig: Any, store: Path, thin_qwen3: Path
) -> None:
    """Half of it stands in a version, the other half in the journal alone."""
    async with open_rig(thin_qwen3, batch=4) as rig:
        for at, name in enumerate("abc"):
            await rig.read(name, tokens_of(at, 5 + 150 * at), sampling=SAMPLED)
        await together(rig, "abc", 5)
        for name in "ab":
            await rig.sleep_and_wake(name)
        await together(rig, "abc", 4)
        assert rig.network.rows.count(3) >= 7
        repeats = all(UNREPEATABLE not in list(rig.live(name).state.passes) for name in "abc")
        assert repeats or not all(rig.model.company.repeats(rig.network, rows) for rows in (2, 3))
        killed, had = as_killed(store), {name: await rig.fingerprint(name) for name in "abc"}
        went_on = {name: await rig.write(name, 3) for name in "abc"}
    async with open_rig(thin_qwen3, store=killed) as rig:
        for name, was in had.items():
            woken = await rig.wake(name)
            assert woken.provenance.recomputed is not None
            assert woken.provenance.recomputed.same_logits or not repeats
            if repeats:
                assert await rig.fingerprint(name) == was
                assert await rig.write(name, 3) == went_on[name]
