"""Models come into memory when they are needed and leave it for others, and no session can tell."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import random
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.daemon.errors import MemoryBudgetExceeded, ModelInUse, ModelUnavailable, UnknownModel
from torpor.daemon.memory import loading, memory, model_registry
from torpor.daemon.models.adapters import AdapterChoice
from torpor.daemon.models.models import KvChoice, LoadedModel, estimate_bytes
from torpor.snapshot import memory as system_memory
from torpor.snapshot.errors import IdentityMismatch, ModelFilesMissing, NotEnoughMemory
from torpor.tests.daemon.adapter_making import write_adapter
from torpor.tests.daemon.session_rig import (
    DEADLINE_S,
    HELD,
    SAMPLED,
    Gate,
    Rigged,
    all_begun,
    cancelled,
    fingerprint_of,
    ignore,
    tokens_of,
    until,
)
from torpor.tests.hub_rig import serving
from torpor.tests.model_making import write_model

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

Opened = Callable[..., Any]
ROOM = 2 * HELD
"""For a session of up to 256 tokens while it is read, and less than a model takes."""


def loaded(rig: Rigged) -> list[str]:
    return [model.name for model in rig.service._parts.models.shelf.loaded()]


def resident_bytes(rig: Rigged) -> int:
    sessions = tuple(rig.service._parts.sessions.residency.awake.values())
    return rig.service._parts.models.shelf.weights_bytes() + sum(session.resident_bytes for session in sessions)


class Loads:
    """The loads of models: their names, and the threads that they are done on. Those of `held` stop at the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.threads: list[str] = []
        self.held: set[str] = set()
        self.error: Exception | None = None
        self.gate = Gate()
        load = loading.load_model

        def load_as_told(name: str, *args: Any) -> LoadedModel:
            self.names.append(name)
            self.threads.append(threading.current_thread().name)
            if self.error is not None:
                raise self.error
            if name in self.held:
                self.gate.pass_through()
            return load(name, *args)

        monkeypatch.setattr(loading, "load_model", load_as_told)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


async def play(rig: Rigged, name: str, rounds: int = 3) -> list[Any]:
    """What a session says, a few times."""
    return [(await rig.write(name, 4))[0] for _ in range(rounds)]


# --- on use


@pytest.fixture
def rig(opened: Any) -> Any:
    return opened()


async def test_a_model_is_loaded_by_the_first_request_that_needs_it(rig: Rigged, weights: int) -> None:
    assert loaded(rig) == []
    (one, two) = (await rig.service.status()).models
    assert (one.resident, one.identity, one.context_tokens, one.weights_bytes) == (False, None, None, 0)
    await rig.read("a", tokens_of(1, 50), model="two")
    assert loaded(rig) == ["two"]
    (one, two) = (await rig.service.status()).models
    assert (two.resident, two.loads, two.sessions_awake, two.weights_bytes) == (True, 1, 1, weights)
    assert one.loads == 0
    await rig.service.create("b")
    assert loaded(rig) == ["one", "two"], "the first is the default"


async def test_a_wake_loads_the_model_that_the_session_slept_with(opened: Opened) -> None:
    async with opened() as rig:
        await rig.asleep("a", tokens_of(1, 50), model="two", sampling=SAMPLED)
        said = await rig.write("a", 5)
        await rig.sleep("a")
    async with opened() as rig:
        woken = await rig.wake("a", version=1)
        assert (woken.tokens_prefilled, loaded(rig)) == (0, ["two"])
        assert await rig.write("a", 5) == said


async def test_models_of_the_start_are_there_and_the_others_are_looked_at(
    opened: Opened, tmp_path: Path, store: Path
) -> None:
    async with opened(one={"at_start": True}) as rig:
        assert loaded(rig) == ["one"]
    with pytest.raises(ModelUnavailable):
        async with opened(two={"source": str(tmp_path / "nowhere")}):
            pass
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFilesMissing):
        async with opened(two={"source": str(tmp_path / "empty")}):
            pass


