"""Which requests are taken in, and who stands back for whom: order, its bound, and no effect on what is computed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.engine import admission
from torpor.daemon.engine.admission import MOST_STOOD_BACK_S, Queue, Request, apart, current
from torpor.daemon.engine.engine import Engine, Steps
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.daemon.errors import EngineBusy
from torpor.daemon.options.current import CurrentOptions
from torpor.daemon.options.serve_options import ServeOptions
from torpor.memvid.errors import SessionNotFound
from torpor.tests.daemon.session_rig import (
    LOGITS,
    ROW,
    SAMPLED,
    Gate,
    Rigged,
    all_begun,
    begun_together,
    held_at,
    held_up,
    most,
    open_rigged,
    tokens_of,
    until,
    writing,
)

NAMES = ("a", "b", "c", "d")
CHUNK = 256


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Line:
    """An engine whose seconds pass by what it does, and requests for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.requests: list[Request] = []
        self.clock = Clock()
        self.engine = Engine(clock=self.clock)
        self._queue = Queue(CurrentOptions(ServeOptions()))

    def counting(self, name: str, pieces: int, seconds: float = 1.0) -> Steps[None]:
        for piece in range(pieces):
            self.clock.now += seconds
            self.log.append(f"{name}{piece}")
            yield

    def ask(self, priority: Any, work: Steps[None]) -> asyncio.Future[None]:
        async def asked() -> None:
            with self._queue.admitted(priority):
                self.requests.append(current())
                await self.engine.run(work)

        return asyncio.ensure_future(asked())

    async def arrived(self, count: int = 1) -> None:
        await until(lambda: self.engine._inbox.qsize() == count)


@asynccontextmanager
async def lined_up(*gates: Gate) -> AsyncIterator[Line]:
    """gates: that hold its work, and are opened at the end whatever happens."""
    line = Line()
    try:
        yield line
    finally:
        for gate in gates:
            gate.open()
        await asyncio.to_thread(line.engine.stop)


async def served(jobs: Sequence[tuple[str, str, int]], *, seconds: float = 1.0) -> list[str]:
    """The pieces of jobs (name, priority, pieces) that come to the engine together, in the order in which it does them;
    each takes so many seconds."""
    gate = Gate()
    async with lined_up(gate) as line:
        holding = asyncio.ensure_future(line.engine.call(gate.pass_through))
        await gate.reached()
        asking = [line.ask(priority, line.counting(name, pieces, seconds)) for name, priority, pieces in jobs]
        await line.arrived(len(jobs))
        gate.open()
        await asyncio.gather(holding, *asking)
    return line.log


def reading(rig: Rigged, name: str, count: int, **options: Any) -> Any:
    return rig.service.append(name, tokens=tokens_of(count, count), **options)


# --- order on the engine


async def test_pieces_of_background_requests_are_done_when_nobody_else_has_any() -> None:
    log = await served([("b", "background", 3), ("n", "normal", 3), ("c", "background", 2), ("m", "normal", 1)])
    assert log == ["n0", "m0", "n1", "n2", "b0", "c0", "b1", "c1", "b2"]


async def test_what_has_stood_back_for_long_takes_turns_like_the_others() -> None:
    """Three pieces of ten seconds each are done before it; from then on it is one of them, to its end."""
    assert MOST_STOOD_BACK_S == 30.0
    log = await served([("b", "background", 3), ("n", "normal", 6)], seconds=10.0)
    assert log == ["n0", "n1", "n2", "b0", "n3", "b1", "n4", "b2", "n5"]


