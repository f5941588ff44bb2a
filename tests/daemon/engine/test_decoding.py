"""Sessions that write at the same time decode in one call, and each has a state of its own: in rounds, or in batches
where the caches are not plain or the model attends otherwise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torpor.daemon.engine.decoding import MOST_PADDING, _Batch, is_fit_for_batches
from torpor.daemon.errors import GenerationFailed
from torpor.snapshot import batches
from torpor.snapshot.caches import length
from torpor.snapshot.kinds import kind_of, leaves
from torpor.snapshot.passes import UNREPEATABLE
from torpor.snapshot.state import LiveState
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, all_begun, ignore, listening, tokens_of, until, writing

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

Work = Coroutine[Any, Any, Any]
KINDS = ["plain", "gemma3_text", "lfm2", "deepseek_v3", "qwen3_next"]
BATCHED = "deepseek_v3"  # plain caches, over which it attends in its own way
NAMES = ("a", "b", "c", "d")
TOLERANCE = 2e-3


@pytest.fixture
def open_batching(open_kind: Any) -> Callable[..., Any]:
    """A service whose sessions decode in batches; of four at most."""
    return lambda kind="plain", **options: open_kind(kind, **{"batch": 4, **options})


async def together(rig: Rigged, counts: dict[str, int]) -> dict[str, Any]:
    """What sessions write at the same time."""
    tasks = await all_begun(rig, [writing(rig, name, count) for name, count in counts.items()])
    return dict(zip(counts, await asyncio.gather(*tasks, return_exceptions=True), strict=True))


async def values_of(rig: Rigged, name: str) -> list[np.ndarray]:
    """All numbers of a session's state, in the order in which its tokens came."""
    return await rig.service._parts.models.engine.call(lambda: numbers_of(rig.live(name).state))


def numbers_of(state: LiveState) -> list[np.ndarray]:
    found = []
    for _, cache in leaves(state.caches):
        kind = kind_of(cache)
        spans = [array[..., : kind.offset(cache), :] for array in kind.spans(cache).values()]
        record = kind.record(cache) if not kind.by_token else None
        arrays = list(record.arrays.values()) if record else []
        if hasattr(cache, "_temporal_order"):  # a window's rows may lie in any order
            arrays = [cache._temporal_order(array)[..., -min(cache.max_size, cache.offset) :, :] for array in arrays]
        found += [np.asarray(array.astype(mx.float32)) for array in (*spans, *arrays)]
    assert state.last_logits is not None
    return [*found, np.asarray(state.last_logits)]


async def assert_like_alone(rig: Rigged, name: str, prompt: list[int]) -> None:
    """The state is what reading the same tokens makes, but for the last bits; in one span."""
    state = rig.live(name).state
    control = f"{name}-control"
    await rig.read(control, prompt)
    for token in list(state.tokens)[len(prompt) :]:
        await rig.service.append(control, tokens=[token])
    assert rig.live(control).state.tokens == state.tokens
    assert state.is_consistent
    for mine, its in zip(await values_of(rig, name), await values_of(rig, control), strict=True):
        np.testing.assert_allclose(mine, its, atol=TOLERANCE, rtol=TOLERANCE)
    await rig.service.delete(control)