async def test_many_requests_for_one_model_wait_for_one_load(rig: Rigged, loads: Loads) -> None:
    await asyncio.gather(*(rig.read(f"s{at}", tokens_of(at, 20), model="two") for at in range(8)))
    assert loads.names == ["two"]


async def test_who_has_waited_for_a_load_is_at_work_as_soon_as_that_ends(
    opened: Opened, loads: Loads, weights: int
) -> None:
    """The request for the other model waits for this one to be free: it is not told that it could never be."""
    loads.held = {"two"}
    async with opened(memory_budget=weights + ROOM) as rig:
        ordered = asyncio.ensure_future(rig.service.load_model(model="two"))
        await loads.gate.reached()  # it has its memory: else the other could be before it
        joined = asyncio.ensure_future(rig.service.create("a", model="two"))
        await until(lambda: len(rig.service._parts.models.shelf.places["two"].holders) == 2)
        other = asyncio.ensure_future(rig.service.create("b", model="one"))
        await until(lambda: rig.service._parts.models.memory.info().waiting == 1)
        loads.gate.open()
        await asyncio.gather(ordered, joined, other)
        assert loaded(rig) == ["one"]


async def test_a_load_that_fails_is_the_error_of_all_that_wait_and_is_tried_again_qc15(
    opened: Opened, loads: Loads
) -> None:
    loads.error = MemoryError("no memory for weights")
    async with opened() as rig:
        requests = [rig.service.create(f"s{at}", model="two") for at in range(3)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(error) for error in errors] == [ModelUnavailable] * 3
        assert len({id(error) for error in errors}) == 3
        info = (await rig.service.status()).models[1]
        assert "no memory for weights" in (info.problem or "")
        memory = (await rig.service.status()).memory
        assert (memory.reserved_bytes, memory.weights_bytes) == (0, 0)
        loads.error = None
        await rig.read("s0", tokens_of(1, 5), model="two")
        assert (await rig.service.status()).models[1].problem is None


async def test_a_request_that_is_aborted_while_its_model_loads_leaves_a_model_that_serves_the_next_qc15(
    opened: Opened, loads: Loads
) -> None:
    loads.held = {"two"}
    async with opened() as rig:
        first = asyncio.ensure_future(rig.service.create("a", model="two"))
        await loads.gate.reached()
        second = asyncio.ensure_future(rig.service.create("b", model="two"))
        first.cancel()
        await asyncio.sleep(0)
        loads.gate.open()
        await cancelled(first)
        await second
        await rig.service.append("b", tokens=tokens_of(1, 20))
        assert loads.names == ["two"], "what the first had begun was of use to the second"
        await rig.sleep("b")
        await rig.service.unload_model(model="two")
        assert loaded(rig) == []
        await rig.write("b", 3)
        assert (await rig.service.status()).memory.reserved_bytes == 0


async def test_another_models_stream_goes_on_while_one_loads(opened: Opened, loads: Loads) -> None:
    loads.held = {"two"}
    async with opened(one={"at_start": True}) as rig:
        await rig.read("a", tokens_of(1, 20))
        waiting = asyncio.ensure_future(rig.service.create("b", model="two"))
        await loads.gate.reached()
        assert (await rig.service.status()).models[1].loading
        assert len((await rig.write("a", 8))[0]) > 0
        assert not waiting.done()
        assert loads.threads[1:] == ["torpor-load"]
        loads.gate.open()
        await waiting


@pytest.mark.one_in(2)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not say which threads there are")
async def test_loads_one_after_the_other_leave_no_thread_of_the_system_behind(rig: Rigged) -> None:
    counts = []
    for _ in range(10):
        for name in ("one", "two"):
            assert (await rig.service.load_model(model=name)).resident
            await rig.service.unload_model(model=name)
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts[-1] - counts[1] < 8, "18 loads; asyncio's own pool may still grow by a few threads"


