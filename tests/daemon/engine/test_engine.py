"""One thread owns MLX; jobs take turns, and none that fails or is given up stops another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.daemon.engine.asking import Decode
from torpor.daemon.engine.decoding import Decoder
from torpor.daemon.engine.engine import MOST_PIECES_TO_TOKENS, Engine, Steps, WritingSteps
from torpor.daemon.errors import ServiceClosed
from torpor.tests.daemon.session_rig import Gate, cancelled

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@asynccontextmanager
async def running(decoder: Decoder | None = None, **options: Any) -> AsyncIterator[Engine]:
    engine = Engine(decoder, **options)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def done_together(
    engine: Engine, readers: Sequence[Steps[Any]], writers: Sequence[WritingSteps[None]] = ()
) -> None:
    """Do the steps, which come to the engine at the same moment."""
    gate = Gate()
    holding = asyncio.ensure_future(engine.call(gate.pass_through))
    await gate.reached()
    jobs = [asyncio.ensure_future(engine.run(steps)) for steps in readers]
    jobs += [asyncio.ensure_future(engine.run(steps, writes=True)) for steps in writers]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(holding, *jobs)


def counting(log: list[str], name: str, pieces: int) -> Steps[str]:
    for piece in range(pieces):
        log.append(f"{name}{piece}")
        yield
    return name


async def test_steps_give_their_result() -> None:
    async with running() as engine:
        assert await engine.run(counting([], "a", 3)) == "a"
        assert await engine.call(lambda: 7) == 7


async def test_everything_runs_on_one_thread_which_is_not_the_loops() -> None:
    async with running() as engine:
        names = {await engine.call(lambda: threading.current_thread().name) for _ in range(5)}
        assert names == {"torpor-engine"}


async def test_jobs_take_turns_piece_by_piece() -> None:
    log: list[str] = []
    async with running() as engine:
        await done_together(engine, [counting(log, name, 3) for name in "ab"])
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2"]


class Rounds(Decoder):
    """Whose rounds take 10 ms of a clock that only passes here and in `reading`, and read nothing. slow_s: seconds that
    every fifth takes. piece_s: that a piece of `reading` takes."""

    def __init__(self, *, slow_s: float = 0.01, piece_s: float = 0.01) -> None:
        super().__init__()
        self.slow_s, self.piece_s = slow_s, piece_s
        self.now = 0.0
        self.log = ""

    def decode(self, asked: Sequence[Decode], along: Sequence[Decode] = ()) -> list[Any]:
        self.now += 0.01 if self.log.count("t") % 5 else self.slow_s
        self.log += "t"
        return [mx.array(0.0) for _ in asked]

    def reading(self, pieces: int) -> Steps[None]:
        for _ in range(pieces):
            self.now += self.piece_s
            self.log += "p"
            yield

    def writing(self, tokens: int) -> WritingSteps[None]:
        state: Any = SimpleNamespace(is_lost=False, caches=[])
        model: Any = None
        for token in range(tokens):
            yield Decode(model, state, token)


@pytest.mark.parametrize(
    ("readers", "writers", "pieces_to_tokens"), [(1, 1, 1), (2, 1, 2), (3, 1, 3), (8, 1, 3), (8, 4, 2), (2, 8, 1)]
)
async def test_tokens_get_half_of_the_time_and_a_quarter_at_least_where_more_jobs_read_than_write(
    readers: int, writers: int, pieces_to_tokens: int
) -> None:
    assert MOST_PIECES_TO_TOKENS == 3
    rounds = Rounds()
    async with running(rounds, clock=lambda: rounds.now) as engine:
        await done_together(
            engine, [rounds.reading(24) for _ in range(readers)], [rounds.writing(24) for _ in range(writers)]
        )
    shared = rounds.log[: 5 * (pieces_to_tokens + 1)]  # while all of them still have something to do
    assert shared.count("t") == 5
    assert shared.count("p") == 5 * pieces_to_tokens


@pytest.mark.parametrize(("piece_s", "most_in_a_row"), [(0.2, 1), (0.06, 1), (0.03, 2), (0.01, 6)])
async def test_between_two_rounds_of_tokens_is_one_piece_or_a_twentieth_of_a_second_of_short_ones(
    piece_s: float, most_in_a_row: int
) -> None:
    """However many read, and whatever a round has taken."""
    rounds = Rounds(slow_s=1.0, piece_s=piece_s)
    async with running(rounds, clock=lambda: rounds.now) as engine:
        await done_together(engine, [rounds.reading(40) for _ in range(3)], [rounds.writing(100)])
    shared = rounds.log.rpartition("t")[0]
    assert "p" in shared
    assert max(map(len, shared.split("t"))) == most_in_a_row


async def test_after_a_piece_that_took_an_hour_tokens_do_not_have_the_thread_for_an_hour() -> None:
    rounds = Rounds(slow_s=1.0)

    def stopped_for_an_hour() -> Steps[None]:
        rounds.now += 3600.0
        rounds.log += "P"
        yield

    async with running(rounds, clock=lambda: rounds.now) as engine:
        await done_together(engine, [stopped_for_an_hour(), rounds.reading(1)], [rounds.writing(100)])
    assert 0 < rounds.log.partition("P")[2].index("p") <= 60


async def test_what_a_step_raises_reaches_its_caller_alone() -> None:
    def failing() -> Steps[None]:
        yield
        raise KeyError("mine")

    async with running() as engine:
        results = await asyncio.gather(engine.run(failing()), engine.run(counting([], "b", 5)), return_exceptions=True)
        assert isinstance(results[0], KeyError)
        assert results[1] == "b"
        assert await engine.call(lambda: 1) == 1


@pytest.mark.parametrize(
    "error", [RuntimeError, MemoryError, asyncio.CancelledError, GeneratorExit, StopIteration, SystemExit]
)
async def test_no_error_of_a_step_ends_the_engine(error: type[BaseException]) -> None:
    def failing() -> Steps[None]:
        yield
        raise error("from a step")

    async with running() as engine:
        task = asyncio.ensure_future(engine.run(failing()))
        await asyncio.wait([task])
        assert task.done()
        with pytest.raises(Exception):  # noqa: B017 - whichever it is, it is none that would end the event loop
            task.result()
        assert await engine.call(lambda: 1) == 1


async def test_a_job_that_is_given_up_is_closed_at_its_yield_before_the_caller_goes_on_qx16() -> None:
    gate = Gate()
    log: list[str] = []

    def steps() -> Steps[None]:
        try:
            while True:
                log.append("step")
                gate.pass_through()
                yield
        finally:
            log.append("closed")

    async with running() as engine:
        task = asyncio.ensure_future(engine.run(steps()))
        await gate.reached()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # an impatient caller does not get away earlier
        await asyncio.sleep(0)
        assert log == ["step"]
        gate.open()
        await cancelled(task)
        assert log == ["step", "closed"]


async def test_a_job_that_was_given_up_before_its_first_step_never_begins() -> None:
    gate = Gate()
    log: list[str] = []
    async with running() as engine:
        first = asyncio.ensure_future(engine.call(gate.pass_through))
        await gate.reached()
        task = asyncio.ensure_future(engine.run(counting(log, "a", 3)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        gate.open()
        await cancelled(task)
        await first
        assert log == []


async def test_steps_that_fail_while_being_closed_do_not_end_the_engine() -> None:
    gate = Gate()

    def steps() -> Steps[None]:
        try:
            gate.pass_through()
            yield
        finally:
            raise ValueError("cannot let go")

    async with running() as engine:
        task = asyncio.ensure_future(engine.run(steps()))
        await gate.reached()
        task.cancel()
        await asyncio.sleep(0)
        gate.open()
        await cancelled(task)
        assert await asyncio.wait_for(engine.call(lambda: 1), 10) == 1


async def test_a_stop_lets_the_jobs_at_hand_finish_and_refuses_new_ones() -> None:
    engine = Engine()
    gate = Gate()
    held = asyncio.ensure_future(engine.call(gate.pass_through))
    await gate.reached()
    task = asyncio.ensure_future(engine.run(counting([], "a", 50)))
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop))
    gate.open()
    await stopping
    assert await task == "a"
    await held
    with pytest.raises(ServiceClosed):
        await engine.call(lambda: 1)
    engine.stop()


async def test_an_idle_engine_uses_no_time() -> None:
    """It waits in its inbox; a busy loop would have taken its thread's processor time."""
    import time

    async with running() as engine:
        started = await engine.call(time.thread_time)
        await asyncio.to_thread(threading.Event().wait, 0.2)
        assert await engine.call(time.thread_time) - started < 0.1


async def test_evaluated_memory_may_be_looked_at_by_other_threads() -> None:
    def make() -> mx.array:
        made = mx.arange(10) * 2
        mx.eval(made)
        return made

    async with running() as engine:
        made = await engine.call(make)
    assert memoryview(made).tolist() == list(range(0, 20, 2))


SCRIPT = """
import asyncio
from torpor.daemon.engine.engine import Engine
import mlx.core as mx

async def main():
    engine = Engine()
    await engine.call(lambda: mx.eval(mx.random.normal((64, 64)) @ mx.random.normal((64, 64))))
    engine.stop()

asyncio.run(main())
"""


@pytest.mark.one_in(2)
def test_a_process_whose_engine_was_stopped_ends_cleanly() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