@pytest.fixture
def rig(open_batching: Any) -> Any:
    return open_batching()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_sessions_that_write_together_decode_in_one_call_and_each_has_its_own_state_qx1(
    open_batching: Any, kind: str
) -> None:
    prompts = {name: tokens_of(at, 300 + 17 * at) for at, name in enumerate(NAMES)}
    async with open_batching(kind) as rig:
        for name, prompt in prompts.items():
            await rig.read(name, prompt)
        tried = await together(rig, dict.fromkeys(NAMES, 2))
        rig.network.reset()
        written = await together(rig, dict.fromkeys(NAMES, 20))
        assert max(rig.network.rows) == 4
        assert rig.network.rows.count(4) >= 18
        batched = sum(rows for rows in rig.network.rows if rows > 1)
        assert (await rig.service.status()).batched_tokens == 4 * 2 + batched
        for name, prompt in prompts.items():
            assert len(written[name].tokens) == 20
            assert list(rig.live(name).state.tokens) == [*prompt, *tried[name].tokens, *written[name].tokens]
            await assert_like_alone(rig, name, prompt)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_sessions_come_and_go_while_others_write(open_batching: Any, kind: str) -> None:
    """Six sessions of different lengths, which end at different tokens, go through batches of four."""
    prompts = {f"s{at}": tokens_of(at, 40 + 6 * at) for at in range(6)}
    async with open_batching(kind) as rig:
        for name, prompt in prompts.items():
            await rig.read(name, prompt)
        rig.network.reset()
        await together(rig, {name: 5 + 9 * at for at, name in enumerate(prompts)})
        assert set(rig.network.rows) >= {2, 3, 4}
        for name, prompt in prompts.items():
            await assert_like_alone(rig, name, prompt)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_background_sessions_give_rows_up_and_get_them_back_and_each_has_its_own_state(
    open_batching: Any, kind: str
) -> None:
    """Eight sessions of different lengths, every other one in the background, of which normal ones come when the batch
    is full."""
    prompts = {f"s{at}": tokens_of(at, 40 + 6 * at) for at in range(8)}
    async with open_batching(kind) as rig:
        for name, prompt in prompts.items():
            await rig.read(name, prompt)
        rig.network.reset()
        counts = {name: 5 + 9 * at for at, name in enumerate(prompts)}
        background = list(prompts)[::2]
        works = [writing(rig, name, counts[name], priority="background") for name in background]
        tasks = await all_begun(rig, works)
        for at, name in enumerate(list(prompts)[1::2]):
            await until(lambda at=at: len(rig.network.rows) > 8 * (at + 1))  # type: ignore[misc]
            tasks.append(asyncio.ensure_future(writing(rig, name, counts[name])))
        assert sorted(len(each.tokens) for each in await asyncio.gather(*tasks)) == sorted(counts.values())
        assert max(rig.network.rows) == 4
        for name, prompt in prompts.items():
            await assert_like_alone(rig, name, prompt)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_decoded_in_a_batch_sleeps_and_wakes_bit_for_bit(open_batching: Any, kind: str) -> None:
    """Promise 2. The ledger knows which tokens were read beside others: the canary asks for their very bits no more."""
    async with open_batching(kind) as rig:
        for at, name in enumerate(NAMES):
            await rig.read(name, tokens_of(at, 300 + at), sampling=SAMPLED)
        await together(rig, dict.fromkeys(NAMES, 30))
        before = {name: await rig.fingerprint(name) for name in NAMES}
        known = rig.model.company.in_rounds and rig.model.company.repeats(rig.network, 4)
        assert all((UNREPEATABLE in list(rig.live(name).state.passes)) != known for name in NAMES)
        for name in NAMES:
            await rig.sleep(name)
        for name in NAMES:
            report = await rig.wake(name)
            assert report.tokens_prefilled == 0
            assert report.canary in ("same_bits", "within_tolerance")
            assert await rig.fingerprint(name) == before[name]
            assert (UNREPEATABLE in list(rig.live(name).state.passes)) != known


@pytest.mark.one_in(1)
async def test_a_proven_generation_decodes_alone_beside_a_batch(rig: Rigged) -> None:
    await rig.read_each((*NAMES, "control"), tokens_of(7, 300), sampling=SAMPLED)
    rig.network.reset()
    work = [rig.write("a", 20), *(writing(rig, name, 30) for name in NAMES[1:])]
    proven, *others = await all_begun(rig, work)
    await asyncio.gather(proven, *others)
    assert 3 in rig.network.rows
    assert await rig.write("control", 20) == proven.result()