async def test_models_that_load_at_once_do_not_wait_for_each_other_and_their_threads_end_with_the_service(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, load = threading.Barrier(2, timeout=30), loading.load_model

    def together(name: str, *args: Any) -> LoadedModel:
        both.wait()
        return load(name, *args)

    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "torpor-load"}

    monkeypatch.setattr(loading, "load_model", together)
    before = threads()  # a service of another test may still let its own end
    async with opened() as rig:
        await asyncio.gather(rig.service.load_model(model="one"), rig.service.load_model(model="two"))
        assert len(threads() - before) == 2
    await until(lambda: threads() <= before)


@pytest.mark.one_in(2)
async def test_a_model_computes_the_same_wherever_it_was_loaded(opened: Opened, models_of_kinds: Any) -> None:
    for kind in ("qwen3", "gemma3", "mamba2", "qwen3_next"):
        async with opened(two={"source": str(models_of_kinds(kind))}) as rig:
            await rig.read(kind, tokens_of(1, 300), model="two", sampling=SAMPLED)
            first = await rig.write(kind, 5)
            await rig.service.unload_model(model="two")
            await rig.wake(kind, at_token=300)
            again = await rig.write(kind, 5)
            assert first[1] == again[1] or kind == "", "the same logits after an unload and a load"
            await rig.service.delete(kind)


# --- for others


@pytest.mark.one_in(2)
async def test_two_models_that_do_not_fit_together_serve_their_sessions_in_turn(opened: Opened, weights: int) -> None:
    async with opened() as rig:
        for model in ("one", "two"):
            await rig.read(f"{model}-a", tokens_of(3, 60), model=model, sampling=SAMPLED)
        solo = {name: await play(rig, name) for name in ("one-a", "two-a")}
        for name in solo:
            await rig.service.delete(name)
    budget = weights + ROOM
    async with opened(memory_budget=budget) as rig:
        for model in ("one", "two"):
            await rig.read(f"{model}-a", tokens_of(3, 60), model=model, sampling=SAMPLED)
            assert loaded(rig) == [model]
        said: dict[str, list[Any]] = {"one-a": [], "two-a": []}
        for _ in range(3):
            for name in said:
                said[name].append((await rig.write(name, 4))[0])
                assert resident_bytes(rig) <= budget
        assert said == solo
        status = await rig.service.status()
        assert min(model.loads for model in status.models) >= 4
        assert status.memory.slept_by_pressure >= 5


@pytest.mark.one_in(2)
async def test_many_clients_on_two_models_that_do_not_fit_together_all_get_what_they_would_alone(
    opened: Opened, weights: int
) -> None:
    names = {f"{model}-{at}": model for model in ("one", "two") for at in range(3)}

    async def client(rig: Rigged, name: str) -> list[Any]:
        await rig.read(name, tokens_of(len(name), 60), model=names[name], sampling=SAMPLED)
        return await play(rig, name)

    async with opened() as rig:
        solo = {name: await client(rig, name) for name in names}
        for name in names:
            await rig.service.delete(name)
    budget = weights + ROOM
    async with opened(memory_budget=budget) as rig:
        peaks: list[int] = []
        watching = asyncio.ensure_future(_watch(rig, peaks))
        order = list(names)
        random.Random(5).shuffle(order)
        found = await asyncio.wait_for(asyncio.gather(*(client(rig, name) for name in order)), 60)
        watching.cancel()
        assert dict(zip(order, found, strict=True)) == solo
        assert max(peaks) <= budget
        memory = (await rig.service.status()).memory
        assert (memory.reserved_bytes, memory.waiting) == (0, 0)


async def _watch(rig: Rigged, peaks: list[int]) -> None:
    while True:
        peaks.append(resident_bytes(rig))
        await asyncio.sleep(0.0005)