async def test_only_what_is_done_for_others_that_are_in_a_hurry_counts_as_standing_back() -> None:
    """Background requests that wait for each other do not become normal by it."""
    gate = Gate()
    async with lined_up(gate) as line:

        def held() -> Steps[None]:
            yield from line.counting("b", 4, 100.0)
            gate.pass_through()

        others = [line.ask("background", work) for work in (held(), line.counting("c", 8))]
        await gate.reached()
        normal = line.ask("normal", line.counting("n", 2))
        await line.arrived()
        before = len(line.log)
        assert "c0" in line.log
        assert "c7" not in line.log
        gate.open()
        await asyncio.gather(normal, *others)
        assert line.log[before : before + 2] == ["n0", "n1"]


async def test_what_it_is_served_in_between_is_not_standing_back() -> None:
    """It stands back for ten seconds, is served, and stands back for ten more: that is twenty."""
    gates = [Gate() for _ in range(3)]

    def held() -> Steps[None]:
        for gate in gates:
            gate.pass_through()
            yield

    async with lined_up(*gates) as line:
        background = line.ask("background", held())
        for gate in gates[:2]:
            await gate.reached()
            normal = line.ask("normal", line.counting("n", 1, 10.0))
            await line.arrived()
            gate.open()
            await normal
        gates[2].open()
        await background
        assert line.requests[0].stood_back_s == 20.0


async def test_a_background_job_that_is_given_up_is_closed_though_it_stands_back() -> None:
    gate = Gate()
    async with lined_up(gate) as line:

        def steps() -> Steps[None]:
            try:
                while "over" not in line.log:
                    line.log.append("b")
                    yield
            finally:
                line.log.append("closed")

        def endless() -> Steps[None]:
            gate.pass_through()
            while not {"closed", "over"} & {*line.log}:
                yield

        background = line.ask("background", steps())
        await until(lambda: "b" in line.log)
        normal = line.ask("normal", endless())
        await gate.reached()
        background.cancel()
        await asyncio.sleep(0)
        gate.open()
        await asyncio.wait([background], timeout=10)
        last = line.log[-1]
        line.log.append("over")
        assert last == "closed"
        await normal


@pytest.mark.one_in(3)
async def test_a_text_that_is_read_in_the_background_waits_for_a_stream_and_a_stream_for_a_text(rig: Rigged) -> None:
    for name in ("late", "first"):
        await rig.service.create(name)
    await rig.read("a", tokens_of(1, 100))
    text, stream = [True] * math.ceil(1799 / PREFILL_CHUNK_TOKENS) + [False], [False] * 40
    for work, expected in (
        ([reading(rig, "late", 1800, priority="background"), writing(rig, "a", 40)], stream + text),
        ([writing(rig, "a", 40, priority="background"), reading(rig, "first", 1800)], text + stream),
    ):
        rig.network.reset()
        tasks = await all_begun(rig, work)
        await asyncio.gather(*tasks)
        assert [tokens > 1 for tokens in rig.network.calls] == expected


# --- rows of a call


async def test_a_background_session_has_a_row_beside_the_others_where_one_is_free(open_rig: Any) -> None:
    async with open_rig(batch=4) as rig:
        for at, name in enumerate(NAMES):
            await rig.read(name, tokens_of(at, 100 + at))
        for count in (2, 30):  # first the model is tried
            rig.network.reset()
            work = [writing(rig, name, count, priority="background" if name in "ab" else "normal") for name in NAMES]
            tasks = await all_begun(rig, work)
            assert [len(each.tokens) for each in await asyncio.gather(*tasks)] == [count] * 4
        assert rig.network.rows.count(4) == 30, "in one call, all of them"