@pytest.mark.one_in(2)
async def test_logits_of_one_that_are_nan_fail_that_one_alone_lp10(rig: Rigged) -> None:
    prompts = {name: tokens_of(at, 100 + at) for at, name in enumerate(NAMES)}
    for name, prompt in prompts.items():
        await rig.read(name, prompt)
    await together(rig, dict.fromkeys(NAMES, 2))  # the model has been tried
    rig.network.reset()
    victim, calls = rig.live("b").state, []

    def spoil(_number: int, logits: mx.array) -> mx.array:
        if len(victim.tokens) < 115:
            return logits
        if len(logits) == 4:
            return mx.concatenate([logits[:1], logits[1:2] * mx.nan, logits[2:]])
        return logits * mx.nan if calls[-1] is victim.caches else logits

    rig.network.before = lambda _number, _tokens, cache: calls.append(cache)
    rig.network.after = spoil
    async with listening(rig) as heard:
        found = await together(rig, dict.fromkeys(NAMES, 30))
    assert isinstance(found.pop("b"), GenerationFailed)
    assert heard.of("batch_failed") == [{"model": rig.model.name, "sessions": 4, "code": GenerationFailed.code}]
    assert all(len(each.tokens) == 30 for each in found.values())
    rig.network.reset()
    for name, prompt in prompts.items():
        await assert_like_alone(rig, name, prompt)


@pytest.mark.one_in(2)
async def test_a_model_whose_batches_fail_decodes_one_by_one_and_nobody_notices(rig: Rigged) -> None:
    prompts = {name: tokens_of(at, 100 + at) for at, name in enumerate(NAMES)}
    for name, prompt in prompts.items():
        await rig.read(name, prompt)
    rig.network.reset()
    failed = []

    def fail(number: int, tokens: Any, cache: Any) -> None:
        if len(tokens) > 2:  # not where the model is tried
            failed.append(number)
            grown = mx.ones((len(tokens), 2, 1, 24))
            cache[0].update_and_fetch(grown, grown)
            raise RuntimeError("this model knows no batches")

    rig.network.before = fail
    async with listening(rig) as heard:
        assert all(len(each.tokens) == 20 for each in (await together(rig, dict.fromkeys(NAMES, 20))).values())
    assert len(failed) == 6, "neither rounds nor batches are tried again"
    assert [each["sessions"] for each in heard.of("batch_failed")] == [4] * 6
    for name, prompt in prompts.items():
        await assert_like_alone(rig, name, prompt)


async def test_a_model_that_computes_something_else_in_a_batch_never_decodes_in_one(rig: Rigged) -> None:
    assert await rig.service._parts.models.engine.call(lambda: is_fit_for_batches(rig.model))
    rig.network.after = lambda _, logits: logits if len(logits) == 1 else logits[::-1]
    assert not await rig.service._parts.models.engine.call(lambda: is_fit_for_batches(rig.model))
    await rig.read_own(NAMES, 60)
    rig.network.rows.clear()
    await together(rig, dict.fromkeys(NAMES, 20))
    assert rig.network.rows.count(2) <= 2, "the trials of rounds and of batches"
    assert max(rig.network.rows) <= 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", [3, 9])
async def test_giving_up_in_a_batch_keeps_whole_tokens_and_the_others_go_on_qx16(rig: Rigged, call: int) -> None:
    prompts = {name: tokens_of(at, 100 + at) for at, name in enumerate(NAMES)}
    for name, prompt in prompts.items():
        await rig.read(name, prompt)
    await together(rig, dict.fromkeys(NAMES, 2))  # the model has been tried
    gate = rig.network.hold_at(call)
    tasks = await all_begun(rig, [writing(rig, name, 30) for name in NAMES])
    await gate.reached()
    held = len(rig.live("c").state.tokens)
    tasks[2].cancel()
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[2].cancelled()
    assert len(rig.live("c").state.tokens) <= held + 1
    for name, prompt in prompts.items():
        await assert_like_alone(rig, name, prompt)