async def test_a_load_that_has_begun_is_answered_as_done_when_it_is_cancelled(rig: Rigged, loads: Loads) -> None:
    loads.held = {"two"}
    asking = asyncio.ensure_future(rig.service.load_model(model="two"))
    await loads.gate.reached()
    asking.cancel()
    await asyncio.sleep(0)
    loads.gate.open()
    assert (await asking).resident
    assert loaded(rig) == ["two"]


async def test_what_nobody_uses_leaves_for_a_model_and_what_is_in_use_does_not(opened: Opened, weights: int) -> None:
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.read("a", tokens_of(1, 50), model="one")
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            waiting = asyncio.ensure_future(rig.service.create("b", model="two"))
            await until(lambda: bool(rig.service._parts.models.memory.info().waiting))
            assert loaded(rig) == ["one"]
            assert rig.is_awake("a")
        await waiting
        assert loaded(rig) == ["two"]
        assert not rig.is_awake("a")


async def test_a_pinned_model_stays_and_what_then_can_never_fit_is_refused_with_both_sizes(
    opened: Opened, weights: int
) -> None:
    budget = weights + ROOM
    async with opened(one={"pinned": True}, memory_budget=budget) as rig:
        await rig.read("a", tokens_of(1, 50), model="one")
        with pytest.raises(MemoryBudgetExceeded, match="Model 'two' needs") as refusal:
            await rig.service.create("b", model="two")
        assert (refusal.value.wanted_bytes, refusal.value.budget_bytes) == (weights, budget)
        assert (loaded(rig), rig.is_awake("a")) == (["one"], True), "a refusal changes nothing (QX18)"
        assert (await rig.service.status()).memory.slept_by_pressure == 0


async def test_a_model_larger_than_the_budget_is_refused_before_it_is_loaded(opened: Opened, weights: int) -> None:
    async with opened(memory_budget=weights - 1) as rig:
        with pytest.raises(MemoryBudgetExceeded):
            await rig.service.load_model(model="two")
        assert (await rig.service.status()).models[1].loads == 0