@pytest.mark.one_in(2)
async def test_one_that_is_in_a_hurry_gets_the_row_of_one_that_is_not(open_rig: Any) -> None:
    """Four background sessions fill the round. The next session takes the row of one of them, and they take turns at
    waiting; no round takes two calls, and everybody writes all it was asked for."""
    async with open_rig(batch=4, durability="sleep") as rig:  # while an answer is flushed, the others write on
        for at, name in enumerate((*NAMES, "late")):
            await rig.read(name, tokens_of(at, 100 + at))
        warm = [asyncio.ensure_future(writing(rig, name, 2)) for name in NAMES[:2]]  # the model has been tried
        await asyncio.gather(*warm)
        rig.network.reset()
        gate = rig.network.hold_at(20)
        work = [writing(rig, name, 120, priority="background") for name in NAMES]
        tasks = await all_begun(rig, work)
        await gate.reached()
        begun = {name: len(rig.live(name).state.tokens) for name in NAMES}
        late = asyncio.ensure_future(writing(rig, "late", 40))
        await until(lambda: rig.service._parts.models.engine._inbox.qsize() == 1)
        before = len(rig.network.rows)
        rig.network.before = lambda *_: None
        gate.open()
        assert len((await late).tokens) == 40
        while_late = rig.network.rows[before : before + 40]
        ahead = [len(rig.live(name).state.tokens) - begun[name] for name in NAMES]
        assert while_late == [4] * 40, "one call a round, with every row in use"
        assert all(28 <= grown <= 36 for grown in ahead), "three of four rounds each"
        for name, each in zip(NAMES, await asyncio.gather(*tasks), strict=True):
            assert len(each.tokens) == 120
            assert rig.live(name).state.is_consistent


@pytest.mark.one_in(3)
async def test_a_row_that_comes_free_is_taken_by_one_that_was_in_another_batch(open_rig: Any) -> None:
    """Six background sessions are two batches; beside a normal one there is one, which is full as long as they last."""
    names = ("a", "b", "c", "d", "e", "f")
    async with open_rig(batch=4) as rig:
        for at, name in enumerate((*names, "late")):
            await rig.read(name, tokens_of(at, 100 + at))
        await asyncio.gather(*(writing(rig, name, 2) for name in names[:2]))  # the model has been tried
        rig.network.reset()
        gate = rig.network.hold_at(20)
        short = {"a": 40, "b": 40}
        tasks = await all_begun(
            rig, [writing(rig, name, short.get(name, 300), priority="background") for name in names]
        )
        await gate.reached()
        late = asyncio.ensure_future(writing(rig, "late", 100))
        await until(lambda: rig.service._parts.models.engine._inbox.qsize() == 1)
        before = len(rig.network.rows) + 1  # and what was left of the round
        rig.network.before = lambda *_: None
        gate.open()
        await late
        assert rig.network.rows[before : before + 100].count(4) >= 97
        assert [len(each.tokens) for each in await asyncio.gather(*tasks)] == [40, 40, 300, 300, 300, 300]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("kind", "most"), [("deepseek_v3", 4), ("qwen3", 2)])
async def test_a_background_session_that_would_take_a_call_of_its_own_waits(
    open_kind: Any, kind: str, most: int
) -> None:
    """As it would pad a batch, or as a round is full."""
    async with open_kind(kind, batch=most) as rig:
        for name, count in (("a", 100), ("b", 110), ("long", 1000)):
            await rig.read(name, tokens_of(count, count))
        await asyncio.gather(*(writing(rig, name, 2) for name in "ab"))  # the model has been tried
        work = [writing(rig, "long", 20, priority="background"), writing(rig, "a", 30), writing(rig, "b", 30)]
        rig.network.reset()
        tasks = await all_begun(rig, work)
        await asyncio.gather(*tasks)
        twos = [at for at, rows in enumerate(rig.network.rows) if rows == 2]
        assert len(twos) >= 30
        assert rig.network.rows[twos[-1] + 1 :] == [1] * 20, "it writes when the others have ended"