@pytest.mark.one_in(2)
async def test_a_session_that_is_much_longer_than_the_others_is_not_batched_with_them(open_batching: Any) -> None:
    async with open_batching(BATCHED) as rig:
        for name, count in (("a", 100), ("b", 110), ("c", 1000), ("d", 1050)):
            await rig.read(name, tokens_of(1, count))
        padded: list[float] = []

        def watch(_number: int, tokens: Any, cache: Any) -> None:
            if len(tokens) > 1:
                lengths = np.asarray(cache[0].offset).astype(int)
                padded.append(lengths.max() * len(lengths) / lengths.sum() - 1)

        await together(rig, dict.fromkeys(NAMES, 2))
        rig.network.reset()
        rig.network.before = watch
        await together(rig, dict.fromkeys(NAMES, 20))
        assert padded
        assert max(padded) <= MOST_PADDING
        assert max(rig.network.rows) == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("late", "joins"), [(1000, False), (130, True)])
async def test_who_comes_late_joins_a_running_batch_only_where_that_wastes_no_more_than_a_quarter(
    open_batching: Any, late: int, joins: bool
) -> None:
    prompts = {name: tokens_of(1, count) for name, count in (("a", 100), ("b", 110), ("c", late))}
    async with open_batching(BATCHED) as rig:
        for name, prompt in prompts.items():
            await rig.read(name, prompt)
        await together(rig, dict.fromkeys("ab", 2))  # and the model has been tried
        rig.network.reset()
        gate = rig.network.hold_at(1)
        running = [asyncio.ensure_future(writing(rig, name, 60)) for name in "ab"]
        await gate.reached()
        late_one = asyncio.ensure_future(writing(rig, "c", 20))
        await until(lambda: rig.service._parts.models.engine._inbox.qsize() > 0)
        gate.open()
        await asyncio.gather(late_one, *running)
        assert 2 in rig.network.rows
        assert rig.network.rows.count(3) in (range(18, 21) if joins else [0])
        for name, prompt in prompts.items():
            await assert_like_alone(rig, name, prompt)


def test_who_joins_is_padded_to_the_longest_row_also_where_its_state_has_left() -> None:
    """All rows are as wide as that one until they are copied."""

    def state(count: int) -> Any:
        return SimpleNamespace(tokens=tokens_of(1, count))

    model: Any = None
    batch = _Batch(model, [], ignore, rows=[None, *(state(800) for _ in range(3))], width=1000)
    assert not batch.has_room([state(700)], 16)
    batch.width = 800
    assert batch.has_room([state(700)], 16)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("short_calls")
async def test_a_long_text_does_not_stop_a_stream(rig: Rigged) -> None:
    """Reading and writing share the engine by time: between chunks of the text, others write. On a busy machine a step
    may look so long that the next chunk comes first."""
    await rig.read("a", tokens_of(1, 100))
    await rig.service.create("long")
    rig.network.reset()
    reading = rig.service.append("long", tokens=tokens_of(2, 1800))
    tasks = await all_begun(rig, [reading, writing(rig, "a", 1900)])
    await tasks[0]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    calls = rig.network.calls
    chunks = [at for at, tokens in enumerate(calls) if tokens > 1]
    between = [calls[one + 1 : other].count(1) for one, other in itertools.pairwise(chunks)]
    assert len(chunks) > 5
    assert between.count(0) <= len(between) / 4, f"the stream goes on between the chunks: {between}"


@pytest.mark.one_in(1)
async def test_a_session_takes_a_prefix_over_from_one_that_is_in_a_batch(open_batching: Any) -> None:
    async with open_batching(BATCHED, prefix_reuse="longest") as rig:
        prompt = tokens_of(1, 600)
        for name in NAMES[:3]:
            await rig.read(name, prompt if name == "a" else tokens_of(5, 610))
        await together(rig, dict.fromkeys(NAMES[:3], 2))
        await rig.service.create("late")
        gate = rig.network.hold_at(8)
        tasks = await all_begun(rig, [writing(rig, name, 40) for name in NAMES[:3]])
        await gate.reached()
        assert not rig.live("a").state.caches, "they are in a batch"
        late = [*prompt, *tokens_of(9, 20)]
        reading = asyncio.ensure_future(rig.service.append("late", tokens=late))
        await until(lambda: rig.service._parts.models.engine._inbox.qsize() >= 1)
        gate.open()
        found, *_ = await asyncio.gather(reading, *tasks)
        assert found.cached_tokens == 600
        await assert_like_alone(rig, "a", prompt)
        await assert_like_alone(rig, "late", late)