async def test_a_model_that_the_budget_has_room_for_and_the_system_has_not_is_refused_before_it_is_read(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX does not survive an allocation that fails."""
    async with opened(memory_budget=3 * weights) as rig:
        with monkeypatch.context() as short:
            short.setattr(system_memory, "_available", lambda: weights - 1)
            short.setattr(mx, "get_cache_memory", lambda: 0)
            short.setattr(loading, "load_model", lambda *_: pytest.fail("it was read"))
            with pytest.raises(
                NotEnoughMemory, match=r"^Model 'one' needs .* are available\. Serve a smaller model"
            ) as refusal:
                await rig.service.create("a", model="one")
        assert refusal.value.details["available_bytes"] == weights - 1
        assert loaded(rig) == []
        assert (await rig.service.status()).memory.reserved_bytes == 0
        await rig.service.create("a", model="one")
        assert loaded(rig) == ["one"]


async def test_a_model_whose_files_grew_while_it_was_not_loaded_is_refused_by_what_they_say_now(
    opened: Opened, own_tiny_model: Path, quantisable_model: Path, weights: int
) -> None:
    async with opened(two={"source": str(own_tiny_model)}, memory_budget=weights) as rig:
        await rig.service.load_model(model="two")
        await rig.service.unload_model(model="two")
        for file in quantisable_model.iterdir():
            shutil.copy(file, own_tiny_model)
        with pytest.raises(MemoryBudgetExceeded) as refusal:
            await rig.service.load_model(model="two")
        assert refusal.value.wanted_bytes == estimate_bytes("two", str(quantisable_model))
        assert (await rig.service.status()).models[1].loads == 1


async def test_what_a_model_took_is_reserved_for_the_same_files_again(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.service.load_model(model="two")
        await rig.service.unload_model(model="two")
        monkeypatch.setattr(loading, "estimate_bytes", None)
        await rig.service.load_model(model="two")
        assert loaded(rig) == ["two"]


async def test_a_model_that_takes_more_than_its_files_said_does_not_lie_in_memory_while_it_waits_for_the_rest(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks: list[Callable[[], object]] = []

    def followed(name: str, *args: Any) -> LoadedModel:
        model = load(name, *args)
        networks.append(weakref.ref(model.network))
        return model

    load = loading.load_model
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.read("a", tokens_of(1, 50), model="one")
        monkeypatch.setattr(loading, "estimate_bytes", lambda *_: 1000)
        monkeypatch.setattr(loading, "load_model", followed)
        memory = rig.service._parts.models.memory
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            waiting = asyncio.ensure_future(rig.service.create("b", model="two"))
            await until(lambda: memory.info().waiting == 1)
            assert (len(networks), networks[0]()) == (1, None)
            assert memory.info().reserved_bytes == 1000
        await waiting
        assert (loaded(rig), memory.info().reserved_bytes) == (["two"], 0)


async def test_a_model_that_takes_more_than_its_files_said_is_loaded_once_where_the_rest_is_free(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch, loads: Loads
) -> None:
    monkeypatch.setattr(loading, "estimate_bytes", lambda *_: 1000)
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.service.load_model(model="two")
        memory = rig.service._parts.models.memory.info()
        assert (loads.names, memory.reserved_bytes, memory.weights_bytes) == (["two"], 0, weights)


async def test_a_session_that_has_read_nothing_does_not_keep_its_model_and_gets_it_back(
    opened: Opened, weights: int
) -> None:
    async with opened() as rig:
        await rig.read("solo", tokens_of(1, 20), model="one", sampling=SAMPLED)
        solo = await play(rig, "solo")
        await rig.service.delete("solo")
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.service.create("a", model="one", sampling=SAMPLED)
        await rig.service.create("b", model="two")
        assert loaded(rig) == ["two"]
        assert (await rig.service.show("a")).info.token_count == 0
        await rig.service.append("a", tokens=tokens_of(1, 20))
        assert loaded(rig) == ["one"]
        assert await play(rig, "a") == solo


async def test_one_that_waits_gives_its_model_up_for_the_one_before_it(opened: Opened, weights: int) -> None:
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.service.create("a", model="one")
        await rig.service.create("b", model="two")
        uris = [rig.live(name).uri for name in "ab"]
        async with (
            rig.service._parts.sessions.residency.turns.take(uris[0]),
            rig.service._parts.sessions.residency.turns.take(uris[1]),
        ):
            both = [asyncio.ensure_future(rig.service.append(n, tokens=tokens_of(1, 250))) for n in "ab"]
            await until(
                lambda: all(
                    len(rig.service._parts.sessions.residency.turns._lines[uri][0]._waiters or ()) for uri in uris
                )
            )
        await asyncio.wait_for(asyncio.gather(*both), 30)


async def test_one_that_lost_its_model_while_it_waited_loads_it_again(opened: Opened, weights: int) -> None:
    async with opened(memory_budget=weights + 430_000) as rig:
        await rig.read_each("bc", tokens_of(1, 20), model="two")
        await rig.sleep("b")
        memory = rig.service._parts.models.memory
        async with rig.service._parts.sessions.residency.turn(rig.live("c").uri):
            first = asyncio.ensure_future(rig.service.create("a", model="one"))
            await until(lambda: memory.info().waiting == 1)
            second = asyncio.ensure_future(rig.wake("b"))
            await until(lambda: memory.info().waiting == 2)
        await first
        await second
        assert (loaded(rig), rig.live("b").model.is_loaded) == (["two"], True)
        assert (await rig.service.status()).models[1].loads == 2


async def test_a_pinned_model_stays_where_sessions_used_later_go(opened: Opened, weights: int) -> None:
    async with opened(one={"pinned": True}, memory_budget=2 * weights + ROOM) as rig:
        await rig.service.load_model(model="one")
        await rig.read_each("ab", tokens_of(1, 50), model="two")
        assert (rig.is_awake("a"), loaded(rig)) == (False, ["one", "two"])
        (one, _) = (await rig.service.status()).models
        assert one.pinned


# --- by word and by time


async def test_an_unload_puts_the_sessions_to_sleep_and_frees_the_weights(rig: Rigged, weights: int) -> None:
    await rig.read("a", tokens_of(1, 50), model="two", sampling=SAMPLED)
    network = weakref.ref(rig.live("a").model.network)
    before = mx.get_active_memory()
    info = await rig.service.unload_model(model="two")
    assert (info.resident, info.sessions_awake, info.weights_bytes) == (False, 0, 0)
    assert info.identity is not None, "it is still known"
    assert network() is None
    assert before - mx.get_active_memory() >= weights
    assert (await rig.service.status()).memory.weights_bytes == 0
    await rig.write("a", 3)
    assert (await rig.service.unload_model(model="one")).resident is False, "it never was"


async def test_weights_that_somebody_still_has_count_until_they_are_gone(rig: Rigged, weights: int) -> None:
    await rig.service.load_model(model="two")
    (held,) = rig.service._parts.models.shelf.loaded()
    await rig.service.unload_model(model="two")
    assert (await rig.service.status()).memory.weights_bytes == weights
    del held
    gc.collect()
    assert (await rig.service.status()).memory.weights_bytes == 0


async def test_a_request_waits_for_weights_that_somebody_has_for_a_moment_still(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on when they are gone, not when that moment is over."""
    monkeypatch.setattr(memory, "MOST_LINGERING_S", 3600.0)
    async with opened(memory_budget=int(1.9 * weights)) as rig:
        await rig.service.load_model(model="two")
        (held,) = rig.service._parts.models.shelf.loaded()
        asked = asyncio.ensure_future(rig.service.load_model(model="one"))
        held_up = rig.service._parts.models.memory
        await until(lambda: asked.done() or (not loaded(rig) and held_up._evicting is None))
        assert not asked.done()
        assert held_up.info().waiting == 1
        del held
        gc.collect()
        assert (await asyncio.wait_for(asked, DEADLINE_S)).resident
        assert loaded(rig) == ["one"]


async def test_each_time_weights_are_let_go_of_they_have_their_moment(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models in turn, for long: the moment of the first is over when the second has its own."""
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(memory, "time", clock)
    monkeypatch.setattr(model_registry, "time", clock)
    async with opened(memory_budget=int(1.9 * weights)) as rig:
        await rig.service.load_model(model="two")
        held_up = rig.service._parts.models.memory
        for later, wanted in enumerate(("one", "two", "one"), 1):
            (held,) = rig.service._parts.models.shelf.loaded()
            asked = asyncio.ensure_future(rig.service.load_model(model=wanted))
            await until(lambda asked=asked: asked.done() or (not loaded(rig) and held_up._evicting is None))  # type: ignore[misc]
            assert not asked.done()
            del held
            gc.collect()
            assert (await asked).resident
            clock.monotonic = lambda later=later: time.monotonic() + 2 * later * memory.MOST_LINGERING_S


async def test_weights_that_somebody_keeps_are_waited_for_no_longer_than_a_moment(
    opened: Opened, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MOST_LINGERING_S", 0.05)
    async with opened(memory_budget=int(1.9 * weights)) as rig:
        await rig.service.load_model(model="two")
        (held,) = rig.service._parts.models.shelf.loaded()
        with pytest.raises(MemoryBudgetExceeded):
            await rig.service.load_model(model="one")
        del held
        gc.collect()
        assert (await rig.service.load_model(model="one")).resident


async def test_what_is_in_use_is_not_unloaded_by_word(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 50), model="two")
    async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
        with pytest.raises(ModelInUse) as refusal:
            await rig.service.unload_model(model="two")
    assert refusal.value.sessions == ["torpor://default/a"]
    assert loaded(rig) == ["two"]
    with pytest.raises(UnknownModel):
        await rig.service.unload_model(model="three")
    with pytest.raises(UnknownModel):
        await rig.service.load_model(model="three")


async def test_a_model_that_nobody_uses_is_unloaded_after_its_time_and_a_pinned_one_is_not(opened: Opened) -> None:
    async with opened(one={"ttl_s": 0.05, "pinned": True}, two={"ttl_s": 0.05}) as rig:
        await rig.service.load_model(model="one")
        await rig.read("a", tokens_of(1, 50), model="two", sampling=SAMPLED)
        async with rig.service._parts.sessions.residency.woken(rig.service._parts.sessions.resolve("a"), ignore) as (
            _,
            live,
        ):
            fingerprint = await rig.service._parts.models.engine.call(lambda: fingerprint_of(live.state))
        await until(lambda: loaded(rig) == ["one"])
        assert not rig.is_awake("a")
        async with rig.service._parts.sessions.residency.woken(rig.service._parts.sessions.resolve("a"), ignore) as (
            _,
            live,
        ):
            time.sleep(0.1)
            assert await rig.service._parts.models.engine.call(lambda: fingerprint_of(live.state)) == fingerprint
            assert loaded(rig) == ["one", "two"], "it is in use"
        for _ in range(3):  # the pinned one has been unused for as long each time
            await until(lambda: loaded(rig) == ["one"])
            await rig.service.load_model(model="two")
        assert next(model.loads for model in (await rig.service.status()).models) == 1


async def test_the_same_files_under_two_names_are_one_identity_and_with_an_adapter_another_ms1(
    opened: Opened, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    adapted = {"source": str(tiny_model), "adapter": AdapterChoice(str(adapter))}
    async with opened(two=adapted, prefix_reuse="longest") as rig:
        tokens = tokens_of(1, 600)
        await rig.read("plain", tokens, model="one")
        await rig.service.create("adapted", model="two")
        report = await rig.service.append("adapted", tokens=tokens)
        assert report.cached_tokens == 0, "an adapter changes what keys and values are"
        one, two = (await rig.service.status()).models
        assert one.identity != two.identity
        assert (one.adapter, str(two.adapter).split()[0]) == ("none", "lora")
        await rig.service.create("again", model="two")
        assert (await rig.service.append("again", tokens=tokens)).cached_tokens > 0
        await rig.sleep("plain")
        rig.service._parts.models.shelf.places["one"].choice, rig.service._parts.models.shelf.places["two"].choice = (
            rig.service._parts.models.shelf.places["two"].choice,
            rig.service._parts.models.shelf.places["one"].choice,
        )
        await rig.service.unload_model(model="one")
        with pytest.raises(IdentityMismatch, match="adapter"):
            await rig.wake("plain")


async def test_sessions_that_wrote_in_one_batch_do_not_keep_their_model(opened: Opened) -> None:
    async with opened(batch=8) as rig:
        await rig.read_each("ab", tokens_of(1, 50), model="two")
        await asyncio.gather(*await all_begun(rig, [rig.service.generate(name, max_tokens=20) for name in "ab"]))
        assert (await rig.service.status()).batched_tokens > 0
        network = weakref.ref(rig.live("a").model.network)
        await rig.service.unload_model(model="two")
        assert network() is None


# --- every verb


async def test_every_verb_copes_with_a_model_that_is_not_loaded(opened: Opened, quantisable_model: Path) -> None:
    async with opened(two={"source": str(quantisable_model)}) as rig:
        service = rig.service
        for name in "ab":
            await rig.asleep(name, tokens_of(1, 600), model="two")
        await service.unload_model(model="two")
        assert [info.model for info in await service.list_sessions()] == ["two", "two"]
        detail = await service.show("a")
        assert (detail.info.token_count, detail.tail_text) == (600, ""), "no tokenizer is there to tell its text"
        assert (await service.fork("a", name="whole")).tokens_prefilled == 0
        assert (await service.analyze("a")).token_count == 600
        planned = await service.maintain(operation="quantize", session="b", bits=8, dry_run=True)
        assert planned.actions
        assert (await service.sleep("a")).blocks_new == 0, "it sleeps already"
        assert loaded(rig) == [], "nothing of this needs the weights"
        cut = await service.fork("a", name="cut", at_token=300)
        assert (cut.token_count, loaded(rig)) == (300, ["two"])
        await service.unload_model(model="two")
        await service.maintain(operation="quantize", session="b", bits=8)
        assert loaded(rig) == ["two"]
        await service.unload_model(model="two")
        await service.delete("b")
        assert loaded(rig) == []


async def test_a_marked_session_is_left_before_its_model_is_loaded_for_it(opened: Opened) -> None:
    async with opened() as rig:
        await rig.asleep("a", tokens_of(1, 600), model="two")
    async with opened() as rig:
        await rig.service.mark("a", pinned=True)
        await rig.service.maintain(operation="quantize", session="a", bits=8)
        assert loaded(rig) == [], "its mark says enough"
        await rig.service.mark("a", pinned=False)
        await rig.service.maintain(operation="quantize", session="a", bits=8, dry_run=True)
        assert loaded(rig) == ["two"], "how its caches are laid out is known to nobody else"


async def test_who_gives_up_waiting_for_a_models_memory_leaves_the_load_to_the_next(
    opened: Opened, weights: int
) -> None:
    async with opened(memory_budget=weights + ROOM) as rig:
        await rig.read("a", tokens_of(1, 50), model="one")
        memory = rig.service._parts.models.memory
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            waiting = [asyncio.ensure_future(rig.service.load_model(model="two")) for _ in range(2)]
            await until(lambda: memory.info().waiting == 1 and len(memory.line.stalled) == 1)
            waiting[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            await until(lambda: memory.info().waiting == 1 and not memory.line.stalled)
        assert (await waiting[1]).resident
        told = memory.info()
        assert (told.waiting, told.reserved_bytes, told.weights_bytes) == (0, 0, weights)


async def test_a_cache_that_keeps_its_kv_otherwise_is_never_taken_over_ms1_gm9(
    opened: Opened, quantisable_model: Path
) -> None:
    one = {"source": str(quantisable_model)}
    async with opened(one=one, two={**one, "kv": KvChoice(8, 32)}, prefix_reuse="longest") as rig:
        tokens = tokens_of(1, 600)
        for name, model in (("plain", "one"), ("quantised", "two")):
            await rig.service.create(name, model=model)
            report = await rig.service.append(name, tokens=tokens)
            assert report.cached_tokens == 0
        await rig.service.create("again", model="one")
        assert (await rig.service.append("again", tokens=tokens)).cached_tokens > 0


# --- from a hub


async def test_a_download_is_told_and_ends_with_its_request_and_goes_on_with_the_next(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, events = 6 << 20, []
    with serving({"owner/tiny": write_model(tmp_path / "model", intermediate_size=size // 12 // 64 // 3)}) as hub:
        hub.used_here(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(loading, "_TOLD_EACH_S", 0)
        hub.most_bytes, hub.goes_on = size // 2, threading.Event()
        async with opened(two={"source": "owner/tiny"}) as rig:
            loading_it = asyncio.ensure_future(rig.service.load_model("two", on_event=events.append))
            await until(lambda: any(event.done > size // 4 for event in events))
            loading_it.cancel()
            await cancelled(loading_it)
            hub.goes_on.set()
            (part,) = tmp_path.glob("cache/*/blobs/*.incomplete")
            await until(lambda: is_free(part))
            assert part.stat().st_size >= size // 4
            hub.asked.clear()
            await rig.service.load_model("two", on_event=events.append)
            assert loaded(rig) == ["two"]
            assert [first > 0 for name, first in hub.asked if name == "model.safetensors"] == [True]
            assert (events[-1].done, events[-1].stage) == (events[-1].total, "download")


def is_free(file: Path) -> bool:
    """Whether no download is at it."""
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