async def test_background_sessions_on_another_model_wait_too(store: Path, tiny_model: Path, digest_cache: Path) -> None:
    models = {"tiny": str(tiny_model), "other": str(tiny_model)}
    async with open_rigged(store, models, digest_cache, batch=4) as rig:
        for at, name in enumerate("abc"):
            await rig.read(name, tokens_of(at, 100), model="tiny" if name == "c" else "other")
        other = rig.networks["other"]
        other.reset()
        gate = other.hold_at(10)
        tasks = await all_begun(rig, [writing(rig, name, 30, priority="background") for name in "ab"])
        await gate.reached()
        normal = asyncio.ensure_future(writing(rig, "c", 50))
        await until(lambda: rig.service._parts.models.engine._inbox.qsize() == 1)
        order: list[str] = []
        rig.network.before = lambda *_: order.append("normal")
        other.before = lambda *_: order.append("background")
        gate.open()
        await normal
        first, last = order.index("normal"), len(order) - order[::-1].index("normal")
        assert order[first:last].count("background") <= 1, "one that began as the first token was read"
        assert [len(each.tokens) for each in await asyncio.gather(*tasks)] == [30, 30]


@pytest.mark.one_in(2)
async def test_in_the_background_a_session_writes_the_very_same(rig: Rigged) -> None:
    """Standing back changes when something is computed, and not what."""
    await rig.read_each(("a", "a-alone"), tokens_of(3, 300), sampling=SAMPLED)
    await rig.read("busy", tokens_of(4, 300))
    alone = await rig.write("a-alone", 30)
    tasks = await all_begun(
        rig, [rig.write("a", 30, priority="background"), writing(rig, "busy", 60), reading(rig, "a-alone", 700)]
    )
    assert (await asyncio.gather(*tasks))[0] == alone


# --- whom somebody waits for


@pytest.mark.one_in(2)
async def test_a_background_request_that_a_normal_one_waits_for_stands_back_no_more(rig: Rigged) -> None:
    await rig.read_each("ab", tokens_of(1, 50))
    ended: list[str] = []

    async def note(name: str, work: Any) -> None:
        await work
        ended.append(name)

    work = [note("background", writing(rig, "a", 60, priority="background")), note("busy", writing(rig, "b", 300))]
    async with begun_together(rig, work) as tasks:
        behind = asyncio.ensure_future(note("behind", writing(rig, "a", 1)))
        await until(
            lambda: rig.service._parts.sessions.residency.turns.users(rig.service._parts.sessions.resolve("a")) == 2
        )
    await asyncio.gather(*tasks, behind)
    assert ended == ["background", "behind", "busy"]


async def test_what_the_daemon_does_by_itself_is_no_requests(open_rig: Any) -> None:
    """A sleep that makes room for others is not done when the request has time that happens to have led to it."""

    async def whose() -> bool:
        return current().stands_back()

    requests = Queue(CurrentOptions(ServeOptions()))
    with requests.admitted("background"):
        assert await asyncio.ensure_future(whose())
        assert not await apart(whose())
    assert not current().stands_back()