async def test_the_state_of_a_session_in_a_batch_is_nowhere_twice(open_batching: Any) -> None:
    """While it decodes in a batch its own caches are gone; afterwards it has its own again, of its own length."""
    async with open_batching(BATCHED) as rig:
        await rig.read_own(NAMES, 300)
        await together(rig, dict.fromkeys(NAMES, 2))
        gate = rig.network.hold_at(8)
        tasks = await all_begun(rig, [writing(rig, name, 20) for name in NAMES])
        await gate.reached()
        assert all(not rig.live(name).state.caches for name in NAMES)
        assert all(info.resident_bytes > 0 for info in await rig.service.list_sessions())
        gate.open()
        await asyncio.gather(*tasks)
        assert all(length(rig.live(name).state.caches) == 322 for name in NAMES)
        assert not rig.service._parts.models.engine._decoder._batches


class Faults:
    """Lets the work on batches fail once, at the step of one number, as MLX does where there is no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.at = 0, 0
        for name in ("_arrays", "_extracted"):
            monkeypatch.setattr(batches, name, self._failing(getattr(batches, name)))

    def _failing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            self.steps += 1
            if self.steps == self.at:
                raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
            return work(*arguments)

        return step


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [BATCHED, "gemma3_text", "lfm2"])
async def test_no_fault_in_a_batch_ends_the_engine_and_every_session_is_whole_or_back_at_its_last_sleep(
    open_batching: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory lacks for putting a batch together, coming, going or taking it apart, at whatever step."""
    prompts = {name: tokens_of(at, 60 + 3 * at) for at, name in enumerate(NAMES)}
    counts = {"a": 4, "b": 9, "c": 9, "d": 12}
    async with open_batching(kind) as rig:
        faults = Faults(monkeypatch)
        for name, prompt in prompts.items():
            await rig.asleep(name, prompt)
        lost = whole = 0
        faults.steps = 0
        await together(rig, counts)
        steps = faults.steps
        assert steps > 20
        for at in range(1, steps + 1, 1 if kind == BATCHED else 5):
            for name in NAMES:  # from the sleep before: the beginning is the same each time
                await rig.service.sleep(name)
                await rig.wake(name, 1)
            rig.service._parts.models.engine._decoder._failures.clear()
            faults.steps, faults.at = 0, at
            found = await together(rig, counts)
            faults.at = 0
            for name, result in found.items():
                if isinstance(result, GenerationFailed):
                    assert "lost" in str(result)
                    assert not rig.is_awake(name)
                    lost += 1
                else:
                    assert len(result.tokens) == counts[name]
                    assert rig.live(name).state.is_consistent
                    assert len(rig.live(name).state.tokens) == len(prompts[name]) + counts[name]
                    whole += 1
            assert not rig.service._parts.models.engine._decoder._batches
        assert whole > lost
        assert lost or kind != BATCHED, "each step of one was tried, those that lose a state too"
        for name, prompt in prompts.items():
            await rig.wake(name)
            if len(rig.live(name).state.tokens) > len(prompt):
                await assert_like_alone(rig, name, prompt)


@pytest.mark.parametrize("ends", [(5, 45), (45, 45)])
async def test_a_session_that_leaves_a_batch_takes_no_more_memory_than_it_had_room_for(
    open_batching: Any, ends: tuple[int, int]
) -> None:
    """It had the rows for all that it was to write, so none were reserved: it must not grow by others."""
    async with open_batching(BATCHED) as rig:
        await together_read(rig)
        had = {name: rig.live(name).resident_bytes for name in "ab"}
        await together(rig, dict(zip("ab", ends, strict=True)))
        assert (await rig.service.status()).batched_tokens > 0
        assert {name: rig.live(name).resident_bytes for name in "ab"} == had


async def together_read(rig: Rigged) -> None:
    await rig.read_own("ab", 200)