@pytest.mark.one_in(2)
async def test_who_makes_room_for_a_background_request_does_not_stand_back(
    open_tight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_tight() as rig:
        residency, asked = rig.service._parts.sessions.residency, []
        put_away = residency.putting_away.put_away

        async def watched(*args: Any, **how: Any) -> Any:
            asked.append(current().stands_back())
            return await put_away(*args, **how)

        monkeypatch.setattr(residency.putting_away, "put_away", watched)
        await rig.write("b", CHUNK, priority="background")
        assert asked == [False]
        assert not rig.is_awake("a")


async def test_a_background_request_that_loads_what_a_normal_one_needs_stands_back_no_more(rig: Rigged) -> None:
    for name in "ab":
        await rig.asleep(name, tokens_of(1, 50))
    await rig.service.unload_model(model="tiny")
    loading, gate = rig.service._parts.models.loading._loader, asyncio.Event()
    estimate = loading.estimate

    async def held(*args: Any) -> int:
        await gate.wait()
        return int(await estimate(*args))

    loading.estimate = held
    place = rig.service._parts.models.shelf.place("tiny")
    place.facts = None  # so that it has to be looked at
    first = asyncio.ensure_future(writing(rig, "a", 1, priority="background"))
    await until(lambda: bool(place.holders))
    assert place.holders[0].request.stands_back()
    second = asyncio.ensure_future(writing(rig, "b", 1))
    await until(lambda: len(place.holders) == 2)
    assert not place.holders[0].request.stands_back()
    gate.set()
    await asyncio.gather(first, second)


# --- memory


@pytest.fixture
def open_tight(open_rig: Any, weights: int) -> Callable[..., Any]:
    """A service with memory for one session that writes."""

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[Rigged]:
        async with open_rig(memory_budget=weights + most(50) + CHUNK * ROW, **options) as rig:
            for at, name in enumerate("abc"):
                await rig.asleep(name, tokens_of(at, 50))
            await rig.wake("a")
            yield rig

    return opened


async def in_order(rig: Rigged) -> list[str]:
    """In which order a background request and a normal one that came later get the memory that both wait for."""
    ended: list[str] = []

    async def write(name: str, priority: str) -> None:
        await rig.write(name, 3, priority=priority)
        ended.append(name)

    tasks = []
    async with held_up(rig, "a"):
        for at, (name, priority) in enumerate((("b", "background"), ("c", "normal")), start=1):
            tasks.append(asyncio.ensure_future(write(name, priority)))
            await until(lambda at=at: rig.service._parts.models.memory.info().waiting == at)  # type: ignore[misc]
    await asyncio.gather(*tasks)
    return ended


@pytest.mark.one_in(2)
async def test_memory_goes_to_normal_requests_first(open_tight: Any) -> None:
    async with open_tight() as rig:
        assert await in_order(rig) == ["c", "b"]
        assert rig.service._parts.models.memory.info().reserved_bytes == 0


@pytest.mark.one_in(2)
async def test_memory_goes_by_the_order_of_coming_to_who_has_stood_back_for_long(
    open_tight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_STOOD_BACK_S", 0.0)
    async with open_tight() as rig:
        assert await in_order(rig) == ["b", "c"]


@pytest.mark.one_in(2)
async def test_a_wait_for_memory_counts_as_standing_back_from_when_somebody_is_put_before(open_tight: Any) -> None:
    async with open_tight() as rig:
        claims: list[Any] = rig.service._parts.models.memory.line.waiting
        async with held_up(rig, "a"):
            tasks = [asyncio.ensure_future(rig.write("b", 3, priority="background"))]
            await until(lambda: len(claims) == 1)
            (behind,) = claims
            assert behind.passed_at is None, "nobody is before it"
            tasks.append(asyncio.ensure_future(rig.write("c", 3)))
            await until(lambda: len(claims) == 2)
            assert claims[1] is behind
            assert behind.passed_at is not None
            assert behind.stands_back(behind.passed_at + MOST_STOOD_BACK_S - 1)
            assert not behind.stands_back(behind.passed_at + MOST_STOOD_BACK_S)
        await asyncio.gather(*tasks)
        assert behind.request.stood_back_s > 0


@pytest.mark.one_in(2)
async def test_who_has_the_memory_that_a_normal_request_waits_for_stands_back_no_more(open_tight: Any) -> None:
    async with open_tight() as rig:
        held = []
        async with held_up(rig, "a", priority="background"):
            held += [
                request
                for request, _ in rig.service._parts.sessions.residency.turns._lines[
                    rig.service._parts.sessions.resolve("a")
                ][1]
            ]
            assert held[0].stands_back()
            waiting = asyncio.ensure_future(rig.write("b", 3))
            await until(lambda: rig.service._parts.models.memory.info().waiting == 1)
            assert not held[0].stands_back()
        await waiting


# --- how many may wait


@pytest.mark.one_in(2)
async def test_half_of_those_who_may_wait_are_normal_ones_whoever_comes_first(open_rig: Any) -> None:
    async with open_rig(max_waiting=6) as rig:
        await rig.read_each("ab", tokens_of(1, 50))
        async with held_up(rig, "a"):
            waiting = [asyncio.ensure_future(writing(rig, "a", 1, priority="background")) for _ in range(3)]
            await until(lambda: rig.service._parts.queue.info().waiting == 3)
            assert (await rig.service.status()).queue.background == 3
            with pytest.raises(EngineBusy) as refusal:
                await writing(rig, "b", 1, priority="background")
            assert refusal.value.details == {"waiting": 3, "limit": 3}
            waiting += [asyncio.ensure_future(writing(rig, "a", 1)) for _ in range(3)]
            await until(lambda: rig.service._parts.queue.info().waiting == 6)
            with pytest.raises(EngineBusy) as refusal:
                await writing(rig, "b", 1)
            assert refusal.value.details == {"waiting": 6, "limit": 6}
        await asyncio.gather(*waiting)


@pytest.mark.one_in(2)
async def test_one_too_many_is_told_so_with_the_sizes_and_nothing_happens_qx18(open_rig: Any) -> None:
    async with open_rig(max_waiting=2) as rig:
        await rig.read_each("ab", tokens_of(1, 256))
        await rig.sleep("b")
        async with held_up(rig, "a"):  # the first of two may be in the background
            queue = (await rig.service.status()).queue
            assert (queue.waiting, queue.background, queue.limit) == (0, 0, 2), "one is served, and waits for nobody"
            waiting = [asyncio.ensure_future(writing(rig, "a", 1, priority=each)) for each in ("background", "normal")]
            await until(lambda: rig.service._parts.queue.info().waiting == 2)
            assert (await rig.service.status()).queue.waiting == 2
            for refused in (
                rig.service.create("new"),
                writing(rig, "b", 1),
                writing(rig, "nobody", 1),
                reading(rig, "b", 10),
                rig.service.chat("b", message="hi", max_tokens=1),
                rig.wake("b"),
                rig.service.fork("b", name="fork"),
                rig.service.fold("b", name="fold", summary="s"),
                rig.service.warm(sessions=["b"]),
                rig.service.load_model(model="tiny"),
            ):
                with pytest.raises(EngineBusy) as refusal:
                    await refused
                assert refusal.value.details == {"waiting": 2, "limit": 2}
            assert not rig.is_awake("b")
            assert rig.service._parts.models.memory.info().reserved_bytes > 0, "of the one that is served"
            for name in ("new", "fork", "fold"):
                with pytest.raises(SessionNotFound):
                    await rig.service.show(name)
            await rig.service.list_sessions()
            assert (await rig.service.show("b")).info.token_count == 256, "who looks, or sleeps, is not counted"
            await rig.sleep("b")
        await asyncio.gather(*waiting)
        assert rig.service._parts.models.memory.info().reserved_bytes == 0
        assert rig.service._parts.queue.info().waiting == 0
        assert len(rig.live("a").state.tokens) == 256 + CHUNK + 2


@pytest.mark.one_in(4)
async def test_who_was_served_and_waits_again_counts_again(open_rig: Any, weights: int) -> None:
    """For memory behind its wake, and for the turn of a second session."""
    async with open_rig(memory_budget=weights + 1000 * ROW + 3 * LOGITS) as rig:
        for at, name in enumerate("abc"):
            await rig.asleep(name, tokens_of(at, 50))
        memory = rig.service._parts.models.memory
        with memory.apart(-1) as somebody:
            assert memory.take_free(somebody, 500 * ROW)
            growing = asyncio.ensure_future(writing(rig, "b", 600))
            await until(lambda: memory.info().waiting == 1)
            assert rig.is_awake("b")
            assert rig.service._parts.queue.info().waiting == 1
        await growing
    async with open_rig() as rig:
        b = rig.service._parts.sessions.resolve("b")
        async with rig.service._parts.sessions.residency.turn(b):
            warming = asyncio.ensure_future(rig.service.warm(sessions=["a", "b"]))
            await until(lambda: rig.service._parts.sessions.residency.turns.users(b) == 2)
            assert rig.service._parts.queue.info().waiting == 1
        await warming


async def test_who_gives_up_waiting_is_counted_no_more(open_rig: Any) -> None:
    async with open_rig(max_waiting=1) as rig:
        await rig.read("a", tokens_of(1, 50))
        async with held_up(rig, "a"):
            for _ in range(2):
                waiting = asyncio.ensure_future(writing(rig, "a", 1))
                await until(lambda: rig.service._parts.queue.info().waiting == 1)
                waiting.cancel()
                await asyncio.wait([waiting])
                assert rig.service._parts.queue.info().waiting == 0


async def test_a_crowd_that_comes_at_once_is_bounded_too(open_rig: Any) -> None:
    """Those that are about to wait count as those that do: no request passes because the others have not begun yet."""
    async with open_rig(max_waiting=3) as rig:
        for at in range(8):
            await rig.read(f"s{at}", tokens_of(at, 40))
        gate = Gate()
        holding = asyncio.ensure_future(rig.service._parts.models.engine.call(gate.pass_through))
        await gate.reached()
        asking = [asyncio.ensure_future(writing(rig, f"s{at}", 2, text="x")) for at in range(8)]
        await until(lambda: sum(each.done() for each in asking) == 5)
        gate.open()
        found = await asyncio.gather(*asking, return_exceptions=True)
        await holding
        refused = [each for each in found if isinstance(each, EngineBusy)]
        assert len(refused) == 5
        assert [len(rig.live(f"s{at}").state.tokens) for at in range(8)] == [43] * 3 + [40] * 5


async def test_pieces_that_wait_for_the_engine_count_and_streams_do_not(open_rig: Any) -> None:
    async with open_rig(batch=4) as rig:
        await rig.read_own(NAMES, 60)
        rig.network.reset()
        gate = rig.network.hold_at(30)
        async with begun_together(rig, [writing(rig, name, 100) for name in NAMES]) as tasks:
            assert rig.service._parts.queue.info().waiting == 4
        await gate.reached()
        assert rig.network.rows[-1] == 4
        assert rig.service._parts.queue.info().waiting == 0
        new = [asyncio.ensure_future(rig.service.create(name)) for name in ("e", "f", "g")]
        await until(lambda: rig.service._parts.queue.info().waiting == 3)
        gate.open()
        await asyncio.gather(*tasks, *new)
        assert rig.service._parts.queue.info().waiting == 0


@pytest.mark.usefixtures("short_calls")
async def test_who_stands_back_waits_and_so_does_a_text_while_another_is_read(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 60))
    for name in "bc":
        await rig.service.create(name)
    stream, gate = await held_at(rig, 5, writing(rig, "a", 30, priority="background"))
    assert rig.service._parts.queue.info().waiting == 0
    reads = [asyncio.ensure_future(reading(rig, name, 3 * CHUNK)) for name in "bc"]
    await until(lambda: rig.service._parts.models.engine._inbox.qsize() == 2)
    second = rig.network.hold_at(3)  # the second chunk of the first of them
    gate.open()
    await second.reached()
    info = rig.service._parts.queue.info()
    assert (info.waiting, info.background) == (2, 1), "the stream, and the text that has been begun as well"
    second.open()
    await asyncio.gather(stream, *reads)


def test_a_request_counts_as_normal_once_it_has_stood_back_long_enough() -> None:
    request = Request("background")
    assert request.stands_back()
    assert not request.stands_back(MOST_STOOD_BACK_S)
    request.stood_back_s = MOST_STOOD_BACK_S - 1
    assert request.stands_back(0.5)
    assert not request.stands_back(1.0)
    assert not Request().stands_back()
    other = Request("background")
    other.lift()
    assert not other.stands_back()
